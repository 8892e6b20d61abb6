"""Logging: structlog for us, the standard library's loggers and warnings of others through the same pipe.

Lines are JSON objects in files and pipes, `key=value` on a terminal. A request leaves exactly one line at the default
level (`request_line`); whatever happens inside it is `debug`. Prompts and replies are never logged. Log files are
0600, are rotated by size, and few are kept. No log makes anybody wait or fill another one: what standard error does not
take waits elsewhere (`kvd.ops.log_stream`), and a log that cannot be written says so once. Imports structlog and
siblings only.

A request's line costs one to two milliseconds of Python, a tenth of that where it follows another: `RequestLines`
writes them together on a thread of its own, some time after the answers, so that neither who asked nor the next step of
the model waits for it. Whatever is logged late says with `at_s`, in seconds since the epoch, when it happened.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from json import loads
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from kvd.ops.levels import LEVELS
from kvd.ops.log_stream import UnblockedStream, descriptor_of

__all__ = [
    "LEVELS",
    "LogSetup",
    "RequestLine",
    "RequestLines",
    "get_logger",
    "hand_on_record",
    "request_line",
    "setup_logging",
]

LINES_EVERY_S = 0.25
"""How long a request's line waits for others. All threads share one interpreter: lines that are written soon after an
answer hold up the first token of the client's next request, which comes as soon."""

_standard_error: TextIO | UnblockedStream | None = None
"""Where lines for standard error go while logging is set up. Owner: `setup_logging` and what undoes it."""

_CHATTY = ("asyncio", "filelock", "httpcore", "httpx", "huggingface_hub", "transformers", "urllib3", "watchdog")
"""Libraries whose `info` is noise to us: they are held at `warning`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLine:
    """The canonical line of one request. Fields that do not apply are None and left out of the line.

    Attributes:
        method: the protocol's method.
        outcome: `ok`, or the error's stable name.
        total_s: from the request's arrival to its response.
        request: the daemon's number of the request.
        connection: number of the client's connection.
        peer_pid: the client's process.
        agent: whose address space.
        namespace: the sharing domain.
        queued_s: waiting for its turn.
        ttft_s: from arrival to the first sampled token.
        prompt_tokens: tokens of the prompt.
        cached_tokens: of these, computed before and reused.
        completion_tokens: new tokens.
        finish_reason: why generation ended.
        match: `new`, `exact`, `extend` or `diverge`.
        match_reason: where and why, on a miss or divergence (a position and a kind, never text).
        swapped_in_pages: pages read from disk for it.
        written_bytes: bytes its commit wrote.
        durable: whether the turn is on disk.
        preemptions: how often it was swapped out for an interactive request, if it was.
    """

    method: str
    outcome: str
    total_s: float
    request: int | None = None
    connection: int | None = None
    peer_pid: int | None = None
    agent: str | None = None
    namespace: str | None = None
    queued_s: float | None = None
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    match: str | None = None
    match_reason: str | None = None
    swapped_in_pages: int | None = None
    written_bytes: int | None = None
    durable: bool | None = None
    preemptions: int | None = None


def request_line(logger: structlog.stdlib.BoundLogger, line: RequestLine, at_s: float | None = None) -> None:
    """Log the one line of a finished request: `warning` if it failed, `info` otherwise.

    Args:
        logger: logs it.
        line: what there is to say.
        at_s: when it was finished, in seconds since the epoch; None: now.
    """
    facts = {name: _rounded(value) for name, value in asdict(line).items() if value is not None}
    if at_s is not None:
        facts["at_s"] = at_s
    if line.outcome in ("ok", "cancelled"):
        logger.info("request", **facts)
    else:
        logger.warning("request", **facts)


class RequestLines:
    """Writes lines of finished requests, in order, on its own thread; from any thread.

    What `kill -9` ends within `LINES_EVERY_S` of an answer leaves no line.

    Args:
        write: writes one line, given when its request was finished; what it raises is nobody's trouble but the line's.
    """

    def __init__(self, write: Callable[[RequestLine, float], None]) -> None:
        self._write = write
        self._lines: queue.SimpleQueue[tuple[RequestLine, float] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._closing = threading.RLock()  # a signal may close while the same thread does
        self._thread = threading.Thread(target=self._run, name="kvd-request-lines", daemon=True)
        self._thread.start()

    def put(self, line: RequestLine) -> None:
        """Have a line written soon; after `close`, write it now."""
        with self._closing:  # no line may come behind the one that ends the thread
            if not self._closed.is_set():
                self._lines.put((line, time.time()))
                return
        self._write_one(line, time.time())

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, and end; harmless when called twice."""
        with self._closing:
            self._closed.set()
            self._lines.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._lines.get()) is not None:
            self._closed.wait(LINES_EVERY_S)
            self._write_one(*item)
            for _ in range(self._lines.qsize()):  # those that came meanwhile
                if (item := self._lines.get()) is None:
                    return
                self._write_one(*item)

    def _write_one(self, line: RequestLine, at_s: float) -> None:
        with suppress(Exception):  # a full disk, or a stream that is closed
            self._write(line, at_s)


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger; `name` is the module's."""
    return structlog.stdlib.get_logger(name)


