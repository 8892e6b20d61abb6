"""What clients ask of the engine, and what comes back, as frozen data.

May import kvd.ids, kvd.vm, kvd.errors and kvd.model.continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvd.errors import KvdError
from kvd.ids import AgentId, Namespace, RequestId
from kvd.model.continuation import Continuation
from kvd.scheduler.sampling import LogitsHook, SamplingParams
from kvd.scheduler.state import Priority
from kvd.vm.prefix import MatchKind
from kvd.vm.text import TypedText

FinishReason = Literal["stop", "length", "cancelled", "injected"]
OnContextFull = Literal["error", "stop"]
"""What a turn does whose prompt and `max_tokens` exceed the model's context: it is refused, or ends at the limit."""


@dataclass(frozen=True, slots=True)
class AgentRef:
    """Names an agent: a name is unique only inside its namespace."""

    namespace: Namespace
    agent: AgentId

    def __str__(self) -> str:
        return f"{self.namespace}/{self.agent}"


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a stream broke (see `kvd.scheduler.resuming`).

    Attributes:
        tokens: ids of the new tokens that the caller was told.
        key: digest of the prompt that the stream began with.
    """

    tokens: tuple[int, ...]
    key: str


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Extend an agent's text and, unless `max_tokens` is 0, generate.

    Attributes:
        request_id: unique over all connections.
        ref: the agent.
        prompt: the agent's whole text so far; for `append` only what is added.
        append: `inject`: `prompt` goes after whatever is stored, nothing is matched.
        continues: `inject` of messages: makes the whole text out of what is stored when the turn starts; no `prompt`.
        max_tokens: new tokens at most.
        sampling: how to choose them.
        logprobs: alternatives told with each token's log-probability; None tells none (see `kvd.scheduler.logprobs`).
        stop: strings that end generation; never part of the text.
        emit: called on the engine thread with each stream event.
        method: the protocol's method, for the request's log line.
        hooks: further logits hooks, run after those that `sampling` stands for.
        resumable: `emit` also gets the ids of new tokens, and with `matched` the prompt's key.
        resume: the stream broke: these tokens come first, and are not sampled.
        tells_control: `emit` also gets `control` events, with the name of each control token where it was generated.
        on_context_full: what to do when prompt and `max_tokens` exceed the model's context.
        priority: `background` starts when nothing `interactive` waits, and is preempted for it (see
            `kvd.scheduler.state`).
        timeout_s: it is cancelled so long after it came; None for never.
        ttl_s: a new agent ends so long after its last use; an agent that has an end gets this one (see
            `kvd.scheduler.endings`). None: a new agent has no end, and that of another stays as it is.
        connection: number of the caller's connection, for the log line.
        peer_pid: the caller's process, for the log line.
    """

    request_id: RequestId
    ref: AgentRef
    prompt: TypedText
    append: bool = False
    continues: Continuation | None = None
    max_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    emit: Callable[[Mapping[str, object]], None] = lambda event: None
    method: str = "generate"
    hooks: tuple[LogitsHook, ...] = ()
    tells_control: bool = False
    resumable: bool = False
    resume: Resume | None = None
    on_context_full: OnContextFull = "error"
    priority: Priority = "interactive"
    timeout_s: float | None = None
    ttl_s: float | None = None
    connection: int | None = None
    peer_pid: int | None = None

    @property
    def appends_text(self) -> bool:
        """`prompt` is added as it is."""
        return self.append and self.continues is None

    @property
    def given_tokens(self) -> int:
        """Tokens of the answer that the caller has from a stream that broke."""
        return 0 if self.resume is None else len(self.resume.tokens)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A control operation that may have to wait for pages or for the disk.

    Attributes:
        request_id: unique over all connections.
        ref: the agent it concerns.
        operation: `fork`, `rollback`, `delete`, `pin`, `unpin`, `evict`, `prefetch`, `export`, `import`,
            `verify`; `save`, `compact`, `shrink`, `wake`, `expire` of the engine.
        arguments: operation's own.
        internal: the engine asked for it: no client waits, no log line says so.
        connection: number of the caller's connection, for the log line.
        peer_pid: the caller's process, for the log line.
    """

    request_id: RequestId
    ref: AgentRef
    operation: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    internal: bool = False
    connection: int | None = None
    peer_pid: int | None = None


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The figures of a finished turn.

    Attributes:
        appended_tokens: prompt tokens that were not stored before (for `inject`: what it added).
        swapped_in_pages: sealed pages read from disk for it.
        written_bytes: bytes its commit wrote: the log's record, and the pages that the record is the first to name.
        preemptions: how often it was swapped out for an interactive request.
        preempted_s: how long it was out, without the time its pages took to come back.
        context_full: `length` because the model's context is full, before `max_tokens` were made.
        logprobs: one map for each of the `completion_tokens`; None when they were not asked for.
        stop_string: the stop string that ended the text; None when something else did.
        resumed_tokens: of the `completion_tokens`, those that the caller gave to go on behind.
    """

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    match: MatchKind
    match_reason: str
    durable: bool
    durable_reason: str | None
    agent: str
    divergence: Mapping[str, object] | None
    prefill_s: float
    decode_s: float
    swap_in_s: float
    queued_s: float
    commit_s: float
    swapped_in_pages: int
    appended_tokens: int = 0
    written_bytes: int = 0
    preemptions: int = 0
    preempted_s: float = 0.0
    context_full: bool = False
    logprobs: Sequence[Mapping[str, object]] | None = None
    stop_string: str | None = None
    resumed_tokens: int = 0

    def to_wire(self) -> dict[str, object]:
        """As the client sees it."""
        wire = {name: getattr(self, name) for name in self.__slots__}
        if self.logprobs is None:
            del wire["logprobs"]
        return wire


Reply = Callable[[object, KvdError | None], None]
"""(result, error): called exactly once for each request, on the engine thread."""
