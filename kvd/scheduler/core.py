"""The engine's parts in one place, and what turns and jobs do to agents with them.

`EngineCore` is not a loop: it owns model, pager, pool and agents on the engine thread and offers the operations that
turns and jobs are made of (fork a branch, cut KV, commit). The loop is `kvd.scheduler.engine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.errors import BudgetExceeded
from kvd.ids import FormatId, GroupId, Namespace, PageId, PageKey, SpaceId
from kvd.model.cache import SequenceCache
from kvd.model.forward import Forward
from kvd.model.loader import LoadedModel
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.scheduler.agents import (
    Agent,
    Baseline,
    Branch,
    SegmentNow,
    baseline_on_parent,
    build_record,
    cut_spans,
    mark_committed,
    page_runs,
)
from kvd.scheduler.memory import Memory, SpaceFacts
from kvd.scheduler.registry import AgentRegistry
from kvd.scheduler.requests import AgentRef
from kvd.scheduler.store_door import StoreDoor
from kvd.scheduler.turn import TurnTimes, Wait
from kvd.store.agent_image import AgentImage
from kvd.store.errors import LogVanished
from kvd.store.records import AgentRecord, PageEntry, RecordKind
from kvd.store.swap_ops import SwapResult
from kvd.vm.events import Activated, Deactivated, Forked, Pinned, RolledBack, SpaceClosed, SpaceCreated, TurnCommitted
from kvd.vm.keys import KeyChain
from kvd.vm.pager import Pager
from kvd.vm.text import TypedText

if TYPE_CHECKING:
    from kvd.attention.interface import AttentionBackend
    from kvd.quant.conditioning import LayerConditioning

NUMERICS = "kvd-1"
"""Version of the arithmetic from ids to page bytes. Another version's pages have other keys and headers."""


@dataclass(frozen=True, slots=True)
class FormatBook:
    """The page formats the engine can use, per cache group.

    Attributes:
        default_ids: format of new agents, one per group.
        layouts: by (group, format id).
        conditioning: by (format id, layer): constants of conditioned formats.
    """

    default_ids: tuple[str, ...]
    layouts: Mapping[tuple[int, str], PageLayout]
    conditioning: Mapping[tuple[str, int], LayerConditioning]


@dataclass(slots=True)
class EngineStatistics:
    """Counters since start."""

    tokens_computed: int = 0
    tokens_reused: int = 0
    tokens_replayed: int = 0
    turns: int = 0
    turns_not_durable: int = 0
    records_written: int = 0


