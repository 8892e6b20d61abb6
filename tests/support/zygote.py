"""Daemons that start in a tenth of the time: forked off a process that has imported everything, and nothing more.

Importing mlx and what stands on it is nearly all of a tiny daemon's start. The zygote does that once; each daemon is a
fork of it that sets its own environment, files and arguments and runs `kvd` from `main` on; so are commands, of
`kvd-client`, too. It is a process of its own
with its own data folder, socket and log: `kill -9` takes it as it takes any other. What depends on imports (the
launcher, the command line of the process) needs a real start.

Linux only (it watches daemons through pidfds); elsewhere `start_zygote` gives None and daemons start as always. Imports
nothing of kvd but in the zygote itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class Forked:
    """A process the zygote made; the part of `subprocess.Popen` that `Daemon` uses.

    Args:
        zygote: its parent, which alone can say how it ended.
        pid: its id.
    """

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """How it ended, None while it runs."""
        return self.returncode if self._ended(0.0) is False else self._reap()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends; `subprocess.TimeoutExpired` when it does not in time."""
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired("kvd serve", timeout or 0.0)
        return self._reap()

    def kill(self) -> None:
        """`kill -9`; harmless once it has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, signum: int) -> None:
        """Signal it and nobody else, even when its id is somebody else's by now."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signum)

    def _ended(self, timeout: float | None) -> bool:
        if self.returncode is not None:
            return True
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def _reap(self) -> int:
        if self.returncode is None:
            self.returncode = self._zygote.ask({"reap": self.pid})
            os.close(self._handle)
        return self.returncode


class Zygote:
    """The process that daemons are forked off. Owner: one fixture; used by one thread at a time."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
        shared = {name: os.environ[name] for name in ("KVD_BLAS", "KVD_KERNEL_CACHE") if name in os.environ}
        paths = [str(root), str(root / "client"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=kept | shared | {"KVD_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)},
            cwd=root,
            text=True,
        )
        assert self.ask({"ready": 1}) == 1

    def spawn(self, arguments: Sequence[str], *, environment: Mapping[str, str], log: Path, umask: int) -> Forked:
        """Start `kvd` with these arguments, output to the end of `log`."""
        files = (os.devnull, str(log), str(log))
        wanted = {"spawn": ["kvd", *arguments], "environment": dict(environment), "files": files, "umask": umask}
        return Forked(self, self.ask(wanted))

    def run(
        self, command: Sequence[str], *, environment: Mapping[str, str], stdin: str, timeout_s: float
    ) -> tuple[int, str, str]:
        """Run a command of `kvd` or `kvd-client` (its first word) to its end: exit code, standard output and error."""
        with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
            files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
            files[0].write_bytes(stdin.encode())
            wanted = {"spawn": list(command), "environment": dict(environment), "files": [str(file) for file in files]}
            forked = Forked(self, self.ask(wanted | {"umask": 0o022}))
            try:
                code = forked.wait(timeout_s)
            finally:
                forked.kill()
                forked.wait()
            return code, files[1].read_bytes().decode(), files[2].read_bytes().decode()

    def ask(self, question: Mapping[str, object]) -> int:
        """One number for one question."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the zygote ended with {self._process.wait()}"
        return int(answer)

    def close(self) -> None:
        """End it; daemons that still run are their owners' business."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(10)


@contextlib.contextmanager
def start_zygote() -> Iterator[Zygote | None]:
    """A zygote for as long as it is used; None where there can be none."""
    if not (sys.platform.startswith("linux") and hasattr(os, "pidfd_open")):
        yield None
        return
    zygote = Zygote()
    try:
        yield zygote
    finally:
        zygote.close()


# ---- in the zygote --------------------------------------------------------------------------------------------------


def main() -> None:
    """Import what a daemon needs, then fork for each question until standard input ends."""
    from kvd import launcher

    launcher.prepare()
    from kvd.model import mlx_lm_door

    mlx_lm_door.prepare()
    import mlx_lm.models.llama  # noqa: F401

    import kvd.assembly
    import kvd.attention.cpu_backend
    import kvd.cli
    import kvd.daemon
    import kvd.model.cpu_assist
    import kvd.model.host_block  # noqa: F401
    import kvd_client.cli  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while line := sys.stdin.readline():
        question = json.loads(line)
        if "spawn" in question:
            answer = os.fork()
            if answer == 0:
                become(question, answers.fileno())
        elif "reap" in question:
            answer = os.waitstatus_to_exitcode(os.waitpid(question["reap"], 0)[1])
        else:
            answer = 1
        answers.write(f"{answer}\n")
        answers.flush()


def become(question: Mapping[str, Any], answers: int) -> None:
    """Be the command asked for; never returns."""
    code = 1
    try:
        os.close(answers)
        for number, (path, mode) in enumerate(zip(question["files"], ("r", "a", "a"), strict=True)):
            flags = os.O_RDONLY if mode == "r" else os.O_WRONLY | os.O_APPEND | os.O_CREAT
            descriptor = os.open(path, flags, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
        # as the interpreter makes them
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.environ.clear()
        os.environ.update(question["environment"])
        os.umask(question["umask"])
        random.seed()
        sys.argv = question["spawn"]
        if sys.argv[0] == "kvd":
            from kvd.__main__ import main
        else:
            from kvd_client.cli import main
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
