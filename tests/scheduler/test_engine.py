"""The engine thread: every request answered once, cancelled in place, drained; faults end loudly or not at all.

Long because every test drives the same thread through the same runner and gate, which are read with them.
"""

from __future__ import annotations

import errno
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import Busy, Cancelled, Draining, InternalError, KvdError
from kvd.ids import PageId
from kvd.model.tokenizer import TextCodec
from kvd.ops.logs import RequestLine
from kvd.scheduler import engine as engine_module
from kvd.scheduler.answering import Answering
from kvd.scheduler.core import EngineCore
from kvd.scheduler.engine import Engine
from kvd.scheduler.errors import EngineBroken
from kvd.scheduler.limits import LimitSettings
from kvd.scheduler.messages import StoreAnswer
from kvd.scheduler.pressure import Pressure
from kvd.scheduler.requests import JobRequest, TurnRequest
from kvd.scheduler.restore import restore_agents
from kvd.scheduler.upkeep import MAX_SAVE_WAIT_S
from kvd.store.errors import LogUnreadable
from kvd.store.fs import FileHandle, RealFileSystem
from kvd.store.layout import DataFolder, log_name
from kvd.store.recovery import recover
from kvd.store.sleeping import READ_AGENTS
from kvd.store.swap_ops import SwapBroken, SwapResult
from kvd.store.swap_store import SwapStore
from kvd.store.swap_thread import SwapThread
from kvd.vm.errors import IllegalTransition
from tests.scheduler.fake_model import FakeModel, make_formats, make_spec
from tests.scheduler.harness import content, make_core, ref_of
from tests.scheduler.test_turn import text_of

WAIT_S = 20.0
"""Longest wait for what must come at once."""


class RefusingFileSystem(RealFileSystem):
    """A real disk that takes nothing while `refuses` is set."""

    refuses = False

    def write(self, handle: FileHandle, data: bytes | memoryview) -> None:
        """See `FileSystem.write`."""
        if self.refuses:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(handle, data)


class Gate:
    """A model step that waits until it is told to go on, so that tests decide what happens during it."""

    def __init__(self, model: FakeModel) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self._step = model.model
        model.model = self.step  # type: ignore[method-assign]

    def step(self, ids: Any, cache: Any) -> Any:
        """One step."""
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        return self._step(ids, cache)


