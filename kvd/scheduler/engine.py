"""The engine thread: the only one that touches the model, the pool and the agents. Others knock at its inbox.

Theory of operation. The loop takes messages (requests, cancellations, calls, answers of the swap thread), hands them
to the pure `Scheduler`, and advances the running turn by one resumption when it can go on; with nothing to do it
sleeps in the inbox. A long prefill chunk is the longest time it does not look.

Faults. What a request does wrong, our bugs included, ends that request. What a client's callbacks do wrong is logged.
Anything else (an answer of the store that makes no sense, books that do not balance) ends the engine: everybody who
waits is answered, `on_ready` hears of it, and the daemon exits with the reason; what is durable is durable.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from kvd.errors import Busy, Cancelled, Draining, InternalError, KvdError
from kvd.ids import RequestId
from kvd.ops.logs import RequestLine
from kvd.scheduler.agents import Agent
from kvd.scheduler.commit import sweep
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
from kvd.scheduler.turn import TurnState, run_turn
from kvd.scheduler.waiting import Wait
from kvd.store.swap_ops import SwapResult
from kvd.vm.events import Tick

TICK_S = 1.0
"""How often failed writes are tried again, and at least how far apart unsaved turns are."""

MAX_SAVE_WAIT_S = 30.0
"""How far apart tries for unsaved turns get while the disk goes on refusing."""


@dataclass(slots=True)
class _Request:
    request: TurnRequest | JobRequest
    reply: Reply
    submitted_s: float
    state: TurnState | None = None
    stop_reason: str = "cancelled by the client"
    stopping: bool = False

    def stop(self) -> str | None:
        """Why a control operation is to end early; None while it may go on."""
        return self.stop_reason if self.stopping else None


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
        on_ready: called on the engine thread once requests can run, or with the error that prevented it; once more,
            with an error, when the engine cannot go on.
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
        self._wait_error: Exception | None = None
        self._core: EngineCore | None = None
        self._stopping = False
        self._draining = False
        self._last_tick_s = 0.0
        self._next_save_s = 0.0
        self._save_wait_s = 0.0
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
            self.drained.set()
            self._on_ready(error)
            return
        self._on_ready(None)
        try:
            while not self._stopping:
                self._turn_over()
            self._end(Draining("the daemon has stopped"))
        except BaseException as error:  # likewise
            self._die(error)
        self._core.close()

    def _turn_over(self) -> None:
        """Once round the loop."""
        can_go_on = self._can_go_on()
        self._take_messages(block=not can_go_on)
        self._tick()
        if can_go_on:
            self._go_on()
        self.last_progress_s = time.monotonic()

    def _die(self, cause: BaseException) -> None:
        """The engine's own state cannot be trusted: tell everybody, and turn away whoever still comes."""
        assert self._core is not None
        reason = f"{type(cause).__name__}: {cause}"
        self._core.log("engine_failed", error=reason, exc_info=cause)
        error = InternalError(f"the engine failed and the daemon is going down ({reason}); its log has the details")
        self.drained.set()
        try:
            self._on_ready(cause)
        except Exception as caught:
            self._callback_failed(caught)
        self._end(error)
        while not self._stopping:
            self._turn_away(self._inbox.get(), error)

    def _end(self, error: KvdError) -> None:
        """Answer everybody who waits; what was computed and not committed is lost with the process."""
        assert self._core is not None
        work, self._work = self._work, None
        if work is not None:
            try:
                work.close()
            except Exception as caught:  # nothing is left that it could harm
                self._core.log("request_failed", error=f"{type(caught).__name__}: {caught}", exc_info=caught)
        for request_id in tuple(self._requests):
            self._answer(request_id, None, error)
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._turn_away(message, error)

    def _turn_away(self, message: Message, error: KvdError) -> None:
        match message:
            case _Submit(request, reply):
                self._reply(_Request(request, reply, 0.0), None, error)
            case _Call(_, future):
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            case _Stop():
                self._stopping = True
            case _Drain():
                self.drained.set()

    def _can_go_on(self) -> bool:
        if self._work is None:
            return False
        try:
            return self._wait is None or self._wait()
        except Exception as error:  # belongs to the request that waits
            self._wait_error = error
            return True

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
                if isinstance(request, TurnRequest):
                    request = replace(request, emit=self._guarded(request.emit))
                self._requests[request.request_id] = _Request(request, reply, self._core.clock())
                self._schedule(Submitted(request.request_id))
            case _Cancel(request_id, reason):
                held = self._requests.get(request_id)
                if held is not None:
                    held.stop_reason = reason
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
                for agent in [] if self._draining else self._unsaved():
                    self._submit_save(agent)  # the last chance for what the disk refused
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
                        held.state.cancelled, held.state.cancel_reason = True, held.stop_reason
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
            self._work = run_job(self._core, held.request, held.stop)
        self._wait = None

    def _go_on(self) -> None:
        assert self._work is not None
        assert self._core is not None
        running = self._scheduler.running
        assert running is not None
        result: object = None
        error: KvdError | None = None
        fault, self._wait_error = self._wait_error, None
        try:
            self._wait = next(self._work) if fault is None else self._work.throw(fault)
            return
        except StopIteration as stop:
            result = stop.value
        except KvdError as caught:
            error = caught
            if isinstance(caught, InternalError):
                self._core.log("request_failed", error=f"{type(caught).__name__}: {caught}", exc_info=caught)
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
        self._retry_unsaved()

    def _answer(self, request_id: RequestId, result: object, error: KvdError | None) -> None:
        held = self._requests.pop(request_id)
        try:
            self._on_request_done(self._line(held, result, error))
        except Exception as caught:
            self._callback_failed(caught)
        self._reply(held, result, error)

    def _reply(self, held: _Request, result: object, error: KvdError | None) -> None:
        try:
            held.reply(result.to_wire() if isinstance(result, TurnResult) else result, error)
        except Exception as caught:
            self._callback_failed(caught)

    def _guarded(self, emit: Callable[[Mapping[str, object]], None]) -> Callable[[Mapping[str, object]], None]:
        """A client's callback whose faults stay its own (its event loop may be gone)."""

        def guarded(event: Mapping[str, object]) -> None:
            try:
                emit(event)
            except Exception as caught:
                self._callback_failed(caught)

        return guarded

    def _callback_failed(self, caught: Exception) -> None:
        assert self._core is not None
        self._core.log("callback_failed", error=f"{type(caught).__name__}: {caught}")

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
        sweep(self._core)
        self._retry_unsaved()

    def _unsaved(self) -> list[Agent]:
        """Agents with changes that the disk refused, the one that waited longest first."""
        assert self._core is not None
        unsaved = [agent for agent in self._core.agents if agent.unsaved is not None]
        return sorted(unsaved, key=lambda agent: agent.last_save)

    def _retry_unsaved(self) -> None:
        """Give the disk another chance for a turn it refused; queued like a request, so order is kept."""
        if self._draining or not self._scheduler.is_idle or time.monotonic() < self._next_save_s:
            return
        for agent in self._unsaved()[:1]:
            self._submit_save(agent)

    def _submit_save(self, agent: Agent) -> None:
        assert self._core is not None
        agent.last_save = self._core.agents.tick()
        self._take(_Submit(JobRequest(self.new_request_id(), agent.ref, "save"), self._saved))

    def _saved(self, result: object, error: KvdError | None) -> None:
        """While the disk refuses, tries get rarer; once it takes one, the others follow at once."""
        if isinstance(result, dict) and result.get("durable"):
            self._save_wait_s = 0.0
        else:
            self._save_wait_s = min(MAX_SAVE_WAIT_S, max(TICK_S, 2 * self._save_wait_s))
        self._next_save_s = time.monotonic() + self._save_wait_s
