"""Log-probabilities: the model's own, of the tokens that stay, in the order of the text; nothing when not asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import Cancelled, InvalidParams
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.errors import NonFiniteLogits
from kvd.scheduler.logprobs import MAX_ENTRIES, entry
from kvd.scheduler.params import Params
from kvd.scheduler.sampling import LEAST_LOGPROB, Logits, Sampler, SamplingParams, TokenLogprob, token_logprob
from tests.scheduler.harness import World
from tests.support.prose import prose

VOCAB = 12


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, the plain way."""
    wide = logits.astype(np.float64)
    result: np.ndarray = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    return result


@given(
    values=st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB),
    count=st.integers(0, 20),
    token=st.integers(0, VOCAB - 1),
)
def test_they_are_the_log_softmax_best_first(values: list[float], count: int, token: int) -> None:
    """The N best of all tokens, of equal ones the lower id, whatever was sampled; no more than there are."""
    logits = np.array(values, np.float32)
    noted, right = token_logprob(token, logits, count), log_softmax(logits)
    assert noted.logprob == pytest.approx(right[token], abs=1e-6)
    order = sorted(range(VOCAB), key=lambda each: (-values[each], each))[:count]
    assert [each for each, _ in noted.top] == order
    assert [logprob for _, logprob in noted.top] == pytest.approx(right[order].tolist(), abs=1e-6)


def test_a_probability_of_none_is_a_number() -> None:
    """Minus infinity becomes -9999, which JSON has; logits that are no numbers are an error, asked for or not."""
    logits = np.array([1.0, -np.inf, 0.0], np.float32)
    assert token_logprob(1, logits, 3).logprob == LEAST_LOGPROB
    assert token_logprob(1, logits, 3).top[2] == (1, LEAST_LOGPROB)
    for bad in (np.nan, np.inf):
        with pytest.raises(NonFiniteLogits):
            token_logprob(0, np.array([0.0, bad], np.float32), 1)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_they_are_of_the_model_not_of_the_sampler(temperature: float) -> None:
    """Before biases, penalties, masks (which write in place), temperature and top-k: the logits as they came."""

    def mask(ids: object, logits: Logits) -> Logits:
        logits[0] = -np.inf
        return logits

    logits = np.arange(VOCAB, 0, -1).astype(np.float32)
    right = log_softmax(logits)
    params = SamplingParams(
        temperature=temperature, top_k=1, logit_bias=((7, 100.0),), repetition_penalty=1.5, seed=1, min_p=0.5
    )
    sampler = Sampler(params, vocab_tokens=VOCAB, hooks=[mask], logprobs=2)
    assert sampler.sample([1, 2], logits.copy()) == 7
    assert sampler.noted is not None
    assert sampler.noted.logprob == pytest.approx(right[7], abs=1e-6)
    assert sampler.noted.top == ((0, pytest.approx(right[0])), (1, pytest.approx(right[1])))


def test_nothing_is_noted_and_nothing_copied_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `logprobs` no softmax runs, and the token is the one that is sampled with them."""
    params = SamplingParams(temperature=1.0, seed=3)
    logits = np.linspace(0, 2, VOCAB).astype(np.float32)
    asked = Sampler(params, vocab_tokens=VOCAB, logprobs=0).sample([1] * 4, logits.copy())

    def fail(*_: object) -> TokenLogprob:
        raise AssertionError("not asked for")

    monkeypatch.setattr("kvd.scheduler.sampling.token_logprob", fail)
    sampler = Sampler(params, vocab_tokens=VOCAB)
    assert sampler.sample([1] * 4, logits) == asked
    assert sampler.noted is None


def told_of(outcome: Any) -> list[dict[str, Any]]:
    """All `logprobs` events together."""
    return [each for event in outcome.events if event["type"] == "logprobs" for each in event["logprobs"]]


def test_a_turn_tells_each_token_that_stays(world: World) -> None:
    """As many as `completion_tokens`, the same in stream and result, the ids of the branch, the model's figures."""
    outcome = world.generate("a", prose(30, "a"), max_tokens=12, logprobs=3)
    turn, tokens = outcome.turn, world.agent("a").branch.tokens
    assert turn.logprobs is not None
    told = told_of(outcome)
    assert told == list(turn.logprobs)
    assert len(told) == turn.completion_tokens > 0
    assert [each["id"] for each in told] == tokens[turn.prompt_tokens :]
    whole = b"".join(each["bytes"] or b"" for each in told)
    assert whole.decode(errors="replace") == turn.text
    for number, each in enumerate(told):
        right = log_softmax(world.truth.logits(tokens[: turn.prompt_tokens + number]))
        assert each["logprob"] == pytest.approx(right[each["id"]], abs=1e-4)
        assert each["top_logprobs"][0]["id"] == each["id"], "the turn is greedy"
        assert [one["logprob"] for one in each["top_logprobs"]] == pytest.approx(sorted(right)[-3:][::-1], abs=1e-4)
    assert turn.to_wire()["logprobs"] == told


