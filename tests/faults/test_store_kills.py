"""`kill -9` of a real process on a real disk, at operations of every class (P2, P3)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvd.store.fs import RealFileSystem
from kvd.store.swap_ops import ReadPageOp, ReadTailOp
from tests.support.store_data import LAYOUTS, ModelAgent, header_of, open_store

CHILD = """
import os, signal, sys
from pathlib import Path
from kvd.store.fs import RealFileSystem
from kvd.store.swap_ops import AppendRecordOp, CompactLogOp, WritePageOp
from tests.support.store_data import LAYOUTS, ModelAgent, header_of, open_store

root, victim, countdown = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

class Killer(RealFileSystem):
    pass

def deadly(name):
    inner = getattr(RealFileSystem, name)
    def method(self, *args, **kwargs):
        global countdown
        countdown -= 1
        if countdown == 0:
            if name == "write":  # half of it
                inner(self, args[0], memoryview(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, *args, **kwargs)
    return method

_, _, store = open_store(Killer(), root)
setattr(Killer, victim, deadly(victim))
agent = ModelAgent("ada")
for tokens in (100, 300, 10, 250):
    agent, record, sealed = agent.turn(tokens)
    for group, page in sealed:
        payload = agent.page_bytes(group, page.runs[0].start // 256)
        assert store.perform(WritePageOp(header_of(page, group), LAYOUTS[group], payload)).error is None
    assert store.perform(AppendRecordOp(record)).error is None
    print(record.seq, flush=True)
    assert store.perform(CompactLogOp("default", "ada")).error is None
    store.idle()
print("alive", flush=True)
"""


@pytest.mark.parametrize(
    ("victim", "countdown"),
    [("create", 4), ("write", 3), ("write", 6), ("fsync", 3), ("rename", 2), ("fsync_dir", 3), ("open_append", 3)],
)
def test_every_acknowledged_turn_survives_kill_9(
    fast_tmp: Path, tally: Counter[str], victim: str, countdown: int
) -> None:
    """Turns that the process printed are there with all their pages, bit for bit; the folder is not locked."""
    command = [sys.executable, "-c", CHILD, str(fast_tmp / "data"), victim, str(countdown)]
    child = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60, check=False
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    acknowledged = len(child.stdout.split())
    folder, report, store = open_store(RealFileSystem(), fast_tmp / "data")
    try:
        image = report.agents.get(("default", "ada"))
        assert (0 if image is None else image.seq) in (acknowledged, acknowledged + 1)
        agent = ModelAgent("ada")
        for tokens in (100, 300, 10, 250)[: 0 if image is None else image.seq]:
            agent = agent.turn(tokens)[0]
        assert image is None or image.branch.tokens == agent.tokens
        assert not report.missing_pages
        for group, layout in enumerate(LAYOUTS if image is not None else ()):
            assert store.perform(ReadTailOp("default", "ada", 0, group)).payload == agent.tail(group)
            for number, page in enumerate(agent.pages[group]):
                loaded = store.perform(ReadPageOp(header_of(page, group), layout))
                assert loaded.payload == agent.page_bytes(group, number)
        assert not list((fast_tmp / "data").rglob("*.tmp"))
        tally["kill -9, in a store's process"] += 1
    finally:
        store.close()
        folder.close()
