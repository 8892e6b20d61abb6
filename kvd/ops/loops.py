"""Which event loop serves: uvloop's where it is installed, whose turns, reads and writes are C, else asyncio's own.

May import uvloop.
"""

from __future__ import annotations

import asyncio


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop of the kind to serve with here."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


__all__ = ["new_loop"]
