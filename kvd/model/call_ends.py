"""Where a call ends: at its end marker, but not at one that the call's own arguments hold.

Theory of operation. Arguments are any text, that of the end marker included: an agent that writes about tool calls
calls with it. In JSON such a marker is inside of a string, which a scan for quotes tells; in forms with tags the end
marker follows the tag that closes the call. Where the marker is a control token nothing needs telling.

A call that is broken (a quote too few) has no such end. Then it ends at the first marker after all, and so do the calls
behind it, which keeps the work linear whatever a model writes. Broken is what goes on to the end of the answer, or has
a control character in a JSON string, which no JSON has.

Pure. May import this package.
"""

from __future__ import annotations

import re
from typing import Final

from kvd.model.tool_calls import JSON_DIALECTS

_CLOSING_TAGS: Final = {
    "glm47": ("<arg_key>", "</arg_value>"),
    "longcat": ("<longcat_arg_key>", "</longcat_arg_value>"),
    "minimax_m2": ("<invoke ", "</invoke>"),
    "muse_spark": ("<atem:invoke", "</atem:invoke>"),
    "qwen3_coder": ("<function=", "</function>"),
}
"""By dialect: what has to be closed where it is there, and what closes it right before the end marker."""

_OF_INTEREST: Final = re.compile(r'["\\\x00-\x1f]')
_MAX_SPACE: Final = 64
"""White space between a closing tag and the end marker."""


class CallEnds:
    """Finds the ends of an answer's calls, one after the other, in a text that grows. Owner: the reader of the answer.

    Args:
        dialect: name of the form of calls.
        marker: what ends a call; empty where nothing does.
        is_text: it is written as text; else it ends a call wherever it stands.
    """

    def __init__(self, dialect: str, marker: str, *, is_text: bool) -> None:
        self._marker = marker
        self._tags = _CLOSING_TAGS.get(dialect) if is_text else None
        self._is_json = is_text and dialect in JSON_DIALECTS
        self.restart()

    def restart(self) -> None:
        """Another call begins."""
        self._first = -1
        self._seen = 0
        self._scanned = 0
        self._in_string = self._is_broken = self._is_opened = False

    def find(self, body: str) -> int:
        """Where the end marker begins; -1 while there is none.

        Args:
            body: all behind the start marker so far; never less than before, until `restart`.
        """
        while self._marker and (at := body.find(self._marker, self._seen)) >= 0:
            if self._ends(body, at):
                return at
            if self._first < 0:
                self._first = at
            if self._is_broken:
                return self.first()
            self._seen = at + len(self._marker)
        self._seen = max(self._seen, len(body) - len(self._marker) + 1)
        return -1

    def first(self) -> int:
        """The answer is complete, or the call broken: its first marker, -1 for none. Calls behind it end at theirs."""
        if self._first >= 0:
            self._is_json, self._tags = False, None
        return self._first

    def _ends(self, body: str, at: int) -> bool:
        if self._is_json:
            self._scan(body, at)
            return not self._in_string or (self._is_broken and self._first < 0)
        if self._tags is not None:
            opened, closed = self._tags
            self._is_opened = self._is_opened or body.find(opened, 0, at) >= 0  # if not, the call ends here
            return not self._is_opened or body[max(0, at - _MAX_SPACE) : at].rstrip().endswith(closed)
        return True

    def _scan(self, body: str, end: int) -> None:
        """Follow the strings of JSON up to `end`."""
        while not self._is_broken and (found := _OF_INTEREST.search(body, self._scanned, end)) is not None:
            letter = found[0]
            self._scanned = found.end()
            if letter == '"':
                self._in_string = not self._in_string
            elif self._in_string and letter == "\\":
                self._scanned += 1
            elif self._in_string:
                self._is_broken = True
        self._scanned = max(self._scanned, end)
