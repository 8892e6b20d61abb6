"""The daemon's methods as values: name, parameters, and how to read the result. Shared by both clients; no I/O.

`Progress` follows one call in flight: it types its events, takes the time to the first token, and reads the result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypedDict, TypeVar

from kvd_client.errors import RemoteError, local_error, remote_error
from kvd_client.logprobs import TokenLogprob, parse_logprobs
from kvd_client.results import (
    AgentInfo,
    ExportResult,
    GenerateResult,
    Health,
    InjectResult,
    Limits,
    Statistics,
    build,
)
from kvd_client.stream import FirstToken, StreamEvent, parse_event
from kvd_client.wire import ErrorObject, ResponseReceived

PROTOCOL = 1
"""Version of the protocol this client speaks; `hello` compares it."""

T = TypeVar("T")
PathLike = str | os.PathLike[str]


class Options(TypedDict, total=False):
    """How to generate; what is left out has the daemon's default.

    Attributes:
        max_tokens: most new tokens (256).
        temperature: 0 is greedy (0).
        top_p: nucleus (1: off).
        top_k: most likely tokens kept (0: all).
        min_p: least probability relative to the best (0: off).
        repetition_penalty: 1 is off (1).
        seed: makes sampling repeatable (None).
        logit_bias: token id (as a string) -> number added to its logit ({}).
        logprobs: tell each token's log-probability, and those of so many most likely ones, 0 to 20 (None: tell none).
        stop: strings that end the text and are not part of it ([]).
        stream: False: of the stream only the first-token event (True).
        on_context_full: when prompt and `max_tokens` exceed the model's context: refuse ("error"), or "stop" there.
        priority: "background" starts when nothing "interactive" waits ("interactive").
        timeout_s: the daemon cancels the call so many seconds after it came, and keeps what it computed (None: never).
        ttl_s: a new agent is deleted so many seconds after its last use; one that has an end gets this one (None: a new
            agent is kept).
        response_format: the form of the new text: `{"type": "json_object"}`, or `{"type": "json_schema",
            "json_schema": {"schema": ...}}` (None: any).
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int | None
    logit_bias: Mapping[str, float]
    logprobs: int | None
    stop: Sequence[str] | str
    stream: bool
    on_context_full: Literal["error", "stop"]
    priority: Literal["interactive", "background"]
    timeout_s: float | None
    ttl_s: float | None
    response_format: Mapping[str, Any] | None


class ChatOptions(Options, total=False):
    """`Options`, and the tools the model may call.

    Attributes:
        tools: functions, `{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}`.
        tool_choice: "auto", "none", "required", or the one that must be called ("auto").
        parallel_tool_calls: several calls in one answer are allowed (True).
        chat_template_kwargs: switches of the model's template, such as `enable_thinking` ({}).
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: Literal["auto", "none", "required"] | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any]


class InjectOptions(TypedDict, total=False):
    """How to inject.

    Attributes:
        priority: "interactive" waits for nobody; "background" starts when nothing "interactive" waits ("background").
    """

    priority: Literal["interactive", "background"]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call to be made.

    Attributes:
        method: its name.
        params: its parameters, those that are None left out.
        read: makes the result; gets the raw result and the seconds to the first token.
    """

    method: str
    params: Mapping[str, object]
    read: Callable[[object, float | None], T]


