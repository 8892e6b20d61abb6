"""Limits changed while requests run: what fits goes on, what never will is told so, and the books stay right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import BudgetExceeded, InvalidParams
from kvd.ids import DEFAULT_NAMESPACE, AgentId, Namespace
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.core import EngineCore
from kvd.scheduler.limits import LimitChange, LimitSettings
from kvd.scheduler.requests import AgentRef, TurnRequest
from tests.scheduler.harness import content
from tests.scheduler.test_engine import WAIT_S, Answer, Gate, Runner
from tests.scheduler.test_preempting import LONG, SAMPLING, TIGHT_BYTES, Meddler, check, lone
from tests.support.prose import prose

LIMITS = LimitSettings(least_bytes=50_000, largest_budget_bytes=1 << 22, largest_reason="as the test says")


@pytest.fixture
def make_runner(tmp_path: Path, codec: TextCodec) -> Iterator[Callable[..., Runner]]:
    """Makes engines of four slots that have started; at the end their books are looked at and they are stopped."""
    runners: list[Runner] = []

    def make(**options: Any) -> Runner:
        options = {"max_queued": 64, "max_batch": 4, "decode_share": 0.0, "limits": LIMITS, **options}
        runner = Runner(tmp_path / str(len(runners)), codec, **options)
        runners.append(runner)
        runner.start()
        return runner

    yield make
    for runner in runners:
        check(runner)
        runner.look(pool_agrees)
        runner.stop()


def pool_agrees(core: EngineCore) -> None:
    """The pool is held to what the pager is held to, once that is reached."""
    core.limits.settle()
    figures = core.pager.statistics()
    assert not figures.converging
    assert core.memory.pool.budget_bytes == figures.budget_bytes
    assert core.memory.pool.resident_bytes + figures.packed_bytes == figures.resident_bytes <= figures.budget_bytes


def configure(runner: Runner, **change: Any) -> dict[str, Any]:
    """Change limits and wait."""
    facts = runner.engine.configure(LimitChange(**change)).result(WAIT_S)
    assert isinstance(facts, dict)
    return facts


def test_asking_changes_nothing_and_tells_what_is_in_force(make_runner: Callable[..., Runner]) -> None:
    """Without a value nothing is set; what bounds what is told in bytes."""
    runner = make_runner(budget_bytes=1 << 20)
    runner.turn("a", prose(300, "a")).wait()
    facts = configure(runner)
    assert (facts["budget_bytes"], facts["start_budget_bytes"], facts["largest_budget_bytes"]) == (
        1 << 20,
        1 << 20,
        1 << 22,
    )
    assert 0 < facts["resident_bytes"] <= facts["low_mark_bytes"] <= facts["high_mark_bytes"] <= facts["usable_bytes"]
    assert facts["pin_limit_bytes"] == facts["usable_bytes"] // 2
    assert facts["footprint_bytes"] > 1 << 20
    assert (facts["converging"], facts["until_restart"]) == ([], [])
    assert not [event for event, _ in runner.logged if event == "budget_changed"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget_bytes": 49_999}, "budget must be from 50 KB to 4.19 MB (as the test says), not 50 KB"),
        ({"budget_bytes": (1 << 22) + 1}, "budget must be from 50 KB to 4.19 MB"),
        ({"namespace_quotas": {"a": 1}}, "the quota of namespace 'a' must be at least 50 KB, or none, not 1 B"),
        (
            {"namespace_disk_quotas": {"a": 1}},
            "the disk quota of namespace 'a' must be at least 50 KB, or none, not 1 B",
        ),
        ({"budget_bytes": 60_000, "namespace_quotas": {"a": 1}}, "must be at least 50 KB"),
    ],
)
def test_a_bad_value_is_refused_with_the_allowed_ones(
    make_runner: Callable[..., Runner], change: dict[str, Any], words: str
) -> None:
    """P39: the error names what is allowed, and of several changes none is made."""
    runner = make_runner(budget_bytes=1 << 20)
    with pytest.raises(InvalidParams) as caught:
        configure(runner, **change)
    assert words in caught.value.message
    facts = configure(runner)
    assert (facts["budget_bytes"], facts["namespace_quotas"], facts["until_restart"]) == (1 << 20, {}, [])


def test_idle_pages_go_at_once_and_come_back_when_they_are_needed(make_runner: Callable[..., Runner]) -> None:
    """P21: a smaller budget is in force when the call returns; P30: nothing of what was evicted is forgotten."""
    runner = make_runner(budget_bytes=1 << 20)
    texts = {name: prose(500, name) for name in ("a", "b", "c")}
    answers = {name: runner.turn(name, text, max_tokens=4) for name, text in texts.items()}
    said = {name: answer.result["text"] for name, answer in answers.items()}
    facts = configure(runner, budget_bytes=TIGHT_BYTES)
    assert facts["budget_bytes"] == TIGHT_BYTES
    assert facts["resident_bytes"] <= TIGHT_BYTES
    assert (facts["converging"], facts["until_restart"]) == ([], ["budget"])
    for name, text in texts.items():
        result = runner.turn(name, text + said[name], max_tokens=1).result
        assert result["cached_tokens"] == result["prompt_tokens"] - 1
    assert configure(runner, budget_bytes=1 << 20)["until_restart"] == []
    logged = [event for event, _ in runner.logged if event.startswith("budget_")]
    assert logged == ["budget_changed", "budget_reached"] * 2


def test_turns_that_fit_one_after_the_other_take_turns(make_runner: Callable[..., Runner]) -> None:
    """P21: the one let in last makes way and ends later with its own text; the answer says what is still to come."""
    expected = lone(make_runner)["text"]
    runner = make_runner(budget_bytes=3 * TIGHT_BYTES)
    changed: list[Any] = []
    first = runner.turn("first", prose(600, "first"), max_tokens=60)
    meddler = Meddler("text", 4, lambda: changed.append(runner.engine.configure(LimitChange(TIGHT_BYTES))))
    slow = runner.turn("slow", LONG, max_tokens=40, sampling=SAMPLING, emit=meddler)
    assert first.result["completion_tokens"] == 60
    assert slow.result["text"] == expected
    assert (first.result["preemptions"], slow.result["preemptions"]) == (0, 1)
    assert changed[0].result(WAIT_S)["converging"] == ["budget"]


@pytest.mark.parametrize(("kind", "at"), [("prefill", 1), ("text", 3)])
def test_a_running_turn_that_can_never_fit_any_more_ends_with_both_figures(
    make_runner: Callable[..., Runner], kind: str, at: int
) -> None:
    """P22: it is told what it needs and what there is; what it computed is kept, and is a hit once there is room."""
    runner = make_runner(budget_bytes=1 << 20)
    meddler = Meddler(kind, at, lambda: runner.engine.configure(LimitChange(TIGHT_BYTES // 2)) and None)
    error = runner.turn("slow", LONG, max_tokens=200, emit=meddler).error
    assert isinstance(error, BudgetExceeded)
    figures = configure(runner)
    assert error.data["needed_bytes"] > error.data["usable_bytes"] == figures["usable_bytes"]
    assert f"need {error.data['needed_bytes']} bytes of pages" in error.message
    assert error.data["durable"] is True
    assert figures["resident_bytes"] <= figures["budget_bytes"] == TIGHT_BYTES // 2
    assert [line.outcome for line in runner.lines] == ["budget_exceeded"]
    configure(runner, budget_bytes=1 << 20)
    again = runner.turn("slow", LONG, max_tokens=1).result
    assert again["cached_tokens"] >= 128 if kind == "prefill" else again["cached_tokens"] == again["prompt_tokens"] - 1


def test_a_turn_that_waits_and_can_never_fit_is_refused_while_others_run(make_runner: Callable[..., Runner]) -> None:
    """P22: it is not left in line behind the one it waits for; nothing of its agent was made."""
    runner = make_runner(budget_bytes=TIGHT_BYTES)
    gate = Gate(runner.model)
    first = runner.turn("first", prose(100, "first"), max_tokens=100)
    assert gate.entered.wait(WAIT_S)
    second = runner.turn("second", LONG, max_tokens=40)
    changed = runner.engine.configure(LimitChange(TIGHT_BYTES // 2))
    gate.go_on.set()
    assert isinstance(second.error, BudgetExceeded)
    assert first.result["completion_tokens"] == 100
    assert changed.result(WAIT_S)["budget_bytes"] == TIGHT_BYTES // 2
    assert [line.agent for line in runner.lines] == ["second", "first"]
    assert runner.look(lambda core: len(core.agents)) == 1


def test_a_preempted_turn_that_can_never_fit_commits_what_it_has(make_runner: Callable[..., Runner]) -> None:
    """P22, P34: it has neither slot nor pages when it is refused; its own part is durable all the same."""
    runner = make_runner(budget_bytes=TIGHT_BYTES)
    quick: list[Answer] = []
    meddler = Meddler("text", 3, lambda: quick.append(runner.turn("quick", prose(300, "q"), max_tokens=20, emit=act)))

    def act(event: Any) -> None:
        if event["type"] == "first_token":
            runner.engine.configure(LimitChange(150_000))

    slow = runner.turn("slow", LONG, max_tokens=60, priority="background", emit=meddler)
    error = slow.error
    assert isinstance(error, BudgetExceeded)
    assert error.data["durable"] is True
    assert quick[0].result["completion_tokens"] == 20
    assert meddler.of("preempted") == 1


def test_a_larger_budget_lets_in_who_waits_at_once(make_runner: Callable[..., Runner]) -> None:
    """P35: a turn that waits for memory starts while the one it waited for goes on."""
    runner = make_runner(budget_bytes=TIGHT_BYTES)
    told: list[str] = []
    second: list[Answer] = []

    def begin(event: Any) -> None:
        told.append(f"first {event['type']}")
        if told.count("first text") == 3 and not second:
            second.append(runner.turn("second", prose(600, "second"), max_tokens=3, emit=wait))

    def wait(event: Any) -> None:
        told.append(f"second {event['type']}")
        if event["type"] == "queued" and event["waits_for"] == "memory":
            runner.engine.configure(LimitChange(4 * TIGHT_BYTES))

    first = runner.turn("first", LONG, max_tokens=100, emit=begin)
    assert first.result["completion_tokens"] == 100
    assert second[0].result["completion_tokens"] == 3
    assert told.index("second queued") < told.index("second first_token") < told.index("first durable")


def test_a_request_that_waits_for_a_slot_is_refused_when_its_turn_comes(make_runner: Callable[..., Runner]) -> None:
    """P22: it is only then known what it needs; it computes nothing."""
    runner = make_runner(budget_bytes=1 << 20, max_batch=1)
    gate = Gate(runner.model)
    first = runner.turn("first", prose(100, "first"), max_tokens=3)
    assert gate.entered.wait(WAIT_S)
    second = runner.turn("second", LONG, max_tokens=400)
    runner.engine.configure(LimitChange(TIGHT_BYTES // 2))
    gate.go_on.set()
    assert first.result["durable"]
    assert isinstance(second.error, BudgetExceeded)


def test_pins_hold_no_more_than_their_part_of_a_smaller_budget(make_runner: Callable[..., Runner]) -> None:
    """P21: with what was pinned under a larger budget nobody could run; both agents go on, and both stay pinned."""
    runner = make_runner(budget_bytes=1 << 20)
    said = runner.turn("pinned", prose(900, "pinned"), max_tokens=2).result["text"]
    before = runner.job("pin", "pinned").result
    assert before["pinned_bytes"] == before["needed_bytes"]
    facts = configure(runner, budget_bytes=TIGHT_BYTES)
    assert runner.turn("other", prose(300, "other"), max_tokens=2).result["durable"]
    info = runner.job("prefetch", "pinned").result
    assert info["pinned"] is True
    assert 0 < info["pinned_bytes"] <= facts["pin_limit_bytes"]
    again = runner.turn("pinned", prose(900, "pinned") + said, max_tokens=1).result
    assert again["cached_tokens"] == again["prompt_tokens"] - 1
    error = runner.job("pin", "other").error
    assert isinstance(error, BudgetExceeded)
    assert str(error.data["limit_bytes"]) in error.message


# ---- quotas of namespaces -------------------------------------------------------------------------------------------


def turn_of(runner: Runner, namespace: str, name: str, text: str, **options: Any) -> Answer:
    """A turn in a namespace."""
    answer = Answer()
    request = TurnRequest(
        runner.engine.new_request_id(),
        AgentRef(Namespace(namespace), AgentId(name)),
        content(text),
        **{"max_tokens": 2, "emit": lambda event: answer.events.append(dict(event)), **options},
    )
    return runner._submit(request, answer)


def test_turns_of_a_namespace_share_its_quota_and_others_overtake_them(make_runner: Callable[..., Runner]) -> None:
    """P21: one of two runs while the other waits for it, though the budget has room; another namespace's turn runs."""
    runner = make_runner(budget_bytes=1 << 22, limits=LimitSettings(least_bytes=1))
    quota_bytes = TIGHT_BYTES // 2
    configure(runner, namespace_quotas={DEFAULT_NAMESPACE: quota_bytes})
    gate, told = Gate(runner.model), list[str]()

    def note(name: str) -> Callable[[Any], None]:
        return lambda event: told.append(f"{name} {event['type']}")

    first = runner.turn("first", prose(700, "first"), max_tokens=60, emit=note("first"))
    assert gate.entered.wait(WAIT_S)
    second = runner.turn("second", prose(700, "second"), max_tokens=2, emit=note("second"))
    other = turn_of(runner, "other", "third", prose(700, "third"), emit=note("third"))
    gate.go_on.set()
    assert first.result["durable"]
    assert second.result["durable"]
    assert other.result["durable"]
    assert told.index("second queued") < told.index("third first_token") < told.index("first durable")
    assert told.index("first durable") < told.index("second matched")
    figures = runner.look(lambda core: core.pager.statistics())
    assert figures.namespaces[DEFAULT_NAMESPACE] <= quota_bytes < figures.namespaces["other"] + quota_bytes


