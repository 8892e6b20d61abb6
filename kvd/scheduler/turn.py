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

from kvd.errors import Cancelled, InvalidParams, KvdError
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.admission import new_tokens, refuse_long_text, refuse_over_budget, reserve
from kvd.scheduler.agents import Agent, Branch
from kvd.scheduler.branches import close_surplus
from kvd.scheduler.commit import Committed, Committing, commit
from kvd.scheduler.endings import agent_of, use
from kvd.scheduler.generation import Generation
from kvd.scheduler.requests import FinishReason, TurnRequest, TurnResult
from kvd.scheduler.residence import Residence
from kvd.scheduler.sampling import Sampler
from kvd.scheduler.sharing import Advance
from kvd.scheduler.state import Priority
from kvd.scheduler.waiting import Patience, Wait, raise_if_stopped
from kvd.vm.events import Pinned, Unpinned
from kvd.vm.prefix import Match, StoredText, best_match
from kvd.vm.text import TypedText, joined, rest_of

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


@dataclass(frozen=True, slots=True)
class Plan:
    """What a turn will do, decided before anything changes.

    Attributes:
        source: branch that keeps most of the prompt.
        match: how they compare; the kind is that of the agent's own best branch in any case.
        prompt: the agent's whole text, with what is added.
        suffix: text to add after what is kept.
        ids: its token ids.
        lengths: bytes each id stands for.
        max_tokens: new tokens that there is room for, at most as many as were asked for.
        needed_bytes: working set at its largest, and what others have pinned.
        is_shared: `source` maps pages of the namespace and is not the agent's yet (see `Sharing.map_pages`).
    """

    source: Branch
    match: Match
    prompt: TypedText
    suffix: TypedText
    ids: list[int]
    lengths: list[int]
    max_tokens: int
    needed_bytes: int
    is_shared: bool = False

    @property
    def reach_bytes(self) -> int:
        """Bytes of the prompt whose KV exists."""
        return self.source.text_bytes_of(self.match.computed_tokens)

    def needs(self, core: EngineCore, agent: Agent) -> int:
        """`needed_bytes` as of now.

        Raises:
            BudgetExceeded: that is more than there can be.
        """
        tokens = self.match.keep_tokens + len(self.ids) + self.max_tokens
        # a turn that commits may have let go of the branch it began with
        return refuse_over_budget(core, agent, self.source if core.is_open(self.source.space) else agent.branch, tokens)

    def drop(self, core: EngineCore) -> None:
        """It is not carried out: let go of what it maps."""
        if self.is_shared:
            core.let_go(self.source)


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
        plan = _plan(core, agent, request)
        residence = state.residence = _residence(core, agent, plan, state)
        try:
            plan = yield from _until_in(core, agent, plan, state, residence)
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


def _plan(core: EngineCore, agent: Agent, request: TurnRequest) -> Plan:
    prompt = request.prompt if request.continues is None else request.continues.after(agent.branch.typed)
    if request.appends_text:
        prompt = joined(agent.branch.typed, prompt)
    branch_id, match = _match(agent, request, prompt)
    source, is_shared = agent.branches[branch_id], False
    if not (_goes_on(request) and agent.branch.tokens):
        reach_bytes = source.text_bytes_of(match.computed_tokens)
        found = core.sharing.find(agent.ref, prompt, reach_bytes)
        if found is not None:
            source, is_shared = core.sharing.map_pages(agent, *found), True
            match = _shared_match(match, source)
    try:
        suffix = rest_of(prompt, match.keep_bytes)
        refuse_long_text(core, suffix, match.keep_tokens, request.max_tokens)
        ids, lengths = core.encode(suffix, at_start=match.keep_tokens == 0)
        prompt_tokens = match.keep_tokens + len(ids)
        if not prompt_tokens:
            raise InvalidParams("the text is empty; send at least one character", parameter="text")
        max_tokens = new_tokens(core, request, prompt_tokens)
        needed_bytes = refuse_over_budget(core, agent, source, prompt_tokens + max_tokens)
    except BaseException:
        if is_shared:
            core.let_go(source)
        raise
    return Plan(source, match, prompt, suffix, ids, lengths, max_tokens, needed_bytes, is_shared)


