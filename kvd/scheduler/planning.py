"""What a turn will do, decided before anything changes: which branch it goes on from, what it adds, what it needs.

A plan may map pages of the namespace (`kvd.scheduler.sharing`), which cannot go away then; a plan that is not carried
out is dropped. While a turn waits for its place, or for pages that another turn is about to seal, it is planned anew
when there is more to begin with.

Owner: the engine thread. May import kvd.errors, kvd.vm and siblings.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvd.errors import InvalidParams, KvdError
from kvd.scheduler.admission import new_tokens, refuse_long_text, refuse_over_budget
from kvd.scheduler.agents import Agent, Branch
from kvd.scheduler.requests import TurnRequest
from kvd.scheduler.residence import Residence
from kvd.scheduler.resuming import held_answer, refuse_other_prompt
from kvd.scheduler.waiting import Wait, raise_if_stopped
from kvd.vm.prefix import Match, StoredText, best_match
from kvd.vm.text import TypedText, cut_spans, joined, rest_of

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore
    from kvd.scheduler.turn import TurnState


@dataclass(frozen=True, slots=True)
class Plan:
    """What a turn will do, decided before anything changes.

    Attributes:
        source: branch that keeps most of the prompt.
        match: how they compare; the kind is that of the agent's own text in any case (see `best_match`).
        prompt: the agent's whole text, with what is added.
        suffix: text to add after what is kept.
        ids: its token ids.
        lengths: bytes each id stands for.
        max_tokens: new tokens that there is room for, at most as many as were asked for.
        needed_bytes: working set at its largest, and what others have pinned.
        held_tokens: of what is kept, tokens behind the prompt, of an answer that is resumed.
        forks: `source` has more than what is kept: the turn works on a branch of its own.
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
    forks: bool = False
    is_shared: bool = False
    held_tokens: int = 0

    @property
    def reach_bytes(self) -> int:
        """Bytes of the prompt that need no step of their own."""
        return self.source.text_bytes_of(self.match.reach_tokens)

    def needs(self, core: EngineCore, agent: Agent) -> int:
        """`needed_bytes` as of now.

        Raises:
            BudgetExceeded: that is more than there can be.
        """
        tokens = self.match.keep_tokens + len(self.ids) + self.max_tokens - self.held_tokens
        # a turn that commits may have let go of the branch it began with
        return refuse_over_budget(core, agent, self.source if core.is_open(self.source.space) else agent.branch, tokens)

    def drop(self, core: EngineCore) -> None:
        """It is not carried out: let go of what it maps."""
        if self.is_shared:
            core.let_go(self.source)


def plan_turn(core: EngineCore, agent: Agent, request: TurnRequest) -> Plan:
    """What a turn will do; nothing of the agent changes.

    Raises:
        InvalidParams, ContextFull, BudgetExceeded, NotResumable: it is refused.
    """
    prompt = request.prompt if request.continues is None else request.continues.after(agent.branch.typed)
    if request.appends_text:
        prompt = joined(agent.branch.typed, prompt)
    branch_id, match = _match(agent, request, prompt)
    source, is_shared = agent.branches[branch_id], False
    if not (_goes_on(request) and agent.branch.tokens):
        reach_bytes = source.text_bytes_of(match.reach_tokens)
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
        whole, forks = [*source.tokens[: match.keep_tokens], *ids], match.keep_tokens < len(source.tokens)
        if request.resume is not None:
            refuse_other_prompt(core, request.resume, whole)
            match = _resumed_match(match, source, whole)
        max_tokens = new_tokens(core, request, prompt_tokens)
        needed_bytes = refuse_over_budget(core, agent, source, prompt_tokens + max_tokens)
    except BaseException:
        if is_shared:
            core.let_go(source)
        raise
    plan = Plan(source, match, prompt, suffix, ids, lengths, max_tokens, needed_bytes, forks, is_shared)
    held = held_answer(agent, request, whole)
    return plan if held is None else _with_held(core, plan, *held)


def _with_held(core: EngineCore, plan: Plan, branch: Branch, held_tokens: int) -> Plan:
    """The same, from a branch that holds the beginning of the answer, too."""
    plan.drop(core)
    keep_tokens = plan.match.keep_tokens + len(plan.ids) + held_tokens
    keep_bytes = branch.text_bytes_of(keep_tokens)
    match = replace(
        plan.match,
        kind="extend",
        keep_tokens=keep_tokens,
        keep_bytes=keep_bytes,
        computed_tokens=min(branch.computed, keep_tokens),
        reason=f"resumed behind {held_tokens} tokens of the answer that are there",
        divergence=None,
    )
    text = TypedText(bytes(branch.text[:keep_bytes]), tuple(cut_spans(branch.spans, keep_bytes)))
    return replace(
        plan,
        source=branch,
        match=match,
        prompt=text,
        suffix=TypedText(b"", ()),
        ids=[],
        lengths=[],
        forks=keep_tokens < len(branch.tokens),
        is_shared=False,
        held_tokens=held_tokens,
    )


def _resumed_match(match: Match, source: Branch, whole: list[int]) -> Match:
    """How the prompt of a stream that goes on compares: where all of it is there, what follows it is the broken answer.

    That is nothing in which two texts differ, and nobody's conversation has changed.

    Args:
        match: of the prompt as text.
        source: the branch that keeps most of it.
        whole: the prompt's ids.
    """
    if match.kind != "diverge" or source.tokens[: len(whole)] != whole:
        return match
    return replace(match, kind="extend", reason="resumed: the prompt is there", divergence=None)


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


def until_in(
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
        better = plan_turn(core, agent, request)
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
