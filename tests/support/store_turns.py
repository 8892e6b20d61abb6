"""Turns of a model agent against a `SwapStore`: the operations an engine would send, and reading everything back."""

from __future__ import annotations

from kvd.store.layout import DataFolder
from kvd.store.records import PageEntry
from kvd.store.swap_ops import AppendRecordOp, ReadPageOp, ReadTailOp, SwapOp, SwapResult, WritePageOp
from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import LAYOUTS, ROOT, ModelAgent, header_of


def write_op(agent: ModelAgent, group: int, page: PageEntry) -> WritePageOp:
    """Write one of the agent's pages."""
    return WritePageOp(header_of(page, group), LAYOUTS[group], agent.page_bytes(group, page.runs[0].start // 256))


def turn(store: SwapStore, agent: ModelAgent, tokens: int) -> tuple[ModelAgent, list[SwapResult]]:
    """A turn as the engine does it."""
    after, record, sealed = agent.turn(tokens)
    ops: list[SwapOp] = [write_op(after, group, page) for group, page in sealed]
    return after, [store.perform(op) for op in [*ops, AppendRecordOp(record)]]


def good(store: SwapStore, agent: ModelAgent, tokens: int) -> ModelAgent:
    """A turn that must be durable."""
    after, results = turn(store, agent, tokens)
    assert [result.error for result in results] == [None] * len(results)
    return after


def names() -> DataFolder:
    """Paths."""
    return DataFolder(ROOT, LossyFileSystem(ROOT))


def reads(store: SwapStore, agent: ModelAgent) -> None:
    """All pages and tails of the agent are there, bit for bit."""
    for group, layout in enumerate(LAYOUTS):
        for number, page in enumerate(agent.pages[group]):
            assert store.perform(ReadPageOp(header_of(page, group), layout)).payload == agent.page_bytes(group, number)
        assert store.perform(ReadTailOp("default", agent.name, agent.branch, group)).payload == agent.tail(group)
