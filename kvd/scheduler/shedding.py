"""When the disk quota is full: whose page files are given up, so that newer turns can be durable.

Theory of operation. The store has made room already with what nobody needs: orphans, then quarantine (`kvd.store.
disk_usage`). What is left belongs to agents, and is given up from the least valuable on:

1. branches that agents let go of: a compaction of the log frees their pages;
2. branches that are not their agent's current one, the least recently used first: divergences, in case they come back;
3. pages behind the windows of current branches: only a rollback needs them;
4. agents that sleep since the start, the one used longest ago first: everybody who is awake was used later;
5. current branches, the least recently used first, a branch's tail before its head;
6. open pages, which lie in logs: of sleepers, then of others, the least recently used first;
7. of agents that are not saved, the least recently used first: pages that wait in RAM, then those that have files.
   They are saved as text and ids, which need little room (`kvd.scheduler.commit.shrink`).

A *namespace* that has a quota of the disk pays for itself: when it is over, the same order holds among its own agents,
and nobody else's lose anything (`kvd.scheduler.disk_quotas`). Its agent that was used last is spared as above. Where
all that may go would not do (logs alone are above the quota, or an agent that waits is larger than it), nothing goes:
it would cost the others all their KV and let nobody write. Of several agents that wait the smallest counts then, so
that a large one stands in nobody's way.

A page goes with the most valuable of the branches and sleepers that map it. Nothing is taken from agents that are
pinned, that run, wait in line or are being woken, nor from the one used last: it is the one that
wants room. Text and ids stay in the log whatever is given up: it is KV, and is computed again when the agent goes on;
the reply says from which token. Of a sleeper nobody knows which page comes first, so its pages go in no order, but
those of one sleeper before those of the next.

What a compaction will free is counted on once, and it is run ahead of requests; if the next shortage finds that it has
not been (the quota may refuse it, too), pages are given up in its stead. A shortage that is older than the room made
since says nothing any more.

Owner: the engine thread. May import kvd.ids, kvd.quant.spec, kvd.vm and siblings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from kvd.ids import Namespace, PageId
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.endings import is_passing
from kvd.vm.events import FilesGone, PagesUnwanted, RetryWanted
from kvd.vm.page import PageState

if TYPE_CHECKING:
    from kvd.scheduler.agents import Agent, Branch
    from kvd.scheduler.core import EngineCore
    from kvd.scheduler.requests import AgentRef
    from kvd.store.sleeping import SleepingAgent
    from kvd.store.swap_ops import SwapResult
    from kvd.vm.views import PageView

AT_ONCE: Final = 50
"""Part of the quota (one in so many) that is made free at least: one look at all agents for many pages."""


def shed(core: EngineCore) -> None:
    """Give up what is worth least, if the quota refused a page or record since the last time; likewise by namespace."""
    if core.swap_off:
        return
    shortage = core.store.take_shortage()
    if shortage is not None:
        _shed(core, max(shortage.over_bytes, shortage.quota_bytes // AT_ONCE), None)
    quotas = core.disk_quotas
    if core.store.is_giving_up or not (quotas.quotas or quotas.full or quotas.too_small):
        return
    core.govern()
    waiting = core.pager.quota_held_bytes
    too_small = []
    for namespace, over_bytes in quotas.shortages(waiting).items():
        there_bytes = _there_bytes(core, namespace, over_bytes)
        if over_bytes > there_bytes:
            too_small.append(namespace)
            over_bytes -= waiting.get(namespace, 0) - _least_waiting_bytes(core, namespace, waiting)  # noqa: PLW2901
        if 0 < over_bytes <= there_bytes:
            _shed(core, max(over_bytes, quotas.quotas[namespace] // AT_ONCE), namespace)
    for namespace in quotas.tell_too_small(too_small):
        core.log("disk_quota_too_small", namespace=namespace, reason=quotas.why_too_small(namespace))


def _there_bytes(core: EngineCore, namespace: Namespace, wanted_bytes: int) -> int:
    """What of a namespace may go, compactions that are due included; it is counted up to `wanted_bytes`."""
    there_bytes = sum(agent.dropped_bytes for agent in core.agents.in_namespace(namespace) if agent.logged)
    for _, _, page_bytes in _by_value(core, namespace):
        if there_bytes >= wanted_bytes:
            break
        there_bytes += page_bytes
    return there_bytes


def _least_waiting_bytes(core: EngineCore, namespace: Namespace, waiting: Mapping[Namespace, int]) -> int:
    """What the smallest of the agents that wait for room has to write; all that waits while none has ended its turn."""
    agents = [agent for agent in core.agents.in_namespace(namespace) if agent.unsaved is not None]
    return min((_dirty_bytes(core, agent) for agent in agents), default=waiting.get(namespace, 0))


def _dirty_bytes(core: EngineCore, agent: Agent) -> int:
    """Bytes of an agent's pages that are in no file."""
    found: dict[PageId, int] = {}
    for branch in agent.branches.values():
        sizes = core.page_bytes(branch.space)
        for segment in core.pager.segments(branch.space):
            dirty = (page for page in segment.pages if page.state is PageState.SEALED_DIRTY)
            found.update((page.ref.page_id, sizes[segment.group]) for page in dirty)
    return sum(found.values())


