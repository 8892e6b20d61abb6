"""What the tests of exports and imports share: agents, files outside the data folder, and what is on the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvd.store.agent_file import header_bytes, read_header
from kvd.vm.page import OPEN
from tests.scheduler.harness import Outcome, World
from tests.scheduler.test_turn import text_of

MakeWorld = Callable[..., World]
FILE = Path("/out/a.safetensors")


def make_out(world: World) -> None:
    """A folder outside the data folder."""
    world.fs.mkdir(FILE.parent)
    world.fs.fsync_dir(FILE.parent.parent)


def export(world: World, name: str = "a", path: Path = FILE, *, force: bool = False, **more: Any) -> Outcome:
    """Export an agent; makes the folder."""
    if world.fs.stat(FILE.parent) is None:
        make_out(world)
    return world.job("export", name, path=str(path), force=force, **more)


def bring(world: World, name: str = "a", path: Path = FILE, *, replace: bool = False, **more: Any) -> Outcome:
    """Import an agent."""
    return world.job("import", name, path=str(path), replace=replace, **more)


def carry(source: World, target: World, path: Path = FILE) -> None:
    """Copy an exported file to another world's disk."""
    make_out(target)
    target.fs.poke(path, source.fs.live_files()[path])


def put(world: World, data: bytes) -> None:
    """Put a file there as the disk holds it."""
    world.fs.poke(FILE, data)


def with_agent(world: World, words: int = 60) -> str:
    """An agent of some pages, with a pending token; returns its text."""
    world.generate("a", text_of(words), max_tokens=3)
    branch = world.agent("a").branch
    assert len(branch.tokens) == branch.computed + 1
    return world.text("a")


def swap_files(world: World) -> set[Path]:
    """Page files on the disk."""
    return {path for path in world.fs.live_files() if "swap" in path.parts}


def kv_of(world: World, name: str) -> list[bytes]:
    """All pages of an agent's branch as RAM holds them, after a turn that needed them."""
    branch = world.agent(name).branch
    found = []
    for segment in world.core.pager.segments(branch.space):
        found += [world.core.memory.pool.export(p.frame) for p in segment.pages if p.frame is not None]
        if segment.tail is not None and segment.tail.state in OPEN:
            found.append(world.core.memory.tail_bytes(segment.tail, 0, segment.tail.tokens))
    return found


def changed(world: World, **fields: Any) -> None:
    """Write the exported file anew with another header and a right checksum."""
    import xxhash

    header, head_bytes = read_header(world.fs, FILE)
    body = world.fs.live_files()[FILE][head_bytes:-16]
    data = header_bytes(replace(header, **fields)) + body
    put(world, data + xxhash.xxh3_128_digest(data))


def pages_of(world: World, name: str) -> set[Any]:
    """Pages of all branches of an agent."""
    return {
        page.ref.page_id
        for branch in world.agent(name).branches.values()
        for segment in world.core.pager.segments(branch.space)
        for page in segment.pages
    }
