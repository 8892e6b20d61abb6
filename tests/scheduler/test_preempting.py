"""Preemption: a background turn is swapped out for an interactive one and goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.errors import Cancelled
from kvd.ids import RequestId
from kvd.model.tokenizer import TextCodec
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.core import EngineCore
from kvd.scheduler.requests import TurnRequest
from kvd.scheduler.sampling import SamplingParams
from kvd.scheduler.state import MAX_PREEMPTIONS
from kvd.scheduler.steps import run_steps
from kvd.scheduler.turn import TurnState, run_turn
from kvd.scheduler.waiting import Parked, StepWanted
from kvd.vm.events import BudgetChanged, EvictionWanted
from tests.scheduler.fake_model import FakeModel, Truth, make_formats, make_spec
from tests.scheduler.harness import World, content, ref_of
from tests.scheduler.test_engine import Answer, Runner
from tests.support.prose import prose

TIGHT_BYTES = 240_000
"""Room for one agent of a thousand tokens, and little beside it."""

SAMPLING = SamplingParams(temperature=0.9, seed=7)
LONG = prose(900, "background")


@pytest.fixture
def make_runner(tmp_path: Path, codec: TextCodec) -> Iterator[Callable[..., Runner]]:
    """Makes engines that have started; at the end their books are looked at and they are stopped."""
    runners: list[Runner] = []

    def make(**options: Any) -> Runner:
        runner = Runner(tmp_path / str(len(runners)), codec, **{"max_queued": 64, "decode_share": 0.0, **options})
        runners.append(runner)
        runner.start()
        return runner

    yield make
    for runner in runners:
        if runner.engine._thread.is_alive():
            check(runner)
            runner.stop()


def check(runner: Runner) -> None:
    """Nothing is reserved or parked when all is done, and every page in RAM has its agent's bytes."""
    for answer in runner.answers:
        answer.wait()
    spec = make_spec(runner.codec.token_count, window=runner.window)
    truth = Truth(FakeModel(runner.codec.token_count), spec, make_formats(spec))

    def look(core: EngineCore) -> int:
        core.pager.check_integrity()
        for agent in core.agents:
            for branch in agent.branches.values():
                World.check_branch(SimpleNamespace(core=core, truth=truth), branch)  # type: ignore[arg-type]
        return core.reservations.reserved_bytes + core.reservations.waiting

    assert runner.look(look) == 0
    assert runner.engine._scheduler.is_idle
    assert runner.ready == [None]


def lone(make_runner: Callable[..., Runner], text: str = LONG, max_tokens: int = 40, **options: Any) -> dict[str, Any]:
    """What the background turn says when nobody disturbs it."""
    runner = make_runner(**options)
    answer = runner.turn("slow", text, max_tokens=max_tokens, sampling=SAMPLING)
    return {"events": answer.events, **answer.result} if answer.wait() else {}


class Meddler:
    """Does something to the engine when the background turn's stream gets so far.

    Args:
        kind: type of event.
        at: does it at so many of them.
        act: what to do, on the engine thread; what it submits comes with the next look at the inbox.
    """

    def __init__(self, kind: str, at: int, act: Callable[[], None]) -> None:
        self.events: list[dict[str, Any]] = []
        self._kind, self._at, self._act = kind, at, act

    def __call__(self, event: Any) -> None:
        """Take an event."""
        self.events.append(dict(event))
        if self.of(self._kind) == self._at and event["type"] == self._kind:
            self._act()

    def of(self, kind: str) -> int:
        """How many of a type there were."""
        return sum(event["type"] == kind for event in self.events)

    @property
    def text(self) -> str:
        """All text events together."""
        return "".join(event["text"] for event in self.events if event["type"] == "text")


