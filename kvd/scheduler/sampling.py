"""From logits to a token: one hook every step's logits go through, then the sampler.

The hook chain is the seam for penalties and structured-output masks; it exists from the start so that nothing ever
samples around it. Sampling is stateless: the random number of a position depends on the seed and the position alone,
so an agent that resumes after a crash draws what it would have drawn.

Log-probabilities, where they are asked for, are those of the model: of the logits as they came, before the hooks, the
temperature and whatever narrows the choice (`docs/decisions/0017-logprobs-are-the-models.md`).

May import numpy, kvd.errors and kvd.scheduler.errors.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidParams
from kvd.scheduler.errors import NonFiniteLogits

Logits = npt.NDArray[np.float32]
LogitsHook = Callable[[Sequence[int], Logits], Logits]
"""(ids so far, logits [vocab]) -> logits [vocab]; may write into its argument."""


MAX_BIAS = 1e6
"""Greatest bias of a logit either way: far beyond any model's logits, so it bans or forces, and float32 holds it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass, (0, 1].
        top_k: candidates kept; 0 keeps all.
        min_p: least probability relative to the best, [0, 1).
        repetition_penalty: divides positive and multiplies negative logits of recent ids; 1 is off.
        seed: fixes the random numbers; None draws one for the request.
        logit_bias: (id, bias) pairs added to the logits, each bias within `MAX_BIAS` of 0.

    Raises:
        InvalidParams: a value is out of its range; names the range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        ranges = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("min_p", 0.0 <= self.min_p < 1.0, "at least 0 and below 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "from 0.01 to 100"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2**63 - 1"),
            ("logit_bias", all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias), f"at most {MAX_BIAS:g} each way"),
        )
        for name, good, allowed in ranges:
            if not good:
                raise InvalidParams(f"{name} must be {allowed}, not {getattr(self, name)!r}", parameter=name)


REPETITION_WINDOW_TOKENS = 64
"""Ids the repetition penalty looks back on."""


def bias_hook(bias: Sequence[tuple[int, float]]) -> LogitsHook:
    """Add constant biases to single ids."""

    def hook(ids: Sequence[int], logits: Logits) -> Logits:
        for token, value in bias:
            logits[token] += value
        return logits

    return hook


def repetition_hook(penalty: float) -> LogitsHook:
    """Penalise ids of the last `REPETITION_WINDOW_TOKENS` (Keskar et al. 2019, CTRL, section 4.1)."""

    def hook(ids: Sequence[int], logits: Logits) -> Logits:
        recent = np.unique(np.asarray(ids[-REPETITION_WINDOW_TOKENS:], dtype=np.int64))
        values = logits[recent]
        logits[recent] = np.where(values > 0, values / penalty, values * penalty)
        return logits

    return hook


