"""One turn: match, fault in, prefill, decode, commit. A generator that the engine resumes.

Theory of operation. A turn is a generator: it yields `None` at each step boundary (the engine then looks at its inbox,
so a cancellation acts within one step) or a condition it waits for (pages being read, a log record being synced).
Nothing of the agent changes before admission: a request that is refused leaves it as it was.

    match text -> admit -> (fork on divergence) -> activate -> [grow, step] * chunks -> [sample, grow, step] * tokens
    -> cut overshoot -> wait for page writes -> append the log record -> reply

The last sampled token is *pending*: part of the text, its KV comes with the next step. Whatever ends the turn
(end of text, stop string, length, cancellation), the branch is cut to what was computed plus at most one pending
token, on a character border, before the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.errors import BudgetExceeded, Cancelled, ContextFull, InvalidParams
from kvd.ids import SpaceId
from kvd.scheduler.agents import Agent, Branch, rest_of
from kvd.scheduler.requests import FinishReason, MatchKind, TurnRequest, TurnResult
from kvd.scheduler.sampling import Logits, Sampler
from kvd.scheduler.stopping import StopWatch
from kvd.vm.events import Activated, Deactivated, GrowthWanted
from kvd.vm.prefix import Match, StoredText, best_match
from kvd.vm.text import Span

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore

Wait = Callable[[], bool] | None
"""None: step boundary. Otherwise: resume when it returns True."""

Clock = Callable[[], float]


@dataclass(slots=True)
class TurnTimes:
    """Seconds spent, for the reply and the request's log line."""

    queued_s: float = 0.0
    swap_in_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    commit_s: float = 0.0
    first_token_s: float | None = None


@dataclass(slots=True)
class TurnState:
    """What a running turn knows; the engine sets `cancelled`."""

    request: TurnRequest
    started_s: float
    times: TurnTimes = field(default_factory=TurnTimes)
    cancelled: bool = False
    cancel_reason: str = "cancelled by the client"


def run_turn(core: EngineCore, state: TurnState) -> Generator[Wait, None, TurnResult]:
    """Run one turn to its reply.

    Raises:
        InvalidParams, InvalidText, ContextFull, BudgetExceeded: refused; the agent is unchanged.
        Cancelled: cancelled; what was computed is kept and committed.
    """
    request = state.request
    agent, is_new = core.agents.get_or_create(request.ref)
    space: SpaceId | None = None
    try:
        branch_id, match = _match(core, agent, request)
        source = agent.branches[branch_id]
        suffix = rest_of(request.prompt, 0 if request.append else match.keep_bytes)
        ids, lengths = core.encode(suffix)
        _admit(core, source, match, len(ids), request)

        branch = yield from _branch_for(core, agent, source, match, state)
        space = branch.space
        swapped_before = core.memory.statistics.pages_loaded
        notes = yield from _fault_in(core, branch, state)
        _append_typed(branch, suffix.spans, suffix.data, ids, lengths)
        prompt_tokens = len(branch.tokens)
        replay = branch.computed == prompt_tokens and request.max_tokens > 0
        cached_tokens = branch.computed - 1 if replay else branch.computed
        reason = "; ".join([match.reason, *notes])
        matched = {"match": match.kind, "match_reason": reason, "prompt_tokens": prompt_tokens}
        request.emit({"type": "matched", **matched, "cached_tokens": cached_tokens})

        generation = Generation(core, branch, state)
        finish: FinishReason = "injected"
        try:
            logits = yield from generation.prefill(replay=replay)
            if request.max_tokens > 0 and logits is not None:
                finish = yield from generation.decode(logits)
        except Cancelled:
            finish = "cancelled"
        core.stats.tokens_reused += cached_tokens
        generation.trim()
        completion_tokens = max(0, len(branch.tokens) - prompt_tokens)
        usage = {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "completion_tokens": completion_tokens}
        request.emit({"type": "usage", **usage})
        began = core.clock()
        durable, durable_reason = yield from core.commit(agent, branch, "turn")
        state.times.commit_s = core.clock() - began
        request.emit({"type": "durable", "durable": durable, "reason": durable_reason})
        if finish == "cancelled":
            raise Cancelled(
                f"{state.cancel_reason}; {branch.computed} computed tokens are kept", durable=durable, **usage
            )
        return TurnResult(
            text=generation.text,
            finish_reason=finish,
            match=match.kind,
            match_reason=reason,
            durable=durable,
            durable_reason=durable_reason,
            agent=request.ref.agent,
            divergence=_divergence(match),
            prefill_s=state.times.prefill_s,
            decode_s=state.times.decode_s,
            swap_in_s=state.times.swap_in_s,
            queued_s=state.times.queued_s,
            commit_s=state.times.commit_s,
            swapped_in_pages=core.memory.statistics.pages_loaded - swapped_before,
            **usage,
        )
    finally:
        if space is not None:
            core.memory.apply(Deactivated(space))
        if is_new and not agent.branch.tokens and not agent.logged:
            core.discard_agent(agent)


