"""A disk that refuses, or a kill, at every operation of turns, forks, rollbacks, deletes, compactions and evictions.

Theory of operation. A script of steps runs once on a good disk: the texts of all agents after each step are what is
right. Then it runs again and again, each time with one operation of the disk refused (or a few, or the machine dead).
With refusals, whatever was acknowledged as durable must be there after the disk healed and the machine died. With a
death, each agent must be as it was before the step or after it, and after it once the step was acknowledged.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.errors import NotDeleted
from tests.scheduler.harness import Outcome, World
from tests.scheduler.test_turn import text_of
from tests.support.lossy_disk import SimulatedCrash

MUTATING = ("create", "open_append", "write", "truncate", "fsync", "rename", "unlink", "mkdir", "fsync_dir")
CODES = (errno.ENOSPC, errno.EIO, errno.EROFS)
State = dict[str, str]
Step = tuple[str, Callable[[World], Outcome | None]]


def go_on(name: str, more: str) -> Callable[[World], Outcome]:
    """A turn that extends the agent's text, or begins it."""

    def turn(world: World) -> Outcome:
        return world.generate(name, (world.text(name) if world.has(name) else "") + more, max_tokens=1)

    return turn


def tidy(world: World) -> None:
    """What the engine does when it is idle: deletions, the catalog, compactions that pay."""
    world.settle()


SCRIPT: tuple[Step, ...] = (
    ("turn", go_on("a", text_of(26))),
    ("turn", go_on("a", text_of(2))),
    ("fork", lambda world: world.job("fork", "a", new_agent="b")),
    ("turn", go_on("b", " other" + text_of(22))),
    ("rollback", lambda world: world.job("rollback", "a", tokens=PAGE_TOKENS + 9)),
    ("turn", lambda world: world.generate("a", text_of(20) + " else", max_tokens=1)),
    ("idle", tidy),
    ("evict", lambda world: world.job("evict", "b")),
    ("turn", go_on("c", "c" + text_of(24))),
    ("delete", lambda world: world.job("delete", "a")),
    ("idle", tidy),
    ("compact", lambda world: world.job("compact", "b")),
    ("turn", go_on("b", " more")),
    ("delete", lambda world: world.job("delete", "c")),
    ("idle", tidy),
)


def state(world: World) -> State:
    """Text of every agent."""
    return {str(agent.ref.agent): agent.branch.text.decode() for agent in world.core.agents}


@dataclass
class Reference:
    """The script on a good disk.

    Attributes:
        states: agents before the first step, and after each.
        operations: of the disk, before the first step and after each.
        names: of each operation, the first one at index 0.
    """

    states: list[State] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@pytest.fixture
def right(make_world: Callable[..., World]) -> Reference:
    """What the script does on a good disk."""
    world, found = make_world(chunk_tokens=512), Reference()
    found.states.append(state(world))
    found.operations.append(world.fs.operations)
    for kind, step in SCRIPT:
        outcome = step(world)
        assert outcome is None or outcome.error is None, (kind, outcome)
        found.states.append(state(world))
        found.operations.append(world.fs.operations)
    found.names = [line.split()[0] for line in world.fs.log]
    assert found.states[-1].keys() == {"b"}
    return found


def acknowledged(outcome: Outcome | None) -> tuple[bool, str]:
    """Whether the step was said to be durable, and the reason when it was not."""
    if outcome is None:
        return False, "idle"
    if outcome.error is not None:
        return False, outcome.error.message
    if isinstance(outcome.result, dict):
        # a deletion that succeeds is for good: when it is not, it fails
        return bool(outcome.result.get("durable", True)), str(outcome.result.get("durable_reason"))
    return bool(outcome.turn.durable), str(outcome.turn.durable_reason)


