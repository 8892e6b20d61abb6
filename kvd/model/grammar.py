"""Masks that hold a model to a grammar: the only door to llguidance.

Theory of operation. A grammar is compiled against the model's vocabulary, given as the bytes of each token, so byte
level and SentencePiece vocabularies are the same here; control tokens are no text and only allowed where a grammar
names them, and the tokens that end a turn wherever it may end. Compiling is bounded by llguidance's own fuel, takes
milliseconds and belongs into a worker thread. Compiled grammars are kept. The vocabulary is read at the first use, not
at a start that may never need it: llguidance holds Python's lock meanwhile, a second of CPU time for 262,144 tokens, a
fifth of that for 49,152.

A *mask* belongs to one request. It is asked with all ids so far and moves its own state there: forward by one token in
a generation, back where tokens were taken back, so it never disagrees with the text. It masks last: nothing that a
client adds to logits brings a forbidden token back.

May import kvd.errors and this package; llguidance and numpy.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvd.errors import InvalidParams
from kvd.model.errors import UnsupportedFeature
from kvd.model.tokenizer import TextCodec

MAX_KEPT: Final = 32
"""Compiled grammars that are kept; a schema is usually sent again with every turn."""

MAX_REASON_CHARACTERS: Final = 300

Logits = npt.NDArray[np.float32]


class GrammarCompiler:
    """Grammars for one vocabulary. May be used from any thread, one at a time.

    Args:
        codec: the model's.
        vocab_tokens: width of its logits.
    """

    def __init__(self, codec: TextCodec, vocab_tokens: int) -> None:
        self._codec = codec
        self._vocab_tokens = vocab_tokens
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def compile(self, grammar: str, *, parameter: str = "response_format") -> TokenMask:
        """A mask at the beginning of a grammar.

        Args:
            grammar: as `kvd.model.grammar_text` writes it.
            parameter: that it was made of, for the error.

        Raises:
            InvalidParams: a schema has what cannot be held to, or is too complex; the message says what.
            UnsupportedFeature: the model has no token that ends a turn.
        """
        with self._lock:
            matcher = self._kept.get(grammar)
            if matcher is None:
                matcher = self._compiled(grammar, parameter)
                self._kept[grammar] = matcher
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
            return TokenMask(matcher.deep_copy(), self._tokenizer.vocab_size, parameter)

    def _compiled(self, grammar: str, parameter: str) -> Any:  # noqa: ANN401
        from llguidance import LLMatcher

        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        probe = matcher.deep_copy()
        if not probe.is_error():  # what is too complex at its beginning is refused here, before a prompt is computed
            probe.compute_bitmask()
        if probe.is_error():
            raise InvalidParams(f"{parameter} cannot be held to: {_reason(probe.get_error())}", parameter=parameter)
        return matcher

    def _make_tokenizer(self) -> Any:  # noqa: ANN401
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = sorted(token for token in self._codec.eos_ids if token < self._vocab_tokens)
        if not ends:
            raise UnsupportedFeature(
                "the model has no token that ends a turn, so it cannot be held to a form",
                feature="response_format",
                parameter="response_format",
            )
        known = min(self._codec.token_count, self._vocab_tokens)
        # without llguidance's slices: they double the time, and no mask that was tried got faster by them
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._codec, known, ends[0])), eos_token=ends, slices=[])


class _Vocabulary:
    """The vocabulary as llguidance's wrapper takes it."""

    def __init__(self, codec: TextCodec, known: int, end: int) -> None:
        self._codec = codec
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens = [codec.token_bytes(token) for token in range(known)]
        self.special_token_ids = [token for token in range(known) if codec.is_control(token)]

    def __call__(self, text: str) -> list[int]:
        return self._codec.encode_content(text)


class TokenMask:
    """A logits hook. Owner: one request's sampler, on the engine thread.

    Args:
        matcher: at the beginning of the grammar.
        known_tokens: ids that the compiler knows; a model's output may have more rows, which are no tokens.
        parameter: that it was made of, for the error.
    """

    def __init__(self, matcher: Any, known_tokens: int, parameter: str) -> None:  # noqa: ANN401
        self._matcher = matcher
        self._parameter = parameter
        self._known_tokens = known_tokens
        self._bits = np.zeros((known_tokens + 31) // 32 * 4, dtype=np.uint8)
        self._start: int | None = None
        self._taken: list[int] = []

    def __call__(self, ids: Sequence[int], logits: Logits) -> Logits:
        """Forbid all that the grammar does not allow behind `ids`.

        The first call says where the answer begins.

        Args:
            ids: all ids so far.
            logits: float32 [vocab]; written into.

        Raises:
            InvalidParams: the grammar got too complex at this point.
        """
        if self._start is None:
            self._start = len(ids)
        self._move_to(ids[self._start :])
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        allowed = np.unpackbits(self._bits, count=self._known_tokens, bitorder="little").view(np.bool_)
        logits[: self._known_tokens][~allowed] = -np.inf
        logits[self._known_tokens :] = -np.inf
        return logits

    def _move_to(self, answer: Sequence[int]) -> None:
        """Bring the grammar's state to the end of `answer`."""
        common = len(self._taken)
        if list(answer[:common]) != self._taken:
            common = next(n for n, token in enumerate(self._taken) if answer[n : n + 1] != [token])
        if common < len(self._taken):
            self._matcher.rollback(len(self._taken) - common)
            del self._taken[common:]
        new = list(answer[common:])
        if new:
            self._matcher.consume_tokens(new)
            self._taken += new
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidParams(
                f"{self._parameter} cannot be held to any further: {_reason(self._matcher.get_error())}",
                parameter=self._parameter,
            )


def _reason(message: str) -> str:
    """An error of llguidance's in one line, without where in the grammar it is, which is none of the client's."""
    first, *rest = message.strip().split("\n")
    reason = first.rpartition("failed to compile JSON schema: ")[2]
    details = [line.removeprefix("error: ") for line in rest if line.startswith("error: ")]
    return " ".join([reason, *details])[:MAX_REASON_CHARACTERS]