@pytest.mark.parametrize(("kind", "at"), [("prefill", 1), ("prefill", 4), ("text", 1), ("text", 12), ("matched", 1)])
@pytest.mark.parametrize("cause", ["slot", "memory"])
def test_a_preempted_turn_says_what_it_says_undisturbed(
    make_runner: Callable[..., Runner], kind: str, at: int, cause: str
) -> None:
    """P33: swapped out in mid-prefill or mid-decode, its pages evicted: same text, same draws, same stream, same KV."""
    options = {"max_batch": 1} if cause == "slot" else {"max_batch": 4, "budget_bytes": TIGHT_BYTES}
    expected = lone(make_runner, **options)
    runner = make_runner(**options)
    quick: list[Answer] = []
    meddler = Meddler(kind, at, lambda: quick.append(runner.turn("quick", prose(700, "quick"), max_tokens=3)))
    slow = runner.turn("slow", LONG, max_tokens=40, sampling=SAMPLING, priority="background", emit=meddler)
    result = slow.result
    assert quick[0].result["completion_tokens"] == 3
    assert result["text"] == meddler.text == expected["text"]
    assert result["preemptions"] == 1
    assert result["durable"] is True
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "finish_reason", "match"):
        assert result[name] == expected[name]
    told = [event for event in meddler.events if event["type"] not in ("preempted", "resumed", "queued")]
    assert told == expected["events"]
    assert [e["type"] for e in meddler.events if e["type"] in ("preempted", "resumed")] == ["preempted", "resumed"]
    lines = {line.agent: line for line in runner.lines}
    assert lines["slow"].preemptions == 1
    assert lines["quick"].preemptions is None
    assert [line.agent for line in runner.lines] == ["quick", "slow"]
    stats = runner.look(lambda core: core.stats)
    assert stats.preemptions == 1
    assert stats.tokens_computed == sum(
        a["prompt_tokens"] + a["completion_tokens"] - 1 for a in (quick[0].result, result)
    )
    if cause == "memory" and kind == "text":
        assert result["swapped_in_pages"] > 0, "its pages made room"
    again = runner.turn("slow", LONG + result["text"], max_tokens=1)
    assert again.result["cached_tokens"] >= result["prompt_tokens"] + result["completion_tokens"] - 1


def test_everybody_runs_when_places_suffice(make_runner: Callable[..., Runner]) -> None:
    """Nobody is preempted while there is a slot and room."""
    runner = make_runner(max_batch=4)
    quick: list[Answer] = []
    meddler = Meddler("text", 3, lambda: quick.append(runner.turn("quick", prose(20, "quick"))))
    slow = runner.turn("slow", LONG, max_tokens=10, priority="background", emit=meddler)
    assert slow.result["preemptions"] == quick[0].result["preemptions"] == 0


def test_interactive_turns_preempt_no_interactive_ones(make_runner: Callable[..., Runner]) -> None:
    """Who is not in the background keeps its slot and its place."""
    runner = make_runner(max_batch=1)
    meddler = Meddler("text", 3, lambda: runner.turn("quick", prose(20, "quick")) and None)
    assert runner.turn("slow", LONG, max_tokens=10, emit=meddler).result["preemptions"] == 0


def test_after_some_preemptions_a_turn_runs_to_its_end(make_runner: Callable[..., Runner]) -> None:
    """However many interactive requests come, each turn is preempted a bounded number of times."""
    runner = make_runner(max_batch=1)
    expected = lone(make_runner)["text"]

    def emit(event: Any) -> None:
        seen.append(event["type"])
        if event["type"] == "text":
            runner.turn(f"quick-{len(seen)}", prose(10, len(seen)), max_tokens=1)

    seen: list[str] = []
    slow = runner.turn("slow", LONG, max_tokens=40, sampling=SAMPLING, priority="background", emit=emit)
    assert slow.result["preemptions"] == seen.count("preempted") == seen.count("resumed") == MAX_PREEMPTIONS
    assert slow.result["text"] == expected


