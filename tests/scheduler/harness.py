"""The engine in one thread on a disk that forgets: real core, pager, pool, store, recovery; a fake model, no sockets.

Long because it stands for the whole daemon.
The swap thread is replaced by a queue that carries an operation out when the test says so, or when nothing else can go
on; when even that does not help, a second of time passes (a tick). A turn that then still waits is stuck: a failure.
"""

from __future__ import annotations

import errno
import hashlib
import random
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvd.attention.reference import ReferenceBackend
from kvd.errors import KvdError
from kvd.ids import AgentId, GroupId, Namespace, PageId, RequestId
from kvd.model.loader import LoadedModel
from kvd.model.tokenizer import TextCodec
from kvd.quant.spec import PageLayout
from kvd.scheduler.agents import Agent, Branch
from kvd.scheduler.commit import sweep
from kvd.scheduler.core import NUMERICS, EngineCore, FormatBook
from kvd.scheduler.jobs import run_job
from kvd.scheduler.limits import LimitSettings
from kvd.scheduler.memory import Memory
from kvd.scheduler.pressure import Pressure
from kvd.scheduler.requests import AgentRef, JobRequest, OnContextFull, Resume, TurnRequest
from kvd.scheduler.restore import restore_agents
from kvd.scheduler.sampling import LogitsHook, SamplingParams
from kvd.scheduler.shedding import shed
from kvd.scheduler.steps import run_steps
from kvd.scheduler.store_door import StoreDoor, SwapQueue
from kvd.scheduler.turn import TurnState, run_turn
from kvd.scheduler.waiting import StepWanted
from kvd.store.frame_memory import RecycledMappings
from kvd.store.frame_pool import FramePool
from kvd.store.layout import DataFolder
from kvd.store.ram_store import RamStore
from kvd.store.recovery import recover
from kvd.store.recovery_report import EMPTY_REPORT
from kvd.store.sleeping import READ_AGENTS
from kvd.store.swap_ops import SwapResult
from kvd.store.swap_store import SwapStore
from kvd.vm.events import Tick
from kvd.vm.page import OPEN, READABLE
from kvd.vm.pager import Pager
from kvd.vm.text import Span, TypedText
from tests.scheduler.fake_model import FakeModel, Truth, make_formats, make_spec
from tests.scheduler.inline_swap import InlineSwap
from tests.scheduler.outcome import Outcome
from tests.support.lossy_disk import LossyFileSystem

ROOT = Path("/data/kvd")
MAX_IDLE_TICKS = 30


def make_core(
    model: FakeModel,
    codec: TextCodec,
    swap: SwapQueue,
    formats: FormatBook,
    *,
    budget_bytes: int,
    chunk_tokens: int,
    new_page_id: Callable[[], PageId],
    clock: Callable[[], float],
    age_clock: Callable[[], float] | None = None,
    log: Callable[..., None],
    window: int | None = None,
    prefetch: str = "predict",
    sharing: str = "namespace",
    limits: LimitSettings | None = None,
    pressure: Pressure | None = None,
    write_limit_bytes: int | None = None,
    swap_off: bool = False,
) -> EngineCore:
    """Put an engine core together as `kvd.assembly` does; agents are restored by the caller."""
    spec = make_spec(codec.token_count, window=window)
    door = StoreDoor(swap, log)
    pager = Pager(
        budget_bytes,
        group_count=len(spec.groups),
        new_page_id=new_page_id,
        max_writes_in_flight=1,
        max_loads_in_flight=2,
        windows=[group.layer.window for group in spec.groups],
    )
    made: list[EngineCore] = []
    memory = Memory(
        pager=pager,
        pool=FramePool(budget_bytes, RecycledMappings(budget_bytes)),
        swap=door,
        fingerprint=spec.fingerprint,
        numerics=NUMERICS,
        on_forget=lambda page: made[0].forget_page(page),  # noqa: PLW0108  the core is made after its hands
        on_event=log,
    )
    door.connect(memory)
    loaded = LoadedModel(model, codec, None, spec, SimpleNamespace(), "float32", 1)  # type: ignore[arg-type]
    made.append(
        EngineCore(
            loaded=loaded,
            pager=pager,
            memory=memory,
            store=door,
            formats=formats,
            backend=ReferenceBackend(),
            chunk_tokens=chunk_tokens,
            prefetch=prefetch,
            sharing=sharing,
            clock=clock,
            age_clock=age_clock,
            log=log,
            limits=limits,
            pressure=pressure,
            write_limit_bytes=write_limit_bytes,
            swap_off=swap_off,
        )
    )
    return made[0]


