"""What happens in the engine, told as events for `events.subscribe`, and what each agent's turns came to.

Theory of operation. Turns and operations are told as they begin and end. Pages come and go by the hundred: the pager
sums up whose moved and why (`kvd.vm.moves`), this gathers the sums for `GATHER_S`, and tells each as one event. An
event of an agent is told after what was gathered of its pages, so a fault stands before the hit that needed it. States
that change (disk, memory, limits) are looked at once in each round of the engine's loop and told when they differ.

With nobody subscribed all of it goes into the ring just the same: that costs a dictionary and an append for each event,
and for each page a look-up (`docs/decisions/0033-events-and-the-monitor.md`).

Owner: the engine thread. May import kvd.errors, kvd.ids, kvd.vm.moves and siblings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvd.errors import KvdError
from kvd.ids import PageId, RequestId
from kvd.scheduler.event_ring import EventRing
from kvd.scheduler.requests import AgentRef, TurnRequest, TurnResult

if TYPE_CHECKING:
    from kvd.ops.logs import RequestLine
    from kvd.scheduler.core import EngineCore
    from kvd.scheduler.messages import HeldRequest
    from kvd.scheduler.turn import TurnState

GATHER_S: Final = 0.25
"""How long what happens to pages of one agent for one reason is one event."""

KINDS: Final = (
    "turn_queued",
    "turn_begun",
    "hit",
    "miss",
    "turn_preempted",
    "turn_resumed",
    "turn_ended",
    "operation",
    "eviction",
    "fault",
    "prefetch",
    "swap_out",
    "page_lost",
    "page_files_lost",
    "disk",
    "memory",
    "budget",
    "reload",
    "draining",
)
"""All kinds of events but those that a subscription tells of itself."""


COUNTS: Final = ("prompt_tokens", "cached_tokens", "completion_tokens")


@dataclass(slots=True)
class _Gathered:
    """Page events of one agent, of one kind, for one reason, that are not told yet."""

    due_s: float
    facts: dict[str, object]
    pages: int = 0
    moved_bytes: int | None = None


_Key = tuple[AgentRef | None, str, str]


class Journal:
    """Owner: the engine thread.

    Args:
        core: the engine's parts.

    Attributes:
        ring: where events go.
    """

    def __init__(self, core: EngineCore) -> None:
        self.ring = EventRing()
        self._core = core
        self._gathered: dict[_Key, _Gathered] = {}
        self._matched: dict[RequestId, dict[str, object]] = {}
        self._states = self._look()

    # ---- turns ------------------------------------------------------------------------------------------------------

    def turn_queued(self, request: TurnRequest) -> None:
        """A turn came."""
        self.tell(
            "turn_queued",
            request.ref,
            request=int(request.request_id),
            method="inject" if request.append else request.method,
            priority=request.priority,
        )

    def turn_begun(self, state: TurnState) -> None:
        """A turn has its slot and its place in RAM."""
        request = state.request
        self.tell("turn_begun", request.ref, request=int(request.request_id), queued_s=round(state.times.queued_s, 6))

    def matched(self, state: TurnState, facts: Mapping[str, object], divergence: Mapping[str, object] | None) -> None:
        """A turn's prompt was compared with what there is.

        Args:
            state: the turn's.
            facts: of its `matched` event.
            divergence: where the texts part, if they do.
        """
        request = state.request
        told = {**facts, "divergence": divergence}
        self._matched[request.request_id] = told
        state.prompt_tokens = int(str(facts["prompt_tokens"]))
        is_miss = facts["match"] == "diverge" or (facts["match"] == "new" and not facts["cached_tokens"])
        self.tell("miss" if is_miss else "hit", request.ref, request=int(request.request_id), **told)

    def turn_moved(self, state: TurnState, *, resumed: bool) -> None:
        """A turn was swapped out for another, or goes on."""
        request = state.request
        self.tell("turn_resumed" if resumed else "turn_preempted", request.ref, request=int(request.request_id))

    def ended(self, held: HeldRequest, line: RequestLine, result: object, error: KvdError | None) -> None:
        """A client's request is answered."""
        request = held.request
        if not isinstance(request, TurnRequest):
            outcome, total_s = line.outcome, round(line.total_s, 6)
            self.tell("operation", request.ref, operation=request.operation, outcome=outcome, total_s=total_s)
            return
        turn = result if isinstance(result, TurnResult) else None
        matched = self._matched.pop(request.request_id, {})
        data = {} if error is None else error.data  # of a cancelled turn, what it came to
        times = held.state.times if held.state is not None else None
        counts = {name: getattr(line, name) if turn is not None else data.get(name) for name in (*COUNTS, "durable")}
        self.tell(
            "turn_ended",
            request.ref,
            request=int(request.request_id),
            method=line.method,
            outcome=line.outcome,
            finish_reason=line.finish_reason,
            **counts,
            swapped_in_pages=line.swapped_in_pages,
            **{
                name: None if times is None else round(getattr(times, name), 6)
                for name in ("queued_s", "swap_in_s", "prefill_s", "decode_s")
            },
            ttft_s=None if line.ttft_s is None else round(line.ttft_s, 6),
            total_s=round(line.total_s, 6),
        )
        if matched:
            self._note_turn(request, {**matched, **counts}, line.outcome)

    def _note_turn(self, request: TurnRequest, facts: dict[str, object], outcome: str) -> None:
        """Show a turn as its agent's last, and add it to the sums, but for tokens that a resumed stream gave it."""
        numbers = {name: int(str(facts[name] or 0)) for name in COUNTS}
        made = {**numbers, "completion_tokens": max(0, numbers["completion_tokens"] - request.given_tokens)}
        agent = self._core.agents.known(request.ref)
        for figures in (self._core.stats.turns, *([] if agent is None else [agent.turns])):
            figures.note(**made)
        if agent is not None:
            del facts["durable"]
            # as exact as the events' clock: whoever has both compares them, and this is not before the turn's own
            agent.turns.last = {"time_s": round(time.time(), 6), "outcome": outcome, **facts, **numbers}

    # ---- pages ------------------------------------------------------------------------------------------------------

    def page_lost(self, page: PageId, fault: str, reason: str) -> None:
        """A page could not be read; called while its spaces still map it."""
        space = self._core.pager.owner(page)
        ref = None if space is None or not self._core.is_open(space) else self._core.owner(space)[0]
        self._add((ref, "page_lost", fault), {"fault": fault, "reason": reason}, 1, None)

    def gather(self) -> None:
        """Take over what the pager has summed up; called before a space is closed, too."""
        if not self._core.pager.has_moved:
            return
        for moved in self._core.pager.take_moves():
            if self._core.is_open(moved.space):
                ref, _ = self._core.owner(moved.space)
                facts: dict[str, object] = {"reason": moved.reason} if moved.reason else {}
                self._add((ref, moved.move, moved.reason), facts, moved.pages, moved.moved_bytes)

    def _add(self, key: _Key, facts: dict[str, object], pages: int, moved_bytes: int | None) -> None:
        found = self._gathered.get(key)
        if found is None:
            found = self._gathered[key] = _Gathered(self._core.clock() + GATHER_S, facts)
        found.pages += pages
        if moved_bytes is not None:
            found.moved_bytes = (found.moved_bytes or 0) + moved_bytes

    def _tell_gathered(self, key: _Key) -> None:
        found = self._gathered.pop(key)
        ref, kind, _ = key
        amount = {} if found.moved_bytes is None else {"bytes": found.moved_bytes}
        self._publish(kind, ref, {"pages": found.pages, **amount, **found.facts})

    # ---- telling ----------------------------------------------------------------------------------------------------

    def tell(self, kind: str, ref: AgentRef | None = None, **facts: object) -> None:
        """Publish an event, after what was gathered of the same agent's pages.

        Args:
            kind: one of `KINDS`.
            ref: whose; None for the daemon as a whole.
            facts: of values that a message can have.
        """
        self.gather()
        if ref is not None and self._gathered:
            for key in [key for key in self._gathered if key[0] == ref]:
                self._tell_gathered(key)
        self._publish(kind, ref, facts)

    def tick(self) -> None:
        """Tell what was gathered for long enough, and states that changed; once a round of the engine's loop."""
        self.gather()
        if self._gathered:
            now_s = self._core.clock()
            for key in [key for key, found in self._gathered.items() if found.due_s <= now_s]:
                self._tell_gathered(key)
        states = self._look()
        if states != self._states:
            before, self._states = self._states, states
            self._tell_states(before, states)

    def patience_s(self, most_s: float) -> float:
        """How long the engine may sleep: until something gathered is to be told, `most_s` at most."""
        if not self._gathered:
            return most_s
        return min(most_s, max(0.0, min(found.due_s for found in self._gathered.values()) - self._core.clock()))

    def _publish(self, kind: str, ref: AgentRef | None, facts: Mapping[str, object]) -> None:
        whose = {} if ref is None else {"agent": ref.agent, "namespace": ref.namespace}
        self.ring.publish(kind, {**whose, **facts})

    def _look(self) -> tuple[object, ...]:
        budget = self._core.pager.budget
        quotas = tuple(budget.quotas.items()) if budget.quotas else ()
        return self._core.store.health.state, self._core.pressure.level, budget.budget_bytes, quotas

    def _tell_states(self, before: tuple[object, ...], now: tuple[object, ...]) -> None:
        core = self._core
        if before[0] != now[0]:
            self._publish("disk", None, core.store.health.facts())
        if before[1] != now[1]:
            pressure = core.pressure
            facts = {"footprint_bytes": pressure.footprint_bytes, "limit_bytes": pressure.hard_bytes}
            self._publish("memory", None, {"memory_pressure": pressure.level, **facts})
        if before[2:] != now[2:]:
            budget = core.pager.budget
            self._publish(
                "budget", None, {"budget_bytes": budget.budget_bytes, "namespace_quotas": dict(budget.quotas)}
            )


__all__ = ["GATHER_S", "KINDS", "Journal"]
