"""Parameters of RPC methods: unknown, missing, mistyped and out-of-range ones are refused by name.

Pure. May import kvd.errors, kvd.ids and siblings that are pure, kvd.model.grammar_text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import TypeVar, get_args

from kvd.config import MAX_NAME_CHARACTERS
from kvd.errors import InvalidParams
from kvd.ids import AgentId, Namespace
from kvd.model.grammar_text import CallChoice
from kvd.ops.sizes import parse_size
from kvd.scheduler.chat_params import checked_choice, checked_format, checked_messages, checked_tools
from kvd.scheduler.logprobs import MAX_ALTERNATIVES, MAX_ENTRIES
from kvd.scheduler.plain_values import check_plain, check_text
from kvd.scheduler.requests import AgentRef, OnContextFull, Resume
from kvd.scheduler.sampling import SamplingParams
from kvd.scheduler.state import Priority

T = TypeVar("T")
C = TypeVar("C", bound=str)

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "logit_bias")
TURN_NAMES = (
    "agent",
    "logprobs",
    "namespace",
    "max_tokens",
    "on_context_full",
    "priority",
    "response_format",
    "resumable",
    "resume",
    "stop",
    "stream",
    "timeout_s",
    "ttl_s",
    *SAMPLING_NAMES,
)
CHAT_NAMES = ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
RESUME_NAMES = ("key", "tokens")
MAX_STOP_STRINGS = 16
MAX_NEW_TOKENS = 1_000_000
MAX_TIMEOUT_S = 1_000_000
MAX_TTL_S = 10 * 366 * 86_400
MAX_AGENTS = 64
"""Agents that one `inject` may add to: each is a request of its own in the queue."""
MAX_ID_DIGITS = 10
MAX_BIASED_IDS = 1024
"""Each biased id costs time on every token, on the thread that everybody waits for."""


class Params:
    """One call's parameters. Each getter checks type and range; `refuse_unknown` names what is left over.

    Args:
        method: for messages.
        raw: as received.
    """

    def __init__(self, method: str, raw: Mapping[str, object]) -> None:
        self._method = method
        self._raw = raw

    def refuse_unknown(self, *allowed: str) -> None:
        """Raise unless every given name is allowed.

        Raises:
            InvalidParams: naming the unknown and the allowed ones.
        """
        unknown = sorted(str(name) for name in self._raw if name not in allowed)
        if unknown:
            raise InvalidParams(
                f"{self._method} does not know {', '.join(unknown)}; "
                f"it takes {', '.join(sorted(allowed)) or 'nothing'}",
                parameters=unknown,
                allowed=sorted(allowed),
            )

    def _typed(self, name: str, kind: type[T], default: T | None, *, required: bool, words: str) -> T | None:
        value = self._raw.get(name)
        if value is None:
            if required:
                raise InvalidParams(f"{self._method} needs {name} ({words})", parameter=name)
            return default
        is_bool = isinstance(value, bool)
        if kind is float and isinstance(value, int) and not is_bool:
            value = float(value)
        if not isinstance(value, kind) or (is_bool and kind is not bool):
            raise InvalidParams(f"{name} must be {words}, not {type(value).__name__}", parameter=name)
        return value

    def text(self, name: str, *, required: bool = True, default: str = "") -> str:
        """A string that UTF-8 can carry.

        Raises:
            InvalidText: lone surrogates.
            InvalidParams: absent or not a string.
        """
        value = self._typed(name, str, default, required=required, words="a string")
        assert value is not None
        check_text(name, value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._typed(name, bool, default, required=False, words="true or false")
        assert value is not None
        return value

    def integer(self, name: str, *, default: int | None = None, low: int = 0, high: int = 2**63 - 1) -> int:
        """An integer in [low, high]; required when there is no default."""
        value = self._typed(name, int, default, required=default is None, words=f"an integer from {low} to {high}")
        assert value is not None
        if not low <= value <= high:
            raise InvalidParams(f"{name} must be from {low} to {high}, not {value}", parameter=name)
        return value

    def optional_integer(self, name: str, *, low: int = 0, high: int = 2**63 - 1) -> int | None:
        """An integer in [low, high], or None when absent."""
        return None if self._raw.get(name) is None else self.integer(name, low=low, high=high)

    def size(self, name: str) -> int | None:
        """Bytes: an integer, or a size as the command line takes it; None when absent.

        Raises:
            InvalidParams: naming the allowed forms.
        """
        value = self._raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise InvalidParams(
                f"{name} must be bytes or a size such as 512MiB or 10.2GB, not {type(value).__name__}", parameter=name
            )
        try:
            return parse_size(value, what=name)
        except InvalidParams as error:
            error.data["parameter"] = name
            raise

    def namespace_sizes(self, name: str) -> dict[Namespace, int | None]:
        """A map of namespaces to sizes, nil for none; empty when absent.

        Raises:
            InvalidParams: naming the place in the map, and the allowed forms.
        """
        sizes: dict[Namespace, int | None] = {}
        for key, value in (self.mapping(name) or {}).items():
            if not isinstance(key, str):
                raise InvalidParams(f"{name} must map namespaces to sizes, not {type(key).__name__}", parameter=name)
            place = f"{name}[{key[:40]!r}]"
            check_text(place, key, parameter=name)
            namespace = Namespace(self._checked_name(place, key, parameter=name))
            try:
                sizes[namespace] = None if value is None else Params(self._method, {place: value}).size(place)
            except InvalidParams as error:
                error.data["parameter"] = name
                raise
        return sizes

    def number(self, name: str, default: float) -> float:
        """A float; NaN is refused."""
        value = self._typed(name, float, default, required=False, words="a number")
        assert value is not None
        if value != value:
            raise InvalidParams(f"{name} must be a number, not NaN", parameter=name)
        return value

    def on_context_full(self) -> OnContextFull:
        """What a turn does that exceeds the model's context; `error` unless the caller says otherwise."""
        allowed: tuple[OnContextFull, ...] = get_args(OnContextFull)
        return self._choice("on_context_full", allowed)

    def priority(self, default: Priority = "interactive") -> Priority:
        """Whether somebody waits for the turn."""
        allowed: tuple[Priority, ...] = get_args(Priority)
        return self._choice("priority", allowed, default)

    def _choice(self, name: str, allowed: tuple[C, ...], default: C | None = None) -> C:
        """One of `allowed`; when absent `default`, or else the first."""
        value = self.text(name, required=False, default=allowed[0] if default is None else default)
        for choice in allowed:
            if value == choice:
                return choice
        raise InvalidParams(
            f"{name} must be {' or '.join(allowed)}, not {value[:40]!r}", parameter=name, allowed=list(allowed)
        )

    def names_of(self, name: str, allowed: Sequence[str]) -> frozenset[str] | None:
        """A list of some of `allowed`; None when absent.

        Raises:
            InvalidParams: naming all that are allowed.
        """
        raw = self._raw.get(name)
        if raw is None:
            return None
        if not isinstance(raw, list) or not raw or not all(isinstance(each, str) and each in allowed for each in raw):
            raise InvalidParams(
                f"{name} must be a list of one or more of {', '.join(allowed)}", parameter=name, allowed=list(allowed)
            )
        return frozenset(raw)

    def timeout_s(self) -> float | None:
        """Seconds after which the call is cancelled; None for never."""
        return self._seconds("timeout_s", MAX_TIMEOUT_S)

    def ttl_s(self) -> float | None:
        """Seconds without a use after which a new agent ends; None for never."""
        return self._seconds("ttl_s", MAX_TTL_S)

    def _seconds(self, name: str, most: int) -> float | None:
        """Seconds above 0, or None when absent."""
        if not self.has(name):
            return None
        value = self.number(name, 0.0)
        if not 0 < value <= most:
            raise InvalidParams(f"{name} must be above 0 and at most {most}, not {value}", parameter=name)
        return value

    def mapping(self, name: str) -> Mapping[str, object] | None:
        """A map, or None when absent."""
        value = self._raw.get(name)
        if not isinstance(value, Mapping | None):
            raise InvalidParams(f"{name} must be a map, not {type(value).__name__}", parameter=name)
        return value

    def name(self, name: str) -> str:
        """An agent or namespace name: 1 to 128 printable characters."""
        return self._checked_name(name, self.text(name))

    def refs(self) -> tuple[AgentRef, ...]:
        """The agents that `agents` names: 1 to 64 different ones, in the order given.

        Raises:
            InvalidParams, InvalidText: with the place in the list.
        """
        raw = self._raw.get("agents")
        if not isinstance(raw, list) or not 1 <= len(raw) <= MAX_AGENTS:
            raise InvalidParams(f"agents must be a list of 1 to {MAX_AGENTS} names", parameter="agents")
        names: dict[str, None] = {}
        for index, value in enumerate(raw):
            if not isinstance(value, str):
                raise InvalidParams(f"agents[{index}] must be a string, not {type(value).__name__}", parameter="agents")
            check_text(f"agents[{index}]", value, parameter="agents")
            if self._checked_name(f"agents[{index}]", value, parameter="agents") in names:
                raise InvalidParams(f"agents names {value[:40]!r} twice; name each agent once", parameter="agents")
            names[value] = None
        namespace = self.namespace()
        return tuple(AgentRef(namespace, AgentId(name)) for name in names)

    @staticmethod
    def _checked_name(name: str, value: str, *, parameter: str = "") -> str:
        if not 1 <= len(value) <= MAX_NAME_CHARACTERS or any(unicodedata.category(c)[0] == "C" for c in value):
            raise InvalidParams(
                f"{name} must be 1 to {MAX_NAME_CHARACTERS} printable characters, not {value[:40]!r}",
                parameter=parameter or name,
            )
        return value

    def ref(self, name: str = "agent") -> AgentRef:
        """The agent the call is about."""
        return AgentRef(self.namespace(), AgentId(self.name(name)))

    def namespace(self) -> Namespace:
        """The namespace, `default` when absent."""
        return Namespace("default" if self._raw.get("namespace") is None else self.name("namespace"))

    def stop(self) -> tuple[str, ...]:
        """Stop strings: one string or a list of at most 16, none empty."""
        raw = self._raw.get("stop")
        values = [raw] if isinstance(raw, str) else [] if raw is None else raw
        if not isinstance(values, Sequence) or not all(isinstance(value, str) and value for value in values):
            raise InvalidParams("stop must be a non-empty string or a list of them", parameter="stop")
        if len(values) > MAX_STOP_STRINGS:
            raise InvalidParams(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(values)}", parameter="stop")
        for value in values:
            check_text("stop", value)
        return tuple(values)

    def sampling(self) -> SamplingParams:
        """Sampling parameters (ranges are checked by `SamplingParams`)."""
        bias = self._raw.get("logit_bias")
        if not isinstance(bias, Mapping | None):
            raise InvalidParams("logit_bias must map token ids to numbers", parameter="logit_bias")
        if bias and len(bias) > MAX_BIASED_IDS:
            raise InvalidParams(
                f"logit_bias takes at most {MAX_BIASED_IDS} ids, not {len(bias)}", parameter="logit_bias"
            )
        return SamplingParams(
            temperature=self.number("temperature", 0.0),
            top_p=self.number("top_p", 1.0),
            top_k=self.integer("top_k", default=0),
            min_p=self.number("min_p", 0.0),
            repetition_penalty=self.number("repetition_penalty", 1.0),
            seed=self.optional_integer("seed"),
            logit_bias=tuple(_bias_pair(token, value) for token, value in (bias or {}).items()),
        )

    def logprobs(self, max_tokens: int) -> int | None:
        """Alternatives told with the log-probability of each token; None when they are not wanted.

        Raises:
            InvalidParams: out of range, or too many for this `max_tokens`; with what it may be.
        """
        count = self.optional_integer("logprobs", high=MAX_ALTERNATIVES)
        if count is not None and max_tokens * (count + 1) > MAX_ENTRIES:
            raise InvalidParams(
                f"logprobs {count} takes max_tokens of at most {MAX_ENTRIES // (count + 1)}, not {max_tokens}",
                parameter="logprobs",
                max_tokens=max_tokens,
            )
        return count

    def resume(self, max_tokens: int) -> Resume | None:
        """Where a stream broke; None for a new one.

        Raises:
            InvalidParams: naming what it must have.
        """
        raw = self.mapping("resume")
        if raw is None:
            return None
        words = f"resume must be a map of key (a string) and tokens (a list of at most max_tokens, {max_tokens}, ids)"
        tokens, key = raw.get("tokens"), raw.get("key")
        if set(raw) != set(RESUME_NAMES) or not isinstance(key, str) or not isinstance(tokens, list):
            raise InvalidParams(words, parameter="resume", allowed=list(RESUME_NAMES))
        if len(tokens) > max_tokens or not all(type(token) is int and token >= 0 for token in tokens):
            raise InvalidParams(words, parameter="resume", max_tokens=max_tokens)
        return Resume(tuple(tokens), key)

    def messages(self) -> list[dict[str, object]]:
        """Chat messages (see `checked_messages`).

        Raises:
            InvalidParams, InvalidText: with the index of the message.
        """
        raw = self._raw.get("messages")
        if not isinstance(raw, Sequence) or isinstance(raw, str | bytes) or not raw:
            raise InvalidParams(f"{self._method} needs messages (a non-empty list)", parameter="messages")
        return checked_messages(raw)

    def tools(self) -> list[dict[str, object]] | None:
        """Functions the model may call (see `checked_tools`); None when absent or empty.

        Raises:
            InvalidParams, InvalidText: with the place inside.
        """
        return checked_tools(self._raw.get("tools"))

    def call_choice(self, tools: Sequence[Mapping[str, object]] | None) -> CallChoice:
        """What `tool_choice` and `parallel_tool_calls` say of `tools`.

        Raises:
            InvalidParams: naming what is allowed.
        """
        return checked_choice(self._raw.get("tool_choice"), self.flag("parallel_tool_calls", default=True), tools)

    def response_schema(self) -> Mapping[str, object] | None:
        """JSON schema that `response_format` asks for; None for text.

        Raises:
            InvalidParams: naming what is allowed.
        """
        return checked_format(self._raw.get("response_format"))

    def template_variables(self) -> Mapping[str, object]:
        """`chat_template_kwargs`; which of them the template knows is the caller's to check."""
        raw = self.mapping("chat_template_kwargs") or {}
        check_plain("chat_template_kwargs", "chat_template_kwargs", raw)
        return {str(name): value for name, value in raw.items()}

    def has(self, name: str) -> bool:
        """Whether the parameter was given."""
        return self._raw.get(name) is not None


def _bias_pair(token: object, value: object) -> tuple[int, float]:
    """One entry of `logit_bias`. JSON has no other keys than strings, so `"7"` is an id too."""
    number = token
    if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= MAX_ID_DIGITS:
        number = int(token)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isinstance(number, int) or isinstance(number, bool):
        raise InvalidParams(
            f"logit_bias must map token ids to numbers, not {token!r} to {value!r}", parameter="logit_bias"
        )
    assert isinstance(value, int | float)
    return number, float(value)
