"""The pager, its hands, the frame pool and the swap thread on a folder, without a model: pages go out and come in.

It is the daemon's own path, from the event that a space is wanted to frames that a step could read; only the engine's
loop is replaced, by one that does nothing else. Frames hold random bytes. May import kvd.

Owner: one thread.
"""

from __future__ import annotations

import os
import queue
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvd.config import DEFAULT_BUDGET_BYTES
from kvd.ids import Fingerprint, GroupId, Namespace, PageId, PageKey, SpaceId
from kvd.quant.spec import PAGE_TOKENS, PageLayout, named_format
from kvd.scheduler.memory import Memory, SpaceFacts
from kvd.scheduler.store_door import StoreDoor
from kvd.store.frame_memory import RecycledMappings
from kvd.store.frame_pool import FramePool
from kvd.store.fs import RealFileSystem
from kvd.store.layout import DataFolder
from kvd.store.recovery import recover
from kvd.store.swap_ops import SwapResult
from kvd.store.swap_store import SwapStore
from kvd.store.swap_thread import SwapThread
from kvd.vm import events as ev
from kvd.vm.pager import Pager

FINGERPRINT: Final = Fingerprint("0" * 32)
QUOTA_BYTES: Final = 1 << 50
MAX_WRITES: Final = 2
MAX_LOADS: Final = 8
"""Transfers in flight, as the daemon has them with a large budget (`kvd.assembly.transfer_bounds`)."""


def smollm2_layout(kv_format: str) -> PageLayout:
    """Pages with the geometry of SmolLM2-135M: 30 layers, 3 KV heads of 64."""
    page_format = named_format(kv_format, k_dim=64, v_dim=64, layer_count=30)
    return PageLayout(layer_indices=tuple(range(30)), kv_heads=3, k_dim=64, v_dim=64, page_format=page_format)


class Rig:
    """A data folder with agents of equal length. Use as a context manager.

    Args:
        root: the data folder; made if it is missing.
        layout: of all pages.
        tokens: of an agent; rounded up to whole pages.
    """

    def __init__(self, root: Path, layout: PageLayout, tokens: int) -> None:
        self.layout = layout
        self.pages = -(-tokens // PAGE_TOKENS)
        self._folder = DataFolder(root, RealFileSystem())
        self._folder.open()
        self._results: queue.SimpleQueue[SwapResult] = queue.SimpleQueue()

        def layouts(group: int, format_id: str) -> PageLayout | None:
            return layout if (group, format_id) == (0, layout.format_id) else None

        report = recover(self._folder, FINGERPRINT, layouts, self._folder.fs)
        store = SwapStore(
            folder=self._folder,
            fingerprint=FINGERPRINT,
            fs=self._folder.fs,
            quota_bytes=QUOTA_BYTES,
            layouts=layouts,
            recovered=report,
        )
        self._swap = SwapThread(store=store, deliver=self._results.put)
        budget_bytes = DEFAULT_BUDGET_BYTES
        self._pager = Pager(
            budget_bytes,
            group_count=1,
            new_page_id=lambda: PageId(secrets.token_hex(16)),
            max_writes_in_flight=MAX_WRITES,
            max_loads_in_flight=MAX_LOADS,
        )
        self._door = StoreDoor(self._swap, lambda *_, **__: None)
        self._memory = Memory(
            pager=self._pager,
            pool=FramePool(budget_bytes, RecycledMappings(budget_bytes)),
            swap=self._door,
            fingerprint=FINGERPRINT,
            numerics="bench",
            on_forget=lambda page: None,
            on_event=lambda *_, **__: None,
        )
        self._door.connect(self._memory)
        self._spaces = 0
        for first in range(256):  # as in a folder that has been used for a while: no write has to make one
            path = self._folder.page_path(FINGERPRINT, f"{first:02x}" + "0" * 30)
            path.parent.mkdir(mode=0o700, exist_ok=True)
        self._swap.start()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exc: object) -> None:
        self._swap.close()
        self._folder.close()

    @property
    def fsyncs(self) -> int:
        """Flushes of files and folders so far, without SQLite's."""
        return self._swap.statistics().fsyncs

    @property
    def read_threads_s(self) -> float:
        """Seconds in which at least one page was being read."""
        return self._swap.statistics().reading_s

    def new_agent(self) -> SpaceId:
        """An agent whose frames are mapped and hold random bytes; nothing is sealed yet."""
        self._spaces += 1
        space = SpaceId(self._spaces)
        self._memory.add_space(space, SpaceFacts(Namespace("default"), (self.layout,), lambda page, group: None))
        self._memory.apply(ev.SpaceCreated(space, (self.layout.payload_bytes,)))
        self._memory.apply(ev.Activated(space))
        self._memory.apply(ev.GrowthWanted(space, self.pages * PAGE_TOKENS))
        self._until(lambda: self._pager.is_ready(space))
        for frame in self._pager.block_table(space, GroupId(0)):
            self._memory.pool.fill(frame, os.urandom(self.layout.payload_bytes))
        return space

    def seal(self, space: SpaceId) -> None:
        """All its pages become full and go to disk: returns when all are durable."""
        keys = tuple(PageKey(secrets.token_hex(16)) for _ in range(self.pages))
        self._memory.append(space, self.pages * PAGE_TOKENS, (keys,))
        self._until(lambda: self._memory.statistics.pages_written >= self.pages * self._spaces)
        self._memory.apply(ev.Deactivated(space))

    def evict(self, space: SpaceId) -> None:
        """Give up its frames, which are on disk."""
        self._memory.apply(ev.EvictionWanted(space))
        self._until(lambda: self._pager.residency(space).resident_pages == 0)

    def load(self, space: SpaceId) -> None:
        """A request starts: returns when a step could read every page."""
        self._memory.apply(ev.Activated(space))
        self._until(lambda: self._pager.is_ready(space))

    def release(self, space: SpaceId) -> None:
        """The request ended."""
        self._memory.apply(ev.Deactivated(space))

    def digest(self, space: SpaceId) -> int:
        """Depends on every byte of its frames."""
        frames = self._pager.block_table(space, GroupId(0))
        return hash(tuple(self._memory.pool.export(frame) for frame in frames))

    def files(self, space: SpaceId) -> list[Path]:
        """Its page files in order."""
        (segment,) = self._pager.segments(space)
        return [self._folder.page_path(FINGERPRINT, page.ref.page_id) for page in segment.pages]

    def settle(self) -> None:
        """Until the swap thread has nothing left to do, its catalog included."""
        self._swap.flush()
        self._take_all()

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._door.on_result(self._results.get())

    def _take_all(self) -> None:
        while not self._results.empty():
            self._door.on_result(self._results.get())


def agent_buffer(total_bytes: int) -> memoryview:
    """Memory for a whole agent that is there already: whoever reads into it pays for no page of it."""
    return memoryview(bytearray(b"1") * total_bytes)


__all__ = ["Rig", "agent_buffer", "smollm2_layout"]