def _shed(core: EngineCore, wanted_bytes: int, namespace: Namespace | None) -> None:
    """Give up so much of a namespace (None: of anybody), as far as there is."""
    wanted_bytes -= _compactable_bytes(core, namespace)
    chosen: dict[PageId, int] = {}
    chosen_bytes = 0
    owners: dict[AgentRef, None] = {}
    smaller: dict[AgentRef, None] = {}
    if wanted_bytes > 0:
        for ref, page, page_bytes in _by_value(core, namespace):
            chosen_bytes += page_bytes
            if page is not None:
                chosen[page] = page_bytes
                owners[ref] = None
            elif page_bytes:
                smaller[ref] = None
            if chosen_bytes >= wanted_bytes:
                break
    # an unsaved one that loses a page is saved without it: computing it again would want the room that there is not
    smaller |= dict.fromkeys(ref for ref in owners if (agent := core.agents.known(ref)) and agent.unsaved is not None)
    if smaller.keys() - core.to_shrink.keys():
        core.to_shrink |= smaller
        for ref in smaller:
            core.disk_quotas.try_again(ref.namespace)
        core.log("open_pages_given_up", agents=list(map(str, smaller)))
    core.memory.apply(PagesUnwanted(tuple(chosen)))
    gone = frozenset(page for page in chosen if core.pager.page_state(page) in (None, PageState.EVICTED))
    if gone:
        gone_bytes = sum(chosen[page] for page in gone)
        why = "quota" if namespace is None else f"disk quota of namespace {namespace!r}"
        core.log("kv_given_up", pages=len(gone), bytes=gone_bytes, agents=list(map(str, owners)), why=why)
        core.store.give_up(gone, partial(_given_up, core, gone))


def _compactable_bytes(core: EngineCore, namespace: Namespace | None) -> int:
    """What compactions that nobody has counted on yet will free; they are asked for."""
    freed_bytes = 0
    for agent in core.agents.in_namespace(namespace):
        if agent.dropped_bytes and agent.logged and not agent.counted_on:
            agent.counted_on = agent.compaction_due = agent.compaction_urgent = True
            freed_bytes += agent.dropped_bytes
    return freed_bytes


def _given_up(core: EngineCore, pages: frozenset[PageId], result: SwapResult) -> None:
    if result.error is None and isinstance(result.value, int):
        core.stats.pages_given_up += result.value
    if result.error is None:
        core.memory.apply(FilesGone(tuple(pages)))  # one that was read just before is in RAM, and stays ordinary
        asleep = core.agents.asleep
        for ref in {ref for page in pages for ref in asleep.who_maps(page)}:
            left = tuple(page for page in asleep[ref].page_ids if page not in pages)
            asleep[ref] = replace(asleep[ref], page_ids=left)
        for awake in core.agents:
            if awake.counted_on:  # the quota may have refused it, and there is room now
                awake.compaction_due = True
    core.govern()
    core.memory.apply(RetryWanted())  # there is room now, or never will be: either way it is time to see


