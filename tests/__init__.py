"""Tests; the folders mirror the packages. `support/` holds what several of them share."""