def is_whole(world: World) -> None:
    """Every agent resumes with all its KV, from files alone; nothing is missing, in doubt or left over."""
    assert not world.report.missing_pages
    assert not [trouble for trouble in world.report.log_troubles if trouble.kind != "torn"]
    for name in state(world):
        computed = world.agent(name).branch.computed
        turn = world.generate(name, world.text(name) + "!", max_tokens=1).turn
        assert (turn.cached_tokens, turn.durable) == (computed, True), (name, turn.match_reason)
        assert "lost" not in turn.match_reason
    world.check()


# ---- refusals -------------------------------------------------------------------------------------------------------


def run_refused(world: World, at: int, code: int, lasting: int, tally: Counter[str]) -> None:
    """The script with the operations [at, at + lasting) refused; then the disk heals, and the machine dies."""
    injected = 0

    def fail(number: int, name: str, path: Path | None) -> int | None:
        nonlocal injected
        if not at <= number < at + lasting or name not in MUTATING:
            return None
        injected += 1
        return code

    world.fs.fail = fail
    for kind, step in SCRIPT:
        outcome = step(world)
        durable, reason = acknowledged(outcome)
        if durable:
            tally["disk faults, turns and jobs acknowledged"] += 1
        elif outcome is not None:
            assert injected, (kind, reason)
            assert reason not in ("", "None"), f"{kind} does not say why it is not durable"
            tally["disk faults, refused with a reason"] += 1
    tally["disk faults, injected"] += injected
    heal(world)
    owed = state(world)
    world.crash()
    assert state(world) == owed, (at, lasting, errno.errorcode[code])
    assert "b" in owed, "the script leaves it whatever the disk does"
    is_whole(world)
    tally["disk faults, turns lost"] += 0


def heal(world: World) -> None:
    """The disk works again, and the engine's own retries have their turn."""
    world.heal()
    for _ in range(3):
        world.settle()
        world.save_unsaved()
    for agent in world.core.agents:
        assert agent.unsaved is None, f"{agent.ref} stays unsaved: {agent.unsaved}"


@pytest.mark.parametrize("lasting", [1, 9])
def test_a_disk_that_refuses_any_operation_loses_no_turn(
    make_world: Callable[..., World], right: Reference, tally: Counter[str], lasting: int
) -> None:
    """P2 P25: ENOSPC, EIO or EROFS, once or for a while, at each operation: no turn is lost, each refusal says why."""
    before = tally["disk faults, injected"]
    for at in range(right.operations[0] + 1, right.operations[-1] + 1):
        if right.names[at - 1] in MUTATING and (lasting == 1 or at % 3 == 0):
            world = make_world(chunk_tokens=512)
            run_refused(world, at, CODES[(at + lasting) % len(CODES)], lasting, tally)
    assert tally["disk faults, injected"] - before > 90


def starts(world: World, code: int) -> bool:
    """Start on a disk that refuses with `code`; whether that went well, and if not, start again on a good one."""
    raised: int | None = None
    try:
        world.start()
    except OSError as error:
        raised = error.errno
    world.heal()
    if raised is not None:
        assert raised == code
        world.folder.close()
        world.start()
    return raised is None


def test_a_disk_that_refuses_at_a_start_costs_that_start_only(
    make_world: Callable[..., World], right: Reference, tally: Counter[str]
) -> None:
    """P8: at each operation of recovery the start fails with the disk's error or goes on; the next one has all."""
    world = make_world(chunk_tokens=512)
    for _, step in SCRIPT:
        step(world)
    world.crash(lossy=False)
    failed = injected = 0
    for at in range(1, world.fs.operations + 1):
        world.swap.close()
        world.folder.close()
        world.fs.crash() if at % 2 else world.fs.reboot_clean()
        code = CODES[at % len(CODES)]
        world.fs.fail = lambda number, name, path, at=at, code=code: code if number == at else None
        failed += not starts(world, code)
        injected += 1
        assert state(world) == right.states[-1], at
    is_whole(world)
    tally["disk faults, injected"] += injected
    tally["disk faults, starts refused"] += failed
    assert failed > 3