def _goes_on(request: TurnRequest) -> bool:
    """Whether what is added goes on from where the agent is, whatever else has the same text."""
    return request.append or request.continues is not None


def _shared_match(own: Match, source: Branch) -> Match:
    """What pages of the namespace keep of a prompt, told as an addition to how the agent's own text compares."""
    tokens = len(source.tokens)
    return replace(
        own,
        keep_tokens=tokens,
        keep_bytes=len(source.text),
        computed_tokens=tokens,
        reason=f"{own.reason}; {tokens} tokens are in pages of the namespace",
    )


def _until_in(
    core: EngineCore, agent: Agent, plan: Plan, state: TurnState, residence: Residence
) -> Generator[Wait, None, Plan]:
    """Wait for a place, then for pages that other turns are about to seal.

    Returns:
        The plan, a new one when there is more to begin with by now.

    Raises:
        Cancelled: nothing is mapped any more; the caller closes the residence.
    """
    began_s = core.clock()
    try:
        if not core.reservations.is_in(residence.reservation):
            core.paging.expect(plan.source.space)
        yield from residence.until_in()
        while not (_goes_on(state.request) and agent.branch.tokens):
            plan = _replan(core, agent, plan, state.request, residence)
            there = core.sharing.awaited(agent.ref, plan.prompt, plan.reach_bytes)
            if there is None:
                break
            yield lambda: there() or residence.is_wanted or state.stop() is not None  # noqa: B023  waited for at once
            raise_if_stopped(state.stop)
            yield from residence.step_aside()
    except BaseException:
        plan.drop(core)
        raise
    state.times.queued_s += core.clock() - began_s
    return plan


def _replan(core: EngineCore, agent: Agent, plan: Plan, request: TurnRequest, residence: Residence) -> Plan:
    """A plan that begins with more pages, if there are more by now and it fits the place that the turn has."""
    if core.sharing.find(agent.ref, plan.prompt, plan.reach_bytes) is None:
        return plan
    try:
        better = _plan(core, agent, request)
    except KvdError:  # other ids of the same text may be more of them
        return plan
    if better.needed_bytes > residence.needed_bytes:
        better.drop(core)
        return plan
    plan.drop(core)
    residence.needs = partial(better.needs, core, agent)
    return better


def _match(agent: Agent, request: TurnRequest, prompt: TypedText) -> tuple[int, Match]:
    """The branch that keeps most of the prompt, and how they compare."""
    if request.appends_text:
        branch = agent.branch
        keep = Match(
            kind="extend" if branch.tokens else "new",
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
        if request.continues is None or branch_id == agent.current  # what is added goes on from where the agent is
    }
    return best_match(stored, prompt, agent.current)


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
    elif plan.match.kind == "diverge":
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
        generation = Generation(core, branch, state, sampler, residence, kept_tokens=plan.match.keep_tokens)
        replaying = branch.computed == generation.prompt_tokens and request.max_tokens > 0
        cached_tokens = branch.computed - 1 if replaying else branch.computed
        reason = "; ".join([plan.match.reason, *notes])
        matched = {"match": plan.match.kind, "match_reason": reason, "prompt_tokens": generation.prompt_tokens}
        request.emit({"type": "matched", **matched, "cached_tokens": cached_tokens})
        core.journal.matched(state, {**matched, "cached_tokens": cached_tokens}, _divergence(plan.match))
        finish = yield from _generate(generation, request, replaying=replaying)
        core.stats.tokens_reused += cached_tokens
        core.stats.tokens_shared += min(cached_tokens, branch.borrowed_pages * PAGE_TOKENS) if plan.is_shared else 0
        yield from generation.trim()
        core.sharing.note(branch)
        usage = {
            "prompt_tokens": generation.prompt_tokens,
            "cached_tokens": cached_tokens,
            "completion_tokens": max(0, len(branch.tokens) - generation.prompt_tokens),
        }
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
        appended_tokens=generation.prompt_tokens - plan.match.keep_tokens,
        written_bytes=done.written_bytes,
        preemptions=state.preemptions,
        preempted_s=state.times.preempted_s,
        context_full=state.is_shortened and finish in ("length", "injected"),
        logprobs=generation.logprobs,
        stop_string=generation.stop_string,
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
