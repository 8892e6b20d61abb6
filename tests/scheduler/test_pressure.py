"""The process's footprint against its limits: a made-up footprint, no memory is really used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.front.wire_errors import to_error_object
from kvd.ids import RequestId
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.errors import MemoryPressure
from kvd.scheduler.limits import LimitChange, LimitSettings
from kvd.scheduler.pressure import RETRY_S, Pressure
from kvd.scheduler.requests import JobRequest, TurnRequest
from kvd.scheduler.views import health_facts, statistics
from kvd.store.swap_dir import BUFFER_BYTES
from tests.scheduler.harness import World, content, ref_of
from tests.scheduler.test_engine import WAIT_S, Gate, Runner
from tests.scheduler.test_turn import text_of
from tests.support.prose import prose

HARD = 1_000_000
TURN = TurnRequest(RequestId(1), ref_of("a"), content("one"))


class Meter:
    """A footprint that the test decides."""

    footprint_bytes = 100

    def __call__(self) -> int:
        """The footprint now."""
        return self.footprint_bytes


@pytest.fixture
def meter() -> Meter:
    """Little is taken."""
    return Meter()


def looked(pressure: Pressure, meter: Meter, footprint_bytes: int) -> tuple[str, int]:
    """Level and wanted bytes after a look at a footprint."""
    meter.footprint_bytes = footprint_bytes
    wanted = pressure.look()
    return pressure.level, wanted


def test_levels_change_with_a_gap_between_refusing_and_serving(meter: Meter) -> None:
    """P23: above the soft limit memory is given up, above the hard one work is refused until the soft one is met."""
    pressure = Pressure(HARD, meter)
    assert looked(pressure, meter, 950_000) == ("none", 0)
    assert looked(pressure, meter, 950_001) == ("soft", 1)
    assert looked(pressure, meter, HARD) == ("soft", 50_000)
    assert pressure.refusal(TURN) is None
    assert looked(pressure, meter, HARD + 1) == ("hard", 50_001)
    assert looked(pressure, meter, 960_000) == ("hard", 10_000), "not yet"
    assert pressure.refusal(TURN) is not None
    assert looked(pressure, meter, 950_000) == ("none", 0)
    assert pressure.refusal(TURN) is None
    assert looked(pressure, meter, 2 * HARD)[0] == "hard"
    assert (pressure.episodes, pressure.refusals) == (2, 1)


def test_a_refusal_can_be_retried_and_has_both_figures(meter: Meter) -> None:
    """P21: on the wire it is `busy`, with the finer name, the footprint, its limit, and when to come again."""
    pressure = Pressure(HARD, meter)
    looked(pressure, meter, 3 * HARD)
    error = pressure.refusal(TURN)
    assert error is not None
    wire = to_error_object(error)
    assert (wire.name, wire.data["fault"], wire.retry_after_s) == ("busy", "memory_pressure", RETRY_S)
    assert (wire.data["footprint_bytes"], wire.data["footprint_limit_bytes"]) == (3 * HARD, HARD)
    assert "3000000" in wire.message
    assert "1000000" in wire.message


@pytest.mark.parametrize(
    ("operation", "refused"),
    [("fork", True), ("pin", True), ("prefetch", True), ("import", True), ("evict", False), ("unpin", False)]
    + [(operation, False) for operation in ("delete", "rollback", "export", "save", "compact")],
)
def test_what_makes_room_or_saves_is_never_refused(meter: Meter, operation: str, refused: bool) -> None:
    """Who frees memory, or writes what would be lost, must be let through."""
    pressure = Pressure(HARD, meter)
    looked(pressure, meter, 3 * HARD)
    assert (pressure.refusal(JobRequest(RequestId(1), ref_of("a"), operation)) is not None) == refused


def test_without_a_limit_nothing_is_refused(meter: Meter) -> None:
    """The footprint is measured all the same."""
    pressure = Pressure(None, meter)
    assert looked(pressure, meter, 1 << 50) == ("none", 0)
    assert (pressure.footprint_bytes, pressure.soft_bytes) == (1 << 50, None)


@pytest.fixture
def runner(tmp_path: Path, codec: TextCodec, meter: Meter) -> Iterator[Runner]:
    """An engine of one slot with a made-up footprint."""
    runner = Runner(tmp_path / "data", codec, max_queued=8, pressure=Pressure(HARD, meter))
    runner.start()
    yield runner
    runner.stop()


def test_what_runs_goes_on_and_what_is_new_comes_again(runner: Runner, meter: Meter) -> None:
    """P21, P23: a running turn ends well, who waited and who comes are refused, idle pages go, all recover."""
    assert runner.turn("idle", prose(600, "idle")).result["durable"]
    gate = Gate(runner.model)
    running = runner.turn("a", prose(300, "a"), max_tokens=5)
    assert gate.entered.wait(WAIT_S)
    queued = runner.turn("b", "two")
    meter.footprint_bytes = 2 * HARD
    look = runner.engine.call(lambda core: core.relieve())
    gate.go_on.set()
    look.result(WAIT_S)
    assert running.result["completion_tokens"] == 5
    late = runner.turn("c", "three")
    for answer in (queued, late):
        assert isinstance(answer.error, MemoryPressure)
        assert answer.error.retry_after_s == RETRY_S
    assert runner.job("evict", "a").result["agent"] == "a"
    figures = runner.look(statistics)
    assert figures["resident_bytes"] == 0
    assert figures["reclaimed"] > 0
    assert (figures["memory_pressure"], figures["memory_refusals"]) == ("hard", 2)
    assert figures["footprint_limit_bytes"] == HARD
    assert figures["mlx_active_bytes"] >= 0
    assert runner.look(health_facts)["memory_pressure"] == "hard"
    meter.footprint_bytes = HARD // 2
    runner.look(lambda core: core.relieve())
    assert runner.turn("c", "three").result["durable"]
    assert [event for event, _ in runner.logged if event.startswith("memory_")] == ["memory_short", "memory_relieved"]


def test_memory_kept_for_later_goes_first(world: World, meter: Meter) -> None:
    """P21 P23: what is kept for frames and reads to come is shown, and given back before any page is given up."""
    world.core.pressure = Pressure(HARD, meter)
    assert world.generate("a", text_of(60), max_tokens=1).turn.durable
    assert world.generate("b", text_of(60), max_tokens=1).turn.durable
    world.settle()
    world.job("evict", "a")
    assert world.job("verify", "b").error is None
    assert world.generate("a", world.text("a") + " more", max_tokens=1).turn.cached_tokens
    world.job("evict", "a")
    figures = statistics(world.core)
    kept_bytes = figures["kept_frame_bytes"]
    assert 0 < kept_bytes < figures["frame_bytes"]
    assert 0 < figures["read_buffer_bytes"] <= BUFFER_BYTES
    looked(world.core.pressure, meter, HARD * 95 // 100 + kept_bytes)
    world.core.relieve()
    after = statistics(world.core)
    assert (after["kept_frame_bytes"], after["read_buffer_bytes"]) == (0, 0)
    assert (after["evictions"], after["resident_bytes"]) == (figures["evictions"], figures["resident_bytes"])
    meter.footprint_bytes = 2 * HARD
    world.core.relieve()
    assert statistics(world.core)["resident_bytes"] < after["resident_bytes"]
    assert statistics(world.core)["kept_frame_bytes"] == 0, "what was given up is not kept"


def test_a_smaller_budget_gives_back_what_is_kept_for_reads(make_world: Callable[..., World]) -> None:
    """P21: at once; what is kept for frames follows the budget."""
    world = make_world(limits=LimitSettings(least_bytes=1))
    assert world.generate("a", text_of(60), max_tokens=1).turn.durable
    world.job("evict", "a")
    assert world.generate("a", world.text("a") + " more", max_tokens=1).turn.cached_tokens
    assert statistics(world.core)["read_buffer_bytes"] > 0
    budget_bytes = world.core.pager.budget.budget_bytes // 2
    world.core.limits.change(LimitChange(budget_bytes=budget_bytes))
    figures = statistics(world.core)
    assert figures["read_buffer_bytes"] == 0
    assert figures["kept_frame_bytes"] <= budget_bytes // 16
