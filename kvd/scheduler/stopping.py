"""Stop strings and half characters: what of the generated tokens may reach the client, and what may stay. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}".encode()


class Decoder(Protocol):
    """Incremental UTF-8 decoding of token ids (`kvd.model.incremental.IncrementalDecoder`)."""

    @property
    def pending_bytes(self) -> int:
        """Bytes held back because their character is not finished."""

    def push(self, token_id: int) -> bytes:
        """Whole characters that became certain with this token."""

    def flush(self) -> bytes:
        """An unfinished character as U+FFFD; nothing otherwise."""


class Codec(Protocol):
    """The part of the text codec needed here."""

    def decoder(self) -> Decoder:
        """A fresh incremental decoder."""


class StopWatch:
    """Feeds on generated tokens, gives out text that is certain, stops at the first stop string.

    Text that could be the beginning of a stop string is held back until it is not. Half a character never comes out.

    Args:
        codec: turns ids into text.
        stop: stop strings; none of them is ever given out.

    Attributes:
        stopped: a stop string is complete.
        stop_string: the one; of several that begin at the same character the first that was given.
    """

    def __init__(self, codec: Codec, stop: Sequence[str]) -> None:
        self._decoder = codec.decoder()
        self._stop = tuple(stop)
        self._held = ""
        self._given = bytearray()
        self._fed_bytes = 0
        self._fed = 0
        # of tokens not known to stay: (tokens and bytes of text up to here, whether a character is unfinished)
        self._borders: deque[tuple[int, int, bool]] = deque()
        self._kept = 0
        self.stopped = False
        self.stop_string: str | None = None

    def feed(self, token: int) -> str:
        """Text to give out now. Sets `stopped` when a stop string is complete."""
        piece = self._decoder.push(token)
        self._held += piece.decode()
        self._fed += 1
        self._fed_bytes += len(piece)
        self._borders.append((self._fed, self._fed_bytes, self._decoder.pending_bytes > 0))
        hits = [(position, stop) for stop in self._stop if (position := self._held.find(stop)) >= 0]
        if hits:
            self.stopped = True
            position, self.stop_string = min(hits, key=lambda hit: hit[0])
            return self._give(position)
        return self._give(len(self._held) - self._possible_stop_characters())

    def flush(self) -> str:
        """Generation ended without a stop string: what was held back is text (half characters are dropped)."""
        return self._give(len(self._held))

    def _give(self, characters: int) -> str:
        text, self._held = self._held[:characters], self._held[characters:]
        self._given += text.encode()
        self._settle()
        return text

    def _possible_stop_characters(self) -> int:
        """Longest suffix of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if stop.startswith(self._held[-length:]):
                    longest = length
                    break
        return longest

    @property
    def held_characters(self) -> int:
        """Characters that are certain and not given out, since they may begin a stop string."""
        return len(self._held)

    @property
    def kept_tokens(self) -> int:
        """How many of the tokens fed stay: the most whose whole text was given out. It never gets less.

        An unfinished character at the end counts as the U+FFFD it would surface as, so it stays only if that was given
        out (the next token had shown that it is none). What stays is then exactly what the client can send back.
        """
        return self._kept

    def _settle(self) -> None:
        """See how many tokens stay now. What was given out is the beginning of the text of all, so lengths decide."""
        settled = 0
        for number, (count, end, is_unfinished) in enumerate(self._borders, 1):
            if end > len(self._given):
                break
            if not is_unfinished or self._given.startswith(REPLACEMENT, end):
                self._kept, settled = count, number
        for _ in range(settled):
            self._borders.popleft()
