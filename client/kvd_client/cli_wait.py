"""What a command says on stderr while nothing has come yet: that it waits, and how much of a prompt is computed.

Nothing is said in the first seconds, as most calls need no more. A terminal gets one line that is written anew and
taken away; elsewhere a line at a time, seconds apart.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, Self, TextIO

from kvd_client.stream import FirstToken, Prefill, Queued, StreamEvent, Text

DELAY_S = 2.0
"""Nothing is said before."""
BETWEEN_S = 10.0
"""Between two lines that stay."""


class Timer(Protocol):
    """What of `threading.Timer` is used."""

    def start(self) -> None:
        """Begin to wait."""

    def cancel(self) -> None:
        """Do not call."""


def make_timer(delay_s: float, call: Callable[[], None]) -> Timer:
    """A timer that no exit waits for."""
    timer = threading.Timer(delay_s, call)
    timer.daemon = True
    return timer


class Waiting:
    """The line about one call, until `end`. Owner: the command's thread; only the first line comes from a timer's.

    Args:
        out: where it is written; None: nowhere.
        text: what is said before there is news.
        timer: makes the timer of the first line.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        out: TextIO | None,
        text: str = "waiting for the daemon",
        *,
        timer: Callable[[float, Callable[[], None]], Timer] = make_timer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._clock = clock
        self._lock = threading.Lock()
        self._text = text
        self._last_s: float | None = None
        self._ended = out is None
        self._on_terminal = out is not None and out.isatty()
        self._timer = timer(DELAY_S, self._begin)
        if not self._ended:
            self._timer.start()

    def see(self, event: StreamEvent) -> None:
        """Take news from a stream: text ends the waiting, the rest changes the line."""
        if isinstance(event, FirstToken | Text):
            self.end()
        elif isinstance(event, Queued):
            before = f" for {event.position} requests before it" if event.position > 1 else " for another request"
            self._say("waiting" + (before if event.position else " for the engine"))
        elif isinstance(event, Prefill):
            self._say(f"computing {event.done_tokens} of {event.total_tokens} tokens")

    def end(self) -> None:
        """Say no more; a terminal's line is taken away."""
        self._timer.cancel()
        with self._lock:
            if self._out is not None and not self._ended and self._on_terminal and self._last_s is not None:
                self._write("\r\x1b[K")
            self._ended = True

    def _begin(self) -> None:
        with self._lock:
            self._show()

    def _say(self, text: str) -> None:
        with self._lock:
            self._text = text
            due_s = 0.0 if self._on_terminal else BETWEEN_S
            if self._last_s is not None and self._clock() - self._last_s >= due_s:
                self._show()

    def _show(self) -> None:
        if not self._ended:
            self._last_s = self._clock()
            self._write(f"\r\x1b[K{self._text}" if self._on_terminal else f"kvd-client: {self._text}\n")

    def _write(self, text: str) -> None:
        assert self._out is not None
        self._out.write(text)
        self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()


def waiting(text: str = "waiting for the daemon", *, as_json: bool) -> Waiting:
    """The line for a command; a program that reads JSON gets it only where somebody looks at stderr."""
    return Waiting(None if as_json and not sys.stderr.isatty() else sys.stderr, text)