def content(text: str | bytes) -> TypedText:
    """Text a client typed."""
    data = text.encode() if isinstance(text, str) else text
    return TypedText(data, (Span("content", len(data)),) if data else ())


class World:
    """Disk and engine. `crash` and `restart` make a new engine on what the disk holds.

    Args:
        folder: real folder for the catalog's files.
        codec: text to ids.
        budget_pages: frames of both groups the budget has room for, reserves included.
        chunk_tokens: of a prefill step.
        seed: of the disk's choices and of when queued operations are carried out.
        window: tokens that the second group sees; None for all.
        sharing: who may map whose pages; another one counts from the next start.
        limits: of memory, beside the budget.
        write_limit_bytes: a minute, None for any amount.
        swap_off: keep everything in RAM; the disk is the same, and must stay as it is.
    """

    def __init__(
        self,
        folder: Path,
        codec: TextCodec,
        *,
        budget_pages: int = 40,
        chunk_tokens: int = 128,
        seed: int = 0,
        window: int | None = None,
        sharing: str = "namespace",
        limits: LimitSettings | None = None,
        write_limit_bytes: int | None = None,
        swap_off: bool = False,
    ) -> None:
        self.sharing = sharing
        self.limits = limits
        self.write_limit_bytes = write_limit_bytes
        self.swap_off = swap_off
        self.fs = LossyFileSystem(folder / "side", seed=seed)
        self.codec = codec
        self.budget_pages = budget_pages
        self.chunk_tokens = chunk_tokens
        self.random = random.Random(seed)
        vocab = codec.token_count
        self.model = FakeModel(vocab)
        self.window = window
        self.spec = make_spec(vocab, window=window)
        self.use_format("q4")
        self.quota_bytes = 1 << 40
        self.read_agents = READ_AGENTS  # at the next start
        self.now_s = 0.0
        self.asleep_s = 0.0  # the machine, while `now_s` stood still
        self.logged: list[tuple[str, dict[str, object]]] = []
        self.notices: list[str] = []
        self._pages_made = 0
        self._requests = 0
        self.start()

    # ---- life -------------------------------------------------------------------------------------------------------

    @property
    def set_bytes(self) -> int:
        """One page of each group."""
        return sum(layout.payload_bytes for layout in self.formats.layouts.values())

    def layout(self, group: int, format_id: str) -> PageLayout | None:
        """What the store and recovery ask."""
        return self.formats.layouts.get((group, format_id))

    def use_format(self, name: str) -> None:
        """The only page format that the next start knows."""
        self.formats = make_formats(self.spec, name)
        self.truth = Truth(FakeModel(self.codec.token_count), self.spec, self.formats)

    def start(self) -> None:
        """Recover and build the engine, as `kvd.assembly` does."""
        self.folder = DataFolder(ROOT, self.fs)
        self.folder.open()
        fingerprint = self.spec.fingerprint
        store: SwapStore | RamStore
        if self.swap_off:
            self.report, store = EMPTY_REPORT, RamStore(self.folder, self.fs)
        else:
            self.report = recover(self.folder, fingerprint, self.layout, self.fs, read_agents=self.read_agents)
            store = SwapStore(
                folder=self.folder,
                fingerprint=fingerprint,
                fs=self.fs,
                quota_bytes=self.quota_bytes,
                layouts=self.layout,
                recovered=self.report,
            )
        self.answers: deque[SwapResult] = deque()
        self.swap = InlineSwap(store, self.answers.append)
        self.core = make_core(
            self.model,
            self.codec,
            self.swap,
            self.formats,
            budget_bytes=self.budget_pages * self.set_bytes // 2,
            chunk_tokens=self.chunk_tokens,
            new_page_id=self._new_page_id,
            clock=lambda: self.now_s,
            age_clock=lambda: self.now_s + self.asleep_s,
            log=self.log,
            window=self.window,
            sharing=self.sharing,
            limits=self.limits,
            write_limit_bytes=self.write_limit_bytes,
            swap_off=self.swap_off,
        )
        self.notices = restore_agents(self.core, self.report)

    def close(self) -> None:
        """Stop gracefully."""
        self.swap.close()
        self.folder.close()

    def crash(self, *, lossy: bool = True) -> None:
        """Lose the process and, when `lossy`, whatever the disk had not been told to flush; start again."""
        if isinstance(self.swap._store, SwapStore):
            self.swap._store._catalog.close()  # SQLite's files are real, so is their handle
        self.folder.close()
        if lossy:
            self.fs.crash()
        else:
            self.fs.reboot_clean()
        self.fs.fail = lambda number, name, path: None
        self.start()

    def refuse_writes(self, code: int = errno.ENOSPC, *, only: str = "") -> None:
        """From here on the disk takes nothing (whose path has `only` in it)."""

        def fail(number: int, name: str, path: Path | None) -> int | None:
            return code if name in ("create", "write", "open_append") and only in str(path) else None

        self.fs.fail = fail

    def heal(self) -> None:
        """The disk works again."""
        self.fs.fail = lambda number, name, path: None

    def log(self, event: str, **facts: object) -> None:
        """What an operator would read."""
        self.logged.append((event, facts))

    # ---- requests ---------------------------------------------------------------------------------------------------

    def generate(self, name: str, text: str | TypedText, max_tokens: int = 4, **options: Any) -> Outcome:
        """Run one turn to its end."""
        return self.turn(name, text, max_tokens=max_tokens, **options)

    def inject(self, name: str, text: str, **options: Any) -> Outcome:
        """Append without generating."""
        return self.turn(name, text, max_tokens=0, append=True, **options)

    def turn(
        self,
        name: str,
        text: str | TypedText,
        *,
        max_tokens: int,
        append: bool = False,
        stop: tuple[str, ...] = (),
        hooks: tuple[LogitsHook, ...] = (),
        cancel_after: int | None = None,
        on_step: Callable[[TurnState], None] | None = None,
        on_context_full: OnContextFull = "error",
        logprobs: int | None = None,
        tells_control: bool = False,
        resumable: bool = False,
        resume: Resume | None = None,
        **sampling: Any,
    ) -> Outcome:
        """Run one turn; `cancel_after` counts resumptions, at which the request is cancelled."""
        outcome = Outcome()
        request = TurnRequest(
            request_id=self._request_id(),
            ref=ref_of(name),
            prompt=text if isinstance(text, TypedText) else content(text),
            append=append,
            max_tokens=max_tokens,
            sampling=SamplingParams(**sampling),
            logprobs=logprobs,
            stop=stop,
            hooks=hooks,
            tells_control=tells_control,
            resumable=resumable,
            resume=resume,
            on_context_full=on_context_full,
            emit=lambda event: outcome.events.append(dict(event)),
        )
        state = TurnState(request, self.now_s)
        resumptions = 0

        def resumed() -> None:
            nonlocal resumptions
            if resumptions == cancel_after:
                state.cancelled = True
            if on_step is not None:
                on_step(state)
            resumptions += 1

        return self.drive(run_turn(self.core, state), outcome, resumed)

    def job(self, operation: str, name: str, *, stop: Callable[[], str | None] = lambda: None, **more: Any) -> Outcome:
        """Run one control operation to its end."""
        request = JobRequest(self._request_id(), ref_of(name), operation, more)
        return self.drive(run_job(self.core, request, stop), Outcome())

    def drive(
        self, work: Generator[Any, None, Any], outcome: Outcome, resumed: Callable[[], None] = lambda: None
    ) -> Outcome:
        """Resume a turn or job until it ends, carrying out queued operations when it waits (and sometimes before)."""
        wait: Callable[[], bool] | None = None
        idle_ticks = 0
        try:
            while True:
                if self.random.random() < 0.3:
                    self.step_store()
                resumed()
                if wait is None or wait():
                    wait = next(work)
                    if isinstance(wait, StepWanted):
                        run_steps(self.core, [wait])
                    idle_ticks = 0
                elif not self.step_store():
                    idle_ticks += 1
                    assert idle_ticks < MAX_IDLE_TICKS, "the request waits for something that never comes"
                    self.tick()
        except StopIteration as end:
            outcome.result = end.value
        except KvdError as error:
            outcome.error = error
        finally:
            work.close()
        self.core.pager.check_integrity()
        return outcome

    def step_store(self) -> bool:
        """Carry out one queued operation and take its answer."""
        done = self.swap.perform()
        while self.answers:
            self.core.store.on_result(self.answers.popleft())
        return done

    def tick(self) -> None:
        """A second passes."""
        self.now_s += 1.0
        self.core.memory.apply(Tick())
        self.core.govern()
        shed(self.core)
        sweep(self.core)

    def settle(self) -> None:
        """Carry out everything that is queued and what the engine does when it is idle, deletions included."""
        for _ in range(3):
            while self.step_store():
                pass
            self.tick()
            for agent in list(self.core.agents):
                if agent.compaction_due and agent.logged:
                    self.job("compact", str(agent.ref))

    def save_unsaved(self) -> None:
        """What the engine does at its ticks for turns the disk refused."""
        for agent in list(self.core.agents):
            if agent.unsaved is not None:
                self.job("shrink" if agent.ref in self.core.to_shrink else "save", str(agent.ref))
        for ref in list(self.core.to_shrink):
            if (known := self.core.agents.known(ref)) is not None and known.unsaved is None:
                self.job("shrink", str(ref))

    # ---- looking ----------------------------------------------------------------------------------------------------

    def agent(self, name: str) -> Agent:
        """An agent that exists."""
        return self.core.agents.get(ref_of(name))

    def has(self, name: str) -> bool:
        """Whether an agent exists."""
        return self.core.agents.find(ref_of(name)) is not None

    def text(self, name: str) -> str:
        """The agent's text."""
        return self.agent(name).branch.text.decode()

    def check(self) -> None:
        """Books balance, the budget holds, and every readable page of every branch has exactly its bytes."""
        core = self.core
        core.pager.check_integrity()
        figures = core.pager.statistics()
        assert figures.resident_bytes + figures.in_flight_bytes <= figures.budget_bytes
        assert core.memory.packed_bytes == figures.packed_bytes
        assert core.memory.pool.resident_bytes + core.memory.packed_bytes <= figures.budget_bytes
        for agent in core.agents:
            for branch in agent.branches.values():
                self.check_branch(branch)

    def check_branch(self, branch: Branch) -> None:
        """Text, ids and pages of one branch agree with each other and with the fake model."""
        assert sum(branch.token_bytes) == len(branch.text) == sum(span.text_bytes for span in branch.spans)
        branch.text.decode()
        assert branch.computed <= len(branch.tokens)
        assert branch.computed == self.core.pager.tokens(branch.space)
        for group, segment in enumerate(self.core.pager.segments(branch.space)):
            pages = [
                (number, self.core.memory.pool.export(page.frame))
                for number, page in enumerate(segment.pages)
                if page.frame is not None and page.state in READABLE
            ]
            tail = segment.tail
            if tail is not None and tail.state in OPEN:
                pages.append((len(segment.pages), self.core.memory.tail_bytes(tail, 0, tail.tokens)))
            for number, found in pages:
                expected = self.truth.page_bytes(group, branch.tokens[: branch.computed], number)
                assert found == expected, f"page {number} of group {group}"

    def page_ids(self, name: str, group: int = 0) -> list[PageId]:
        """Sealed pages of an agent's current branch."""
        segment = self.core.pager.segments(self.agent(name).branch.space)[group]
        assert segment.group == GroupId(group)
        return [page.ref.page_id for page in segment.pages]

    def page_path(self, page_id: PageId) -> Path:
        """Where the store keeps a page."""
        return self.folder.page_path(self.spec.fingerprint, page_id)

    def log_path(self, name: str) -> Path:
        """Where the store keeps an agent's log."""
        ref = ref_of(name)
        return self.folder.log_path(self.spec.fingerprint, ref.namespace, ref.agent)

    def spoil_page(self, page_id: PageId) -> None:
        """Flip a bit of a page file."""
        path = self.page_path(page_id)
        data = bytearray(self.fs.live_files()[path])
        data[len(data) // 2] ^= 1
        self.fs.poke(path, bytes(data))

    def events(self, name: str) -> list[dict[str, object]]:
        """Facts of every logged event of that name."""
        return [facts for event, facts in self.logged if event == name]

    def _request_id(self) -> RequestId:
        self._requests += 1
        return RequestId(self._requests)

    def _new_page_id(self) -> PageId:
        self._pages_made += 1
        return PageId(hashlib.blake2b(b"%d" % self._pages_made, digest_size=16).hexdigest())


def ref_of(name: str) -> AgentRef:
    """An agent in the default namespace, or in that before the slash."""
    namespace, _, agent = name.rpartition("/")
    return AgentRef(Namespace(namespace or "default"), AgentId(agent))