def test_text_is_never_ahead_of_its_figures(world: World) -> None:
    """At any time the tokens told of spell all text that was sent, but for a held-back or half character."""
    outcome = world.generate("a", prose(40, "b"), max_tokens=40, logprobs=0, temperature=1.0, seed=4)
    text, told = "", b""
    for before, event in zip([{"type": ""}, *outcome.events], outcome.events, strict=False):
        if event["type"] == "text":
            text += str(event["text"])
        elif event["type"] == "logprobs":
            assert before["type"] in ("text", "first_token", "logprobs")
            told += b"".join(each["bytes"] or b"" for each in event["logprobs"])  # type: ignore[union-attr]
            assert text.startswith(told.decode(errors="replace"))
    assert text == outcome.turn.text


def test_tokens_of_a_stop_string_are_not_told(world: World) -> None:
    """Neither are those of which only a part was given out: what is told is what stays."""
    text = prose(30, "a")
    whole = world.generate("whole", text, max_tokens=12).turn.text
    for start in range(1, len(whole) - 4):
        stop = whole[start : start + 4]
        outcome = world.generate(f"stop-{start}", text, max_tokens=12, logprobs=1, stop=(stop,))
        assert outcome.turn.finish_reason == "stop"
        told = told_of(outcome)
        assert len(told) == outcome.turn.completion_tokens
        spelt = b"".join(each["bytes"] or b"" for each in told).decode(errors="replace")
        assert outcome.turn.text.startswith(spelt)
        assert stop not in spelt


def test_a_cancelled_turn_has_told_only_what_stays(world: World) -> None:
    """Its events are of tokens that are in the branch afterwards, and the end of the text is not told (P34)."""
    outcome = world.generate("a", prose(30, "a"), max_tokens=40, logprobs=1, cancel_after=9)
    assert isinstance(outcome.error, Cancelled)
    told, tokens = told_of(outcome), world.agent("a").branch.tokens
    prompt = int(str(outcome.error.data["prompt_tokens"]))
    assert [each["id"] for each in told] == tokens[prompt:]


def test_without_the_parameter_results_are_as_they_were(world: World) -> None:
    """No event and no field."""
    outcome = world.generate("a", prose(30, "a"), max_tokens=5)
    assert told_of(outcome) == []
    assert "logprobs" not in outcome.turn.to_wire()


def test_control_tokens_have_a_name_and_no_bytes(codec: TextCodec) -> None:
    """What surfaces as nothing is told by its name; parts of characters keep their bytes and are valid as text."""
    (end,) = (each for each in codec.eos_ids if codec.token_bytes(each) == b"<|im_end|>")
    half = codec.encode_content("é")[0]
    told = entry(codec, TokenLogprob(end, -1.0, ((half, -0.5), (10**6, -2.0))))
    assert (told["id"], told["token"], told["bytes"]) == (end, "<|im_end|>", None)
    assert told["top_logprobs"] == [
        {"id": half, "token": "\N{REPLACEMENT CHARACTER}", "bytes": b"\xc3", "logprob": -0.5},
        {"id": 10**6, "token": "", "bytes": None, "logprob": -2.0},
    ]


def test_the_parameter_and_its_bounds() -> None:
    """0 to 20, nil for none; with `max_tokens` bounded, and the refusal says what it may be."""
    assert Params("generate", {}).logprobs(10**6) is None
    assert Params("generate", {"logprobs": None}).logprobs(256) is None
    assert [Params("generate", {"logprobs": n}).logprobs(256) for n in (0, 20)] == [0, 20]
    for wrong in (-1, 21, 1.5, True, "5"):
        with pytest.raises(InvalidParams, match=r"logprobs must be .*from 0 to 20"):
            Params("generate", {"logprobs": wrong}).logprobs(256)
    assert Params("generate", {"logprobs": 0}).logprobs(MAX_ENTRIES) == 0
    with pytest.raises(InvalidParams, match="logprobs 3 takes max_tokens of at most 16384, not 16385"):
        Params("generate", {"logprobs": 3}).logprobs(16385)
