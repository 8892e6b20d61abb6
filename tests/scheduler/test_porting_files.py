"""Exported files that cannot be used, and paths: nothing is made, and the reason is told."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path

import pytest

from kvd.errors import InvalidParams
from kvd.ids import Fingerprint
from kvd.scheduler.file_steps import port_path
from kvd.store.agent_file import read_header
from kvd.store.errors import AgentFileForeign, AgentFileInvalid, AgentFileTooNew, FilePathRefused
from tests.scheduler.harness import ROOT, World
from tests.scheduler.porting import (
    FILE,
    bring,
    changed,
    export,
    make_out,
    put,
    swap_files,
    with_agent,
)


def test_no_flipped_bit_passes(world: World) -> None:
    """P4: length, header, constants, record, each page, checksum: whatever is hit, nothing is made."""
    with_agent(world)
    export(world)
    good = world.fs.live_files()[FILE]
    header, head_bytes = read_header(world.fs, FILE)
    places = [0, 7, 8, head_bytes - 1, len(good) - 1, len(good) - 16]
    at = head_bytes
    for _, length in header.parts():
        places += [at, at + length // 2, at + length - 1]
        at += length
    dice = random.Random(11)
    places += [dice.randrange(head_bytes) for _ in range(60)]
    before = swap_files(world)
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << dice.randrange(8)
        put(world, bytes(bad))
        error = bring(world, "b").error
        assert isinstance(error, AgentFileInvalid | AgentFileTooNew), (place, error)
        assert not world.has("b")
    world.settle()
    assert swap_files(world) == before
    put(world, good)
    assert bring(world, "b").facts["durable"]


@pytest.mark.parametrize("kept", [0, 1, 8, 200, -16, -1])
def test_a_cut_file_is_refused(world: World, kept: int) -> None:
    """P3: a copy that was cut short, and one with something behind it."""
    with_agent(world)
    export(world)
    good = world.fs.live_files()[FILE]
    put(world, good[:kept])
    assert isinstance(bring(world, "b").error, AgentFileInvalid)
    put(world, good + b"x")
    assert isinstance(bring(world, "b").error, AgentFileInvalid)


def test_another_model_numerics_or_format_is_refused(world: World) -> None:
    """P7: both sides are named."""
    with_agent(world)
    export(world)
    good = world.fs.live_files()[FILE]
    for fields, words in (
        ({"fingerprint": Fingerprint("0" * 32), "model": "other"}, ("other", "0" * 32, world.spec.fingerprint)),
        ({"numerics": "kvd-9"}, ("kvd-9", world.core.numerics)),
        ({"format_ids": ("q9-1", "q9-2")}, ("q9-1", str(world.formats.default_ids[0]))),
    ):
        changed(world, **fields)
        error = bring(world, "b").error
        assert isinstance(error, AgentFileForeign)
        assert all(word in error.message for word in words), error.message
        put(world, good)


def test_a_newer_file_is_refused_with_both_versions(world: World) -> None:
    """The version is looked at before anything that a newer kvd may do otherwise."""
    with_agent(world)
    export(world)
    good = world.fs.live_files()[FILE]
    put(world, good.replace(b'"version":"1"', b'"version":"7"'))
    error = bring(world, "b").error
    assert isinstance(error, AgentFileTooNew)
    assert (error.data["found"], error.data["supported"]) == (7, 1)


def test_figures_that_contradict_each_other_are_refused(world: World) -> None:
    """A right checksum over nonsense makes no agent."""
    with_agent(world)
    export(world)
    good = world.fs.live_files()[FILE]
    header, _ = read_header(world.fs, FILE)
    for fields in ({"tokens": header.tokens - 1}, {"computed_tokens": header.computed_tokens - 1}):
        changed(world, **fields)
        assert isinstance(bring(world, "b").error, AgentFileInvalid), fields
        put(world, good)
    assert not world.has("b")


def test_a_file_that_changes_while_it_is_read_is_refused(world: World) -> None:
    """A part is what the checksum was taken over, or nothing is made."""
    with_agent(world)
    export(world)
    good = bytearray(world.fs.live_files()[FILE])
    before = swap_files(world)
    answers = iter([None] * 3)

    def stop() -> str | None:
        if next(answers, "late") == "late":  # pages are being written
            bad = bytearray(good)
            bad[-100] ^= 1
            put(world, bytes(bad))
        return None

    assert isinstance(bring(world, "b", stop=stop).error, AgentFileInvalid)
    assert not world.has("b")
    world.settle()
    assert swap_files(world) == before


def test_an_ordinary_safetensors_reader_shows_it(world: World, tmp_path: Path) -> None:
    """The container is what it says."""
    import safetensors.numpy

    with_agent(world)
    export(world)
    data = world.fs.live_files()[FILE]
    tensors = safetensors.numpy.load(data)
    assert {"record", "pages.0", "pages.1", "xxh3_128"} <= set(tensors)
    assert tensors["pages.0"].shape[0] == len(world.page_ids("a"))
    meta = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert (meta["format"], meta["agent"], meta["fingerprint"]) == ("kvd-agent", "a", world.spec.fingerprint)


# ---- paths ----------------------------------------------------------------------------------------------------------


def test_paths_that_cannot_be_used(world: World) -> None:
    """Each is refused with the reason, and nothing is left."""
    with_agent(world)
    make_out(world)
    for text in ("a.safetensors", "/", "/out/", "/out/..", "/out/a\0b"):
        with pytest.raises(InvalidParams, match="absolute"):
            port_path(text)
    for path, words in (
        (Path("/nowhere/a"), "no folder"),
        (FILE.parent, "folder"),
        (ROOT / "a", "data folder"),
        (ROOT / "exports" / "a", "data folder"),
    ):
        error = export(world, path=path).error
        assert isinstance(error, FilePathRefused), error
        assert words in error.message
    for path, words in ((FILE, "no such file"), (FILE.parent, "folder")):
        error = bring(world, "b", path).error
        assert isinstance(error, FilePathRefused)
        assert words in error.message
    assert [path for path in world.fs.live_files() if path.parent == FILE.parent] == []


def test_a_file_is_replaced_only_when_asked(world: World) -> None:
    """P8: never silently."""
    with_agent(world)
    export(world)
    before = world.fs.live_files()[FILE]
    world.generate("a", world.text("a") + " more", max_tokens=1)
    error = export(world).error
    assert isinstance(error, FilePathRefused)
    assert error.data["exists"] is True
    assert world.fs.live_files()[FILE] == before
    assert export(world, force=True).facts["tokens"] == len(world.agent("a").branch.tokens)
    assert world.fs.live_files()[FILE] != before


@pytest.mark.parametrize("has_links", [True, False])
def test_of_two_who_want_a_name_one_gets_it(world: World, has_links: bool) -> None:
    """P8: a file that appears in the last moment is never replaced, on file systems without second names, too."""
    with_agent(world)
    make_out(world)
    link = world.fs.link
    rivals = [b"theirs"]

    def late(source: Path, target: Path) -> None:
        if rivals:
            world.fs.poke(target, rivals.pop())
        if not has_links:
            raise PermissionError(errno.EPERM, "no hard links here", str(target))
        link(source, target)

    world.fs.link = late  # type: ignore[method-assign]
    error = export(world).error
    assert isinstance(error, FilePathRefused)
    assert error.data["exists"] is True
    while world.step_store():
        pass
    assert {path: data for path, data in world.fs.live_files().items() if path.parent == FILE.parent} == {
        FILE: b"theirs"
    }
    world.fs.unlink(FILE)
    assert export(world).error is None
    assert [path for path in world.fs.live_files() if path.parent == FILE.parent] == [FILE]
    assert bring(world, "b").facts["tokens"] == len(world.agent("a").branch.tokens)
