"""What a monitor shows: where every page is and what each agent does, told again only where it changed.

Theory of operation. Each look compares every agent with what it was at the look before, by a few numbers (its spaces'
change counters, its request, its turns), and makes new page maps only of those that differ: the engine thread pays for
changes, not for agents. A changed agent gets the number of the look; a client that says which look it has seen last is
told what has a larger one. Maps are bytes here; counting them and writing them out is left to whoever sends them
(`AgentPicture.to_wire`, on the event loop). Numbers begin at the wall clock's microseconds, so that one of an earlier
run of the daemon is known for what it is.

Nothing is kept and nothing compared before somebody asks for the first time.

Owner: the engine thread, but for `to_wire`. May import kvd.vm.codes, kvd.store.sleeping, kvd.quant.spec and siblings.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvd.ids import GroupId
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import Agent, TurnFigures
from kvd.scheduler.disk_quotas import use_by_namespace
from kvd.scheduler.requests import AgentRef, TurnRequest
from kvd.store.sleeping import SleepingAgent
from kvd.vm.codes import BEHIND_WINDOW, SHARED, STATE_BITS, STATES, runs
from kvd.vm.page import IN_RAM, STORED, PageState
from kvd.vm.window import first_seen_page

if TYPE_CHECKING:
    from kvd.ids import Namespace, SpaceId
    from kvd.scheduler.core import EngineCore
    from kvd.scheduler.messages import HeldRequest

MAX_ASLEEP: Final = 2000
"""Sleepers that are told: an answer has to be a message, however many there are."""

MAX_GONE: Final = 1000
"""Agents that are remembered to be gone; whoever looked longer ago gets all again."""

_IN_RAM: Final = frozenset(STATES.index(str(state)) for state in IN_RAM)
_STORED: Final = frozenset(STATES.index(str(state)) for state in STORED)
_PACKED: Final = STATES.index(str(PageState.PACKED))
_LOST: Final = STATES.index(str(PageState.LOST))
_EVICTED: Final = STATES.index(str(PageState.EVICTED))
_STASHED: Final = STATES.index(str(PageState.STASHED))


@dataclass(frozen=True, slots=True)
class SegmentPicture:
    """One segment: a code a page, and what a page of it takes.

    Attributes:
        codes: see `kvd.vm.codes`; the open page last.
        page_bytes: of a whole page.
        first_page: the pages before it are behind the window.
        packed_bytes: what the open page takes while it is packed.
    """

    codes: bytes
    page_bytes: int
    first_page: int
    packed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BranchPicture:
    """One branch: its number, tokens, and a segment for each cache group."""

    branch: int
    tokens: int
    segments: tuple[SegmentPicture, ...]


@dataclass(frozen=True, slots=True)
class AgentPicture:
    """One agent at one look; frozen, so that any thread may write it out."""

    ref: AgentRef
    state: str
    tokens: int
    computed_tokens: int
    is_pinned: bool
    is_durable: bool
    branches: tuple[BranchPicture, ...]
    turns: TurnFigures
    generating_tokens: int

    def to_wire(self) -> dict[str, object]:
        """As the client sees it."""
        counts = dict.fromkeys(_COUNTS, 0)
        branches = [
            {"branch": each.branch, "tokens": each.tokens, "segments": [*self._segments(each, counts)]}
            for each in self.branches
        ]
        turns = self.turns
        return {
            "agent": self.ref.agent,
            "namespace": self.ref.namespace,
            "state": self.state,
            "tokens": self.tokens,
            "computed_tokens": self.computed_tokens,
            "pinned": self.is_pinned,
            "durable": self.is_durable,
            "branches": branches,
            **counts,
            "turns": turns.turns,
            "prompt_tokens": turns.prompt_tokens,
            "cached_tokens": turns.cached_tokens,
            "completion_tokens": turns.completion_tokens,
            "generated_tokens": turns.completion_tokens + self.generating_tokens,
            "last_turn": turns.last,
        }

    @staticmethod
    def _segments(branch: BranchPicture, counts: dict[str, int]) -> Iterator[dict[str, object]]:
        for group, segment in enumerate(branch.segments):
            found = runs(segment.codes)
            for code, pages in zip(found[::2], found[1::2], strict=True):
                state = code & STATE_BITS
                counts["pages"] += pages
                counts["resident_pages"] += pages * (state in _IN_RAM)
                counts["swapped_pages"] += pages * (state in _STORED)
                counts["lost_pages"] += pages * (state == _LOST)
                counts["shared_pages"] += pages * bool(code & SHARED)
                counts["behind_window_pages"] += pages * bool(code & BEHIND_WINDOW)
                page_bytes = segment.packed_bytes if state == _PACKED else segment.page_bytes
                counts["resident_bytes"] += pages * page_bytes * (state in _IN_RAM)
            yield {
                "group": group,
                "page_bytes": segment.page_bytes,
                "first_page": segment.first_page,
                "runs": found,
            }


_COUNTS: Final = (
    "pages",
    "resident_pages",
    "swapped_pages",
    "lost_pages",
    "shared_pages",
    "behind_window_pages",
    "resident_bytes",
)


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found.

    Attributes:
        version: its number.
        is_full: `agents` are all there are.
        agents: all, or those that changed.
        gone: agents that are no more.
        figures: of the daemon as a whole.
        windows: per cache group.
    """

    version: int
    is_full: bool
    agents: tuple[AgentPicture, ...]
    gone: tuple[AgentRef, ...]
    figures: Mapping[str, object]
    windows: tuple[int | None, ...]

    def to_wire(self) -> dict[str, object]:
        """As the client sees it; to be called where it keeps nobody waiting."""
        return {
            "version": self.version,
            "full": self.is_full,
            "states": list(STATES),
            "page_tokens": PAGE_TOKENS,
            "windows": list(self.windows),
            "agents": [agent.to_wire() for agent in self.agents],
            "gone": [[ref.namespace, ref.agent] for ref in self.gone],
            "figures": self.figures,
        }


