"""A child that is kept: started again with longer and longer pauses, given up, ended with its parent."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from kvd.ops import KeptChild
from tests.support.daemon import eventually


class Log:
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **facts: object) -> None:
        """Keep it."""
        self.lines.append((event, facts))

    warning = info


class FakeProcess:
    """Ends with a code as soon as somebody waits."""

    pid = 7
    stderr = None

    def __init__(self, code: int) -> None:
        self._code = code

    async def wait(self) -> int:
        """It has ended."""
        return self._code

    def kill(self) -> None:
        """Nothing is left to end."""

    def end_input(self) -> None:
        """It reads none."""

    def close(self) -> None:
        """It has no pipes."""


class World:
    """Processes that live for given times and end with given codes, and a clock that pauses and lives move."""

    def __init__(self, *lives: tuple[float, int] | OSError) -> None:
        self._lives = list(lives)
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.over = asyncio.Event()

    async def spawn(self, command: Sequence[str]) -> FakeProcess:
        """The next process."""
        life = self._lives.pop(0)
        if isinstance(life, OSError):
            raise life
        self.now_s += life[0]
        return FakeProcess(life[1])

    async def pause(self, seconds: float) -> None:
        """Time passes; when no process is left the test is over."""
        self.pauses.append(seconds)
        self.now_s += seconds
        if not self._lives:
            self.over.set()
            await asyncio.Event().wait()


def keep(*lives: tuple[float, int] | OSError) -> tuple[World, Log]:
    """Keep a child that lives so."""
    log = Log()

    async def run() -> World:
        world = World(*lives)
        child = KeptChild(
            "child", ["c"], log, hand_on=print, spawn=world.spawn, clock=lambda: world.now_s, pause=world.pause
        )
        keeper = asyncio.ensure_future(child.keep())
        over = asyncio.ensure_future(world.over.wait())
        await asyncio.wait({keeper, over}, return_when=asyncio.FIRST_COMPLETED)
        keeper.cancel()
        over.cancel()
        await asyncio.gather(keeper, over, return_exceptions=True)
        return world

    return asyncio.run(run()), log


def test_pauses_double_and_begin_anew() -> None:
    """A child that dies at once is not started a hundred times a second; one that had lived is started soon."""
    world, _ = keep(*[(0, 1)] * 8, (3600, 1), (0, 1))
    assert world.pauses == [1, 2, 4, 8, 16, 32, 60, 60, 1, 2]


def test_wrong_usage_is_given_up() -> None:
    """The same command would end the same way; the log says so."""
    world, log = keep((0, 1), (0, 2))
    assert world.pauses == [1]
    assert log.lines[-1][0] == "child_given_up"


def test_a_program_that_cannot_be_started_is_tried_again() -> None:
    """With its reason in the log."""
    world, log = keep(OSError("no memory"), (0, 1))
    assert world.pauses == [1, 2]
    assert log.lines[0] == ("child_not_started", {"error": "no memory", "again_s": 1.0})


SPEAKS = """
import sys
sys.stderr.write('{"event": "listening"}\\n')
sys.stderr.write('\\n{"torn\\n' + "x" * (1 << 21) + "\\n[1]\\nkvd: cannot listen: taken\\n")
sys.stderr.write('{"event": "request"}\\nTraceback ends \\udcff'.encode("utf-8", "surrogateescape").decode("latin-1"))
sys.exit(3)
"""


def test_why_a_child_ended_is_told_and_its_log_is_handed_on() -> None:
    """A real process: records go on as they are, other lines become records of ours, the last one is the reason."""
    log, handed = Log(), list[str]()

    async def run() -> None:
        over = asyncio.Event()

        async def pause(_: float) -> None:
            over.set()
            await asyncio.Event().wait()

        child = KeptChild("child", [sys.executable, "-c", SPEAKS], log, hand_on=handed.append, pause=pause)
        child.start()
        assert child.fault is None
        await over.wait()
        assert child.fault == log.lines[-1][1]["reason"]
        await child.close()

    asyncio.run(run())
    assert handed == ['{"event": "listening"}', '{"event": "request"}']
    said = [str(facts["text"]) for event, facts in log.lines if event == "child_said"]
    assert [text for text in said if "x" * 9 not in text][:3] == ['{"torn', "[1]", "kvd: cannot listen: taken"]
    assert max(map(len, said)) <= 500
    event, facts = log.lines[-1]
    assert (event, facts["exit_code"]) == ("child_ended", 3)
    assert str(facts["reason"]).startswith("Traceback ends")


ASKS_TO_BE_CALLED = """
import asyncio, ctypes, sys
from kvd.ops import KeptChild
from kvd.ops.loops import new_loop

