"""What a stream has told so far, and how it goes on when its connection breaks. Shared by both clients; no I/O.

Theory of operation. A resumable call has the daemon tell the ids of the tokens it makes, and a key of the prompt it
makes them for. When the connection breaks, the same call is sent again with both: the daemon takes these tokens as they
are, makes the following ones, and tells the whole answer again from its beginning. Of each kind of event as much is
dropped as was told before, so whoever reads the stream gets every character once. Random numbers belong to positions
and a seed; where the caller gave none, one is drawn here, so that both calls have the same.

A break is worth a limited time and, since the call itself may be what brings the daemon down, a limited number of
tries without a new token. No I/O; may import kvd_client.calls, errors and stream.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from kvd_client.calls import Call
from kvd_client.errors import (
    Busy,
    Cancelled,
    ConnectionLost,
    DaemonUnreachable,
    Draining,
    KvdClientError,
    NotReady,
    remote_error,
)
from kvd_client.stream import Reconnected, StreamEvent, parse_event, text_event
from kvd_client.wire import ResponseReceived, StreamReceived

T = TypeVar("T")

RESUME_S = 30.0
"""Seconds for which a broken stream looks for its daemon: a restart takes a few, with a large model some more."""

MAX_BREAKS = 3
"""Breaks in a row without a new token, each after the daemon had gone on, after which the stream ends with the last."""

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 1.0

_ONCE = frozenset({"matched", "first_token", "usage", "durable"})
_TEXTS = frozenset({"text", "reasoning"})
_CAN_HEAL = (DaemonUnreachable, NotReady, Draining, Busy, Cancelled)
_BREAKS = (ConnectionLost, Cancelled)
_COME_AGAIN = frozenset(kind.wire_name for kind in (NotReady, Draining, Busy))


class Told(Generic[T]):
    """One stream's memory. Owner: the stream.

    Args:
        call: `generate` or `chat`.
        resume_s: seconds for which a broken stream looks for its daemon; 0: a break ends it.
        clock: monotonic seconds.
    """

    def __init__(self, call: Call[T], resume_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._resume_s = resume_s if call.params.get("stream", True) else 0.0
        self._call = call if not self._resume_s else replace(call, params=_resumable(call.params))
        self._tokens: list[int] = []
        self._key: str | None = None
        self._once: set[str] = set()
        self._text_told = 0
        self._told: dict[str, int] = {}  # characters, or events, of each kind that were passed on
        self._to_skip: dict[str, int] = {}
        self._broke_s: float | None = None
        self._cause: KvdClientError | None = None
        self._wait_s = 0.0
        self._breaks = 0
        self._tokens_at_break = 0

    def call(self) -> Call[T]:
        """What is to be sent now."""
        if self._key is None and self._broke_s is None:
            return self._call
        params = dict(self._call.params)
        if self._key is not None:
            params["resume"] = {"key": self._key, "tokens": list(self._tokens)}
        if self._broke_s is not None and isinstance(limit_s := params.get("timeout_s"), int | float):
            params["timeout_s"] = max(0.001, limit_s - (self._clock() - self._began_s))
        return replace(self._call, params=params)

    def take(self, event: Mapping[str, Any]) -> StreamEvent | None:
        """What the reader gets of an event; None for nothing: it had it already, or it is for this end alone."""
        if not self._resume_s:
            return parse_event(event)
        kind = event.get("type")
        if kind == "text" and not self._to_skip and type(text := event.get("text")) is str:  # nearly all of them
            self._text_told += len(text)
            return text_event(text)
        if kind == "tokens":
            self._tokens += [token for token in event.get("ids", ()) if type(token) is int]
            return None
        if kind == "matched" and isinstance(key := event.get("resume_key"), str):
            self._key = key
            event = {name: value for name, value in event.items() if name != "resume_key"}
        if kind in _ONCE:
            if kind in self._once:
                return None
            self._once.add(str(kind))
            return parse_event(event)
        return self._unless_told(str(kind), event)

    def _unless_told(self, kind: str, event: Mapping[str, Any]) -> StreamEvent | None:
        """The part of an event that is beyond what was told before the break."""
        field = "text" if kind in _TEXTS else "logprobs" if kind == "logprobs" else None
        if field is None and kind != "tool_call":
            return parse_event(event)
        value: Any = "x" if field is None else event.get(field) or ""
        skipped = min(self._to_skip.get(kind, 0), len(value))
        if skipped:
            self._to_skip[kind] -= skipped
            if not self._to_skip[kind]:
                del self._to_skip[kind]
        self._told[kind] = self._told.get(kind, 0) + len(value) - skipped
        if skipped == len(value):
            return None
        return parse_event(event if field is None else {**event, field: value[skipped:]})

    # ---- breaks ----

    def broke(self, error: KvdClientError) -> float:
        """The connection broke, or could not be made again: returns how many seconds to wait before the next try.

        Raises:
            KvdClientError: `error` itself where that is none that heals, else what broke the stream: it has been tried
                long enough, or is not to be tried.
        """
        now_s = self._clock()
        if not self._resume_s or not isinstance(error, _CAN_HEAL):
            raise error
        # one kill may break the next connection, too, if that was made while the process died: it is the same break
        if isinstance(error, _BREAKS) and not self.is_broken:
            self._breaks = 1 if len(self._tokens) > self._tokens_at_break else self._breaks + 1
            self._tokens_at_break = len(self._tokens)
        if self._broke_s is None or self._cause is None:
            self._broke_s, self._wait_s, self._cause = now_s, 0.0, error
        limit_s = self._call.params.get("timeout_s")
        is_late = isinstance(limit_s, int | float) and now_s - self._began_s >= limit_s
        if is_late or self._breaks > MAX_BREAKS or now_s - self._broke_s >= self._resume_s:
            if error is self._cause:
                raise error
            raise self._cause from error
        wait_s, self._wait_s = self._wait_s, min(max(2 * self._wait_s, FIRST_WAIT_S), LONGEST_WAIT_S)
        return wait_s

    def sent_again(self) -> None:
        """The call was sent over a new connection: what was told is skipped from here on. It may be refused yet."""
        self._told["text"] = self._told.get("text", 0) + self._text_told
        self._text_told = 0
        self._to_skip = {kind: count for kind, count in self._told.items() if count}

    @property
    def is_broken(self) -> bool:
        """The daemon has said nothing since the break."""
        return self._broke_s is not None

    def look(self, message: StreamReceived | ResponseReceived, *, is_wanted: bool) -> Reconnected | None:
        """The daemon says something, after a break perhaps, which is over then.

        Args:
            message: what it says.
            is_wanted: the caller has not cancelled the call.

        Returns:
            What the reader is told before it: that the stream goes on. None: it was not broken, or it has failed.

        Raises:
            NotReady, Draining, Busy: behind a break, it cannot go on yet.
            Cancelled: nobody but a daemon that goes down has cancelled the call: that is a break.
        """
        error = message.error if isinstance(message, ResponseReceived) else None
        if error is not None:
            name = error.name
            goes_down = name == Cancelled.wire_name and is_wanted and self._call.params.get("timeout_s") is None
            if (goes_down and self._resume_s) or (self.is_broken and name in _COME_AGAIN):
                raise remote_error(error)
        broke_s, self._broke_s = self._broke_s, None
        if broke_s is None or error is not None:
            return None
        return Reconnected(len(self._tokens), self._clock() - broke_s)


def _resumable(params: Mapping[str, object]) -> dict[str, object]:
    more: dict[str, object] = {"resumable": True}
    temperature = params.get("temperature")
    if isinstance(temperature, int | float) and temperature > 0 and params.get("seed") is None:
        more["seed"] = secrets.randbits(63)
    return {**params, **more}


__all__ = ["MAX_BREAKS", "RESUME_S", "Told"]