class LogSetup:
    """Logging as it was set up. `close` puts everything back as it was, and is safe to call twice.

    Owner of the root logger's handlers from `setup_logging` to `close`.
    """

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore: Callable[[], None] | None = restore

    def close(self) -> None:
        """Close the log file and restore the former handlers."""
        if self._restore is not None:
            self._restore()
            self._restore = None

    def __enter__(self) -> LogSetup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def setup_logging(
    *,
    level: str = "info",
    file: Path | None = None,
    stream: TextIO | None = None,
    json: bool | None = None,
    max_file_bytes: int = 10_000_000,
    kept_files: int = 3,
) -> LogSetup:
    """Route every log line and warning of this process to one place.

    Args:
        level: one of `LEVELS`, for us and for quiet libraries; chatty libraries are never below `warning`.
        file: a log file, made 0600 in a folder that exists; JSON. None for `stream`.
        stream: standard error by default.
        json: JSON lines or `key=value`; None decides: JSON unless the stream is a terminal.
        max_file_bytes: the file is rotated before it exceeds this.
        kept_files: rotated files kept besides the current one.

    Raises:
        ValueError: an unknown level; the message lists the allowed ones.
        OSError: the file cannot be opened. Logging is then unchanged.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is unknown: give one of {', '.join(LEVELS)}")
    out = sys.stderr if stream is None else stream
    handler: _PrivateRotatingFile | _StreamLog
    if file is not None:
        handler = _PrivateRotatingFile(file, max_bytes=max_file_bytes, kept_files=kept_files)
        as_json = True if json is None else json
    else:
        handler = _StreamLog(_unblocked(out))
        as_json = not out.isatty() if json is None else json
    handler.setFormatter(_formatter(as_json=as_json))
    said = handler.stream if isinstance(handler, _StreamLog) and out is sys.stderr else _unblocked(sys.stderr)
    return LogSetup(_install(handler, level, said))


def _unblocked(stream: TextIO) -> TextIO | UnblockedStream:
    fd = descriptor_of(stream)
    return stream if fd is None else UnblockedStream(fd, _tell_lost)


def _tell_lost(lines: int) -> None:
    get_logger("kvd.log").warning("log_lines_lost", lines=lines)


def _install(handler: logging.Handler, level: str, said: TextIO | UnblockedStream) -> Callable[[], None]:
    """Make `handler` the only one, and `said` the way to standard error; return what undoes it."""
    global _standard_error
    root = logging.getLogger()
    former_handlers, former_level = root.handlers[:], root.level
    former_levels = {name: logging.getLogger(name).level for name in _CHATTY}
    root.handlers[:] = [handler]
    former_error, _standard_error = _standard_error, said
    set_level(level)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared_processors(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )

    def restore() -> None:
        global _standard_error
        logging.captureWarnings(False)
        root.handlers[:] = former_handlers
        _standard_error = former_error
        root.setLevel(former_level)
        for name, value in former_levels.items():
            logging.getLogger(name).setLevel(value)
        handler.close()
        if isinstance(said, UnblockedStream):
            said.close()
        structlog.reset_defaults()

    return restore


def hand_on_record(line: str) -> None:
    """Put a line of a child's log, a JSON object, on standard error: as it is, or on a terminal as `key=value`."""
    if sys.stderr.isatty():
        with suppress(ValueError):  # a name that `key=value` cannot have
            line = _logfmt()(None, "", loads(line))
    _say(line)


