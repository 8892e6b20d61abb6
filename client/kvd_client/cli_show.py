"""What the commands print for people: sizes, times, facts, the table of agents. Programs take --json."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Any

_DIGEST = re.compile(r"-[0-9a-f]{8,}\b")
_TIMESTAMPS = ("created_s", "expires_s", "used_s")


def size(size_bytes: int) -> str:
    """Bytes in decimal units: `2.4 MB`; exact under 10 kB."""
    if abs(size_bytes) < 10_000:
        return f"{size_bytes} B"
    amount, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(amount) < 999.95:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.1f} {unit}"


def seconds(duration_s: float) -> str:
    """A duration: `0.012 s`, `74.3 s`."""
    return f"{duration_s:.3f} s" if abs(duration_s) < 10 else f"{duration_s:.1f} s"


def format_name(kv_format: str) -> str:
    """Page formats without the digests of their constants: `q4c-7fe54501f302, q4` is `q4c, q4`."""
    return ", ".join(dict.fromkeys(_DIGEST.sub("", kv_format).split(", ")))


def value_text(key: str, value: object) -> str:
    """A plain value in words, with the unit that its name tells; empty for what has nothing to say."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(key, value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return ", ".join(f"{_label(name)} {value_text(name, one)}" for name, one in value.items() if one is not None)
    if isinstance(value, list | tuple):
        return ", ".join(_items(key, value)) or "none"
    return format_name(str(value)) if key == "kv_format" else str(value)


def _number(key: str, value: float) -> str:
    words = key.split("_")
    if key in _TIMESTAMPS:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, int) and "bytes" in words:
        return size(value)
    if words[-1] == "s":
        return seconds(value)
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _items(key: str, values: Sequence[object]) -> Iterator[str]:
    """Each item; integers that follow each other as a range."""
    if not values or not all(type(value) is int for value in values):
        yield from (value_text(key, value) for value in values)
        return
    for _, run in groupby(enumerate(values), lambda pair: int(str(pair[1])) - pair[0]):
        numbers = [number for _, number in run]
        yield str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _label(key: str) -> str:
    """`peak_resident_bytes` is `peak resident bytes`; a unit that the value shows is left out."""
    words = key.split("_")
    return " ".join(words[:-1] if len(words) > 1 and words[-1] == "s" else words)


def _flattened(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from ((f"{_label(key)}, {label}", shown) for label, shown in _flattened(value))
        elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            yield from ((f"{_label(key)} {number}", value_text(key, item)) for number, item in enumerate(value, 1))
        else:
            yield _label(key), value_text(key, value)


def fact_lines(facts: Mapping[str, Any], *, columns: int | None = None) -> list[str]:
    """One aligned line a fact, nested maps flattened; facts without a value are left out.

    Args:
        facts: from the wire.
        columns: width to break long values at; None never does.
    """
    rows = [(label, shown) for label, shown in _flattened(facts) if shown]
    width = max((len(label) for label, _ in rows), default=0)
    lines = []
    for label, shown in rows:
        parts = [shown] if columns is None else wrap(shown, max(20, columns - width - 2), break_on_hyphens=False)
        lines.append(f"{label:<{width}}  {parts[0] if parts else ''}".rstrip())
        lines += [" " * (width + 2) + part for part in parts[1:]]
    return lines


def agent_table(agents: Sequence[Mapping[str, Any]], *, namespaces: bool) -> list[str]:
    """The agents, one a line under a heading; with how long they have where some have an end.

    Args:
        agents: facts of each.
        namespaces: show whose they are.
    """
    if not agents:
        return ["no agents yet"]
    heading = ["agent", *(["namespace"] if namespaces else []), "tokens", "in RAM", "on disk", "pinned", "durable"]
    has_ends = any(agent.get("expires_in_s") is not None for agent in agents)
    rows = [[*heading, "format", *(["ends"] if has_ends else [])]]
    for agent in agents:
        swapped = int(agent.get("swapped_pages", 0))
        rows.append(
            [
                str(agent.get("agent", "")),
                *([str(agent.get("namespace", ""))] if namespaces else []),
                str(agent.get("tokens", "")),
                size(int(agent.get("resident_bytes", 0))),
                pages(swapped) if swapped else "-",
                value_text("pinned", agent.get("pinned")),
                value_text("durable", agent.get("durable")),
                format_name(str(agent.get("kv_format", ""))),
                *([_end(agent.get("expires_in_s"))] if has_ends else []),
            ]
        )
    right = {heading.index(name) for name in ("tokens", "in RAM", "on disk")}
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(f"{cell:{'>' if at in right else '<'}{widths[at]}}" for at, cell in enumerate(row)).rstrip()
        for row in rows
    ]


def _end(left_s: object) -> str:
    """How long until an agent ends; a dash for never."""
    if not isinstance(left_s, int | float):
        return "-"
    for unit, unit_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if left_s >= 2 * unit_s:
            return f"in {left_s // unit_s:.0f} {unit}"
    return "now"


def pages(count: int) -> str:
    """A number of pages in words."""
    return f"{count} page{'' if count == 1 else 's'}"


def agent_line(done: str, agent: Mapping[str, Any]) -> str:
    """One line after something was done to an agent.

    Args:
        done: what, with the agent's name: `alice pinned`.
        agent: its facts now.
    """
    swapped = int(agent.get("swapped_pages", 0))
    on_disk = f", {pages(swapped)} only on disk" if swapped else ""
    behind = int(agent.get("behind_window_pages", 0))
    on_disk += f", {pages(behind)} behind the window" if behind else ""
    unsafe = "" if agent.get("durable", True) else f"; NOT durable ({agent.get('durable_reason') or 'no reason given'})"
    tokens, in_ram = agent.get("tokens", 0), size(int(agent.get("resident_bytes", 0)))
    return f"{done}: {tokens} tokens, {in_ram} in RAM{on_disk}{unsafe}"


def limit_lines(limits: Mapping[str, Any]) -> list[str]:
    """The budget, what it bounds, and what is still to come, in lines.

    Args:
        limits: facts of `configure`.
    """

    def shown(name: str) -> str:
        return size(int(limits.get(name) or 0))

    largest = f", at most {shown('largest_budget_bytes')} here" if limits.get("largest_budget_bytes") else ""
    limit = f", at most {shown('footprint_limit_bytes')}" if limits.get("footprint_limit_bytes") else ""
    lines = [
        f"budget     {shown('budget_bytes')}{largest}; requests may take {shown('usable_bytes')} of it",
        f"resident   {shown('resident_bytes')}",
        f"marks      idle pages beyond {shown('high_mark_bytes')} go, down to {shown('low_mark_bytes')}",
        f"pins       may hold {shown('pin_limit_bytes')}",
        f"footprint  {shown('footprint_bytes')}{limit}",
        *(
            f"quota      {name}: {size(int(quota))}"
            for name, quota in sorted(limits.get("namespace_quotas", {}).items())
        ),
        *(
            f"on disk    {name}: {size(int(quota))}"
            for name, quota in sorted(limits.get("namespace_disk_quotas", {}).items())
        ),
    ]
    if "budget" in limits.get("until_restart", ()):
        lines.append(f"The next start has {shown('start_budget_bytes')} again; `kvd serve --budget` sets it for good.")
    if "budget" in limits.get("converging", ()):
        lines.append("More than the budget is still held: it goes as soon as it is written, or its requests end.")
    return lines
