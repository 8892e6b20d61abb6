"""What `kvd-client top` shows, as lines: pure, from the monitor's picture, rates and what the user chose.

Theory of operation. A frame is a list of lines that are no wider than the terminal and no more than it has. Widths are
counted in terminal cells (names may have wide characters), and colours are put on after that. Columns leave a narrow
terminal from the least important on. Of the agents those are shown that stand round the selected one.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from kvd_client.cli_show import size
from kvd_client.event_text import printable
from kvd_client.monitor import BEHIND_WINDOW, AgentKey, MonitorPicture
from kvd_client.residency import BEHIND_MARK, PAGE_MARKS, UNKNOWN_MARK
from kvd_client.top_rates import Rates, hit_rate

SORTS: Final = ("activity", "name", "tokens", "RAM", "hits", "tokens/s", "last used")
"""What the table can be sorted by, in the order of the key `s`."""

STATES: Final = ("running", "preempted", "queued", "idle", "asleep")

HELP: Final = (
    "up, down    select an agent; also j, k, PgUp, PgDn, Home, End",
    "s, r        sort by the next column; reverse the order",
    "p           pin the agent, or unpin it",
    "e           evict the agent's pages to disk",
    "h, ?        this help",
    "q, Ctrl-C   quit",
    "",
    "pages       █ RAM and disk  ▓ RAM  ▒ loading  ░ disk",
    "            · unseen  ▄ open  _ open, disk  ! lost",
    "hit         prompt tokens that were computed before",
    "last        how the last prompt matched",
)

_STYLES: Final = {"bold": "1", "dim": "2", "reverse": "7", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_STATE_STYLES: Final = {"running": "green", "preempted": "yellow", "queued": "yellow", "asleep": "dim"}
_MATCH_STYLES: Final = {"diverge": "red", "new": "yellow"}


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user chose.

    Attributes:
        sort: one of `SORTS`.
        is_reversed: the other way round.
        selected: the agent that keys are about; None: the first.
        shows_help: in place of the table.
        message: what became of the last key, or nothing.
    """

    sort: str = SORTS[0]
    is_reversed: bool = False
    selected: AgentKey | None = None
    shows_help: bool = False
    message: str = ""

    def next_sort(self) -> Choice:
        """Sorted by the next column."""
        return replace(self, sort=SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)], message="")

    def moved(self, keys: Sequence[AgentKey], by: int) -> Choice:
        """With the agent selected that stands so many lines further down."""
        if not keys:
            return replace(self, selected=None)
        at = keys.index(self.selected) if self.selected in keys else 0
        return replace(self, selected=keys[max(0, min(len(keys) - 1, at + by))], message="")


@dataclass(frozen=True, slots=True)
class Facts:
    """What there is to show.

    Attributes:
        picture: agents and figures.
        rates: per second.
        model: what `model.info` said; empty while it is not known.
        away: why the daemon is not there, and since when; empty while it is.
        now_s: wall clock.
    """

    picture: MonitorPicture
    rates: Rates
    model: Mapping[str, Any]
    away: str = ""
    now_s: float = 0.0


def ordered(facts: Facts, choice: Choice) -> list[AgentKey]:
    """The agents in the order of the table."""
    agents = facts.picture.agents

    def last_used(key: AgentKey) -> float:
        return float((agents[key].get("last_turn") or {}).get("time_s", 0.0))

    by: dict[str, Callable[[AgentKey], Any]] = {
        "activity": lambda key: (_rank(agents[key]), -last_used(key), key),
        "name": lambda key: key,
        "tokens": lambda key: (-int(agents[key].get("tokens", 0)), key),
        "RAM": lambda key: (-int(agents[key].get("resident_bytes", 0)), key),
        "hits": lambda key: (-(hit_rate(agents[key]) or 0.0), key),
        "tokens/s": lambda key: (-facts.rates.tokens_per_second(key), key),
        "last used": lambda key: (-last_used(key), key),
    }
    return sorted(agents, key=by[choice.sort], reverse=choice.is_reversed)


