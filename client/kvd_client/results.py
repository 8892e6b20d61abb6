"""Typed results of the daemon's methods.

Each class takes the fields it knows and keeps the others in `server`: a newer daemon loses nothing on its way, an
older one leaves defaults. A known field of the wrong type is a `ProtocolViolation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar

from kvd_client.errors import RemoteError, local_error
from kvd_client.logprobs import TokenLogprob

T = TypeVar("T")

_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "bool": (bool,),
    "tuple": (list,),
    "Mapping": (dict,),
}


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The result of `generate` and `chat`.

    Attributes:
        text: the new text only.
        finish_reason: `stop`, `length`, or of `chat` `tool_calls`; later daemons may have more.
        prompt_tokens: tokens of the prompt.
        cached_tokens: of these, tokens whose KV was computed before and reused.
        completion_tokens: new tokens.
        match: `new`, `exact`, `extend` or `diverge`.
        match_reason: on a divergence or miss, where and why.
        ttft_s: seconds on this process's clock from sending to the first sampled token; None when there was none.
        durable: the turn survives a crash.
        durable_reason: why it does not.
        agent: whose turn it was.
        stop_string: the stop string that ended the text; empty when something else did.
        context_full: the model's context ended the text before `max_tokens` did (with `on_context_full` `stop`).
        resumed_tokens: of the `completion_tokens`, those that were told before the connection broke the last time.
        logprobs: of each of the `completion_tokens`, in order; None when the call did not ask for them.
        server: every other field the daemon sent.
    """

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    match: str = ""
    match_reason: str = ""
    ttft_s: float | None = None
    durable: bool = False
    durable_reason: str = ""
    agent: str = ""
    stop_string: str = ""
    context_full: bool = False
    resumed_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    server: Mapping[str, Any] = field(default_factory=dict)

    @property
    def message(self) -> Mapping[str, Any] | None:
        """Of `chat`, the answer as a message to append to the conversation; None of `generate`.

        It has `role` and `content` (None beside calls and nothing else), and if there are any `reasoning_content` and
        `tool_calls`.
        """
        message = self.server.get("message")
        return message if isinstance(message, dict) else None


@dataclass(frozen=True, slots=True)
class InjectResult:
    """The result of `inject` for one agent: its `tokens` now, of which `appended_tokens` are new.

    Attributes:
        error: why nothing was added, in the result of `inject_into`; None where all went well.
    """

    agent: str = ""
    tokens: int = 0
    appended_tokens: int = 0
    durable: bool = False
    durable_reason: str = ""
    error: RemoteError | None = None
    server: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """One agent.

    Attributes:
        agent, namespace: its name.
        tokens: tokens of its address space.
        computed_tokens: of these, tokens whose KV exists.
        text_bytes: bytes of its text.
        branches: address spaces it has.
        resident_bytes: bytes of its pages in RAM.
        swapped_pages: pages that its next step needs and that are only on disk.
        behind_window_pages: pages that no step sees any more, since they lie before the window of their layers.
        pinned: the user pinned it.
        durable: its text and tokens survive a crash, and their KV but for what was given up for a quota.
        kv_format: page format.
        server: every other field the daemon sent.
    """

    agent: str = ""
    namespace: str = ""
    tokens: int = 0
    computed_tokens: int = 0
    text_bytes: int = 0
    branches: int = 0
    resident_bytes: int = 0
    swapped_pages: int = 0
    behind_window_pages: int = 0
    pinned: bool = False
    durable: bool = False
    kv_format: str = ""
    server: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The result of `export_agent`.

    Attributes:
        agent, namespace: whose state is in the file.
        path: the file, on the daemon's machine.
        file_bytes: its length.
        tokens: tokens in it.
        computed_tokens: of these, tokens whose KV is in it.
        lost_tokens: tokens whose KV was lost; an import computes it again.
        lost_reason: what was lost, empty when nothing was.
        server: every other field the daemon sent.
    """

    agent: str = ""
    namespace: str = ""
    path: str = ""
    file_bytes: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    lost_tokens: int = 0
    lost_reason: str = ""
    server: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures of the daemon since its start; `server` has those without a field here."""

    budget_bytes: int = 0
    resident_bytes: int = 0
    peak_resident_bytes: int = 0
    swap_bytes: int = 0
    tokens_computed: int = 0
    tokens_reused: int = 0
    bytes_written: int = 0
    server: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of memory in force, and what they bound; bytes.

    Attributes:
        budget_bytes: what pages, open tails and copies in flight may take together.
        start_budget_bytes: what the daemon was started with; in force again after a restart.
        largest_budget_bytes: the most that the machine can hold; None where the daemon does not know.
        usable_bytes: of the budget, what requests may take.
        resident_bytes: what pages take.
        high_mark_bytes, low_mark_bytes: idle pages beyond the first are evicted down to the second.
        pin_limit_bytes: what pinned agents may hold together.
        footprint_bytes: what the daemon's process takes from the machine.
        footprint_limit_bytes: beyond this new requests are told to come again; None for no limit.
        namespace_quotas: what pages of namespaces should take at most, where that is bounded.
        namespace_disk_quotas: what files of namespaces may take of the disk, where that is bounded.
        converging: names of limits that what is held still exceeds.
        until_restart: names of limits that were changed at run time and last until the daemon's next start.
        server: every other field the daemon sent.
    """

    budget_bytes: int = 0
    start_budget_bytes: int = 0
    largest_budget_bytes: int | None = None
    usable_bytes: int = 0
    resident_bytes: int = 0
    high_mark_bytes: int = 0
    low_mark_bytes: int = 0
    pin_limit_bytes: int = 0
    footprint_bytes: int = 0
    footprint_limit_bytes: int | None = None
    namespace_quotas: Mapping[str, int] = field(default_factory=dict)
    namespace_disk_quotas: Mapping[str, int] = field(default_factory=dict)
    converging: tuple[str, ...] = ()
    until_restart: tuple[str, ...] = ()
    server: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the daemon can generate now, and in words what it is doing."""

    ready: bool = False
    status: str = ""
    server: Mapping[str, Any] = field(default_factory=dict)


@cache
def _known(cls: type) -> tuple[tuple[str, tuple[type, ...], str], ...]:
    """Fields that a result class may take from the wire: name, allowed types, and these in words."""
    typed = [(each.name, str(each.type)) for each in fields(cls) if each.name != "server"]
    return tuple((name, _KINDS.get(words.split("[")[0].split(" ")[0], ()), words) for name, words in typed)


def build(cls: type[T], result: object, **local: object) -> T:
    """Make a result class from a method's result; `local` are fields this end knows better.

    Raises:
        ProtocolViolation: the result is no map, or a known field has the wrong type.
    """
    if not isinstance(result, dict):
        if result is not None:
            raise local_error("protocol", f"the daemon's result is no map: {result!r:.80}")
        result = {}
    values: dict[str, object] = dict(local)
    rest = dict(result)
    for name, kinds, words in _known(cls):  # type: ignore[arg-type]  # a class is hashable
        if name in local or name not in rest:
            continue
        value = rest.pop(name)
        if value is None:  # "no reason", "no figure": the default says so
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise local_error("protocol", f"the daemon's {name} is {value!r:.80}, not {words}")
        values[name] = value
    for name in local:
        rest.pop(name, None)
    make: Any = cls
    built: T = make(**values, server=rest)
    return built
