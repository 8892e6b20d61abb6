"""The computing part of a turn: prefill in chunks, decode until something ends it.

The steps themselves are run by the engine, together with those of other requests: at each the turn waits, and before
each it may be preempted (`kvd.scheduler.residence`).

Owner: the engine thread. May import kvd.errors, kvd.model (through the core), kvd.vm.events, kvd.vm.text and siblings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from kvd.errors import KvdError
from kvd.scheduler.agents import Branch
from kvd.scheduler.logprobs import entry
from kvd.scheduler.requests import FinishReason
from kvd.scheduler.sampling import Logits, Sampler, TokenLogprob
from kvd.scheduler.stopping import StopWatch
from kvd.scheduler.waiting import (
    StepWanted,
    Stop,
    Wait,
    Waiting,
    cut_held,
    never,
    raise_if_stopped,
    until_ready,
)
from kvd.vm.events import GrowthWanted
from kvd.vm.text import Span, TypedText

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore
    from kvd.scheduler.residence import Residence
    from kvd.scheduler.turn import TurnState


def step(
    core: EngineCore,
    branch: Branch,
    ids: list[int],
    stop: Stop,
    *,
    wants_logits: bool,
    residence: Residence | None = None,
) -> Generator[Wait, None, Logits | None]:
    """Have KV of the branch's next `ids` computed; logits [vocab] of the last one when wanted.

    Args:
        core: the engine's parts.
        branch: active and ready.
        ids: its next tokens without KV.
        stop: why the request is to end, if it is.
        wants_logits: of the last token.
        residence: of a turn: before the step has run it gives way when somebody wants its place.

    Raises:
        Cancelled, Busy: no frame for the tokens (see `until_ready`), or `stop` said so before it ran.
        KvdError: the model failed; none of the tokens count, and the branch can go on.
    """
    if residence is None:
        core.memory.apply(GrowthWanted(branch.space, len(ids)))
        if not core.pager.is_ready(branch.space):
            yield from until_ready(core, branch.space, stop)
        want = StepWanted(branch, ids, stop, wants_logits=wants_logits)
        yield want
        return want.result()
    while True:
        yield from _give_way(core, branch, stop, residence)
        core.memory.apply(GrowthWanted(branch.space, len(ids)))
        if not core.pager.is_ready(branch.space):
            yield from residence.until_ready()
            if residence.is_wanted:
                continue
        want = StepWanted(branch, ids, stop, wants_logits=wants_logits, gives_way=lambda: residence.is_wanted)
        yield want
        if want.done or stop() is not None:
            return want.result()


def _give_way(core: EngineCore, branch: Branch, stop: Stop, residence: Residence) -> Waiting:
    """Preempted: leave and come back to the same token; what was lost meanwhile is computed again."""
    start = branch.computed
    while residence.is_wanted:
        yield from residence.give_way()
        while branch.computed < start:
            ids = branch.tokens[branch.computed : min(start, branch.computed + core.chunk_tokens)]
            yield from step(core, branch, ids, stop, wants_logits=False, residence=residence)


def replay(core: EngineCore, branch: Branch, stop: Stop, residence: Residence) -> Generator[Wait, None, Logits | None]:
    """Logits [vocab] of the branch's last token again, from KV that exists.

    Raises:
        Cancelled, KvdError: as `step`.
    """
    while True:
        yield from _give_way(core, branch, stop, residence)
        want = StepWanted(branch, branch.tokens[-1:], stop, replays=True, gives_way=lambda: residence.is_wanted)
        yield want
        if want.done or stop() is not None:
            return want.result()


def compute_tokens(
    core: EngineCore,
    branch: Branch,
    stop: Stop,
    *,
    wants_logits: bool = False,
    on_chunk: Callable[[], None] = lambda: None,
    residence: Residence | None = None,
) -> Generator[Wait, None, Logits | None]:
    """Compute every token of the branch that has no KV, in chunks; logits of the last one when wanted.

    Raises:
        Cancelled, Busy, KvdError: as `step`; whole chunks that were computed stay.
    """
    logits: Logits | None = None
    total = len(branch.tokens)
    while branch.computed < total:
        raise_if_stopped(stop)
        chunk = branch.tokens[branch.computed : branch.computed + core.chunk_tokens]
        is_last = branch.computed + len(chunk) == total
        logits = yield from step(core, branch, chunk, stop, wants_logits=is_last and wants_logits, residence=residence)
        on_chunk()
    return logits


class Generation:
    """What a turn adds to one branch.

    Attributes:
        text: what the client gets.
        logprobs: of the tokens that `text` is made of and that stay, in order; None when they were not asked for.

    Args:
        core: the engine's parts.
        branch: active and ready; its tokens are the prompt.
        state: request, cancellation, times.
        sampler: chooses tokens.
        residence: what the turn holds of the machine.
        kept_tokens: tokens the branch had before the turn; they stay whatever happens.
        held_tokens: of these, tokens behind the prompt: the beginning of the answer, which is resumed.
    """

    def __init__(
        self,
        core: EngineCore,
        branch: Branch,
        state: TurnState,
        sampler: Sampler,
        residence: Residence,
        *,
        kept_tokens: int,
        held_tokens: int = 0,
    ) -> None:
        self._core = core
        self._branch = branch
        self._state = state
        self._sampler = sampler
        self._residence = residence
        self._kept_tokens = kept_tokens
        self._watch = StopWatch(core.codec, state.request.stop)
        self.prompt_tokens = len(branch.tokens) - held_tokens
        # tokens of the answer that were there: said again by `decode`, text of the branch already
        self._held = branch.tokens[self.prompt_tokens :]
        self._has_said_held = not self._held
        self._generated: list[int] = []
        self._is_settled = False
        resume = state.request.resume
        # tokens that the caller has: they come again, and are not sampled again
        self._given = deque(() if resume is None else resume.tokens[held_tokens:])
        self.text = ""
        self.logprobs: list[dict[str, object]] | None = None if state.request.logprobs is None else []
        # of sampled tokens whose text is not all given out yet: a few, or as many as a stop string has characters
        self._noted: deque[TokenLogprob] = deque()
        # control tokens whose place in the text is not given out yet: (characters before it, name)
        self._control: deque[tuple[int, str]] = deque()

    def prefill(self, *, replaying: bool) -> Generator[Wait, None, Logits | None]:
        """Compute every token without KV, in chunks; logits of the last one (None when none are wanted).

        Tokens of the answer that are there already count in what is told: they may be among those that are computed.

        Args:
            replaying: all KV exists: run the last token once more without writing, for its logits.
        """
        core, branch, request = self._core, self._branch, self._state.request
        began_s, total = self._here_s(), len(branch.tokens)

        def tell() -> None:
            request.emit({"type": "prefill", "done_tokens": branch.computed, "total_tokens": total})

        try:
            if replaying:
                return (yield from replay(core, branch, self._state.stop, self._residence))
            wants_logits = request.max_tokens > 0
            return (
                yield from compute_tokens(
                    core,
                    branch,
                    self._state.stop,
                    wants_logits=wants_logits,
                    on_chunk=tell,
                    residence=self._residence,
                )
            )
        finally:
            self._state.times.prefill_s = self._here_s() - began_s

    def decode(self, logits: Logits) -> Generator[Wait, None, FinishReason]:
        """Sample and step until something ends the turn; the last sampled token stays pending."""
        core, branch, state = self._core, self._branch, self._state
        began_s = self._here_s()
        try:
            self._note_first_token(is_there=bool(self._held))
            self._has_said_held = True
            for token in self._held:
                self._say(token)
                if self._watch.stopped:
                    return "stop"
            if len(self._generated) >= state.request.max_tokens:
                self._emit(self._watch.flush())
                return "length"
            while True:
                raise_if_stopped(state.stop)
                sampling_s = core.clock()
                given = self._given.popleft() if self._given else None
                token = self._sampler.sample(branch.tokens, logits, given)
                core.stats.sampling_s += core.clock() - sampling_s
                self._note_first_token(is_there=True)
                if token in core.codec.eos_ids:
                    self._emit(self._watch.flush())
                    return "stop"
                branch.tokens.append(token)
                branch.token_bytes.append(0)  # settled by `settle_text`, once it is known which bytes surface
                if state.request.resumable and given is None:
                    state.request.emit({"type": "tokens", "ids": [token]})
                if self._sampler.noted is not None:
                    self._noted.append(self._sampler.noted)
                self._say(token)
                if self._watch.stopped:
                    return "stop"
                if len(self._generated) >= state.request.max_tokens:
                    self._emit(self._watch.flush())
                    return "length"
                next_logits = yield from step(
                    core, branch, [token], state.stop, wants_logits=True, residence=self._residence
                )
                assert next_logits is not None
                logits = next_logits
        finally:
            state.times.decode_s = self._here_s() - began_s

    def _note_first_token(self, *, is_there: bool) -> None:
        if is_there and self._state.times.first_token_s is None:
            self._state.times.first_token_s = self._core.clock() - self._state.started_s
            self._state.request.emit({"type": "first_token"})

    def _say(self, token: int) -> None:
        """A token of the answer: give out the text that is certain now."""
        self._generated.append(token)
        text = self._watch.feed(token)
        if self._state.request.tells_control and self._core.codec.is_control(token):
            place = len(self.text) + len(text) + self._watch.held_characters
            self._control.append((place, self._core.codec.token_bytes(token).decode(errors="replace")))
        self._emit(text)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the turn, if one did."""
        return self._watch.stop_string

    def settle_text(self) -> None:
        """Give the generated tokens their text; ids beyond what was given out go. Once: later it does nothing."""
        if self._is_settled:
            return
        self._is_settled = True
        branch = self._branch
        generated, self._generated = self._generated, []
        held = len(self._held)
        settled = self.prompt_tokens + held
        kept = self._watch.kept_tokens
        del branch.tokens[settled:], branch.token_bytes[settled:]
        if kept > held:
            data, lengths = self._core.codec.surface(generated[:kept])
            told = data[sum(lengths[:held]) :]
            branch.append("generated", told, generated[held:kept], lengths[held:])

    def trim(self) -> Waiting:
        """Settle the branch for the commit: give generated tokens their text, cut overshoot and half characters.

        Raises:
            NoRoomForCopy: a cut inside a page found no frame (see `apply_when_room`).
            Busy: the turn was cancelled while it was preempted, and the page that is cut could not be read.
        """
        self.settle_text()
        branch = self._branch
        tokens = len(branch.tokens)
        if self._held and self._has_said_held:  # a stop string may end the answer earlier than it did
            tokens = min(tokens, self.prompt_tokens + self._watch.kept_tokens)
        if branch.behind:
            # a cancelled prefill leaves ids without KV: keep what was computed, on a character border, and what there
            # was before
            tokens = max(self._kept_tokens, branch.border_at_most(branch.computed))
        if self._residence.is_active or branch.computed <= tokens:
            yield from self._core.cut_branch(branch, tokens, never)
        else:
            yield from cut_held(self._core, branch, tokens, never)

    def keep_rest(self) -> None:
        """Let the branch hold what was told and is no whole token: what stands before a stop string inside one.

        So the agent has the very text that its client has, and what is appended to it stands behind that. It is encoded
        anew; where that gives one token, which then is pending as a sampled one would be, it is kept. More would need a
        step, and a turn that is over does not fail for want of one. It is no token that the model chose: nothing counts
        it. After `trim`.
        """
        core, branch = self._core, self._branch
        if len(branch.tokens) < self.prompt_tokens or branch.computed < len(branch.tokens):
            return  # cut inside the prompt, since KV was lost, or a token is pending
        told, prompt_bytes = self.text.encode(), branch.text_bytes_of(self.prompt_tokens)
        kept = bytes(branch.text[prompt_bytes:])
        if len(told) <= len(kept) or not told.startswith(kept):
            return
        rest = TypedText(told[len(kept) :], (Span("generated", len(told) - len(kept)),))
        try:
            ids, lengths = core.encode(rest, at_start=False)
        except KvdError:  # a vocabulary need not have every text
            return
        if len(ids) == 1:
            branch.append_typed(rest, ids, lengths)

    def _here_s(self) -> float:
        """The clock without the time for which the turn was preempted."""
        return self._core.clock() - self._state.times.away_s

    def _emit(self, text: str) -> None:
        while self._control and self._control[0][0] <= len(self.text) + len(text):
            place, name = self._control.popleft()
            before = place - len(self.text)
            self._emit_text(text[:before])
            self._state.request.emit({"type": "control", "text": name})
            text = text[before:]
        self._emit_text(text)
        if self.logprobs is not None and (fresh := self._watch.kept_tokens - len(self.logprobs)):
            told = [entry(self._core.codec, self._noted.popleft()) for _ in range(fresh)]
            self.logprobs += told
            self._state.request.emit({"type": "logprobs", "logprobs": told})

    def _emit_text(self, text: str) -> None:
        if text:
            self.text += text
            self._state.request.emit({"type": "text", "text": text})