LEAST_LOGPROB = -9999.0
"""What a token gets that has no probability (a logit of minus infinity): a number, since JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token, and the tokens that were most likely in its place.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability, from `LEAST_LOGPROB` to 0.
        top: (id, logprob) of the most likely tokens, best first, of equal ones the lower id; the sampled one is among
            them only if it is one of them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprob(token: int, logits: Logits, count: int) -> TokenLogprob:
    """Log-softmax of the logits at `token` and at the `count` greatest.

    Args:
        token: the sampled id.
        logits: float32 [vocab], as the model gave them.
        count: alternatives; all there are if there are fewer.

    Raises:
        NonFiniteLogits: they hold NaN or plus infinity, or nothing but minus infinity.
    """
    count = min(count, logits.size)
    best = float(np.max(logits))
    if not np.isfinite(best):
        raise NonFiniteLogits(f"the model's logits are {best}", token=token)
    # the sum in float64: float32 loses the small terms of a vocabulary of a quarter million
    total = best + float(np.log(np.exp(logits.astype(np.float64) - best).sum()))

    def logprob(each: int) -> float:
        return max(LEAST_LOGPROB, min(0.0, float(logits[each]) - total))

    top: list[int] = []
    if count:
        least = np.partition(logits, logits.size - count)[logits.size - count]
        # every id that ties with the last one is a candidate, or chance would decide which of them are told
        among = np.flatnonzero(logits >= least)
        top = among[np.argsort(-logits[among], kind="stable")][:count].tolist()
    return TokenLogprob(token, logprob(token), tuple((each, logprob(each)) for each in top))


class Sampler:
    """Chooses tokens for one request. Owner: the turn; not shared.

    Args:
        params: validated sampling parameters.
        vocab_tokens: ids allowed in `logit_bias`.
        hooks: further logits hooks, run after the parameters' own.
        logprobs: alternatives noted with each token's log-probability; None notes nothing and costs nothing.

    Attributes:
        noted: log-probability of the token sampled last; None unless they were asked for.

    Raises:
        InvalidParams: a biased id is outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_tokens: int,
        hooks: Sequence[LogitsHook] = (),
        logprobs: int | None = None,
    ) -> None:
        self._params = params
        self._logprobs = logprobs
        self.noted: TokenLogprob | None = None
        self._seed = params.seed if params.seed is not None else secrets.randbits(63)
        self._hooks: list[LogitsHook] = []
        if params.logit_bias:
            bad = [token for token, _ in params.logit_bias if not 0 <= token < vocab_tokens]
            if bad:
                raise InvalidParams(
                    f"logit_bias ids must be below {vocab_tokens}, not {bad[0]}", parameter="logit_bias"
                )
            self._hooks.append(bias_hook(params.logit_bias))
        if params.repetition_penalty != 1.0:
            self._hooks.append(repetition_hook(params.repetition_penalty))
        self._hooks.extend(hooks)

    def sample(self, ids: Sequence[int], logits: Logits, given: int | None = None) -> int:
        """Choose the token that follows `ids`.

        Args:
            ids: all ids before it; `len(ids)` is its position.
            logits: float32 [vocab], owned by the sampler from here on.
            given: it was chosen before; what is noted with a token is noted, and hooks see it come.

        Raises:
            NonFiniteLogits: they hold NaN or plus infinity, or nothing but minus infinity.
        """
        # hooks write into their argument
        told = logits.copy() if self._hooks and self._logprobs is not None else logits
        for hook in self._hooks:
            logits = hook(ids, logits)
        token = self._choose(ids, logits) if given is None else given
        if self._logprobs is not None:
            self.noted = token_logprob(token, told, self._logprobs)
        return token

    def _choose(self, ids: Sequence[int], logits: Logits) -> int:
        params = self._params
        best = int(np.argmax(logits))
        # argmax finds a NaN before anything else; a best of minus infinity means that every token is masked
        if not np.isfinite(logits[best]):
            raise NonFiniteLogits(f"the model's logits after {len(ids)} tokens are {logits[best]}", tokens=len(ids))
        if params.temperature == 0.0:
            return best
        with np.errstate(over="ignore"):  # a tiny temperature drives everything but the best to minus infinity
            scaled = (logits.astype(np.float64) - float(logits[best])) / params.temperature
        order = np.argsort(-scaled, kind="stable")
        if params.top_k:
            order = order[: params.top_k]
        weights = np.exp(scaled[order])
        keep = (weights >= params.min_p) & (weights > 0)  # what is masked is no choice, however the draw is rounded
        order, weights = order[keep], weights[keep]
        cumulative = np.cumsum(weights)
        if params.top_p < 1.0:
            # the smallest set whose mass reaches top_p: everything up to and including the first that crosses it
            last = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
            order, cumulative = order[:last], cumulative[:last]
        draw = np.random.Generator(np.random.Philox(key=self._seed, counter=len(ids))).random()
        return int(order[min(int(np.searchsorted(cumulative, draw * cumulative[-1], side="right")), len(order) - 1)])