class EngineCore:
    """Owner: the engine thread. See the module docstring.

    Args:
        loaded: model, codec, template, spec.
        pager: decides about pages.
        memory: carries it out.
        store: swap thread, logs.
        formats: page formats in use.
        backend: attention backend.
        chunk_tokens: tokens of a prefill step.
        clock: seconds, monotonic.
        log: told of what an operator wants to know: (event, facts).
    """

    def __init__(
        self,
        *,
        loaded: LoadedModel,
        pager: Pager,
        memory: Memory,
        store: StoreDoor,
        formats: FormatBook,
        backend: AttentionBackend,
        chunk_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        log: Callable[..., None],
    ) -> None:
        self.spec = loaded.spec
        self.codec = loaded.codec
        self.loaded = loaded
        self.pager = pager
        self.memory = memory
        self.store = store
        self.formats = formats
        self.backend = backend
        self.chunk_tokens = chunk_tokens
        self.clock = clock
        self.log = log
        self.forward = Forward(loaded.model)
        self.stats = EngineStatistics()
        self.agents = AgentRegistry(self.new_branch)
        self._next_space = 1
        self._sequence: tuple[SpaceId, SequenceCache] | None = None
        self._chains: dict[SpaceId, list[KeyChain]] = {}
        self._owners: dict[SpaceId, tuple[AgentRef, int]] = {}
        self._forgotten: list[PageId] = []

    # ---- text -------------------------------------------------------------------------------------------------------

    def encode(self, typed: TypedText) -> tuple[list[int], list[int]]:
        """Ids of typed text and the bytes each stands for."""
        return self.codec.encode_typed(typed)

    # ---- spaces -----------------------------------------------------------------------------------------------------

    def open_space(self, ref: AgentRef, branch_id: int, format_ids: Sequence[str]) -> SpaceId:
        """A number for a new address space, known to the hands."""
        space = SpaceId(self._next_space)
        self._next_space += 1
        layouts = tuple(self.formats.layouts[group, format_id] for group, format_id in enumerate(format_ids))
        self._owners[space] = (ref, branch_id)
        self.memory.add_space(space, SpaceFacts(ref.namespace, layouts, self._tail_reader(ref, branch_id)))
        return space

    def _tail_reader(self, ref: AgentRef, branch_id: int) -> Callable[[PageId, GroupId], None]:
        def read(page: PageId, group: GroupId) -> None:
            self.store.read_tail(page, ref, branch_id, group)

        return read

    def page_bytes(self, space: SpaceId) -> tuple[int, ...]:
        """Bytes of one page of each group in the space's formats."""
        return tuple(layout.payload_bytes for layout in self.memory.layouts(space))

    def new_branch(self, agent: Agent) -> Branch:
        """An empty branch with an empty space."""
        branch_id = agent.next_branch
        agent.next_branch += 1
        space = self.open_space(agent.ref, branch_id, self.formats.default_ids)
        self.memory.apply(SpaceCreated(space, self.page_bytes(space)))
        return Branch(branch_id, space, self.formats.default_ids)

    def close_branch(self, agent: Agent, branch: Branch) -> None:
        """Let go of a branch: its pages are unmapped; the next record says so."""
        del agent.branches[branch.branch_id]
        if agent.logged:
            agent.dropped_branches.append(branch.branch_id)
        self._release(branch.space)

    def _release(self, space: SpaceId) -> None:
        self.memory.apply(SpaceClosed(space))
        self.memory.remove_space(space)
        self._chains.pop(space, None)
        self._owners.pop(space, None)
        self._forget_sequence(space)

    def owner(self, space: SpaceId) -> tuple[AgentRef, int]:
        """Agent and branch of a space."""
        return self._owners[space]

    # ---- sequences and keys -----------------------------------------------------------------------------------------

    def sequence(self, branch: Branch) -> SequenceCache:
        """The model's view of the branch, with its present block tables."""
        if self._sequence is None or self._sequence[0] != branch.space:
            layouts = self.memory.layouts(branch.space)
            conditioning = {
                layer: constants
                for layout in layouts
                for layer in layout.layer_indices
                if (constants := self.formats.conditioning.get((layout.format_id, layer))) is not None
            }
            cache = SequenceCache(
                pool=self.memory.pool,
                spec=self.spec,
                layouts=layouts,
                conditioning=conditioning,
                backend=self.backend,
                tokens=branch.computed,
            )
            self._sequence = (branch.space, cache)
        sequence = self._sequence[1]
        if sequence.tokens != branch.computed:
            sequence.truncate(branch.computed)
        for group in range(len(branch.format_ids)):
            sequence.set_block_table(group, self.pager.block_table(branch.space, GroupId(group)))
        return sequence

    def _forget_sequence(self, space: SpaceId) -> None:
        if self._sequence is not None and self._sequence[0] == space:
            self._sequence = None

    def page_keys(self, branch: Branch, tokens: int) -> list[tuple[PageKey, ...]]:
        """Keys of the pages that become full when `tokens` more tokens have KV, per group."""
        first = branch.computed // PAGE_TOKENS
        last = (branch.computed + tokens) // PAGE_TOKENS
        if first == last:
            return [() for _ in branch.format_ids]
        chains = self._chains.get(branch.space)
        if chains is None:
            chains = self._chains[branch.space] = self._new_chains(branch)
        keys: list[tuple[PageKey, ...]] = []
        for chain, format_id in zip(chains, branch.format_ids, strict=True):
            chain.extend(branch.tokens[chain.tokens : last * PAGE_TOKENS], FormatId(format_id))
            keys.append(chain.keys[first:last])
        return keys

    def _new_chains(self, branch: Branch) -> list[KeyChain]:
        ref, _ = self._owners[branch.space]
        # sharing "agent": no other agent's look-up can meet these keys
        domain = Namespace(f"{ref.namespace}\0{ref.agent}")
        groups = range(len(branch.format_ids))
        return [KeyChain(domain, self.spec.fingerprint, GroupId(group), NUMERICS) for group in groups]

    # ---- cutting and forking ----------------------------------------------------------------------------------------

    def cut_kv(self, branch: Branch, computed: int) -> None:
        """Give up the KV from token `computed` on; ids stay."""
        self.memory.apply(RolledBack(branch.space, computed))
        branch.drop_kv_from(computed)
        self._chains.pop(branch.space, None)

    def cut_branch(self, branch: Branch, tokens: int) -> None:
        """Cut text, ids and KV to the first `tokens` ids."""
        if branch.computed > tokens:
            self.cut_kv(branch, tokens)
        branch.cut(tokens)

    def fork_branch(self, agent: Agent, source: Branch, tokens: int, times: TurnTimes) -> Generator[Wait, None, Branch]:
        """A new branch of the same agent: the first `tokens` ids of `source`. The source stays, evictable."""
        branch_id = agent.next_branch
        agent.next_branch += 1
        began = self.clock()
        space = self.open_space(agent.ref, branch_id, source.format_ids)
        yield from self._fork_space(source, space, tokens)
        times.swap_in_s += self.clock() - began
        branch = self._copy_branch(source, branch_id, space, tokens)
        branch.baseline = baseline_on_parent(source, tokens=tokens)
        branch.last_used = self.agents.tick()
        agent.branches[branch_id] = branch
        if agent.pinned:
            self.memory.apply(Pinned(space))
        agent.current = branch_id
        surplus = agent.surplus_branch()
        # a branch that others' unwritten records lean on cannot go before them
        if surplus is not None and all(b.baseline.parent != surplus.branch_id for b in agent.branches.values()):
            self.close_branch(agent, surplus)
        return branch

    def fork_agent(self, parent: Agent, ref: AgentRef, tokens: int) -> Generator[Wait, None, Agent]:
        """A new agent that maps the pages of `parent`'s current branch up to `tokens`."""
        child = Agent(ref, created_s=time.time())
        branch_id = child.next_branch
        child.next_branch += 1
        space = self.open_space(ref, branch_id, parent.branch.format_ids)
        yield from self._fork_space(parent.branch, space, tokens)
        branch = self._copy_branch(parent.branch, branch_id, space, tokens)
        branch.baseline = Baseline()  # another log: its first record says everything
        child.branches[branch_id] = branch
        child.current = branch_id
        self.agents.add(child)
        return child

    def _fork_space(self, source: Branch, space: SpaceId, tokens: int) -> Generator[Wait, None, None]:
        self.memory.apply(Activated(source.space))
        try:
            yield lambda: self.pager.is_ready(source.space) or self.pager.lost_at(source.space) is not None
            lost = self.pager.lost_at(source.space)
            if lost is not None:
                self.cut_kv(source, lost)
            self.memory.apply(Forked(source.space, space, min(tokens, source.computed)))
        except BaseException:
            self.memory.remove_space(space)
            raise
        finally:
            self.memory.apply(Deactivated(source.space))

    @staticmethod
    def _copy_branch(source: Branch, branch_id: int, space: SpaceId, tokens: int) -> Branch:
        kept_bytes = source.text_bytes_of(tokens)
        return Branch(
            branch_id,
            space,
            source.format_ids,
            tokens=source.tokens[:tokens],
            token_bytes=source.token_bytes[:tokens],
            spans=cut_spans(source.spans, kept_bytes),
            text=source.text[:kept_bytes],
            computed=min(source.computed, tokens),
        )

    # ---- admission and residency ------------------------------------------------------------------------------------

    def step_bytes(self, branch: Branch, tokens: int) -> int:
        """Bytes of pages that a branch of `tokens` tokens needs resident at once."""
        return self.pager.working_set_bytes(branch.space, max(0, tokens - branch.computed))

    def resident_bytes(self, agent: Agent) -> int:
        """Bytes of frames that hold pages of the agent (a shared page counts for each that maps it)."""
        return sum(self.pager.residency(branch.space).resident_bytes for branch in agent.branches.values())

    def has_evictable(self, space: SpaceId) -> bool:
        """Whether an eviction that was asked for is still under way (pinned and active spaces stay)."""
        now = self.pager.residency(space)
        return now.dirty_pages > 0 and not (now.active or now.pinned)

    def _pages_durable(self, space: SpaceId) -> bool:
        return self.pager.residency(space).dirty_pages == 0

    def refuse_pin_over_budget(self, agent: Agent) -> None:
        """A pin that leaves no room for anything else would stop the daemon.

        Raises:
            BudgetExceeded: with both figures; nothing changed.
        """
        need = self.pager.working_set_bytes(agent.branch.space, 0)
        pinned = self.pager.statistics().pinned_bytes
        limit = self.pager.usable_bytes // 2
        if pinned + need > limit:
            raise BudgetExceeded(
                f"pinning needs {need} bytes beside {pinned} pinned ones; at most half of the budget ({limit}) "
                "may be pinned",
                needed_bytes=need,
                pinned_bytes=pinned,
                limit_bytes=limit,
            )

    # ---- commit -----------------------------------------------------------------------------------------------------

    def commit(self, agent: Agent, branch: Branch, kind: RecordKind) -> Generator[Wait, None, tuple[bool, str | None]]:
        """Make the branch durable: wait for its pages, append one record, wait for its fsync.

        Returns:
            (True, None), or (False, reason) when the disk refused: the turn then lives in RAM and is part of the next
            record; nothing durable before it is touched.
        """
        failures = self.memory.statistics.write_failures
        yield lambda: self._pages_durable(branch.space) or self.memory.statistics.write_failures > failures
        if not self._pages_durable(branch.space):
            return self._not_durable(agent, f"page write failed: {self.memory.statistics.last_write_failure}")
        answer: list[SwapResult] = []
        self.store.append_record(self._record(agent, branch, kind), answer.append)
        yield lambda: bool(answer)
        if isinstance(answer[0].error, LogVanished):
            # somebody deleted the log under us; what RAM holds goes into a new one, as a record that stands alone
            self.log("log_rebuilt", agent=str(agent.ref), reason=answer[0].error.message)
            agent.logged = False
            for other in agent.branches.values():
                other.baseline = Baseline()
            answer.clear()
            self.store.append_record(self._record(agent, branch, kind), answer.append)
            yield lambda: bool(answer)
        result = answer[0]
        if result.error is not None or result.image is None:
            reason = result.error.message if result.error is not None else "the record was not applied"
            return self._not_durable(agent, reason)
        yield from self._committed(agent, branch, result.image)
        return True, None

    def _record(self, agent: Agent, branch: Branch, kind: RecordKind) -> AgentRecord:
        segments: list[SegmentNow] = []
        for group, segment in enumerate(self.pager.segments(branch.space)):
            pages = tuple(PageEntry(p.page_id, p.key, page_runs(n)) for n, p in enumerate(segment.refs))
            segments.append(SegmentNow(pages, segment.tail_tokens, self._extractor(branch, group, segment.tail_tokens)))
        meta: dict[str, object] = {"pinned": agent.pinned, "created_s": agent.created_s}
        kind = kind if agent.logged else "create"
        return build_record(agent, branch, segments, kind=kind, time_s=time.time(), numerics=NUMERICS, meta=meta)

    def _extractor(self, branch: Branch, group: int, tail_tokens: int) -> Callable[[int, int], bytes]:
        def extract(start: int, end: int) -> bytes:
            table = self.pager.block_table(branch.space, GroupId(group))
            return self.memory.pool.extract(table[branch.computed // PAGE_TOKENS], start, end)

        return extract

    def _not_durable(self, agent: Agent, reason: str) -> tuple[bool, str | None]:
        agent.unsaved = reason
        self.stats.turns_not_durable += 1
        self.log("turn_not_durable", agent=str(agent.ref), reason=reason)
        return False, reason

    def _committed(self, agent: Agent, branch: Branch, image: AgentImage) -> Generator[Wait, None, None]:
        agent.seq = image.seq
        agent.logged = True
        agent.unsaved = None
        mark_committed(branch)
        self.memory.apply(TurnCommitted(branch.space))
        self.stats.records_written += 1
        page_bytes = sum(layout.payload_bytes for layout in self.memory.layouts(branch.space))
        if agent.dropped_branches or image.compaction_due(page_bytes):
            answer: list[SwapResult] = []
            self.store.compact_log(agent.ref, frozenset(agent.branches), answer.append)
            yield lambda: bool(answer)
            if answer[0].image is not None:
                agent.seq = answer[0].image.seq
                agent.dropped_branches.clear()
            elif answer[0].error is not None:
                # the long log is as good as the short one; the next commit tries again
                self.log("log_not_compacted", agent=str(agent.ref), reason=answer[0].error.message)
        self._delete_forgotten()

    def forget_page(self, page: PageId) -> None:
        """Nobody maps the page. Its file goes once no log on disk names it any more."""
        self._forgotten.append(page)

    def _delete_forgotten(self) -> None:
        # A page may have been named by several agents' logs (forks). While any agent has changes that its log lacks,
        # that log may still name the page, and a crash would bring the agent back with it.
        if any(agent.unsaved is not None or agent.dropped_branches for agent in self.agents):
            return
        for page in self._forgotten:
            self.store.delete_page(page)
        self._forgotten.clear()

    def discard_agent(self, agent: Agent) -> None:
        """Drop an agent that never came to anything (its first request was refused)."""
        self.agents.remove(agent)
        for branch in agent.branches.values():
            self._release(branch.space)

    def close(self) -> None:
        """Finish what the swap thread has queued (the engine thread is ending)."""
        self.store.close()

    def delete_agent(self, agent: Agent) -> Generator[Wait, None, str | None]:
        """Delete log first, then pages; the agent is gone from RAM only when the log is gone from disk."""
        if agent.logged:
            answer: list[SwapResult] = []
            self.store.delete_log(agent.ref, answer.append)
            yield lambda: bool(answer)
            error = answer[0].error
            if error is not None:
                return error.message
        agent.logged = False
        self.agents.remove(agent)
        for branch in list(agent.branches.values()):
            self._release(branch.space)
        self._delete_forgotten()
        return None