@pytest.mark.parametrize("how", ["cancel", "line", "timeout", "drain", "stop"])
def test_a_preempted_turn_can_end(make_runner: Callable[..., Runner], how: str) -> None:
    """P34: cancelled or out of time while it is out, it commits what it has and a retry goes on from there.

    `line`: it has a slot again and waits for its place in RAM. A drain waits for it; a stop answers it.
    """
    now_s = 0.0
    options = {"max_batch": 4, "budget_bytes": TIGHT_BYTES} if how == "line" else {"max_batch": 1}
    runner = make_runner(clock=lambda: now_s, **options)
    slow: list[Answer] = []

    def act(event: Any) -> None:
        nonlocal now_s
        if event["type"] == "text":
            if how in ("cancel", "line"):
                runner.cancel(slow[0])
            elif how == "drain":
                runner.engine.drain()
            elif how == "timeout":
                now_s = 11.0

    meddler = Meddler("text", 8, lambda: quick.append(runner.turn("quick", prose(700, "q"), max_tokens=30, emit=act)))
    quick: list[Answer] = []
    slow.append(
        runner.turn(
            "slow",
            LONG,
            max_tokens=40,
            priority="background",
            emit=meddler,
            timeout_s=10.0 if how == "timeout" else None,
        )
    )
    if how == "stop":
        while not meddler.of("preempted"):
            runner.look(lambda core: None)
        runner.stop()
        assert "stopped" in slow[0].error.message
        return
    slow[0].wait()
    assert quick[0].result["completion_tokens"] == 30
    if how == "drain":
        assert slow[0].result["completion_tokens"] == 40
        return
    error = slow[0].error
    assert isinstance(error, Cancelled)
    assert ("timed out after 10 s" if how == "timeout" else "cancelled by the client") in error.message
    assert error.data["durable"] is True
    assert 8 <= error.data["completion_tokens"] <= 10
    assert meddler.of("resumed") == 0
    retry = runner.turn("slow", LONG, max_tokens=1)
    assert retry.result["cached_tokens"] == retry.result["prompt_tokens"] - 1


def test_a_preempted_agent_is_still_busy(make_runner: Callable[..., Runner]) -> None:
    """P33: a rollback, a deletion or another turn of its agent waits until the turn that was preempted has ended."""
    runner = make_runner(max_batch=1)
    later: list[Answer] = []

    def act(event: Any) -> None:
        if event["type"] == "text" and not later:
            later.append(runner.job("rollback", "slow", tokens=5))
            later.append(runner.job("evict", "slow"))
            later.append(runner.turn("slow", LONG, max_tokens=1))
            later.append(runner.job("delete", "slow"))

    meddler = Meddler("text", 5, lambda: runner.turn("quick", prose(10, "q"), max_tokens=20, emit=act) and None)
    slow = runner.turn("slow", LONG, max_tokens=20, priority="background", emit=meddler)
    assert slow.result["completion_tokens"] == 20
    assert later[0].result["tokens"] == 5
    assert later[2].result["match"] in ("diverge", "extend")
    assert later[3].result["deleted"] is True
    assert [(line.agent, line.method) for line in runner.lines if line.agent == "slow"] == [
        ("slow", "generate"),
        ("slow", "agent.rollback"),
        ("slow", "agent.evict"),
        ("slow", "generate"),
        ("slow", "agent.delete"),
    ]


def test_a_smaller_budget_preempts_what_it_does_not_hold(make_runner: Callable[..., Runner]) -> None:
    """P21: the budget shrinks below what is reserved: the turn let in last makes way, whatever its priority.

    It ends later with its own text.
    """
    expected = lone(make_runner)["text"]
    runner = make_runner(max_batch=2, budget_bytes=3 * TIGHT_BYTES)
    first = runner.turn("first", prose(600, "first"), max_tokens=60)
    meddler = Meddler(
        "text", 4, lambda: runner.engine.call(lambda core: core.memory.apply(BudgetChanged(TIGHT_BYTES))) and None
    )
    slow = runner.turn("slow", LONG, max_tokens=40, sampling=SAMPLING, emit=meddler)
    assert first.result["completion_tokens"] == 60
    assert slow.result["text"] == expected
    assert slow.result["preemptions"] == 1


