"""The engine loads ahead for whom it expects, tells what became of it, and slows admission down when pages thrash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.model.tokenizer import TextCodec
from kvd.scheduler import views
from kvd.scheduler.core import EngineCore
from kvd.scheduler.thrashing import LEAST_REFAULTS
from tests.scheduler.harness import World, ref_of
from tests.scheduler.test_engine import Gate, Runner
from tests.scheduler.test_turn import text_of

TURNS = 4
LINES = 26


@pytest.fixture
def make_runner(tmp_path: Path, codec: TextCodec) -> Iterator[Callable[..., Runner]]:
    """Makes engines that have started; they are stopped at the end."""
    runners: list[Runner] = []

    def make(**options: Any) -> Runner:
        runner = Runner(tmp_path / str(len(runners)), codec, **options)
        runners.append(runner)
        runner.start()
        return runner

    yield make
    for runner in runners:
        runner.stop()


def agent_bytes(runner: Runner) -> int:
    """Bytes of an agent's pages after `TURNS` more turns of two tokens."""

    def look(core: EngineCore) -> int:
        return core.pager.working_set_bytes(core.agents.get(ref_of("a")).branch.space, 2 * TURNS)

    return int(runner.look(look))


def room_for(make_runner: Callable[..., Runner], agents: float, **options: Any) -> Runner:
    """An engine whose budget has room for so many agents of `LINES` lines in whole frames; idle ones take less."""
    probe = make_runner()
    probe.turn("a", text_of(LINES)).wait()
    page_bytes = probe.look(lambda core: sum(core.page_bytes(core.agents.get(ref_of("a")).branch.space)))
    return make_runner(budget_bytes=int(agents * agent_bytes(probe)) + 3 * page_bytes, **options)


def take_turns(runner: Runner, names: str, rounds: int, texts: dict[str, str]) -> list[dict[str, Any]]:
    """Agents one after the other, each continued by what it said."""
    results = []
    for name in rounds * list(names):
        texts.setdefault(name, text_of(LINES))
        result = runner.turn(name, texts[name]).result
        texts[name] += result["text"]
        results.append(result)
        runner.look(lambda core: None)  # what the turn's end set going has begun
    return results


def figures(runner: Runner) -> dict[str, Any]:
    """Statistics, once no load is under way."""
    loading = 1
    while loading:
        found: dict[str, Any] = runner.look(views.statistics)
        loading = found["pages"]["loading"] + found["pages"]["loading_tail"]
    return found


def test_agents_that_take_turns_are_expected(make_runner: Callable[..., Runner]) -> None:
    """Round robin of three with room for two: the next agent is always expected, and pages loaded for it are used."""
    runner = room_for(make_runner, 1.7, sharing="agent")
    texts: dict[str, str] = {}
    take_turns(runner, "abc", 2, texts)
    before = figures(runner)
    take_turns(runner, "abc", TURNS - 2, texts)
    after = figures(runner)
    assert after["prediction_hits"] - before["prediction_hits"] == 3 * (TURNS - 2)
    assert after["prediction_misses"] == before["prediction_misses"]
    assert after["prefetched_pages"]["predicted"] > before["prefetched_pages"]["predicted"]
    assert after["prefetch_used_pages"]["predicted"] > before["prefetch_used_pages"]["predicted"]
    for reason in ("queued", "hint", "predicted"):
        ends = sum(after[f"prefetch_{end}_pages"][reason] for end in ("used", "wasted", "unknown"))
        assert after["prefetched_pages"][reason] == ends


def test_a_predicted_agent_comes_in_while_another_computes(make_runner: Callable[..., Runner]) -> None:
    """While the model is busy with one agent, the next one's pages arrive; its turn then waits for nothing."""
    runner = room_for(make_runner, 1.7, sharing="agent")
    texts: dict[str, str] = {}
    take_turns(runner, "abc", 2, texts)
    gate = Gate(runner.model)
    running = runner.turn("a", texts["a"], max_tokens=12)
    assert gate.entered.wait(20)
    gate.go_on.set()
    running.wait()
    figures(runner)
    assert runner.turn("b", texts["b"]).result["swapped_in_pages"] == 0


@pytest.mark.parametrize("agents", [1.4, 1.55, 1.7])
def test_a_turn_that_starts_is_not_robbed_for_its_successor(make_runner: Callable[..., Runner], agents: float) -> None:
    """A round of three with room for fewer: once the round is known, each turn finds all of its pages, none in vain.

    Who has just started is expected no more; what is loaded for the next one must not come out of its pages.
    """
    runner = room_for(make_runner, agents, sharing="agent")
    texts: dict[str, str] = {}
    take_turns(runner, "abc", 2, texts)
    before = figures(runner)
    for name in (TURNS - 2) * "abc":
        (result,) = take_turns(runner, name, 1, texts)
        assert result["swapped_in_pages"] == 0
        figures(runner)
    after = figures(runner)
    assert after["prefetch_used_pages"]["predicted"] > before["prefetch_used_pages"]["predicted"]
    assert after["prefetch_wasted_pages"]["predicted"] == before["prefetch_wasted_pages"]["predicted"]


