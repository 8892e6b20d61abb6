"""Several turns at once on one engine: each gets its own text, and nobody is held up by who waits, fails or ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.errors import Cancelled, InternalError
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.core import EngineCore
from kvd.scheduler.sampling import SamplingParams
from kvd.store.fs import FileHandle
from tests.scheduler.fake_model import FakeModel, Truth, make_formats, make_spec
from tests.scheduler.harness import World, ref_of
from tests.scheduler.test_engine import WAIT_S, Answer, Gate, Runner
from tests.support.prose import prose

CHUNK_TOKENS = 128
CHUNK_S = 0.5
DECODE_S = 0.0625
"""Exact in binary, and an eighth."""


class SteppedClock:
    """Time that passes in steps of the model alone; notes what ran.

    Args:
        model: whose steps take time.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.steps: list[int] = []

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s

    def watch(self, model: FakeModel) -> None:
        """Steps of this model take time from here on."""
        step = model.model

        def timed(ids: Any, cache: Any) -> Any:
            tokens = int(ids.shape[1])
            self.steps.append(tokens)
            self.now_s += DECODE_S if tokens == 1 else CHUNK_S
            return step(ids, cache)

        model.model = timed  # type: ignore[method-assign]


@pytest.fixture
def make_runner(tmp_path: Path, codec: TextCodec) -> Iterator[Callable[..., Runner]]:
    """Makes engines that run up to eight requests at once; they are stopped at the end.

    Chunks and decode steps take turns unless a test says otherwise: how long a step takes here must decide nothing.
    """
    runners: list[Runner] = []

    def make(**options: Any) -> Runner:
        runner = Runner(
            tmp_path / str(len(runners)), codec, **{"max_batch": 8, "max_queued": 32, "decode_share": 0.0, **options}
        )
        runners.append(runner)
        runner.start()
        return runner

    yield make
    for runner in runners:
        runner.stop()


def alone(make_runner: Callable[..., Runner], prompts: dict[str, str], max_tokens: int) -> dict[str, str]:
    """What each agent says when nobody else is there."""
    runner = make_runner()
    return {name: runner.turn(name, text, max_tokens=max_tokens).result["text"] for name, text in prompts.items()}


def together(runner: Runner, prompts: dict[str, str], max_tokens: int, **options: Any) -> dict[str, Answer]:
    """All agents' turns, which the model begins when all are there."""
    gate = Gate(runner.model)
    answers = {name: runner.turn(name, text, max_tokens=max_tokens, **options) for name, text in prompts.items()}
    assert gate.entered.wait(WAIT_S)
    gate.go_on.set()
    return answers


def test_agents_decode_in_one_pass_and_say_what_they_say_alone(make_runner: Callable[..., Runner]) -> None:
    """P28, P33: of unequal lengths, over a page border, the longest ends first; every text is that of a lone turn."""
    prompts = {f"agent-{i}": prose(40 + 70 * i, f"batch-{i}") for i in range(5)}
    expected = alone(make_runner, prompts, 20)
    assert len(set(expected.values())) == 5
    runner = make_runner()
    answers = together(runner, prompts, 20)
    early = runner.turn("agent-6", prose(300, "early"), max_tokens=3)
    assert {name: answer.result["text"] for name, answer in answers.items()} == expected
    assert early.result["completion_tokens"] == 3
    assert max(runner.model.batches) >= 5
    stats = runner.look(lambda core: core.stats)
    assert stats.largest_batch == max(runner.model.batches)
    assert stats.decode_rows == 5 * 19 + 2
    assert stats.decode_steps < stats.decode_rows / 2
    assert not [event for event, _ in runner.logged if event == "batch_failed"]


