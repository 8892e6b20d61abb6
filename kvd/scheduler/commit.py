"""Durable changes of an agent: records, compaction, deletion of logs and of pages nobody names any more.

Theory of operation. A commit waits for the branch's page writes, appends one record and waits for its fsync. What the
disk refuses stays in RAM and is part of the next record; nothing durable before it is touched. Three refusals have a
remedy, each tried once: the log vanished (a new one is begun), the record does not follow from the log (our bug: a
record that says everything does), pages lost their files (resident ones are written again).

A forgotten page is deleted once no log names it. The store knows which ones do: it refuses, and the page is offered
again after the next change of a log.

Owner: the engine thread. May import kvd.errors, kvd.ids, kvd.quant.spec, kvd.store, kvd.vm.events and siblings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING

from kvd.errors import KvdError
from kvd.ids import PageId
from kvd.scheduler.admission import refuse_over_budget
from kvd.scheduler.agents import (
    Agent,
    Baseline,
    Branch,
    SegmentNow,
    build_record,
    log_is_gone,
    mark_committed,
    page_runs,
)
from kvd.scheduler.generation import compute_tokens
from kvd.scheduler.store_door import RecordAnswer
from kvd.scheduler.waiting import Stop, Wait, Waiting, fault_in
from kvd.store.agent_image import AgentImage
from kvd.store.errors import LogVanished, PageNotDurable, PageReferenced, RecordInvalid
from kvd.store.records import AgentRecord, PageEntry, RecordKind
from kvd.store.swap_ops import SwapResult
from kvd.vm.events import Activated, Deactivated, TurnCommitted
from kvd.vm.page import PageState
from kvd.vm.views import SegmentView

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore

Committing = Generator[Wait, None, tuple[bool, str | None]]


def commit(core: EngineCore, agent: Agent, branch: Branch, kind: RecordKind) -> Committing:
    """Make a branch durable and current; other branches that the log lacks go first, where that needs no work.

    Returns:
        (True, None), or (False, reason) when the disk refused: the change then lives in RAM and is part of the next
        record; nothing durable before it is touched.
    """
    for other in list(agent.branches.values()):
        if other is not branch and not (other.saved or other.behind) and _tails_at_hand(core, other):
            yield from _append(core, agent, other, "turn")
    durable, reason = yield from _append(core, agent, branch, kind)
    agent.unsaved = reason
    if not durable:
        core.stats.turns_not_durable += 1
        core.log("turn_not_durable", agent=str(agent.ref), reason=reason)
        return False, reason
    yield from _compact(core, agent)
    sweep(core)
    return True, None


def make_recordable(core: EngineCore, agent: Agent, branch: Branch, stop: Stop) -> Waiting:
    """Compute KV that was lost and read tails that are only on disk, so that a record can say what the branch is.

    Raises:
        BudgetExceeded: the branch does not fit the budget.
        Cancelled, Busy: as `until_ready`.
    """
    if not branch.behind and _tails_at_hand(core, branch):
        return
    refuse_over_budget(core, agent, branch, len(branch.tokens))
    core.memory.apply(Activated(branch.space))
    try:
        yield from fault_in(core, branch, stop)
        if branch.behind:
            yield from compute_tokens(core, branch, stop)
    finally:
        core.memory.apply(Deactivated(branch.space))


def delete_agent(core: EngineCore, agent: Agent) -> Generator[Wait, None, str | None]:
    """Delete log first, then pages; the agent is gone from RAM only when the log is gone from disk.

    Returns:
        Why it failed; None when the agent is gone.
    """
    if agent.logged:
        result = yield from _answer_to(lambda take: core.store.delete_log(agent.ref, take))
        if result.error is not None:
            return result.error.message
    core.discard_agent(agent)
    core.sweep_due = True
    sweep(core)
    return None


def sweep(core: EngineCore) -> None:
    """Offer forgotten pages for deletion, if anything changed since the last time."""
    if not core.sweep_due:
        return
    core.sweep_due = False
    pages, core.forgotten = core.forgotten, []
    for page in pages:
        core.store.delete_page(page, partial(_page_answer, core, page))


def _page_answer(core: EngineCore, page: PageId, result: SwapResult) -> None:
    if result.error is not None:
        core.forgotten.append(page)
        if not isinstance(result.error, PageReferenced):
            core.log("page_not_deleted", page=page, reason=result.error.message)


# ---- one record -----------------------------------------------------------------------------------------------------


def _append(core: EngineCore, agent: Agent, branch: Branch, kind: RecordKind) -> Committing:
    failures = core.memory.statistics.write_failures
    yield lambda: core.pages_durable(branch.space) or core.memory.statistics.write_failures > failures
    if not core.pages_durable(branch.space):
        return False, f"page write failed: {core.memory.statistics.last_write_failure}"
    tried: set[type[KvdError]] = set()
    while _tails_at_hand(core, branch):
        result = yield from _answer_to(lambda take: core.store.append_record(_record(core, agent, branch, kind), take))
        error = result.error
        if error is None and result.image is not None:
            _committed(core, agent, branch, result.image)
            return True, None
        if error is None or type(error) in tried or not (yield from _remedy(core, agent, branch, error)):
            return False, error.message if error is not None else "the record was not applied"
        tried.add(type(error))
    return False, "the end of its KV is on disk only and must be read before it can be written anew"


def _remedy(core: EngineCore, agent: Agent, branch: Branch, error: KvdError) -> Generator[Wait, None, bool]:
    """Do what makes another try worth while; False when nothing does."""
    match error:
        case LogVanished():
            # somebody deleted the log under us; what RAM holds goes into a new one, as records that stand alone
            core.log("log_rebuilt", agent=str(agent.ref), reason=error.message)
            log_is_gone(agent)
        case RecordInvalid():
            core.log("record_invalid", agent=str(agent.ref), branch=branch.branch_id, reason=error.message)
            branch.baseline = Baseline()
        case PageNotDurable():
            core.log("pages_vanished", agent=str(agent.ref), pages=len(error.page_ids))
            core.memory.write_again(branch.space, error.page_ids)
            yield lambda: not core.memory.rewriting
        case _:
            return False
    return True


def _answer_to(submit: Callable[[RecordAnswer], None]) -> Generator[Wait, None, SwapResult]:
    """Submit an operation and wait for its answer."""
    answer: list[SwapResult] = []
    submit(answer.append)
    yield lambda: bool(answer)
    return answer[0]


def _record(core: EngineCore, agent: Agent, branch: Branch, kind: RecordKind) -> AgentRecord:
    segments = [
        SegmentNow(
            tuple(PageEntry(p.page_id, p.key, page_runs(number)) for number, p in enumerate(segment.refs)),
            segment.tail_tokens,
            partial(_extract, core, segment),
        )
        for segment in core.pager.segments(branch.space)
    ]
    return build_record(
        agent,
        branch,
        segments,
        kind=kind if agent.logged else "create",
        time_s=time.time(),
        numerics=core.numerics,
        meta={"pinned": agent.pinned, "created_s": agent.created_s},
    )


def _extract(core: EngineCore, segment: SegmentView, start: int, end: int) -> bytes:
    assert segment.tail is not None
    assert segment.tail.frame is not None
    return core.memory.pool.extract(segment.tail.frame, start, end)


def _tails_at_hand(core: EngineCore, branch: Branch) -> bool:
    """Whether what the next record must hold of the open pages is in RAM."""
    base = branch.baseline
    for segment in core.pager.segments(branch.space):
        if segment.tail is None or segment.tail.state is PageState.FILLING:
            continue
        logged = base.tail if base.pages == base.logged_pages == len(segment.pages) else 0
        if logged < segment.tail_tokens:
            return False
    return True


def _committed(core: EngineCore, agent: Agent, branch: Branch, image: AgentImage) -> None:
    agent.seq = image.seq
    agent.logged = True
    mark_committed(branch, agent.branches.values())
    core.memory.apply(TurnCommitted(branch.space))
    core.stats.records_written += 1
    core.sweep_due = True
    # a page's worth of dead bytes makes a rewrite of the log pay
    page_bytes = sum(layout.payload_bytes for layout in core.memory.layouts(branch.space))
    agent.compaction_due = image.compaction_due(page_bytes)


def _compact(core: EngineCore, agent: Agent) -> Waiting:
    """Rewrite the log without what no branch needs and without branches that were let go of."""
    if not (agent.dropped_branches or agent.compaction_due):
        return
    result = yield from _answer_to(lambda take: core.store.compact_log(agent.ref, frozenset(agent.branches), take))
    if result.image is not None and result.error is None:
        agent.seq = result.image.seq
        agent.compaction_due = False
        agent.dropped_branches.clear()
        core.sweep_due = True
    elif result.error is not None:
        # the long log is as good as the short one; the next commit tries again
        core.log("log_not_compacted", agent=str(agent.ref), reason=result.error.message)
