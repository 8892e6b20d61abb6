"""Waiting for pages inside turns and jobs: every wait ends by itself, by cancellation, or with a reason.

A request waits for one of six things: pages that are being read, room that is being made, an answer of the store, its
turn to be let in (`kvd.scheduler.reserving`), a step of the model, or, preempted, a place to run again
(`kvd.scheduler.residence`). The last four always come. Room may not: while the
disk refuses writes, RAM can fill with pages and tails that must not be dropped. Such a wait ends with an error once
nobody has got anywhere for `STUCK_S`; and while the disk refuses, whatever others do, once the waits of a request for
room and for its place add up to `PATIENCE_S`: who waits behind others that all end like this must not wait for each.

May import kvd.errors, kvd.ids and kvd.vm.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvd.errors import Busy, Cancelled
from kvd.ids import Namespace, SpaceId
from kvd.vm.errors import NoRoomForCopy
from kvd.vm.events import CutWanted, Event, RetryWanted
from kvd.vm.pager import Pager

if TYPE_CHECKING:
    from kvd.scheduler.agents import Branch
    from kvd.scheduler.core import EngineCore
    from kvd.scheduler.reserving import Reservation
    from kvd.scheduler.sampling import Logits

Stop = Callable[[], str | None]
"""The reason why the request is to end, or None while it may go on."""


def is_never_wanted() -> bool:
    """Whether somebody else needs the place of what cannot be preempted."""
    return False


STUCK_S = 5.0
"""How long a request waits for room while nothing is under way that could make any."""


PATIENCE_S = 10.0
"""How long a request waits in all, for room and for its place, while the disk refuses writes."""


@dataclass(eq=False, slots=True)
class Patience:
    """How long one request has waited while the disk refused writes, over all its waits. Owner: the request.

    Attributes:
        waited_s: in waits that have ended.
    """

    waited_s: float = 0.0
    _since_s: float = 0.0

    def begin(self, core: EngineCore) -> None:
        """A wait begins."""
        self._since_s = core.clock()

    def is_over(self, core: EngineCore) -> bool:
        """Whether the disk refuses, and this wait and those before it were long enough."""
        return core.refusing_since_s is not None and self._spent_s(core, core.refusing_since_s) > PATIENCE_S

    def end(self, core: EngineCore) -> None:
        """The wait ended; what others did while the disk was well does not count."""
        if core.refusing_since_s is not None:
            self.waited_s = self._spent_s(core, core.refusing_since_s)

    def _spent_s(self, core: EngineCore, refusing_since_s: float) -> float:
        return self.waited_s + core.clock() - max(self._since_s, refusing_since_s)


@dataclass(eq=False, slots=True)
class StepWanted:
    """A step of the model that a request waits for; whoever runs it calls `succeed` or `fail`. Engine thread only.

    Attributes:
        branch: its space is active, ready, and has frames for the tokens.
        ids: tokens to compute; in a replay the last one.
        stop: why the request is to end, if it is; a step that has not run then never does.
        wants_logits: of the last token.
        replays: the KV of `ids` exists: only the logits are wanted.
        gives_way: whether the request is to be preempted; a step that has not run is then withdrawn.
        logits: [vocab], if wanted, once it is done.
        error: what it failed with; none of the tokens count then.
        done: it ran.
    """

    branch: Branch
    ids: Sequence[int]
    stop: Stop
    wants_logits: bool = True
    replays: bool = False
    gives_way: Callable[[], bool] = is_never_wanted
    logits: Logits | None = None
    error: Exception | None = None
    done: bool = False

    def __call__(self) -> bool:
        """Whether the request can go on."""
        return self.done or self.stop() is not None or self.gives_way()

    @property
    def is_decode(self) -> bool:
        """One token whose logits are wanted: a row of a batch."""
        return self.wants_logits and len(self.ids) == 1

    def succeed(self, logits: Logits | None) -> None:
        """It ran, and its tokens count."""
        self.logits, self.done = logits, True

    def fail(self, error: Exception) -> None:
        """It ran and failed, and none of its tokens counts."""
        self.error, self.done = error, True

    def result(self) -> Logits | None:
        """Logits [vocab] of the last token when wanted.

        Raises:
            Cancelled: it did not run, since `stop` said so; nobody may ask after a step that was withdrawn.
            Exception: what it failed with.
        """
        if not self.done:
            raise_if_stopped(self.stop)
        if self.error is not None:
            raise self.error
        return self.logits


@dataclass(eq=False, slots=True)
class Parked:
    """A preempted turn has given back what it held, its slot included. Engine thread only.

    Attributes:
        stop: why the request is to end, if it is.
        resumed: it has a slot again.
    """

    stop: Stop
    resumed: bool = field(default=False)

    def __call__(self) -> bool:
        """Whether the turn can go on."""
        return self.resumed or self.stop() is not None


Wait = Callable[[], bool] | StepWanted | Parked | None
"""What a turn or job yields. None: step boundary. A step: resume when it ran. Parked: when it has a slot again.
Otherwise: when it returns True."""

Waiting = Generator[Wait, None, None]


def never() -> str | None:
    """The `Stop` of what cannot be cancelled."""
    return None


def until_ready(core: EngineCore, space: SpaceId, stop: Stop, patience: Patience | None = None) -> Waiting:
    """Wait until a step can run on an active space, or a page of it turns out to be lost.

    Raises:
        Cancelled, Busy: as `until_room`.
    """
    pager = core.pager
    yield from until_room(
        core, space, lambda: pager.is_ready(space) or pager.lost_at(space) is not None, stop, patience
    )


def until_room(
    core: EngineCore, space: SpaceId, ready: Callable[[], bool], stop: Stop, patience: Patience | None = None
) -> Waiting:
    """Wait for pages that the pager was told to bring in or to make room for.

    Args:
        core: the engine's parts.
        space: whose pages.
        ready: what is waited for.
        stop: why the request is to end, if it is.
        patience: of the request; None: this wait has its own.

    Raises:
        Cancelled: `stop` said so.
        Busy: RAM is full of what the disk has not taken, or of what others hold.
    """
    if core.pager.writes_fail:
        core.memory.apply(RetryWanted())  # room may depend on it
    if ready():
        return  # a round of the engine's loop would find out no more
    stuck, patience = _stuck(core), patience or Patience()
    patience.begin(core)
    yield lambda: ready() or stop() is not None or stuck() or patience.is_over(core)
    patience.end(core)
    if ready():
        return
    raise_if_stopped(stop)
    raise no_room(core, core.owner(space)[0].namespace)


def no_room(core: EngineCore, namespace: Namespace) -> Busy:
    """The error of a wait that came to nothing, with what memory is full of.

    Args:
        core: the engine's parts.
        namespace: of the request, which is told of no other one's name.
    """
    figures = core.pager.statistics()
    if core.pager.writes_fail:
        why = f"of what the disk has not taken yet; last failure: {core.memory.statistics.last_write_failure}"
    elif core.pager.writes_held:
        why = f"of pages that the write limit of {core.governor.limit_bytes} bytes a minute holds back"
    elif held := core.pager.quota_held_bytes:
        own = f"the disk quota of namespace {namespace!r}" if namespace in held else ""
        others = "disk quotas of other namespaces" if held.keys() - {namespace} else ""
        why = f"of pages for which there is no room in {' and '.join(filter(None, (own, others)))}"
    else:
        why = "of pages that others hold"
    return Busy(
        f"memory is full {why}",
        retry_after_s=STUCK_S,
        dirty_bytes=figures.dirty_bytes,
        budget_bytes=figures.budget_bytes,
    )


def _stuck(core: EngineCore) -> Callable[[], bool]:
    """Whether nobody has got anywhere for `STUCK_S` and nothing is under way; asked again and again from now on."""
    progress, since_s = core.progress, core.clock()

    def stuck() -> bool:
        nonlocal progress, since_s
        if core.progress != progress:  # others run: what they hold, they will let go of
            progress, since_s = core.progress, core.clock()
        # the figures walk all pages, so they are asked for only when time has passed
        return core.clock() - since_s > STUCK_S and core.pager.statistics().in_flight_bytes == 0

    return stuck


def until_in(core: EngineCore, reservation: Reservation, stop: Stop) -> Waiting:
    """Wait for a place in RAM, of a request that does not leave it before it ends.

    Raises:
        Cancelled: `stop` said so; the caller releases.
    """
    line = core.reservations
    if not line.is_in(reservation):
        yield lambda: line.is_in(reservation) or stop() is not None
        raise_if_stopped(stop)


def apply_when_room(core: EngineCore, event: Event, stop: Stop, meanwhile: Callable[[], None] | None = None) -> Waiting:
    """Apply an event that may need a frame for a copy (a cut inside a page), when there is room for it.

    `meanwhile` is called as `Memory.apply` says.

    Where there is none, others have it: a transfer that ends gives it back, and so does a cut or fork of another
    request, once it is in the log.

    Raises:
        Cancelled: `stop` said so; nothing changed.
        NoRoomForCopy: nobody has got anywhere for `STUCK_S`; nothing changed.
    """
    stuck = _stuck(core)
    while True:
        try:
            core.memory.apply(event, meanwhile)
        except NoRoomForCopy:
            if stuck():
                raise
        else:
            return
        seen = _room_news(core)
        yield lambda seen=seen: _room_news(core) != seen or stop() is not None or stuck()  # type: ignore[misc]
        raise_if_stopped(stop)


def _room_news(core: EngineCore) -> tuple[int, int, int]:
    """Changes when a transfer, a record or a request ended: there may be room for a copy that there was not."""
    return core.memory.statistics.answers, core.stats.records_written, core.stats.requests


def until_written(core: EngineCore, spaces: Sequence[SpaceId], stop: Stop) -> Waiting:
    """Wait until all sealed pages of spaces are in swap, a write of one of them fails, or `stop` says so.

    A write limit that holds back one of them ends it, too: nobody waits for minutes to go by. Others' pages that are
    held back are their affair: these may be on their way.

    While another agent's page cannot be written no write starts, so these pages ask for the next try (P33): what
    becomes of them depends on them alone.
    """
    failures = dict(core.memory.failed_writes)
    while stop() is None:
        dirty = {page for space in spaces for page in core.dirty_pages(space)}
        if any(core.memory.failed_writes.get(page) != failures.get(page) for page in dirty):
            return
        if core.pager.writes_fail:
            for space in spaces:
                core.memory.apply(RetryWanted(space))
        if not dirty or any(core.pager.is_held(space) for space in spaces):
            return
        seen = core.memory.statistics.write_failures
        yield partial(_write_news, core, spaces, stop, seen)


def _write_news(core: EngineCore, spaces: Sequence[SpaceId], stop: Stop, seen_failures: int) -> bool:
    """Whether a wait for writes must look again."""
    if stop() is not None or core.memory.statistics.write_failures != seen_failures:
        return True
    if any(core.pager.is_held(space) for space in spaces):
        return True
    return all(core.pages_durable(space) for space in spaces)


def cut_held(core: EngineCore, branch: Branch, tokens: int, stop: Stop) -> Waiting:
    """Cut text, ids and KV to the first `tokens` ids, whether or not the page that is cut is in RAM.

    Raises:
        Cancelled, Busy, NoRoomForCopy: at most KV of lost pages is gone; text and ids are as they were.
    """
    # the page that is cut must be resident, since its first tokens are copied; nothing else need be
    kept, _ = yield from hold_cut(core, branch, tokens, stop)
    try:
        if kept < min(tokens, branch.computed):
            core.cut_kv(branch, kept)  # a page border: pages that the shorter branch needs are lost
        yield from core.cut_branch(branch, tokens, stop)
    finally:
        release_cut(core, branch)


def hold_cut(core: EngineCore, branch: Branch, tokens: int, stop: Stop) -> Generator[Wait, None, tuple[int, list[str]]]:
    """Bring the page that a cut at `tokens` goes through into RAM and keep it there; `release_cut` lets go of it.

    A lost page that the branch itself needs cuts its KV, never its ids. One that only the cut would need, since a
    window moves back to it, does nothing to the branch.

    Returns:
        How much KV the cut can keep: `tokens` at most, less when pages before it are lost; and what was lost, in words
        for the client.

    Raises:
        Cancelled, Busy: as `until_room`; nothing is kept.
    """
    notes, patience = list[str](), Patience()
    space, pager = branch.space, core.pager
    wanted = min(tokens, branch.computed)
    try:
        while True:
            core.memory.apply(CutWanted(space, wanted))
            yield from until_room(core, space, partial(_can_cut, pager, space, wanted), stop, patience)
            kept = pager.resumable_at(space, wanted)
            if kept == wanted:
                return kept, notes
            lost = pager.lost_at(space)
            if lost is None:
                notes.append(note_of_loss(core, kept, wanted - kept))
            else:
                notes.append(cut_at_lost(core, branch, lost))
            wanted = min(kept, branch.computed)
    except BaseException:
        release_cut(core, branch)
        raise


def _can_cut(pager: Pager, space: SpaceId, tokens: int) -> bool:
    """Whether the pages of a cut are there, or it is known that it cannot go so deep."""
    return pager.can_cut(space) or pager.resumable_at(space, tokens) < tokens


def release_cut(core: EngineCore, branch: Branch) -> None:
    """The cut that `hold_cut` prepared is done or given up."""
    core.memory.apply(CutWanted(branch.space, None))


def cut_at_lost(core: EngineCore, branch: Branch, position: int) -> str:
    """Give up KV from a lost page on; what it means, in words for the client."""
    note = note_of_loss(core, position, branch.computed - position)
    core.cut_kv(branch, position)
    return note


def note_of_loss(core: EngineCore, position: int, tokens: int) -> str:
    """A loss in words for the client."""
    what = "page dropped (swap is off)" if core.swap_off else "page lost"
    return f"{what} at token {position}: {tokens} tokens are computed again"


def raise_if_stopped(stop: Stop) -> None:
    """Raise Cancelled with the reason, if there is one."""
    reason = stop()
    if reason is not None:
        raise Cancelled(reason)


def fault_in(core: EngineCore, branch: Branch, stop: Stop) -> Generator[Wait, None, list[str]]:
    """Make all that a step on a branch needs resident; its space is active. Lost pages cut its KV, never its ids.

    Returns:
        What was lost, in words for the client.

    Raises:
        Cancelled, Busy: as `until_ready`.
    """
    notes, patience = list[str](), Patience()
    while True:
        yield from until_ready(core, branch.space, stop, patience)
        lost = core.pager.lost_at(branch.space)
        if lost is None:
            return notes
        notes.append(cut_at_lost(core, branch, lost))