@dataclass(slots=True)
class _Seen:
    signature: Hashable
    version: int
    picture: AgentPicture


@dataclass(slots=True)
class _Activity:
    """What an agent does: of its requests the one that has got furthest."""

    state: str
    generating_tokens: int = 0


_RANKS: Final = ("idle", "queued", "preempted", "running")


@dataclass(slots=True)
class Monitor:
    """Owner: the engine thread; `look` is the only method that changes it."""

    _base: int = field(default_factory=lambda: int(time.time() * 1e6))
    _version: int = 0
    _seen: dict[AgentRef, _Seen] = field(default_factory=dict)
    _gone: deque[tuple[int, AgentRef]] = field(default_factory=lambda: deque(maxlen=MAX_GONE))
    _began_s: float = field(default_factory=time.monotonic)

    def look(self, core: EngineCore, namespace: Namespace | None, since: int | None) -> Look:
        """Look at all agents; tell those of a namespace (None: all) that changed since an earlier look (None: all)."""
        self._version = max(self._version, self._base) + 1
        doing = _activities(core.requests.values(), core)
        there: set[AgentRef] = set()
        for agent in core.agents:
            there.add(agent.ref)
            self._compare(core, agent, doing.get(agent.ref) or _Activity("idle"))
        for ref in list(core.agents.asleep)[-MAX_ASLEEP:]:
            there.add(ref)
            state = doing[ref].state if ref in doing else "asleep"
            seen = self._seen.get(ref)
            if seen is None or seen.signature != state:
                picture = _sleeper(core, ref, core.agents.asleep[ref], state)
                self._seen[ref] = _Seen(state, self._version, picture)
        if len(there) != len(self._seen):
            for ref in [ref for ref in self._seen if ref not in there]:
                del self._seen[ref]
                self._gone.append((self._version, ref))
        is_full = since is None or not self._base < since < self._version or self._forgot(since)
        known = self._base if is_full or since is None else since
        return Look(
            version=self._version,
            is_full=is_full,
            agents=tuple(
                seen.picture
                for ref, seen in self._seen.items()
                if seen.version > known and namespace in (None, ref.namespace)
            ),
            gone=()
            if is_full
            else tuple(ref for at, ref in self._gone if at > known and namespace in (None, ref.namespace)),
            figures=self._figures(core),
            windows=tuple(group.layer.window for group in core.spec.groups),
        )

    def _forgot(self, since: int) -> bool:
        """Agents that went after that look may not be remembered any more."""
        return len(self._gone) == self._gone.maxlen and self._gone[0][0] > since

    def _compare(self, core: EngineCore, agent: Agent, doing: _Activity) -> None:
        branches = [agent.branch, *agent.other_branches]
        tokens = len(agent.branch.tokens)
        signature = (
            doing.state,
            doing.generating_tokens,
            agent.turns.turns,
            agent.pinned,
            agent.unsaved is None,
            tokens,
            tuple((branch.branch_id, core.pager.map_version(branch.space)) for branch in branches),
        )
        seen = self._seen.get(agent.ref)
        if seen is not None and seen.signature == signature:
            return
        picture = AgentPicture(
            ref=agent.ref,
            state=doing.state,
            tokens=tokens,
            computed_tokens=agent.branch.computed,
            is_pinned=agent.pinned,
            is_durable=agent.unsaved is None,
            branches=tuple(
                BranchPicture(branch.branch_id, len(branch.tokens), tuple(_segments(core, branch.space)))
                for branch in branches
            ),
            turns=replace(agent.turns),
            generating_tokens=doing.generating_tokens,
        )
        self._seen[agent.ref] = _Seen(signature, self._version, picture)

    def _figures(self, core: EngineCore) -> dict[str, object]:
        """Those that cost nothing to ask: no walk over pages, no file."""
        budget, counters, store = core.pager.budget, core.pager.counters, core.store.statistics()
        hands, stats, pool = core.memory.statistics, core.stats, core.memory.pool.statistics()
        return {
            "time_s": round(time.time(), 3),
            "uptime_s": round(time.monotonic() - self._began_s, 3),
            "budget_bytes": budget.budget_bytes,
            "usable_bytes": budget.usable_bytes,
            "resident_bytes": budget.resident_bytes,
            "in_flight_bytes": budget.in_flight_bytes,
            "frames": pool.frames,
            "namespaces": use_by_namespace(core.pager, core.disk_quotas, store.namespace_bytes),
            "swap_bytes": store.swap_bytes,
            "disk_used_bytes": store.used_bytes,
            "quota_bytes": store.quota_bytes,
            "bytes_read": store.bytes_read,
            "bytes_written": store.bytes_written,
            "evictions": counters.evictions,
            "window_drops": counters.window_drops,
            "faults": counters.faults,
            "refaults": counters.refaults,
            "prefetched_pages": core.pager.prefetched_pages,
            "pages_written": hands.pages_written,
            "load_failures": hands.load_failures,
            "page_files_lost": hands.page_files_lost,
            "max_batch": stats.max_batch,
            "requests": stats.requests,
            "preemptions": stats.preemptions,
            "tokens_computed": stats.tokens_computed,
            "tokens_reused": stats.tokens_reused,
            "decode_rows": stats.decode_rows,
            "turns": stats.turns.turns,
            "prompt_tokens": stats.turns.prompt_tokens,
            "cached_tokens": stats.turns.cached_tokens,
            "completion_tokens": stats.turns.completion_tokens,
            "agents": len(core.agents),
            "agents_asleep": len(core.agents.asleep),
            "agents_untold": max(0, len(core.agents.asleep) - MAX_ASLEEP),
        }