def test_a_delete_that_failed_late_is_finished_by_a_retry(make_world: Callable[..., World]) -> None:
    """P2: the name is gone, its folder not flushed: an error says so, the agent is in doubt, a retry is for good."""
    for seed in range(8):
        world = make_world(seed=seed)
        world.generate("a", text_of(2), max_tokens=1)
        world.fs.fail = lambda number, name, path: errno.EIO if name == "fsync_dir" else None
        error = world.job("delete", "a").error
        assert isinstance(error, NotDeleted)
        assert world.agent("a").unsaved
        assert world.agent("a").unsaved in error.message
        world.heal()
        if seed % 2:
            assert world.job("delete", "a").facts["deleted"]
            world.crash()
            assert not world.has("a")
        else:
            text = world.text("a")
            world.save_unsaved()
            world.crash()
            assert world.text("a") == text, "nobody asked again: it is saved anew"


def test_an_agent_whose_first_record_was_refused_is_deleted_for_good(make_world: Callable[..., World]) -> None:
    """P2: the record may be on the disk all the same; no restart brings it back after the acknowledgement."""
    for seed in range(12):
        world = make_world(seed=seed)
        world.fs.fail = lambda number, name, path: (
            errno.EIO if name in ("fsync_dir", "truncate") and path is not None and "agents" in str(path) else None
        )
        assert not world.generate("a", text_of(2), max_tokens=1).turn.durable
        world.heal()
        assert world.job("delete", "a").facts["deleted"]
        world.crash(lossy=seed % 2 == 0)
        assert not world.has("a")


def test_what_is_left_of_a_refused_record_is_no_record(world: World) -> None:
    """A turn's flush and a compaction fail; the whole-looking remains of the turn do not make the log disagree."""
    world.generate("a", text_of(26), max_tokens=1)
    world.fs.fail = lambda number, name, path: errno.EIO if name in ("fsync", "truncate") else None
    assert not world.generate("a", world.text("a") + " more", max_tokens=1).turn.durable
    world.job("compact", "a")
    world.heal()
    world.save_unsaved()
    assert world.agent("a").unsaved is None
    assert not world.events("record_invalid")
    assert not world.events("log_rewritten")
    text = world.text("a")
    world.crash()
    assert world.text("a") == text


# ---- deaths ---------------------------------------------------------------------------------------------------------


def steps_until_death(world: World) -> int:
    """How many steps of the script were acknowledged before the machine died."""
    for number, (_, step) in enumerate(SCRIPT):
        try:
            step(world)
        except SimulatedCrash:
            return number
    raise AssertionError("it did not die")


def test_a_kill_in_any_step_leaves_the_old_state_or_the_new_one(
    make_world: Callable[..., World], right: Reference, tally: Counter[str]
) -> None:
    """P2 P3: before the acknowledgement either, after it the new one; a deleted agent never comes back."""
    kinds: Counter[str] = Counter()
    for at in range(right.operations[0] + 1, right.operations[-1] + 1):
        around = right.names[at - 2 : at + 1]
        if around[1] == "read" or around == ["write"] * 3:
            continue  # a read changes nothing; of the many writes of one record the first and the last will do
        world = make_world(chunk_tokens=512)
        world.fs.crash_at = at
        done = steps_until_death(world)
        kinds[SCRIPT[done][0]] += 1
        world.crash(lossy=at % 2 == 0)
        before, after = right.states[done], right.states[done + 1]
        for name in before.keys() | after.keys() | state(world).keys():
            assert state(world).get(name) in (before.get(name), after.get(name)), (at, SCRIPT[done][0], name)
        is_whole(world)
    for kind, count in kinds.items():
        tally[f"simulated kills, in {kind}"] += count
    assert all(kinds[kind] > 1 for kind in ("turn", "fork", "rollback", "delete", "compact", "idle"))