def frame(facts: Facts, choice: Choice, *, columns: int, rows: int | None, colour: bool) -> list[str]:
    """One picture of the whole screen.

    Args:
        facts: what there is.
        choice: what the user chose.
        columns: cells of a line.
        rows: lines there are; None shows all agents and no keys.
        colour: escape sequences for colours are wanted.
    """
    paint = _paint if colour else _leave
    head = [*_head(facts, columns, paint), ""]
    keys = ordered(facts, choice)
    if rows is None:
        return [*head, *_table(facts, choice, keys, keys, columns, paint)]
    foot = fit(choice.message or "q quit  s sort  r reverse  p pin  e evict  h help", columns)
    room = max(1, rows - len(head) - 2)
    if choice.shows_help:
        body = [fit(line, columns) for line in HELP[: room + 1]]
    else:
        body = _table(facts, choice, keys, _visible(keys, choice, room), columns, paint)
    body = body[: max(0, rows - len(head) - 1)]
    blank = [""] * max(0, rows - len(head) - len(body) - 1)
    return [*head, *body, *blank, paint(foot, "yellow" if choice.message else "dim")][-rows:]


# ---- the head -------------------------------------------------------------------------------------------------------


def _head(facts: Facts, columns: int, paint: Paint) -> list[str]:
    figures, rates = facts.picture.figures, facts.rates
    clock = time.strftime("%H:%M:%S", time.localtime(facts.now_s))
    name = printable(
        " ".join(["kvd", *(str(facts.model[key]) for key in ("model", "kv_format") if key in facts.model)])
    )
    asleep = int(figures.get("agents_asleep", 0))
    counts = f"{figures.get('agents', len(facts.picture.agents))} agents" + (f", {asleep} asleep" if asleep else "")
    if facts.away:
        title = paint(_ends(f"{name}  {facts.away}", clock, columns), "red")
    else:
        title = paint(_ends(f"{name}  up {_duration(figures.get('uptime_s', 0))}  {counts}", clock, columns), "bold")
    resident, budget = int(figures.get("resident_bytes", 0)), int(figures.get("budget_bytes", 0))
    used, quota = int(figures.get("disk_used_bytes", 0)), int(figures.get("quota_bytes", 0))
    hits = rates.hit_rate()
    traffic = (
        f"in {size(round(rates.per_second('bytes_read')))}/s  out {size(round(rates.per_second('bytes_written')))}/s"
        f"  faults {rates.per_second('faults'):.0f}/s  evictions {rates.per_second('evictions'):.0f}/s"
    )
    requests = (
        f"{figures.get('running', 0)} running  {figures.get('queued', 0)} queued  "
        f"{rates.per_second('decode_rows'):.1f} tokens/s  hits {_percent(hit_rate(figures))}"
        + ("" if hits is None else f" (now {_percent(hits)})")
        + (f"  {figures['preempted']} preempted" if figures.get("preempted") else "")
    )
    lines = [
        title,
        _gauge("RAM ", resident, budget, columns, paint, f"{figures.get('frames', 0)} frames"),
        _gauge("disk", used, quota, columns, paint, _health(figures)) if quota else fit("disk  swap is off", columns),
        fit(f"swap  {traffic}", columns),
        fit(f"turns {requests}", columns),
    ]
    return lines + [paint(fit(text, columns), "red") for text in _troubles(figures)]


def _troubles(figures: Mapping[str, Any]) -> list[str]:
    found = []
    if figures.get("disk") not in (None, "ok"):
        found.append(f"disk {figures['disk']}: {figures.get('disk_reason')}")
    if names := figures.get("disk_quotas_full"):
        found.append(f"disk quota full: {', '.join(map(str, names))}")
    if names := figures.get("disk_quotas_too_small"):
        found.append(f"disk quota too small, nothing is given up for it: {', '.join(map(str, names))}")
    if figures.get("memory_pressure") == "hard":
        found.append("memory is short: new requests are refused")
    if figures.get("thrashing"):
        found.append("thrashing: agents push each other's pages out before they are used again")
    return [printable(text) for text in found]


