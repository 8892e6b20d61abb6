"""Notices that one file was written, replaced, removed or made, and says so once when it has settled.

Editors write a new file and rename it, or write in place in several steps; so the folder is watched, and a burst of
notifications becomes one call. Where the system cannot watch (no notifications left, a folder that is not there) that
is logged, and nothing else fails. May import watchdog; nothing of kvd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

SETTLE_S: Final = 0.5
"""How long the file is left alone before somebody looks at it."""

_OPENED: Final = frozenset({"opened", "closed_no_write"})


class FileWatch(FileSystemEventHandler):
    """Watches one file from `start` to `stop`. Owner: the event loop that it was started on.

    Args:
        path: the file; it need not exist.
        changed: called on the event loop.
        log: told when watching does not work: (event, facts).
        make_observer: the system's, or a test's.
    """

    def __init__(
        self,
        path: Path,
        changed: Callable[[], None],
        log: Callable[..., None],
        *,
        make_observer: Callable[[], BaseObserver] = Observer,
    ) -> None:
        self._path = path
        self._changed = changed
        self._log = log
        self._make_observer = make_observer
        self._observer: BaseObserver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, on a running event loop."""
        self._loop = asyncio.get_running_loop()
        observer = self._make_observer()
        try:
            observer.schedule(self, str(self._path.parent), recursive=False)
            observer.start()
        except OSError as error:
            reason = error.strerror or str(error)
            self._log("file_not_watched", file=str(self._path), reason=f"{reason}; SIGHUP has it read again")
            return
        self._observer = observer

    def stop(self) -> None:
        """End; nothing is called afterwards."""
        if self._timer is not None:
            self._timer.cancel()
        if self._observer is not None:
            self._observer.stop()
            with contextlib.suppress(RuntimeError):  # it never ran
                self._observer.join()
            self._observer = None
        self._loop = None

    def on_any_event(self, event: FileSystemEvent) -> None:
        """A notification, on the observer's thread."""
        paths = {os.fsdecode(raw) for raw in (event.src_path, event.dest_path) if raw}
        loop = self._loop
        if event.event_type not in _OPENED and str(self._path) in paths and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(self.heard)

    def heard(self) -> None:
        """Something happened to the file: look when it has settled. On the event loop."""
        if self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(SETTLE_S, self._changed)


__all__ = ["SETTLE_S", "FileWatch"]
