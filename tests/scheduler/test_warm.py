"""The warm tier: exported agents that are imported when somebody first uses their names."""

from __future__ import annotations

from pathlib import Path

from kvd.errors import KvdError
from kvd.ids import Fingerprint
from kvd.scheduler.importing import warm_first
from kvd.scheduler.requests import TurnRequest
from kvd.scheduler.turn import TurnState, run_turn
from kvd.scheduler.waiting import never
from tests.scheduler.harness import Outcome, World, content, ref_of
from tests.scheduler.porting import (
    FILE,
    MakeWorld,
    carry,
    changed,
    export,
    make_out,
    put,
    with_agent,
)


def scan(world: World, *folders: Path) -> None:
    """Look at folders as a start does."""
    world.core.warm.scan(
        world.fs,
        folders or [FILE.parent],
        fingerprint=world.spec.fingerprint,
        numerics=world.core.numerics,
        log=world.log,
    )


def warm_turn(world: World, name: str, text: str, max_tokens: int = 3) -> Outcome:
    """A turn as the engine starts it."""
    request = TurnRequest(request_id=world._request_id(), ref=ref_of(name), prompt=content(text), max_tokens=max_tokens)
    state = TurnState(request, world.now_s)
    return world.drive(warm_first(world.core, [request.ref], never, run_turn(world.core, state)), Outcome())


def test_a_name_of_the_warm_tier_is_imported_when_it_is_used(make_world: MakeWorld) -> None:
    """P1: at start only headers are read; the first turn finds the KV; nothing in the folder changes."""
    here, there = make_world(), make_world(seed=9)
    text = with_agent(here)
    export(here)
    carry(here, there)
    put(there, here.fs.live_files()[FILE])
    there.fs.poke(Path("/out/notes.txt"), b"a shopping list")
    there.fs.poke(Path("/out/cut.safetensors"), here.fs.live_files()[FILE][:-1])
    before = {path: data for path, data in there.fs.live_files().items() if path.parent == FILE.parent}
    scan(there, FILE.parent, Path("/gone"))
    assert {str(facts["path"]) for facts in there.events("warm_file_skipped")} == {
        "/out/notes.txt",
        "/out/cut.safetensors",
    }
    assert len(there.events("warm_folder_unreadable")) == 1
    assert not there.has("a")
    turn = warm_turn(there, "a", text).turn
    assert turn.cached_tokens == turn.prompt_tokens - 1
    assert turn.text == here.generate("a", text, max_tokens=3).turn.text
    assert {path: data for path, data in there.fs.live_files().items() if path.parent == FILE.parent} == before
    there.job("delete", "a")
    assert warm_turn(there, "a", "anew").turn.match == "new"


def test_a_local_agent_goes_before_the_warm_tier(world: World) -> None:
    """P8: what the data folder has is never replaced from there."""
    with_agent(world)
    export(world)
    world.generate("a", world.text("a") + " and on", max_tokens=1)
    text = world.text("a")
    scan(world)
    assert warm_turn(world, "a", text, max_tokens=1).turn.match == "exact"


def test_a_warm_file_of_no_use_costs_a_line_and_no_turn(make_world: MakeWorld) -> None:
    """P4: damaged below its header, of another model, or for a name that is known from elsewhere."""
    here, there = make_world(), make_world(seed=10)
    text = with_agent(here)
    export(here)
    bad = bytearray(here.fs.live_files()[FILE])
    bad[-200] ^= 4
    make_out(there)
    put(there, bytes(bad))
    there.fs.poke(Path("/out/b.safetensors"), bytes(bad))
    scan(there)
    assert "comes from" in str(there.events("warm_file_skipped")[0]["reason"])
    turn = warm_turn(there, "a", text).turn
    assert turn.match == "new"
    assert "checksum" in str(there.events("warm_file_skipped")[1]["reason"])
    changed(here, fingerprint=Fingerprint("1" * 32), model="other")
    here.core.warm.paths.clear()
    scan(here)
    assert "other" in str(here.events("warm_file_skipped")[-1]["reason"])
    assert here.core.warm.paths == {}


def test_a_cancelled_warm_import_can_be_had_again(world: World) -> None:
    """The tier still has the agent."""
    with_agent(world)
    export(world)
    world.job("delete", "a")
    scan(world)
    request = TurnRequest(request_id=world._request_id(), ref=ref_of("a"), prompt=content("x"), max_tokens=1)
    work = warm_first(world.core, [request.ref], lambda: "enough", run_turn(world.core, TurnState(request, 0.0)))
    assert isinstance(world.drive(work, Outcome()).error, KvdError)
    assert ref_of("a") in world.core.warm.paths