def _health(figures: Mapping[str, Any]) -> str:
    return f"disk {figures.get('disk', '?')}"


def _gauge(label: str, amount: int, most: int, columns: int, paint: Paint, note: str) -> str:
    part = amount / most if most else 0.0
    words = f" {size(amount)} of {size(most)} ({_percent(part)})"
    cells = columns - len(label) - len(words) - len(note) - 4
    cells = max(0, min(40, cells if cells >= 10 else cells + len(note) + 2))
    filled = min(cells, round(part * cells))
    style = "red" if part > 0.97 else "yellow" if part > 0.85 else "green"
    line = f"{label}  {paint('█' * filled, style)}{paint('░' * (cells - filled), 'dim')}"
    taken = len(label) + 2 + cells
    rest = fit(f"{words}  {note}", columns - taken)
    return line + rest


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hour} h {minute:02d} m" if hour else f"{minute} m {second:02d} s" if minute else f"{second} s"


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.0f} %"


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Column:
    """One column: `text` of an agent in `cells` cells; columns with a larger `rank` leave a narrow terminal first."""

    title: str
    cells: int
    rank: int
    is_right: bool
    text: Callable[[Facts, AgentKey, Mapping[str, Any]], str]
    style: Callable[[Mapping[str, Any]], str] = lambda entry: ""


_COLUMNS: Final = (
    _Column(
        "state",
        9,
        1,
        False,
        lambda facts, key, entry: _state(entry),
        lambda entry: _STATE_STYLES.get(_state(entry), ""),
    ),
    _Column("tokens", 8, 2, True, lambda facts, key, entry: str(entry.get("tokens", ""))),
    _Column("tok/s", 6, 4, True, lambda facts, key, entry: _rate(facts.rates.tokens_per_second(key))),
    _Column("hit", 5, 3, True, lambda facts, key, entry: _percent(hit_rate(entry))),
    _Column(
        "last", 7, 5, False, lambda facts, key, entry: _last(entry), lambda entry: _MATCH_STYLES.get(_last(entry), "")
    ),
    _Column("RAM", 9, 6, True, lambda facts, key, entry: size(int(entry.get("resident_bytes", 0)))),
    _Column("pin", 3, 3, False, lambda facts, key, entry: "pin" if entry.get("pinned") else ""),
    _Column("turns", 6, 7, True, lambda facts, key, entry: str(entry.get("turns", 0))),
)
MIN_NAME, MOST_NAME, MIN_BAR = 10, 32, 12


def _table(
    facts: Facts, choice: Choice, keys: Sequence[AgentKey], shown: Sequence[AgentKey], columns: int, paint: Paint
) -> list[str]:
    agents = facts.picture.agents
    chosen = _columns_for(columns)
    fixed = sum(column.cells + 1 for column in chosen)
    several = len({namespace for namespace, _ in keys}) > 1
    names = {key: printable("/".join(key) if several else key[1]) for key in keys}
    longest = max((width(names[key]) for key in keys), default=0)
    name_cells = max(4, min(max(longest, MIN_NAME), MOST_NAME, columns - fixed - MIN_BAR - 2))
    bar_cells = max(0, columns - fixed - name_cells - 1)
    order = f"{choice.sort}{', reversed' if choice.is_reversed else ''}"
    heading = fit("agent", name_cells) + " " + " ".join(_cell(column.title, column) for column in chosen)
    pages = f"pages (by {order})"
    heading += " " + fit(pages if len(pages) <= bar_cells else "pages", bar_cells)
    lines = [paint(fit(heading, columns), "bold")]
    selected = choice.selected if choice.selected in agents else (keys[0] if keys else None)
    for key in shown:
        entry = agents[key]
        is_selected = key == selected
        cells = [fit(names[key], name_cells)]
        for column in chosen:
            text = _cell(column.text(facts, key, entry), column)
            cells.append(text if is_selected else paint(text, column.style(entry)))
        line = " ".join(cells) + " " + fit(bar(facts.picture, entry, bar_cells), bar_cells)
        lines.append(paint(line, "reverse") if is_selected else line)
    if not keys:
        lines.append(paint(fit("no agents yet", columns), "dim"))
    return lines


