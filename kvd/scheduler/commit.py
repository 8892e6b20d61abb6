"""Durable changes of an agent: records, compaction, deletion of logs and of pages nobody names any more.

Theory of operation. A commit waits for the branch's page writes, appends one record and waits for its fsync. What the
disk refuses stays in RAM and is part of the next record; nothing durable before it is touched. Some refusals have a
remedy, each tried once: the log vanished or is damaged (a new one is begun), the record does not follow from the log
(our bug: a record that says everything does), pages lost their files (resident ones are written again, those behind a
window are done without, a branch with others is `doubtful` until it has been read).

Compaction of a log is no part of a commit: it runs when nothing else does and enough is dead to pay for it.

A forgotten page is deleted once no log names it. The store knows which ones do: it refuses, and the page is offered
again after the next change of a log. A deletion that is under way when an agent that maps the page wakes is refused as
well; the page is that agent's then, and forgotten again when its last user goes.

Owner: the engine thread. May import kvd.errors, kvd.ids, kvd.quant.spec, kvd.store, kvd.vm.events and siblings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvd.errors import KvdError
from kvd.ids import GroupId, PageId, SpaceId
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.admission import refuse_over_budget, reserve
from kvd.scheduler.agents import (
    NOT_WRITTEN,
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
from kvd.scheduler.waiting import Stop, Wait, Waiting, fault_in, never, until_in, until_written
from kvd.store.agent_image import AgentImage
from kvd.store.errors import LogDamaged, LogVanished, PageNotDurable, PageReferenced, RecordInvalid
from kvd.store.records import AgentRecord, PageEntry, RecordKind
from kvd.store.swap_ops import SwapResult
from kvd.vm.events import Activated, CopiesLost, Deactivated, LogLost, TurnCommitted
from kvd.vm.page import OPEN, PageState
from kvd.vm.views import TailView

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore


RECORD_HEAD_BYTES: Final = 1024
"""About what a record takes beside text, ids and KV."""

SWAP_OFF: Final = "swap is off"
"""Why nothing is durable in a daemon that keeps KV in RAM only."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of a commit.

    Attributes:
        reason: why the disk refused; None when the branch is durable.
        written_bytes: bytes of the record, and of pages that it is the first to name.
    """

    reason: str | None
    written_bytes: int = 0

    @property
    def durable(self) -> bool:
        """Whether the branch is on disk."""
        return self.reason is None


Committing = Generator[Wait, None, Committed]


def commit(core: EngineCore, agent: Agent, branch: Branch, kind: RecordKind) -> Committing:
    """Make a branch durable and current; other branches that the log lacks go first, where that needs no work.

    Returns:
        What became of it. What the disk refused lives in RAM and is part of the next record; nothing durable before it
        is touched. `agent.unsaved` speaks of all branches.
    """
    if core.swap_off:
        return _keep_in_ram(core, agent, branch)
    for other in unsaved_others(agent, branch):
        if is_recordable(core, other):
            yield from _append(core, agent, other, "turn")
    done = yield from _append(core, agent, branch, kind)
    failed_before = agent.refused not in (None, NOT_WRITTEN)
    agent.refused = done.reason
    if not done.durable:
        core.stats.turns_not_durable += 1
        if not failed_before:
            core.log("turn_not_durable", agent=str(agent.ref), reason=done.reason)
        return done
    if failed_before:
        core.log("turn_saved", level="info", agent=str(agent.ref))
    sweep(core)
    return done


def _keep_in_ram(core: EngineCore, agent: Agent, branch: Branch) -> Committed:
    """Swap is off: there is no log. Pages and tail may be dropped all the same, and are computed again."""
    log_is_gone(agent)
    core.memory.apply(TurnCommitted(branch.space))
    agent.refused = SWAP_OFF
    sweep(core)
    return Committed(SWAP_OFF)


def unsaved_others(agent: Agent, branch: Branch) -> list[Branch]:
    """The agent's branches beside `branch` that would be lost with the process."""
    return [other for other in agent.branches.values() if other is not branch and not other.durable]


def is_recordable(core: EngineCore, branch: Branch) -> bool:
    """Whether a record can say what the branch is without any page being read or computed."""
    lost = core.pager.lost_at(branch.space) is not None
    return not (branch.behind or branch.doubtful or lost) and _tails_at_hand(core, branch)