@pytest.mark.parametrize(("prefetch", "reasons"), [("off", set()), ("hints", {"queued"})])
def test_the_setting_says_what_is_loaded_ahead(
    make_runner: Callable[..., Runner], prefetch: str, reasons: set[str]
) -> None:
    """`hints`: for turns that wait only; `off`: nothing; what a client asks for is loaded always."""
    runner = room_for(make_runner, 1.5, sharing="agent", prefetch=prefetch, max_batch=2)
    texts: dict[str, str] = {}
    take_turns(runner, "ab", 2, texts)
    answers = [runner.turn(name, texts[name], max_tokens=6) for name in "ab"]
    assert all(answer.result["durable"] for answer in answers)
    loaded = figures(runner)["prefetched_pages"]
    assert {reason for reason, pages in loaded.items() if pages} <= reasons
    runner.job("evict", "a").wait()
    runner.job("prefetch", "a").wait()
    assert figures(runner)["prefetched_pages"]["hint"] > 0


def test_a_turn_that_waits_for_room_is_loaded_ahead(make_world: Callable[..., World]) -> None:
    """A turn that was started and waits beside others is as certain as one in the queue."""
    world = make_world(budget_pages=14, sharing="agent")
    world.generate("a", text_of(LINES))
    world.generate("b", text_of(LINES))
    world.job("evict", "a")
    space = world.agent("a").branch.space
    before = world.core.pager.statistics().prefetched["queued"].pages
    world.core.paging.expect(space)
    world.settle()
    assert world.core.pager.statistics().prefetched["queued"].pages > before
    assert world.core.pager.residency(space).stored_pages == 0


@pytest.mark.parametrize("cancel_after", [None, 0, 1])
def test_who_waits_for_pages_is_counted_until_they_came_or_it_gave_up(
    make_world: Callable[..., World], cancel_after: int | None
) -> None:
    """The engine's idle time is swapping in that shows only while somebody waits for it."""
    world = make_world(budget_pages=14)
    world.generate("a", text_of(LINES))
    world.job("evict", "a")
    seen: list[int] = []
    world.generate(
        "a", world.text("a"), cancel_after=cancel_after, on_step=lambda _: seen.append(world.core.page_waits)
    )
    assert max(seen) == 1
    assert world.core.page_waits == 0


def test_a_turn_that_was_cancelled_in_the_queue_is_expected_no_more(make_runner: Callable[..., Runner]) -> None:
    """Its pages are as evictable as any idle agent's."""
    runner = make_runner()
    texts: dict[str, str] = {}
    take_turns(runner, "a", 1, texts)
    gate = Gate(runner.model)
    running = runner.turn("b", "two", max_tokens=3)
    assert gate.entered.wait(20)
    queued = runner.turn("a", texts["a"])
    runner.cancel(queued)
    gate.go_on.set()
    running.wait()
    queued.wait()
    claim = runner.look(lambda core: core.pager._spaces[core.agents.get(ref_of("a")).branch.space].use.hint)
    assert claim is None


def test_jobs_that_wait_expect_no_pages(make_runner: Callable[..., Runner]) -> None:
    """A turn that was cancelled in the queue before a job of its agent is expected no more once both are answered."""
    runner = make_runner()
    texts: dict[str, str] = {}
    take_turns(runner, "a", 1, texts)
    gate = Gate(runner.model)
    running = runner.turn("b", "two", max_tokens=3)
    assert gate.entered.wait(20)
    queued, job = runner.turn("a", texts["a"]), runner.job("unpin", "a")
    runner.cancel(queued)
    gate.go_on.set()
    for answer in (running, queued, job):
        answer.wait()
    claim = runner.look(lambda core: core.pager._spaces[core.agents.get(ref_of("a")).branch.space].use.hint)
    assert claim is None


def test_a_turn_that_was_refused_says_nothing_about_thrashing(make_runner: Callable[..., Runner]) -> None:
    """Only turns that held pages lower the number of turns that may."""
    runner = make_runner(max_batch=4)

    def thrash(core: EngineCore) -> int:
        core.thrashing.turn_ended(needed=LEAST_REFAULTS, refaults=LEAST_REFAULTS, together=4)
        return core.thrashing.limit

    assert runner.look(thrash) == 3
    assert runner.turn("a", "").error.name == "invalid_params"
    assert runner.look(lambda core: core.thrashing.limit) == 3


def test_thrashing_is_noticed_told_and_everybody_is_answered(make_runner: Callable[..., Runner]) -> None:
    """Two agents with room for little more than one, nothing loaded ahead: `thrashing` until it is over."""
    runner = room_for(make_runner, 0.9, sharing="agent", prefetch="off", max_batch=4, max_queued=64)
    names, texts = "ab", {name: text_of(LINES) for name in "ab"}
    assert not runner.engine.queue_facts["thrashing"]
    for _ in range(2 * TURNS):
        answers = {name: runner.turn(name, texts[name]) for name in names}
        for name, answer in answers.items():
            texts[name] += answer.result["text"]
    found = figures(runner)
    assert found["refaults"] >= LEAST_REFAULTS
    assert found["refaults"] <= found["faults"]
    assert found["thrashing_episodes"] >= 1
    assert 1 <= found["admission_limit"] <= 4
    assert runner.engine.queue_facts["thrashing"] == found["thrashing"]
    assert runner.look(lambda core: core.reservations.waiting + core.reservations.holding) == 0

    def rest(core: EngineCore) -> None:
        for _ in range(40):
            core.paging.tick()

    runner.look(rest)
    assert figures(runner)["thrashing"] is False
    assert figures(runner)["admission_limit"] == 4
