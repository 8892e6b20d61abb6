"""One turn: match, fault in, prefill, decode, commit. A generator that the engine resumes.

Theory of operation. A turn is a generator: it yields the steps of the model it wants (the engine runs them together
with those of other turns and looks at its inbox in between, so a cancellation acts within one step) or a condition it
waits for (room beside other turns, pages being read, a log record being synced). Nothing of the agent changes before
admission: a request that is refused leaves it as it was. Between two steps it can be preempted: its `Residence` gives
back pages, place and slot, and gets them again.

    match text -> admit -> (wait for pages that another turn computes) -> (fork on divergence) -> activate
    -> [grow, step] * chunks -> [sample, grow, step] * tokens
    -> cut overshoot -> wait for page writes -> append the log record -> reply

A turn whose prompt begins with pages of its namespace that reach further than the agent's own branches starts from a
new branch that maps them (`kvd.scheduler.sharing`). They are mapped when it is planned, so they cannot go away.

The last sampled token is *pending*: part of the text, its KV comes with the next step. Whatever ends the turn
(end of text, stop string, length, cancellation), the branch is cut to what was computed plus at most one pending
token, on a character border, before the commit. When a turn fails half way, `_salvage` brings the branch to such a
state without waiting for anything; what was gained is then saved by the engine's next retry.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kvd.errors import Cancelled, KvdError
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.admission import reserve
from kvd.scheduler.agents import Agent, Branch
from kvd.scheduler.branches import close_surplus
from kvd.scheduler.commit import Committed, Committing, commit
from kvd.scheduler.endings import agent_of, use
from kvd.scheduler.generation import Generation
from kvd.scheduler.planning import Plan, plan_turn, until_in
from kvd.scheduler.requests import FinishReason, TurnRequest, TurnResult
from kvd.scheduler.residence import Residence
from kvd.scheduler.resuming import resume_facts
from kvd.scheduler.sampling import Sampler
from kvd.scheduler.sharing import Advance
from kvd.scheduler.state import Priority
from kvd.scheduler.waiting import Patience, Wait
from kvd.vm.events import Pinned, Unpinned
from kvd.vm.prefix import Match

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore


@dataclass(slots=True)
class TurnTimes:
    """Seconds spent, for the reply and the request's log line.

    `preempted_s`: without a slot or place, after it had them; `away_s`: that, and until its pages were there again.
    """

    queued_s: float = 0.0
    swap_in_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    commit_s: float = 0.0
    preempted_s: float = 0.0
    away_s: float = 0.0
    first_token_s: float | None = None


@dataclass(slots=True)
class TurnState:
    """What a running turn knows; the engine sets `cancelled` and `slot_wanted`, the turn all else.

    `prompt_tokens`: once it is matched. `is_shortened`: the model's context has room for fewer new tokens than were
    asked for. `is_background`: it makes way for interactive turns, unless one of them waits for it.
    """

    request: TurnRequest
    started_s: float
    times: TurnTimes = field(default_factory=TurnTimes)
    cancelled: bool = False
    cancel_reason: str = "cancelled by the client"
    swapped_in_pages: int = 0
    is_shortened: bool = False
    prompt_tokens: int = 0
    slot_wanted: bool = False
    preemptions: int = 0
    residence: Residence | None = None
    patience: Patience = field(default_factory=Patience)
    is_background: bool = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the request's own priority."""
        self.is_background = self.request.priority == "background"

    def prioritise(self, priority: Priority) -> None:
        """It counts as this from here on, for a place in RAM, too."""
        self.is_background = priority == "background"
        if self.residence is not None:
            self.residence.prioritise(is_background=self.is_background)

    def stop(self) -> str | None:
        """Why the turn is to end at its next step boundary; None while it may go on."""
        return self.cancel_reason if self.cancelled else None