def _columns_for(columns: int) -> list[_Column]:
    room = columns - MIN_NAME - MIN_BAR - 2
    kept: list[_Column] = []
    for column in sorted(_COLUMNS, key=lambda each: each.rank):
        if column.cells + 1 <= room:
            room -= column.cells + 1
            kept.append(column)
    return [column for column in _COLUMNS if column in kept]


def _visible(keys: Sequence[AgentKey], choice: Choice, room: int) -> Sequence[AgentKey]:
    at = keys.index(choice.selected) if choice.selected in keys else 0
    first = max(0, min(at - room // 2, len(keys) - room))
    return keys[first : first + room]


def bar(picture: MonitorPicture, entry: Mapping[str, Any], cells: int) -> str:
    """The pages of an agent's current branch in order: a mark a page, or each for as many as there are too many of.

    A cell that stands for several pages has the mark of most of them, but a lost page is never hidden.
    """
    branches = entry.get("branches") or ()
    if not branches or cells < 1:
        return ""
    marks = "".join(
        _mark(state, flags) * pages
        for segment in branches[0].get("segments", ())
        for state, flags, pages in picture.pages(list(segment.get("runs", ())))
    )
    if len(marks) <= cells:
        return marks
    edges = [round(at * len(marks) / cells) for at in range(cells + 1)]
    return "".join(_most(marks[begin:end]) for begin, end in pairwise(edges))


def _mark(state: str, flags: int) -> str:
    if flags & BEHIND_WINDOW and state == "evicted":
        return BEHIND_MARK
    return PAGE_MARKS.get(state, UNKNOWN_MARK)


def _most(marks: str) -> str:
    lost = PAGE_MARKS["lost"]
    return lost if lost in marks else max(sorted(set(marks)), key=marks.count)


def _rank(entry: Mapping[str, Any]) -> int:
    state = _state(entry)
    return STATES.index(state) if state in STATES else len(STATES)


def _state(entry: Mapping[str, Any]) -> str:
    return str(entry.get("state", ""))


def _last(entry: Mapping[str, Any]) -> str:
    last = entry.get("last_turn") or {}
    return str(last.get("match", "-")) if last.get("outcome", "ok") in ("ok", "cancelled") else "failed"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f}" if tokens_per_s else "-"


# ---- text in cells --------------------------------------------------------------------------------------------------

Paint = Callable[[str, str], str]


def _paint(text: str, style: str) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if style and text else text


def _leave(text: str, style: str) -> str:
    return text


def width(text: str) -> int:
    """Cells of a terminal that text without control characters takes."""
    return sum(_cells_of(each) for each in text)


def _cells_of(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, cells: int) -> str:
    """Text in exactly so many cells: cut with `…`, or filled with blanks."""
    if cells < 1:
        return ""
    taken = width(text)
    if taken <= cells:
        return text + " " * (cells - taken)
    kept, room = "", cells - 1
    for character in text:
        room -= _cells_of(character)
        if room < 0:
            break
        kept += character
    return kept + "…" + " " * (cells - 1 - width(kept))


def _cell(text: str, column: _Column) -> str:
    fitted = fit(text, column.cells)
    if not column.is_right:
        return fitted
    stripped = fitted.rstrip(" ")
    return " " * (column.cells - width(stripped)) + stripped


def _ends(left: str, right: str, columns: int) -> str:
    """Both ends of a line, as far as there is room for the right one."""
    gap = columns - width(left) - width(right)
    return left + " " * gap + right if gap >= 2 else fit(left, columns)


__all__ = ["SORTS", "Choice", "Facts", "bar", "fit", "frame", "ordered", "width"]