def make_recordable(core: EngineCore, agent: Agent, branch: Branch, stop: Stop) -> Waiting:
    """Read what is only on disk or in doubt and compute what is lost, so that a record can say what the branch is.

    Raises:
        BudgetExceeded: the branch does not fit the budget.
        Cancelled, Busy: as `until_ready`.
    """
    if core.swap_off or is_recordable(core, branch):
        return
    reservation = reserve(core, branch, refuse_over_budget(core, agent, branch, len(branch.tokens)))
    try:
        yield from until_in(core, reservation, stop)
        refuse_over_budget(core, agent, branch, len(branch.tokens))  # the budget may be another by now
        core.memory.apply(Activated(branch.space))
        try:
            yield from fault_in(core, branch, stop)
            branch.doubtful = False
            if branch.behind:
                yield from compute_tokens(core, branch, stop)
        finally:
            core.memory.apply(Deactivated(branch.space))
    finally:
        core.reservations.release(reservation)


def delete_agent(core: EngineCore, agent: Agent) -> Generator[Wait, None, str | None]:
    """Delete log first, then pages; the agent is gone from RAM only when the log is gone from disk.

    Returns:
        Why it failed; None when the agent is gone.
    """
    # also when nothing was ever logged: a first record that the disk refused may be there all the same
    result = yield from _answer_to(lambda take: core.store.delete_log(agent.ref, take))
    if result.error is not None:
        agent.refused = result.error.message  # its log may be gone or not: a retry writes what RAM holds
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
    pages, core.forgotten = core.forgotten, {}
    for page in pages:
        core.store.delete_page(page, partial(_page_answer, core, page))


def _page_answer(core: EngineCore, page: PageId, result: SwapResult) -> None:
    if result.error is not None:
        if core.pager.page_state(page) is None and not core.store.is_deleting(page):
            core.forgotten[page] = None
        if not isinstance(result.error, PageReferenced):
            core.log("page_not_deleted", page=page, reason=result.error.message)


# ---- one record -----------------------------------------------------------------------------------------------------


def _append(core: EngineCore, agent: Agent, branch: Branch, kind: RecordKind) -> Committing:
    tried: set[type[KvdError]] = set()
    while True:
        yield from until_written(core, [branch.space], never)
        if not core.pages_durable(branch.space):
            return Committed(_why_not_written(core, branch))
        if not _tails_at_hand(core, branch):
            return Committed("the end of its KV is on disk only and must be read before it can be written anew")
        record = _record(core, agent, branch, kind)
        if (refusal := _over_disk_quota(core, agent, record)) is not None:
            return Committed(refusal)
        result = yield from _answer_to(partial(core.store.append_record, record, missing=_behind(core, branch)))
        error = result.error
        if error is None and result.image is not None:
            committed(core, agent, branch, result.image)
            return Committed(None, result.written_bytes + _page_bytes(core, branch, record))
        if error is None or type(error) in tried or not _remedy(core, agent, branch, error):
            return Committed(error.message if error is not None else "the record was not applied")
        tried.add(type(error))


def _why_not_written(core: EngineCore, branch: Branch) -> str:
    if core.pager.is_held(branch.space):
        namespace = core.owner(branch.space)[0].namespace
        if not core.pager.writes_held or core.pager.quota_held_bytes.get(namespace):
            return core.disk_quotas.note_refusal(namespace)
        return f"writes are limited to {core.governor.limit_bytes} bytes a minute: saved once its pages are written"
    return f"page write failed: {core.memory.statistics.last_write_failure}"


def _over_disk_quota(core: EngineCore, agent: Agent, record: AgentRecord) -> str | None:
    """Why a record must not be written, if its namespace has no room for it on disk."""
    quotas, namespace = core.disk_quotas, agent.ref.namespace
    if namespace not in quotas.quotas:
        return None
    core.govern()  # what was written since the last look counts
    kv_bytes = sum(len(segment.tail_kv) for segment in record.segments)
    record_bytes = kv_bytes + 8 * len(record.token_ids) + len(record.text) + RECORD_HEAD_BYTES
    return quotas.note_refusal(namespace) if quotas.refuses(namespace, record_bytes) else None


