"""Typed stream events: what a running `generate`, `chat` or `inject` tells on its way.

Unknown event types, and known ones whose fields do not fit, are passed through as `OtherEvent`: a newer daemon never
breaks an older client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from kvd_client.logprobs import TokenLogprob, parse_logprobs


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits: `position` 1 is next; `wait_s` is an estimate, 0 when none can be given.

    `waits_for`: `slot` or `memory`. Sent again when the place changes.
    """

    type: ClassVar[str] = "queued"
    position: int
    wait_s: float = 0.0
    waits_for: str = "slot"


@dataclass(frozen=True, slots=True)
class Preempted:
    """A background turn was swapped out for an interactive request; its stream goes on after `Resumed`."""

    type: ClassVar[str] = "preempted"


@dataclass(frozen=True, slots=True)
class Resumed:
    """The turn goes on where it was: no event comes twice, and none is lost."""

    type: ClassVar[str] = "resumed"


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection broke, and the stream goes on behind its last token: nothing comes twice, nothing is missing.

    Made by the client, not sent by the daemon, when the daemon goes on with the call: once, however often it was asked.

    Attributes:
        tokens: told before the break.
        waited_s: from the break until the daemon went on.
    """

    type: ClassVar[str] = "reconnected"
    tokens: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Matched:
    """How the prompt matched what the agent has.

    Attributes:
        match: `new`, `exact`, `extend` or `diverge`.
        match_reason: where and why it differed; empty when it did not.
        prompt_tokens: tokens of the prompt.
        cached_tokens: of these, tokens whose KV is reused.
    """

    type: ClassVar[str] = "matched"
    match: str
    match_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prefill:
    """`done_tokens` of the `total_tokens` to compute before the first token are done."""

    type: ClassVar[str] = "prefill"
    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token was sampled (its text may come later, when it ends a character)."""

    type: ClassVar[str] = "first_token"


@dataclass(frozen=True, slots=True)
class Text:
    """New text."""

    type: ClassVar[str] = "text"
    text: str


_new_object, _set_text = object.__new__, Text.__dict__["text"].__set__


def text_event(text: str) -> Text:
    """`Text(text)`, in half the time: there is one for each token."""
    made = _new_object(Text)
    _set_text(made, text)
    return made


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of tokens whose text has all come, in their order; only where a call asked for them."""

    type: ClassVar[str] = "logprobs"
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """New text of the model's reasoning, which is not part of the answer."""

    type: ClassVar[str] = "reasoning"
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The model calls a tool; `data` is the event as sent (`index`, `id`, `name`, `arguments`)."""

    type: ClassVar[str] = "tool_call"
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts so far."""

    type: ClassVar[str] = "usage"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Durable:
    """Whether the turn survives a crash from now on; `reason` says why not."""

    type: ClassVar[str] = "durable"
    durable: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class OtherEvent:
    """An event this client has no class for, as it was sent."""

    type: str
    data: Mapping[str, object]


StreamEvent = (
    Queued
    | Preempted
    | Resumed
    | Reconnected
    | Matched
    | Prefill
    | FirstToken
    | Text
    | Logprobs
    | Reasoning
    | ToolCall
    | Usage
    | Durable
    | OtherEvent
)

_KINDS: Mapping[str, type] = {
    kind.type: kind
    for kind in (Queued, Preempted, Resumed, Matched, Prefill, FirstToken, Text, Reasoning, Usage, Durable)
}
_CHECKS: Mapping[str, type] = {"int": int, "str": str, "bool": bool, "float": float}


_FIELDS: Mapping[str, Mapping[str, type]] = {
    name: {each.name: _CHECKS[str(each.type)] for each in fields(kind)} for name, kind in _KINDS.items()
}


def parse_event(event: Mapping[str, object]) -> StreamEvent:
    """The typed form of a stream event; never raises."""
    name = event.get("type")
    if name == "text" and type(text := event.get("text")) is str:  # nearly all of them
        return text_event(text)
    if name == ToolCall.type:
        return ToolCall({key: value for key, value in event.items() if key != "type"})
    if name == Logprobs.type:
        try:
            return Logprobs(parse_logprobs(event.get("logprobs")))
        except ValueError:
            return OtherEvent(Logprobs.type, dict(event))
    if isinstance(name, str) and (kind := _KINDS.get(name)) is not None:
        wanted = _FIELDS[name]
        given = {key: "" if event[key] is None and wanted[key] is str else event[key] for key in wanted if key in event}
        if all(type(value) is wanted[key] for key, value in given.items()):
            try:
                parsed: StreamEvent = kind(**given)
            except TypeError:  # a required field is missing
                return OtherEvent(name, dict(event))
            return parsed
    return OtherEvent(str(name), dict(event))
