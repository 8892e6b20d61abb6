"""Who may be in RAM at once: running requests reserve the bytes they may come to need before they hold any.

Theory of operation. A request asks for the whole working set it can grow to. It is let in when that fits beside what
others hold, or when nobody holds anything: what could never fit was refused before. Requests are let in in order:
`interactive` ones, then those that were preempted, then `background` ones, each as they asked; who was overtaken
`MAX_PASSED` times goes first. Nobody overtakes the first because it is smaller. What waits holds nothing, so those it
waits for can always end. Pages that several share are counted for each: never too little.

Preemption. When an `interactive` request is first and does not fit, the places of the background requests that were
let in last are *wanted*, as many as make it fit, and none when all of them would not. The same happens, to anybody but
the one that was let in first, when the budget shrinks below what is held. A request whose place is wanted leaves it at
its next step boundary and asks again later. It keeps the bytes of its open pages, which are nowhere but in RAM. If
these alone stand between the first in line and its place, they are given up: their tokens are computed again.

A *namespace* with a quota (`kvd.vm.budget`) lets in as many of its requests as its quota holds, one at least. Those
that wait for their own namespace alone are overtaken by others, never by a smaller one of theirs; background requests
of it make way for its `interactive` ones.

While the pool thrashes (`kvd.scheduler.thrashing`) two things change. No more requests are let in than its limit says.
And agents that ran last, as many as fit together, are left to go on: a request of another one, whose pages would push
theirs out, is *held back* while others hold pages, until it was overtaken `MAX_OVERTAKEN` times or has waited
`MAX_HELD_TICKS` seconds; then it stands in line as before. An `interactive` request is held back for agents that ran
interactively alone. When nobody holds anything somebody is let in at once.

Owner: the engine thread. May import siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from kvd.ids import DEFAULT_NAMESPACE, Namespace
from kvd.scheduler.state import MAX_PASSED, MAX_PREEMPTIONS
from kvd.scheduler.thrashing import Thrashing

MAX_OVERTAKEN = 4
MAX_HELD_TICKS = 2
"""Reading an agent's pages again costs far less than seconds: more of them would be worse than what they save."""


@dataclass(eq=False, slots=True)
class Reservation:
    """What one request may come to need. Changed by `Reservations` only.

    Attributes:
        reserved_bytes: counted from when it is let in.
        is_background: others may want its place.
        tail_bytes: what it keeps when it leaves its place; None when it cannot leave.
        is_wanted: somebody else needs its place.
        kept_bytes: what it holds while it is out.
        give_up: lets go of the kept bytes.
        preemptions: how often it left its place.
        passed: how often it was overtaken since it asked.
        whose: the agent; None is nobody's, and never held back.
        namespace: the agent's.
        ticks: seconds it has waited since it asked.
    """

    reserved_bytes: int
    is_background: bool = False
    tail_bytes: int | None = None
    is_wanted: bool = False
    kept_bytes: int = 0
    give_up: Callable[[], None] | None = None
    preemptions: int = 0
    passed: int = 0
    whose: Hashable = None
    namespace: Namespace = DEFAULT_NAMESPACE
    ticks: int = 0

    @property
    def is_immune(self) -> bool:
        """It was preempted so often that no request may want its place any more."""
        return self.preemptions >= MAX_PREEMPTIONS