def test_turn_after_turn_of_many_agents_every_token_is_the_models(
    make_runner: Callable[..., Runner], codec: TextCodec
) -> None:
    """P33: three turns of eight agents, some forked from others meanwhile: each token is what the model says next."""
    runner = make_runner(budget_bytes=1 << 23)
    names = [f"agent-{i}" for i in range(8)]
    texts = {name: prose(60, name) for name in names}
    jobs: list[Answer] = []
    for turn in range(3):
        answers = together(runner, texts, 6)
        jobs += [runner.job("fork", name, new_agent=f"{name}-{turn}") for name in names[:2]]
        for name, answer in answers.items():
            assert answer.result["match"] == ("extend" if turn else "new")
            texts[name] += answer.result["text"] + prose(30, f"{name}-{turn}")
    assert all(job.result["durable"] for job in jobs)
    spec = make_spec(codec.token_count)
    truth = Truth(FakeModel(codec.token_count), spec, make_formats(spec))
    for name in names:
        tokens = runner.look(lambda core, name=name: list(core.agents.get(ref_of(name)).branch.tokens))
        assert truth.is_greedy(tokens, len(tokens) - 5)


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "hot": {"sampling": SamplingParams(temperature=1.5, seed=11)},
    "nucleus": {"sampling": SamplingParams(temperature=1.0, top_p=0.7, seed=12)},
    "few": {"sampling": SamplingParams(temperature=1.0, top_k=5, min_p=0.05, seed=13), "logprobs": 3},
    "penalised": {"sampling": SamplingParams(repetition_penalty=0.2)},
    "biased": {"sampling": SamplingParams(temperature=0.7, seed=14, logit_bias=((300, 8.0), (301, -1e6)))},
    "told": {"logprobs": 2},
    "short": {"sampling": SamplingParams(temperature=1.0, seed=15)},
}
"""What each row of a batch asks for."""


def asked(runner: Runner, name: str, prompt: str) -> Answer:
    """The turn of one of `REQUESTS`."""
    return runner.turn(name, prompt, max_tokens=7 if name == "short" else 16, **REQUESTS[name])


def test_each_row_has_its_own_parameters(make_runner: Callable[..., Runner]) -> None:
    """P33: eight rows with different temperatures, cuts, biases, penalties, seeds and limits in one batch.

    Each says what it says alone with the same parameters, and again in another company; log-probabilities go to those
    who asked. (The fake model's rows do not round otherwise in company, so texts are equal, not only nearly.)
    """
    prompt = prose(40, "the same for all")
    runner = make_runner()
    expected = {name: asked(runner, name, prompt).result for name in REQUESTS}
    assert len({result["text"] for result in expected.values()}) == len(REQUESTS) - 1
    assert expected["greedy"]["text"] == expected["told"]["text"]
    for order in (list(REQUESTS), list(REQUESTS)[::-1][:5]):
        runner = make_runner()
        gate = Gate(runner.model)
        answers = {name: asked(runner, name, prompt) for name in order}
        assert gate.entered.wait(WAIT_S)
        gate.go_on.set()
        for name, answer in answers.items():
            result = answer.result
            assert result["text"] == expected[name]["text"], name
            assert ("logprobs" in result) == ("logprobs" in REQUESTS[name])
            told = [one["id"] for one in result.get("logprobs", ())]
            assert told == [one["id"] for one in expected[name].get("logprobs", ())]
            assert len(told) in (0, result["completion_tokens"])
        assert max(runner.model.batches) >= len(order) - 1, "one may end before the last one joins"


def test_a_stop_string_of_one_row_leaves_the_others(make_runner: Callable[..., Runner]) -> None:
    """P33: rows with the same prompt and other stop strings end where their own says; none of it is given out."""
    prompt = prose(40, "stops")
    whole = alone(make_runner, {"whole": prompt}, 24)["whole"]
    runner = make_runner()
    gate = Gate(runner.model)
    stops = {f"stop-{at}": whole[at : at + 3] for at in (2, 6, 9)}
    answers = {name: runner.turn(name, prompt, max_tokens=24, stop=(stop,)) for name, stop in stops.items()}
    free = runner.turn("free", prompt, max_tokens=24)
    gate.go_on.set()
    for name, stop in stops.items():
        assert answers[name].result["text"] == whole[: whole.index(stop)]
        assert answers[name].result["finish_reason"] == "stop"
    assert free.result["text"] == whole


