"""What a turn holds of the machine, and how it gives all of it back in the middle: preemption.

Theory of operation. A turn needs a place among those whose working sets fit together (`kvd.scheduler.reserving`), a
slot among those that run (`kvd.scheduler.state`), and its space active, so that its pages come and stay. Whoever may
need either of the first two wants it back through `is_wanted`. The turn looks at its step boundaries (between prefill
chunks, before each decode step, while pages come in), and swaps itself out: the space is deactivated, so its pages may
be evicted, written first where they are dirty; the place is left but for the open pages, whose KV no disk has; and the
turn yields `Parked`, at which the engine takes its slot. All it has computed and sampled stays: ids, sampler, the text
that waits for a stop string. With a slot again it stands in line for a place, faults its pages in, has computed again
what was lost meanwhile, and goes on with the same next step. Its agent belongs to it all the while, so nobody else sees
a branch in mid-turn.

A turn that has not been let in yet holds only a slot and gives that back alone; nobody is told, since it still waits.

Owner: the engine thread. May import kvd.vm.events and siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.reserving import Reservation
from kvd.scheduler.waiting import Parked, Wait, Waiting, cut_at_lost, no_room, raise_if_stopped, until_room
from kvd.vm.events import Activated, Deactivated

if TYPE_CHECKING:
    from kvd.scheduler.agents import Branch
    from kvd.scheduler.core import EngineCore
    from kvd.scheduler.turn import TurnState


@dataclass(eq=False, slots=True)
class Residence:
    """Owner: the turn.

    Args:
        core: the engine's parts.
        state: request, cancellation, times.
        reservation: the turn's place, or its place in the line.
        needed_bytes: what was reserved, but for copies: working set, and what other agents had pinned.
        needs: the same as of now; raises BudgetExceeded when that is more than there can be.

    Attributes:
        is_active: its branch's pages are held in RAM.
        was_in: it had its place at least once.
        is_away: it is preempted.
    """

    core: EngineCore
    state: TurnState
    reservation: Reservation
    needed_bytes: int
    needs: Callable[[], int]
    is_active: bool = field(default=False, init=False)
    was_in: bool = field(default=False, init=False)
    is_away: bool = field(default=False, init=False)
    _branch: Branch | None = field(default=None, init=False)

    @property
    def is_wanted(self) -> bool:
        """Somebody else needs the turn's place or its slot."""
        return self.state.slot_wanted or self.reservation.is_wanted

    def until_in(self) -> Waiting:
        """Wait until the turn's working set fits beside those of the others. Nothing is held before but the slot.

        Raises:
            Cancelled: the caller closes.
            Busy: the disk refuses, and others kept what room there is for too long.
            BudgetExceeded: meanwhile so much was pinned that it can never fit.
        """
        line, patience = self.core.reservations, self.state.patience
        patience.begin(self.core)
        while not line.is_in(self.reservation) or self._lacks_room_for_pins():
            yield (
                lambda: (
                    line.is_in(self.reservation)
                    or self.state.slot_wanted
                    or self.state.stop() is not None
                    or patience.is_over(self.core)
                )
            )
            raise_if_stopped(self.state.stop)
            if patience.is_over(self.core) and not line.is_in(self.reservation):
                raise no_room(self.core, self.state.request.ref.namespace)
            if self.state.slot_wanted and not line.is_in(self.reservation):
                line.leave(self.reservation)
                yield from self._park()
        patience.end(self.core)
        self.was_in = True

    def step_aside(self) -> Waiting:
        """Give way before any page is held, and come back; nobody is told, as in `until_in`.

        Raises:
            Cancelled: the caller closes.
        """
        while self.is_wanted:
            self.core.reservations.leave(self.reservation)
            yield from self._park()
            yield from self.until_in()

    def activate(self, branch: Branch) -> Generator[Wait, None, list[str]]:
        """Hold a branch's pages from here on, and bring in those that the next step sees.

        Returns:
            What was lost, in words for the client.

        Raises:
            Cancelled, Busy: as `until_room`; the caller closes.
        """
        self._branch, self.is_active = branch, True
        self.core.memory.apply(Activated(branch.space))
        self.core.paging.activated()
        notes = yield from self._fault_in()
        while self.is_wanted:
            notes += yield from self.give_way()
        return notes

    def give_way(self) -> Generator[Wait, None, list[str]]:
        """Swap the turn out, since its place is wanted, and wait until it can go on where it was.

        Returns:
            What was lost meanwhile, in words: KV at the end of the branch, never ids.

        Raises:
            Cancelled: it was to end meanwhile; its pages are not held.
            Busy: as `until_room`.
        """
        assert self._branch is not None
        core, state, branch, notes = self.core, self.state, self._branch, list[str]()
        began_s, loaded_before_s = core.clock(), state.times.swap_in_s
        state.preemptions += 1
        core.stats.preemptions += 1
        state.request.emit({"type": "preempted"})
        core.journal.turn_moved(state, resumed=False)
        self.is_away = True
        try:
            while self.is_wanted:
                self.deactivate()
                core.reservations.leave(self.reservation, partial(self._drop_tails, branch))
                yield from self._park()
                yield from self.until_in()
                self.is_active = True
                core.memory.apply(Activated(branch.space))
                notes += yield from self._fault_in()
        except BaseException:
            # what it has is committed now, the open pages included: nobody may take them from under that
            core.reservations.keep(self.reservation)
            raise
        finally:
            self.is_away = False
            state.times.away_s += core.clock() - began_s
            state.times.preempted_s += core.clock() - began_s - (state.times.swap_in_s - loaded_before_s)
        state.request.emit({"type": "resumed"})
        core.journal.turn_moved(state, resumed=True)
        return notes

    def until_ready(self) -> Waiting:
        """Wait until a step can run, a page turns out to be lost, or the turn's place is wanted.

        Raises:
            Cancelled, Busy: as `until_room`.
        """
        assert self._branch is not None
        pager, space = self.core.pager, self._branch.space
        yield from until_room(
            self.core,
            space,
            lambda: self.is_wanted or pager.is_ready(space) or pager.lost_at(space) is not None,
            self.state.stop,
            self.state.patience,
        )

    def deactivate(self) -> None:
        """Hold the pages no longer; a second time does nothing."""
        if self.is_active:
            assert self._branch is not None
            self.is_active = False
            self.core.memory.apply(Deactivated(self._branch.space))

    def prioritise(self, *, is_background: bool) -> None:
        """Who may want the turn's place has changed."""
        self.core.reservations.prioritise(self.reservation, is_background=is_background)

    def close(self) -> None:
        """The turn ended, however: the place goes to others."""
        self.core.reservations.release(self.reservation)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _park(self) -> Waiting:
        """Without a slot until the engine gives it one, and then in line for a place again."""
        self.state.slot_wanted = False
        yield Parked(self.state.stop)
        raise_if_stopped(self.state.stop)
        self.core.reservations.ask_again(self.reservation)

    def _lacks_room_for_pins(self) -> bool:
        """Whether the turn, just let in, must wait again, since agents were pinned while it waited."""
        more_bytes = self.needs() - self.needed_bytes
        if more_bytes <= 0:
            return False
        self.needed_bytes += more_bytes
        self.core.reservations.ask_more(self.reservation, more_bytes)
        return not self.core.reservations.is_in(self.reservation)

    def _fault_in(self) -> Generator[Wait, None, list[str]]:
        """Make all that the next step needs resident; ends early when the place is wanted. Lost pages cut KV."""
        assert self._branch is not None
        branch, notes = self._branch, list[str]()
        with self.waiting_for_pages():
            while True:
                yield from self.until_ready()
                lost = self.core.pager.lost_at(branch.space)
                if lost is None:
                    return notes
                notes.append(cut_at_lost(self.core, branch, lost))

    @contextmanager
    def waiting_for_pages(self) -> Iterator[None]:
        """The turn waits for pages, for as long as the block takes."""
        core, began_s = self.core, self.core.clock()
        core.page_waits += 1
        try:
            yield
        finally:
            core.page_waits -= 1
            waited_s = core.clock() - began_s
            self.state.times.swap_in_s += waited_s
            core.stats.swap_in_waited_s += waited_s

    def _drop_tails(self, branch: Branch) -> None:
        """Somebody cannot run for the open pages: their KV goes."""
        self.core.cut_kv(branch, branch.computed // PAGE_TOKENS * PAGE_TOKENS)