def _by_value(core: EngineCore, namespace: Namespace | None = None) -> Iterator[tuple[AgentRef, PageId | None, int]]:
    """Pages that have a file and need no frame, the least valuable first: whose, which, and what it takes.

    None for a page: what an agent has that is in no page file (see `kvd.scheduler.commit.shrink`).

    Args:
        core: the engine's parts.
        namespace: whose pages; None: anybody's.
    """
    in_use = {each.space for each in core.pager.spaces if each.use.held or each.use.hint == "queued"}
    agents = sorted(core.agents.in_namespace(namespace), key=lambda agent: agent.branch.last_used)[:-1]
    agents.sort(key=is_passing, reverse=True)
    idle = [
        agent
        for agent in agents
        if not agent.pinned and not any(branch.space in in_use for branch in agent.branches.values())
    ]
    able = [agent for agent in idle if agent.unsaved is None]
    others = [(agent, each) for agent in able for each in agent.branches.values() if each is not agent.branch]
    others.sort(key=lambda pair: pair[1].last_used)
    asleep = core.agents.asleep
    sleepers = [
        ref
        for ref, each in asleep.items()
        if namespace in (None, ref.namespace) and not each.summary.pinned and ref not in core.agents.waking
    ]
    sleepers.sort(key=lambda ref: (not is_passing(asleep[ref].summary), asleep[ref].row.updated_s))
    waits = _Waits(core)
    for agent, branch in others:
        yield from _pages(core, agent, branch, waits, behind_window=None)
    for agent in able:
        yield from _pages(core, agent, agent.branch, waits, behind_window=True)
    for ref in sleepers:
        page_bytes = _sleepers_page_bytes(core, asleep[ref])
        for page_id in asleep[ref].page_ids:
            if waits.pass_over(page_id) and core.pager.page_state(page_id) in (None, *_STORED):
                yield ref, page_id, page_bytes
    for agent in able:
        yield from _pages(core, agent, agent.branch, waits, behind_window=False)
    for ref in sleepers:
        tail_tokens = asleep[ref].summary.computed_tokens % PAGE_TOKENS
        yield ref, None, _sleepers_page_bytes(core, asleep[ref]) * len(core.spec.groups) * tail_tokens // PAGE_TOKENS
    for agent in able:
        yield agent.ref, None, _open_bytes(core, agent)
    for agent in idle:
        if agent.unsaved is not None:
            yield agent.ref, None, _open_bytes(core, agent) + _dirty_bytes(core, agent)
            for branch in agent.branches.values():
                yield from _pages(core, agent, branch, waits, behind_window=None)


def _open_bytes(core: EngineCore, agent: Agent) -> int:
    """Bytes of KV that its log holds or waits for: open pages of all branches."""
    branches = agent.branches.values()
    return sum(sum(core.page_bytes(each.space)) * (each.computed % PAGE_TOKENS) // PAGE_TOKENS for each in branches)


_STORED: Final = (PageState.CLEAN, PageState.EVICTED)
"""States of pages that have a file, and lose nothing but time without their frame."""


class _Waits:
    """Who has yet to be passed over before a page may go: branches that are awake, and sleepers.

    Args:
        core: the engine's parts.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._left: dict[PageId, int] = {}  # of pages that somebody was passed over for

    def pass_over(self, page_id: PageId) -> bool:
        """Somebody who maps it has been passed over; whether that was the last."""
        left = self._left.get(page_id)
        if left is None:
            left = self._core.pager.mapped_by(page_id) + len(self._core.agents.asleep.who_maps(page_id))
        self._left[page_id] = left - 1
        return left == 1


def _sleepers_page_bytes(core: EngineCore, agent: SleepingAgent) -> int:
    """Bytes of one of its pages, as far as that can be told without its log: the mean of its formats."""
    layouts = core.formats.layouts
    known = [layouts[each] for each in enumerate(agent.summary.format_ids) if each in layouts]
    sizes = [layout.payload_bytes for layout in known or layouts.values()]
    return sum(sizes) // len(sizes)


def _pages(
    core: EngineCore, agent: Agent, branch: Branch, waits: _Waits, *, behind_window: bool | None
) -> Iterator[tuple[AgentRef, PageId, int]]:
    """A branch's pages, its tail before its head, that nobody maps who has not been passed over yet."""
    sizes = core.page_bytes(branch.space)
    pages: list[tuple[int, int, PageView]] = [
        (number, sizes[segment.group], page)
        for segment in core.pager.segments(branch.space)
        for number, page in enumerate(segment.pages)
        if behind_window is None or page.behind_window == behind_window
    ]
    for _, page_bytes, page in sorted(pages, key=lambda entry: -entry[0]):
        if waits.pass_over(page.ref.page_id) and page.state in _STORED:
            yield agent.ref, page.ref.page_id, page_bytes


__all__ = ["shed"]