def test_a_row_that_fails_ends_its_own_turn_only(make_runner: Callable[..., Runner]) -> None:
    """P33: the model cannot compute one agent's token; the others of its batch lose nothing, not even a step."""
    prompts = {"good": prose(50, "good"), "bad": prose(90, "bad"), "fine": prose(20, "fine")}
    expected = alone(make_runner, prompts, 8)
    runner = make_runner()
    forced = runner.codec.encode_content("~")[0]
    runner.model.fail_on = forced
    gate = Gate(runner.model)
    good, fine = (runner.turn(name, prompts[name], max_tokens=8) for name in ("good", "fine"))
    bad = runner.turn("bad", prompts["bad"], max_tokens=8, sampling=SamplingParams(logit_bias=((forced, 1e4),)))
    gate.go_on.set()
    assert good.result["text"] == expected["good"]
    assert fine.result["text"] == expected["fine"]
    assert isinstance(bad.error, InternalError)
    assert [facts["rows"] for event, facts in runner.logged if event == "batch_failed"] == [3]
    runner.model.fail_on = None
    again = runner.turn("bad", prompts["bad"], max_tokens=8)
    assert again.result["text"] == expected["bad"]
    assert again.result["cached_tokens"] >= 89


def test_a_model_that_cannot_batch_is_asked_three_times(make_runner: Callable[..., Runner]) -> None:
    """Rows that fail together and succeed alone get their texts, and after three times no more steps are wasted."""
    prompts = {name: prose(30, name) for name in ("one", "two")}
    expected = alone(make_runner, prompts, 12)
    runner = make_runner()
    step = runner.model.model

    def refuses(ids: Any, cache: Any) -> Any:
        if ids.shape[0] > 1:
            raise ValueError("one row only")
        return step(ids, cache)

    runner.model.model = refuses  # type: ignore[method-assign]
    answers = together(runner, prompts, 12)
    assert {name: answer.result["text"] for name, answer in answers.items()} == expected
    told = [event for event, _ in runner.logged if event.startswith("batch")]
    assert told == ["batch_failed", "batch_failed", "batch_failed", "batches_given_up"]


def test_a_cancelled_turn_leaves_the_others(make_runner: Callable[..., Runner]) -> None:
    """P33, P34: one of three is cancelled in mid-batch; the two others say all they would have said."""
    prompts = {name: prose(30, name) for name in ("one", "two", "three")}
    expected = alone(make_runner, prompts, 40)
    runner = make_runner()
    gate = Gate(runner.model)
    seen: list[object] = []
    cancelled: list[Answer] = []

    def emit(event: Any) -> None:
        seen.append(event["type"])
        if seen.count("text") == 3:
            runner.cancel(cancelled[0])

    cancelled.append(runner.turn("two", prompts["two"], max_tokens=40, emit=emit))
    others = [runner.turn(name, prompts[name], max_tokens=40) for name in ("one", "three")]
    gate.go_on.set()
    assert isinstance(cancelled[0].error, Cancelled)
    assert 1 <= cancelled[0].error.data["completion_tokens"] < 40
    assert cancelled[0].error.data["durable"] is True
    assert [answer.result["text"] for answer in others] == [expected["one"], expected["three"]]


def test_who_waits_for_the_disk_holds_up_nobody(make_runner: Callable[..., Runner]) -> None:
    """A turn whose commit waits for its flush stands beside one that is computed from first to last."""
    runner = make_runner()
    slow = threading.Event()
    reached = threading.Event()
    flush = runner.fs.fsync

    def fsync(handle: FileHandle) -> None:
        reached.set()
        assert slow.wait(WAIT_S)
        flush(handle)

    runner.fs.fsync = fsync  # type: ignore[method-assign]
    first = runner.turn("first", prose(20, "first"))
    assert reached.wait(WAIT_S)
    done = threading.Event()
    second = runner.turn(
        "second",
        prose(200, "second"),
        max_tokens=9,
        emit=lambda event: done.set() if event["type"] == "usage" else None,
    )
    assert done.wait(WAIT_S)
    assert not first.replies
    slow.set()
    assert first.result["durable"] is True
    assert second.result["completion_tokens"] == 9


