"""The engine's parts in one place, and what turns and jobs do to agents with them.

`EngineCore` is not a loop: it owns model, pager, pool and agents on the engine thread and offers the operations that
turns and jobs are made of (fork a branch, cut KV, commit). The loop is `kvd.scheduler.engine`.
Long because it is the one place where all parts meet: a third of it is their documentation and construction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.config import MAX_BATCH
from kvd.ids import FormatId, GroupId, Namespace, PageId, PageKey, RequestId, SpaceId
from kvd.model.cache import SequenceCache
from kvd.model.forward import Forward, clear_buffer_cache
from kvd.model.loader import LoadedModel
from kvd.quant.codec import CODEC_VERSION
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.scheduler.agents import Agent, Baseline, Branch, TurnFigures, baseline_on_parent
from kvd.scheduler.disk_quotas import DiskQuotas
from kvd.scheduler.endings import mark_passing
from kvd.scheduler.governor import WriteGovernor
from kvd.scheduler.journal import Journal
from kvd.scheduler.limits import Limits, LimitSettings
from kvd.scheduler.memory import Memory, SpaceFacts
from kvd.scheduler.monitoring import Monitor
from kvd.scheduler.paging import Paging
from kvd.scheduler.pressure import Pressure
from kvd.scheduler.registry import AgentRegistry
from kvd.scheduler.requests import AgentRef
from kvd.scheduler.reserving import Reservations
from kvd.scheduler.sharing import Sharing
from kvd.scheduler.store_door import StoreDoor
from kvd.scheduler.thrashing import Thrashing
from kvd.scheduler.waiting import Stop, Wait, Waiting, apply_when_room, hold_cut, release_cut
from kvd.scheduler.warm import WarmTier
from kvd.vm.errors import NoRoomForCopy
from kvd.vm.events import (
    Forked,
    MemoryWanted,
    Pinned,
    RolledBack,
    SpaceClosed,
    SpaceCreated,
    Unpinned,
    WritesAllowed,
)
from kvd.vm.keys import KeyChain
from kvd.vm.pager import Pager
from kvd.vm.text import TypedText, cut_spans

if TYPE_CHECKING:
    from kvd.attention.interface import AttentionBackend
    from kvd.quant.conditioning import LayerConditioning
    from kvd.scheduler.messages import HeldRequest
    from kvd.store.folder_watch import FolderWatch

NUMERICS = f"kvd-1/codec-{CODEC_VERSION}"
"""Version of the arithmetic from ids to page bytes. Another version's pages have other keys and headers."""

MAX_SEQUENCES = 64
"""Branches whose view for the model is kept; more than run at once."""


@dataclass(frozen=True, slots=True)
class FormatBook:
    """The page formats the engine can use, per cache group.

    Attributes:
        default_ids: format of new agents, one per group.
        layouts: by (group, format id).
        conditioning: by (format id, layer): constants of conditioned formats.
    """

    default_ids: tuple[str, ...]
    layouts: dict[tuple[int, str], PageLayout]
    conditioning: dict[tuple[str, int], LayerConditioning]

    def learn(self, group: int, layout: PageLayout, operators: Sequence[LayerConditioning]) -> None:
        """Make an imported agent's conditioned format readable; `operators` in the group's layer order."""
        self.layouts[group, layout.format_id] = layout
        for layer, each in zip(layout.layer_indices, operators, strict=True):
            self.conditioning[layout.format_id, layer] = each