def test_what_can_never_fit_its_namespaces_quota_is_refused_with_the_figures(
    make_runner: Callable[..., Runner],
) -> None:
    """P22: a turn, a running one whose quota shrinks, and a pin; the same agent in another namespace is served."""
    quota_bytes = TIGHT_BYTES // 2
    limits = LimitSettings(least_bytes=1, namespace_quotas={DEFAULT_NAMESPACE: quota_bytes})
    runner = make_runner(budget_bytes=1 << 22, limits=limits)
    assert configure(runner)["namespace_quotas"] == {DEFAULT_NAMESPACE: quota_bytes}
    error = runner.turn("a", prose(1500, "a")).error
    assert isinstance(error, BudgetExceeded)
    assert error.data["needed_bytes"] > error.data["namespace_quota_bytes"] == quota_bytes
    assert error.data["namespace"] == "default"
    assert turn_of(runner, "other", "a", prose(1500, "a")).result["durable"]
    smaller = LimitChange(namespace_quotas={DEFAULT_NAMESPACE: quota_bytes // 2})
    meddler = Meddler("text", 2, lambda: runner.engine.configure(smaller) and None)
    running = runner.turn("b", prose(500, "b"), max_tokens=50, emit=meddler).error
    assert isinstance(running, BudgetExceeded)
    assert "the quota of namespace 'default' is" in running.message
    facts = configure(runner)
    assert (facts["converging"], facts["until_restart"]) == ([], ["namespace_quotas"])
    assert runner.look(lambda core: core.pager.statistics().namespaces[DEFAULT_NAMESPACE]) <= quota_bytes // 2
    pin = runner.job("pin", "b").error
    assert isinstance(pin, BudgetExceeded)
    assert "of its quota may be pinned" in pin.message
    assert configure(runner, namespace_quotas={DEFAULT_NAMESPACE: None})["namespace_quotas"] == {}
