"""The words of a trace: what is written can be read, and what is no trace is refused by line."""

from __future__ import annotations

import pytest

from kvd.errors import InvalidParams
from kvd.vm.trace import TraceHeader, TraceLine, format_header, format_line, parse_trace

HEADER = TraceHeader(256, (None, 512), 1_000_000, "day")
LINES = [
    TraceLine(0.0, "create", 1, agent="ab", page_bytes=(10, 20)),
    TraceLine(0.5, "restore", 2, agent="cd", tokens=700, parent=1, shared_pages=2, page_bytes=(10, 20)),
    TraceLine(1.25, "start", 1),
    TraceLine(2.0, "end", 1, tokens=300, pages=1),
    TraceLine(2.5, "fork", 3, agent="ab", tokens=256, parent=1),
    TraceLine(3.0, "cut", 1, tokens=100),
    TraceLine(4.0, "close", 3),
]


def text() -> list[str]:
    """The trace above as a file has it."""
    return [f"{line}\n" for line in (format_header(HEADER), *map(format_line, LINES))]


def test_what_is_written_is_read_again() -> None:
    """Header and every field of every operation."""
    assert parse_trace(text(), source="t") == (HEADER, LINES)


def test_a_line_that_was_being_written_when_the_daemon_was_killed_is_left_out() -> None:
    """P3: the rest of the trace is good."""
    cut = [*text()[:-1], text()[-1][:9]]
    assert parse_trace(cut, source="t") == (HEADER, LINES[:-1])


@pytest.mark.parametrize(
    ("number", "line", "words"),
    [
        (0, "{}", "t is no trace of version 1"),
        (0, '{"kvd_trace":2}', "no trace of version 1"),
        (0, '{"kvd_trace":1,"page_tokens":0,"windows":[null]}', "header needs page_tokens and windows"),
        (0, '{"kvd_trace":1,"page_tokens":4,"windows":[-1]}', "windows are token counts or null"),
        (2, "nonsense", "t, line 3: a JSON object is expected"),
        (2, '{"t_s":0,"word":"jump","space":1}', "t, line 3: word is 'jump'; words are create, restore, fork"),
        (2, '{"t_s":0,"word":"end","space":1,"text":"x"}', "line 3: unknown fields text"),
        (2, '{"t_s":0,"word":"end","space":-1}', "line 3: space must be given as numbers"),
        (2, '{"word":"end","space":1}', "line 3: t_s must be"),
        (2, '{"t_s":0,"word":"end","space":1,"tokens":9e99}', "line 3: tokens must be"),
        (1, '{"t_s":0,"word":"create","space":1,"page_bytes":[1]}', "line 2: page_bytes must be"),
        (2, '{"t_s":0,"word":"fork","space":1}', "line 3: parent must be"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_line(number: int, line: str, words: str) -> None:
    """A wrong file, another version, a damaged line: the message says where and what is allowed."""
    lines = text()
    lines[number] = f"{line}\n"
    with pytest.raises(InvalidParams, match=words):
        parse_trace(lines, source="t")


def test_an_empty_file_is_no_trace() -> None:
    """Nothing was written yet."""
    with pytest.raises(InvalidParams, match="is no trace"):
        parse_trace([], source="t")
