"""How the daemon starts and stops under a service manager: readiness, watchdog, inherited sockets, signals.

systemd: the datagram protocol of sd_notify(3) and the descriptors of sd_listen_fds(3). launchd: sockets by name through
`launch_activate_socket(3)`. Variables that the manager set for this process alone are taken out of the environment as
they are read, so that no child believes they are meant for it. Inherited sockets belong to the manager: whoever gets
them must not unlink their path. Imports the standard library and kvd.ops.errors only.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager

from kvd.ops.errors import InheritedSocketUnusable

__all__ = ["Notifier", "StopAction", "StopPlan", "handle_stop_signals", "inherited_sockets"]

REPEAT_S = 0.5
"""Signals this soon after the first are repeats of it."""
_FIRST_FD = 3
"""SD_LISTEN_FDS_START."""


class Notifier:
    """Tells systemd how the daemon fares; does nothing where no manager listens. Thread safe, never raises.

    Args:
        environ: `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` are taken out of it.
    """

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        address = environ.pop("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        ours = not pid or pid == str(os.getpid())
        self._watchdog_s = int(usec) / 1e6 if ours and usec.isdigit() and int(usec) > 0 else None

    @property
    def watchdog_interval_s(self) -> float | None:
        """Seconds between two `watchdog` calls, half of what the manager allows; None without a watchdog."""
        return None if self._watchdog_s is None else self._watchdog_s / 2

    def ready(self, status: str = "") -> bool:
        """Say that requests are served now."""
        return self._send("READY=1", status)

    def stopping(self, status: str = "") -> bool:
        """Say that the daemon is on its way down."""
        return self._send("STOPPING=1", status)

    def watchdog(self) -> bool:
        """Say that the engine still moves. Call it from proof of work, never from a bare timer."""
        return self._send("WATCHDOG=1")

    def status(self, text: str) -> bool:
        """Show a line in the manager's status."""
        return self._send("", text)

    def _send(self, state: str, status: str = "") -> bool:
        """Send one datagram; return whether somebody took it."""
        if not self._address:
            return False
        lines = [state] if state else []
        if status:
            lines.append("STATUS=" + " ".join(status.splitlines()))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.setblocking(False)
                out.sendto("\n".join(lines).encode(), self._address)
        except OSError:  # the manager is gone or its queue full: not our reason to fail
            return False
        return True


def inherited_sockets(
    name: str = "kvd",
    environ: MutableMapping[str, str] | None = None,
    *,
    activate: Callable[[str], list[int]] | None = None,
) -> list[socket.socket]:
    """Listening Unix sockets that systemd or launchd opened for us; empty when started by hand.

    Args:
        name: systemd's `FileDescriptorName=` and the key in launchd's `Sockets`. Unnamed descriptors of systemd count.
        environ: `LISTEN_PID`, `LISTEN_FDS` and `LISTEN_FDNAMES` are taken out of it.
        activate: asks launchd for descriptors; the real one by default, on macOS.

    Returns:
        The sockets, not inherited by children, not blocking. They must not be unlinked.

    Raises:
        InheritedSocketUnusable: a descriptor is no listening Unix stream socket. All are closed then.
    """
    fds = _systemd_fds(name, os.environ if environ is None else environ)
    if not fds and (activate is not None or sys.platform == "darwin"):
        fds = (activate or _launchd_fds)(name)
    sockets: list[socket.socket] = []
    try:
        for fd in fds:
            sockets.append(_adopt(fd))
    except InheritedSocketUnusable:
        for adopted in sockets:
            adopted.close()
        for fd in fds[len(sockets) :]:
            os.close(fd)
        raise
    return sockets


def _systemd_fds(name: str, environ: MutableMapping[str, str]) -> list[int]:
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    fds = range(_FIRST_FD, _FIRST_FD + int(count))
    # A socket unit without FileDescriptorName= passes its own name; then, and without names, every one is ours.
    named = [fd for fd, given in zip(fds, names, strict=False) if given == name]
    chosen = named or list(fds)
    for fd in set(fds) - set(chosen):
        os.set_inheritable(fd, False)
    return chosen


def _launchd_fds(name: str) -> list[int]:
    """Descriptors of a socket in our launchd job; empty when launchd did not start us or knows no such name."""
    library = ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    fds = ctypes.POINTER(ctypes.c_int)()
    count = ctypes.c_size_t(0)
    if library.launch_activate_socket(name.encode(), ctypes.byref(fds), ctypes.byref(count)) != 0:
        return []
    try:
        return [fds[index] for index in range(count.value)]
    finally:
        library.free(fds)


def _adopt(fd: int) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        adopted = socket.socket(fileno=fd)
    except OSError as error:
        raise InheritedSocketUnusable(f"inherited descriptor {fd} is no socket: {error}", fd=fd) from error
    listening = adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if adopted.family != socket.AF_UNIX or adopted.type != socket.SOCK_STREAM or not listening:
        adopted.detach()
        raise InheritedSocketUnusable(
            f"inherited descriptor {fd} is no listening Unix stream socket: use ListenStream=/path in the socket unit",
            fd=fd,
        )
    adopted.setblocking(False)
    return adopted


class StopAction(enum.Enum):
    """What a stop signal asks for."""

    DRAIN = "drain"
    FORCE = "force"
    IGNORE = "ignore"
    """The same wish once more."""


class StopPlan:
    """The first SIGTERM or SIGINT drains, each further one forces. Owned by the event loop; `on_signal` mutates it.

    One wish often comes as several signals (`timeout` signals its child and then the group, a terminal a group with
    wrappers that pass it on), so what follows the first within `REPEAT_S` is the same wish.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_s = 0.0
        self._signals: list[int] = []

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return bool(self._signals)

    def on_signal(self, signum: int) -> StopAction:
        """What to do about a signal that has arrived."""
        if not self._signals:
            self._first_s = self._clock()
        elif self._clock() - self._first_s < REPEAT_S:
            return StopAction.IGNORE
        self._signals.append(signum)
        return StopAction.DRAIN if len(self._signals) == 1 else StopAction.FORCE

    def describe(self) -> str:
        """The signals that counted, for the log: `SIGTERM, SIGINT`."""
        return ", ".join(signal.Signals(signum).name for signum in self._signals)


@contextmanager
def handle_stop_signals(
    act: Callable[[StopAction], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[StopPlan]:
    """Call `act` on the running event loop for each SIGTERM and SIGINT; the former handlers come back afterwards.

    Args:
        act: gets DRAIN for the first signal and FORCE for each further one that is no repeat.
        clock: monotonic seconds.

    Raises:
        RuntimeError: no event loop runs, or this is not the main thread.
    """
    loop = asyncio.get_running_loop()
    plan = StopPlan(clock)
    former = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}

    def arrived(signum: int) -> None:
        action = plan.on_signal(signum)
        if action is not StopAction.IGNORE:
            act(action)

    for signum in former:
        loop.add_signal_handler(signum, arrived, signum)
    try:
        yield plan
    finally:
        for signum, handler in former.items():
            loop.remove_signal_handler(signum)
            # None: a handler that was not installed from Python, which signal.signal cannot put back.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