@dataclass(slots=True)
class EngineStatistics:
    """Counters since start.

    Attributes:
        requests_busy: ended since there was no room: they got nowhere, and held nothing that others could use.
        agents_expired: deleted since their time was over.
        pages_given_up: page files deleted to keep to the quota, although agents had them.
        tokens_shared: of the reused tokens, those in pages that another agent computed.
        swap_in_waited_s: turns waited for pages, each by itself.
        swap_in_exposed_s: the engine had nothing to run while at least one did.
        busy_s: time of the engine's loop that it did not sleep.
        forward_s: of it, in the model's forward passes.
        sampling_s: of it, choosing tokens. What remains is the engine's own: messages, plans, books, events.
        turns: what all turns came to.
    """

    tokens_computed: int = 0
    tokens_reused: int = 0
    tokens_shared: int = 0
    pages_given_up: int = 0
    requests_busy: int = 0
    tokens_replayed: int = 0
    requests: int = 0
    turns_not_durable: int = 0
    agents_expired: int = 0
    records_written: int = 0
    preemptions: int = 0
    max_batch: int = 1
    decode_steps: int = 0
    decode_rows: int = 0
    largest_batch: int = 0
    prefill_chunks: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    swap_in_waited_s: float = 0.0
    swap_in_exposed_s: float = 0.0
    busy_s: float = 0.0
    forward_s: float = 0.0
    sampling_s: float = 0.0
    turns: TurnFigures = field(default_factory=TurnFigures)

    def note_steps(self, *, rows: int, is_chunk: bool, seconds: float) -> None:
        """The model ran: decode steps of `rows` requests together, or one prefill chunk."""
        if is_chunk:
            self.prefill_chunks += 1
            self.prefill_s += seconds
        else:
            self.decode_steps += 1
            self.decode_s += seconds
            self.decode_rows += rows
            self.largest_batch = max(self.largest_batch, rows)


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
        prefetch: what is loaded ahead (`kvd.config.PREFETCH`).
        sharing: who may map whose pages (`kvd.config.SHARING`).
        clock: seconds, monotonic.
        age_clock: likewise, and goes on while the machine sleeps: ages of agents go by it. None: `clock`.
        log: told of what an operator wants to know: (event, facts).
        default_batch: requests that run at once unless the engine was told.
        limits: what the daemon was started with.
        pressure: watches the process's footprint; without it, it is measured and has no limit.
        write_limit_bytes: what may be written to disk in a minute; None: any amount.
        swap_off: KV is kept in RAM only: nothing is durable, and what is evicted is computed again.

    Attributes:
        to_shrink: agents that a full quota asks to do with what their page files, text and ids say, an ordered set.
        forgotten: pages nobody maps any more, an ordered set; their files go once no log names them.
        sweep_due: something changed since they were offered for deletion.
        warm: exported agents that are imported when somebody first uses their names.
        refusing_since_s: when the disk was first seen to refuse pages, to a second; None while it takes them.
        watch: notices changes of page files by others; None: nobody does.
        page_waits: turns that wait for pages now.
        batch_failures: batches in a row that failed through no row's fault.
        requests: those that have not been answered.
        journal: tells what happens.
        monitor: what was shown of all this.
    """

    numerics = NUMERICS

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
        prefetch: str = "predict",
        sharing: str = "namespace",
        clock: Callable[[], float] = time.monotonic,
        age_clock: Callable[[], float] | None = None,
        log: Callable[..., None],
        default_batch: int = 1,
        limits: LimitSettings | None = None,
        pressure: Pressure | None = None,
        write_limit_bytes: int | None = None,
        swap_off: bool = False,
    ) -> None:
        self.default_batch = default_batch
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
        self._age_clock = clock if age_clock is None else age_clock
        self._epoch_s = time.time() - self._age_clock()
        self.log = log
        self.swap_off = swap_off
        self.governor = WriteGovernor(write_limit_bytes, clock)
        self.disk_quotas = DiskQuotas()
        self.refusing_since_s: float | None = None
        self.govern()
        self.forward = Forward(loaded.model, assisted=backend.name == "cpu")
        self.stats = EngineStatistics()
        self.thrashing = Thrashing(most=MAX_BATCH)
        self.reservations = Reservations(lambda: pager.usable_bytes, self.thrashing, lambda: pager.budget.quotas)
        self.limits = Limits(self, limits if limits is not None else LimitSettings())
        self.pressure = pressure if pressure is not None else Pressure()
        self.agents = AgentRegistry(self.new_branch)
        self._next_space = 1
        self._sequences: dict[SpaceId, SequenceCache] = {}
        self._chains: dict[SpaceId, list[KeyChain]] = {}
        self._owners: dict[SpaceId, tuple[AgentRef, int]] = {}
        self.paging = Paging(self, prefetch)
        self.sharing = Sharing(self, sharing)
        self.forgotten: dict[PageId, None] = {}
        self.to_shrink: dict[AgentRef, None] = {}
        self.sweep_due = False
        self.warm = WarmTier()
        self.watch: FolderWatch | None = None
        self.page_waits = 0
        self.batch_failures = 0
        self.requests: Mapping[RequestId, HeldRequest] = {}
        self.journal = memory.journal = Journal(self)
        self.monitor = Monitor()

    def govern(self) -> None:
        """Tell the pager what it may write, as time passes; note since when the disk refuses."""
        if not self.pager.writes_fail:
            self.refusing_since_s = None
        elif self.refusing_since_s is None:
            self.refusing_since_s = self.clock()
        figures = self.store.statistics()
        allowance_bytes = self.governor.tick(figures.bytes_written)
        self.memory.apply(WritesAllowed(allowance_bytes, self.disk_quotas.look(figures.namespace_bytes)))

    @property
    def progress(self) -> tuple[int, int, int]:
        """Changes whenever a request got anywhere."""
        return (
            self.stats.tokens_computed + self.stats.tokens_replayed,
            self.stats.records_written,
            self.stats.requests - self.stats.requests_busy,
        )

    def wall_s(self) -> float:
        """Seconds since the epoch, by the wall clock as it was at the start: setting it moves nothing, sleep counts."""
        return self._epoch_s + self._age_clock()

    # ---- text -------------------------------------------------------------------------------------------------------

    def encode(self, typed: TypedText, *, at_start: bool) -> tuple[list[int], list[int]]:
        """Ids of typed text and the bytes each stands for; `at_start`: nothing comes before it."""
        return self.codec.encode_typed(typed, at_start=at_start) if typed.data else ([], [])

    # ---- spaces -----------------------------------------------------------------------------------------------------

    def open_space(self, ref: AgentRef, branch_id: int, format_ids: Sequence[str]) -> SpaceId:
        """A number for a new address space, known to the hands."""
        space = SpaceId(self._next_space)
        self._next_space += 1
        layouts = tuple(self.formats.layouts[group, format_id] for group, format_id in enumerate(format_ids))
        self._owners[space] = (ref, branch_id)
        self.memory.add_space(
            space, SpaceFacts(self.sharing.domain_of(ref), layouts, self._tail_reader(ref, branch_id))
        )
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
        self.memory.apply(SpaceCreated(space, self.page_bytes(space), agent.ref.namespace))
        return Branch(branch_id, space, self.formats.default_ids)

    def make_current(self, agent: Agent, branch: Branch) -> None:
        """The branch that clients mean from here on; a pinned agent's pin goes with it."""
        if agent.pinned and branch.branch_id != agent.current:
            self.memory.apply(Unpinned(agent.branch.space))
            self.memory.apply(Pinned(branch.space))
        agent.current = branch.branch_id
        branch.last_used = self.agents.tick()
        if agent.ttl_s is not None:
            mark_passing(self, agent)

    def close_branch(self, agent: Agent, branch: Branch) -> None:
        """Let go of a branch: its pages are unmapped; a compaction takes it out of the log once that pays."""
        del agent.branches[branch.branch_id]
        if branch.logged:
            agent.dropped_branches.append(branch.branch_id)
            agent.dropped_bytes += self._own_bytes(branch)
        self._release(branch.space)

    def _own_bytes(self, branch: Branch) -> int:
        """Bytes of sealed pages that no other space maps."""
        segments = zip(self.pager.segments(branch.space), self.page_bytes(branch.space), strict=True)
        return sum(page_bytes for segment, page_bytes in segments for page in segment.pages if page.shared_spaces == 1)

    def discard_agent(self, agent: Agent) -> None:
        """Forget an agent and its spaces; its log is the caller's business."""
        self.agents.remove(agent)
        for branch in agent.branches.values():
            self._release(branch.space)
        agent.branches.clear()

    def let_go(self, branch: Branch) -> None:
        """Unmap the pages of a branch that no agent has made its own (`Sharing.map_pages`)."""
        self._release(branch.space)

    def _release(self, space: SpaceId) -> None:
        self.sharing.forget(space)
        self.journal.gather()  # nobody knows afterwards whose it was
        self.memory.apply(SpaceClosed(space))
        self.memory.remove_space(space)
        self._owners.pop(space, None)
        self.forget_caches(space)

    def is_open(self, space: SpaceId) -> bool:
        """Whether a space has not been closed."""
        return space in self._owners

    def owner(self, space: SpaceId) -> tuple[AgentRef, int]:
        """Agent and branch of a space."""
        return self._owners[space]

    # ---- sequences and keys -----------------------------------------------------------------------------------------

    def sequence(self, branch: Branch) -> SequenceCache:
        """The model's view of the branch, with its present block tables."""
        sequence = self._sequences.pop(branch.space, None)
        if sequence is None:
            layouts = self.memory.layouts(branch.space)
            conditioning = {
                layer: constants
                for layout in layouts
                for layer in layout.layer_indices
                if (constants := self.formats.conditioning.get((layout.format_id, layer))) is not None
            }
            sequence = SequenceCache(
                pool=self.memory.pool,
                spec=self.spec,
                layouts=layouts,
                conditioning=conditioning,
                backend=self.backend,
                tokens=branch.computed,
            )
        self._sequences[branch.space] = sequence  # the one used last is last
        if len(self._sequences) > MAX_SEQUENCES:
            del self._sequences[next(iter(self._sequences))]
        if sequence.tokens != branch.computed:
            sequence.truncate(branch.computed)
        for group in range(len(branch.format_ids)):
            table = self.pager.block_table(branch.space, GroupId(group))
            sequence.set_block_table(group, table, first_page=self.pager.first_page(branch.space, GroupId(group)))
        return sequence

    def forget_caches(self, space: SpaceId) -> None:
        """Drop what is derived from the space's tokens; it is made again when it is needed."""
        self._chains.pop(space, None)
        self._sequences.pop(space, None)

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
        domain = Namespace(self.sharing.domain_of(ref))
        groups = range(len(branch.format_ids))
        return [KeyChain(domain, self.spec.fingerprint, GroupId(group), NUMERICS) for group in groups]

    # ---- cutting and forking ----------------------------------------------------------------------------------------

    def cut_kv(self, branch: Branch, computed: int) -> None:
        """Give up the KV from token `computed` on; ids stay.

        Raises:
            NoRoomForCopy: a cut inside a page found no frame; nothing changed.
        """
        self.memory.apply(RolledBack(branch.space, computed))
        branch.drop_kv_from(computed)
        self._chains.pop(branch.space, None)
        self.sharing.cut(branch.space, computed)

    def cut_branch(self, branch: Branch, tokens: int, stop: Stop) -> Waiting:
        """Cut text, ids and KV to the first `tokens` ids. A page that is cut must be resident (see `hold_cut`).

        Raises:
            Cancelled, NoRoomForCopy: nothing changed.
        """
        if branch.computed > tokens:
            yield from apply_when_room(self, RolledBack(branch.space, tokens), stop)
            self._chains.pop(branch.space, None)
        branch.cut(tokens)
        self.sharing.cut(branch.space, branch.computed)

    def fork_branch(
        self, agent: Agent, source: Branch, tokens: int, stop: Stop
    ) -> Generator[Wait, None, tuple[Branch, list[str]]]:
        """A new branch of the same agent: the first `tokens` ids of `source`. The source stays, evictable.

        Returns:
            The branch, and what of the source's KV turned out to be lost.

        Raises:
            Cancelled, Busy: no branch was made.
        """
        branch_id = agent.next_branch
        space, computed, notes = yield from self._fork_space(source, agent.ref, branch_id, tokens, stop)
        agent.next_branch += 1
        branch = self.copy_branch(source, branch_id, space, tokens)
        branch.baseline = baseline_on_parent(source, tokens=tokens)
        branch.drop_kv_from(computed)
        agent.branches[branch_id] = branch
        self.sharing.note(branch)
        return branch, notes

    def fork_agent(
        self,
        parent: Agent,
        ref: AgentRef,
        tokens: int,
        stop: Stop,
        meanwhile: Callable[[int], None] = lambda computed: None,
    ) -> Generator[Wait, None, Agent]:
        """A new agent that maps the pages of `parent`'s current branch up to `tokens`.

        Args:
            parent: whose branch.
            ref: the new agent's name.
            tokens: ids it keeps.
            stop: says why to end early.
            meanwhile: called with the tokens whose KV it keeps, once nothing can prevent the fork any more and before
                its open page is copied.

        Raises:
            Cancelled, Busy: no agent was made.
        """
        child = Agent(ref, created_s=time.time())
        space, computed, _ = yield from self._fork_space(parent.branch, ref, child.next_branch, tokens, stop, meanwhile)
        branch = self.copy_branch(parent.branch, child.next_branch, space, tokens)
        branch.drop_kv_from(computed)
        child.next_branch += 1
        branch.baseline = Baseline()  # another log: its first record says everything
        branch.last_used = self.agents.tick()  # made now, or it would be the first to pay for room on disk
        child.branches[branch.branch_id] = branch
        child.current = branch.branch_id
        self.agents.add(child)
        self.sharing.note(branch)
        return child

    def _fork_space(
        self,
        source: Branch,
        ref: AgentRef,
        branch_id: int,
        tokens: int,
        stop: Stop,
        meanwhile: Callable[[int], None] = lambda computed: None,
    ) -> Generator[Wait, None, tuple[SpaceId, int, list[str]]]:
        computed = min(tokens, source.computed)
        if self.pager.has_cut_at_hand(source.space, computed):
            space = self.open_space(ref, branch_id, source.format_ids)
            try:
                self.memory.apply(Forked(source.space, space, computed), lambda: meanwhile(computed))
            except NoRoomForCopy:  # what is at hand may not be any more when there is room
                self.memory.remove_space(space)
                del self._owners[space]
            else:
                return space, computed, []
        # nothing of the source need be in RAM but the page that is cut
        computed, notes = yield from hold_cut(self, source, tokens, stop)
        space = self.open_space(ref, branch_id, source.format_ids)
        try:
            yield from apply_when_room(self, Forked(source.space, space, computed), stop, lambda: meanwhile(computed))
        except BaseException:
            self.memory.remove_space(space)
            del self._owners[space]
            raise
        finally:
            release_cut(self, source)
        return space, computed, notes

    @staticmethod
    def copy_branch(source: Branch, branch_id: int, space: SpaceId, tokens: int) -> Branch:
        """A branch with the first `tokens` ids and their text of another, for a space that maps their KV."""
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

    # ---- residency --------------------------------------------------------------------------------------------------

    def resident_bytes(self, agent: Agent) -> int:
        """Bytes of frames that hold pages of the agent (a shared page counts for each that maps it)."""
        return sum(self.pager.residency(branch.space).resident_bytes for branch in agent.branches.values())

    def pages_durable(self, space: SpaceId) -> bool:
        """Whether every sealed page of the space is in swap."""
        return not self.pager.dirty_pages(space)

    def dirty_pages(self, space: SpaceId) -> list[PageId]:
        """Sealed pages of the space that are not in swap yet."""
        return self.pager.dirty_pages(space)

    # ---- the end of things ------------------------------------------------------------------------------------------

    def relieve(self) -> None:
        """Look at the footprint; give up memory that nobody needs when it is too much, and say when that begins."""
        before = self.pressure.level
        wanted_bytes = self.pressure.look()
        if wanted_bytes:
            clear_buffer_cache()
            kept_bytes = self.memory.pool.trim() + self.store.trim()
            if wanted_bytes > kept_bytes:
                self.memory.apply(MemoryWanted(wanted_bytes - kept_bytes))
                self.memory.pool.trim()  # what was just given up must not be kept for others
        if "hard" in (before, self.pressure.level) and before != self.pressure.level:
            is_short = self.pressure.level == "hard"
            self.log(
                "memory_short" if is_short else "memory_relieved",
                level="warning" if is_short else "info",
                footprint_bytes=self.pressure.footprint_bytes,
                limit_bytes=self.pressure.hard_bytes,
            )

    def forget_page(self, page: PageId) -> None:
        """Nobody maps the page. Its file goes once no log on disk names it any more (`kvd.scheduler.commit.sweep`)."""
        self.forgotten[page] = None
        self.sweep_due = True

    def close(self) -> None:
        """Finish what the swap thread has queued (the engine thread is ending)."""
        if self.watch is not None:
            self.watch.stop()
        if self.memory.trace is not None:
            self.memory.trace.close()
        self.store.close()
