"""Page maps as pictures: one mark a page. Pure; takes what the daemon's `residency` answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any

PAGE_MARKS: Mapping[str, str] = {
    "clean": "█",
    "sealed_dirty": "▓",
    "writing": "▓",
    "loading": "▒",
    "loading_tail": "▒",
    "evicted": "░",
    "filling": "▄",
    "packed": "▄",
    "stashed": "_",
    "lost": "!",
}
"""State of a page -> its mark; a state that is not here is `UNKNOWN_MARK`."""

UNKNOWN_MARK = "?"

IN_RAM = frozenset({"filling", "sealed_dirty", "writing", "clean", "packed"})
ON_DISK = frozenset({"evicted", "stashed"})

BEHIND_MARK = "·"
"""Mark of a page on disk that no step sees any more, since it lies before the window of its layers."""

LEGEND = "█ RAM and disk  ▓ RAM  ▒ loading  ░ disk  · unseen  ▄ open  _ open, disk  ! lost"
"""The marks in words; an open page is an agent's last one, which is not full yet, an unseen one `BEHIND_MARK`'s."""


def branch_marks(branch: Mapping[str, Any]) -> str:
    """The pages of a branch in order, one mark each; its cache groups are set apart by a blank."""
    return " ".join("".join(_mark(page) for page in _pages_and_tail(segment)) for segment in branch.get("segments", ()))


def _mark(page: Mapping[str, Any]) -> str:
    if page.get("behind_window") and page.get("state") == "evicted":
        return BEHIND_MARK
    return PAGE_MARKS.get(str(page.get("state")), UNKNOWN_MARK)


def shares_pages(branch: Mapping[str, Any]) -> bool:
    """Whether another branch or agent maps one of its pages too."""
    segments = branch.get("segments", ())
    return any(int(page.get("shared_by", 1)) > 1 for segment in segments for page in segment.get("pages", ()))


def residency_lines(residency: Mapping[str, Any], *, columns: int | None = None) -> list[str]:
    """The legend, then one line a branch: its agent, tokens, marks, and what is special about it.

    Args:
        residency: the daemon's answer.
        columns: width to break long rows of marks at; None never does.
    """
    rows = list(_rows(residency.get("agents", ())))
    if not rows:
        return ["no agents yet"]
    name_width, tokens_width = (max(len(row[at]) for row in rows) for at in (0, 1))
    lines = [f"one mark a page of {residency.get('page_tokens', '?')} tokens:", LEGEND, ""]
    indent = name_width + tokens_width + 4
    room = None if columns is None else max(16, columns - indent)
    for name, tokens, marks, notes in rows:
        first, *others = _broken(marks, room)
        lines.append(f"{name:<{name_width}}  {tokens:>{tokens_width}}  {first}")
        lines += [" " * indent + part for part in others]
        if notes:
            fits = columns is None or len(lines[-1]) + 2 + len(notes) <= columns
            lines = [*lines[:-1], f"{lines[-1]}  {notes}"] if fits else [*lines, " " * indent + notes]
    return [line.rstrip() for line in lines]


def agent_map_lines(residency: Mapping[str, Any], *, columns: int | None = None) -> list[str]:
    """The page map of one agent, branch by branch and group by group, with page numbers and rows of flags.

    Below the marks stands `s` where another branch or agent maps the page, too, and `p` where a pin holds it; each row
    is there only if it has something to say.

    Args:
        residency: the daemon's answer, of one agent.
        columns: width to break rows at; None takes 100.
    """
    page_tokens = int(residency.get("page_tokens", 0))
    lines = [f"one mark a page of {page_tokens or '?'} tokens, with the number of the first one in each row:", LEGEND]
    lines += ["below them: s shared with another branch or agent, p held by a pin"]
    for agent in residency.get("agents", ()):
        branches = agent.get("branches", ())
        for number, branch in enumerate(sorted(branches, key=lambda each: not each.get("current", True)), 1):
            which = "" if len(branches) == 1 else f", branch {number} of {len(branches)}"
            left = "" if branch.get("current", True) else ", left behind"
            lines += ["", f"{agent.get('agent')}{which}{left}: {branch.get('tokens', '?')} tokens"]
            for segment in branch.get("segments", ()):
                lines += _segment_lines(segment, 100 if columns is None else columns)
    return [line.rstrip() for line in lines]


def _segment_lines(segment: Mapping[str, Any], columns: int) -> Iterator[str]:
    pages = _pages_and_tail(segment)
    window = segment.get("window_tokens")
    kind = "all tokens" if window is None else f"a window of {window} tokens"
    said = f"group {segment.get('group', '?')}, layers that see {kind}: {_counts(pages)}"
    yield from wrap(said, max(40, columns), initial_indent="  ", subsequent_indent="    ")
    room = max(8, min(64, columns - 10) // 8 * 8)
    for first in range(0, len(pages), room):
        row = pages[first : first + room]
        yield f"{first:>8}  {''.join(_mark(page) for page in row)}"
        flags = (
            "".join("s" if int(page.get("shared_by", 1)) > 1 else " " for page in row),
            "".join("p" if page.get("pinned") else " " for page in row),
        )
        yield from (f"{'':>8}  {flag}" for flag in flags if flag.strip())


def _counts(pages: list[Mapping[str, Any]]) -> str:
    """What there is of each, in words."""
    states = [str(page.get("state")) for page in pages]
    counts = {
        "in RAM": sum(state in IN_RAM for state in states),
        "on disk": sum(state in ON_DISK for state in states),
        "loading": sum(state in ("loading", "loading_tail") for state in states),
        "lost": states.count("lost"),
        "shared": sum(int(page.get("shared_by", 1)) > 1 for page in pages),
        "pinned": sum(bool(page.get("pinned")) for page in pages),
        "behind the window": sum(bool(page.get("behind_window")) for page in pages),
    }
    said = [f"{count} {what}" for what, count in counts.items() if count]
    return ", ".join([f"{len(pages)} page{'' if len(pages) == 1 else 's'}", *said])


def _pages_and_tail(segment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tail = segment.get("tail")
    return [*segment.get("pages", ()), *([] if tail is None else [tail])]


def _rows(agents: Any) -> Iterator[tuple[str, str, str, str]]:  # noqa: ANN401  (a list of maps from the wire)
    named = len({agent.get("namespace") for agent in agents}) > 1
    for agent in agents:
        base = f"{agent.get('namespace')}/{agent.get('agent')}" if named else str(agent.get("agent"))
        branches = agent.get("branches", ())
        for number, branch in enumerate(branches, 1):
            name = base if len(branches) == 1 else f"{base}, branch {number}"
            notes = [
                *(["pinned"] if agent.get("pinned") else []),
                *([] if branch.get("current", True) else ["left behind"]),
                *(["shares pages"] if shares_pages(branch) else []),
            ]
            yield name, f"{branch.get('tokens', '?')} tokens", branch_marks(branch), ", ".join(notes)


def _broken(marks: str, room: int | None) -> list[str]:
    if room is None or len(marks) <= room:
        return [marks]
    return [marks[at : at + room] for at in range(0, len(marks), room)]
