"""`kvd-client top`: a thread asks the daemon, the main thread shows what came and takes keys.

Neither waits for the other: a daemon that does not answer does not hold up a key, and pinning an agent, which may have
to wait for room, runs in a thread and on a connection of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from kvd_client.client import Client
from kvd_client.errors import CallTimeout, DaemonUnreachable, KvdClientError
from kvd_client.monitor import AgentKey, MonitorPicture
from kvd_client.top_rates import Rates
from kvd_client.top_screen import Screen
from kvd_client.top_view import Choice, Facts, frame, ordered

ANSWER_S: Final = 5.0
"""A daemon that takes longer to answer is shown as away."""
RETRY_S: Final = 0.5
REDRAW_S: Final = 1.0
"""The clock goes on when nothing else does."""


class Watcher:
    """Looks at the daemon again and again. Owner: its thread; `facts` is for others.

    Args:
        client: a connection of its own.
        namespace: its agents alone; None for all.
        interval_s: between two looks.
        changed: called after each, on the thread.
    """

    def __init__(self, client: Client, namespace: str | None, interval_s: float, changed: Callable[[], None]) -> None:
        self._client = client
        self._namespace = namespace
        self._interval_s = interval_s
        self._changed = changed
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._stopping = False
        self._picture, self._rates = MonitorPicture(), Rates()
        self._model: dict[str, Any] = {}
        self._away = ""
        self._away_since = ""
        self._thread = threading.Thread(target=self._run, name="kvd-top", daemon=True)

    def start(self) -> None:
        """Begin; the first look is made at once."""
        self._thread.start()

    def look(self) -> None:
        """Look once, in the caller's thread.

        Raises:
            KvdClientError: the daemon did not answer.
        """
        answer = self._client.monitor(self._picture.version, namespace=self._namespace)
        model = self._client.model_info() if answer.get("full", True) else self._model
        with self._lock:
            self._picture.take(answer)
            self._rates.take(self._picture)
            self._model, self._away = model, ""

    def hurry(self) -> None:
        """Look now."""
        self._wanted.set()

    def stop(self) -> None:
        """End the thread; a call under way is cancelled."""
        self._stopping = True
        self._wanted.set()
        self._client.close()
        self._thread.join(ANSWER_S)

    def show(self, draw: Callable[[Facts], None]) -> None:
        """Call `draw` with what is known, which does not change meanwhile."""
        with self._lock:
            draw(Facts(self._picture, self._rates, self._model, self._away, time.time()))

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.look()
                wait_s = self._interval_s
            except KvdClientError as error:
                self._lost(error)
                wait_s = max(RETRY_S, self._interval_s)
            self._changed()
            self._wanted.wait(wait_s)
            self._wanted.clear()

    def _lost(self, error: KvdClientError) -> None:
        with self._lock:
            if not self._away:
                self._away_since = time.strftime("%H:%M:%S")
            if isinstance(error, DaemonUnreachable | CallTimeout):
                what = "gone" if isinstance(error, DaemonUnreachable) else "silent"
                self._away = f"the daemon is {what} since {self._away_since}; trying again"
            else:
                self._away = f"{error.message}; trying again"


class Top:
    """Owner: the main thread.

    Args:
        make_client: makes a client for a connection.
        namespace: its agents alone; None for all.
        interval_s: between two looks.
        colour: whether to use colours.
    """

    def __init__(
        self, make_client: Callable[[float | None], Client], namespace: str | None, interval_s: float, *, colour: bool
    ) -> None:
        self._make_client = make_client
        self._colour = colour
        self._screen: Screen | None = None
        self._watcher = Watcher(make_client(ANSWER_S), namespace, interval_s, self._wake)
        self._choice = Choice()
        self._keys: list[AgentKey] = []
        self._message = ""

    def run(self, keys_fd: int, out_fd: int) -> None:
        """Show the daemon until the user quits.

        Raises:
            DaemonUnreachable: nobody answered the first call.
            Terminated: by a signal; the terminal is as it was.
        """
        self._watcher.look()
        self._watcher.start()
        try:
            with Screen(keys_fd, out_fd) as self._screen:
                while self._turn(self._screen):
                    pass
        except KeyboardInterrupt:
            pass
        finally:
            self._screen = None
            self._watcher.stop()

    def _wake(self) -> None:
        screen = self._screen
        if screen is not None:
            screen.wake()

    def _turn(self, screen: Screen) -> bool:
        """Draw, wait, take keys; False when the user quits."""

        def draw(facts: Facts) -> None:
            columns, rows = screen.size
            self._keys = ordered(facts, self._choice)
            if self._choice.selected is None and self._keys:
                self._choice = replace(self._choice, selected=self._keys[0])
            choice = replace(self._choice, message=self._message)
            screen.draw(frame(facts, choice, columns=columns, rows=rows, colour=self._colour))

        self._watcher.show(draw)
        return all(self._key(key, screen) for key in screen.wait(REDRAW_S))

    def _key(self, key: str, screen: Screen) -> bool:
        page = max(1, screen.size[1] - 10)
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "page down": page}
        moves |= {"home": -len(self._keys), "end": len(self._keys)}
        self._message = ""
        if key in ("q", "\x03"):
            return False
        if self._choice.shows_help:
            self._choice = replace(self._choice, shows_help=False)
        elif key in moves:
            self._choice = self._choice.moved(self._keys, moves[key])
        elif key == "s":
            self._choice = self._choice.next_sort()
        elif key == "r":
            self._choice = replace(self._choice, is_reversed=not self._choice.is_reversed)
        elif key in ("h", "?"):
            self._choice = replace(self._choice, shows_help=True)
        elif key in ("p", "e") and self._choice.selected in self._keys:
            self._act(key, self._choice.selected)
        return True

    def _act(self, key: str, agent: AgentKey) -> None:
        """Pin, unpin or evict in a thread, and say what came of it."""
        namespace, name = agent
        self._message = f"{name}: {'evict' if key == 'e' else 'pin'} ..."

        def run() -> None:
            done = "evicted" if key == "e" else "pinned"
            try:
                with self._make_client(None) as client:
                    # what is shown may be older than the last key
                    if key == "e":
                        client.evict(name, namespace=namespace)
                    elif client.agent_info(name, namespace=namespace).pinned:
                        done = "unpinned"
                        client.unpin(name, namespace=namespace)
                    else:
                        client.pin(name, namespace=namespace)
                self._message = f"{name} {done}"
            except KvdClientError as error:
                self._message = f"{name} not {done}: {error.message}"
            self._watcher.hurry()
            self._wake()

        threading.Thread(target=run, name="kvd-top-key", daemon=True).start()


def snapshot(client: Client, namespace: str | None, *, columns: int, colour: bool) -> list[str]:
    """One look, as lines: all agents."""
    watcher = Watcher(client, namespace, REDRAW_S, lambda: None)
    watcher.look()
    lines: list[str] = []
    watcher.show(lambda facts: lines.extend(frame(facts, Choice(), columns=columns, rows=None, colour=colour)))
    return lines if colour else [line.rstrip() for line in lines]


__all__ = ["Top", "snapshot"]