def _segments(core: EngineCore, space: SpaceId) -> Iterator[SegmentPicture]:
    tails = core.pager.tails(space)
    for group, (codes, page_bytes) in enumerate(zip(core.pager.page_codes(space), core.page_bytes(space), strict=True)):
        tail = tails[group]
        packed_bytes = 0 if tail is None else tail.ram_bytes
        yield SegmentPicture(codes, page_bytes, core.pager.first_page(space, GroupId(group)), packed_bytes)


def _sleeper(core: EngineCore, ref: AgentRef, agent: SleepingAgent, state: str) -> AgentPicture:
    """An agent whose log has not been read since the start: all of it is on disk."""
    summary = agent.summary
    full, part = divmod(summary.computed_tokens, PAGE_TOKENS)
    segments = []
    for group, format_id in enumerate(summary.format_ids or core.formats.default_ids):
        layout = core.formats.layouts.get((group, format_id))
        window = core.spec.groups[group].layer.window
        first = first_seen_page(summary.computed_tokens, window, PAGE_TOKENS)
        codes = bytes([_EVICTED | BEHIND_WINDOW]) * min(first, full) + bytes([_EVICTED]) * max(0, full - first)
        codes += bytes([_STASHED]) if part else b""
        segments.append(SegmentPicture(codes, 0 if layout is None else layout.payload_bytes, first))
    return AgentPicture(
        ref=ref,
        state=state,
        tokens=agent.row.tokens,
        computed_tokens=summary.computed_tokens,
        is_pinned=summary.pinned,
        is_durable=True,
        branches=(BranchPicture(0, agent.row.tokens, tuple(segments)),),
        turns=TurnFigures(),
        generating_tokens=0,
    )


def _activities(requests: Iterable[HeldRequest], core: EngineCore) -> dict[AgentRef, _Activity]:
    """What agents do, of those that have requests."""
    doing: dict[AgentRef, _Activity] = {}
    for held in requests:
        if held.internal:
            continue
        now = _activity(held, core)
        for ref in held.agents:
            before = doing.get(ref)
            if before is None or _RANKS.index(before.state) < _RANKS.index(now.state):
                doing[ref] = now
    return doing


def _activity(held: HeldRequest, core: EngineCore) -> _Activity:
    if held.work is None:
        return _Activity("queued")
    if not isinstance(held.request, TurnRequest):
        return _Activity("running")
    if held.state is None or held.state.residence is None or not held.has_held_pages:
        return _Activity("queued")
    agent = core.agents.known(held.request.ref)
    generating = 0
    if agent is not None and held.state.prompt_tokens:
        before = held.state.prompt_tokens + held.request.given_tokens  # those of a resumed stream were made earlier
        generating = max(0, len(agent.branch.tokens) - before)
    return _Activity("preempted" if held.state.residence.is_away else "running", generating)


__all__ = ["MAX_ASLEEP", "AgentPicture", "Look", "Monitor"]
