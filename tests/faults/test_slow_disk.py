"""A disk on which a flush takes as long as a test wants: who waits for it, and who does not.

The gate is an event, not time: nothing here is measured, everything is held until the test lets go.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import Cancelled
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.views import agent_info, statistics
from kvd.store.fs import FileHandle, RealFileSystem
from tests.scheduler.harness import ref_of
from tests.scheduler.test_engine import WAIT_S, Runner
from tests.scheduler.test_turn import text_of


class SlowFileSystem(RealFileSystem):
    """A real disk whose operations of one kind wait at a gate while it is shut."""

    def __init__(self) -> None:
        self.kind = ""
        self.held = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.waited = 0

    def shut(self, kind: str) -> None:
        """From here on operations of that kind wait."""
        self.kind = kind
        self.held.clear()
        self.gate.clear()

    def _pass(self, kind: str) -> None:
        if kind == self.kind and not self.gate.is_set():
            self.waited += 1
            self.held.set()
            assert self.gate.wait(WAIT_S)

    def fsync(self, handle: FileHandle) -> None:
        """See `FileSystem.fsync`."""
        self._pass("fsync")
        super().fsync(handle)

    def write(self, handle: FileHandle, data: bytes | memoryview) -> None:
        """See `FileSystem.write`."""
        self._pass("write")
        super().write(handle, data)

    def rename(self, source: Path, target: Path) -> None:
        """See `FileSystem.rename`."""
        self._pass("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        """See `FileSystem.unlink`."""
        self._pass("unlink")
        super().unlink(path)


@pytest.fixture
def slow(fast_tmp: Path, codec: TextCodec) -> Iterator[tuple[Runner, SlowFileSystem]]:
    """An engine with its threads on a slow disk."""
    runner, fs = Runner(fast_tmp / "data", codec), SlowFileSystem()
    runner.fs = fs  # type: ignore[assignment]
    runner.start()
    yield runner, fs
    fs.gate.set()
    runner.stop()


@pytest.mark.parametrize("kind", ["write", "fsync", "rename"])
def test_while_a_commit_waits_for_the_disk_the_daemon_answers(
    slow: tuple[Runner, SlowFileSystem], tally: Counter[str], kind: str
) -> None:
    """P2: the text has been streamed, figures and agents can be asked for, hints run; the reply waits, and is true."""
    runner, fs = slow
    runner.turn("b", "before").wait()
    fs.shut(kind)
    streamed: list[dict[str, Any]] = []
    texts = threading.Event()

    def emit(event: Any) -> None:
        streamed.append(dict(event))
        if event["type"] == "text":
            texts.set()

    waiting = runner.turn("a", text_of(30), max_tokens=4, emit=emit)
    assert fs.held.wait(WAIT_S)
    assert texts.wait(WAIT_S)
    for _ in range(20):
        assert int(str(runner.look(statistics)["agents"])) == 2
    assert runner.engine.queue_facts["running"] == 1
    info = runner.look(lambda core: agent_info(core, core.agents.get(ref_of("b"))))
    assert info["durable"]
    assert runner.job("prefetch", "b").result["agent"] == "b"
    assert not waiting.replies, "a reply that says durable comes after the flush, not before"
    fs.gate.set()
    result = waiting.result
    assert result["durable"]
    assert result["commit_s"] > 0
    assert "".join(str(event["text"]) for event in streamed if event["type"] == "text") == result["text"]
    tally["slow disk, operations held"] += fs.waited


def test_requests_behind_a_slow_commit_are_served_once_the_disk_moves(
    slow: tuple[Runner, SlowFileSystem], tally: Counter[str]
) -> None:
    """One engine, one running turn: what waits behind its commit can be given up meanwhile, and is not lost."""
    runner, fs = slow
    fs.shut("fsync")
    first = runner.turn("a", text_of(3))
    assert fs.held.wait(WAIT_S)
    second, third = runner.turn("b", text_of(3)), runner.turn("c", text_of(3))
    runner.cancel(third)
    assert isinstance(third.error, Cancelled)
    assert not first.replies
    fs.gate.set()
    assert first.result["durable"]
    assert second.result["durable"]
    tally["slow disk, operations held"] += fs.waited


def test_files_of_deleted_agents_that_go_slowly_hold_up_no_reading(
    slow: tuple[Runner, SlowFileSystem], tally: Counter[str]
) -> None:
    """A slow unlink is the swap thread's; the engine computes and streams on."""
    runner, fs = slow
    runner.turn("a", text_of(30)).wait()
    fs.shut("unlink")
    deleting = runner.job("delete", "a")
    assert fs.held.wait(WAIT_S)
    assert int(str(runner.look(statistics)["agents"])) == 1
    assert not deleting.replies
    fs.gate.set()
    assert deleting.result["deleted"]
    tally["slow disk, operations held"] += fs.waited
