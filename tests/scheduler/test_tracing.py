"""`kvd serve --trace`: what agents do is written down so that a replay does the same; nothing of what they say is."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import pytest

from kvd.bench.eviction_replay import Replay
from kvd.errors import EnvironmentFault
from kvd.ids import GroupId, PageId, PageKey
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.tracing import TraceInTheWay, TraceWriter, open_trace
from kvd.vm import events as ev
from kvd.vm.eviction import LruPolicy
from kvd.vm.trace import TraceHeader, TraceLine, format_header, parse_trace
from tests.scheduler.harness import World, ref_of
from tests.scheduler.test_turn import text_of
from tests.vm.desk import PAGE_BYTES, A, B, C, Desk, P


class FullDisk(io.StringIO):
    """A file whose disk is full from the second flush on."""

    name = "full"
    flushes = 0

    def flush(self) -> None:
        """No space is left."""
        self.flushes += 1
        if self.flushes > 1:
            raise OSError(28, "No space left on device")


def traced(world: World, file: io.TextIOBase) -> TraceWriter:
    """Have the world's engine traced."""
    core = world.core
    writer = TraceWriter(
        file,  # type: ignore[arg-type]
        pager=core.pager,
        owner=lambda space: str(core.owner(space)[0]),
        windows=[group.layer.window for group in core.spec.groups],
        page_tokens=PAGE_TOKENS,
        clock=lambda: world.now_s,
        log=world.log,
    )
    core.memory.trace = writer
    return writer


def read(path: Path) -> tuple[TraceHeader, list[TraceLine]]:
    """The trace in a file."""
    with path.open(encoding="utf-8") as file:
        return parse_trace(file, source=str(path))


def test_a_replay_of_a_trace_ends_with_the_lengths_that_the_engine_has(world: World, tmp_path: Path) -> None:
    """Turns, divergence, injection, fork, rollback, evict, prefetch, pin and delete, each with its effect."""
    path = tmp_path / "day.jsonl"
    writer = traced(world, open_trace(path))
    first = text_of(20)
    said = world.generate("a", first).turn
    world.generate("a", first + said.text + text_of(6))
    world.generate("a", first[: len(first) // 2] + "and now something else")
    world.inject("b", text_of(30))
    world.job("fork", "a", new_agent="c", tokens=None)
    world.job("rollback", "b", tokens=40)
    for operation in ("pin", "unpin", "evict", "prefetch"):
        world.job(operation, "b")
    world.job("delete", "c")
    world.core.memory.apply(ev.Tick())
    writer.close()
    header, lines = read(path)
    assert (header.name, header.page_tokens, len(header.windows)) == ("day", PAGE_TOKENS, len(world.spec.groups))
    words = {line.word for line in lines}
    assert {"create", "start", "end", "fork", "cut", "pin", "unpin", "evict", "prefetch", "close"} <= words
    replay = Replay(header, lines, LruPolicy(), header.budget_bytes)
    replay.run()
    assert replay.lengths == {int(each.space): each.tokens for each in world.core.pager.spaces}


def test_branches_that_are_restored_share_what_they_shared(tmp_path: Path) -> None:
    """P2: agents found on disk are in the trace from its start; a page of two spaces is one page in the replay."""
    path = tmp_path / "t.jsonl"
    desk = Desk(40)
    writer = TraceWriter(
        open_trace(path),
        pager=desk.pager,
        owner=str,
        windows=(None,),
        page_tokens=P,
        clock=lambda: 0.0,
        log=lambda *_, **__: None,
    )
    for space, names, tail in ((A, "abc", 1), (B, "abx", 2), (C, "abxy", 0)):
        refs = tuple(ev.PageRef(PageId(name), PageKey(name)) for name in names)
        event = ev.SpaceRestored(space, (PAGE_BYTES,), (ev.SegmentImage(GroupId(0), refs, tail),))
        desk.send(event)
        writer.observe(event)
    writer.close()
    header, lines = read(path)
    assert [(line.tokens, line.parent, line.shared_pages) for line in lines] == [
        (3 * P + 1, None, 0),
        (3 * P + 2, A, 2),
        (4 * P, B, 3),
    ]
    replay = Replay(header, lines, LruPolicy(), 1 << 20)
    replay.run()
    assert replay.pages == 3 + 1 + 1 + 2, "five sealed pages and two tails"


def test_nothing_that_was_said_and_no_name_is_in_a_trace(world: World, tmp_path: Path) -> None:
    """P37: agents are digests under a key that is drawn for each trace; the file is its owner's alone."""
    digests = []
    for name in ("one", "two"):
        path = tmp_path / name
        writer = traced(world, open_trace(path))
        world.generate(f"secret-agent-{name}", "the password is swordfish")
        world.job("fork", f"secret-agent-{name}", new_agent=f"other-{name}", tokens=None)
        writer.close()
        text = path.read_text()
        assert not any(word in text for word in ("secret", "password", "swordfish", "other"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        digests.append({line.agent for line in read(path)[1] if line.agent})
    assert len(digests[0]) == len(digests[1]) == 2
    assert not digests[0] & digests[1]


def test_a_trace_that_cannot_be_written_ends_and_the_daemon_goes_on(world: World) -> None:
    """P38: one line in the log; turns do not notice."""
    file = FullDisk()
    writer = traced(world, file)
    world.core.memory.apply(ev.Tick())
    world.generate("a", "hello")
    world.core.memory.apply(ev.Tick())
    assert world.generate("b", "hello").turn.text
    world.core.memory.apply(ev.Tick())
    writer.close()
    writer.close()
    assert [event for event, _ in world.logged].count("trace_ended") == 1
    assert file.closed


def test_lines_reach_the_file_at_ticks_not_at_every_event(world: World, tmp_path: Path) -> None:
    """No step waits for the disk of the trace."""
    path = tmp_path / "t"
    writer = traced(world, open_trace(path))
    world.generate("a", "hello")
    written = path.stat().st_size
    world.core.memory.apply(ev.Tick())
    assert path.stat().st_size > written
    writer.close()


def test_only_a_trace_is_written_over(tmp_path: Path) -> None:
    """A mistyped path costs nobody a file."""
    path = tmp_path / "notes"
    path.write_text("dear diary")
    with pytest.raises(TraceInTheWay, match="must name a new file or an older trace"):
        open_trace(path)
    assert path.read_text() == "dear diary"
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(128, 256)))
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        open_trace(binary)
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        open_trace(tmp_path / "no" / "folder")
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        open_trace(link)
    old = tmp_path / "old"
    old.write_text(format_header(TraceHeader(4, (None,))) + "\nmore\n")
    open_trace(old).close()
    assert os.path.getsize(old) == 0


def test_agents_are_named_alike_within_a_trace(world: World, tmp_path: Path) -> None:
    """The branches of an agent carry one digest, so that a replay can predict by agent."""
    path = tmp_path / "t"
    writer = traced(world, open_trace(path))
    first = text_of(10)
    world.generate("a", first)
    world.generate("a", "something else altogether")
    world.generate("b", first)
    writer.close()
    made = [line for line in read(path)[1] if line.word in ("create", "fork")]
    spaces = {ref: {int(b.space) for b in world.core.agents.get(ref_of(ref)).branches.values()} for ref in "ab"}
    agents = {ref: {line.agent for line in made if line.space in spaces[ref]} for ref in "ab"}
    assert len(agents["a"]) == len(agents["b"]) == 1
    assert agents["a"] != agents["b"]
