"""What other threads hand to the engine, and how much of it is seen to between two steps of the model.

Theory of operation. A client that has its answer may ask again at once, so with many clients the inbox is never empty
for long: an engine that took from it until it is would never run the model. One round takes what is there when it
begins, and what comes meanwhile waits for the next. Requests, cancellations and answers of the store change books only,
and cost little. Look-ups (`Call`) read all agents and pages, and one by itself may take as long as a step: they are set
aside, and a round sees to as many as `LOOK_S` allows, to one at least, in the order they came. So look-ups take no more
than that from each step, however many come, and a cancellation never stands behind them.

May import siblings.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator

from kvd.scheduler.messages import Call, Message, Work

LOOK_S = 0.005
"""How long a round sees to look-ups before the model may run: a tenth of a decode step on a CPU, or less."""


class Inbox:
    """Owner: the engine thread, but for `put`.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._looks: deque[Call] = deque()

    def put(self, message: Message) -> None:
        """Hand a message over; from any thread."""
        self._messages.put(message)

    def take(self, wait_s: float = 0.0) -> list[Work]:
        """What is there, without look-ups, in the order it came.

        Args:
            wait_s: wait so long for a message when nothing at all is there; 0 does not wait.
        """
        taken: list[Work] = []
        if wait_s > 0.0 and not self._looks:
            try:
                self._sort(self._messages.get(timeout=wait_s), taken)
            except queue.Empty:
                return taken
        for _ in range(self._messages.qsize()):
            self._sort(self._messages.get_nowait(), taken)
        return taken

    def looks(self) -> Iterator[Call]:
        """Look-ups to see to in this round, which lasts until the time for them is over."""
        began_s = self._clock()
        while self._looks:
            yield self._looks.popleft()
            if self._clock() - began_s >= LOOK_S:
                return

    def get(self) -> Message:
        """The next message of any kind; waits for it. For an engine that is going down."""
        return self._looks.popleft() if self._looks else self._messages.get()

    def rest(self) -> Iterator[Message]:
        """All that is still there, look-ups included. For an engine that is going down."""
        while self._looks or not self._messages.empty():
            yield self.get()

    def _sort(self, message: Message, taken: list[Work]) -> None:
        if isinstance(message, Call):
            self._looks.append(message)
        else:
            taken.append(message)
