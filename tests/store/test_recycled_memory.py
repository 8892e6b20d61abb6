"""Memory that is used again: frames' and read buffers'. Nobody who holds a view ever sees another page's bytes."""

from __future__ import annotations

import sys
import threading

import pytest

from kvd.ids import FrameId
from kvd.store.frame_memory import RecycledMappings
from kvd.store.frame_pool import FramePool
from kvd.store.read_buffers import ReadBuffers
from tests.support.store_data import LAYOUTS, kv_of

LAYOUT, OTHER = LAYOUTS
BUDGET = 64 * max(LAYOUT.payload_bytes, OTHER.payload_bytes)


def pool() -> tuple[FramePool, RecycledMappings]:
    """A pool whose dropped frames' memory is kept."""
    memory = RecycledMappings(BUDGET)
    return FramePool(BUDGET, memory), memory


def test_a_dropped_frames_memory_serves_the_next_one() -> None:
    """A page that comes in while another goes takes no memory from the system; a fresh frame is zero all the same."""
    frames, _ = pool()
    frames.load(FrameId(0), LAYOUT, kv_of(LAYOUT, "a"))
    address = frames.address(FrameId(0))
    frames.drop(FrameId(0))
    frames.load(FrameId(1), LAYOUT, kv_of(LAYOUT, "b"))
    assert frames.address(FrameId(1)) == address
    assert frames.export(FrameId(1)) == kv_of(LAYOUT, "b")
    frames.drop(FrameId(1))
    frames.create(FrameId(2), LAYOUT)
    assert frames.address(FrameId(2)) == address
    assert frames.export(FrameId(2)) == bytes(LAYOUT.payload_bytes)


def test_a_view_keeps_its_bytes() -> None:
    """Whoever still holds a view of a dropped frame, or of one of its tensors, keeps that memory to himself."""
    frames, memory = pool()
    frames.load(FrameId(0), LAYOUT, kv_of(LAYOUT, "a"))
    frames.load(FrameId(1), LAYOUT, kv_of(LAYOUT, "b"))
    whole = frames.view(FrameId(0))[:]
    codes = frames.layer(FrameId(1), LAYOUT.layer_indices[0]).k.codes
    before = codes.copy()
    frames.drop(FrameId(0))
    frames.drop(FrameId(1))
    assert memory.kept_bytes == 0
    for number in range(2, 6):
        frames.load(FrameId(number), LAYOUT, kv_of(LAYOUT, number))
    assert whole.tobytes() == kv_of(LAYOUT, "a")
    assert (codes == before).all()


def test_what_is_kept_is_bounded_and_counted() -> None:
    """P21 P23: a sixteenth of the budget at most, part of the mapped bytes; formats that went out of use go first."""
    frames, memory = pool()
    for number in range(40):
        frames.create(FrameId(number), OTHER if number < 20 else LAYOUT)
    for number in range(40):
        frames.drop(FrameId(number))
    assert 0 < memory.kept_bytes <= BUDGET // 16
    assert frames.statistics().slab_bytes == frames.slab_bytes == memory.kept_bytes
    assert frames.resident_bytes == 0
    frames.create(FrameId(50), LAYOUT)
    assert frames.slab_bytes <= BUDGET // 16


def test_a_small_budget_keeps_nothing() -> None:
    """A pool of a few pages gives all memory back."""
    memory = RecycledMappings(4 * LAYOUT.payload_bytes)
    frames = FramePool(4 * LAYOUT.payload_bytes, memory)
    frames.create(FrameId(0), LAYOUT)
    frames.drop(FrameId(0))
    assert frames.slab_bytes == memory.kept_bytes == 0


def test_a_buffer_is_used_again_only_when_nobody_sees_it() -> None:
    """A view of a view counts as well; other lengths are other buffers."""
    buffers = ReadBuffers(400)
    view = buffers.take(100)[10:20][2:]
    second = buffers.take(100)
    assert second.obj is not view.obj
    second[:] = b"x" * 100
    assert bytes(view) == bytes(8)
    held = id(view.obj)
    view.release()
    assert id(buffers.take(100).obj) == held
    assert len(buffers.take(7)) == 7


def test_what_is_remembered_is_bounded() -> None:
    """P21: buffers beyond the bound are their users' alone, and gone with them."""
    buffers = ReadBuffers(250)
    held = [buffers.take(100) for _ in range(5)]
    assert len({id(buffer.obj) for buffer in held}) == 5
    assert buffers.held_bytes == 200


def test_what_is_kept_goes_when_memory_is_short() -> None:
    """P21: buffers and mappings kept for later are given back; who uses one keeps it."""
    buffers = ReadBuffers(400)
    view = buffers.take(100)
    view[:] = b"x" * 100
    buffers.take(50).release()
    assert buffers.trim() == 50, "the other one is in use"
    assert buffers.held_bytes == 0
    assert bytes(buffers.take(100)) != bytes(view) == b"x" * 100
    frames, memory = pool()
    for number in range(2):
        frames.load(FrameId(number), LAYOUT, kv_of(LAYOUT, number))
    frames.drop(FrameId(0))
    kept_bytes = memory.kept_bytes
    assert frames.statistics().kept_bytes == kept_bytes > 0
    assert frames.trim() == kept_bytes
    assert memory.kept_bytes == 0
    frames.drop(FrameId(1))
    assert memory.kept_bytes > 0
    frames.set_budget(LAYOUT.payload_bytes)
    assert memory.kept_bytes == 0


def test_no_reference_count_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreters differ in how they count: Python 3.14 counts less of what is only in local names."""
    count = sys.getrefcount
    monkeypatch.setattr(sys, "getrefcount", lambda thing: count(thing) - 3)
    buffers = ReadBuffers(400)
    view = memoryview(buffers.take(100))
    memoryview(buffers.take(100))[:] = b"x" * 100
    assert bytes(view) == bytes(100)
    frames, memory = pool()
    frames.load(FrameId(0), LAYOUT, kv_of(LAYOUT, "a"))
    whole = frames.view(FrameId(0))[:]
    frames.drop(FrameId(0))
    frames.load(FrameId(1), LAYOUT, kv_of(LAYOUT, "b"))
    assert whole.tobytes() == kv_of(LAYOUT, "a")
    assert memory.kept_bytes == 0


def test_threads_never_get_the_same_buffer() -> None:
    """Readers take and hand on side by side."""
    buffers = ReadBuffers(512)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            buffer = buffers.take(64)
            view = memoryview(buffer)
            view[:] = bytes([mark]) * 64
            if bytes(view) != bytes([mark]) * 64:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