def _say(line: str) -> None:
    """Put a line on standard error, past the log."""
    out = sys.stderr if _standard_error is None else _standard_error
    with suppress(OSError, ValueError):  # nobody reads it any more
        out.write(line + "\n")
        out.flush()


def set_level(level: str) -> None:
    """Log from another level on, one of `LEVELS`; chatty libraries are never below `warning`."""
    number = getattr(logging, level.upper())
    logging.getLogger().setLevel(number)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


def _shared_processors() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        _when_it_happened,
        structlog.processors.MaybeTimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]


def _when_it_happened(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """The time of what is logged later than it happened."""
    at_s = event.pop("at_s", None)
    if isinstance(at_s, float):
        event["timestamp"] = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return event


def _formatter(*, as_json: bool) -> logging.Formatter:
    as_records = structlog.processors.JSONRenderer(default=str, ensure_ascii=False)
    renderer: Processor = as_records if as_json else _logfmt()
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_shared_processors(), _one_line_warning],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _no_surrogates, renderer],
    )


def _logfmt() -> structlog.processors.LogfmtRenderer:
    return structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False)


def _one_line_warning(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """`captureWarnings` sends the warning with the source line below it; keep the first line."""
    if event.get("logger") == "py.warnings":
        event["event"] = str(event["event"]).strip().splitlines()[0]
    return event


def _no_surrogates(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """A file name that is no UTF-8 must not break the log: show its bytes."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isascii():
            event[key] = value.encode("utf-8", "backslashreplace").decode()
    return event


class _SaysOnce(logging.Handler):
    """Says that lines cannot be written when that begins, and how many were lost once it is over.

    logging's own way is a traceback on standard error for each line: a full disk would fill the system's log, too.
    """

    _lost_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        before = self._lost_lines
        super().emit(record)
        if before and before == self._lost_lines:
            self._lost_lines = 0
            _tell_lost(before)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        """Of the system's refusals the first of many is said; anything else is a bug."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._lost_lines += 1
        if self._lost_lines == 1:
            _say(f"kvd: the log cannot be written: {error}")


class _StreamLog(_SaysOnce, logging.StreamHandler["TextIO | UnblockedStream"]):
    """Lines on a stream."""


class _PrivateRotatingFile(_SaysOnce, RotatingFileHandler):
    """A rotated file that nobody else can read, whatever the umask."""

    _is_stuck = False

    def __init__(self, path: Path, *, max_bytes: int, kept_files: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=kept_files, encoding="utf-8")

    def doRollover(self) -> None:  # noqa: N802  (logging's name)
        """Go on in the same file where it may not be renamed (its folder is another's): no line is lost by that."""
        try:
            super().doRollover()
        except OSError as error:
            if not self._is_stuck:
                _say(f"kvd: the log cannot be rotated and grows: {error}")
            self._is_stuck = True
            self.stream = self._open()
        else:
            self._is_stuck = False

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.fchmod(fd, 0o600)
        return os.fdopen(fd, "a", encoding="utf-8")