def run_turn(core: EngineCore, state: TurnState) -> Generator[Wait, None, TurnResult]:
    """Run one turn to its reply.

    Raises:
        InvalidParams, InvalidText, ContextFull, BudgetExceeded: refused; the agent is unchanged.
        Cancelled: cancelled; what was computed is kept and committed.
        KvdError: it failed half way; the agent keeps what was computed and can go on.
    """
    request = state.request
    sampler = Sampler(
        request.sampling, vocab_tokens=core.spec.vocab_tokens, hooks=request.hooks, logprobs=request.logprobs
    )
    agent, is_new = agent_of(core, request)
    try:
        plan = plan_turn(core, agent, request)
        residence = state.residence = _residence(core, agent, plan, state)
        try:
            plan = yield from until_in(core, agent, plan, state, residence)
            core.journal.turn_begun(state)
            state.request = replace(request, max_tokens=plan.max_tokens)
            state.is_shortened = plan.max_tokens < request.max_tokens
            token_bytes = [*plan.source.token_bytes[: plan.match.keep_tokens], *plan.lengths]
            advance = core.sharing.begin(agent.ref, plan.prompt, token_bytes, lambda: residence.is_away)
            try:
                return (yield from _carry_out(core, agent, plan, sampler, state, residence, advance))
            finally:
                core.sharing.end(advance)
        finally:
            residence.close()
    finally:
        use(core, agent)
        if is_new and not agent.logged and not any(branch.tokens for branch in agent.branches.values()):
            core.discard_agent(agent)


# ---- before anything changes ----------------------------------------------------------------------------------------


def _residence(core: EngineCore, agent: Agent, plan: Plan, state: TurnState) -> Residence:
    """Ask for the turn's place."""
    asked = reserve(core, plan.source, plan.needed_bytes, is_background=state.is_background, can_leave=True)
    return Residence(core, state, asked, plan.needed_bytes, partial(plan.needs, core, agent))


# ---- the work -------------------------------------------------------------------------------------------------------


def _carry_out(
    core: EngineCore,
    agent: Agent,
    plan: Plan,
    sampler: Sampler,
    state: TurnState,
    residence: Residence,
    advance: Advance,
) -> Generator[Wait, None, TurnResult]:
    """Fork when the prompt diverges, work on the branch, and go back to where the agent was if nothing came of it."""
    before = agent.branch
    branch = plan.source
    faults_before = core.pager.faults(branch.space)
    notes: list[str] = []
    if plan.is_shared:
        agent.branches[branch.branch_id] = branch
    elif plan.forks:
        with residence.waiting_for_pages():
            branch, notes = yield from _fork(core, agent, plan, state)
        state.swapped_in_pages = core.pager.faults(plan.source.space) - faults_before
        faults_before = 0
    core.make_current(agent, branch)
    advance.branch = branch
    try:
        result = yield from _work(core, agent, branch, plan, sampler, state, residence, notes, faults_before)
    except BaseException:
        if len(branch.tokens) <= plan.match.keep_tokens and branch is not before:
            core.make_current(agent, before)
            if branch is not plan.source or plan.is_shared:
                core.close_branch(agent, branch)
        raise
    if branch is not before and before.branch_id in agent.branches and not (before.tokens or before.logged):
        core.close_branch(agent, before)  # a new agent's empty one
    return result


def _fork(
    core: EngineCore, agent: Agent, plan: Plan, state: TurnState
) -> Generator[Wait, None, tuple[Branch, list[str]]]:
    """The branch a divergence works on. A pin goes to it afterwards; until then it must not stand in the way."""
    moves_pin = agent.pinned and plan.source is not agent.branch
    if moves_pin:
        core.memory.apply(Unpinned(agent.branch.space))
    try:
        return (yield from core.fork_branch(agent, plan.source, plan.match.keep_tokens, state.stop))
    except BaseException:
        if moves_pin:
            core.memory.apply(Pinned(agent.branch.space))
        raise


