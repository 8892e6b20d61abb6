"""The engine thread: the only one that touches the model, the pool and the agents. Others knock at its inbox.

Theory of operation. The loop takes messages (requests, cancellations, calls, answers of the swap thread), hands them
to the pure `Scheduler`, and advances the running turn by one resumption when it can go on; with nothing to do it
sleeps in the inbox. A long prefill chunk is the longest time it does not look.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass

from kvd.errors import Busy, Cancelled, Draining, InternalError, KvdError
from kvd.ids import RequestId
from kvd.ops.logs import RequestLine
from kvd.scheduler.core import EngineCore
from kvd.scheduler.jobs import run_job
from kvd.scheduler.requests import JobRequest, Reply, TurnRequest, TurnResult
from kvd.scheduler.state import (
    CancelWanted,
    DrainWanted,
    DropQueued,
    Finished,
    RefuseBusy,
    RefuseDraining,
    Scheduler,
    SchedulerEvent,
    Start,
    StopRunning,
    Submitted,
    TellQueued,
)
from kvd.scheduler.turn import TurnState, Wait, run_turn
from kvd.store.swap_ops import SwapResult
from kvd.vm.events import Tick

TICK_S = 1.0
"""How often failed writes and unsaved turns are tried again."""


@dataclass(slots=True)
class _Request:
    request: TurnRequest | JobRequest
    reply: Reply
    submitted_s: float
    state: TurnState | None = None
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class _Submit:
    request: TurnRequest | JobRequest
    reply: Reply


@dataclass(frozen=True, slots=True)
class _Cancel:
    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[EngineCore], object]
    future: Future[object]


@dataclass(frozen=True, slots=True)
class _StoreAnswer:
    result: SwapResult


@dataclass(frozen=True, slots=True)
class _Drain:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


Message = _Submit | _Cancel | _Call | _StoreAnswer | _Drain | _Stop


class Engine:
    """Runs on its own thread; every public method may be called from any thread.

    Args:
        build: makes the core on the engine thread (MLX arrays belong to the thread that made them); it gets the
            callback for the swap thread's answers.
        max_queued: requests that may wait.
        on_ready: called on the engine thread once requests can run, or with the error that prevented it.
        on_request_done: called with the canonical log line of each request.
        check: verify the pager's conservation laws after each request.
    """

    def __init__(
        self,
        build: Callable[[Callable[[SwapResult], None]], EngineCore],
        *,
        max_queued: int,
        on_ready: Callable[[BaseException | None], None],
        on_request_done: Callable[[RequestLine], None],
        check: bool = False,
    ) -> None:
        self._build = build
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._scheduler = Scheduler(max_queued=max_queued)
        self._requests: dict[RequestId, _Request] = {}
        self._on_ready = on_ready
        self._on_request_done = on_request_done
        self._check = check
        self._work: Generator[Wait, None, object] | None = None
        self._wait: Wait = None
        self._core: EngineCore | None = None
        self._stopping = False
        self._draining = False
        self._last_tick_s = 0.0
        self._next_request = 0
        self._id_lock = threading.Lock()
        self.drained = threading.Event()
        self.last_progress_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="kvd-engine", daemon=True)

    # ---- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; `on_ready` tells when the model is loaded and the agents are known."""
        self._thread.start()

    def new_request_id(self) -> RequestId:
        """A request id unique over all connections."""
        with self._id_lock:
            self._next_request += 1
            return RequestId(self._next_request)

    def submit(self, request: TurnRequest | JobRequest, reply: Reply) -> None:
        """Queue a request. `reply` is called exactly once, on the engine thread."""
        self._inbox.put(_Submit(request, reply))

    def cancel(self, request: RequestId, reason: str = "cancelled by the client") -> None:
        """Cancel one request at its next step boundary; unknown ids are ignored (it may just have ended)."""
        self._inbox.put(_Cancel(request, reason))

    def call(self, function: Callable[[EngineCore], object]) -> Future[object]:
        """Run a short function on the engine thread between two steps."""
        future: Future[object] = Future()
        self._inbox.put(_Call(function, future))
        return future

    def drain(self) -> None:
        """Take no new requests; `drained` is set when the last one ended."""
        self._inbox.put(_Drain())

    def cancel_all(self, reason: str) -> None:
        """Cancel everything queued and running (end of the drain's grace)."""
        for request in tuple(self._requests):
            self.cancel(request, reason)

    def stop(self, timeout_s: float) -> bool:
        """End the thread; True when it ended in time."""
        self._inbox.put(_Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def queue_facts(self) -> dict[str, object]:
        """Running and queued counts, for health; a snapshot without waiting for the engine."""
        return {"running": int(self._scheduler.running is not None), "queued": len(self._scheduler.queued)}

    # ---- the engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._core = self._build(lambda result: self._inbox.put(_StoreAnswer(result)))
        except BaseException as error:  # the daemon must hear of it and exit with the reason
            self._on_ready(error)
            return
        self._on_ready(None)
        while not self._stopping:
            self._take_messages(block=not self._can_go_on())
            self._tick()
            if self._can_go_on():
                self._go_on()
            self.last_progress_s = time.monotonic()
        self._core.close()

    def _can_go_on(self) -> bool:
        return self._work is not None and (self._wait is None or self._wait())

    def _take_messages(self, *, block: bool) -> None:
        try:
            message = self._inbox.get(timeout=TICK_S) if block else self._inbox.get_nowait()
            while True:
                self._take(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _take(self, message: Message) -> None:
        assert self._core is not None
        match message:
            case _Submit(request, reply):
                self._requests[request.request_id] = _Request(request, reply, self._core.clock())
                self._schedule(Submitted(request.request_id))
            case _Cancel(request_id, reason):
                held = self._requests.get(request_id)
                if held is not None and held.state is not None:
                    held.state.cancel_reason = reason
                self._schedule(CancelWanted(request_id))
            case _Call(function, future):
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function(self._core))
                    except BaseException as error:  # belongs to the caller
                        future.set_exception(error)
            case _StoreAnswer(result):
                self._core.store.on_result(result)
            case _Drain():
                self._draining = True
                self._schedule(DrainWanted())
            case _Stop():
                self._stopping = True
        if self._draining and self._scheduler.is_idle:
            self.drained.set()

    def _schedule(self, event: SchedulerEvent) -> None:
        for instruction in self._scheduler.handle(event):
            match instruction:
                case Start(request_id):
                    self._start(self._requests[request_id])
                case TellQueued(request_id, position):
                    held = self._requests[request_id]
                    if isinstance(held.request, TurnRequest):
                        held.request.emit({"type": "queued", "position": position})
                case StopRunning(request_id):
                    held = self._requests[request_id]
                    held.stopping = True
                    if held.state is not None:
                        held.state.cancelled = True
                case DropQueued(request_id):
                    self._answer(request_id, None, Cancelled("cancelled while queued; nothing was computed"))
                case RefuseBusy(request_id, queued):
                    error = Busy(f"{queued} requests are queued already", retry_after_s=1.0, queued=queued)
                    self._answer(request_id, None, error)
                case RefuseDraining(request_id):
                    self._answer(request_id, None, Draining("the daemon is draining and takes no new requests"))

    def _start(self, held: _Request) -> None:
        assert self._core is not None
        if isinstance(held.request, TurnRequest):
            held.state = TurnState(held.request, held.submitted_s)
            held.state.times.queued_s = self._core.clock() - held.submitted_s
            self._work = run_turn(self._core, held.state)
        else:
            self._work = run_job(self._core, held.request)
        self._wait = None

    def _go_on(self) -> None:
        assert self._work is not None
        assert self._core is not None
        running = self._scheduler.running
        assert running is not None
        result: object = None
        error: KvdError | None = None
        try:
            self._wait = next(self._work)
            return
        except StopIteration as stop:
            result = stop.value
        except KvdError as caught:
            error = caught
        except Exception as caught:  # one request's bug must not end the daemon
            self._core.log("request_failed", error=f"{type(caught).__name__}: {caught}", exc_info=caught)
            error = InternalError(f"the request failed: {type(caught).__name__}; the daemon's log has the details")
        self._work = None
        self._core.stats.turns += 1
        self._answer(running, result, error)
        if self._check:
            self._core.pager.check_integrity()
        self._schedule(Finished(running))
        if self._draining and self._scheduler.is_idle:
            self.drained.set()

    def _answer(self, request_id: RequestId, result: object, error: KvdError | None) -> None:
        held = self._requests.pop(request_id)
        self._on_request_done(self._line(held, result, error))
        held.reply(result.to_wire() if isinstance(result, TurnResult) else result, error)

    def _line(self, held: _Request, result: object, error: KvdError | None) -> RequestLine:
        assert self._core is not None
        request = held.request
        method = f"agent.{request.operation}" if isinstance(request, JobRequest) else "generate"
        turn = result if isinstance(result, TurnResult) else None
        return RequestLine(
            method="inject" if isinstance(request, TurnRequest) and request.append else method,
            outcome="ok" if error is None else error.name,
            total_s=self._core.clock() - held.submitted_s,
            request=int(request.request_id),
            agent=request.ref.agent,
            namespace=request.ref.namespace,
            queued_s=turn.queued_s if turn is not None else None,
            ttft_s=held.state.times.first_token_s if held.state is not None else None,
            prompt_tokens=turn.prompt_tokens if turn is not None else None,
            cached_tokens=turn.cached_tokens if turn is not None else None,
            completion_tokens=turn.completion_tokens if turn is not None else None,
            finish_reason=turn.finish_reason if turn is not None else None,
            match=turn.match if turn is not None else None,
            match_reason=turn.match_reason if turn is not None else None,
            swapped_in_pages=turn.swapped_in_pages if turn is not None else None,
            durable=turn.durable if turn is not None else None,
        )

    def _tick(self) -> None:
        assert self._core is not None
        now = time.monotonic()
        if now - self._last_tick_s < TICK_S:
            return
        self._last_tick_s = now
        self._core.memory.apply(Tick())
        if self._work is None:
            self._retry_unsaved()

    def _retry_unsaved(self) -> None:
        """Give the disk another chance for a turn it refused; queued like a request, so order is kept."""
        assert self._core is not None
        if self._draining or not self._scheduler.is_idle:
            return
        unsaved = next((agent for agent in self._core.agents if agent.unsaved is not None), None)
        if unsaved is not None:
            request = JobRequest(self.new_request_id(), unsaved.ref, "save")
            self._take(_Submit(request, lambda result, error: None))
