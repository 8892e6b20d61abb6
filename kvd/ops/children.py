"""A child process that is kept running: started, watched, started again when it ends, ended with its parent.

Theory of operation. The child's standard input is a pipe that is never written to. When this process ends, however it
does, the pipe ends, and the child, which waits for that, ends too: no signal could promise it after a `kill -9`. A
child that ends by itself is started again after a pause that doubles up to `MAX_PAUSE_S` and begins anew once one has
lived for so long. One that ends with `WRONG_USAGE` would do so again, so it is given up, and the log says so. Imports
the standard library only.
"""

from __future__ import annotations

import asyncio
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


class ChildLog(Protocol):
    """The part of a logger that is used here."""

    def info(self, event: str, **facts: object) -> object:
        """What went well."""

    def warning(self, event: str, **facts: object) -> object:
        """What did not."""


class Process(Protocol):
    """The part of `asyncio.subprocess.Process` that is used here."""

    @property
    def pid(self) -> int:
        """Its id."""

    async def wait(self) -> int:
        """Wait for its end; returns the exit code."""

    def kill(self) -> None:
        """End it at once."""

    @property
    def stdin(self) -> asyncio.StreamWriter | None:
        """Its standard input."""


class KeptChild:
    """One child process at a time. Owner: the event loop.

    Args:
        name: for the log.
        command: program and arguments.
        log: told of each start and each end.
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
                self._log.warning(f"{self._name}_not_started", error=str(error), again_s=pause_s)
            else:
                self._log.info(f"{self._name}_started", pid=self._process.pid)
                code = await self._process.wait()
                self._process = None
                if code == WRONG_USAGE:
                    self._log.warning(f"{self._name}_given_up", exit_code=code, text="its own output says why")
                    return
                lived_s = self._clock() - began_s
                pause_s = FIRST_PAUSE_S if lived_s >= MAX_PAUSE_S else pause_s
                self._log.warning(f"{self._name}_ended", exit_code=code, lived_s=round(lived_s, 1), again_s=pause_s)
            await self._pause(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    async def close(self) -> None:
        """End the child, and wait for its end."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_GRACE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _spawn(command: Sequence[str]) -> Process:
    # a session of its own: Ctrl-C in a terminal is for the parent, which ends its child when the time has come
    return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, start_new_session=True)
