"""RAM and disk as tuples of token values: what the pager's instructions do, checked against what exists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvd.ids import DEFAULT_NAMESPACE, FrameId, Namespace, PageId, SpaceId
from kvd.vm import events as ev
from kvd.vm.address_space import AddressSpace
from kvd.vm.eviction import EvictionPolicy
from kvd.vm.page import Page, PageState

PAGE_TOKENS = 4

Token = tuple[int, int]
"""(group, serial number): no two appended tokens are equal."""


@dataclass
class Model:
    """What the test knows of one space: the truth the pager is held to."""

    page_bytes: tuple[int, ...]
    serials: list[int] = field(default_factory=list)
    log: list[int] = field(default_factory=list)  # serials as of the last commit
    active: bool = False
    pinned: bool = False
    namespace: Namespace = DEFAULT_NAMESPACE


class Machine:
    """RAM and disk as the engine would run them; every instruction is checked against what exists."""

    def __init__(self, models: dict[SpaceId, Model]) -> None:
        self.models = models
        self.frames: dict[FrameId, list[Token]] = {}
        self.packed: dict[PageId, tuple[Token, ...]] = {}
        self.swap: dict[PageId, tuple[Token, ...]] = {}
        self.writes: dict[PageId, tuple[Token, ...]] = {}
        self.loads: dict[PageId, tuple[FrameId, tuple[Token, ...] | None]] = {}
        self.tails: dict[PageId, SpaceId] = {}
        self.loads_started = 0

    def carry_out(self, instructions: tuple[ev.Instruction, ...]) -> None:
        """Carry instructions out in order."""
        for instruction in instructions:
            self.loads_started += isinstance(instruction, ev.LoadPage | ev.LoadTail)
            match instruction:
                case ev.MapFrame(page=page, frame=frame):
                    self._new_frame(frame)
                case ev.LoadPage(page=page, frame=frame):
                    self._new_frame(frame)
                    assert page not in self.loads
                    self.loads[page] = (frame, self.swap.get(page))
                case ev.LoadTail(page=page, frame=frame, group=group, space=space, tokens=tokens):
                    self._new_frame(frame)
                    log = self.models[space].log
                    start = len(self.models[space].serials) - tokens
                    assert start % PAGE_TOKENS == 0
                    content = tuple((int(group), serial) for serial in log[start : start + tokens])
                    assert len(content) == tokens, "the log does not hold the tail"
                    self.loads[page] = (frame, content)
                    self.tails[page] = space
                case ev.WritePage(page=page, frame=frame):
                    assert page not in self.writes
                    assert page not in self.swap, "a sealed page is written once"
                    self.writes[page] = tuple(self.frames[frame])
                case ev.CopyTail(source=source, frame=frame, page=page, tokens=tokens):
                    whole = self.packed[source] if frame is None else self.frames[frame]
                    self._pack(page, whole, tokens)
                case ev.PackTail(page=page, frame=frame, tokens=tokens):
                    self._pack(page, self.frames.pop(frame), tokens)
                case ev.UnpackTail(page=page, frame=frame, tokens=tokens):
                    self._new_frame(frame)
                    self.frames[frame].extend(self.packed.pop(page))
                    assert len(self.frames[frame]) == tokens
                case ev.CutPacked(page=page, tokens=tokens):
                    self._pack(page, self.packed.pop(page), tokens)
                case ev.DropPacked(page=page):
                    del self.packed[page]
                case ev.DropFrame(frame=frame):
                    del self.frames[frame]
                    assert all(frame != busy for busy, _ in self.loads.values()), "a frame is dropped under its load"
                case ev.ForgetPage(page=page):
                    self.swap.pop(page, None)

    def _pack(self, page: PageId, whole: Sequence[Token], tokens: int) -> None:
        assert page not in self.packed
        assert 0 < tokens <= len(whole)
        self.packed[page] = tuple(whole[:tokens])

    def _new_frame(self, frame: FrameId) -> None:
        assert frame not in self.frames, "a frame is handed out twice"
        self.frames[frame] = []


class Watched:
    """A policy whose order is held to the laws of all policies, as far as the pager asks for it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.name = policy.name

    def order(self, spaces: Iterable[AddressSpace]) -> Iterator[Page]:
        """Nothing that is held, nothing twice; of private pages of one kind and space the tail end first."""
        everything = list(spaces)
        places = {
            page.page_id: (space.space, number)
            for space in everything
            for number, page in enumerate(space.pages_tail_first())
            if len(page.users) == 1
        }
        seen: set[PageId] = set()
        last: dict[tuple[SpaceId, bool], int] = {}
        for page in self.policy.order(everything):
            assert page.page_id not in seen
            seen.add(page.page_id)
            assert not page.held
            assert page.needed_by, "what nobody sees goes by itself"
            is_dirty = not page.droppable
            if is_dirty:
                assert page.state in (PageState.SEALED_DIRTY, PageState.WRITING)
            if page.page_id in places:
                space, number = places[page.page_id]
                assert number > last.get((space, is_dirty), -1), "the tail goes before the head"
                assert is_dirty or (space, True) not in last, "clean goes before dirty"
                last[space, is_dirty] = number
            yield page