def test_open_pages_are_given_up_when_they_alone_stand_in_the_way(make_runner: Callable[..., Runner]) -> None:
    """A request that needs all there is gets in although the preempted one's open page is nowhere but in RAM.

    Its KV is computed again, and its text is what it was.
    """
    expected = lone(make_runner, prose(300, "slow"), 20)["text"]
    runner = make_runner(max_batch=4, budget_bytes=TIGHT_BYTES)

    def pages(core: EngineCore) -> int:
        layouts = [core.formats.layouts[group, name] for group, name in enumerate(core.formats.default_ids)]
        return core.pager.usable_bytes // sum(layout.payload_bytes for layout in layouts)

    runner.turn("first", "one", max_tokens=1).wait()  # before the first agent the budget keeps no reserves
    before = runner.look(lambda core: core.stats.tokens_computed)
    most_tokens = PAGE_TOKENS * runner.look(pages)
    words = (most_tokens - 3) // 10 * 10
    max_tokens = most_tokens - len(runner.codec.encode_content(prose(words, "q")))
    assert 2 <= max_tokens < 100
    quick: list[Answer] = []
    meddler = Meddler("text", 4, lambda: quick.append(runner.turn("quick", prose(words, "q"), max_tokens=max_tokens)))
    slow = runner.turn(
        "slow", prose(300, "slow"), max_tokens=20, sampling=SAMPLING, priority="background", emit=meddler
    ).result
    assert quick[0].result["completion_tokens"] == max_tokens
    assert slow["preemptions"] == 1
    assert slow["text"] == expected
    made = sum(a["prompt_tokens"] + a["completion_tokens"] - 1 for a in (quick[0].result, slow))
    again = runner.look(lambda core: core.stats.tokens_computed) - before - made
    assert 0 < again < PAGE_TOKENS


def test_evicted_while_it_is_out_it_reads_its_pages_again(make_runner: Callable[..., Runner]) -> None:
    """Its pages may go whoever wants them gone; what it has computed is not computed again."""
    runner = make_runner(max_batch=1)
    meddler = Meddler("text", 5, lambda: runner.turn("quick", prose(10, "q"), max_tokens=20, emit=evict) and None)
    space: list[Any] = []

    def evict(event: Any) -> None:
        if event["type"] == "first_token":
            runner.engine.call(lambda core: core.memory.apply(EvictionWanted(space[0])))

    said = runner.turn("slow", LONG, max_tokens=5).result["text"]
    space.append(runner.look(lambda core: core.agents.get(ref_of("slow")).branch.space))
    more = LONG + said + prose(20, "more")
    before = runner.look(lambda core: core.stats.tokens_computed)
    slow = runner.turn("slow", more, max_tokens=20, priority="background", emit=meddler).result
    assert slow["preemptions"] == 1
    assert slow["swapped_in_pages"] >= 3
    computed = runner.look(lambda core: core.stats.tokens_computed) - before
    assert computed <= slow["prompt_tokens"] - slow["cached_tokens"] + 20 + 40


@pytest.mark.parametrize("at", [3, 9, 14])
def test_a_kill_while_a_turn_is_preempted_loses_that_turn_only(make_world: Callable[..., World], at: int) -> None:
    """P2: what was durable before it began is there; the turn itself was not answered, and a retry makes it whole."""
    world = make_world()
    first = world.generate("a", LONG, max_tokens=2).turn
    prompt = LONG + first.text + prose(400, "more")
    request = TurnRequest(RequestId(999), ref_of("a"), content(prompt), max_tokens=12, priority="background")
    state = TurnState(request, 0.0)
    work = run_turn(world.core, state)
    steps = 0
    wait: Any = None
    while not isinstance(wait, Parked):
        if isinstance(wait, StepWanted):
            steps += 1
            state.slot_wanted = steps == at
            run_steps(world.core, [wait])
        if wait is None or wait():
            wait = next(work)
        else:
            assert world.step_store()
    while world.step_store():
        pass
    world.crash()
    work.close()
    assert world.text("a") == LONG + first.text
    again = world.generate("a", prompt, max_tokens=12).turn
    assert again.cached_tokens >= first.prompt_tokens + 1
    assert again.text == make_world().generate("b", prompt, max_tokens=12).turn.text


def test_a_turn_cancelled_anywhere_keeps_what_it_computed(make_world: Callable[..., World]) -> None:
    """P34: cancelled at each of its waits (swap-in, prefill, decode, commit), a retry after a crash resumes there."""
    world = make_world(budget_pages=24)
    ends = set()
    for after in range(0, 34, 2):
        name = f"agent-{after}"
        said = world.generate(name, prose(400, name), max_tokens=1).turn.text
        world.job("evict", name)
        prompt = prose(400, name) + said + prose(300, f"{name}-more")
        outcome = world.generate(name, prompt, max_tokens=6, cancel_after=after)
        ends.add("done" if outcome.error is None else outcome.events[-1]["type"] if outcome.events else "swap-in")
        assert outcome.error is None or isinstance(outcome.error, Cancelled)
        computed = world.agent(name).branch.computed
        world.crash()
        retry = world.generate(name, prompt, max_tokens=1).turn
        assert retry.cached_tokens >= min(computed, retry.prompt_tokens - 1), after
    assert {"swap-in", "durable", "done"} <= ends


