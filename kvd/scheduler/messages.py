"""What reaches the engine's inbox, and a request from its arrival to its log line.

May import kvd.errors, kvd.ids, kvd.ops.logs, kvd.store.swap_ops and siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.errors import Cancelled, KvdError
from kvd.ids import AgentId, RequestId
from kvd.ops.logs import RequestLine
from kvd.scheduler.requests import AgentRef, JobRequest, Reply, TurnRequest, TurnResult
from kvd.scheduler.state import Preempt, Prioritise, Submitted
from kvd.scheduler.turn import TurnState
from kvd.scheduler.waiting import StepWanted, Wait
from kvd.store.swap_ops import SwapResult

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore

BY_CLIENT = "cancelled by the client"
"""Why a request ends when nothing else is said."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A request came in."""

    request: TurnRequest | JobRequest
    reply: Reply


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request is to end early."""

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class Call:
    """Run a short function between two steps."""

    function: Callable[[EngineCore], object]
    future: Future[object]


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """The swap thread is done with an operation."""

    result: SwapResult


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new requests."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Work = Submit | Cancel | StoreAnswer | Drain | Stop
Message = Work | Call


@dataclass(slots=True)
class HeldRequest:
    """A request that has not been answered yet. Owner: the engine thread.

    Attributes:
        request, reply: as submitted.
        submitted_s: when it came.
        started_s: when it started.
        state: of a turn that has started.
        work: its generator, once it has started.
        wait: what the generator waits for.
        fault: what its condition raised; the generator gets to see it.
        deadline_s: when it is cancelled at the latest; None for never.
        stop_reason: why it is to end early, if it is.
        stopping: it is.
        refusal: the error that it ends with when it ends early, since it can never fit any more.
    """

    request: TurnRequest | JobRequest
    reply: Reply
    submitted_s: float
    started_s: float = 0.0
    state: TurnState | None = None
    work: Generator[Wait, None, object] | None = None
    wait: Wait = None
    fault: Exception | None = None
    deadline_s: float | None = None
    stop_reason: str = BY_CLIENT
    stopping: bool = False
    refusal: KvdError | None = None

    def stop(self) -> str | None:
        """Why a control operation is to end early; None while it may go on."""
        return self.stop_reason if self.stopping else None

    def end_early(self) -> None:
        """It ends at its next step boundary."""
        self.stopping = True
        if self.state is not None:
            self.state.cancelled, self.state.cancel_reason = True, self.stop_reason

    def told(self, error: KvdError) -> KvdError:
        """What its caller is told of an error: one that was refused in the middle ends as a cancelled one does."""
        if self.refusal is None or not isinstance(error, Cancelled):
            return error
        self.refusal.data |= error.data
        return self.refusal

    def make_way(self, instruction: Preempt | Prioritise) -> None:
        """Do what the scheduler wants of a turn that has started; others have no slot or priority to lose."""
        if self.state is None:
            return
        match instruction:
            case Preempt(_, wanted):
                self.state.slot_wanted = wanted
            case Prioritise(_, priority):
                self.state.prioritise(priority)

    def answer(self, result: object, error: KvdError | None) -> None:
        """Call `reply`, whose faults are the caller's to catch."""
        self.reply(result.to_wire() if isinstance(result, TurnResult) else result, error)

    def can_go_on(self) -> bool:
        """Whether what it waits for has come."""
        try:
            return self.wait is None or self.wait()
        except Exception as error:  # belongs to the request that waits
            self.fault = error
            return True

    def resume(self) -> None:
        """Run it to its next wait.

        Raises:
            StopIteration: it is done, with its result.
            KvdError: it ended with that error.
        """
        assert self.work is not None
        fault, self.fault = self.fault, None
        self.wait = next(self.work) if fault is None else self.work.throw(fault)

    @property
    def agents(self) -> tuple[AgentRef, ...]:
        """The agents it works on, alone."""
        return agents_of(self.request)

    @property
    def submitted(self) -> Submitted:
        """What the scheduler has to know of it."""
        request = self.request
        priority = request.priority if isinstance(request, TurnRequest) else "interactive"
        return Submitted(
            request.request_id, first=self.internal, agents=self.agents, client=request.connection, priority=priority
        )

    @property
    def step(self) -> StepWanted | None:
        """The step of the model it waits for, if it does."""
        return self.wait if isinstance(self.wait, StepWanted) and not self.wait() else None

    @property
    def has_held_pages(self) -> bool:
        """It is a turn that got its place in RAM."""
        residence = self.state.residence if self.state is not None else None
        return residence is not None and residence.was_in

    @property
    def internal(self) -> bool:
        """The engine asked for it itself."""
        return isinstance(self.request, JobRequest) and self.request.internal

    def line(self, now_s: float, result: object, error: KvdError | None) -> RequestLine:
        """The canonical log line."""
        request = self.request
        method = f"agent.{request.operation}" if isinstance(request, JobRequest) else request.method
        turn = result if isinstance(result, TurnResult) else None
        return RequestLine(
            method="inject" if isinstance(request, TurnRequest) and request.append else method,
            outcome="ok" if error is None else error.name,
            total_s=now_s - self.submitted_s,
            request=int(request.request_id),
            connection=request.connection,
            peer_pid=request.peer_pid,
            agent=request.ref.agent,
            namespace=request.ref.namespace,
            queued_s=turn.queued_s if turn is not None else None,
            ttft_s=self.state.times.first_token_s if self.state is not None else None,
            prompt_tokens=turn.prompt_tokens if turn is not None else None,
            cached_tokens=turn.cached_tokens if turn is not None else None,
            completion_tokens=turn.completion_tokens if turn is not None else None,
            finish_reason=turn.finish_reason if turn is not None else None,
            match=turn.match if turn is not None else None,
            match_reason=turn.match_reason if turn is not None else None,
            swapped_in_pages=turn.swapped_in_pages if turn is not None else None,
            written_bytes=turn.written_bytes if turn is not None else None,
            durable=turn.durable if turn is not None else None,
            preemptions=(self.state.preemptions or None) if self.state is not None else None,
        )


def agents_of(request: TurnRequest | JobRequest) -> tuple[AgentRef, ...]:
    """The agents a request works on: a fork makes another one."""
    if isinstance(request, JobRequest) and "new_agent" in request.arguments:
        return request.ref, AgentRef(request.ref.namespace, AgentId(str(request.arguments["new_agent"])))
    return (request.ref,)


def guarded(
    emit: Callable[[Mapping[str, object]], None], failed: Callable[[Exception], None]
) -> Callable[[Mapping[str, object]], None]:
    """A client's callback whose faults stay its own (its event loop may be gone)."""

    def emit_guarded(event: Mapping[str, object]) -> None:
        try:
            emit(event)
        except Exception as caught:
            failed(caught)

    return emit_guarded


def refuse(error: KvdError) -> Generator[Wait, None, object]:
    """The work of a request that is not to run."""
    raise error
    yield  # a generator like any other work
