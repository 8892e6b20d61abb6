"""One agent's client as a process of its own, and the handle that a benchmark has of it.

Theory of operation. `python -m kvd.bench.serve_client SOCKET` reads a call a line from its standard input, makes it
through `kvd_client`, and prints each event as it arrives: [kind, seconds of the monotonic clock, value]. The clock is
the machine's, so times of several processes compare. Lines are read by a thread of the benchmark's; a client that is
killed in the middle of a turn (its daemon then cancels it) has told everything it saw before.

May import kvd.bench.serve_figures, kvd.errors and kvd_client.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvd.bench.serve_figures import Turn
from kvd.errors import EnvironmentFault, InternalError
from kvd_client import Client, KvdClientError
from kvd_client.stream import FirstToken, Prefill, Text

EVENT_TIMEOUT_S = 300.0
"""So long nothing may come of a client before the benchmark gives up."""


class AgentProcess:
    """A client process. Use as a context manager: it is killed on the way out.

    Args:
        socket: the daemon's.

    Raises:
        EnvironmentFault: it cannot reach the daemon.
    """

    def __init__(self, socket: Path) -> None:
        command = [sys.executable, "-m", "kvd.bench.serve_client", str(socket)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._events: list[tuple[str, float, Any]] = []
        self._came = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="kvd-bench-client", daemon=True)
        self._reader.start()
        try:
            self._wait(lambda: self._count("ready") > 0)
        except BaseException:
            self.close()
            raise

    def send(self, agent: str, text: str, *, max_tokens: int, ban: Mapping[str, float] | None = None) -> None:
        """Begin a turn; the one before is over.

        Args:
            agent: whose.
            text: its whole text.
            max_tokens: new tokens.
            ban: biases of ids that must not end it early.
        """
        assert self._process.stdin is not None
        with self._came:
            self._events.clear()
        call = {"agent": agent, "text": text, "max_tokens": max_tokens, "logit_bias": dict(ban or {})}
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()

    def until(self, kind: str, count: int = 1) -> bool:
        """Wait for so many events of a kind; False when the turn ended before.

        Raises:
            EnvironmentFault: nothing came for long, or the client or its call failed.
        """
        self._wait(lambda: self._count(kind) >= count or self._count("done") > 0)
        return self._count(kind) >= count

    def turn(self) -> Turn:
        """The turn, once it is over.

        Raises:
            EnvironmentFault: as `until`.
        """
        self.until("done")
        return self.so_far()

    def so_far(self) -> Turn:
        """What came of the turn up to now."""
        with self._came:
            events = list(self._events)
        sent, first, texts, chunks, done = (
            [(at, value) for kind, at, value in events if kind == wanted]
            for wanted in ("sent", "first", "text", "chunk", "done")
        )
        if not sent:
            raise InternalError("no turn was sent")
        server: Mapping[str, object] = done[0][1] if done else {}
        completed = server.get("completion_tokens", len(texts))
        assert isinstance(completed, int)
        return Turn(
            sent_s=sent[0][0],
            first_s=first[0][0] if first else None,
            texts_s=tuple(at for at, _ in texts),
            chunks_s=tuple(at for at, _ in chunks),
            tokens=completed,
            server=server,
        )

    def close(self) -> None:
        """`kill -9`; what it still had under way is cancelled by the daemon."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, at, value = json.loads(line)
            with self._came:
                self._events.append((kind, at, value))
                self._came.notify_all()
        with self._came:
            self._ended = True
            self._came.notify_all()

    def _count(self, kind: str) -> int:
        return sum(each == kind for each, _, _ in self._events)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._came:
            while not condition():
                failed = [value for kind, _, value in self._events if kind == "failed"]
                if failed:
                    raise EnvironmentFault(f"a client's call failed: {failed[0]}")
                if self._ended:
                    raise EnvironmentFault("a client of the benchmark ended before its turn did")
                if not self._came.wait(EVENT_TIMEOUT_S):
                    raise EnvironmentFault(f"nothing came of a client for {EVENT_TIMEOUT_S:g} s")


def say(kind: str, value: object = None) -> None:
    """Print an event."""
    print(json.dumps([kind, time.monotonic(), value]), flush=True)


def call(client: Client, wanted: Mapping[str, Any]) -> None:
    """Make one turn and print its events."""
    say("sent")
    options = {"max_tokens": wanted["max_tokens"], "logit_bias": wanted["logit_bias"]}
    with client.generate_stream(wanted["agent"], wanted["text"], **options) as stream:
        for event in stream:
            if isinstance(event, Text):
                say("text")
            elif isinstance(event, FirstToken):
                say("first")
            elif isinstance(event, Prefill):
                say("chunk", event.done_tokens)
        result = stream.result
    facts = {
        "text": result.text,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "completion_tokens": result.completion_tokens,
    }
    say("done", {**result.server, **facts})


def main() -> None:
    """Make the calls that standard input names; see the module docstring."""
    with Client(socket=sys.argv[1], resume_s=0.0) as client:
        try:
            client.hello("kvd-bench")
        except KvdClientError as error:
            say("failed", str(error))
            return
        say("ready")
        for line in sys.stdin:
            try:
                call(client, json.loads(line))
            except KvdClientError as error:
                say("failed", str(error))


if __name__ == "__main__":
    main()