class Answer:
    """Where a request's reply goes: exactly one."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.replies: list[tuple[Any, KvdError | None]] = []
        self._came = threading.Event()

    def reply(self, result: object, error: KvdError | None) -> None:
        """Take the reply."""
        self.replies.append((result, error))
        self._came.set()

    def wait(self) -> tuple[Any, KvdError | None]:
        """The reply."""
        assert self._came.wait(WAIT_S), "no reply"
        return self.replies[0]

    @property
    def result(self) -> dict[str, Any]:
        """The result of a request that succeeded."""
        result, error = self.wait()
        assert error is None, error
        return dict(result)

    @property
    def error(self) -> KvdError:
        """The error of a request that failed."""
        _, error = self.wait()
        assert error is not None
        return error


class Runner:
    """An engine on a real folder with a real swap thread and the fake model."""

    def __init__(
        self,
        root: Path,
        codec: TextCodec,
        *,
        max_queued: int = 4,
        budget_bytes: int = 1 << 22,
        clock: Callable[[], float] = time.monotonic,
        window: int | None = None,
        prefetch: str = "predict",
        sharing: str = "namespace",
        limits: LimitSettings | None = None,
        pressure: Pressure | None = None,
        read_agents: int = READ_AGENTS,
        **options: Any,
    ) -> None:
        self.read_agents = read_agents
        self.root = root
        self.budget_bytes = budget_bytes
        self.clock = clock
        self.window = window
        self.prefetch = prefetch
        self.sharing = sharing
        self.limits = limits
        self.pressure = pressure
        self.codec = codec
        self.fs = RefusingFileSystem()
        self.model = FakeModel(codec.token_count)
        self.lines: list[RequestLine] = []
        self.logged: list[tuple[str, dict[str, Any]]] = []
        self.ready: list[BaseException | None] = []
        self.told = threading.Event()
        self.answers: list[Answer] = []
        self.engine = Engine(
            self.build,
            max_queued=max_queued,
            on_ready=self.on_ready,
            on_request_done=self.lines.append,
            check=True,
            **options,
        )

    def build(self, deliver: Callable[[SwapResult], None]) -> EngineCore:
        """As `kvd.assembly` does."""
        self.folder = DataFolder(self.root, self.fs)
        self.folder.open()
        spec = make_spec(self.codec.token_count, window=self.window)
        formats = make_formats(spec)

        def layouts(group: int, format_id: str) -> Any:
            return formats.layouts.get((group, format_id))

        report = recover(self.folder, spec.fingerprint, layouts, self.fs, read_agents=self.read_agents)
        store = SwapStore(
            folder=self.folder,
            fingerprint=spec.fingerprint,
            fs=self.fs,
            quota_bytes=1 << 40,
            layouts=layouts,
            recovered=report,
        )
        swap = SwapThread(store=store, deliver=deliver)
        core = make_core(
            self.model,
            self.codec,
            swap,
            formats,
            budget_bytes=self.budget_bytes,
            chunk_tokens=128,
            new_page_id=lambda: PageId(secrets.token_hex(16)),
            clock=self.clock,
            window=self.window,
            prefetch=self.prefetch,
            sharing=self.sharing,
            limits=self.limits,
            pressure=self.pressure,
            log=lambda event, **facts: self.logged.append((event, facts)),
        )
        restore_agents(core, report)
        swap.start()
        return core

    def on_ready(self, error: BaseException | None) -> None:
        """What the daemon would hear."""
        self.ready.append(error)
        self.told.set()

    def start(self) -> None:
        """Start and wait."""
        self.engine.start()
        assert self.told.wait(WAIT_S)
        self.told.clear()

    def turn(self, name: str, text: str, *, emit: Callable[[Any], None] | None = None, **options: Any) -> Answer:
        """Submit a turn."""
        answer = Answer()
        request = TurnRequest(
            self.engine.new_request_id(),
            ref_of(name),
            content(text),
            emit=emit or (lambda event: answer.events.append(dict(event))),
            **{"max_tokens": 2, **options},
        )
        return self._submit(request, answer)

    def job(self, operation: str, name: str, **arguments: object) -> Answer:
        """Submit a control operation."""
        return self._submit(JobRequest(self.engine.new_request_id(), ref_of(name), operation, arguments), Answer())

    def _submit(self, request: TurnRequest | JobRequest, answer: Answer) -> Answer:
        answer.request = request.request_id  # type: ignore[attr-defined]
        self.answers.append(answer)
        self.engine.submit(request, answer.reply)
        return answer

    def cancel(self, answer: Answer, reason: str = "cancelled by the client") -> None:
        """Cancel a request."""
        self.engine.cancel(answer.request, reason)  # type: ignore[attr-defined]

    def look(self, function: Callable[[EngineCore], Any]) -> Any:
        """Run a function between two steps."""
        return self.engine.call(function).result(WAIT_S)

    def stop(self) -> None:
        """End the thread; every request was answered exactly once."""
        assert self.engine.stop(WAIT_S)
        self.folder.close()
        for answer in self.answers:
            answer.wait()
            assert len(answer.replies) == 1


@pytest.fixture
def make_runner(tmp_path: Path, codec: TextCodec) -> Iterator[Callable[..., Runner]]:
    """Makes engines that have started; they are stopped at the end."""
    runners: list[Runner] = []

    def make(**options: int) -> Runner:
        runner = Runner(tmp_path / "data", codec, **options)
        runners.append(runner)
        runner.start()
        return runner

    yield make
    for runner in runners:
        runner.stop()


@pytest.fixture
def runner(make_runner: Callable[..., Runner]) -> Runner:
    """An engine that is ready."""
    return make_runner()


def test_requests_run_in_order_and_are_told_their_place(runner: Runner) -> None:
    """One runs, the others hear where they stand; each is answered and leaves one line (P38)."""
    gate = Gate(runner.model)
    first = runner.turn("a", "one")
    assert gate.entered.wait(WAIT_S)
    second, third = runner.turn("a", "one and two"), runner.job("pin", "a")
    gate.go_on.set()
    assert first.result["match"] == "new"
    assert second.result["prompt_tokens"] >= 3
    assert third.result["pinned"] is True
    assert second.events[0] == {"type": "queued", "position": 1, "wait_s": 0.0, "waits_for": "slot"}
    assert [line.method for line in runner.lines] == ["generate", "generate", "agent.pin"]
    facts = {"running": 0, "queued": 0, "preempted": 0, "max_batch": 1, "thrashing": False}
    assert runner.engine.queue_facts.items() >= facts.items()


def test_a_full_queue_refuses_with_a_hint(make_runner: Callable[..., Runner]) -> None:
    """One request too many is told to come back; those in the queue are served."""
    runner = make_runner(max_queued=1)
    gate = Gate(runner.model)
    running = runner.turn("a", "one")
    assert gate.entered.wait(WAIT_S)
    queued, refused = runner.turn("b", "two"), runner.turn("c", "three")
    gate.go_on.set()
    error = refused.error
    assert isinstance(error, Busy)
    assert error.retry_after_s
    assert running.result["durable"]
    assert queued.result["durable"]


def test_cancelling_concerns_one_request_only(runner: Runner) -> None:
    """A queued request is dropped, a running one ends at its next step with its reason; the others go on (P33, P34)."""
    gate = Gate(runner.model)
    running = runner.turn("a", text_of(40), max_tokens=50)
    assert gate.entered.wait(WAIT_S)
    dropped, other = runner.turn("b", "two"), runner.turn("c", "three")
    runner.cancel(dropped)
    runner.cancel(running, "the daemon is stopping")
    runner.engine.cancel(99)  # type: ignore[arg-type]
    gate.go_on.set()
    assert isinstance(running.error, Cancelled)
    assert running.error.message.startswith("the daemon is stopping; 128 computed tokens are kept")
    assert dropped.error.message == "cancelled while queued; nothing was computed"
    assert other.result["durable"]
    assert not runner.look(lambda core: core.agents.find(ref_of("b")))


def test_a_drain_finishes_what_is_queued(runner: Runner) -> None:
    """New requests are refused, queued ones are served, then `drained` is set (P2)."""
    gate = Gate(runner.model)
    running, queued = runner.turn("a", "one"), runner.turn("b", "two")
    assert gate.entered.wait(WAIT_S)
    runner.engine.drain()
    late = runner.turn("c", "three")
    assert not runner.engine.drained.is_set()
    gate.go_on.set()
    assert running.result["durable"]
    assert queued.result["durable"]
    assert isinstance(late.error, Draining)
    assert runner.engine.drained.wait(WAIT_S)


def test_a_drain_gives_the_disk_a_last_chance(runner: Runner) -> None:
    """Turns the disk refused are tried once more before the daemon goes down."""
    runner.fs.refuses = True
    assert runner.turn("a", "one").result["durable"] is False
    runner.fs.refuses = False
    runner.engine.drain()
    assert runner.engine.drained.wait(WAIT_S)
    assert runner.look(lambda core: core.agents.get(ref_of("a")).unsaved) is None


def test_a_disk_that_heals_gets_what_it_refused_without_being_asked(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine retries by itself, ever more rarely while the disk refuses; once it takes one, the rest follows."""
    monkeypatch.setattr(engine_module, "TICK_S", 0.01)
    runner.fs.refuses = True
    for name in ("a", "b", "c"):
        assert runner.turn(name, "one").result["durable"] is False
    runner.fs.refuses = False
    saved = threading.Event()

    def look() -> bool:
        return bool(runner.look(lambda core: all(agent.unsaved is None for agent in core.agents)))

    deadline = time.monotonic() + WAIT_S
    while not look() and time.monotonic() < deadline:
        saved.wait(0.02)
    assert look()
    assert [line.method for line in runner.lines] == ["generate"] * 3, "no client asked for the saves"
    assert runner.look(lambda core: core.stats.requests) == 3


