"""The engine thread: the only one that touches the model, the pool and the agents. Others knock at its inbox.

Theory of operation. The loop takes messages (requests, cancellations, answers of the swap thread;
`kvd.scheduler.inbox` says how many), hands them to the pure `Scheduler`, answers some look-ups, and resumes each
running request that can go on, up to its next wait. Then it runs one iteration of the model: of the steps that
requests now wait for, all decode steps together or one prefill chunk, as the pure `IterationPlanner` says. With
nothing to do it sleeps in the inbox. A long prefill chunk is the longest time it does not look. Who waits for the disk
or for room holds up nobody else. Evictions and hints run beside all others, so that they can make room or fetch pages
while other agents decode.

Faults. What a request does wrong, our bugs included, ends that request, and none that its step ran with. What a
client's callbacks do wrong is logged. Anything else (an answer of the store that makes no sense,
books that do not balance, an instruction of the pager that was lost half way, in whosever request) ends the engine:
everybody who waits is answered, `on_ready` hears of it, and the daemon exits with the reason; what is durable is
durable.

Long because one loop takes every message and every instruction of the scheduler.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TypeGuard

from kvd.errors import Busy, Draining, InternalError, KvdError
from kvd.ids import RequestId
from kvd.ops.logs import RequestLine
from kvd.scheduler.answering import Answering
from kvd.scheduler.commit import sweep
from kvd.scheduler.core import EngineCore
from kvd.scheduler.errors import EngineBroken
from kvd.scheduler.event_ring import EventRing
from kvd.scheduler.importing import warm_first
from kvd.scheduler.inbox import Inbox
from kvd.scheduler.iterations import IterationPlanner
from kvd.scheduler.jobs import run_job
from kvd.scheduler.limits import LimitChange, unfitting
from kvd.scheduler.messages import (
    BY_CLIENT,
    Call,
    Cancel,
    Drain,
    HeldRequest,
    Message,
    Stop,
    StoreAnswer,
    Submit,
    Work,
    refuse,
)
from kvd.scheduler.places import Place
from kvd.scheduler.requests import AgentRef, JobRequest, Reply, TurnRequest
from kvd.scheduler.shedding import shed
from kvd.scheduler.state import (
    CancelWanted,
    DrainWanted,
    DropQueued,
    Finished,
    Preempt,
    Preempted,
    Prioritise,
    RefuseBusy,
    RefuseDraining,
    Resume,
    Scheduler,
    SchedulerEvent,
    Start,
    StopRunning,
    TellQueued,
)
from kvd.scheduler.steps import run_steps
from kvd.scheduler.turn import TurnState, run_turn
from kvd.scheduler.upkeep import Upkeep
from kvd.scheduler.views import health_facts
from kvd.scheduler.waiting import Parked
from kvd.scheduler.waking import wake_first
from kvd.store.swap_ops import SwapResult
from kvd.vm.events import Tick

TICK_S = 1.0
"""How often failed writes are tried again at most, and how far apart tries for unsaved turns are at least."""

COPY_AFTER_S = 0.003
"""How long nothing must have come before copies are made that answers did not wait for."""

BESIDE = ("evict", "prefetch")
"""Operations that compute nothing and write no log: they run beside a request of another agent."""


class Engine:
    """Runs on its own thread; every public method may be called from any thread.

    Args:
        build: makes the core on the engine thread (MLX arrays belong to the thread that made them); it gets the
            callback for the swap thread's answers.
        max_queued: requests that may wait.
        max_batch: requests that run at once; None for the core's `default_batch`.
        decode_share: part of the time that decode steps get at least while others prefill.
        on_ready: called on the engine thread once requests can run, or with the error that prevented it; once more,
            with an error, when the engine cannot go on.
        on_request_done: called with the canonical log line of each request.
        check: verify the pager's conservation laws after each request.

    Attributes:
        ring: what happens, for whoever subscribes.
        drained: set when it takes no new requests and the last one ended.
        last_progress_s: monotonic clock of its last time round.
    """

    def __init__(
        self,
        build: Callable[[Callable[[SwapResult], None]], EngineCore],
        *,
        max_queued: int,
        max_batch: int | None = 1,
        decode_share: float = 0.5,
        on_ready: Callable[[BaseException | None], None],
        on_request_done: Callable[[RequestLine], None],
        check: bool = False,
    ) -> None:
        self._build = build
        self._inbox = Inbox(time.monotonic)
        self._max_queued = max_queued
        self._max_batch = max_batch
        self._scheduler = Scheduler(max_queued=max_queued)
        self._planner = IterationPlanner(decode_share=decode_share)
        self._answering = Answering(on_request_done)
        self._requests = self._answering.requests
        self._on_ready = on_ready
        self._check = check
        self._running: dict[RequestId, HeldRequest] = {}
        self._parked: dict[RequestId, HeldRequest] = {}
        self._beside: list[HeldRequest] = []
        self._core: EngineCore | None = None
        self._upkeep: Upkeep | None = None
        self._stopping = False
        self._draining = False
        self._last_tick_s = 0.0
        self._changes = 0
        self._next_request = 0
        self._id_lock = threading.Lock()
        self._end_lock = threading.Lock()
        self._ended: KvdError | None = None  # what whoever comes is told: nobody looks into the inbox any more
        self.ring = EventRing()
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
        """Queue a request. `reply` is called exactly once, on the engine thread, or here once that has ended."""
        self._hand_over(Submit(request, reply))

    def cancel(self, request: RequestId, reason: str = BY_CLIENT) -> None:
        """Cancel one request at its next step boundary; unknown ids are ignored (it may just have ended)."""
        self._inbox.put(Cancel(request, reason))

    def call(self, function: Callable[[EngineCore], object]) -> Future[object]:
        """Run a short function on the engine thread between two steps."""
        future: Future[object] = Future()
        self._hand_over(Call(function, future))
        return future

    def _hand_over(self, message: Submit | Call) -> None:
        """Put what wants an answer where somebody gives one."""
        with self._end_lock:
            ended = self._ended
            if ended is None:
                self._inbox.put(message)
        if ended is not None:
            self._turn_away(message, ended)

    def configure(self, change: LimitChange) -> Future[object]:
        """Change limits between two steps; the answer is `Limits.facts`, or what the change was refused with."""
        return self.call(lambda core: self._configure(core, change))

    def drain(self) -> None:
        """Take no new requests; `drained` is set when the last one ended."""
        self._inbox.put(Drain())

    def cancel_all(self, reason: str) -> None:
        """Cancel everything queued and running (end of the drain's grace)."""
        for request in tuple(self._requests):
            self.cancel(request, reason)

    def stop(self, timeout_s: float) -> bool:
        """End the thread; True when it ended in time."""
        self._inbox.put(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def queue_facts(self) -> dict[str, object]:
        """Counts of requests, and thrashing, for health; a snapshot without waiting for the engine."""
        running, queued = self._scheduler.counts
        facts = {"running": running, "queued": queued, "preempted": len(self._scheduler.preempted)}
        more = health_facts(self._core) if self._core is not None else {}
        return {**facts, "max_batch": self._scheduler.max_running, **more}

    # ---- the engine thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._core = self._build(lambda result: self._inbox.put(StoreAnswer(result)))
            self._upkeep = Upkeep(self._core, time.monotonic, TICK_S)
            self._answering.core = self._core
            self._core.requests, self._core.journal.ring = self._requests, self.ring
            max_batch = self._max_batch if self._max_batch is not None else self._core.default_batch
            self._answering.at_once = self._core.stats.max_batch = max_batch
            self._core.thrashing.allow(max_batch)
            self._scheduler = Scheduler(max_queued=self._max_queued, max_running=max_batch)  # nothing has come yet
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
        core = self._core_now
        began_s, slept_s = core.clock(), 0.0
        self._take_messages(block=False)
        self._tick()
        core.journal.tick()
        core.limits.settle()
        core.reservations.review()
        self._tell_places()
        ready = [held for held in (*self._beside, *self._running.values()) if held.can_go_on()]
        for held in ready:
            self._go_on(held)
        # the model runs when all who can want a step do, so that they share it
        if not ready and not self._iterate() and not self._stopping:
            is_exposed = core.page_waits > 0
            slept_s = self._take_messages(block=True)
            core.stats.swap_in_exposed_s += slept_s * is_exposed
            if slept_s >= COPY_AFTER_S:
                core.memory.copy_late()
        core.stats.busy_s += core.clock() - began_s - slept_s
        self.last_progress_s = time.monotonic()

    @property
    def _core_now(self) -> EngineCore:
        assert self._core is not None
        return self._core

    def _tell_places(self) -> None:
        version = (self._changes, self._core_now.reservations.changes)
        self._answering.tell_places(version, lambda: self._scheduler.line)

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
            self._answering.callback_failed(caught)
        self._end(error)
        while not self._stopping:
            self._turn_away(self._inbox.get(), error)

    def _end(self, error: KvdError) -> None:
        """Answer everybody who waits; what was computed and not committed is lost with the process."""
        assert self._core is not None
        self._running, self._parked, self._beside = {}, {}, []
        for work in [held.work for held in self._requests.values() if held.work is not None]:
            try:
                work.close()
            except (Exception, EngineBroken) as caught:  # nothing is left that it could harm
                self._core.log("request_failed", error=f"{type(caught).__name__}: {caught}", exc_info=caught)
        for request_id in tuple(self._requests):
            self._answering.answer(request_id, None, error)
        with self._end_lock:
            self._ended = error
        for message in self._inbox.rest():
            self._turn_away(message, error)

    def _turn_away(self, message: Message, error: KvdError) -> None:
        match message:
            case Submit(request, reply):
                self._answering.turn_away(request, reply, error)
            case Call(_, future):
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            case Stop():
                self._stopping = True
            case Drain():
                self.drained.set()

    def _iterate(self) -> bool:
        """Run the model once, for whoever waits for it; False when nobody does."""
        assert self._core is not None
        wanted = {number: step for number, held in self._running.items() if (step := held.step) is not None}
        if not wanted:
            return False
        decodes = [number for number, step in wanted.items() if step.is_decode]
        prefills = [number for number, step in wanted.items() if not step.is_decode]
        iteration = self._planner.plan(decodes, prefills)
        began_s = self._core.clock()
        run_steps(self._core, [wanted[number] for number in iteration.requests])
        seconds = self._core.clock() - began_s
        self._planner.ran(iteration, seconds, decoding=bool(decodes))
        self._core.stats.note_steps(rows=len(iteration.requests), is_chunk=iteration.is_chunk, seconds=seconds)
        return True

    def _take_messages(self, *, block: bool) -> float:
        """See to what is in the inbox, if need be wait for it; returns the seconds that the loop slept."""
        clock = self._core_now.clock
        began_s = clock()
        core = self._core_now
        most_s = COPY_AFTER_S if core.memory.has_late_copies else TICK_S
        messages = self._inbox.take(core.journal.patience_s(self._answering.patience_s(most_s)) if block else 0.0)
        slept_s = clock() - began_s if block else 0.0
        for message in messages:
            self._take(message)
        for look in self._inbox.looks():
            self._look(look)
        return slept_s

    def _look(self, look: Call) -> None:
        """Run a caller's function; its faults are the caller's, but for those that end the engine."""
        if not look.future.set_running_or_notify_cancel():
            return
        try:
            look.future.set_result(look.function(self._core_now))
        except BaseException as error:
            look.future.set_exception(error)
            if isinstance(error, EngineBroken):
                raise

    def _take(self, message: Work) -> None:
        assert self._core is not None
        match message:
            case Submit(request, reply):
                held = self._answering.take(request, reply)
                if (refusal := self._core.pressure.refusal(request)) is not None:
                    self._answering.answer(request.request_id, None, refusal)
                elif self._can_run_beside(request):
                    held.work = warm_first(self._core, held.agents, held.stop, run_job(self._core, request, held.stop))
                    self._beside.append(held)
                else:
                    self._schedule(held.submitted)
            case Cancel(request_id, reason):
                self._cancel(request_id, reason)
            case StoreAnswer(result):
                self._core.store.on_result(result)
            case Drain():
                assert self._upkeep is not None
                self._core.governor.lift()  # what is not written now is lost with the process
                self._core.govern()
                for agent in [] if self._draining else self._upkeep.unsaved():
                    self._submit_own(agent.ref, "save")  # the last chance for what the disk refused
                if not self._draining:
                    self._core.journal.tell("draining")
                self._draining = True
                self._schedule(DrainWanted())
            case Stop():
                self._stopping = True
        self._look_drained()

    def _cancel(self, request_id: RequestId, reason: str) -> None:
        found = self._requests.get(request_id)
        if found is not None:
            found.stop_reason, found.deadline_s = reason, None
            if found in self._beside:
                found.end_early()
        self._schedule(CancelWanted(request_id))

    def _configure(self, core: EngineCore, change: LimitChange) -> Mapping[str, object]:
        if change != LimitChange():
            core.limits.change(change)
            for request_id, error in tuple(unfitting(self._requests)):
                self._requests[request_id].refusal = error
                self._cancel(request_id, error.message)
        return core.limits.facts()

    def _look_drained(self) -> None:
        if self._draining and self._scheduler.is_idle and not self._beside:
            self.drained.set()

    def _can_run_beside(self, request: TurnRequest | JobRequest) -> TypeGuard[JobRequest]:
        """Whether an operation can start at once: nothing of its agent runs or waits, and others do."""
        if not isinstance(request, JobRequest) or request.operation not in BESIDE or self._draining:
            return False
        beside = [request.request_id, *(held.request.request_id for held in self._beside)]
        ahead = [number for number in self._requests if number not in beside]
        return bool(ahead) and all(request.ref not in self._requests[number].agents for number in ahead)

    def _schedule(self, event: SchedulerEvent) -> None:
        assert self._core is not None
        self._changes += 1
        for instruction in self._scheduler.handle(event):
            match instruction:
                case Start(request_id):
                    self._start(self._requests[request_id])
                case Preempt() | Prioritise():
                    # one that has just been answered has not told the scheduler yet
                    if (found := self._requests.get(instruction.request)) is not None:
                        found.make_way(instruction)
                case Resume(request_id):
                    held = self._running[request_id] = self._parked.pop(request_id)
                    assert isinstance(held.wait, Parked)
                    held.wait.resumed = True
                case TellQueued(request_id, position):
                    self._answering.tell_place(request_id, Place(position, "slot"))
                    request = self._requests[request_id].request
                    if isinstance(request, TurnRequest):
                        self._core.paging.queued(request)
                case StopRunning(request_id):
                    if request_id in self._parked:  # it has to commit
                        self._running[request_id] = self._parked.pop(request_id)
                    self._requests[request_id].end_early()
                case DropQueued(request_id):
                    request = self._requests[request_id].request
                    self._answering.drop_queued(request_id)
                    self._core.paging.ended(request, has_run=False, waits=self._answering.waits)
                case RefuseBusy(request_id, queued):
                    self._answering.refuse_busy(request_id, queued)
                case RefuseDraining(request_id):
                    error = Draining("the daemon is draining and takes no new requests")
                    self._answering.answer(request_id, None, error)

    def _start(self, held: HeldRequest) -> None:
        assert self._core is not None
        if (refusal := self._core.pressure.refusal(held.request)) is not None:  # memory got short while it waited
            held.work = refuse(refusal)
        elif isinstance(held.request, TurnRequest):
            held.state = TurnState(held.request, held.submitted_s)
            held.state.times.queued_s = self._core.clock() - held.submitted_s
            held.work = warm_first(self._core, held.agents, held.stop, run_turn(self._core, held.state))
            self._core.paging.started(held.request)
        else:
            work = run_job(self._core, held.request, held.stop)
            imports = held.request.operation == "import"  # it says itself what becomes of the name
            if imports:
                held.work = wake_first(self._core, held.agents, held.stop, work)
            else:
                held.work = warm_first(self._core, held.agents, held.stop, work)
        held.started_s = self._core.clock()
        self._running[held.request.request_id] = held

    def _go_on(self, held: HeldRequest) -> None:
        """Resume a request once."""
        assert self._core is not None
        result: object = None
        error: KvdError | None = None
        try:
            held.resume()
            if isinstance(held.wait, Parked) and not held.stopping:
                self._park(held)
            return
        except StopIteration as stop:
            result = stop.value
        except KvdError as caught:
            error = held.told(caught)
            if isinstance(caught, InternalError):
                self._core.log("request_failed", error=f"{type(caught).__name__}: {caught}", exc_info=caught)
        except Exception as caught:  # one request's bug must not end the daemon
            self._core.log("request_failed", error=f"{type(caught).__name__}: {caught}", exc_info=caught)
            error = InternalError(f"the request failed: {type(caught).__name__}; the daemon's log has the details")
        self._core.stats.requests += not held.internal
        self._core.stats.requests_busy += isinstance(error, Busy) and not held.internal
        request_id = held.request.request_id
        self._answering.answer(request_id, result, error)
        self._core.paging.ended(held.request, has_run=held.has_held_pages, waits=self._answering.waits)
        if self._check:
            self._core.pager.check_integrity()
        if self._running.pop(request_id, None) is not None:
            self._planner.forget(request_id)
            self._answering.note_typical(held)
            self._keep_up(idle=not self._scheduler.line and not self._running)
            self._schedule(Finished(request_id))
        else:
            self._beside.remove(held)
        self._look_drained()

    def _park(self, held: HeldRequest) -> None:
        """A turn was preempted: its slot is free."""
        request_id = held.request.request_id
        self._parked[request_id] = self._running.pop(request_id)
        self._schedule(Preempted(request_id))

    def _tick(self) -> None:
        assert self._core is not None
        for request_id, reason in self._answering.overdue().items():
            self._cancel(request_id, reason)
        now = time.monotonic()
        if now - self._last_tick_s < TICK_S:
            return
        self._last_tick_s = now
        self._core.memory.apply(Tick())
        self._core.govern()
        self._core.paging.tick()
        self._core.relieve()
        sweep(self._core)
        shed(self._core)
        if self._scheduler.is_idle:
            self._keep_up(idle=True)

    def _keep_up(self, *, idle: bool) -> None:
        """Give the engine's own work its turn, ahead of what waits."""
        assert self._upkeep is not None
        if self._draining or any(held.internal for held in self._requests.values()):
            return
        if (job := self._upkeep.next_job(idle=idle)) is not None:
            self._submit_own(*job)

    def _submit_own(self, ref: AgentRef, operation: str) -> None:
        assert self._core is not None
        request = JobRequest(self.new_request_id(), ref, operation, internal=True)
        reply = partial(self._saved, ref) if operation in ("save", "shrink") else lambda result, error: None
        self._schedule(self._answering.take(request, reply).submitted)

    def _saved(self, ref: AgentRef, result: object, error: KvdError | None) -> None:
        assert self._upkeep is not None
        self._upkeep.save_ended(ref, durable=isinstance(result, dict) and bool(result.get("durable")))
