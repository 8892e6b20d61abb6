"""What OpenAI's chat, completions and responses have in common: sampling parameters, tools, formats, usage.

Parameters fall into four lists: those that become the daemon's, those that only name the agent or the client, those
that would change nothing here and are accepted, and those that ask for what kvd cannot do, which are refused with the
reason. Anything else is refused as unknown, as the service does. May import siblings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvd.gateway.fields import Fields
from kvd_client import GenerateResult

MAX_STOP_STRINGS = 16
MAX_NEW_TOKENS = 1_000_000
MAX_ALTERNATIVES = 20
MAX_LOGIT_BIAS = 1024
"""Tokens, as the daemon takes them."""
MAX_SEED = 2**63 - 1
MAX_LOGPROB_ENTRIES = 65_536
"""What the daemon holds of log-probabilities: tokens times alternatives and one."""

IDENTITY_FIELDS = ("metadata", "prompt_cache_key", "safety_identifier", "user")
WITHOUT_EFFECT = (
    "moderation",
    "prediction",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "store",
    "verbosity",
)
"""Accepted, and no text depends on them here."""
SAMPLING_FIELDS = (
    "frequency_penalty",
    "logit_bias",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "service_tier",
    "temperature",
    "top_k",
    "top_p",
)
"""OpenAI's, and of kvd's own `min_p`, `repetition_penalty` and `top_k`."""
SERVICE_TIERS = ("auto", "default", "fast", "flex", "priority", "scale")


def sampling(fields: Fields) -> dict[str, Any]:
    """The daemon's sampling parameters. The temperature is 1 unless it is given, as with the service.

    Raises:
        ApiError: out of range, or a penalty that kvd does not have.
    """
    for name in ("frequency_penalty", "presence_penalty"):
        fields.number(name, -2, 2, 0)
        fields.refuse(name, "use repetition_penalty", harmless=(None, 0))
    tier = fields.choice("service_tier", SERVICE_TIERS, "auto")
    options: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, 2, 1),
        "priority": "background" if tier == "flex" else "interactive",
        # services end an answer at the context's limit; only a prompt that does not fit is an error
        "on_context_full": "stop",
    }
    if fields.has("top_p"):
        options["top_p"] = fields.number("top_p", 0, 1, 1) or 1e-9  # 0 means: the most likely token only
    if fields.has("seed"):
        options["seed"] = fields.integer("seed", -MAX_SEED, MAX_SEED) % (MAX_SEED + 1)
    if fields.has("logit_bias"):
        bias = fields.inner("logit_bias")
        if len(bias.raw) > MAX_LOGIT_BIAS:
            fields.wrong("logit_bias", f"takes at most {MAX_LOGIT_BIAS} tokens, not {len(bias.raw)}")
        options["logit_bias"] = {token: bias.number(token, -100, 100, 0) for token in bias.raw}
    if fields.has("top_k"):
        options["top_k"] = fields.integer("top_k", 0, MAX_NEW_TOKENS)
    for name, high in (("min_p", 1), ("repetition_penalty", 100)):
        if fields.has(name):
            options[name] = fields.number(name, 0, high, 0)
    return options


def default_limit(options: Mapping[str, Any], most: int) -> int:
    """New tokens of a request that says no limit: what the daemon can tell log-probabilities of, if they are wanted."""
    logprobs = options.get("logprobs")
    return most if logprobs is None else min(most, MAX_LOGPROB_ENTRIES // (logprobs + 1))


def stop_strings(fields: Fields, name: str = "stop") -> list[str]:
    """Strings that end the text."""
    values = fields.strings(name)
    if len(values) > MAX_STOP_STRINGS:
        fields.wrong(name, f"takes at most {MAX_STOP_STRINGS} strings, not {len(values)}")
    return values


def function_tools(fields: Fields) -> list[dict[str, Any]]:
    """`tools` in the form of chat completions: `{type: function, function: {name, ...}}`.

    Raises:
        ApiError: another type of tool, or a function without a name.
    """
    tools = []
    for tool in fields.objects("tools"):
        tool.choice("type", ("function",))
        tools.append({"type": "function", "function": function_of(tool.inner("function"))})
    return tools


def function_of(fields: Fields) -> dict[str, Any]:
    """A function's definition."""
    function: dict[str, Any] = {"name": fields.text("name")}
    if fields.has("description"):
        function["description"] = fields.text("description")
    if fields.has("parameters"):
        function["parameters"] = dict(fields.inner("parameters").raw)
    if fields.has("strict"):
        function["strict"] = fields.flag("strict")
    return function


def response_format(fields: Fields, name: str) -> dict[str, Any] | None:
    """A form of the answer in chat's words; None for plain text."""
    if not fields.has(name):
        return None
    form = fields.inner(name)
    kind = form.choice("type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    schema = form.inner("json_schema") if form.has("json_schema") else form  # responses have it one level higher
    if not schema.has("schema"):
        schema.wrong("schema", "must be a JSON schema")
    found: dict[str, Any] = {"schema": dict(schema.inner("schema").raw)}
    if schema.has("name"):
        found["name"] = schema.text("name")
    if schema.has("strict"):
        found["strict"] = schema.flag("strict")
    return {"type": "json_schema", "json_schema": found}


def usage(result: GenerateResult) -> dict[str, Any]:
    """`usage` of chat and completions; counts that kvd does not know are left out."""
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        **({"completion_tokens_details": details} if (details := _details(result)) else {}),
    }


def _details(result: GenerateResult) -> Mapping[str, int]:
    tokens = result.server.get("reasoning_tokens")
    return {"reasoning_tokens": tokens} if isinstance(tokens, int) else {}


__all__ = [
    "IDENTITY_FIELDS",
    "MAX_ALTERNATIVES",
    "MAX_NEW_TOKENS",
    "SAMPLING_FIELDS",
    "WITHOUT_EFFECT",
    "default_limit",
    "function_of",
    "function_tools",
    "response_format",
    "sampling",
    "stop_strings",
    "usage",
]
