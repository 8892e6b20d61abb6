"""When the disk quota is full: whose page files are given up, so that newer turns can be durable.

Theory of operation. The store has made room already with what nobody needs: orphans, then quarantine (`kvd.store.
disk_usage`). What is left belongs to agents, and is given up from the least valuable on:

1. branches that agents let go of: a compaction of the log frees their pages;
2. branches that are not their agent's current one, the least recently used first: divergences, in case they come back;
3. pages behind the windows of current branches: only a rollback needs them;
4. current branches, the least recently used first, a branch's tail before its head.

A page goes with the most valuable of the branches that map it. Nothing is taken from agents that are pinned, that run
or wait in line, that are not saved, nor from the one used last: it is the one that wants room. Text and ids stay in the
log whatever is given up: it is KV, and is computed again when the agent goes on; the reply says from which token.

Owner: the engine thread. May import kvd.ids, kvd.vm and siblings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from kvd.ids import PageId
from kvd.vm.events import EvictionWanted, FilesGone, RetryWanted
from kvd.vm.page import PageState

if TYPE_CHECKING:
    from kvd.scheduler.agents import Agent, Branch
    from kvd.scheduler.core import EngineCore
    from kvd.store.swap_ops import SwapResult
    from kvd.vm.views import PageView

AT_ONCE: Final = 50
"""Part of the quota (one in so many) that is made free at least: one look at all agents for many pages."""


def shed(core: EngineCore) -> None:
    """Give up what is worth least, if the quota refused a page or record since the last time."""
    shortage = core.store.take_shortage()
    if shortage is None or core.swap_off:
        return
    wanted_bytes = max(shortage.over_bytes, shortage.quota_bytes // AT_ONCE)
    chosen: dict[PageId, int] = {}
    owners: dict[str, None] = {}
    for agent in core.agents:
        if agent.dropped_bytes:
            agent.compaction_due = True  # runs when nothing else does; what it frees is counted on
            wanted_bytes -= agent.dropped_bytes
    for agent, page, page_bytes in _by_value(core):
        if sum(chosen.values()) >= wanted_bytes:
            break
        chosen[page] = page_bytes
        owners[str(agent.ref)] = None
    if chosen:
        core.log("kv_given_up", pages=len(chosen), bytes=sum(chosen.values()), agents=list(owners), why="quota")
        core.store.give_up(frozenset(chosen), partial(_given_up, core, tuple(chosen)))


def _given_up(core: EngineCore, pages: tuple[PageId, ...], result: SwapResult) -> None:
    if result.error is None and isinstance(result.value, int):
        core.stats.pages_given_up += result.value
    if result.error is None:
        core.memory.apply(FilesGone(pages))  # one that was read just before is in RAM, and stays an ordinary page
    core.memory.apply(RetryWanted())  # there is room now, or never will be: either way it is time to see


def _by_value(core: EngineCore) -> Iterator[tuple[Agent, PageId, int]]:
    """Pages with a file, the least valuable first; pages in RAM lose their frames before they are named."""
    in_use = {each.space for each in core.pager.spaces if each.use.held or each.use.hint == "queued"}
    agents = sorted(core.agents, key=lambda agent: agent.branch.last_used)[:-1]
    able = [
        agent
        for agent in agents
        if agent.unsaved is None
        and not agent.pinned
        and not any(branch.space in in_use for branch in agent.branches.values())
    ]
    others = [(agent, each) for agent in able for each in agent.branches.values() if each is not agent.branch]
    others.sort(key=lambda pair: pair[1].last_used)
    seen: Counter[PageId] = Counter()
    for agent, branch in others:
        yield from _pages(core, agent, branch, seen, behind_window=None)
    for agent in able:
        yield from _pages(core, agent, agent.branch, seen, behind_window=True)
    for agent in able:
        yield from _pages(core, agent, agent.branch, seen, behind_window=False)


def _pages(
    core: EngineCore, agent: Agent, branch: Branch, seen: Counter[PageId], *, behind_window: bool | None
) -> Iterator[tuple[Agent, PageId, int]]:
    """A branch's pages, its tail before its head, that no branch maps which has not been passed over yet."""
    sizes = core.page_bytes(branch.space)
    if behind_window is not True:
        core.memory.apply(EvictionWanted(branch.space))
    pages: list[tuple[int, int, PageView]] = [
        (number, sizes[segment.group], page)
        for segment in core.pager.segments(branch.space)
        for number, page in enumerate(segment.pages)
        if behind_window is None or page.behind_window == behind_window
    ]
    for _, page_bytes, page in sorted(pages, key=lambda entry: -entry[0]):
        page_id = page.ref.page_id
        seen[page_id] += 1
        if seen[page_id] == page.shared_spaces and page.state is PageState.EVICTED:
            yield agent, page_id, page_bytes


__all__ = ["shed"]
