"""The words of a trace: what agents did to the page table, as JSON lines. Reading and writing text is left to others.

Theory of operation. A trace is what a replay needs to ask any eviction policy the same questions, and no more: no text,
no token ids, no page contents. The first line is the header, every other line one operation on an address space, in
order. Spaces have numbers of the trace's own, agents are named by a salted digest, lengths are tokens. What follows
from these (which pages an operation needs, which become full) the pager finds out again. `kvd.scheduler.tracing`
writes traces, `kvd bench eviction` replays them.

| operation | fields beside `t_s` and `space` |
|---|---|
| `create` | `agent`, `page_bytes` per cache group |
| `restore` | as `create`; `tokens`; `parent` and `shared_pages` when its first pages are another space's |
| `fork` | `agent`, `parent`, `tokens` |
| `start` | a turn begins: `tokens` the space has, `pages` its next step needs |
| `end` | it is over: `tokens` the space has, `pages` that became full meanwhile |
| `cut` | `tokens` kept |
| `prefetch`, `evict`, `pin`, `unpin` | a client's wish |
| `close` | the space is gone |

May import kvd.errors only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal, get_args

from kvd.errors import InvalidParams

TRACE_VERSION: Final = 1

TraceWord = Literal["create", "restore", "fork", "start", "end", "cut", "prefetch", "evict", "pin", "unpin", "close"]

TRACE_WORDS: Final[tuple[TraceWord, ...]] = get_args(TraceWord)

MAX_COUNT: Final = 1 << 40
"""No number of a trace is larger: a damaged line must not ask for a list of so many pages."""


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The first line.

    Attributes:
        page_tokens: tokens of one page.
        windows: tokens a query sees, per cache group; None for all.
        budget_bytes: of the pager that was traced; 0 when none was (a generated trace).
        name: what the trace is called in tables.
    """

    page_tokens: int
    windows: tuple[int | None, ...]
    budget_bytes: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One operation. See the module docstring for the fields that each word has."""

    t_s: float
    word: TraceWord
    space: int
    agent: str = ""
    tokens: int = 0
    pages: int = 0
    parent: int | None = None
    shared_pages: int = 0
    page_bytes: tuple[int, ...] = ()


_DEFAULTS: Final = {field.name: field.default for field in fields(TraceLine)}
_COUNTS: Final = ("space", "tokens", "pages", "shared_pages")


def format_header(header: TraceHeader) -> str:
    """The header as one line of JSON, without its end."""
    facts = {
        "kvd_trace": TRACE_VERSION,
        "page_tokens": header.page_tokens,
        "windows": list(header.windows),
        "budget_bytes": header.budget_bytes,
        "name": header.name,
    }
    return json.dumps(facts, separators=(",", ":"))


def format_line(line: TraceLine) -> str:
    """One operation as one line of JSON, without its end; fields that say nothing are left out."""
    facts: dict[str, object] = {"t_s": round(line.t_s, 4), "word": line.word, "space": line.space}
    for name, default in _DEFAULTS.items():
        value = getattr(line, name)
        if name not in facts and value != default:
            facts[name] = value
    return json.dumps(facts, separators=(",", ":"))


def parse_trace(lines: Iterable[str], *, source: str) -> tuple[TraceHeader, list[TraceLine]]:
    """Read a trace. A last line without an end (the daemon was killed while it wrote) is left out.

    Args:
        lines: as read from a file, ends included.
        source: names the trace in errors.

    Raises:
        InvalidParams: not a trace, one of another version, or a line that says nothing sensible, with its number.
    """
    numbered = _objects(lines, source)
    _, first = next(numbered, (0, {}))
    if first.get("kvd_trace") != TRACE_VERSION:
        raise InvalidParams(f"{source} is no trace of version {TRACE_VERSION}: its first line must say so")
    windows = first.get("windows")
    page_tokens = first.get("page_tokens")
    if not (_is_count(page_tokens) and page_tokens and isinstance(windows, list) and windows):
        raise InvalidParams(f"{source}: the header needs page_tokens and windows")
    if any(window is not None and not (_is_count(window) and window) for window in windows):
        raise InvalidParams(f"{source}: windows are token counts or null, not {windows}")
    budget = first.get("budget_bytes", 0)
    header = TraceHeader(
        int(str(page_tokens)), tuple(windows), budget if isinstance(budget, int) else 0, str(first.get("name", ""))
    )
    return header, [_line(facts, len(windows), f"{source}, line {number}") for number, facts in numbered]


def _objects(lines: Iterable[str], source: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    for number, text in enumerate(lines, start=1):
        try:
            facts = json.loads(text)
        except ValueError:
            if not text.endswith("\n"):
                return
            facts = None
        if not isinstance(facts, dict):
            raise InvalidParams(f"{source}, line {number}: a JSON object is expected")
        yield number, facts


def _line(facts: Mapping[str, object], groups: int, where: str) -> TraceLine:
    unknown = sorted(set(facts) - set(_DEFAULTS))
    if unknown or facts.get("word") not in TRACE_WORDS:
        what = f"unknown fields {', '.join(unknown)}" if unknown else f"word is {facts.get('word')!r}"
        raise InvalidParams(f"{where}: {what}; words are {', '.join(TRACE_WORDS)}")
    parent, t_s, page_bytes = facts.get("parent"), facts.get("t_s"), facts.get("page_bytes", [])
    bad = [name for name in _COUNTS if not _is_count(facts.get(name, _DEFAULTS[name]))]
    bad += ["parent"] * (parent is not None and not _is_count(parent))
    bad += ["t_s"] * (isinstance(t_s, bool) or not isinstance(t_s, int | float))
    is_new = facts["word"] in ("create", "restore")
    if (
        not isinstance(page_bytes, list)
        or (is_new and len(page_bytes) != groups)
        or not all(map(_is_count, page_bytes))
    ):
        bad.append("page_bytes")
    if facts["word"] == "fork" and parent is None:
        bad.append("parent")
    if bad:
        raise InvalidParams(f"{where}: {', '.join(bad)} must be given as numbers from 0 to {MAX_COUNT}")
    return TraceLine(**{**facts, "page_bytes": tuple(page_bytes)})  # type: ignore[arg-type]  # looked at above


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
