"""The daemon's events as lines for people. Pure."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvd_client.cli_show import pages, seconds, size
from kvd_client.events import DaemonEvent

Data = Mapping[str, Any]


def printable(text: str) -> str:
    """Text with what a terminal would act on (control characters, unassigned ones) shown as `?`."""
    return "".join("?" if unicodedata.category(each)[0] == "C" else each for each in text)


def event_line(event: DaemonEvent) -> str:
    """One line: time, kind, whose, and what there is to say."""
    clock = "" if not event.time_s else time.strftime("%H:%M:%S", time.localtime(event.time_s))
    clock += f".{int(event.time_s * 1000) % 1000:03d}" if clock else " " * 12
    whose = "" if event.agent is None else f"{event.namespace}/{event.agent}"
    words = _WORDS.get(event.type, _plain)(event.data)
    return printable(f"{clock}  {event.type:<14}  {whose:<24}  {words}").rstrip()


def _plain(data: Data) -> str:
    return ", ".join(f"{key} {value}" for key, value in data.items() if value is not None)


def _amount(data: Data) -> str:
    amount = pages(int(data.get("pages") or 0))
    if "bytes" in data:
        amount += f", {size(int(data['bytes']))}"
    return amount + (f" ({data['reason']})" if data.get("reason") else "")


def _match(data: Data) -> str:
    words = f"{data.get('match')}: {data.get('cached_tokens')} of {data.get('prompt_tokens')} tokens were there"
    if data.get("match_reason"):
        words += f"; {data['match_reason']}"
    parted = data.get("divergence")
    if isinstance(parted, Mapping):
        words += f"; token {parted.get('token')} was {parted.get('expected')!r}, is {parted.get('found')!r}"
    return words


def _ended(data: Data) -> str:
    words = f"{data.get('method')} {data.get('outcome')}"
    if data.get("prompt_tokens") is not None:
        words += (
            f": {data['prompt_tokens']} prompt tokens ({data.get('cached_tokens')} cached), "
            f"{data.get('completion_tokens')} new"
        )
    words += f", {seconds(float(data.get('total_s') or 0))}"
    return words + (", NOT durable" if data.get("durable") is False else "")


def _gap(data: Data) -> str:
    lost = "events" if data.get("lost") is None else f"{data['lost']} events"
    return {
        "slow": f"{lost} were missed: this reader is too slow",
        "old": f"{lost} were missed: they are no longer remembered",
        "restart": f"{lost} may have been missed: the daemon was started anew",
    }.get(str(data.get("reason")), f"{lost} were missed")


_WORDS: Final[Mapping[str, Callable[[Data], str]]] = {
    "subscribed": lambda data: "listening",
    "away": lambda data: f"{data.get('reason')}; waiting for the daemon",
    "gap": _gap,
    "turn_queued": lambda data: f"{data.get('method')}, {data.get('priority')}",
    "turn_begun": lambda data: f"after {seconds(float(data.get('queued_s') or 0))}",
    "hit": _match,
    "miss": _match,
    "turn_preempted": lambda data: "swapped out for another turn",
    "turn_resumed": lambda data: "goes on",
    "turn_ended": _ended,
    "operation": lambda data: f"{data.get('operation')} {data.get('outcome')}, {seconds(float(data['total_s']))}",
    "eviction": _amount,
    "fault": _amount,
    "prefetch": _amount,
    "swap_out": _amount,
    "page_lost": lambda data: f"{pages(int(data.get('pages') or 0))}: {data.get('reason')}",
    "page_files_lost": lambda data: f"{pages(int(data.get('pages') or 0))} on disk went or changed",
    "disk": lambda data: f"{data.get('disk')}" + (f": {data['disk_reason']}" if data.get("disk_reason") else ""),
    "memory": lambda data: (
        f"pressure {data.get('memory_pressure')}, {size(int(data.get('footprint_bytes') or 0))} taken"
    ),
    "budget": lambda data: size(int(data.get("budget_bytes") or 0)),
    "reload": lambda data: (
        f"{data.get('outcome')}: {', '.join(data.get('settings') or ()) or 'nothing'}"
        + (f" ({data['reason']})" if data.get("reason") else "")
    ),
    "draining": lambda data: "the daemon takes no new requests",
}

__all__ = ["event_line", "printable"]
