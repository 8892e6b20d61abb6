"""Real daemons for benchmarks and the demo: start, wait, kill, drop the page cache, start again.

A daemon here is a process of its own, started as a user would start it, on a data folder of its own, spoken to through
`kvd_client`. Only processes started here are ever signalled, by their id.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvd.errors import EnvironmentFault
from kvd_client import Client, KvdClientError

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
UNSHARED = ("--sharing", "agent")
"""For what measures or compares agents of equal texts: none may find what another one has computed."""


class DaemonProcess:
    """A `kvd serve` process. Use as a context manager: it is killed on the way out.

    Args:
        data_dir: its data folder.
        model: name or folder of the model.
        options: further `kvd serve` options.
    """

    def __init__(self, data_dir: Path, *, model: str, options: Sequence[str] = ()) -> None:
        self.data_dir = data_dir
        self.socket = data_dir / "kvd.sock"
        self.log = data_dir.with_name(data_dir.name + ".log")
        self._command = [
            *(sys.executable, "-m", "kvd", "serve", "--model", model),
            *("--data-dir", str(data_dir), "--socket", str(self.socket), *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it and wait until it can generate; returns the seconds that took.

        Raises:
            EnvironmentFault: it ended or was not ready in time; the message ends with its last words.
        """
        began = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        while time.monotonic() - began < READY_TIMEOUT_S:
            if self._process.poll() is not None:
                raise EnvironmentFault(f"the daemon ended with code {self._process.returncode}: {self.last_words()}")
            with contextlib.suppress(KvdClientError), self.client() as client:
                if client.health().ready:
                    return time.monotonic() - began
            time.sleep(0.02)
        self.kill()
        raise EnvironmentFault(f"the daemon was not ready after {READY_TIMEOUT_S:g} s: {self.last_words()}")

    @property
    def pid(self) -> int:
        """Process id of the running daemon."""
        assert self._process is not None
        return self._process.pid

    def client(self) -> Client:
        """A new client of this daemon."""
        return Client(socket=self.socket)

    def kill(self) -> None:
        """`kill -9`: no handler runs, nothing is flushed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> int:
        """SIGTERM and wait for the drain; returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(timeout=STOP_TIMEOUT_S)
        self._process = None
        return code

    def last_words(self) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text[-1500:].strip() or "(it said nothing)"

    def __enter__(self) -> DaemonProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder in `parent`; without one, its path is short enough for a Unix socket (macOS's own is not)."""
    base = Path("/tmp") if parent is None and os.path.isdir("/tmp") else parent  # noqa: S108  a private one is made inside
    with tempfile.TemporaryDirectory(prefix="kvd-", dir=base) as name:
        yield Path(name)


def drop_page_cache(folder: Path) -> str:
    """Have the system forget the cached contents of every file under `folder`.

    Returns:
        How it was done, for the report.
    """
    if hasattr(os, "posix_fadvise"):
        for path in _files(folder):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)
        return "posix_fadvise(POSIX_FADV_DONTNEED)"
    import fcntl

    # macOS cannot drop a file's pages; reading once without caching pushes nothing in, which is the nearest there is
    for path in _files(folder):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.fcntl(file, getattr(fcntl, "F_NOCACHE", 48), 1)
            while file.read(1 << 20):
                pass
    return "F_NOCACHE (macOS keeps what it has cached already)"


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path
