"""A pager with a disk that answers only when told to."""

from __future__ import annotations

from itertools import count

from kvd.ids import PageId, PageKey, SpaceId
from kvd.vm import events as ev
from kvd.vm.eviction import POLICIES
from kvd.vm.pager import Pager

P = 4
PAGE_BYTES = 100
A, B, C, D = (SpaceId(n) for n in range(1, 5))


class Desk:
    """A pager and a disk that answers only when told to; every event is followed by the integrity check."""

    def __init__(
        self,
        budget_pages: float,
        *,
        groups: int = 1,
        writes: int = 2,
        loads: int = 4,
        windows: tuple[int | None, ...] | None = None,
        policy: str = "lru",
        high_free_percent: int = 0,
        low_free_percent: int = 0,
        pin_limit: int | float = 0.5,
    ) -> None:
        self.groups = groups
        numbers = count(1)
        self.pager = Pager(
            int(budget_pages * PAGE_BYTES),
            group_count=groups,
            new_page_id=lambda: PageId(f"page-{next(numbers)}"),
            max_writes_in_flight=writes,
            max_loads_in_flight=loads,
            page_tokens=P,
            windows=windows,
            policy=POLICIES[policy](),
            high_free_percent=high_free_percent,
            low_free_percent=low_free_percent,
            pin_limit=pin_limit,
        )
        self.writes: list[PageId] = []
        self.loads: list[PageId] = []

    def send(self, event: ev.Event) -> tuple[ev.Instruction, ...]:
        """Handle one event and note the transfers it starts."""
        out = self.pager.handle(event)
        self.pager.check_integrity()
        self.writes += [i.page for i in out if isinstance(i, ev.WritePage)]
        self.loads += [i.page for i in out if isinstance(i, ev.LoadPage | ev.LoadTail)]
        return out

    def settle(self) -> list[ev.Instruction]:
        """The disk answers everything, oldest first; returns what that led to."""
        out: list[ev.Instruction] = []
        while self.writes or self.loads:
            if self.writes:
                out += self.send(ev.WriteDone(self.writes.pop(0)))
            if self.loads:
                out += self.send(ev.LoadDone(self.loads.pop(0)))
        return out

    def create(self, *spaces: SpaceId) -> None:
        """Empty spaces."""
        for space in spaces:
            self.send(ev.SpaceCreated(space, (PAGE_BYTES,) * self.groups))

    def append(self, space: SpaceId, tokens: int) -> tuple[ev.Instruction, ...]:
        """One step's tokens, for which the space must be ready."""
        assert self.pager.is_ready(space)
        sealed = (self.pager.tokens(space) % P + tokens) // P
        keys = tuple(
            tuple(PageKey(f"{space}.{g}.{self.pager.tokens(space)}.{n}") for n in range(sealed))
            for g in range(self.groups)
        )
        return self.send(ev.TokensAppended(space, tokens, keys))

    def turn(self, space: SpaceId, tokens: int, *, commit: bool = True) -> None:
        """A whole turn with a fast disk, left inactive."""
        self.send(ev.Activated(space))
        self.send(ev.GrowthWanted(space, tokens))
        self.settle()
        self.append(space, tokens)
        self.settle()
        if commit:
            self.send(ev.TurnCommitted(space))
        self.send(ev.Deactivated(space))

    def states(self, space: SpaceId, group: int = 0) -> list[str]:
        """States of a segment's pages, the tail's last."""
        view = self.pager.segments(space)[group]
        return [str(p.state) for p in view.pages] + ([str(view.tail.state)] if view.tail else [])


def pages_of(out: tuple[ev.Instruction, ...] | list[ev.Instruction], kind: type) -> list[PageId]:
    """Pages named by the instructions of one kind."""
    return [i.page for i in out if isinstance(i, kind)]