def _page_bytes(core: EngineCore, branch: Branch, record: AgentRecord) -> int:
    """Bytes of the pages that a record is the first to name; another agent's are not of its making."""
    sizes = core.page_bytes(branch.space)
    own = (
        (segment.group, len(segment.new_pages) - max(0, branch.borrowed_pages - segment.kept_pages))
        for segment in record.segments
    )
    return sum(pages * sizes[group] for group, pages in own)


def _remedy(core: EngineCore, agent: Agent, branch: Branch, error: KvdError) -> bool:
    """Do what makes another try worth while; False when nothing does."""
    match error:
        case LogDamaged():
            # the store begins a new log with a record that stands alone and takes the other branches along
            core.log("log_rewritten", agent=str(agent.ref), reason=error.message)
            branch.baseline = Baseline()
            core.memory.apply(LogLost(branch.space))
        case LogVanished():
            # somebody deleted the log under us; what RAM holds goes into a new one, as records that stand alone
            core.log("log_rebuilt", agent=str(agent.ref), reason=error.message)
            log_is_gone(agent)
            for each in agent.branches.values():
                core.memory.apply(LogLost(each.space))
        case RecordInvalid():
            core.log("record_invalid", agent=str(agent.ref), branch=branch.branch_id, reason=error.message)
            branch.baseline = Baseline()
        case PageNotDurable():
            core.log("pages_vanished", agent=str(agent.ref), pages=len(error.page_ids))
            core.memory.apply(CopiesLost(tuple(PageId(page) for page in error.page_ids)))
            # one that is not in RAM may have a good file all the same, or be lost: reading it tells, when it is needed
            segments = core.pager.segments(branch.space)
            absent = [page for segment in segments for page in segment.pages if page.frame is None]
            absent = [page for page in absent if page.ref.page_id in error.page_ids]
            branch.missing |= {page.ref.page_id for page in absent if page.behind_window}
            branch.doubtful = not all(page.behind_window for page in absent)
            return not branch.doubtful
        case _:
            return False
    return True


def _behind(core: EngineCore, branch: Branch) -> frozenset[PageId]:
    """Pages of `branch.missing` that still lie behind a window."""
    if branch.missing:
        pages = [page for segment in core.pager.segments(branch.space) for page in segment.pages if page.behind_window]
        branch.missing &= {page.ref.page_id for page in pages}
    return branch.missing


def _answer_to(submit: Callable[[RecordAnswer], None]) -> Generator[Wait, None, SwapResult]:
    """Submit an operation and wait for its answer."""
    answer: list[SwapResult] = []
    submit(answer.append)
    yield lambda: bool(answer)
    return answer[0]


def _record(core: EngineCore, agent: Agent, branch: Branch, kind: RecordKind) -> AgentRecord:
    pages = core.pager.tokens(branch.space) // PAGE_TOKENS
    segments = [
        SegmentNow(
            pages,
            partial(_entries, core, branch.space, GroupId(group)),
            0 if tail is None else tail.tokens,
            partial(_extract, core, tail),
        )
        for group, tail in enumerate(core.pager.tails(branch.space))
    ]
    return build_record(
        agent,
        branch,
        segments,
        kind=kind if agent.logged or branch.behind else "create",
        time_s=time.time(),
        numerics=core.numerics,
        meta={"pinned": agent.pinned, "created_s": agent.created_s, "ttl_s": agent.ttl_s},
    )


def _entries(core: EngineCore, space: SpaceId, group: GroupId, first: int) -> tuple[PageEntry, ...]:
    """The space's sealed pages from number `first` on, as records name them."""
    refs = core.pager.refs(space, group, first)
    return tuple(PageEntry(ref.page_id, ref.key, page_runs(number)) for number, ref in enumerate(refs, first))


def _extract(core: EngineCore, tail: TailView | None, start: int, end: int) -> bytes:
    assert tail is not None
    return core.memory.tail_bytes(tail, start, end)


def _tails_at_hand(core: EngineCore, branch: Branch) -> bool:
    """Whether what the next record must hold of the open pages is in RAM."""
    base = branch.baseline
    pages = core.pager.tokens(branch.space) // PAGE_TOKENS
    for tail in core.pager.tails(branch.space):
        if tail is None or tail.state in OPEN:
            continue
        logged = base.tail if base.pages == base.logged_pages == pages else 0
        if logged < tail.tokens:
            return False
    return True


