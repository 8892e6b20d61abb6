"""A terminal as `kvd-client top` uses it: the alternate screen, keys without Enter, and everything put back at the end.

POSIX only (termios, select), nothing of one system. What is restored is restored once, whatever ends the program:
leaving the `with` block, an exception, SIGTERM and SIGHUP (which are made exceptions here). Suspending (Ctrl-Z) gives
the shell its terminal back, and takes it again afterwards.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import termios
import tty
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Final, Self

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE: Final = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"

_KEYS: Final[Mapping[bytes, str]] = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1bOH": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1bOF": "end",
    b"\x1b[4~": "end",
}
_READ_BYTES: Final = 1024


class Terminated(BaseException):
    """SIGTERM or SIGHUP came.

    Args:
        signum: which.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def parse_keys(data: bytes) -> list[str]:
    """Names of keys: `up` and the like, or the character itself; sequences that are not known are left out."""
    keys = []
    while data:
        if data[:1] != b"\x1b":
            keys.append(data[:1].decode("latin-1"))
            data = data[1:]
            continue
        known = next((each for each in _KEYS if data.startswith(each)), None)
        length = len(known) if known is not None else _sequence_bytes(data)
        if known is not None:
            keys.append(_KEYS[known])
        data = data[length:]
    return keys


def _sequence_bytes(data: bytes) -> int:
    """Length of the escape sequence that data begin with."""
    if data[1:2] not in (b"[", b"O"):
        return 1 + bool(data[1:2])
    for at in range(2, len(data)):
        if 0x40 <= data[at] <= 0x7E:
            return at + 1
    return len(data)


class Screen:
    """Owner: the main thread, but for `wake`.

    Args:
        keys_fd: the terminal that keys come from.
        out_fd: the terminal that is written to.
    """

    def __init__(self, keys_fd: int, out_fd: int) -> None:
        self._keys_fd = keys_fd
        self._out_fd = out_fd
        self._saved: list[object] | None = None
        self._handlers: dict[int, object] = {}
        self._shown: list[str] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def __enter__(self) -> Self:
        self._handle(signal.SIGTERM, self._terminated)
        self._handle(signal.SIGHUP, self._terminated)
        self._handle(signal.SIGWINCH, self._resized)
        self._handle(signal.SIGTSTP, self._suspended)
        try:
            self._take()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._give_back()
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        self._handlers.clear()
        ends = self._wake_read, self._wake_write
        self._wake_write = -1  # before the number can be somebody else's
        for each in ends:
            os.close(each)

    # ---- what the program uses ----

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        try:
            found = os.get_terminal_size(self._out_fd)
        except OSError:
            found = shutil.get_terminal_size()
        return max(1, found.columns), max(1, found.lines)

    def draw(self, lines: Sequence[str]) -> None:
        """Show lines from the top on; only those that changed are written."""
        parts = []
        for row, line in enumerate(lines):
            if row >= len(self._shown) or self._shown[row] != line:
                parts.append(f"\x1b[{row + 1};1H{line}\x1b[K")
        if len(lines) < len(self._shown):
            parts.append(f"\x1b[{len(lines) + 1};1H\x1b[J")
        self._shown = list(lines)
        if parts:
            self._write("".join(parts))

    def wait(self, timeout_s: float) -> list[str]:
        """Keys that were pressed, waiting for one, for `wake`, a new size or the end of the time."""
        ready, _, _ = select.select([self._keys_fd, self._wake_read], [], [], max(0.0, timeout_s))
        if self._wake_read in ready:
            with suppress(BlockingIOError):
                while os.read(self._wake_read, _READ_BYTES):
                    pass
        if self._keys_fd not in ready:
            return []
        data = os.read(self._keys_fd, _READ_BYTES)
        return parse_keys(data) if data else ["q"]  # the terminal is gone

    def wake(self) -> None:
        """Let `wait` return; from any thread."""
        with suppress(OSError):  # full: it will return anyway; closed: nobody waits any more
            os.write(self._wake_write, b"!")

    # ---- the terminal ----

    def _take(self) -> None:
        self._saved = termios.tcgetattr(self._keys_fd)
        tty.setcbreak(self._keys_fd)
        self._shown = []
        self._write(_ENTER)

    def _give_back(self) -> None:
        if self._saved is None:
            return
        saved, self._saved = self._saved, None
        with suppress(OSError, termios.error):  # a terminal that is gone needs nothing
            self._write(_LEAVE)
        with suppress(OSError, termios.error):
            termios.tcsetattr(self._keys_fd, termios.TCSADRAIN, saved)  # type: ignore[arg-type]

    def _write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._out_fd, data) :]

    # ---- signals ----

    def _handle(self, signum: int, handler: object) -> None:
        self._handlers[signum] = signal.signal(signum, handler)  # type: ignore[arg-type]

    def _terminated(self, signum: int, _frame: FrameType | None) -> None:
        raise Terminated(signum)

    def _resized(self, _signum: int, _frame: FrameType | None) -> None:
        self._shown = []
        self.wake()

    def _suspended(self, signum: int, _frame: FrameType | None) -> None:
        self._give_back()
        signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
        os.kill(os.getpid(), signum)  # stops here, and goes on here
        signal.signal(signum, self._suspended)
        self._take()
        self.wake()


__all__ = ["Screen", "Terminated", "parse_keys"]