def test_a_decoding_agent_keeps_its_share_during_anothers_prefill(make_runner: Callable[..., Runner]) -> None:
    """P35: a chunk takes as long as eight decode steps, so eight of them come between any two chunks."""
    clock = SteppedClock()
    runner = make_runner(clock=clock, decode_share=0.5)
    clock.watch(runner.model)
    asked: list[Answer] = []

    def emit(event: Any) -> None:
        if event["type"] == "first_token":
            asked.append(runner.turn("reads", prose(8 * CHUNK_TOKENS, "reads"), max_tokens=1))

    decodes = runner.turn("decodes", prose(10, "decodes"), max_tokens=100, emit=emit)
    assert decodes.result["completion_tokens"] == 100
    assert asked[0].result["completion_tokens"] == 1
    kinds = "".join("d" if tokens == 1 else "C" for tokens in clock.steps)
    between = kinds.strip("d").split("C")[2:-1]
    assert len(between) >= 6
    assert {len(steps) for steps in between} == {8}


def test_a_short_prompt_comes_soon_during_a_long_prefill(make_runner: Callable[..., Runner]) -> None:
    """P35: its first token is there within two chunks, whatever the long prompt still has before it."""
    clock = SteppedClock()
    runner = make_runner(clock=clock, decode_share=0.5)
    clock.watch(runner.model)
    asked: list[Answer] = []
    times: list[float] = []

    def short(event: Any) -> None:
        if event["type"] == "first_token":
            times.append(clock())

    def emit(event: Any) -> None:
        if event["type"] == "prefill" and event["done_tokens"] == 2 * CHUNK_TOKENS:
            times.append(clock())
            asked.append(runner.turn("short", prose(20, "short"), max_tokens=1, emit=short))

    long = runner.turn("long", prose(10 * CHUNK_TOKENS, "long"), max_tokens=1, emit=emit)
    assert long.result["prompt_tokens"] >= 10 * CHUNK_TOKENS
    assert asked[0].result["completion_tokens"] == 1
    assert times[1] - times[0] <= 2 * CHUNK_S + 1e-9


def test_turns_that_do_not_fit_together_run_one_after_the_other(make_runner: Callable[..., Runner]) -> None:
    """P21: two working sets of which the budget holds one: the second waits, is told so, and is served in full."""
    runner = make_runner(budget_bytes=260_000)
    events: list[tuple[str, str]] = []
    gate = Gate(runner.model)

    def emit(name: str) -> Callable[[Any], None]:
        return lambda event: events.append((name, str(event["type"])))

    first = runner.turn("first", prose(900, "first"), max_tokens=20, emit=emit("first"))
    second = runner.turn("second", prose(900, "second"), max_tokens=20, emit=emit("second"))
    tiny = runner.turn("tiny", prose(5, "tiny"), emit=emit("tiny"))
    gate.go_on.set()
    assert [answer.result["completion_tokens"] for answer in (first, second, tiny)] == [20, 20, 2]
    assert ("second", "queued") in events
    assert events.index(("second", "matched")) > events.index(("first", "durable"))
    assert events.index(("tiny", "matched")) > events.index(("first", "durable")), "it came after the one that waits"
    assert runner.look(lambda core: core.reservations.reserved_bytes) == 0


