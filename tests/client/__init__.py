"""Tests of kvd_client: the wire, both clients and the commands."""
