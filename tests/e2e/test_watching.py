"""`kvd-client top` and `events` against a real daemon, `top` in a terminal of its own, with keys."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.daemon import Daemon, daemon_environment, eventually

pytestmark = pytest.mark.daemon

WAIT_S = 30.0


def words(name: str, tokens: int) -> str:
    """A text of an agent's own, of so many tokens and a few."""
    return f"{name}. " + "Hello world. " * (tokens // 8)


def command(daemon: Daemon, *arguments: str) -> list[str]:
    """`kvd-client` as a user would type it."""
    return [sys.executable, "-m", "kvd_client", "--socket", str(daemon.socket), *arguments]


class Terminal:
    """A program on a pseudo terminal. Everything it wrote is kept; waiting is bounded."""

    def __init__(self, argv: list[str], columns: int, rows: int) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self._slave)
        environment = daemon_environment(TERM="xterm-256color", NO_COLOR="1")
        self.process = subprocess.Popen(
            argv, stdin=self._slave, stdout=self._slave, stderr=self._slave, env=environment, start_new_session=True
        )
        self.written = ""

    def until(self, text: str, *, after: int = 0) -> int:
        """Read until the program has written `text`; returns where that ends."""
        deadline_s = time.monotonic() + WAIT_S
        while (at := self.written.find(text, after)) < 0:
            assert time.monotonic() < deadline_s, f"no {text!r} in {self.written[-2000:]!r}"
            self._read(0.05)
        return at + len(text)

    def press(self, keys: str) -> int:
        """Type; returns how much was written before."""
        before = len(self.written)
        os.write(self._master, keys.encode())
        return before

    def ended(self) -> int:
        """Read to the end; the exit code."""
        deadline_s = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, f"it does not end: {self.written[-2000:]!r}"
            self._read(0.05)
        self._read(0.0)
        return self.process.returncode

    def modes(self) -> list[object]:
        """The terminal's settings now."""
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        """End the program if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _read(self, wait_s: float) -> None:
        while select.select([self._master], [], [], wait_s)[0]:
            self.written += os.read(self._master, 1 << 16).decode(errors="replace")
            wait_s = 0.0


@contextmanager
def terminal(argv: list[str], columns: int = 110, rows: int = 24) -> Iterator[Terminal]:
    """A program on a pseudo terminal; closed at the end."""
    made = Terminal(argv, columns, rows)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def _hears_ctrl_c() -> Iterator[None]:
    """A run in the background of a shell ignores SIGINT, and children inherit that; for these tests they do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def watched(daemon: Daemon) -> Daemon:
    """A daemon with three agents."""
    for name, tokens in (("ann", 300), ("bea", 600), ("cas", 20)):
        daemon.client.generate(name, words(name, tokens), max_tokens=2)
    return daemon


def test_top_shows_agents_and_takes_keys(watched: Daemon) -> None:
    """Select, sort, pin, evict, help and quit; the terminal is as it was before."""
    with terminal(command(watched, "top", "--interval", "0.2")) as shown:
        for text in ("\x1b[?1049h", "kvd tiny", "3 agents", "ann", "bea", "cas", "q quit"):
            shown.until(text)
        at = shown.press("s")
        at = shown.until("by name", after=at)
        shown.press("\x1b[B")  # from the one selected, whichever that is, down to the last
        shown.press("jj")
        at = shown.press("p")
        at = shown.until("cas pinned", after=at)
        eventually(lambda: watched.client.agent_info("cas").pinned, "cas is pinned")
        at = shown.press("p")
        at = shown.until("cas unpinned", after=at)
        at = shown.press("k")
        at = shown.press("e")
        at = shown.until("bea evicted", after=at)
        assert watched.client.agent_info("bea").resident_bytes == 0
        at = shown.press("h")
        at = shown.until("reverse the order", after=at)
        shown.press("x")
        shown.press("q")
        assert shown.ended() == 0
        assert shown.written.rstrip().endswith("\x1b[?1049l")
        assert shown.modes() == shown.before


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_terminal_is_restored_whatever_ends_top(watched: Daemon, signum: signal.Signals) -> None:
    """Signals, too: the screen, the cursor and the modes are those from before."""
    with terminal(command(watched, "top"), columns=60, rows=12) as shown:
        shown.until("bea")
        shown.process.send_signal(signum)
        assert shown.ended() == (0 if signum == signal.SIGINT else 128 + signum)
        assert "\x1b[?25h" in shown.written
        assert shown.written.rstrip().endswith("\x1b[?1049l")
        assert shown.modes() == shown.before


def test_without_a_terminal_top_prints_one_snapshot(watched: Daemon) -> None:
    """No escape sequence; with --json what the daemon says."""
    result = watched.cli("top")
    assert result.code == 0
    assert "\x1b" not in result.stdout
    assert {line.split()[0] for line in result.stdout.splitlines()[-3:]} == {"ann", "bea", "cas"}
    assert {each["agent"] for each in watched.cli("top", "--json").json["agents"]} == {"ann", "bea", "cas"}


def test_residency_of_one_agent_is_a_map(watched: Daemon) -> None:
    """Shared and pinned pages are marked below, counts are in words."""
    watched.client.fork("bea", "dee", tokens=256)
    watched.client.pin("bea")
    lines = watched.cli("residency", "bea").stdout.splitlines()
    assert any("3 pages, 3 in RAM, 1 shared, 3 pinned" in line for line in lines)
    assert [line.strip() for line in lines if line.strip() in ("s", "ppp")] == ["s", "ppp"]
    watched.client.unpin("bea")
    watched.client.delete("dee")


@pytest.mark.leaks("the module's daemon is another process afterwards")
def test_events_go_on_over_a_restart_and_end_with_ctrl_c(watched: Daemon) -> None:
    """Each is one JSON object; that the daemon was away is one of them; top shows it, too."""
    argv = command(
        watched, "--json", "events", "--since", "0", "--kind", "miss", "--kind", "eviction", "--kind", "draining"
    )
    watched.client.generate("eve", words("eve", 600), max_tokens=2)
    watched.client.evict("eve")
    follower = subprocess.Popen(argv, stdout=subprocess.PIPE, env=daemon_environment(), text=True)
    try:
        assert follower.stdout is not None
        lines = iter(follower.stdout.readline, "")

        def next_of(kind: str) -> dict[str, object]:
            for line in lines:
                event: dict[str, object] = json.loads(line)
                if event["type"] == kind:
                    return event
            raise AssertionError(f"no {kind}")

        assert next_of("subscribed")
        evicted = next_of("eviction")
        while evicted["agent"] != "eve":
            evicted = next_of("eviction")
        assert (evicted["pages"], evicted["reason"]) == (3, "asked")
        with terminal(command(watched, "top", "--interval", "0.2")) as shown:
            shown.until("bea")
            watched.terminate()
            assert next_of("draining")
            assert next_of("away")["reason"]
            at = shown.until("the daemon is gone since")
            watched.start()
            shown.until("  up ", after=at)
            assert next_of("subscribed")
            assert next_of("gap")["reason"] == "restart"
            watched.client.generate("eve", words("eve", 24) + "!", max_tokens=1)
            miss = next_of("miss")
            assert (miss["agent"], miss["match"]) == ("eve", "diverge")
            shown.press("q")
            assert shown.ended() == 0
        follower.send_signal(signal.SIGINT)
        assert follower.wait(WAIT_S) == 130
    finally:
        watched.client.delete("eve")
        follower.kill()
        follower.wait()
        if follower.stdout is not None:
            follower.stdout.close()
