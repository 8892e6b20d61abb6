"""Log-probabilities as clients see them: token ids become text and bytes, and the number of them has a bound.

The maps follow the OpenAI API's `logprobs.content[]`, so that a gateway only has to rename: `token`, `bytes`,
`logprob`, `top_logprobs`, and beside them the `id`. A token is often a part of a character: `bytes` are exact, `token`
has U+FFFD for what is none. A control token stands for no bytes; it is told by its name.

Pure. May import kvd.scheduler.sampling.
"""

from __future__ import annotations

from typing import Final, Protocol

from kvd.scheduler.sampling import TokenLogprob

MAX_ALTERNATIVES: Final = 20
"""Most likely tokens that can be told beside each sampled one, as in the OpenAI API."""

MAX_ENTRIES: Final = 65_536
"""Most tokens told of in one call, alternatives included: they are held until its end, some 30 MB of them, and clients
accept 1,048,576 values in a message, of which each takes up to 11."""


class TokenNames(Protocol):
    """The part of the text codec needed here."""

    def is_control(self, token_id: int, /) -> bool:
        """Whether the token surfaces as nothing."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """Raw bytes of a token; a control token's name; empty for an unknown id."""


def entry(codec: TokenNames, noted: TokenLogprob) -> dict[str, object]:
    """A sampled token as clients see it."""
    top = [_one(codec, token, logprob) for token, logprob in noted.top]
    return {**_one(codec, noted.token, noted.logprob), "top_logprobs": top}


def _one(codec: TokenNames, token: int, logprob: float) -> dict[str, object]:
    raw = codec.token_bytes(token)
    return {
        "id": token,
        "token": raw.decode(errors="replace"),
        "bytes": None if codec.is_control(token) else raw,
        "logprob": logprob,
    }
