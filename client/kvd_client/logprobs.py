"""Log-probabilities of generated tokens, typed; the same in stream events and in results. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have been.

    Attributes:
        id: the model's number of it.
        token: its text, U+FFFD for bytes that are no character; of a control token its name.
        bytes: its exact bytes, often a part of a character; None of a control token, which stands for no text.
        logprob: natural logarithm of its probability; -9999 stands for none.
    """

    id: int
    token: str
    bytes: bytes | None
    logprob: float

    def plain(self) -> dict[str, object]:
        """As JSON can hold it, with bytes as a list of integers, as in the OpenAI API."""
        exact = None if self.bytes is None else list(self.bytes)
        return {"id": self.id, "token": self.token, "bytes": exact, "logprob": self.logprob}


@dataclass(frozen=True, slots=True)
class TokenLogprob(Alternative):
    """A token that was sampled.

    Attributes:
        top_logprobs: the most likely tokens in its place, best first; it is among them only if it is one of them.
    """

    top_logprobs: tuple[Alternative, ...] = ()

    def plain(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {**Alternative.plain(self), "top_logprobs": [each.plain() for each in self.top_logprobs]}


def parse_logprobs(value: object) -> tuple[TokenLogprob, ...]:
    """The typed form of `logprobs` of an event or a result.

    Raises:
        ValueError: it is no list of such maps.
    """
    made = []
    for item in _maps(value):
        top = tuple([Alternative(*_fields(each)) for each in _maps(item.get("top_logprobs"))])
        made.append(TokenLogprob(*_fields(item), top))
    return tuple(made)


def _maps(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"a list of maps is wanted, not {value!r:.80}")
    return value


def _fields(item: Mapping[str, object]) -> tuple[int, str, bytes | None, float]:
    token_id, token, exact, logprob = (item.get(name) for name in ("id", "token", "bytes", "logprob"))
    if not isinstance(token_id, int) or not isinstance(token, str) or not isinstance(exact, bytes | None):
        raise ValueError(f"no token with its log-probability: {item!r:.80}")
    if not isinstance(logprob, int | float) or isinstance(token_id, bool) or isinstance(logprob, bool):
        raise ValueError(f"no token with its log-probability: {item!r:.80}")
    return token_id, token, exact, float(logprob)


__all__ = ["Alternative", "TokenLogprob", "parse_logprobs"]
