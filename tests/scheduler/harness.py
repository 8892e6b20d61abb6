"""The engine in one thread on a disk that forgets: real core, pager, pool, store, recovery; a fake model, no sockets.

The fake model has two layers of different geometry, so two cache groups. K and V of a token depend on its id and
position alone, elementwise, so the bytes of every page of every branch are known in advance to the last bit, whatever
the step partition. Logits come from attention over all cached pages: one wrong byte anywhere changes them.

The swap thread is replaced by a queue that carries an operation out when the test says so, or when nothing else can go
on; when even that does not help, a second of time passes (a tick). A turn that then still waits is stuck: a failure.
"""

from __future__ import annotations

import errno
import hashlib
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from kvd.attention.reference import ReferenceBackend
from kvd.errors import KvdError
from kvd.ids import AgentId, Fingerprint, FrameId, GroupId, Namespace, PageId, RequestId
from kvd.model.cache import SequenceCache
from kvd.model.forward import Forward
from kvd.model.loader import LoadedModel
from kvd.model.spec import LayerSpec, ModelCacheSpec
from kvd.model.tokenizer import TextCodec
from kvd.quant.codec import encode
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.scheduler.agents import Agent, Branch
from kvd.scheduler.commit import sweep
from kvd.scheduler.core import NUMERICS, EngineCore, FormatBook
from kvd.scheduler.jobs import run_job
from kvd.scheduler.memory import Memory
from kvd.scheduler.requests import AgentRef, JobRequest, TurnRequest, TurnResult
from kvd.scheduler.restore import restore_agents
from kvd.scheduler.sampling import SamplingParams
from kvd.scheduler.store_door import StoreDoor, SwapQueue
from kvd.scheduler.turn import TurnState, run_turn
from kvd.store.frame_pool import FramePool
from kvd.store.layout import DataFolder
from kvd.store.recovery import recover
from kvd.store.recovery_report import RecoveryReport
from kvd.store.swap_ops import (
    AppendRecordOp,
    DeletePageOp,
    FlushOp,
    ReadPageOp,
    ReadTailOp,
    SwapOp,
    SwapResult,
    SwapStatistics,
    WritePageOp,
)
from kvd.store.swap_store import SwapStore
from kvd.vm.events import Tick
from kvd.vm.page import READABLE
from kvd.vm.pager import Pager
from kvd.vm.text import Span, TypedText
from tests.support.lossy_disk import LossyFileSystem

DIM = 32
LAYERS = (LayerSpec("full", 1, DIM, DIM), LayerSpec("full", 2, DIM, DIM))
CONTEXT_TOKENS = 2048
ROOT = Path("/data/kvd")
MAX_IDLE_TICKS = 30