def test_what_the_disk_refused_is_saved_between_requests(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is never empty does not keep an unsaved turn in RAM: the save goes ahead of those that wait."""
    runner.fs.refuses = True
    assert runner.turn("a", "one").result["durable"] is False
    upkeep = runner.engine._upkeep
    assert upkeep is not None
    deadline = time.monotonic() + WAIT_S
    while not runner.look(lambda core: upkeep._disk.until_s > 0) and time.monotonic() < deadline:
        time.sleep(0.01)  # the engine's own first try fails, and the next one is a while away
    gate = Gate(runner.model)
    monkeypatch.setattr(upkeep, "_clock", lambda: time.monotonic() + 2 * MAX_SAVE_WAIT_S)
    first = runner.turn("b", "two")
    assert gate.entered.wait(WAIT_S)
    saved: list[object] = []
    look = [runner.turn("c", "three", emit=lambda event: saved.append(unsaved())), runner.turn("d", "four")]

    def unsaved() -> object:
        core = runner.engine._core
        assert core is not None
        return core.agents.get(ref_of("a")).unsaved

    runner.fs.refuses = False
    gate.go_on.set()
    for answer in (first, *look):
        assert answer.result["durable"]
    assert saved[1] is None, "when the next request runs, the save is done"


def test_evictions_and_hints_do_not_wait_for_a_running_request(runner: Runner) -> None:
    """While one agent decodes, others are evicted and prefetched; what is queued for the same agent keeps its order."""
    for name in ("a", "b"):
        runner.turn(name, text_of(40))
    runner.job("evict", "a").wait()
    gate = Gate(runner.model)
    running = runner.turn("c", "three", max_tokens=3)
    assert gate.entered.wait(WAIT_S)
    evicted, hinted = runner.job("evict", "b"), runner.job("prefetch", "a")
    last = runner.turn("d", "four")
    own = runner.job("evict", "c")
    gate.go_on.set()
    assert evicted.result["resident_pages"] == 0
    assert hinted.result["agent"] == "a"
    assert own.result["resident_pages"] == 0
    assert running.result["durable"]
    assert last.result["durable"]
    order = [line.agent for line in runner.lines if line.request is not None][3:]
    assert set(order[:2]) == {"a", "b"}, order
    assert order[2:] == ["c", "d", "c"], order


def test_a_queued_turns_pages_come_in_while_another_decodes(runner: Runner) -> None:
    """Swap-in overlaps with other agents' work."""
    text = text_of(40)
    runner.turn("a", text).wait()
    runner.job("evict", "a").wait()
    gate = Gate(runner.model)
    runner.turn("b", "two", max_tokens=40)
    assert gate.entered.wait(WAIT_S)
    queued = runner.turn("a", runner_text(runner, gate, "a"))
    assert queued.result["match"] in ("extend", "exact")
    assert queued.result["swapped_in_pages"] == 0
    assert runner.look(lambda core: core.pager.statistics().prefetched["queued"].pages) > 0


def runner_text(runner: Runner, gate: Gate, name: str) -> str:
    """An agent's text, asked for between two steps."""
    text = runner.engine.call(lambda core: core.agents.get(ref_of(name)).branch.text.decode())
    gate.go_on.set()
    return str(text.result(WAIT_S))


def test_a_log_that_is_mostly_dead_is_compacted_after_the_reply(runner: Runner) -> None:
    """By the engine itself, when nothing else is to do, and without a line."""
    for number in range(40):
        runner.turn("a", text_of(18) + f" {number}" + text_of(7)).wait()
    deadline = time.monotonic() + WAIT_S
    while not runner.look(lambda core: core.store.statistics().logs_compacted) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert runner.look(lambda core: core.store.statistics().logs_compacted)
    assert {line.method for line in runner.lines} == {"generate"}


@pytest.mark.parametrize("how", ["memory", "transition"])
def test_books_that_broke_inside_a_request_end_the_engine(runner: Runner, how: str) -> None:
    """An instruction that was lost, or an illegal move, is nobody's own fault: going on would hang or lie later."""

    def broken(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory") if how == "memory" else IllegalTransition("no such move")

    def spoil(core: EngineCore) -> None:
        if how == "memory":
            core.memory.pool.create = broken  # type: ignore[method-assign,assignment]
        else:
            core.pager.handle = broken  # type: ignore[method-assign,assignment]

    runner.look(spoil)
    assert isinstance(runner.turn("a", "one").error, InternalError)
    assert runner.told.wait(WAIT_S)
    assert isinstance(runner.ready[-1], EngineBroken)
    assert [event for event, _ in runner.logged if event == "engine_failed"]


def test_a_turns_line_names_its_method_and_what_it_wrote(runner: Runner) -> None:
    """P15, P38: `chat` is no `generate`, and the bytes of the commit are there."""
    assert runner.turn("a", "one", method="chat").result["durable"]
    (line,) = runner.lines
    assert line.method == "chat"
    assert line.written_bytes


def test_a_stop_answers_everybody(runner: Runner) -> None:
    """Whoever still waits when the thread ends is told so; the running turn leaves the books in order."""
    gate = Gate(runner.model)
    running = runner.turn("a", text_of(40), max_tokens=50)
    assert gate.entered.wait(WAIT_S)
    queued = runner.turn("b", "two")
    stopper = threading.Thread(target=runner.engine.stop, args=(WAIT_S,))
    stopper.start()
    late = runner.turn("c", "three")
    gate.go_on.set()
    stopper.join()
    for answer in (running, queued, late):
        assert isinstance(answer.error, Draining)


def test_whoever_comes_after_the_end_is_told_so(runner: Runner) -> None:
    """P38: a daemon that stops goes on reading for a moment: what it reads then has an answer and a line, too."""
    runner.engine.stop(WAIT_S)
    assert isinstance(runner.turn("a", "one").error, Draining)
    with pytest.raises(Draining):
        runner.engine.call(lambda core: core).result(WAIT_S)
    assert [line.outcome for line in runner.lines] == ["draining"]


def test_agents_are_there_after_a_restart(make_runner: Callable[..., Runner]) -> None:
    """The same folder, another engine: the conversation resumes at its exact token (P2, P14)."""
    first = make_runner()
    reply = first.turn("a", text_of(40)).result
    first.stop()
    second = make_runner()
    text = second.look(lambda core: core.agents.get(ref_of("a")).branch.text.decode())
    assert text.startswith(text_of(40))
    again = second.turn("a", text + " on").result
    assert again["match"] == "extend"
    assert again["cached_tokens"] >= reply["prompt_tokens"]


def test_a_request_with_a_bug_fails_alone(runner: Runner) -> None:
    """An unexpected exception is one `internal` error with a line in the log; the engine goes on."""
    runner.model.fail_at = 1
    error = runner.turn("a", "one").error
    assert isinstance(error, InternalError)
    assert "RuntimeError" in error.message
    assert runner.turn("a", "one").result["durable"]
    assert [event for event, _ in runner.logged] == ["request_failed"]
    assert isinstance(runner.job("nonsense", "a").error, InternalError)


def test_callbacks_that_raise_harm_nobody(runner: Runner) -> None:
    """A client whose event loop is gone costs its own events and nothing else (P34)."""

    def broken(*_: object) -> None:
        raise RuntimeError("Event loop is closed")

    gate = Gate(runner.model)
    runner.turn("a", "one", emit=broken)
    assert gate.entered.wait(WAIT_S)
    runner.turn("b", "two", emit=broken)
    request = TurnRequest(runner.engine.new_request_id(), ref_of("c"), content("three"), max_tokens=1)
    runner.engine.submit(request, broken)
    gate.go_on.set()
    assert runner.turn("d", "four").result["durable"]
    assert "callback_failed" in {event for event, _ in runner.logged}
    assert runner.ready == [None]


def test_a_condition_that_raises_fails_its_request_only(runner: Runner) -> None:
    """What a turn waits for is its own business, bugs included."""

    def bad_wait(core: EngineCore) -> None:
        ready = core.pager.is_ready
        calls = itertools.count()

        def is_ready(space: Any) -> bool:
            if next(calls) == 0:
                raise ValueError("no such space")
            return ready(space)

        core.pager.is_ready = is_ready  # type: ignore[method-assign]

    runner.look(bad_wait)
    assert isinstance(runner.turn("a", text_of(2)).error, InternalError)
    assert runner.turn("a", text_of(2)).result["durable"]


def test_only_the_engine_thread_calls_the_model(runner: Runner) -> None:
    """P36: requests come from many threads at once; every step of the model runs on the one engine thread."""
    callers: set[str] = set()
    step = runner.model.model

    def watched(ids: Any, cache: Any) -> Any:
        callers.add(threading.current_thread().name)
        return step(ids, cache)

    runner.model.model = watched  # type: ignore[method-assign]
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda number=number: answers.append(runner.turn(f"agent-{number}", text_of(1))))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert all(answer.result["durable"] for answer in answers)
    assert len(answers) == len(threads)
    assert callers == {"kvd-engine"}


def test_a_call_returns_or_raises_to_its_caller(runner: Runner) -> None:
    """Look-ups run on the engine thread; their exceptions are the caller's."""
    assert runner.look(lambda core: threading.current_thread().name) == "kvd-engine"
    with pytest.raises(ZeroDivisionError):
        runner.look(lambda core: 1 // 0)


def test_callers_who_ask_without_end_do_not_keep_turns_from_running(runner: Runner) -> None:
    """Look-ups that follow each other with no gap leave every step its time, and a cancellation acts (P34)."""
    asked = threading.Event()
    ended = threading.Event()

    def ask_again(core: EngineCore) -> None:
        asked.set()
        if not ended.is_set():
            runner.engine.call(ask_again)

    runner.engine.call(ask_again)
    assert asked.wait(WAIT_S)
    try:
        assert runner.turn("a", "one").result["durable"]
        endless = runner.turn("b", text_of(40), max_tokens=4000, on_context_full="stop")
        runner.cancel(endless)
        assert isinstance(endless.error, Cancelled)
    finally:
        ended.set()


def test_an_engine_that_cannot_go_on_dies_loudly(runner: Runner) -> None:
    """An answer of the store that makes no sense: everybody is answered, the daemon is told, latecomers too."""
    gate = Gate(runner.model)
    running, queued = runner.turn("a", text_of(40)), runner.turn("b", "two")
    assert gate.entered.wait(WAIT_S)

    def breaks(result: SwapResult) -> None:
        raise KeyError("nobody asked for this")

    spoil = runner.engine.call(lambda core: setattr(core.store, "on_result", breaks))
    gate.go_on.set()
    spoil.result(WAIT_S)
    assert runner.told.wait(WAIT_S)
    assert runner.ready[0] is None
    assert isinstance(runner.ready[1], KeyError)
    for answer in (running, queued, runner.turn("c", "three"), runner.job("pin", "a")):
        assert isinstance(answer.error, InternalError)
        assert "going down" in answer.error.message
    with pytest.raises(InternalError):
        runner.look(lambda core: None)
    assert runner.engine.drained.wait(WAIT_S)
    assert [event for event, _ in runner.logged if event == "engine_failed"]


def test_a_swap_thread_that_ended_ends_the_engine(runner: Runner) -> None:
    """Its answers will never come: everybody is told, nobody waits for ever, and the daemon hears of it."""
    runner.engine._inbox.put(StoreAnswer(SwapResult(SwapBroken("a bug"), InternalError("a bug"), 0.0)))
    assert runner.told.wait(WAIT_S)
    assert isinstance(runner.ready[-1], EngineBroken)
    assert "going down" in runner.turn("a", "one").error.message


def test_an_agent_whose_log_could_not_be_read_is_not_given_away(runner: Runner) -> None:
    """P1, P5: no turn, fork or look-up makes a new agent of a name whose durable text a restart may bring back."""
    name = log_name("default", "a")
    runner.look(lambda core: setattr(core.agents, "unreadable", frozenset({name})))
    gate = Gate(runner.model)
    running = runner.turn("b", "one")
    assert gate.entered.wait(WAIT_S)
    queued = runner.turn("a", "two")
    fork = runner.job("fork", "b", new_agent="a")
    gate.go_on.set()
    assert running.result["durable"]
    assert isinstance(queued.error, LogUnreadable)
    assert isinstance(fork.error, LogUnreadable)
    with pytest.raises(LogUnreadable):
        runner.look(lambda core: core.agents.get(ref_of("a")))
    assert runner.turn("c", "three").result["durable"], "everybody else goes on"


def test_books_that_do_not_balance_end_the_engine(runner: Runner) -> None:
    """With `check`, a violated conservation law is never served from."""

    def unbalance(core: EngineCore) -> None:
        def check() -> None:
            raise InternalError("two frames too many")

        core.pager.check_integrity = check  # type: ignore[method-assign]

    runner.look(unbalance)
    runner.turn("a", "one").wait()
    assert runner.told.wait(WAIT_S)
    assert isinstance(runner.ready[-1], InternalError)


def test_an_engine_that_cannot_be_built_says_why(tmp_path: Path, codec: TextCodec) -> None:
    """The daemon hears the reason; nobody waits for a drain of what never ran."""
    runner = Runner(tmp_path / "data", codec)
    tmp_path.joinpath("data").write_text("a file where the folder should be")
    runner.engine.start()
    assert runner.told.wait(WAIT_S)
    assert isinstance(runner.ready[0], OSError)
    assert runner.engine.drained.is_set()
    assert runner.engine.stop(WAIT_S)


def test_the_engines_time_is_told_apart(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model takes is part of the time that the loop does not sleep, and time asleep is no part of it."""
    clock_s = [0.0]

    def passes(seconds: float) -> None:
        clock_s[0] += seconds

    def look() -> tuple[float, float, float]:
        stats = runner.look(lambda core: (core.stats.busy_s, core.stats.forward_s, core.stats.sampling_s))
        assert isinstance(stats, tuple)
        return stats

    class Slow:
        """A model whose steps take a second each of a clock that else moves only while the loop sleeps."""

        def __init__(self, model: object) -> None:
            self._model = model
            self.steps = 0

        def __getattr__(self, name: str) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                self.steps += 1
                passes(1.0)
                return getattr(self._model, name)(*arguments, **options)

            return call

    def slowed(core: EngineCore) -> Slow:
        core.clock = lambda: clock_s[0]
        core.forward = model = Slow(core.forward)  # type: ignore[assignment]
        return model

    def sleeps(answering: Answering, most_s: float) -> float:
        passes(100.0)
        return 0.01

    model = runner.look(slowed)
    monkeypatch.setattr(Answering, "patience_s", sleeps)
    before = look()
    assert runner.turn("a", "one two three", max_tokens=3).result["finish_reason"] == "length"
    busy_s, forward_s, sampling_s = (now - then for now, then in zip(look(), before, strict=True))
    assert model.steps >= 3
    assert (busy_s, forward_s, sampling_s) == (model.steps, model.steps, 0.0)
    assert runner.look(lambda core: core.stats.swap_in_exposed_s) == 0.0

    def waits(core: EngineCore, turns: int) -> float:
        core.page_waits += turns
        return core.stats.swap_in_exposed_s

    runner.look(lambda core: waits(core, 1))
    runner.look(lambda core: waits(core, 0))  # the loop slept until it was asked
    exposed_s = runner.look(lambda core: waits(core, -1))
    assert exposed_s >= 100.0, "a turn waited for pages while the loop slept"
    exposed_s = runner.look(lambda core: waits(core, 0))
    assert runner.look(lambda core: waits(core, 0)) == exposed_s
