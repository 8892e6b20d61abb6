"""The folder that `kvd bench startup` makes is a real one, and a start on it reads as little as it says."""

from __future__ import annotations

from pathlib import Path

from kvd.bench.many_agents import TAIL_TOKENS, make_agents
from kvd.quant.spec import PAGE_TOKENS
from kvd.store.agent_log import FRAME
from kvd.store.fs import RealFileSystem
from kvd.store.sleeping import READ_AGENTS
from kvd.store.swap_ops import ReadPageOp, ReadTailOp, WakeLogOp
from tests.support.store_data import FINGERPRINT, LAYOUTS, NUMERICS, open_store

AGENTS = READ_AGENTS + 8
PAGES = 2


def test_a_start_reads_the_logs_of_few_and_28_bytes_of_the_rest(tmp_path: Path) -> None:
    """However many agents there are, and however long their logs; pages and tails of a sleeper are whole."""
    root = tmp_path / "data"
    tokens = make_agents(root, FINGERPRINT, LAYOUTS, agents=AGENTS, pages=PAGES, numerics=NUMERICS)
    assert tokens == PAGES * PAGE_TOKENS + TAIL_TOKENS
    folder, report, store = open_store(RealFileSystem(), root)
    assert (len(report.agents), len(report.asleep)) == (READ_AGENTS, AGENTS - READ_AGENTS)
    log_bytes = report.log_bytes // AGENTS
    assert report.reads == AGENTS
    assert abs(report.read_bytes - READ_AGENTS * log_bytes - (AGENTS - READ_AGENTS) * FRAME.size) < AGENTS * 4
    assert not report.facts
    assert not report.orphans
    ref = next(iter(report.asleep))
    woken = store.perform(WakeLogOp(*ref))
    assert woken.image is not None
    assert len(woken.image.branch.tokens) == tokens
    for header in woken.value:  # type: ignore[attr-defined]
        assert store.perform(ReadPageOp(header, LAYOUTS[header.group])).error is None
    for group, layout in enumerate(LAYOUTS):
        tail = store.perform(ReadTailOp(*ref, woken.image.current, group)).payload
        assert tail == bytes(TAIL_TOKENS * layout.token_bytes)
    store.close()
    folder.close()
