"""A daemon under a service manager, played by the test: its socket, its notifications, its watchdog."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd_client import Client
from tests.support.daemon import daemon_environment
from tests.support.prose import prose

pytestmark = pytest.mark.daemon

WAIT_S = 60.0

# what systemd does between fork and exec: the socket is descriptor 3, and its variables name this process
AS_SYSTEMD = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.set_inheritable(3, True)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "kvd"}
os.execv(sys.executable, [sys.executable, "-m", "kvd", *sys.argv[2:]])
"""


class Manager:
    """Owns the socket and hears the notifications. Owner: the test."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.path = folder / "kvd.sock"
        self.log = folder / "kvd.log"
        self._arguments = ["serve", "--data-dir", str(folder / "data"), "--model", str(model)]
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen(8)
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(folder / "notify"))
        self.notify.settimeout(WAIT_S)
        self._environment = daemon_environment(NOTIFY_SOCKET=str(folder / "notify"), WATCHDOG_USEC="1000000")

    @contextmanager
    def daemon(self) -> Iterator[subprocess.Popen[bytes]]:
        """A daemon that inherits the socket; it is killed at the end if it still runs."""
        descriptor = self.listener.fileno()
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", AS_SYSTEMD, str(descriptor), *self._arguments],
                pass_fds=[descriptor],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def hear(self, word: str) -> str:
        """The next notification that says `word`."""
        for _ in range(10_000):
            said = self.notify.recv(4096).decode()
            if word in said:
                return said
        raise AssertionError(f"never heard {word}; the log ends with {self.log.read_text()[-2000:]}")

    def silence(self, seconds: float) -> None:
        """Everything that was sent is heard, and then nothing comes for so long."""
        self.notify.settimeout(seconds)
        try:
            for _ in range(1000):
                self.notify.recv(4096)
        except TimeoutError:
            self.notify.settimeout(WAIT_S)
            return
        raise AssertionError("it never fell silent")

    def close(self) -> None:
        """Both sockets."""
        self.listener.close()
        self.notify.close()


@pytest.fixture
def manager(short_tmp: Path, tiny_model_dir: Path) -> Iterator[Manager]:
    """One without a daemon."""
    made = Manager(short_tmp, tiny_model_dir)
    yield made
    made.close()


def test_the_watchdog_restarts_a_daemon_that_hangs_and_its_agents_resume(manager: Manager) -> None:
    """Silence, a kill by the manager, a new process on the same socket: a call that waited there goes on exactly.

    A stopped process is the hardest stall there is: nothing of it runs. The socket file stays as the manager made it.
    """
    inode = os.stat(manager.path).st_ino
    text = prose(60, "agent")
    with manager.daemon() as first:
        assert "STATUS=serving" in manager.hear("READY=1")
        manager.hear("WATCHDOG=1")
        with Client(manager.path, timeout_s=WAIT_S) as client:
            turn = client.generate("agent", text, max_tokens=4)
            assert turn.durable
        first.send_signal(signal.SIGSTOP)
        manager.silence(2.0)
    results = []

    def ask() -> None:
        # connects before anybody listens again: the manager's backlog holds it
        with Client(manager.path, timeout_s=WAIT_S) as client:
            results.append(client.generate("agent", text + turn.text, max_tokens=2))

    asking = threading.Thread(target=ask)
    asking.start()
    with manager.daemon() as second:
        manager.hear("READY=1")
        asking.join(WAIT_S)
        assert not asking.is_alive()
        assert (results[0].match, results[0].cached_tokens) == ("exact", results[0].prompt_tokens - 1)
        second.terminate()
        manager.hear("STOPPING=1")
        assert second.wait(WAIT_S) == 0
    assert os.stat(manager.path).st_ino == inode
