"""Logs: one line a request, one format for everybody, nobody else may read them."""

from __future__ import annotations

import io
import json
import logging
import os
import stat
import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from kvd.ops import LEVELS, RequestLine, get_logger, request_line, setup_logging
from kvd.ops.logs import RequestLines, hand_on_record

LINE = RequestLine(
    method="generate",
    outcome="ok",
    total_s=0.123456789,
    agent="coder",
    prompt_tokens=4096,
    cached_tokens=4095,
    durable=True,
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """True."""
        return True


def records(text: str) -> list[dict[str, object]]:
    """The JSON objects of a log."""
    return [json.loads(line) for line in text.splitlines()]


def test_lines_are_written_in_order_by_a_thread_of_their_own_and_all_of_them_at_the_end() -> None:
    """P38: whoever is answered does not wait for its line; a line that cannot be written costs none but itself."""
    written: list[tuple[str, str]] = []

    def write(line: RequestLine, at_s: float) -> None:
        assert at_s > 0
        if line.method == "bad":
            raise OSError("no room")
        written.append((line.method, threading.current_thread().name))

    lines = RequestLines(write)
    for method in ("a", "bad", "b", "c"):
        lines.put(replace(LINE, method=method))
    lines.close()
    lines.close()
    assert [method for method, _ in written] == ["a", "b", "c"]
    assert {thread for _, thread in written} == {"kvd-request-lines"}
    lines.put(replace(LINE, method="late"))
    assert written[-1][0] == "late", "an engine that ends after its log"


def test_a_line_that_comes_while_the_last_ones_are_being_written_is_not_lost() -> None:
    """P38: a close that gives up waiting leaves the thread at work; what comes then is written by whoever has it."""
    go_on, written = threading.Event(), list[str]()

    def write(line: RequestLine, at_s: float) -> None:
        if line.method == "slow":
            assert go_on.wait(60.0)
        written.append(line.method)

    lines = RequestLines(write)
    lines.put(replace(LINE, method="slow"))
    lines.close(timeout_s=0.0)
    lines.put(replace(LINE, method="late"))
    go_on.set()
    lines.close()
    assert sorted(written) == ["late", "slow"]


def test_a_request_leaves_one_line_with_its_figures() -> None:
    """P38: exactly one line at the default level, whatever the request logs inside; empty fields are absent."""
    out = io.StringIO()
    with setup_logging(stream=out):
        logger = get_logger("kvd.front")
        for page in range(300):
            logger.debug("page read", page=page)
        request_line(logger, LINE)
    (record,) = records(out.getvalue())
    assert record["event"] == "request"
    assert record["level"] == "info"
    assert record["logger"] == "kvd.front"
    assert str(record["timestamp"]).endswith("Z")
    assert record["cached_tokens"] == 4095
    assert record["durable"] is True
    assert record["total_s"] == 0.123457
    assert not {"ttft_s", "match_reason"} & set(record)


def test_a_line_that_is_written_late_says_when_it_happened() -> None:
    """Lines wait for others: the time is the request's end, not the writing."""
    out = io.StringIO()
    with setup_logging(stream=out):
        request_line(get_logger("kvd"), LINE, 1_700_000_000.25)
    (record,) = records(out.getvalue())
    assert record["timestamp"] == "2023-11-14T22:13:20.250000Z"
    assert "at_s" not in record


def test_a_failed_request_is_a_warning_and_a_cancelled_one_is_not() -> None:
    """Somebody who greps for warnings finds failures only."""
    out = io.StringIO()
    with setup_logging(stream=out):
        for outcome in ("budget_exceeded", "cancelled"):
            request_line(get_logger("kvd"), RequestLine(method="generate", outcome=outcome, total_s=1.0))
    assert [(record["level"], record["outcome"]) for record in records(out.getvalue())] == [
        ("warning", "budget_exceeded"),
        ("info", "cancelled"),
    ]


def test_a_childs_records_are_handed_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As they are; on a terminal as our own lines look there."""
    line = '{"port": 80, "event": "listening", "level": "info", "timestamp": "now"}'
    hand_on_record(line)
    assert capsys.readouterr().err == line + "\n"
    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    hand_on_record(line)
    hand_on_record('{"no key": 1}')
    assert out.getvalue() == 'timestamp=now level=info event=listening port=80\n{"no key": 1}\n'


def test_a_terminal_gets_key_value_lines() -> None:
    """People read `key=value`, programs JSON."""
    out = Terminal()
    with setup_logging(stream=out):
        request_line(get_logger("kvd"), LINE)
    (line,) = out.getvalue().splitlines()
    assert "level=info event=request" in line
    assert "agent=coder" in line
    assert "durable=true" in line


def test_libraries_and_warnings_come_through_the_same_pipe() -> None:
    """A library's logger and `warnings.warn` give JSON lines of the same shape; chatter below `warning` is dropped."""
    out = io.StringIO()
    with setup_logging(stream=out):
        logging.getLogger("some.library").warning("disk %s is slow", "sda")
        logging.getLogger("huggingface_hub.file_download").info("chatter")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old call", DeprecationWarning, stacklevel=1)
    library, warned = records(out.getvalue())
    assert (library["event"], library["logger"], library["level"]) == ("disk sda is slow", "some.library", "warning")
    assert warned["logger"] == "py.warnings"
    assert "DeprecationWarning: old call" in str(warned["event"])
    assert "\n" not in str(warned["event"])


def test_exceptions_stay_on_one_line() -> None:
    """A traceback is a field of its line, in both formats."""
    for out in (io.StringIO(), Terminal()):
        with setup_logging(stream=out):
            try:
                raise ValueError("broken")
            except ValueError:
                get_logger("kvd").exception("step failed", path="a\udcffb")
        (line,) = out.getvalue().splitlines()
        assert "ValueError: broken" in line
        assert "udcff" in line


@pytest.mark.parametrize(("level", "expected"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels(level: str, expected: int) -> None:
    """Each level drops what is below it, for us and for libraries."""
    for name in (None, "library"):
        out = io.StringIO()
        with setup_logging(stream=out, level=level):
            logger = get_logger("kvd") if name is None else logging.getLogger(name)
            for each in LEVELS:
                getattr(logger, each)("line")
        assert len(records(out.getvalue())) == expected


def test_an_unknown_level_lists_the_allowed_ones() -> None:
    """And changes nothing."""
    before = logging.getLogger().handlers[:]
    with pytest.raises(ValueError, match="debug, info, warning, error"):
        setup_logging(level="loud")
    assert logging.getLogger().handlers == before


def test_files_are_private_and_rotated(tmp_path: Path) -> None:
    """P37: 0600 whatever the umask and whatever was there, also after rotation; the size of all files is bounded."""
    path = tmp_path / "kvd.log"
    path.touch(mode=0o666)
    path.chmod(0o666)
    umask = os.umask(0)
    try:
        with setup_logging(file=path, max_file_bytes=2_000, kept_files=2):
            for number in range(100):
                get_logger("kvd").info("line", number=number)
    finally:
        os.umask(umask)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["kvd.log", "kvd.log.1", "kvd.log.2"]
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.stat().st_size <= 2_000
    assert records(path.read_text())[-1]["number"] == 99


def test_a_pipe_that_nobody_reads_holds_nobody_up() -> None:
    """The event loop logs, too: it goes on, lines beyond the bound are counted, and those that come out are whole."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"\n" * 4096)
    os.set_blocking(writing, True)
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "w") as stream:
        with setup_logging(stream=stream):
            logger = get_logger("kvd")
            for number in range(200):
                logger.info("long", number=number, text="x" * 10_000)
            found = list[bytes]()
            while b"log_lines_lost" not in (line := source.readline()):
                found += [line] if line.strip() else []
        stream.close()
        found += [line, *source.readlines()]
    *kept, lost = [json.loads(line) for line in found]
    assert [record["number"] for record in kept] == list(range(len(kept)))
    assert (lost["event"], lost["lines"]) == ("log_lines_lost", 200 - len(kept))
    assert 50 < len(kept) < 150, "a megabyte waits"


def test_a_log_that_cannot_be_written_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    """P38: not with a traceback a line, which would fill the next disk; how many were lost is told when it is over."""

    class Full(io.StringIO):
        is_full = True

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    out = Full()
    with setup_logging(stream=out, json=True):
        for _ in range(3):
            request_line(get_logger("kvd"), LINE)
        out.is_full = False
        request_line(get_logger("kvd"), LINE)
    assert [(record["event"], record.get("lines")) for record in records(out.getvalue())] == [
        ("request", None),
        ("log_lines_lost", 3),
    ]
    assert capsys.readouterr().err == "kvd: the log cannot be written: [Errno 28] No space left on device\n"


def test_a_log_that_cannot_be_rotated_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be in a folder where its user may rename nothing; that is said once, and every line is there."""
    file = tmp_path / "kvd.log"
    (tmp_path / "kvd.log.1" / "in the way").mkdir(parents=True)
    with setup_logging(file=file, max_file_bytes=500, kept_files=1):
        for number in range(50):
            get_logger("kvd").info("one", number=number)
    assert [record["number"] for record in records(file.read_text())] == list(range(50))
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("kvd: the log cannot be rotated and grows: ")


def test_close_restores_what_was_before() -> None:
    """Handlers, levels and structlog's own configuration; a second close does nothing."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.getLogger("urllib3").level)
    setup = setup_logging(stream=io.StringIO(), level="debug")
    setup.close()
    setup.close()
    assert (root.handlers, root.level, logging.getLogger("urllib3").level) == before
    assert not structlog.is_configured()
