"""Real daemons for tests: a `kvd serve` process on a data folder of its own, spoken to through real sockets.

Only processes started here are ever signalled, by their id. Waiting is bounded everywhere; a daemon that dies or hangs
fails the test with the end of its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from kvd_client import AgentInfo, Client, KvdClientError
from tests.support.folders import short_base
from tests.support.zygote import Forked, Zygote

READY_S = 60.0
STOP_S = 30.0
CALL_S = 60.0
_POLL_S = 0.01


def daemon_environment(**extra: str) -> dict[str, str]:
    """The environment of a daemon or client under test: one BLAS thread, no network, no settings of the user's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
    shared = {name: os.environ[name] for name in ("KVD_BLAS", "KVD_KERNEL_CACHE") if name in os.environ}
    return kept | shared | {"KVD_CONFIG": "", "KVD_THREADS": "1", "HF_HUB_OFFLINE": "1"} | extra


def ageless(info: AgentInfo) -> AgentInfo:
    """An agent's facts but for those that tell how long ago something was."""
    ages = ("used_s", "idle_s", "expires_s", "expires_in_s")
    return replace(info, server={name: value for name, value in info.server.items() if name not in ages})


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A private temporary folder with a path that fits a socket's address."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-", dir=short_base())).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def eventually(
    condition: Callable[[], object], what: str, *, timeout_s: float = STOP_S, poll_s: float = _POLL_S
) -> None:
    """Wait until `condition` holds; it is something another process does, so there is nothing to wait on."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(poll_s)


class Daemon:
    """One data folder and, most of the time, the `kvd serve` process that owns it. Owner: one test or one fixture.

    Args:
        folder: private folder; data, socket and log are made inside.
        model: folder of the model.
        options: further options of `kvd serve`.
        umask: of the process.
        socket: its path; else in the data folder.
        zygote: what processes are forked off, which makes starts quick; None: each is started as a user would.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        options: Sequence[str] = ("--check",),
        *,
        umask: int = 0o022,
        socket: Path | None = None,
        zygote: Zygote | None = None,
    ) -> None:
        self.zygote = zygote
        self.folder = folder
        self.data_dir = folder / "data"
        self.socket = socket or self.data_dir / "kvd.sock"
        self.log = folder / "kvd.log"
        self.model = model
        self.options = list(options)
        self.umask = umask
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._client: Client | None = None

    # ---- the process ------------------------------------------------------------------------------------------------

    def command(self, *options: str) -> list[str]:
        """The command line that starts this daemon."""
        where = ("--data-dir", str(self.data_dir), "--socket", str(self.socket), "--model", str(self.model))
        return [sys.executable, "-m", "kvd", "serve", *where, *self.options, *options]

    def spawn(self) -> None:
        """Start the process without waiting for it."""
        assert self._process is None, "it runs already"
        if self.zygote is not None:
            arguments, environment = self.command()[3:], daemon_environment()
            self._process = self.zygote.spawn(arguments, environment=environment, log=self.log, umask=self.umask)
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=daemon_environment(),
                umask=self.umask,
            )

    def start(self) -> Daemon:
        """Start the process and wait until it can generate."""
        self.spawn()
        return self.wait_ready()

    def wait_ready(self) -> Daemon:
        """Wait until the daemon can generate."""
        eventually(self._is_ready, "the daemon is ready", timeout_s=READY_S)
        self.client.health()  # connects now, so that no test of a shared daemon is blamed for the open connection
        return self

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}: {self.last_words()}"
        with contextlib.suppress(KvdClientError), self.new_client() as client:
            return client.health().ready
        return False

    @property
    def process(self) -> subprocess.Popen[bytes] | Forked:
        """The running process."""
        assert self._process is not None, "it does not run"
        return self._process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def kill(self) -> None:
        """`kill -9` and reap; harmless when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._gone()

    def restart(self) -> Daemon:
        """`kill -9`, then a fresh process on the same data."""
        self.kill()
        return self.start()

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(signum)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Wait for the process to end by itself; returns its exit code."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            words = self.last_words()
            self.kill()
            raise AssertionError(f"the daemon did not end within {timeout_s:g} s: {words}") from None
        return self._gone()

    def terminate(self) -> int:
        """SIGTERM and wait for the drain; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def _gone(self) -> int:
        code = self.process.wait()
        self._process = None
        if self._client is not None:
            self._client.close()
            self._client = None
        return code

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.kill()

    # ---- talking to it ----------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """A client of the running process, made once."""
        if self._client is None:
            self._client = self.new_client()
        return self._client

    def new_client(self, timeout_s: float = CALL_S, *, resume_s: float = 0.0) -> Client:
        """A connection of its own; what breaks its streams is told at once unless `resume_s` says otherwise."""
        return Client(self.socket, timeout_s=timeout_s, resume_s=resume_s)

    def cli(self, *arguments: str, stdin: str | None = None) -> CliResult:
        """Run `kvd-client` against this daemon as a shell would."""
        return run_cli("--socket", str(self.socket), *arguments, stdin=stdin, zygote=self.zygote)

    def statistics(self) -> dict[str, Any]:
        """Every figure of the daemon, as it sends them."""
        figures: dict[str, Any] = self.client.call("statistics")
        return figures

    # ---- what it leaves ---------------------------------------------------------------------------------------------

    def log_lines(self) -> list[dict[str, Any]]:
        """Its log as records; a torn last line (kill -9) is left out."""
        records = []
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
        return records

    def last_words(self) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text[-2000:] or "(it said nothing)"

    def files(self, pattern: str) -> list[Path]:
        """Files of the data folder that match a glob, sorted."""
        return sorted(self.data_dir.glob(pattern))

    def page_files(self) -> list[Path]:
        """All swap files."""
        return self.files("*/swap/*/*.safetensors")

    def page_file(self, agent: str, number: int) -> Path:
        """The swap file of a page of an agent's current branch, group 0."""
        branches = self.client.residency(agent)["agents"][0]["branches"]
        pages = next(branch for branch in branches if branch["current"])["segments"][0]["pages"]
        return self.files(f"*/swap/*/{pages[number]['page']}.safetensors")[0]


