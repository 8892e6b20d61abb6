"""From generated token ids to text, a token at a time, with the bytes each token stands for.

Theory of operation. A token of a byte-level vocabulary is a run of bytes that may begin or end inside a character.
The decoder holds the bytes of an unfinished character back until they are complete or can no longer become one.
Complete characters count each byte for the token it came from. An invalid sequence (the maximal subpart of Unicode's
"U+FFFD substitution", which is also Python's `errors="replace"`) becomes one U+FFFD, three bytes, counted for the token
that holds its first byte; its other bytes count nothing. Control tokens surface as nothing and end an unfinished
character, so no character ever spans a message border. Hence for any ids: sum(lengths) == len(text).

May import nothing of kvd.
"""

from __future__ import annotations

from typing import Final, Protocol

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}".encode()


class Surfaces(Protocol):
    """What the decoder asks of a vocabulary."""

    def is_control(self, token_id: int, /) -> bool:
        """Whether the token surfaces as nothing."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The raw bytes of the token."""


def _second_byte_range(lead: int) -> tuple[int, int, int]:
    """(bytes that follow `lead`, lowest and highest legal second byte); (0, 0, 0) for a byte that leads nothing.

    Source: The Unicode Standard, table 3-7, "Well-Formed UTF-8 Byte Sequences".
    """
    if 0xC2 <= lead <= 0xDF:
        return 1, 0x80, 0xBF
    if 0xE0 <= lead <= 0xEF:
        return 2, 0xA0 if lead == 0xE0 else 0x80, 0x9F if lead == 0xED else 0xBF
    if 0xF0 <= lead <= 0xF4:
        return 3, 0x90 if lead == 0xF0 else 0x80, 0x8F if lead == 0xF4 else 0xBF
    return 0, 0, 0


class IncrementalDecoder:
    """Owner: one generation. Only `push` and `flush` change it.

    Attributes:
        lengths: bytes of text per pushed token, final for all tokens before the unfinished character.
    """

    def __init__(self, vocabulary: Surfaces) -> None:
        self._vocabulary = vocabulary
        self._pending: list[tuple[int, int]] = []  # (byte, index of its token) of the unfinished character
        self._missing = 0
        self._low = self._high = 0
        self.lengths: list[int] = []

    @property
    def pending_bytes(self) -> int:
        """Bytes held back because their character is not finished."""
        return len(self._pending)

    def push(self, token_id: int) -> bytes:
        """Add a token; returns the UTF-8 text that became certain (whole characters only, often empty)."""
        owner = len(self.lengths)
        self.lengths.append(0)
        if self._vocabulary.is_control(token_id):
            return self.flush()
        raw = self._vocabulary.token_bytes(token_id)
        if not self._pending and raw.isascii():
            self.lengths[owner] = len(raw)
            return raw
        out = bytearray()
        for byte in raw:
            self._feed(byte, owner, out)
        return bytes(out)

    def flush(self) -> bytes:
        """End the text: an unfinished character becomes U+FFFD. More tokens may follow."""
        out = bytearray()
        self._replace_pending(out)
        return bytes(out)

    def _feed(self, byte: int, owner: int, out: bytearray) -> None:
        if self._pending:
            if self._low <= byte <= self._high:
                self._pending.append((byte, owner))
                self._missing -= 1
                self._low, self._high = 0x80, 0xBF
                if not self._missing:
                    self._emit_pending(out)
                return
            self._replace_pending(out)
        if byte < 0x80:
            out.append(byte)
            self.lengths[owner] += 1
            return
        self._pending.append((byte, owner))
        self._missing, self._low, self._high = _second_byte_range(byte)
        if not self._missing:
            self._replace_pending(out)

    def _emit_pending(self, out: bytearray) -> None:
        for byte, owner in self._pending:
            out.append(byte)
            self.lengths[owner] += 1
        self._pending.clear()

    def _replace_pending(self, out: bytearray) -> None:
        if self._pending:
            out += REPLACEMENT
            self.lengths[self._pending[0][1]] += len(REPLACEMENT)
            self._pending.clear()