def _work(
    core: EngineCore,
    agent: Agent,
    branch: Branch,
    plan: Plan,
    sampler: Sampler,
    state: TurnState,
    residence: Residence,
    notes: list[str],
    faults_before: int,
) -> Generator[Wait, None, TurnResult]:
    request, generation = state.request, None
    try:
        notes += yield from residence.activate(branch)
        branch.append_typed(plan.suffix, plan.ids, plan.lengths)
        generation = Generation(
            core,
            branch,
            state,
            sampler,
            residence,
            kept_tokens=plan.match.keep_tokens,
            held_tokens=plan.held_tokens,
        )
        replaying = branch.computed == len(branch.tokens) and request.max_tokens > 0
        cached_tokens = min(branch.computed - 1 if replaying else branch.computed, generation.prompt_tokens)
        told = resume_facts(core, request, branch.tokens[: generation.prompt_tokens])
        reason = "; ".join([plan.match.reason, *notes])
        matched = {"match": plan.match.kind, "match_reason": reason, "prompt_tokens": generation.prompt_tokens}
        request.emit({"type": "matched", **matched, "cached_tokens": cached_tokens, **told})
        core.journal.matched(state, {**matched, "cached_tokens": cached_tokens}, _divergence(plan.match))
        finish = yield from _generate(generation, request, replaying=replaying)
        core.stats.tokens_reused += cached_tokens
        core.stats.tokens_shared += min(cached_tokens, branch.borrowed_pages * PAGE_TOKENS) if plan.is_shared else 0
        yield from generation.trim()
        usage = {
            "prompt_tokens": generation.prompt_tokens,
            "cached_tokens": cached_tokens,
            "completion_tokens": max(0, len(branch.tokens) - generation.prompt_tokens),
        }
        generation.keep_rest()
        core.sharing.note(branch)
        request.emit({"type": "usage", **usage})
        began_s = core.clock()
        # a cancelled turn is worth a record when it added text, or KV to what the log has (its fork is let go of else)
        longer = len(branch.tokens) > plan.match.keep_tokens
        is_own = branch is plan.source and not plan.is_shared
        gained = finish != "cancelled" or longer or (is_own and not branch.saved)
        done = yield from _commit(core, agent, branch, gained=gained)
        state.times.commit_s = core.clock() - began_s
        state.swapped_in_pages += core.pager.faults(branch.space) - faults_before
        request.emit({"type": "durable", "durable": done.durable, "reason": done.reason})
    except BaseException as error:
        _salvage(core, agent, branch, generation, plan.match.keep_tokens, error)
        raise
    finally:
        residence.deactivate()
    if finish == "cancelled":
        message = f"{state.cancel_reason}; {branch.computed} computed tokens are kept"
        raise Cancelled(message, durable=done.durable, **usage)
    return TurnResult(
        text=generation.text,
        finish_reason=finish,
        match=plan.match.kind,
        match_reason=reason,
        durable=done.durable,
        durable_reason=done.reason,
        agent=request.ref.agent,
        divergence=_divergence(plan.match),
        prefill_s=state.times.prefill_s,
        decode_s=state.times.decode_s,
        swap_in_s=state.times.swap_in_s,
        queued_s=state.times.queued_s,
        commit_s=state.times.commit_s,
        swapped_in_pages=state.swapped_in_pages,
        appended_tokens=max(0, generation.prompt_tokens - plan.match.keep_tokens),
        written_bytes=done.written_bytes,
        preemptions=state.preemptions,
        preempted_s=state.times.preempted_s,
        context_full=state.is_shortened and finish in ("length", "injected"),
        logprobs=generation.logprobs,
        stop_string=generation.stop_string,
        resumed_tokens=min(request.given_tokens, usage["completion_tokens"]),
        **usage,
    )


def _generate(generation: Generation, request: TurnRequest, *, replaying: bool) -> Generator[Wait, None, FinishReason]:
    """Prefill and decode; a cancellation ends both."""
    try:
        logits = yield from generation.prefill(replaying=replaying)
        if request.max_tokens == 0 or logits is None:
            return "injected"
        return (yield from generation.decode(logits))
    except Cancelled:
        return "cancelled"


def _commit(core: EngineCore, agent: Agent, branch: Branch, *, gained: bool) -> Committing:
    if not gained or branch.behind:
        return Committed(agent.unsaved)  # cancelled before it came to anything: the log has all there is
    close_surplus(core, agent)
    done = yield from commit(core, agent, branch, "turn")
    close_surplus(core, agent)  # now the branch that this one leaned on can go, too
    return done


def _salvage(
    core: EngineCore,
    agent: Agent,
    branch: Branch,
    generation: Generation | None,
    kept_tokens: int,
    error: BaseException,
) -> None:
    """After a failure: make branch and pager agree again, at the last token that has KV. Waits for nothing."""
    core.forget_caches(branch.space)
    if generation is not None:
        generation.settle_text()
    branch.computed = min(branch.computed, core.pager.tokens(branch.space))
    if branch.behind:
        branch.cut(max(kept_tokens, branch.border_at_most(branch.computed)))
    computed = min(branch.computed, len(branch.tokens))
    try:
        core.cut_kv(branch, computed)
    except KvdError:
        # no frame for a copy: at a page border none is needed, and KV that is missing is computed again
        core.cut_kv(branch, computed // PAGE_TOKENS * PAGE_TOKENS)
    if branch.tokens and not branch.durable and agent.refused is None:
        agent.refused = f"the request failed: {error}"


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
