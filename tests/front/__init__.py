"""Tests of kvd.front over real Unix sockets."""