class MakeDaemon(Protocol):
    """Makes daemons that are killed when the test ends; not yet started."""

    def __call__(self, *options: str, model: Path | None = None, umask: int = 0o022) -> Daemon:
        """A daemon with these options of `kvd serve`."""


@dataclass(frozen=True)
class CliResult:
    """A finished command."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Its standard output as one JSON value."""
        return json.loads(self.stdout)


def run_cli(*arguments: str, stdin: str | None = None, zygote: Zygote | None = None, **environment: str) -> CliResult:
    """Run `kvd-client` with these arguments."""
    return _run(["kvd-client", *arguments], "kvd_client.cli", stdin or "", zygote, environment)


def run_kvd(*arguments: str, zygote: Zygote | None = None, **environment: str) -> CliResult:
    """Run `kvd` with these arguments; for commands that end by themselves."""
    return _run(["kvd", *arguments], "kvd", "", zygote, environment)


def _run(
    command: Sequence[str], module: str, stdin: str, zygote: Zygote | None, environment: dict[str, str]
) -> CliResult:
    """Run a command in a process that the zygote forks, or in one as a user starts it."""
    whole = daemon_environment(**environment)
    if zygote is not None:
        return CliResult(*zygote.run(command, environment=whole, stdin=stdin, timeout_s=CALL_S))
    done = subprocess.run(
        [sys.executable, "-m", module, *command[1:]],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=whole,
        timeout=CALL_S,
        check=False,
    )
    return CliResult(done.returncode, done.stdout, done.stderr)


__all__ = [
    "CALL_S",
    "CliResult",
    "Daemon",
    "MakeDaemon",
    "daemon_environment",
    "eventually",
    "run_cli",
    "run_kvd",
    "short_folder",
]