def _match(core: EngineCore, agent: Agent, request: TurnRequest) -> tuple[int, Match]:
    """The branch that keeps most of the prompt, and how they compare."""
    agent.branch.last_used = core.agents.tick()
    if request.append:
        branch = agent.branch
        kind: MatchKind = "extend" if branch.tokens else "new"
        keep = Match(
            kind=kind,
            keep_tokens=len(branch.tokens),
            keep_bytes=len(branch.text),
            computed_tokens=branch.computed,
            matched_bytes=len(branch.text),
            matched_ratio=1.0,
            reason="appended",
        )
        return agent.current, keep
    stored = {
        branch_id: StoredText.of(branch.typed, branch.token_bytes, branch.computed)
        for branch_id, branch in agent.branches.items()
    }
    return best_match(stored, request.prompt, agent.current)


def _admit(core: EngineCore, branch: Branch, match: Match, suffix_tokens: int, request: TurnRequest) -> None:
    """Refuse what can never run, before anything changes."""
    prompt_tokens = match.keep_tokens + suffix_tokens
    if prompt_tokens == 0:
        raise InvalidParams("the text is empty; send at least one character", parameter="text")
    wanted = prompt_tokens + request.max_tokens
    limit = core.spec.context_tokens
    if wanted > limit:
        raise ContextFull(
            f"{prompt_tokens} prompt tokens and {request.max_tokens} new ones exceed the model's context of {limit}",
            prompt_tokens=prompt_tokens,
            max_tokens=request.max_tokens,
            context_tokens=limit,
        )
    need = core.step_bytes(branch, wanted)
    if need > core.pager.usable_bytes:
        raise BudgetExceeded(
            f"{wanted} tokens need {need} bytes of pages, the budget leaves {core.pager.usable_bytes}",
            needed_bytes=need,
            usable_bytes=core.pager.usable_bytes,
            budget_bytes=core.pager.statistics().budget_bytes,
        )


def _branch_for(
    core: EngineCore, agent: Agent, source: Branch, match: Match, state: TurnState
) -> Generator[Wait, None, Branch]:
    """The branch the turn works on: the source itself, or a new one forked from it where the prompt diverges."""
    agent.current = source.branch_id
    if match.kind != "diverge":
        return source
    branch = yield from core.fork_branch(agent, source, match.keep_tokens, state.times)
    agent.current = branch.branch_id
    return branch


def _fault_in(core: EngineCore, branch: Branch, state: TurnState) -> Generator[Wait, None, list[str]]:
    """Make every page of the branch resident. Lost pages cut the KV (never the ids) and are reported."""
    began = core.clock()
    core.memory.apply(Activated(branch.space))
    notes: list[str] = []
    while True:
        yield lambda: core.pager.is_ready(branch.space) or core.pager.lost_at(branch.space) is not None
        lost = core.pager.lost_at(branch.space)
        if lost is None:
            break
        notes.append(f"page lost at token {lost}: {branch.computed - lost} tokens are computed again")
        core.cut_kv(branch, lost)
    state.times.swap_in_s += core.clock() - began
    return notes


def _append_typed(
    branch: Branch, spans: Sequence[Span], data: bytes, ids: Sequence[int], lengths: Sequence[int]
) -> None:
    """Append a typed suffix; its ids tile the spans in order (no token crosses a span)."""
    offset, token = 0, 0
    for span in spans:
        first, used = token, 0
        while token < len(ids) and (used < span.text_bytes or lengths[token] == 0):
            used += lengths[token]
            token += 1
        branch.append(span.kind, data[offset : offset + span.text_bytes], ids[first:token], lengths[first:token])
        offset += span.text_bytes


def _divergence(match: Match) -> Mapping[str, object] | None:
    if match.divergence is None:
        return None
    found = match.divergence
    return {
        "byte": found.position_bytes,
        "character": found.position_chars,
        "token": found.token,
        "expected": found.expected,
        "found": found.found,
    }


