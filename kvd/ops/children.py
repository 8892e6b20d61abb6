"""A child process that is kept running: started, watched, started again when it ends, ended with its parent.

Theory of operation. The child's standard input is a pipe that is never written to. When this process ends, however it
does, the pipe ends, and the child, which waits for that, ends too: no signal could promise it after a `kill -9`. A
child that ends by itself is started again after a pause that doubles up to `MAX_PAUSE_S` and begins anew once one has
lived for so long. One that ends with `WRONG_USAGE` would do so again, so it is given up, and the log says so.

Its standard error is read here. Lines that are JSON objects are its log and are handed on as they are; any other (a
refusal before there is a log, a traceback, a word of a library) is logged as `..._said`, so that whoever reads our log
finds nothing but records in it, and the last of them is told as the reason when the child ends.

The child is started by `subprocess`, not by the event loop. uvloop forks, and before a fork the C library calls whoever
asked for it: OpenBLAS then ends its threads and waits for them, for ever where the engine's thread is in the middle of
a product of matrices. `subprocess` uses vfork where there is one, before which nobody is called. Imports the standard
library only.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

__all__ = ["ChildLog", "KeptChild"]

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
END_GRACE_S = 8.0
"""From the end of its input to SIGKILL."""
WRONG_USAGE = 2
LONGEST_LINE_BYTES = 1 << 20
"""Of standard error; a longer one is left out."""
LAST_WORDS_S = 2.0
"""What the child has started may hold its standard error open longer than it lives; nobody waits for that."""
MAX_REASON_CHARACTERS = 500


class ChildLog(Protocol):
    """The part of a logger that is used here."""

    def info(self, event: str, **facts: object) -> object:
        """What went well."""

    def warning(self, event: str, **facts: object) -> object:
        """What did not."""


class Process(Protocol):
    """A child process as it is used here."""

    @property
    def pid(self) -> int:
        """Its id."""

    async def wait(self) -> int:
        """Wait for its end; returns the exit code."""

    def kill(self) -> None:
        """End it at once."""

    @property
    def stderr(self) -> asyncio.StreamReader | None:
        """Its standard error."""

    def end_input(self) -> None:
        """End its standard input."""

    def close(self) -> None:
        """Let go of its pipes, whoever else still holds their other ends."""


class KeptChild:
    """One child process at a time. Owner: the event loop.

    Args:
        name: for the log.
        command: program and arguments.
        log: told of each start and each end.
        hand_on: takes a line of the child's log, a JSON object, without its end.
        spawn: starts the process.
        clock: monotonic seconds.
        pause: waits so many seconds.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: ChildLog,
        *,
        hand_on: Callable[[str], None],
        spawn: Callable[[Sequence[str]], Awaitable[Process]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._name = name
        self._command = tuple(command)
        self._log = log
        self._spawn = spawn or _spawn
        self._clock = clock
        self._pause = pause
        self._hand_on = hand_on
        self._reason: str | None = None
        self.fault: str | None = None
        """Why the child does not run now, if it should."""
        self._process: Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the child, and keep it running until `close`."""
        self._keeper = asyncio.get_running_loop().create_task(self.keep())

    async def keep(self) -> None:
        """Start the child again and again; returns when that makes no sense."""
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = self._clock()
            try:
                self._process = await self._spawn(self._command)
            except OSError as error:
                self.fault = str(error)
                self._log.warning(f"{self._name}_not_started", error=str(error), again_s=pause_s)
            else:
                self._log.info(f"{self._name}_started", pid=self._process.pid)
                self.fault = None
                code = await self._ended(self._process)
                self._process = None
                reason = self.fault = self._reason or "it did not say why"
                if code == WRONG_USAGE:
                    self._log.warning(f"{self._name}_given_up", exit_code=code, reason=reason)
                    return
                lived_s = self._clock() - began_s
                pause_s = FIRST_PAUSE_S if lived_s >= MAX_PAUSE_S else pause_s
                self._log.warning(
                    f"{self._name}_ended", exit_code=code, reason=reason, lived_s=round(lived_s, 1), again_s=pause_s
                )
            await self._pause(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    async def _ended(self, process: Process) -> int:
        """Hear what a child says until it ends; returns its exit code."""
        self._reason = None
        hearing = asyncio.ensure_future(self._hear(process.stderr))
        try:
            code = await process.wait()
            await asyncio.wait({hearing}, timeout=LAST_WORDS_S)
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
        process.close()
        return code

    async def _hear(self, stderr: asyncio.StreamReader | None) -> None:
        while stderr is not None:
            try:
                raw = await stderr.readline()
            except ValueError:  # too long; what was read of it is dropped
                continue
            if not raw:
                return
            if line := raw.decode(errors="replace").strip():
                self._heard(line)

    def _heard(self, line: str) -> None:
        try:
            is_record = line.startswith("{") and isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            is_record = False
        if is_record:
            self._hand_on(line)
        else:
            self._reason = line[:MAX_REASON_CHARACTERS]
            self._log.warning(f"{self._name}_said", text=self._reason)

    async def close(self) -> None:
        """End the child, and wait for its end."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        process, self._process = self._process, None
        if process is None:
            return
        process.end_input()
        ended = asyncio.ensure_future(self._ended(process))
        try:
            await asyncio.wait_for(asyncio.shield(ended), END_GRACE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await ended


class _Spawned:
    """A process that `subprocess` started. Owner: the event loop.

    Args:
        popen: with pipes for standard input and error.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.stderr: asyncio.StreamReader | None = None
        self._hearing: asyncio.ReadTransport | None = None
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # one thread a child, which waits: what else tells of a child's end belongs to the kind of loop
        threading.Thread(target=self._wait, args=(asyncio.get_running_loop(),), name="kvd-child", daemon=True).start()

    async def hear(self) -> None:
        """Read its standard error from now on."""
        loop = asyncio.get_running_loop()
        self.stderr = reader = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
        self._hearing, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._popen.stderr
        )

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._popen.wait()
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._tell, code)

    def _tell(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)

    async def wait(self) -> int:
        """See `Process.wait`."""
        return await asyncio.shield(self._code)

    def kill(self) -> None:
        """See `Process.kill`."""
        self._popen.kill()

    def end_input(self) -> None:
        """See `Process.end_input`."""
        if self._popen.stdin is not None:
            self._popen.stdin.close()

    def close(self) -> None:
        """See `Process.close`."""
        self.end_input()
        if self._hearing is not None:
            self._hearing.close()
        elif self._popen.stderr is not None:
            self._popen.stderr.close()


async def _spawn(command: Sequence[str]) -> Process:
    # a session of its own: Ctrl-C in a terminal is for the parent, which ends its child when the time has come
    pipe = subprocess.PIPE
    started = _Spawned(subprocess.Popen(command, stdin=pipe, stderr=pipe, bufsize=0, start_new_session=True))
    try:
        await started.hear()
    except BaseException:  # whoever started it does not want it any more, and nobody else knows of it
        started.close()
        raise
    return started
