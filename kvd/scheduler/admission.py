"""What can never run is refused before anything changes: it exceeds the model's context, or the budget without pins.

May import kvd.errors, kvd.ids, kvd.vm and siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import compress, islice
from typing import TYPE_CHECKING

from kvd.errors import BudgetExceeded, ContextFull
from kvd.ids import Namespace, PageId
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import Agent, Branch
from kvd.scheduler.requests import TurnRequest
from kvd.scheduler.reserving import Reservation
from kvd.vm.prefix import character_border
from kvd.vm.text import TypedText, cut_spans
from kvd.vm.views import SegmentView
from kvd.vm.window import most_pages

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore


FIRST_LOOK_BYTES_PER_TOKEN = 16
"""Text of more than so many bytes for each token of the context is encoded piecemeal; ordinary text has about 4."""

SURE_TIMES = 2
"""A piece has to have so many times the tokens there is room for: where it ends it may encode otherwise than the
whole text does."""


def new_tokens(core: EngineCore, request: TurnRequest, prompt_tokens: int) -> int:
    """New tokens a turn may make: those asked for, or, if the request wants that, those the context has room for.

    Raises:
        ContextFull: with the figures; nothing changed. A prompt that alone exceeds the context is always refused.
    """
    room = core.spec.context_tokens - prompt_tokens
    if request.max_tokens <= room:
        return request.max_tokens
    if room < 0 or request.on_context_full == "error":
        raise context_full(core, prompt_tokens, request.max_tokens)
    return room


def refuse_long_text(core: EngineCore, text: TypedText, kept_tokens: int, max_tokens: int) -> None:
    """Refuse a text of far too many tokens by its beginning: encoding takes time from everybody.

    Raises:
        ContextFull: with a lower bound of the prompt's tokens (`at_least`); nothing changed.
    """
    limit = core.spec.context_tokens
    piece_bytes = FIRST_LOOK_BYTES_PER_TOKEN * limit
    while piece_bytes < len(text.data):
        end = character_border(text.data, piece_bytes)
        piece = TypedText(text.data[:end], tuple(cut_spans(text.spans, end)))
        tokens = kept_tokens + len(core.encode(piece, at_start=kept_tokens == 0)[0])
        if tokens > SURE_TIMES * limit:
            raise context_full(core, tokens, max_tokens, at_least=True)
        piece_bytes *= 4


def context_full(core: EngineCore, prompt_tokens: int, max_tokens: int, *, at_least: bool = False) -> ContextFull:
    """The error that names all figures."""
    limit = core.spec.context_tokens
    many = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
    advice = "" if prompt_tokens > limit else "; lower max_tokens, or send on_context_full: stop"
    return ContextFull(
        f"{many} prompt tokens and {max_tokens} new ones exceed the model's context of {limit}{advice}",
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        context_tokens=limit,
        **({"at_least": True} if at_least else {}),
    )


def refuse_over_budget(core: EngineCore, agent: Agent, branch: Branch, tokens: int) -> int:
    """Refuse what can never be resident, whatever is evicted: `tokens` tokens that begin as the branch does.

    Of a group with a window only what one step needs is counted. Which of its pages that is changes as the branch
    grows, so pages of such a group that pinned agents share with it may be counted twice.

    Returns:
        Bytes that must be there for it: its own, and what other agents have pinned.

    Raises:
        BudgetExceeded: with the figures; nothing changed.
    """
    need, whole = 0, -(-tokens // PAGE_TOKENS)
    counts_whole: list[bool] = []
    for group, page_bytes in zip(core.spec.groups, core.page_bytes(branch.space), strict=True):
        pages = most_pages(tokens, group.layer.window, core.chunk_tokens, PAGE_TOKENS)
        need += pages * page_bytes
        counts_whole.append(pages == whole)

    def pinned_beside(namespace: Namespace | None) -> int:
        pages = _pinned_pages(core, agent, namespace)
        if pages:  # else nobody need look at each page of the branch
            for segment in compress(core.pager.segments(branch.space), counts_whole):
                for page in islice(_page_ids(segment), whole):
                    pages.pop(page, None)
        return sum(pages.values())

    _refuse_over_quota(core, agent, tokens, need, pinned_beside)
    pinned = pinned_beside(None)
    usable = core.pager.usable_bytes
    if need + pinned > usable:
        beside = f" beside {pinned} bytes that other agents have pinned" if pinned else ""
        raise BudgetExceeded(
            f"{tokens} tokens need {need} bytes of pages{beside}, the budget leaves {usable}",
            needed_bytes=need,
            pinned_bytes=pinned,
            usable_bytes=usable,
            budget_bytes=core.pager.statistics().budget_bytes,
        )
    return need + pinned


def reserve(
    core: EngineCore, branch: Branch, needed_bytes: int, *, is_background: bool = False, can_leave: bool = False
) -> Reservation:
    """Ask for the bytes that `refuse_over_budget` named.

    Beside others a request needs room for a copy of its open pages too: the reserve that the budget keeps is for one.
    """
    tail_bytes = sum(core.page_bytes(branch.space))
    copies = tail_bytes if core.reservations.others_hold else 0
    return core.reservations.ask(
        needed_bytes + copies,
        is_background=is_background,
        tail_bytes=tail_bytes if can_leave else None,
        whose=core.owner(branch.space)[0],
        namespace=core.owner(branch.space)[0].namespace,
    )


def refuse_pin_over_budget(core: EngineCore, agent: Agent) -> int:
    """A pin that leaves no room for anything else would stop the daemon: pins have a limit (`kvd.vm.pins`).

    Returns:
        Bytes that will be pinned, those of other agents included.

    Raises:
        BudgetExceeded: with the figures; nothing changed.
    """
    mine = dict(_pages(core, agent.branch))
    need = sum(mine.values())
    pinned = sum(page_bytes for page, page_bytes in _pinned_pages(core, agent).items() if page not in mine)
    namespace = agent.ref.namespace
    limit = core.pager.budget.pin_quota_bytes(namespace)
    if limit < core.pager.budget.pin_limit_bytes:
        beside = _pinned_pages(core, agent, namespace)
        own = sum(page_bytes for page, page_bytes in beside.items() if page not in mine)
        if own + need > limit:
            raise BudgetExceeded(
                f"pinning needs {need} bytes beside {own} pinned ones of namespace {namespace!r}; at most {limit} of "
                "its quota may be pinned",
                needed_bytes=need,
                pinned_bytes=own,
                limit_bytes=limit,
                namespace=namespace,
            )
    limit = core.pager.budget.pin_limit_bytes
    if pinned + need > limit:
        raise BudgetExceeded(
            f"pinning needs {need} bytes beside {pinned} pinned ones; at most {limit} of the budget may be pinned",
            needed_bytes=need,
            pinned_bytes=pinned,
            limit_bytes=limit,
        )
    return pinned + need


def _refuse_over_quota(
    core: EngineCore, agent: Agent, tokens: int, need: int, pinned_beside: Callable[[Namespace], int]
) -> None:
    """Refuse what can never fit its namespace's quota beside what agents of it have pinned.

    Raises:
        BudgetExceeded: with the figures; nothing changed.
    """
    namespace = agent.ref.namespace
    quota = core.pager.budget.quotas.get(namespace)
    if quota is None:
        return
    pinned = pinned_beside(namespace)
    if need + pinned > quota:
        beside = f" beside {pinned} bytes that other agents of it have pinned" if pinned else ""
        raise BudgetExceeded(
            f"{tokens} tokens need {need} bytes of pages{beside}, the quota of namespace {namespace!r} is {quota}",
            needed_bytes=need,
            pinned_bytes=pinned,
            namespace=namespace,
            namespace_quota_bytes=quota,
        )


def _pinned_pages(core: EngineCore, besides: Agent, namespace: Namespace | None = None) -> dict[PageId, int]:
    """Bytes of all pages that the pins of agents (of a namespace) hold, without those of one agent."""
    agents = core.agents if namespace is None else core.agents.in_namespace(namespace)
    pinned = (agent for agent in agents if agent.pinned and agent is not besides)
    return dict(page for agent in pinned for page in core.pager.pinned_pages(agent.branch.space).items())


def _pages(core: EngineCore, branch: Branch) -> Iterator[tuple[PageId, int]]:
    """Pages that the next step of a branch sees, tails included, and the bytes of each."""
    for segment, page_bytes in zip(core.pager.segments(branch.space), core.page_bytes(branch.space), strict=True):
        behind = sum(page.behind_window for page in segment.pages)
        for page in list(_page_ids(segment))[behind:]:
            yield page, page_bytes


def _page_ids(segment: SegmentView) -> Iterator[PageId]:
    """The pages of a segment in order, the tail last."""
    for page in segment.pages:
        yield page.ref.page_id
    if segment.tail is not None:
        yield segment.tail.page_id