@pytest.mark.parametrize("cause", ["slot", "memory"])
def test_a_turn_that_its_agents_next_one_waits_for_is_not_preempted(
    make_runner: Callable[..., Runner], cause: str
) -> None:
    """P13: a nudge that the agent's own question waits for keeps slot and place; another agent's question comes after.

    Once the question is cancelled the nudge gives way as before.
    """
    options = {"max_batch": 1} if cause == "slot" else {"max_batch": 4, "budget_bytes": TIGHT_BYTES}
    runner = make_runner(**options)
    question: list[Answer] = []

    def ask() -> None:
        question.append(runner.turn("slow", LONG, max_tokens=1))
        runner.turn("quick", prose(700, "quick"), max_tokens=1)

    slow = runner.turn("slow", LONG, max_tokens=12, priority="background", emit=Meddler("text", 3, ask))
    assert slow.result["preemptions"] == 0
    assert question[0].result["completion_tokens"] == 1
    runner.answers[2].wait()
    assert [line.agent for line in runner.lines[:1]] == ["slow"]

    def take_back(event: Any) -> None:
        meddler(event)
        if meddler.of("text") == 6 and event["type"] == "text":
            runner.cancel(question[-1])

    runner.job("delete", "quick").wait()
    meddler = Meddler("text", 3, ask)
    slow = runner.turn("slow", LONG, max_tokens=40, priority="background", emit=take_back)
    assert slow.result["preemptions"] == 1
    assert isinstance(question[1].error, Cancelled)


def test_a_turn_that_ends_instead_of_giving_way_may_be_told_otherwise(make_runner: Callable[..., Runner]) -> None:
    """The engine goes on when it would tell a turn that has just been answered that its slot is not needed any more.

    That happens when the one that needs it must wait, since the engine tries again to save that one's agent.
    """
    runner = make_runner(max_batch=1)
    runner.fs.refuses = True
    assert runner.turn("quick", "one", max_tokens=1).result["durable"] is False

    def act() -> None:
        runner.fs.refuses = False
        upkeep = runner.engine._upkeep
        assert upkeep is not None
        upkeep._disk.until_s = 0.0  # the next try is due
        runner.turn("quick", "one", max_tokens=1)

    slow = runner.turn("slow", "two", max_tokens=3, priority="background", emit=Meddler("usage", 1, act))
    assert slow.result["preemptions"] == 0
    assert runner.answers[-1].result["durable"] is True


def go_on(world: World, work: Any, wait: Any) -> None:
    """Resume a turn that waits, until it ends."""
    while True:
        if wait is None or wait():
            wait = next(work)
        else:
            assert world.step_store()


def test_what_a_cancelled_turn_commits_is_not_taken_from_it(make_world: Callable[..., World]) -> None:
    """P34: cancelled while it is out, a turn commits its open page, although another one could use the room at once."""
    world = make_world()
    request = TurnRequest(RequestId(999), ref_of("a"), content(LONG), max_tokens=12, priority="background")
    state = TurnState(request, 0.0)
    work = run_turn(world.core, state)
    wait: Any = None
    while not isinstance(wait, Parked):
        if isinstance(wait, StepWanted):
            run_steps(world.core, [wait])
            state.slot_wanted = world.agent("a").branch.computed > 902
        if wait is None or wait():
            wait = next(work)
        else:
            assert world.step_store()
    line = world.core.reservations
    assert line.kept_bytes > 0
    state.cancelled = True
    wait = next(work)
    all_there_is = line.ask(world.core.pager.usable_bytes)
    assert not line.is_in(all_there_is)
    with pytest.raises(Cancelled) as ended:
        go_on(world, work, wait)
    assert line.is_in(all_there_is)
    line.release(all_there_is)
    computed = world.agent("a").branch.computed
    assert computed % PAGE_TOKENS
    assert ended.value.data["durable"] is True
    world.crash()
    assert world.agent("a").branch.computed == computed
    world.check()
