"""Notices page files that somebody else removes or changes, by the system's own notifications.

Theory of operation. A notification is a hint that a file is worth a look, never a fact: systems merge them, deliver
them late (FSEvents) or lose some (a full inotify queue), and our own writes cause them, too. So names are collected,
left alone for `SETTLE_S`, and handed on; whether a file is as it was written is for the swap thread to find out,
between its own changes (`CheckPagesOp`). A folder that goes away is a look at all pages in it. What no notification
told is found when the page is read: every read verifies every byte.

The swap folder itself may be away for a moment: a disk that is not mounted, somebody who renames. That says nothing of
pages, so nothing is handed on while it is away. When a folder has the name again it is watched, since the notifications
of the one before ended, and all its pages are looked at.

A system that will not watch (its limit of watches is used up, a network disk) costs nothing but the early notice.

Threads: the observer's own, and one that hands on. May import watchdog and kvd.store.layout.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from watchdog.events import (
    DirDeletedEvent,
    DirMovedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from kvd.store.layout import page_of_file

SETTLE_S: Final = 0.5
"""How long a name is left alone before it is looked at: most writers are done by then, and bursts become one look."""

ROOT_EVERY_S: Final = 5.0
"""How often it is made sure that the watched folder is still the one that has the name."""

_WATCHED: Final[list[type[FileSystemEvent]]] = [
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    DirDeletedEvent,
    DirMovedEvent,
]
"""Opening and reading, which kvd does all the time, is not asked for."""


class Suspicions(Protocol):
    """Takes what is worth a look; called on the watch's own thread."""

    def __call__(self, page_ids: frozenset[str], folders: frozenset[str]) -> None:
        """Pages by id, and folders of pages by name (two hex digits), all of whose pages are meant."""


class FolderWatch(FileSystemEventHandler):
    """Watches the page files of one model from `start` to `stop`. Owner: the engine thread.

    Args:
        folder: the swap folder; it exists.
        report: is told of pages that may have changed.
        log: told when watching does not work: (event, facts).
        make_observer: the system's, or a test's.
        clock: seconds, monotonic.

    Attributes:
        is_watching: the system notifies.
    """

    def __init__(
        self,
        folder: Path,
        report: Suspicions,
        log: Callable[..., None],
        *,
        make_observer: Callable[[], BaseObserver] = Observer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_watching = False
        self._folder = folder
        self._report = report
        self._log = log
        self._make_observer = make_observer
        self._clock = clock
        self._observer: BaseObserver | None = None
        self._identity: tuple[int, int] | None = None  # of the folder that is watched, also while it is away
        self._is_away = False
        self._lock = threading.Lock()
        self._pages: dict[str, float] = {}  # when they were last heard of
        self._folders: dict[str, float] = {}
        self._looked_s = clock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-watch", daemon=True)

    def start(self) -> None:
        """Begin; what the system refuses is logged and no error."""
        self._watch()
        self._thread.start()

    def stop(self) -> None:
        """End both threads."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._unwatch()

    def on_any_event(self, event: FileSystemEvent) -> None:
        """A notification, on the observer's thread."""
        for raw in (event.src_path, event.dest_path):
            path = Path(os.fsdecode(raw)) if raw else None
            if path is None:
                continue
            page_id = page_of_file(path.name)
            with self._lock:
                if page_id is not None and path.parent.parent == self._folder:
                    self._pages[page_id] = self._clock()
                elif event.is_directory and path.parent == self._folder:
                    self._folders[path.name] = self._clock()

    def hand_on(self) -> None:
        """Report what has settled, and look after the watch itself; called every now and then."""
        now_s = self._clock()
        with self._lock:
            has_settled = _settled(self._pages, now_s) or _settled(self._folders, now_s)
        is_due = now_s - self._looked_s >= ROOT_EVERY_S
        if not (has_settled or is_due):
            return
        identity = self._identity_now()
        if identity is None:
            self._is_away = True
            return
        with self._lock:
            pages = _take_settled(self._pages, now_s)
            folders = _take_settled(self._folders, now_s)
        if is_due or self._is_away:
            self._looked_s = now_s
            if self._is_away or identity != self._identity:
                self._unwatch()
                self._watch()
                folders = frozenset(f"{number:02x}" for number in range(256))
        if pages or folders:
            self._report(pages, folders)

    def _run(self) -> None:
        while not self._stopping.wait(SETTLE_S / 2):
            self.hand_on()

    def _watch(self) -> None:
        identity = self._identity_now()
        self._is_away = identity is None
        if identity is None:
            return  # made again with the next page that is written, and then watched again
        self._identity = identity
        observer = self._make_observer()
        try:
            observer.schedule(self, str(self._folder), recursive=True, event_filter=_WATCHED)
            observer.start()
        except OSError as error:
            self._log(
                "swap_not_watched",
                folder=str(self._folder),
                reason=f"{error.strerror or error}; changes of page files are found when they are read",
            )
            return
        self._observer, self.is_watching = observer, True

    def _unwatch(self) -> None:
        self.is_watching = False
        if self._observer is not None:
            self._observer.stop()
            with contextlib.suppress(RuntimeError):  # it never ran
                self._observer.join()
            self._observer = None

    def _identity_now(self) -> tuple[int, int] | None:
        try:
            found = self._folder.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


def _settled(names: dict[str, float], now_s: float) -> frozenset[str]:
    """Names that nothing was heard of for a while."""
    return frozenset(name for name, heard_s in names.items() if now_s - heard_s >= SETTLE_S)


def _take_settled(names: dict[str, float], now_s: float) -> frozenset[str]:
    """Remove and return those."""
    settled = _settled(names, now_s)
    for name in settled:
        del names[name]
    return settled


__all__ = ["ROOT_EVERY_S", "SETTLE_S", "FolderWatch", "Suspicions"]