class Generation:
    """The computing part of a turn on one branch. `text` is what the client gets.

    Args:
        core: the engine's parts.
        branch: active and ready.
        state: request and cancellation flag.
    """

    def __init__(self, core: EngineCore, branch: Branch, state: TurnState) -> None:
        self._core = core
        self._branch = branch
        self._state = state
        self._prompt_tokens = len(branch.tokens)
        self._watch = StopWatch(core.codec, state.request.stop)
        self._generated: list[int] = []
        self.text = ""

    def prefill(self, *, replay: bool) -> Generator[Wait, None, Logits | None]:
        """Compute every prompt token without KV, in chunks; logits of the last one (None when none are wanted).

        Args:
            replay: all KV exists: run the last token once more without writing, for its logits.
        """
        core, branch = self._core, self._branch
        began = core.clock()
        wants_logits = self._state.request.max_tokens > 0
        sequence = core.sequence(branch)
        logits: Logits | None = None
        total = len(branch.tokens)
        if replay:
            logits = core.forward.replay(sequence, branch.tokens[-1])
            core.stats.tokens_replayed += 1
        while branch.computed < total:
            self._check_cancelled()
            chunk = branch.tokens[branch.computed : branch.computed + core.chunk_tokens]
            is_last = branch.computed + len(chunk) == total
            logits = yield from self._step(chunk, wants_logits=is_last and wants_logits)
            self._state.request.emit({"type": "prefill", "done_tokens": branch.computed, "total_tokens": total})
            yield None
        self._state.times.prefill_s = core.clock() - began
        return logits

    def decode(self, logits: Logits) -> Generator[Wait, None, FinishReason]:
        """Sample and step until something ends the turn; the last sampled token stays pending."""
        core, branch, request = self._core, self._branch, self._state.request
        sampler = Sampler(request.sampling, vocab_tokens=core.spec.vocab_tokens)
        began = core.clock()
        try:
            while True:
                self._check_cancelled()
                token = sampler.sample(branch.tokens, logits)
                if self._state.times.first_token_s is None:
                    self._state.times.first_token_s = core.clock() - self._state.started_s
                    request.emit({"type": "first_token"})
                if token in core.codec.eos_ids:
                    self._emit(self._watch.flush())
                    return "stop"
                branch.tokens.append(token)
                branch.token_bytes.append(0)  # settled by trim(), once it is known which bytes surface
                self._generated.append(token)
                self._emit(self._watch.feed(token))
                if self._watch.stopped:
                    return "stop"
                if len(self._generated) >= request.max_tokens:
                    self._emit(self._watch.flush())
                    return "length"
                next_logits = yield from self._step([token], wants_logits=True)
                assert next_logits is not None
                logits = next_logits
                yield None
        finally:
            self._state.times.decode_s = core.clock() - began

    def trim(self) -> None:
        """Settle the branch for the commit: cut overshoot and half characters, give generated tokens their text."""
        core, branch = self._core, self._branch
        generated = self._generated
        kept = self._watch.kept_tokens(generated)
        del branch.tokens[self._prompt_tokens :], branch.token_bytes[self._prompt_tokens :]
        if kept:
            data, lengths = core.codec.surface(generated[:kept])
            branch.append("generated", data, generated[:kept], lengths)
        # a cancelled prefill leaves ids without KV: keep what was computed, on a character border
        if len(branch.tokens) - branch.computed > 1:
            core.cut_branch(branch, branch.border_at_most(branch.computed))
        elif branch.computed > len(branch.tokens):
            core.cut_kv(branch, len(branch.tokens))

    def _step(self, ids: list[int], *, wants_logits: bool) -> Generator[Wait, None, Logits | None]:
        core, branch = self._core, self._branch
        core.memory.apply(GrowthWanted(branch.space, len(ids)))
        if not core.pager.is_ready(branch.space):
            yield lambda: core.pager.is_ready(branch.space)
        logits = core.forward.step(core.sequence(branch), ids, wants_logits=wants_logits)
        keys = core.page_keys(branch, len(ids))
        branch.computed += len(ids)
        core.memory.append(branch.space, len(ids), keys)
        core.stats.tokens_computed += len(ids)
        return logits

    def _emit(self, text: str) -> None:
        if text:
            self.text += text
            self._state.request.emit({"type": "text", "text": text})

    def _check_cancelled(self) -> None:
        if self._state.cancelled:
            raise Cancelled(self._state.cancel_reason)
