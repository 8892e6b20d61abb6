"""Page maps as bytes: one code a page, cheap enough to be made of every page twice a second.

A code is the number of the page's state in `STATES`, with a flag each for what else a map shows. The page table keeps
state and sharing of each page as its `code` while it changes them, so a map of ten thousand pages takes well under a
millisecond; a picture per page (`kvd.vm.views`) costs fifty times as much.

May import kvd.vm.address_space and kvd.vm.page.
"""

from __future__ import annotations

import re
from typing import Final

from kvd.vm.address_space import AddressSpace, Segment
from kvd.vm.page import Page, PageState, SpaceUse

STATES: Final = tuple(str(state) for state in PageState if state is not PageState.RELEASED)
"""States a mapped page can have; a code's lowest four bits are an index here."""

SHARED: Final = 16
"""Other address spaces map the page, too."""
BEHIND_WINDOW: Final = 32
"""The next step cannot see it."""
PINNED: Final = 64
"""A pin holds it."""

STATE_BITS: Final = 15

_CODES: Final = {state: code for code, state in enumerate(STATES)} | {str(PageState.RELEASED): 0}
_BEHIND: Final = bytes(code | BEHIND_WINDOW for code in range(256))
_PINNED: Final = bytes(code | PINNED for code in range(256))
_RUN: Final = re.compile(rb"(.)\1*", re.DOTALL)


def page_code(page: Page) -> int:
    """State and sharing of a page, whoever looks."""
    # the hash of an enum member is Python's own code, that of its value is not
    return _CODES[page.state._value_] | (len(page.users) > 1) << 4


def space_codes(space: AddressSpace) -> tuple[bytes, ...]:
    """A code for each page that holds tokens, per cache group, in order of position; an open page is last."""
    return tuple(_segment_codes(segment, space.use) for segment in space.segments)


def _segment_codes(segment: Segment, use: SpaceUse) -> bytes:
    codes = bytes([page.code for page in segment.sealed])
    if segment.tail is not None:
        codes += bytes([segment.tail.code])
    seen = codes[segment.first_page :]
    if use.pinned:
        if use.unpinned_pages:
            held = (page.page_id not in use.unpinned_pages for page in segment.needed())
            seen = bytes(code | PINNED * is_held for code, is_held in zip(seen, held, strict=True))
        else:
            seen = seen.translate(_PINNED)
    return codes[: segment.first_page].translate(_BEHIND) + seen


def runs(codes: bytes) -> list[int]:
    """Codes by runs: `[code, count, code, count, ...]`."""
    found: list[int] = []
    for run in _RUN.finditer(codes):
        found += (codes[run.start()], run.end() - run.start())
    return found
