"""P12: volatile spans are removed by listed rules, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from kvd.cli import main
from kvd.gateway.canonical import RULES, Canonical, chosen_rules
from kvd.gateway.errors import GatewayConfigError
from kvd.gateway.identity import SOURCES
from tests.gateway.daemons import ScriptedDaemon
from tests.gateway.serving import Served, gateway

BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
EVERY = frozenset(rule.name for rule in RULES)


@pytest.mark.parametrize(
    ("role", "text", "expected", "rule"),
    [
        ("system", BILLING.format("fa690"), "", "claude-billing-header"),
        ("system", BILLING.format("fa690") + "\n\nYou are.", "You are.", "claude-billing-header"),
        ("system", "You are.\n" + BILLING.format("fa690"), None, None),
        ("user", BILLING.format("fa690"), None, None),
        ("user", "Hi\n<total_tokens>151,200 tokens left</total_tokens>", "Hi", "token-budget-markers"),
        ("tool", "ok\n<system_warning>Token usage: 5/10; 5 remaining</system_warning>", "ok", "token-budget-markers"),
        ("system", "A<budget:token_budget>200000</budget:token_budget>B", "AB", "token-budget-markers"),
        ("assistant", "<total_tokens>1</total_tokens>", None, None),
        ("user", "What is <total_tokens>a tag</total_tokens>?", None, None),
        ("system", "Now: 2026-01-31T12:34:56Z.", "Now: 2026-01-31.", "system-clock"),
        ("system", "Now: 2026-01-31 12:34 +0100", "Now: 2026-01-31", "system-clock"),
        ("user", "Now: 2026-01-31T12:34:56Z.", None, None),
    ],
)
def test_rules(role: str, text: str, expected: str | None, rule: str | None) -> None:
    """Each rule knows one shape in one place; everything else stays, byte for byte (None: unchanged)."""
    canonical = Canonical(EVERY)
    assert canonical.text(role, text) == (text if expected is None else expected)
    assert canonical.fired == ({rule} if rule else set())


MEGABYTE = 1_000_000
LONG = [
    *(character * MEGABYTE for character in ("\n", " ", "<", "[", "5", "-")),
    "<total_tokens>" * (MEGABYTE // 14),
    "<total_tokens>" + " " * MEGABYTE,
    "<total_tokens>" + "5" * MEGABYTE,
    "<total_tokens>5" + " " * MEGABYTE,
    "<total_tokens>5 tokens" + " " * MEGABYTE,
    "<budget:token_budget>5" + "\n" * MEGABYTE,
    "<system_warning>" + "\n" * MEGABYTE,
    "<system_warning>Token usage: " + "5," * MEGABYTE,
    "<system_warning>Token usage: 5/5; 5 remaining" + " " * MEGABYTE,
    "2026-01-31T12:34:56." + "5" * MEGABYTE,
    "\n<" * MEGABYTE,
    "x-anthropic-billing-header:" * (MEGABYTE // 27),
]


@pytest.mark.parametrize("text", LONG, ids=lambda text: repr(text[:30]))
def test_rules_walk_a_text_once(text: str) -> None:
    """A megabyte of what a rule's pattern begins with: quadratic patterns would not end within the suite's limit."""
    canonical = Canonical(EVERY)
    for role in ("system", "user"):
        assert len(canonical.text(role, text)) <= len(text)


def test_line_breaks_before_a_marker_go_with_it() -> None:
    """All of them, between two markers as well, and none elsewhere."""
    marker = "<total_tokens>5 tokens left</total_tokens>"
    text = f"a\n\n{marker}\n{marker}\n\nb\n\n<total_tokens>x"
    assert Canonical(EVERY).text("user", text) == "a\n\nb\n\n<total_tokens>x"


def test_tools_are_sorted_by_name_when_asked() -> None:
    """For clients that send them in another order each time."""
    tools: list[dict[str, Any]] = [{"function": {"name": "b"}}, {"function": {"name": "a"}}]
    assert Canonical(chosen_rules()).tools(tools) == tools
    canonical = Canonical(chosen_rules(on=["tool-order"]))
    assert canonical.tools(tools) == tools[::-1]
    assert canonical.fired == {"tool-order"}
    assert Canonical(chosen_rules(on=["tool-order"])).tools(tools[::-1]) == tools[::-1]


def test_rules_are_switched_by_name() -> None:
    """Unknown names, and contradictions, are refused with the list."""
    assert chosen_rules() == {rule.name for rule in RULES if rule.default}
    assert "system-clock" in chosen_rules(on=["system-clock"])
    assert chosen_rules(off=EVERY) == frozenset()
    with pytest.raises(GatewayConfigError, match="claude-billing-header"):
        chosen_rules(on=["clock"])
    with pytest.raises(GatewayConfigError, match="on and off"):
        chosen_rules(["tool-order"], ["tool-order"])


def asked(served: Served, scripted: ScriptedDaemon, nonce: str, **headers: str) -> tuple[Any, dict[str, str]]:
    """What the daemon is sent for a request of Claude Code's shape, and the response's headers."""
    scripted.calls.clear()
    body = {
        "model": "claude-x",
        "max_tokens": 5,
        "system": [{"type": "text", "text": BILLING.format(nonce)}, {"type": "text", "text": "You are."}],
        "messages": [{"role": "user", "content": f"Hi\n<total_tokens>{len(nonce)} tokens left</total_tokens>"}],
    }
    reply = served.post("/v1/messages", body, x_claude_code_session_id="s", **headers)
    return scripted.of("chat")[0], reply.headers


def test_requests_that_differ_in_volatile_spans_are_equal(served: Served, scripted: ScriptedDaemon) -> None:
    """The same agent, the same messages; the reply says which rules did it."""
    first, headers = asked(served, scripted, "fa690")
    second, _ = asked(served, scripted, "0aaa91")
    assert first == second
    assert first["messages"][0] == {"role": "system", "content": "You are."}
    assert headers["x-kvd-rules"] == "claude-billing-header, token-budget-markers"
    line = served.line(headers["x-request-id"])
    assert line["rules"] == "claude-billing-header, token-budget-markers"


def test_rules_can_be_switched_off(served: Served, scripted: ScriptedDaemon) -> None:
    """For one request by a header, for all by a setting: the text then arrives as it was sent."""
    sent, headers = asked(served, scripted, "fa690", x_kvd_rules="none")
    assert sent["messages"][0]["content"].startswith("x-anthropic-billing-header:")
    assert "x-kvd-rules" not in headers
    with gateway(scripted.path, rules=chosen_rules(off=["claude-billing-header"]), aliases=("*",)) as other:  # type: ignore[attr-defined]
        sent, headers = asked(other, scripted, "fa690")
        assert sent["messages"][0]["content"].startswith("x-anthropic-billing-header:")
        assert headers["x-kvd-rules"] == "token-budget-markers"
        reply = other.post("/v1/messages", {"model": "m", "max_tokens": 1}, x_kvd_rules="some")
        assert "none or absent" in reply.error["message"]


def test_rules_are_listed() -> None:
    """`kvd gateway --list-rules` has each with its default; a wrong name is refused with exit code 2."""
    listed = CliRunner().invoke(main, ["gateway", "--list-rules", "--list-identities"]).output
    facts = json.loads(CliRunner().invoke(main, ["gateway", "--list-rules", "--list-identities", "--json"]).output)
    assert [rule["name"] for rule in facts["rules"]] == [rule.name for rule in RULES]
    assert facts["identities"]
    assert CliRunner().invoke(main, ["gateway", "--json"]).exit_code == 2
    assert all(rule.name in listed and rule.summary in listed for rule in RULES)
    assert all(source in listed and words in listed for source, words in SOURCES)
    refused = CliRunner().invoke(main, ["gateway", "--rule-on", "clock", "--listen", "127.0.0.1:0"])
    assert refused.exit_code == 2
    assert "system-clock" in refused.output
