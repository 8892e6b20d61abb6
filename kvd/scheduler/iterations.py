"""What the next iteration of the model computes: all decode steps together, or one prefill chunk. Pure.

Theory of operation. A chunk takes tens of times as long as a decode step, so while one agent reads a long prompt the
others would hardly get a token. For each chunk that runs while others decode, they are owed decode time: with the
decode share s, s / (1 - s) times what the chunk took, as measured. The next chunk waits until that is paid, and for one
decode step at least. Nobody is owed anything while nobody decodes.

Several prefills take turns, the one served longest ago first. One that has had no chunk yet goes before all others, so
that a short prompt need not wait for a round of long ones; but not twice in a row, or a stream of short prompts would
hold up the long ones.

May import kvd.ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.ids import RequestId


@dataclass(frozen=True, slots=True)
class Iteration:
    """Requests whose steps run now; `is_chunk`: it is one prefill chunk."""

    requests: tuple[RequestId, ...]
    is_chunk: bool


class IterationPlanner:
    """Owner: the engine thread.

    Args:
        decode_share: part of the time that decode steps get at least while others prefill, below 1.

    Attributes:
        owed_s: decode time to come before the next chunk may run.
    """

    def __init__(self, *, decode_share: float) -> None:
        self._ratio = decode_share / (1.0 - decode_share)
        self._served: dict[RequestId, int] = {}
        self._chunks = 0
        self._last_was_chunk = False
        self._last_jumped = False
        self.owed_s = 0.0

    def plan(self, decodes: Sequence[RequestId], prefills: Sequence[RequestId]) -> Iteration:
        """Choose what runs now.

        Args:
            decodes: requests that want a step of one token.
            prefills: requests that want a chunk, in the order they started; one of both is not empty.
        """
        if not decodes:
            self.owed_s = 0.0
        if decodes and (not prefills or self._last_was_chunk or self.owed_s > 0.0):
            return Iteration(tuple(decodes), is_chunk=False)
        return Iteration((self._next_prefill(prefills),), is_chunk=True)

    def ran(self, iteration: Iteration, seconds: float, *, decoding: bool) -> None:
        """An iteration took `seconds`; `decoding`: others wanted decode steps meanwhile."""
        self._last_was_chunk = iteration.is_chunk
        if not iteration.is_chunk:
            self.owed_s = max(0.0, self.owed_s - seconds)
            return
        request = iteration.requests[0]
        self._last_jumped = request not in self._served
        self._chunks += 1
        self._served[request] = self._chunks
        self.owed_s = self._ratio * seconds if decoding else 0.0

    def forget(self, request: RequestId) -> None:
        """The request ended."""
        self._served.pop(request, None)

    def _next_prefill(self, prefills: Sequence[RequestId]) -> RequestId:
        known = [request for request in prefills if request in self._served]
        fresh = [request for request in prefills if request not in self._served]
        if fresh and not (known and self._last_jumped):
            return fresh[0]
        return min(known, key=self._served.__getitem__)
