"""Volatile spans that clients put into prompts, removed or normalised before anything is matched or computed.

Some clients put text into every request that says nothing to a model and is never twice the same: a billing line at the
very front, how many tokens are left. One such byte near the front makes a prefix cache useless. Each kind is a *rule*
with a name; rules are switched one by one, and each reply names those that changed something.

What a rule takes out is neither matched nor computed: the model never sees it. The alternative, matching without the
span and computing with it, would say that KV belongs to a text which it does not belong to.

Rules are narrow on purpose: anchored, of known shape, and never applied to what the model itself wrote. Their patterns
take time linear in the text, whatever it is: they run on the event loop. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvd.gateway.errors import ApiError, GatewayConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of volatile span.

    Attributes:
        name: how it is switched and reported.
        summary: what it does, one line.
        default: whether it is on unless somebody says otherwise.
        roles: whose texts it reads.
        rewrite: text -> text without the span; None for a rule about tools.
    """

    name: str
    summary: str
    default: bool
    roles: frozenset[str]
    rewrite: Callable[[str], str] | None


_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n+|\Z)")
_AMOUNT = r"[\d,._]++"
_BUDGET = re.compile(
    # a run of line breaks is entered at its beginning only, and nothing is given back once taken: else a megabyte of
    # them, or of spaces, would be walked once for each of its characters
    r"(?<!\n)\n*+(?:"
    rf"<total_tokens>\s*+{_AMOUNT}(?:\s++tokens?)?+(?:\s++(?:left|remaining))?+\s*+</total_tokens>"
    rf"|<budget:token_budget>\s*+{_AMOUNT}\s*+</budget:token_budget>"
    rf"|<system_warning>\s*+Token usage: {_AMOUNT}/{_AMOUNT}; {_AMOUNT} remaining\s*+</system_warning>"
    r")"
)
_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d)[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:\s?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?")

TOOL_ORDER = "tool-order"

RULES: tuple[Rule, ...] = (
    Rule(
        "claude-billing-header",
        "removes the line x-anthropic-billing-header: ... from the beginning of a system text",
        True,
        frozenset({"system"}),
        lambda text: _BILLING.sub("", text),
    ),
    Rule(
        "system-clock",
        "cuts date and time of day (2026-01-31T12:34:56Z) in system texts to the date",
        False,
        frozenset({"system"}),
        lambda text: _CLOCK.sub(r"\1", text),
    ),
    Rule(
        "token-budget-markers",
        "removes <total_tokens>, <budget:token_budget>, <system_warning>Token usage: ... except from answers",
        True,
        frozenset({"system", "user", "tool"}),
        lambda text: _BUDGET.sub("", text),
    ),
    Rule(
        TOOL_ORDER,
        "sorts tools by name, for clients that send them in another order each time",
        False,
        frozenset(),
        None,
    ),
)
"""All rules, by name."""


def chosen_rules(on: Iterable[str] = (), off: Iterable[str] = ()) -> frozenset[str]:
    """Names of the rules in force: the defaults, and what is switched.

    Raises:
        GatewayConfigError: no such rule; the message lists them.
    """
    names = {rule.name for rule in RULES}
    on, off = set(on), set(off)
    unknown = sorted((on | off) - names)
    if unknown:
        raise GatewayConfigError(
            f"there is no rule {', '.join(unknown)}; there are {', '.join(sorted(names))}",
            setting="rule-on" if on - names else "rule-off",
        )
    both = sorted(on & off)
    if both:
        raise GatewayConfigError(f"{', '.join(both)} is switched on and off; say one of them", setting="rule-on")
    return frozenset(({rule.name for rule in RULES if rule.default} | on) - off)


class Canonical:
    """The rules at work on one request. Owner: that request.

    Args:
        rules: names of those in force.

    Attributes:
        fired: names of those that changed something.
    """

    def __init__(self, rules: frozenset[str]) -> None:
        self._rules = [rule for rule in RULES if rule.name in rules]
        self.fired: set[str] = set()

    def text(self, role: str, text: str) -> str:
        """A message's text, or one block of it, as it is matched and computed."""
        for rule in self._rules:
            if rule.rewrite is not None and role in rule.roles:
                rewritten = rule.rewrite(text)
                if rewritten != text:
                    self.fired.add(rule.name)
                    text = rewritten
        return text

    def tools(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The tools, in the order they are shown to the model."""
        if not any(rule.name == TOOL_ORDER for rule in self._rules):
            return tools
        ordered = sorted(tools, key=_tool_name)
        if ordered != tools:
            self.fired.add(TOOL_ORDER)
        return ordered


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def header_rules(value: str | None, rules: frozenset[str]) -> frozenset[str]:
    """The rules of one request: `X-Kvd-Rules: none` switches all off for it, absent leaves them as they are.

    Raises:
        ApiError: any other value.
    """
    if value is None:
        return rules
    if value.strip().lower() == "none":
        return frozenset()
    raise ApiError("invalid", f"X-Kvd-Rules must be none or absent, not {value[:40]!r}", param="X-Kvd-Rules")


__all__ = ["RULES", "Canonical", "Rule", "chosen_rules", "header_rules"]
