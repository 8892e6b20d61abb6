"""RAM and disk as tuples of token values: what the pager's instructions do, checked against what exists."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.ids import FrameId, PageId, SpaceId
from kvd.vm import events as ev

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


class Machine:
    """RAM and disk as the engine would run them; every instruction is checked against what exists."""

    def __init__(self, models: dict[SpaceId, Model]) -> None:
        self.models = models
        self.frames: dict[FrameId, list[Token]] = {}
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
                case ev.CopyTokens(source=source, target=target, tokens=tokens):
                    copied = self.frames[source][:tokens]
                    assert len(copied) == tokens
                    self._new_frame(target)
                    self.frames[target].extend(copied)
                case ev.DropFrame(frame=frame):
                    del self.frames[frame]
                    assert all(frame != busy for busy, _ in self.loads.values()), "a frame is dropped under its load"
                case ev.ForgetPage(page=page):
                    self.swap.pop(page, None)

    def _new_frame(self, frame: FrameId) -> None:
        assert frame not in self.frames, "a frame is handed out twice"
        self.frames[frame] = []