class Progress(Generic[T]):
    """One call in flight. Owner: the client that sent it.

    Args:
        call: what was called.
        clock: monotonic seconds; read once here, directly before sending.
    """

    def __init__(self, call: Call[T], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.call = call
        self._clock = clock
        self._sent_s = clock()
        self.ttft_s: float | None = None

    def event(self, event: Mapping[str, object]) -> StreamEvent:
        """Type one stream event."""
        parsed = parse_event(event)
        if self.ttft_s is None and isinstance(parsed, FirstToken):
            self.first_token()
        return parsed

    def first_token(self) -> None:
        """The first token was made."""
        if self.ttft_s is None:
            self.ttft_s = self._clock() - self._sent_s

    def result(self, response: ResponseReceived) -> T:
        """Read the response.

        Raises:
            RemoteError: the daemon answered with an error.
        """
        if response.error is not None:
            raise remote_error(response.error)
        return self.call.read(response.result, self.ttft_s)


def _call(method: str, read: Callable[[object, float | None], T], **params: object) -> Call[T]:
    return Call(method, {key: value for key, value in params.items() if value is not None}, read)


def _reader(cls: type[T]) -> Callable[[object, float | None], T]:
    return lambda result, _ttft_s: build(cls, result)


def _generated(result: object, ttft_s: float | None) -> GenerateResult:
    logprobs: tuple[TokenLogprob, ...] | None = None
    if isinstance(result, dict) and result.get("logprobs") is not None:
        try:
            logprobs = parse_logprobs(result["logprobs"])
        except ValueError as error:
            raise local_error("protocol", f"the daemon's logprobs cannot be read: {error}") from None
    return build(GenerateResult, result, ttft_s=ttft_s, logprobs=logprobs)


def _mapping(result: object, _ttft_s: float | None) -> dict[str, Any]:
    if result is None:
        return {}
    if not isinstance(result, dict):
        raise local_error("protocol", f"the daemon's result is no map: {result!r:.80}")
    return result


def _agents(result: object, _ttft_s: float | None) -> list[AgentInfo]:
    agents = result.get("agents") if isinstance(result, dict) else result
    if not isinstance(agents, list):
        raise local_error("protocol", "the daemon's agent.list has no list `agents`")
    return [build(AgentInfo, agent) for agent in agents]


def _tokens(result: object, _ttft_s: float | None) -> list[int]:
    tokens = _mapping(result, None).get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise local_error("protocol", "the daemon's tokenize has no list of integers `tokens`")
    return tokens


def raw(method: str, params: Mapping[str, object]) -> Call[Any]:
    """Any method, its result as it came."""
    return Call(method, dict(params), lambda result, _ttft_s: result)


def hello(client: str) -> Call[dict[str, Any]]:
    """`hello`."""
    return _call("hello", _mapping, client=client, protocol=PROTOCOL)


def generate(agent: str, text: str, namespace: str, options: Options) -> Call[GenerateResult]:
    """`generate`."""
    return _call("generate", _generated, agent=agent, text=text, namespace=namespace, **_plain(options))


def chat(
    agent: str, messages: Sequence[Mapping[str, Any]], namespace: str, options: ChatOptions
) -> Call[GenerateResult]:
    """`chat`."""
    return _call("chat", _generated, agent=agent, messages=list(messages), namespace=namespace, **_plain(options))


def inject(
    agent: str,
    text: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    namespace: str,
    options: InjectOptions,
) -> Call[InjectResult]:
    """`inject` to one agent, of text or of messages."""
    added = _added(text, messages)
    return _call(
        "inject", lambda result, _ttft_s: _injection(result), agent=agent, namespace=namespace, **added, **options
    )


def inject_into(
    agents: Sequence[str],
    text: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    namespace: str,
    options: InjectOptions,
) -> Call[list[InjectResult]]:
    """`inject` to several agents."""
    if isinstance(agents, str):
        raise local_error("invalid_params", f"agents must be a list of names, not the string {agents[:40]!r}")
    added = _added(text, messages)
    return _call("inject", _injections, agents=list(agents), namespace=namespace, **added, **options)


def _added(text: str | None, messages: Sequence[Mapping[str, Any]] | None) -> dict[str, object]:
    if (text is None) == (messages is None):
        raise local_error("invalid_params", "inject takes either text or messages")
    return {"text": text, "messages": None if messages is None else list(messages)}


def _injections(result: object, _ttft_s: float | None) -> list[InjectResult]:
    entries = result.get("agents") if isinstance(result, dict) else None
    if not isinstance(entries, list):
        raise local_error("protocol", "the daemon's inject to several agents has no list `agents`")
    return [_injection(entry) for entry in entries]


def _injection(entry: object) -> InjectResult:
    error = entry.get("error") if isinstance(entry, dict) else None
    return build(InjectResult, entry, error=None if error is None else remote_error(ErrorObject.from_wire(error)))


def tokenize(text: str) -> Call[list[int]]:
    """`tokenize`."""
    return _call("tokenize", _tokens, text=text)


def list_agents(namespace: str | None) -> Call[list[AgentInfo]]:
    """`agent.list`."""
    return _call("agent.list", _agents, namespace=namespace)


def on_agent(method: str, agent: str, namespace: str, **params: object) -> Call[AgentInfo]:
    """The methods that act on one agent and answer with its new state."""
    return _call(f"agent.{method}", _reader(AgentInfo), agent=agent, namespace=namespace, **params)


def delete(agent: str, namespace: str) -> Call[dict[str, Any]]:
    """`agent.delete`."""
    return _call("agent.delete", _mapping, agent=agent, namespace=namespace)


def export_agent(agent: str, path: PathLike, force: bool, namespace: str) -> Call[ExportResult]:
    """`agent.export`."""
    return _call(
        "agent.export", _reader(ExportResult), agent=agent, namespace=namespace, path=_absolute(path), force=force
    )


def import_agent(path: PathLike, agent: str | None, replace: bool, namespace: str | None) -> Call[AgentInfo]:
    """`agent.import`; names that are None are the file's."""
    return _call(
        "agent.import", _reader(AgentInfo), path=_absolute(path), agent=agent, namespace=namespace, replace=replace
    )


def _absolute(path: PathLike) -> str:
    """A path as the daemon, which has a working folder of its own, understands it."""
    return os.path.abspath(os.path.expanduser(path))


def residency(agent: str | None, namespace: str) -> Call[dict[str, Any]]:
    """`residency`, of one agent or of all."""
    return _call("residency", _mapping, agent=agent, namespace=None if agent is None else namespace)


def statistics() -> Call[Statistics]:
    """`statistics`."""
    return _call("statistics", _reader(Statistics))


def monitor(since: int | None, namespace: str | None) -> Call[dict[str, Any]]:
    """`monitor`."""
    return _call("monitor", _mapping, since=since, namespace=namespace)


def subscription(
    kinds: Sequence[str] | None, agent: str | None, namespace: str | None, since: int | None
) -> dict[str, object]:
    """Parameters of `events.subscribe`."""
    if isinstance(kinds, str):
        raise local_error("invalid_params", f"kinds must be a list of names, not the string {kinds[:40]!r}")
    given = {"kinds": None if kinds is None else list(kinds), "agent": agent, "namespace": namespace, "since": since}
    return {key: value for key, value in given.items() if value is not None}


def configure(
    budget: int | str | None,
    namespace_quotas: Mapping[str, int | str | None] | None,
    namespace_disk_quotas: Mapping[str, int | str | None] | None,
) -> Call[Limits]:
    """`configure`."""
    quotas = None if namespace_quotas is None else dict(namespace_quotas)
    disk_quotas = None if namespace_disk_quotas is None else dict(namespace_disk_quotas)
    return _call("configure", _limits, budget=budget, namespace_quotas=quotas, namespace_disk_quotas=disk_quotas)


def _limits(result: object, _ttft_s: float | None) -> Limits:
    """A wire has lists where values here are tuples."""
    names: dict[str, object] = {}
    for key in ("converging", "until_restart"):
        value = result.get(key, []) if isinstance(result, dict) else []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise local_error("protocol", f"the daemon's {key} is {value!r:.80}, not a list of names")
        names[key] = tuple(value)
    return build(Limits, result, **names)


_HEALTH = _call("health", _reader(Health))
"""It has no parameters, and is asked for often."""


def health() -> Call[Health]:
    """`health`."""
    return _HEALTH


def mapping(method: str) -> Call[dict[str, Any]]:
    """A method without parameters whose result is a map: `model.info`, `drain`, `shutdown`."""
    return _call(method, _mapping)


def _plain(options: Options) -> dict[str, object]:
    plain: dict[str, object] = dict(options)
    if "stop" in options:  # a string is a sequence of strings: taken as one, stop="END" would stop at an E
        plain["stop"] = [options["stop"]] if isinstance(options["stop"], str) else list(options["stop"])
    return plain


def given_up() -> RemoteError:
    """The error of whoever wants the result of a call that was left early."""
    return local_error("cancelled", "the call was left before its end; it has no result")