class FakeModel:
    """Deterministic stand-in for an mlx-lm model: `model(ids, cache)`, `args`, `lm_head`.

    Args:
        vocab: rows of the vocabulary.
        seed: of its weights.
    """

    def __init__(self, vocab: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.args = SimpleNamespace(tie_word_embeddings=False)
        self.fail_at: int | None = None
        self.steps = 0
        self.tokens_seen = 0
        self._queries = rng.standard_normal((vocab, DIM), dtype=np.float32)
        self._tables = [
            [rng.standard_normal((vocab, layer.kv_heads, DIM), dtype=np.float32) for _ in "kv"] for layer in LAYERS
        ]
        self._places = rng.standard_normal((2, CONTEXT_TOKENS, 1, DIM), dtype=np.float32)
        self._head = rng.standard_normal((vocab, DIM), dtype=np.float32)
        self._head[:3] = 0.0  # control tokens are never the greedy choice

    def kv(self, layer: int, ids: Sequence[int], start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [kv_heads, n, DIM] of `ids` at positions from `start` on."""
        index = np.asarray(ids, dtype=np.int64)
        k, v = (
            (table[index] + self._places[side, start : start + len(index)]).swapaxes(0, 1)
            for side, table in enumerate(self._tables[layer])
        )
        return np.ascontiguousarray(k), np.ascontiguousarray(v)

    def model(self, ids: mx.array, cache: Any) -> mx.array:
        """Hidden states [1, n, DIM]."""
        self.steps += 1
        tokens = np.array(ids)[0]
        start = cache[0].offset
        hidden = mx.array(self._queries[tokens])[None]
        for layer, each in enumerate(cache):
            k, v = self.kv(layer, tokens, start)
            each.update_and_fetch(mx.array(k)[None], mx.array(v)[None])
            if self.steps == self.fail_at:
                raise RuntimeError("the model broke in the middle of a step")
            heads = LAYERS[layer].kv_heads
            queries = mx.broadcast_to(hidden[:, None], (1, heads, len(tokens), DIM))
            mask = each.make_mask(len(tokens))
            out = each.attend(queries, scale=DIM**-0.5, mask=mask)
            hidden = hidden + mx.sum(out, axis=1)
        self.tokens_seen += len(tokens)
        return hidden

    def lm_head(self, hidden: mx.array) -> mx.array:
        """Logits [1, n, vocab]."""
        return hidden @ mx.array(self._head).T


def make_spec(vocab: int, seed: int = 0) -> ModelCacheSpec:
    """Cache geometry of the fake model."""
    return ModelCacheSpec(
        model_name="fake",
        fingerprint=Fingerprint(hashlib.blake2b(b"fake %d" % seed, digest_size=16).hexdigest()),
        layers=LAYERS,
        query_heads=2,
        context_tokens=CONTEXT_TOKENS,
        vocab_tokens=vocab,
        scratch_bytes=1,
    )


def make_formats(spec: ModelCacheSpec, name: str = "q4") -> FormatBook:
    """One named format for both groups."""
    formats = [group.format(name) for group in spec.groups]
    layouts = {
        (number, str(page_format.format_id)): group.layout(page_format)
        for number, (group, page_format) in enumerate(zip(spec.groups, formats, strict=True))
    }
    return FormatBook(tuple(page_format.format_id for page_format in formats), layouts, {})


class Truth:
    """What the fake model must store and say, computed without any of the code under test but codec and attention."""

    def __init__(self, model: FakeModel, spec: ModelCacheSpec, formats: FormatBook) -> None:
        self._model = model
        self._spec = spec
        self._layouts = [formats.layouts[number, name] for number, name in enumerate(formats.default_ids)]

    def page_bytes(self, group: int, ids: Sequence[int], page: int) -> bytes:
        """Tokens of page `page` of a group as a frame holds them: `pool.extract(frame, 0, n)`."""
        layout = self._layouts[group]
        start = page * PAGE_TOKENS
        piece = ids[start : start + PAGE_TOKENS]
        parts: list[bytes] = []
        for at, layer in enumerate(layout.layer_indices):
            layer_format = layout.page_format.layers[at]
            k, v = self._model.kv(layer, piece, start)
            for values, side in ((k, layer_format.k), (v, layer_format.v)):
                encoded = encode(values, side)
                parts += [encoded.codes.tobytes(), encoded.scales.tobytes(), encoded.biases.tobytes()]
        return b"".join(parts)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits after `ids`, from pages made here."""
        pool = FramePool(1 << 30)
        cache = SequenceCache(
            pool=pool, spec=self._spec, layouts=self._layouts, backend=ReferenceBackend(), tokens=len(ids)
        )
        number = 0
        for group, layout in enumerate(self._layouts):
            table: list[FrameId] = []
            for page in range(-(-len(ids) // PAGE_TOKENS)):
                number += 1
                pool.create(FrameId(number), layout)
                tokens = min(PAGE_TOKENS, len(ids) - page * PAGE_TOKENS)
                pool.insert(FrameId(number), 0, tokens, self.page_bytes(group, ids, page))
                table.append(FrameId(number))
            cache.set_block_table(group, table)
        return Forward(self._model).replay(cache, ids[-1])

    def is_greedy(self, ids: Sequence[int], prompt_tokens: int) -> bool:
        """Whether each token from `prompt_tokens` on is the most likely one after those before it."""
        return all(int(np.argmax(self.logits(ids[:n]))) == ids[n] for n in range(prompt_tokens, len(ids)))


class InlineSwap:
    """A `SwapQueue` without a thread. Reads overtake what does not concern them, as in the real one.

    Args:
        store: carries operations out.
        deliver: takes the answers.
    """

    def __init__(self, store: SwapStore, deliver: Callable[[SwapResult], None]) -> None:
        self._store = store
        self._deliver = deliver
        self.queue: deque[SwapOp] = deque()

    def submit(self, op: SwapOp) -> None:
        """Queue an operation."""
        self.queue.append(op)

    def perform(self) -> bool:
        """Carry out one operation and deliver its answer; False when there is none."""
        if not self.queue:
            self._store.idle()
            return False
        earlier: set[tuple[str, ...]] = set()
        chosen = self.queue[0]
        for op in self.queue:
            if isinstance(op, ReadPageOp | ReadTailOp) and subject(op) not in earlier:
                chosen = op
                break
            earlier.add(subject(op))
        self.queue.remove(chosen)
        self._deliver(self._store.perform(chosen))
        return True

    def statistics(self) -> SwapStatistics:
        """Figures."""
        return self._store.statistics()

    def close(self) -> None:
        """Finish what is queued."""
        while self.perform():
            pass
        self._store.close()


def subject(op: SwapOp) -> tuple[str, ...]:
    """The page or log an operation concerns."""
    match op:
        case WritePageOp(header) | ReadPageOp(header):
            return ("page", header.page_id)
        case DeletePageOp(page_id):
            return ("page", page_id)
        case AppendRecordOp(record):
            return ("log", record.namespace, record.agent)
        case FlushOp():
            return ()
        case _:
            return ("log", op.namespace, op.agent)


@dataclass
class Outcome:
    """How a request ended."""

    result: Any = None
    error: KvdError | None = None
    events: list[dict[str, object]] = field(default_factory=list)

    @property
    def turn(self) -> TurnResult:
        """The result of a turn that succeeded."""
        assert self.error is None, self.error
        assert isinstance(self.result, TurnResult)
        return self.result

    @property
    def facts(self) -> dict[str, Any]:
        """The result of a job that succeeded."""
        assert self.error is None, self.error
        assert isinstance(self.result, dict)
        return self.result

    @property
    def streamed(self) -> str:
        """All text events together."""
        return "".join(str(event["text"]) for event in self.events if event["type"] == "text")


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
    log: Callable[..., None],
) -> EngineCore:
    """Put an engine core together as `kvd.assembly` does; agents are restored by the caller."""
    spec = make_spec(codec.token_count)
    door = StoreDoor(swap, log)
    pager = Pager(
        budget_bytes,
        group_count=len(spec.groups),
        new_page_id=new_page_id,
        max_writes_in_flight=1,
        max_loads_in_flight=2,
    )
    made: list[EngineCore] = []
    memory = Memory(
        pager=pager,
        pool=FramePool(budget_bytes),
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
            clock=clock,
            log=log,
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
    """

    def __init__(
        self, folder: Path, codec: TextCodec, *, budget_pages: int = 40, chunk_tokens: int = 128, seed: int = 0
    ) -> None:
        self.fs = LossyFileSystem(folder / "side", seed=seed)
        self.codec = codec
        self.budget_pages = budget_pages
        self.chunk_tokens = chunk_tokens
        self.random = random.Random(seed)
        vocab = codec.token_count
        self.model = FakeModel(vocab)
        self.spec = make_spec(vocab)
        self.use_format("q4")
        self.quota_bytes = 1 << 40
        self.now_s = 0.0
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
        self.report: RecoveryReport = recover(self.folder, fingerprint, self.layout, self.fs)
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
            log=self.log,
        )
        self.notices = restore_agents(self.core, self.report)

    def close(self) -> None:
        """Stop gracefully."""
        self.swap.close()
        self.folder.close()

    def crash(self, *, lossy: bool = True) -> None:
        """Lose the process and, when `lossy`, whatever the disk had not been told to flush; start again."""
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
        cancel_after: int | None = None,
        on_step: Callable[[TurnState], None] | None = None,
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
            stop=stop,
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
        sweep(self.core)

    def settle(self) -> None:
        """Carry out everything that is queued, deletions included."""
        for _ in range(3):
            while self.step_store():
                pass
            self.tick()

    def save_unsaved(self) -> None:
        """What the engine does at its ticks for turns the disk refused."""
        for agent in list(self.core.agents):
            if agent.unsaved is not None:
                self.job("save", agent.ref.agent)

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
        assert core.memory.pool.resident_bytes <= figures.budget_bytes
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
            pages: list[tuple[int, FrameId]] = [
                (number, page.frame)
                for number, page in enumerate(segment.pages)
                if page.frame is not None and page.state in READABLE
            ]
            tail = segment.tail
            if tail is not None and tail.frame is not None and tail.state in READABLE:
                pages.append((len(segment.pages), tail.frame))
            for number, frame in pages:
                expected = self.truth.page_bytes(group, branch.tokens[: branch.computed], number)
                tokens = min(PAGE_TOKENS, branch.computed - number * PAGE_TOKENS)
                assert self.core.memory.pool.extract(frame, 0, tokens) == expected, f"page {number} of group {group}"

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
        return self.folder.log_path(self.spec.fingerprint, "default", name)

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
    """An agent in the default namespace."""
    return AgentRef(Namespace("default"), AgentId(name))
