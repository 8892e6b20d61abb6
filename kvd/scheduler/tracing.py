"""Writes down what agents do to the page table, for `kvd bench eviction` (`kvd serve --trace`).

Theory of operation. The hands show every event that the pager took; the few that say something of agents become lines
(`kvd.vm.trace`), the others cost one look into a dictionary. Lines gather in memory and go to the file once a second,
at a tick, so a step never waits for a disk that is slow. A trace is an aid: a file that cannot be written any more ends
the trace with a word in the log, not the daemon. Names of agents are digests under a key that is drawn at start and
kept nowhere, so a trace can be handed on: it tells lengths and times, nothing of what was said by whom.

Owner: the engine thread. May import kvd.errors, kvd.ids, kvd.vm and siblings.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from kvd.errors import CallerError, EnvironmentFault
from kvd.ids import PageId, SpaceId
from kvd.vm import events as ev
from kvd.vm.pager import Pager
from kvd.vm.trace import TraceHeader, TraceLine, TraceWord, format_header, format_line

MARK = '{"kvd_trace":'
"""How a trace begins: only such a file is written over."""


class TraceInTheWay(CallerError):
    """The file that a trace should go to is there and is none."""

    name = "config_error"


def open_trace(path: Path) -> TextIO:
    """Make the file, 0600; an older trace of that name is written over.

    Raises:
        TraceInTheWay: something is there that is no trace; it is unchanged.
        EnvironmentFault: it cannot be made.
    """

    def private(name: str, _flags: int) -> int:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    try:
        file = open(path, "r+", encoding="utf-8", opener=private)  # noqa: SIM115  the writer closes it
        try:
            if os.fstat(file.fileno()).st_size and file.read(len(MARK)) != MARK:
                raise TraceInTheWay(f"trace must name a new file or an older trace: {path} is neither", setting="trace")
            file.seek(0)
            file.truncate()
        except BaseException:
            file.close()
            raise
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise EnvironmentFault(f"the trace {path} cannot be written: {why}") from error
    return file


class TraceWriter:
    """Owner: the engine thread, by way of the hands.

    Args:
        file: takes the lines; closed by `close`.
        pager: asked how long spaces are.
        owner: namespace and name of the agent of a space.
        windows: of the pager, per cache group.
        page_tokens: of the pager.
        clock: seconds, monotonic.
        log: told when the file cannot be written any more.
    """

    def __init__(
        self,
        file: TextIO,
        *,
        pager: Pager,
        owner: Callable[[SpaceId], str],
        windows: Sequence[int | None],
        page_tokens: int,
        clock: Callable[[], float],
        log: Callable[..., None],
    ) -> None:
        self._file: TextIO | None = file
        self._pager = pager
        self._owner = owner
        self._clock = clock
        self._log = log
        self._began_s = clock()
        self._salt = secrets.token_bytes(16)
        self._page_tokens = page_tokens
        self._running: dict[SpaceId, int] = {}  # tokens at the start of a turn
        self._restored: dict[PageId, SpaceId] = {}
        budget_bytes = pager.statistics().budget_bytes
        self._lines = [format_header(TraceHeader(page_tokens, tuple(windows), budget_bytes, Path(file.name).stem))]
        self._wishes: dict[type[ev.Event], TraceWord] = {
            ev.EvictionWanted: "evict",
            ev.Pinned: "pin",
            ev.Unpinned: "unpin",
            ev.SpaceClosed: "close",
        }

    def observe(self, event: ev.Event) -> None:
        """The pager took this event; what it led to is booked already."""
        if self._file is None:
            return
        match event:
            case ev.TokensAppended() | ev.WriteDone() | ev.LoadDone():
                pass  # most events are these
            case ev.Tick():
                self._flush()
            case ev.Activated(space):
                self._start(space)
            case ev.Deactivated(space):
                self._end(space)
            case ev.SpaceCreated(space, page_bytes):
                self._write("create", space, agent=self._agent(space), page_bytes=page_bytes)
            case ev.SpaceRestored():
                self._restore(event)
            case ev.Forked(parent, child, tokens):
                self._write("fork", child, agent=self._agent(child), parent=int(parent), tokens=tokens)
            case ev.RolledBack(space, tokens):
                self._write("cut", space, tokens=tokens)
            case ev.PrefetchHinted(space, "hint"):
                self._write("prefetch", space)
            case ev.EvictionWanted(space) | ev.Pinned(space) | ev.Unpinned(space) | ev.SpaceClosed(space):
                self._running.pop(space, None)
                self._write(self._wishes[type(event)], space)
            case _:
                pass

    def close(self) -> None:
        """Write what is left and close the file. Safe to call twice."""
        if self._file is not None:
            self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---- lines ------------------------------------------------------------------------------------------------------

    def _start(self, space: SpaceId) -> None:
        now = self._pager.residency(space)
        self._running[space] = now.tokens
        self._write("start", space, tokens=now.tokens, pages=now.total_pages - now.behind_window_pages)

    def _end(self, space: SpaceId) -> None:
        before, after = self._running.pop(space, None), self._pager.tokens(space)
        if before is not None:
            sealed = max(0, after // self._page_tokens - before // self._page_tokens)
            self._write("end", space, tokens=after, pages=sealed)

    def _restore(self, event: ev.SpaceRestored) -> None:
        """What a space shares with one restored before: branches of an agent have their first pages in common."""
        parent: SpaceId | None = None
        shared_pages = 0
        pages = [ref.page_id for image in event.segments if image.group == 0 for ref in image.pages]
        for number, page in enumerate(pages, start=1):
            if page in self._restored:
                parent, shared_pages = self._restored[page], number
            else:
                self._restored[page] = event.space
        self._write(
            "restore",
            event.space,
            agent=self._agent(event.space),
            tokens=self._pager.tokens(event.space),
            page_bytes=event.page_bytes,
            parent=None if parent is None else int(parent),
            shared_pages=shared_pages,
        )

    def _agent(self, space: SpaceId) -> str:
        return hashlib.blake2b(self._owner(space).encode(), key=self._salt, digest_size=6).hexdigest()

    def _write(self, word: TraceWord, space: SpaceId, **facts: object) -> None:
        line = TraceLine(self._clock() - self._began_s, word, int(space), **facts)  # type: ignore[arg-type]
        self._lines.append(format_line(line))

    def _flush(self) -> None:
        assert self._file is not None
        if not self._lines:
            return
        try:
            self._file.write("\n".join(self._lines) + "\n")
            self._file.flush()
        except OSError as error:
            self._log("trace_ended", reason=str(error), text="the daemon goes on without it")
            file, self._file = self._file, None
            with suppress(OSError):  # what it still held cannot be written either
                file.close()
        self._lines.clear()
