"""What can never run is refused before anything changes: the budget, with what pinned agents hold taken off.

May import kvd.errors, kvd.ids and siblings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvd.errors import BudgetExceeded
from kvd.ids import PageId
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import Agent, Branch

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore


def refuse_over_budget(core: EngineCore, agent: Agent, branch: Branch, tokens: int) -> None:
    """Refuse what can never be resident, whatever is evicted: `tokens` tokens that begin as the branch does.

    Raises:
        BudgetExceeded: with the figures; nothing changed.
    """
    need = -(-tokens // PAGE_TOKENS) * sum(core.page_bytes(branch.space))
    mine = dict(_pages(core, branch, tokens))
    pinned = sum(page_bytes for page, page_bytes in _pinned_pages(core, agent).items() if page not in mine)
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


def refuse_pin_over_budget(core: EngineCore, agent: Agent) -> None:
    """A pin that leaves no room for anything else would stop the daemon: half of what is usable may be pinned.

    Raises:
        BudgetExceeded: with the figures; nothing changed.
    """
    mine = dict(_pages(core, agent.branch))
    need = sum(mine.values())
    pinned = sum(page_bytes for page, page_bytes in _pinned_pages(core, agent).items() if page not in mine)
    limit = core.pager.usable_bytes // 2
    if pinned + need > limit:
        raise BudgetExceeded(
            f"pinning needs {need} bytes beside {pinned} pinned ones; at most half of the budget ({limit}) may be "
            "pinned",
            needed_bytes=need,
            pinned_bytes=pinned,
            limit_bytes=limit,
        )


def _pinned_pages(core: EngineCore, besides: Agent) -> dict[PageId, int]:
    """Bytes of all pages that pinned agents hold, without those of one agent."""
    pinned = (agent for agent in core.agents if agent.pinned and agent is not besides)
    return dict(page for agent in pinned for page in _pages(core, agent.branch))


def _pages(core: EngineCore, branch: Branch, tokens: int | None = None) -> Iterator[tuple[PageId, int]]:
    """Pages that hold the first `tokens` tokens of a branch (None: all), tails included, and the bytes of each."""
    last = None if tokens is None else -(-tokens // PAGE_TOKENS)
    for segment, page_bytes in zip(core.pager.segments(branch.space), core.page_bytes(branch.space), strict=True):
        for page in segment.pages[:last]:
            yield page.ref.page_id, page_bytes
        if segment.tail is not None and (last is None or last > len(segment.pages)):
            yield segment.tail.page_id, page_bytes
