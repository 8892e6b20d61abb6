"""Sampling: greedy, seeded, restricted, biased, penalised; refusals name the range."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import InvalidParams
from kvd.scheduler.errors import NonFiniteLogits
from kvd.scheduler.sampling import REPETITION_WINDOW_TOKENS, Logits, Sampler, SamplingParams

VOCAB = 12


def logits_of(*values: float) -> Logits:
    """Logits that begin with `values`; the rest is far below."""
    return np.array([*values, *[-50.0] * (VOCAB - len(values))], dtype=np.float32)


def draw(params: SamplingParams, logits: Logits, position: int = 5, **options: object) -> int:
    """One token after `position` ids."""
    sampler = Sampler(params, vocab_tokens=VOCAB, **options)  # type: ignore[arg-type]
    return sampler.sample([1] * position, logits.copy())


def drawn(params: SamplingParams, logits: Logits, count: int = 300) -> Counter[int]:
    """Tokens drawn at `count` positions."""
    sampler = Sampler(params, vocab_tokens=VOCAB)
    return Counter(sampler.sample([1] * (position + 1), logits.copy()) for position in range(count))


def test_temperature_zero_takes_the_best() -> None:
    """Greedy is the first of the greatest logits, whatever the seed."""
    assert {draw(SamplingParams(seed=seed), logits_of(1, 3, 3, 2)) for seed in range(5)} == {1}


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(1, 5000), temperature=st.floats(0.1, 5))
def test_a_seed_and_a_position_fix_the_token(seed: int, position: int, temperature: float) -> None:
    """An agent that resumes after a crash draws what it would have drawn: nothing but seed and position counts."""
    params = SamplingParams(temperature=temperature, seed=seed)
    logits = logits_of(*np.linspace(0, 1, VOCAB))
    fresh = draw(params, logits, position)
    used = Sampler(params, vocab_tokens=VOCAB)
    for before in (position + 3, 1, position):
        token = used.sample([1] * before, logits.copy())
    assert token == fresh


def test_positions_and_seeds_draw_different_tokens() -> None:
    """The same logits give other tokens at other positions and for other seeds; without a seed each request differs."""
    flat = logits_of(*[0.0] * VOCAB)
    assert len(drawn(SamplingParams(temperature=1.0, seed=1), flat)) == VOCAB
    assert len({draw(SamplingParams(temperature=1.0, seed=seed), flat) for seed in range(100)}) == VOCAB
    assert len({draw(SamplingParams(temperature=1.0), flat) for _ in range(100)}) > 1


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """Shares follow exp(logit / temperature)."""
    found = drawn(SamplingParams(temperature=2.0, seed=3), logits_of(0.0, 2 * np.log(3.0)), count=2000)
    assert set(found) == {0, 1}
    assert 0.71 < found[1] / 2000 < 0.79


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1000}, set(range(4))),
        ({"top_p": 0.45}, {0}),
        ({"top_p": 0.55}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 0.999}, {0}),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.1}, {0, 1, 2}),
    ],
)
def test_restrictions_keep_the_most_likely(params: dict[str, float], allowed: set[int]) -> None:
    """top_k counts, top_p takes the smallest set that reaches its mass, min_p compares with the best; one stays."""
    logits = logits_of(*np.log([0.50, 0.27, 0.15, 0.08]))
    assert set(drawn(SamplingParams(temperature=1.0, seed=7, **params), logits)) == allowed


@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=VOCAB, max_size=VOCAB),
    temperature=st.floats(0, 100, allow_subnormal=True),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1, exclude_max=True),
    top_k=st.integers(0, 20),
    position=st.integers(1, 10),
)
def test_any_allowed_parameters_give_a_token(
    values: list[float], temperature: float, top_p: float, min_p: float, top_k: int, position: int
) -> None:
    """No corner of the ranges (a temperature of 1e-300) overflows or draws from nothing; top_k 1 is greedy."""
    logits = np.array(values, dtype=np.float32)
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=1)
    token = draw(params, logits, position)
    assert 0 <= token < VOCAB
    if top_k == 1:
        assert logits[token] == logits.max()


def test_a_bias_forces_or_bans_a_token() -> None:
    """Biases are added to the logits before anything else."""
    logits = logits_of(5, 4, 3)
    assert draw(SamplingParams(logit_bias=((2, 100.0),)), logits) == 2
    assert draw(SamplingParams(logit_bias=((0, -1e6), (1, -1e6))), logits) == 2


def test_a_penalty_hits_recent_tokens_only() -> None:
    """Positive logits are divided, negative ones multiplied, for ids of the last 64 tokens; older ones are forgiven."""
    params = SamplingParams(repetition_penalty=2.0)
    sampler = Sampler(params, vocab_tokens=VOCAB)
    assert sampler.sample([0, 3], logits_of(5, 4, 3)) == 1
    assert sampler.sample([0] + [3] * REPETITION_WINDOW_TOKENS, logits_of(5, 4, 3)) == 0
    assert sampler.sample([0], np.array([-1.0, -1.5, *[-9.0] * 10], np.float32)) == 1
    assert sampler.sample([], logits_of(5, 4)) == 0


def test_hooks_see_ids_and_may_mask() -> None:
    """Further hooks run after the parameters' own and see every id so far."""
    seen: list[int] = []

    def mask(ids: object, logits: Logits) -> Logits:
        seen.append(len(ids))  # type: ignore[arg-type]
        logits[:3] = -np.inf
        return logits

    assert draw(SamplingParams(), logits_of(5, 4, 3, 2), position=9, hooks=[mask]) == 3
    assert draw(SamplingParams(temperature=1.0, seed=1), logits_of(5, 4, 3, 2), position=9, hooks=[mask]) == 3
    assert seen == [9, 9]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float) -> None:
    """NaN never becomes text; neither does a mask that leaves nothing."""
    with pytest.raises(NonFiniteLogits, match="after 5 tokens"):
        draw(SamplingParams(temperature=temperature), logits_of(1, bad, 2))
    with pytest.raises(NonFiniteLogits):
        draw(SamplingParams(temperature=temperature), np.full(VOCAB, -np.inf, np.float32))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -0.1}, "temperature must be between 0 and 100"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k must be 0 .all. or more"),
        ({"min_p": 1.0}, "min_p must be at least 0 and below 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 0.01 to 100"),
        ({"seed": -1}, "seed must be between 0"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": ((1, float("inf")),)}, "logit_bias must be at most 1e.06 each way"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias"),
    ],
)
def test_values_out_of_range_are_refused_with_the_range(values: dict[str, object], words: str) -> None:
    """A refusal names the parameter and what it may be."""
    with pytest.raises(InvalidParams, match=words) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert caught.value.data["parameter"] in values


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_bias_of_no_token_is_refused(token: int) -> None:
    """Ids outside the vocabulary are refused before anything is sampled."""
    with pytest.raises(InvalidParams, match=f"below {VOCAB}, not {token}"):
        Sampler(SamplingParams(logit_bias=((token, 1.0),)), vocab_tokens=VOCAB)