called = []
before = ctypes.CFUNCTYPE(None)(lambda: called.append(1))
ctypes.CDLL(None).__register_atfork(before, None, None, None)


class Log:
    def info(self, event, **facts):
        pass

    warning = info


async def run():
    over = asyncio.Event()

    async def pause(_):
        over.set()
        await asyncio.Event().wait()

    child = KeptChild("child", [sys.executable, "-c", ""], Log(), hand_on=print, pause=pause)
    child.start()
    await over.wait()
    await child.close()


with asyncio.Runner(loop_factory=new_loop) as runner:
    runner.run(run())
print(len(called))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="vfork, and glibc's way to ask to be called")
def test_no_library_is_called_before_a_child_is_started() -> None:
    """OpenBLAS would end its threads then, and wait for ever for those that the engine's thread has given work."""
    done = subprocess.run(
        [sys.executable, "-c", ASKS_TO_BE_CALLED], capture_output=True, text=True, check=False, timeout=60
    )
    if "__register_atfork" in done.stderr:
        pytest.skip("another C library")
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_child_that_is_not_wanted_any_more_while_it_is_started_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop in that moment leaves no process behind: its input ends, though nobody holds it yet."""
    pids: list[int] = []

    async def run() -> None:
        begun = asyncio.Event()

        async def hear(started: Any) -> None:
            pids.append(started.pid)
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr("kvd.ops.children._Spawned.hear", hear)
        child = KeptChild("child", [sys.executable, "-c", "import sys; sys.stdin.read()"], Log(), hand_on=print)
        child.start()
        await begun.wait()
        await child.close()

    asyncio.run(run())

    def is_gone() -> bool:
        try:
            os.kill(pids[0], 0)
        except ProcessLookupError:
            return True
        return False

    eventually(is_gone, "the child has ended")


def test_what_a_child_has_started_does_not_hold_our_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grandchild that keeps standard error open is not waited for, and no descriptor stays."""
    monkeypatch.setattr("kvd.ops.children.LAST_WORDS_S", 0.01)
    grandchild = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    gc.collect()
    before = len(os.listdir("/dev/fd"))

    async def run() -> None:
        over = asyncio.Event()

        async def pause(_: float) -> None:
            over.set()
            await asyncio.Event().wait()

        child = KeptChild("child", [sys.executable, "-c", grandchild], Log(), hand_on=print, pause=pause)
        child.start()
        await over.wait()
        await child.close()

    asyncio.run(run())
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_closing_ends_the_child(monkeypatch: pytest.MonkeyPatch, ends_by_itself: bool) -> None:
    """A real process: at the end of its input, or, when it does not care, by a signal."""
    monkeypatch.setattr("kvd.ops.children.END_GRACE_S", 60.0 if ends_by_itself else 0.01)
    script = "import sys; sys.stdin.read()" if ends_by_itself else "import time; time.sleep(3600)"
    log = Log()

    async def run() -> None:
        child = KeptChild("child", [sys.executable, "-c", script], log, hand_on=print)
        child.start()
        while not log.lines:
            await asyncio.sleep(0.001)
        pid = log.lines[0][1]["pid"]
        assert isinstance(pid, int)
        assert os.getsid(pid) != os.getsid(0)  # a Ctrl-C in the terminal does not reach it
        await child.close()

    asyncio.run(run())
    assert [event for event, _ in log.lines] == ["child_started"]