class Reservations:
    """Owner: the engine thread.

    Args:
        usable_bytes: what all together may hold.
        thrashing: whether admission is to slow down, and how far.
        quotas: what namespaces may hold, where that is bounded.

    Attributes:
        changes: grows whenever a place may have changed.
    """

    def __init__(
        self,
        usable_bytes: Callable[[], int],
        thrashing: Thrashing | None = None,
        quotas: Callable[[], Mapping[Namespace, int]] = dict,
    ) -> None:
        self._usable_bytes = usable_bytes
        self._thrashing = thrashing
        self._quotas = quotas
        self._seen_usable_bytes = 0
        self._seen_quotas: Mapping[Namespace, int] = {}
        self._waiting: list[Reservation] = []
        self._held: list[Reservation] = []
        self._keeping: list[Reservation] = []
        self._recent: dict[Hashable, Reservation] = {}  # of the agents let in last, the latest last
        self.changes = 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all requests that were let in, and what preempted ones keep."""
        return sum(each.reserved_bytes for each in self._held) + self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that preempted requests keep."""
        return sum(each.kept_bytes for each in self._keeping)

    @property
    def waiting(self) -> int:
        """Requests that wait to be let in."""
        return len(self._waiting)

    @property
    def holding(self) -> int:
        """Requests that were let in."""
        return len(self._held)

    @property
    def others_hold(self) -> bool:
        """Whether a request that asks now comes beside others."""
        return bool(self._held or self._waiting or self._keeping)

    def ask(
        self,
        reserved_bytes: int,
        *,
        is_background: bool = False,
        tail_bytes: int | None = None,
        whose: Hashable = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> Reservation:
        """Take a place in the line; `release` gives it, or what it turned into, back."""
        asked = Reservation(reserved_bytes, is_background, tail_bytes, whose=whose, namespace=namespace)
        self.ask_again(asked)
        return asked

    def ask_again(self, reservation: Reservation) -> None:
        """Stand in line after `leave`."""
        reservation.passed = reservation.ticks = 0
        self._waiting.append(reservation)
        self._let_in()

    def ask_more(self, reservation: Reservation, more_bytes: int) -> None:
        """One that was let in and holds nothing yet turns out to need more: it is the next to be let in with that."""
        self._remove(reservation)
        reservation.reserved_bytes += more_bytes
        self._waiting.insert(0, reservation)
        self._let_in()

    def is_in(self, reservation: Reservation) -> bool:
        """Whether it was let in."""
        return reservation in self._held

    def place(self, reservation: Reservation) -> int | None:
        """Its place in the line, 1 for the first; None when it does not wait."""
        if reservation not in self._waiting:
            return None
        return sorted(self._waiting, key=lambda each: (self._held_back(each), *_rank(each))).index(reservation) + 1

    def prioritise(self, reservation: Reservation, *, is_background: bool) -> None:
        """Its priority changed, wherever it stands."""
        reservation.is_background = is_background
        self._let_in()

    def keep(self, reservation: Reservation) -> None:
        """It ends while it is out: it stands in line no more, and what it keeps stays until `release`."""
        reservation.give_up = None
        if reservation in self._waiting:
            self._waiting.remove(reservation)
            self._let_in()

    def leave(self, reservation: Reservation, give_up: Callable[[], None] | None = None) -> None:
        """Give the place back, in RAM or in the line, to ask again later.

        Args:
            reservation: of a request that holds no more than its `tail_bytes` from here on.
            give_up: of one that was in: lets go of these, too; called at most once, when somebody needs them.
        """
        was_in = self.is_in(reservation)
        self._remove(reservation)
        if was_in:
            reservation.preemptions += 1
            reservation.kept_bytes, reservation.give_up = reservation.tail_bytes or 0, give_up
            self._keeping.append(reservation)
        self._let_in()

    def release(self, reservation: Reservation) -> None:
        """The request ended, wherever it stood; a second time does nothing."""
        self._remove(reservation)
        self._forget_kept(reservation)
        self._let_in()

    def review(self) -> None:
        """What is usable, or a quota, may have changed."""
        if self._usable_bytes() != self._seen_usable_bytes or self._quotas() != self._seen_quotas:
            self._let_in()

    def tick(self) -> None:
        """A second passed; the limit may have risen, too."""
        for each in self._waiting:
            each.ticks += 1
        self._let_in()

    # ---- who comes and who goes -------------------------------------------------------------------------------------

    def _remove(self, reservation: Reservation) -> None:
        for line in (self._waiting, self._held):
            if reservation in line:
                line.remove(reservation)
        reservation.is_wanted = False

    def _forget_kept(self, reservation: Reservation) -> None:
        if reservation in self._keeping:
            self._keeping.remove(reservation)
        reservation.kept_bytes, reservation.give_up = 0, None

    def _let_in(self) -> None:
        self.changes += 1
        self._seen_usable_bytes, self._seen_quotas = self._usable_bytes(), dict(self._quotas())
        while (first := self._first()) is not None:
            if not (self._fits(first) if self._held else self._make_kept_room(first)):
                break
            self._admit(first)
        wanted = (*self._wanted(), *self._wanted_in_namespaces())
        for each in self._held:
            each.is_wanted = each in wanted

    def _make_kept_room(self, first: Reservation) -> bool:
        """Nobody holds anything: have given up what others keep; False when those who keep it end by themselves soon.

        When nobody keeps anything either, the first is let in whatever it needs.
        """
        while not self._fits(first) and (others := [each for each in self._keeping if each is not first]):
            given = next((each for each in reversed(others) if each.give_up is not None), None)
            if given is None:
                return False
            give_up, given.give_up, given.kept_bytes = given.give_up, None, 0
            self._keeping.remove(given)
            assert give_up is not None
            give_up()
        return True

    def _admit(self, first: Reservation) -> None:
        for other in self._waiting[: self._waiting.index(first)]:
            other.passed += 1
        self._waiting.remove(first)
        self._forget_kept(first)
        self._held.append(first)
        self._note_recent(first)

    def _first(self) -> Reservation | None:
        """Who is let in next; None when nobody waits, or all who do are held back."""
        full: set[Namespace] = set()
        for each in sorted((each for each in self._waiting if not self._held_back(each)), key=_rank):
            if each.namespace not in full and not self._exceeds_quota(each):
                return each
            full.add(each.namespace)  # nobody of it overtakes this one because it is smaller
        return None if self._held else min(self._waiting, key=_rank, default=None)

    def _exceeds_quota(self, each: Reservation) -> bool:
        """Whether a request has to wait for others of its namespace; the only one of it never has."""
        quota_bytes = self._quotas().get(each.namespace)
        if quota_bytes is None:
            return False
        others = [other.reserved_bytes for other in self._held if other.namespace == each.namespace]
        return bool(others) and sum(others) + each.reserved_bytes > quota_bytes

    def _held_back(self, each: Reservation) -> bool:
        """Whether others may overtake it: its pages would push out those of agents that ran last."""
        if self._thrashing is None or not self._thrashing.is_thrashing or each.whose in (None, *self._recent):
            return False
        if each.passed >= MAX_OVERTAKEN or each.ticks >= MAX_HELD_TICKS:
            return False
        # pages of those in the background are theirs to take: it would be wrong to wait for whom it may preempt
        spared = [other for other in self._recent.values() if each.is_background or not other.is_background]
        return bool(spared) and sum(map(_bytes, (each, *spared))) > self._usable_bytes()

    def _note_recent(self, reservation: Reservation) -> None:
        """It runs now. Only agents that fit together can stay in RAM: those let in longest ago go."""
        if reservation.whose is None:
            return
        self._recent.pop(reservation.whose, None)
        self._recent[reservation.whose] = reservation
        while len(self._recent) > 1 and sum(map(_bytes, self._recent.values())) > self._usable_bytes():
            del self._recent[next(iter(self._recent))]

    def _fits(self, first: Reservation, without: tuple[Reservation, ...] = ()) -> bool:
        """Whether there is room for one more; `without`: as if these had left."""
        if self._thrashing is not None and len(self._held) - len(without) >= self._thrashing.limit:
            return False
        gone_bytes = sum(each.reserved_bytes - (each.tail_bytes or 0) for each in without)
        return self.reserved_bytes - first.kept_bytes - gone_bytes + first.reserved_bytes <= self._usable_bytes()

    def _wanted(self) -> tuple[Reservation, ...]:
        """Those whose place is needed, the last let in first."""
        held_bytes = self.reserved_bytes
        goes: list[Reservation] = []
        able = [each for each in reversed(self._held) if each.tail_bytes is not None and each is not self._held[0]]
        for each in sorted(able, key=lambda each: (not each.is_background, each.is_immune)):
            if held_bytes <= self._usable_bytes():
                break
            goes.append(each)
            held_bytes -= each.reserved_bytes - (each.tail_bytes or 0)
        first = self._first()
        if first is None or first.is_background:
            return tuple(goes)
        chosen = list(goes)
        able = [each for each in reversed(self._held) if each.is_background and not each.is_immune]
        for each in able:
            if self._fits(first, tuple(chosen)):
                break
            if each.tail_bytes is not None and each not in chosen:
                chosen.append(each)
        # when nobody is left who holds anything, the first in line is let in whatever it needs
        return tuple(chosen if self._fits(first, tuple(chosen)) or len(chosen) == len(self._held) else goes)

    def _wanted_in_namespaces(self) -> list[Reservation]:
        """The same for those that wait for their own namespace: places of its background requests, if that helps."""
        wanted: list[Reservation] = []
        for namespace, quota_bytes in self._quotas().items():
            first = min((each for each in self._waiting if each.namespace == namespace), key=_rank, default=None)
            if first is None or first.is_background or not self._exceeds_quota(first):
                continue
            held = [each for each in self._held if each.namespace == namespace]
            left_bytes = sum(map(_bytes, held))
            chosen: list[Reservation] = []
            for each in reversed(held):
                if left_bytes + first.reserved_bytes <= quota_bytes:
                    break
                if each.is_background and not each.is_immune and each.tail_bytes is not None:
                    chosen.append(each)
                    left_bytes -= each.reserved_bytes
            is_enough = left_bytes + first.reserved_bytes <= quota_bytes or len(chosen) == len(held)
            if is_enough and self._fits(first, tuple(chosen)):
                wanted += chosen
        return wanted


def _bytes(reservation: Reservation) -> int:
    return reservation.reserved_bytes


def _rank(reservation: Reservation) -> tuple[bool, bool, bool]:
    """Less is sooner; of equals the one that asked first."""
    return (
        reservation.passed < MAX_PASSED,
        reservation.is_background,
        not reservation.preemptions,
    )
