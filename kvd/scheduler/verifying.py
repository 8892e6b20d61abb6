"""Checking an agent's page files against what was written, and writing bad ones anew from clean copies in RAM.

A page that is read from its file is verified in any case, so a bad file costs nothing that is not asked for. But a file
may rot while its page is in RAM: the copy there is the last good one, and would be gone with its frame. This is the one
entry point for whoever suspects that (`agent.verify`): each page of each branch is read and verified on the swap
thread, one a step, beside other agents' reads and commits. A bad file goes to quarantine, as always; if its page is in
RAM, it is written again. What is only on disk and bad is known to be lost then; the next turn computes it again.

Owner: the engine thread. May import kvd.errors, kvd.ids, kvd.store, kvd.vm and siblings.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING

from kvd.errors import KvdError
from kvd.ids import PageId
from kvd.scheduler.agents import Agent
from kvd.scheduler.file_steps import swap_answer
from kvd.scheduler.memory import PageFacts
from kvd.scheduler.waiting import Stop, Wait, raise_if_stopped, until_written
from kvd.store.errors import PageCorrupt, PageMissing
from kvd.store.swap_ops import StoreHands
from kvd.vm.events import CopiesLost
from kvd.vm.page import PageState

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore


def verify_agent(core: EngineCore, agent: Agent, stop: Stop) -> Generator[Wait, None, dict[str, object]]:
    """Verify every page file of the agent; bad ones are written anew from RAM where that has the page.

    Returns:
        `checked_pages`; `rewritten_pages`: were bad or gone and are good again, from RAM; `bad_pages`: those whose page
        is in no RAM, so that their tokens are computed again; `unread_pages`: the disk refused.

    Raises:
        Cancelled: what was found so far has been seen to.
    """
    checked = bad = unread = 0
    rewritten: set[PageId] = set()
    for page_id in _sealed(core, agent):
        raise_if_stopped(stop)
        page = core.pager.page_state(page_id)
        if page not in (PageState.CLEAN, PageState.EVICTED):
            continue  # not written yet, or on its way, and verified then
        facts = core.memory.facts(page_id)
        answer = yield from swap_answer(partial(core.store.file_step, page_id, partial(_read, facts)))
        checked += 1
        if answer.error is None:
            continue
        if not isinstance(answer.error, PageCorrupt | PageMissing):
            unread += 1
        elif core.pager.page_state(page_id) is PageState.CLEAN:
            rewritten.add(page_id)
            core.memory.apply(CopiesLost((page_id,)))
        elif core.pager.page_state(page_id) is PageState.EVICTED:
            bad += 1
        _tell(core, agent, page_id, answer.error)
    spaces = [branch.space for branch in agent.branches.values()]
    yield from until_written(core, spaces, stop)
    written = {page_id for page_id in rewritten if core.pager.page_state(page_id) not in _UNWRITTEN}
    return {
        "checked_pages": checked,
        "rewritten_pages": len(written),
        "bad_pages": bad,
        "unread_pages": unread + len(rewritten) - len(written),
    }


_UNWRITTEN = (PageState.SEALED_DIRTY, PageState.WRITING)


def _sealed(core: EngineCore, agent: Agent) -> list[PageId]:
    """Sealed pages of all branches, each once, in order."""
    pages: dict[PageId, None] = {}
    for branch in agent.branches.values():
        for segment in core.pager.segments(branch.space):
            pages |= dict.fromkeys(ref.page_id for ref in segment.refs)
    return list(pages)


def _read(facts: PageFacts, hands: StoreHands) -> None:
    hands.read_page(facts.header, facts.layout)


def _tell(core: EngineCore, agent: Agent, page_id: PageId, error: KvdError) -> None:
    core.log("page_file_bad", agent=str(agent.ref), page=page_id, reason=error.message)


__all__ = ["verify_agent"]