def committed(core: EngineCore, agent: Agent, branch: Branch, image: AgentImage) -> None:
    """The disk has a branch as it is: bring the books in line.

    Args:
        core: the engine's parts.
        agent: whose branch.
        branch: what was committed.
        image: the agent as its log says.
    """
    agent.seq = image.seq
    agent.logged = True
    mark_committed(branch, agent.branches.values())
    for other in agent.branches.values():
        if other.logged and not _holds(image, other):
            # a log was written anew and the end of this branch could not be read: its next record says everything
            other.baseline = Baseline()
            core.memory.apply(LogLost(other.space))
    core.memory.apply(TurnCommitted(branch.space))
    core.stats.records_written += 1
    core.sweep_due = True
    # a rewrite pays when it frees a page's worth, and as much as it writes (so wear stays bounded, P26); the log's dead
    # bytes count, and the page files that only branches let go of keep on disk
    dead_bytes = image.dead_bytes_without(frozenset(agent.branches))
    freed_bytes = dead_bytes + agent.dropped_bytes
    agent.compaction_due = freed_bytes >= max(sum(core.page_bytes(branch.space)), image.log_bytes - dead_bytes)


def _holds(image: AgentImage, branch: Branch) -> bool:
    """Whether the log still holds what was logged of the branch."""
    stored, base = image.branches.get(branch.branch_id), branch.baseline
    return stored is not None and (
        len(stored.tokens) >= base.logged_tokens and stored.computed_tokens >= base.logged_computed
    )


def shrink(core: EngineCore, agent: Agent) -> Generator[Wait, None, Committed]:
    """Do without KV that has no page file: it is computed again. Text and ids of all branches are in the log then.

    A full quota asks for it where it has no room for open pages, which are in logs, or for pages that wait in RAM.
    RAM lets go first: a log that says more is as good, so a crash or a refusal in between costs time alone.
    """
    for branch in agent.branches.values():
        while (border := stored_tokens(core, branch)) < branch.computed:
            core.cut_kv(branch, border)
    if agent.logged and any(each.baseline.logged_computed % PAGE_TOKENS for each in agent.branches.values()):
        yield from compact(core, agent, open_pages=False)  # first: it makes room for what is to be added
    for branch in [*agent.other_branches, agent.branch]:
        if not branch.durable or (branch is agent.branch and agent.refused is not None):
            done = yield from _append(core, agent, branch, "snapshot")
            agent.refused = done.reason
            if not done.durable:
                if branch.doubtful:
                    core.to_shrink.pop(agent.ref, None)  # a save reads what is in doubt
                return done
    core.to_shrink.pop(agent.ref, None)
    sweep(core)
    return Committed(agent.unsaved)


def stored_tokens(core: EngineCore, branch: Branch) -> int:
    """Tokens at the branch's beginning whose KV is in page files."""
    pages = branch.computed // PAGE_TOKENS
    for segment in core.pager.segments(branch.space):
        for number, page in enumerate(segment.pages[:pages]):
            if page.state not in (PageState.CLEAN, PageState.EVICTED) and not page.behind_window:
                pages = number
                break
    lost = core.pager.lost_at(branch.space)
    return min(pages * PAGE_TOKENS, len(branch.tokens) if lost is None else lost // PAGE_TOKENS * PAGE_TOKENS)


def compact(core: EngineCore, agent: Agent, *, open_pages: bool = True) -> Waiting:
    """Rewrite the log without what no branch needs and without branches that were let go of."""
    agent.compaction_due = agent.compaction_urgent = False  # after a failure the next commit finds out again
    keep = frozenset(agent.branches)
    result = yield from _answer_to(lambda take: core.store.compact_log(agent.ref, keep, take, open_pages=open_pages))
    if result.image is not None and result.error is None:
        agent.seq = result.image.seq
        for branch in [] if open_pages else agent.branches.values():
            stored = result.image.branches.get(branch.branch_id)
            if stored is not None:
                branch.baseline.logged_computed = min(branch.baseline.logged_computed, stored.computed_tokens)
        agent.dropped_branches.clear()
        agent.dropped_bytes = 0
        agent.counted_on = False
        core.sweep_due = True
        sweep(core)
    elif result.error is not None:
        # the long log is as good as the short one
        core.log("log_not_compacted", agent=str(agent.ref), reason=result.error.message)