def test_a_turn_that_waits_for_room_can_be_cancelled(make_runner: Callable[..., Runner]) -> None:
    """It leaves no agent, and those behind it move up."""
    runner = make_runner(budget_bytes=260_000)
    gate = Gate(runner.model)
    first = runner.turn("first", prose(900, "first"), max_tokens=20)
    second = runner.turn("second", prose(900, "second"), max_tokens=20)
    third = runner.turn("third", prose(5, "third"))
    runner.cancel(second)
    gate.go_on.set()
    assert isinstance(second.error, Cancelled)
    assert third.result["completion_tokens"] == 2
    assert first.result["completion_tokens"] == 20
    assert runner.look(lambda core: core.agents.find(ref_of("second"))) is None


def test_a_turn_ends_at_its_deadline(make_runner: Callable[..., Runner]) -> None:
    """`timeout_s`: cancelled in mid-decode, what was computed is kept, and the reason is told."""
    clock = SteppedClock()
    runner = make_runner(clock=clock, decode_share=0.5)
    clock.watch(runner.model)
    late = runner.turn("late", prose(10, "late"), max_tokens=200, timeout_s=2.0)
    assert isinstance(late.error, Cancelled)
    assert "timed out after 2 s" in str(late.error)
    assert 20 <= late.error.data["completion_tokens"] <= 26  # 0.5 s of prefill, 16 steps a second
    assert runner.turn("late", prose(10, "late"), max_tokens=1).result["match"] != "new"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_everybody_is_answered_and_every_byte_is_right(
    make_runner: Callable[..., Runner], codec: TextCodec, seed: int
) -> None:
    """P21, P33, P34: turns, forks, rollbacks, evictions, deletions and cancellations of agents that do not all fit.

    Each request is answered once, the books balance after each, nothing is left reserved, and every page that is in RAM
    has exactly the bytes that its agent's tokens have.
    """
    rng = random.Random(seed)
    window = 60 if seed % 2 else None
    runner = make_runner(budget_bytes=300_000, max_batch=rng.choice([2, 3, 8]), window=window)
    names = [f"agent-{i}" for i in range(6)]
    texts = {name: prose(20, name) for name in names}
    answers: list[Answer] = []
    for number in range(60):
        name = rng.choice(names)
        match rng.choice(["turn"] * 6 + ["fork", "rollback", "evict", "prefetch", "delete", "cancel", "cancel"]):
            case "turn":
                texts[name] = prose(rng.choice([5, 60, 300]), f"{seed}-{number}") if rng.random() < 0.2 else texts[name]
                texts[name] += prose(rng.choice([3, 40, 200]), number)
                texts[name] = texts[name][-1500:] if len(texts[name]) > 3000 else texts[name]
                answers.append(runner.turn(name, texts[name], max_tokens=rng.choice([0, 1, 8])))
            case "fork":
                answers.append(runner.job("fork", name, new_agent=rng.choice(names)))
            case "rollback":
                answers.append(runner.job("rollback", name, tokens=rng.randrange(20)))
            case "cancel" if answers:
                runner.cancel(rng.choice(answers[-5:]))
            case "evict" | "prefetch" | "delete" as operation:
                answers.append(runner.job(operation, name))
        if rng.random() < 0.3:
            rng.choice(answers).wait() if answers else None
    outcomes = [type(error).__name__ if error is not None else "ok" for _, error in (each.wait() for each in answers)]
    allowed = {"ok", "Cancelled", "AgentNotFound", "AgentExists", "InvalidParams", "BudgetExceeded", "Busy"}
    assert set(outcomes) <= allowed, [each.wait() for each in answers if each.wait()[1] is not None]
    assert outcomes.count("ok") > len(outcomes) // 4
    spec = make_spec(codec.token_count, window=window)
    truth = Truth(FakeModel(codec.token_count), spec, make_formats(spec))

    def look(core: EngineCore) -> int:
        core.pager.check_integrity()
        for agent in core.agents:
            for branch in agent.branches.values():
                World.check_branch(SimpleNamespace(core=core, truth=truth), branch)  # type: ignore[arg-type]
        return core.reservations.reserved_bytes + core.reservations.waiting

    assert runner.look(look) == 0
    assert runner.ready == [None], "the engine never failed"
