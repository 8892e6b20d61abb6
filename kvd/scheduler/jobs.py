"""Control operations that may have to wait for pages: generators like turns, run in the same queue.

Each returns plain facts for the client. All of them are durable when they return (`durable` says so, with the reason
when the disk refused).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

from kvd.errors import AgentExists, BudgetExceeded, Busy, InvalidParams
from kvd.ids import AgentId
from kvd.scheduler.admission import refuse_over_budget, refuse_pin_over_budget, reserve
from kvd.scheduler.agents import NOT_WRITTEN, Agent
from kvd.scheduler.commit import commit, compact, delete_agent, make_recordable, shrink, unsaved_others
from kvd.scheduler.endings import give_end, is_due, use
from kvd.scheduler.errors import NotDeleted
from kvd.scheduler.exporting import export_agent
from kvd.scheduler.forking import ForkNoting
from kvd.scheduler.importing import import_agent
from kvd.scheduler.requests import AgentRef, JobRequest
from kvd.scheduler.verifying import verify_agent
from kvd.scheduler.views import agent_info
from kvd.scheduler.waiting import Stop, Wait, cut_held, until_in, until_written
from kvd.store.records import RecordKind
from kvd.vm.errors import SpaceInUse
from kvd.vm.events import EvictionWanted, Pinned, PrefetchHinted, Unpinned

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore

Job = Generator[Wait, None, dict[str, object]]


def run_job(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    """Run one control operation.

    Args:
        core: the engine's parts.
        request: what is wanted.
        stop: says why the operation is to end early, if it is.

    Raises:
        AgentNotFound: no such agent.
        InvalidParams, AgentExists, BudgetExceeded, AgentBusy: refused, nothing changed.
        Cancelled: the operation had not happened yet, or was finished but is not durable.
    """
    operations: Mapping[str, Callable[[EngineCore, JobRequest, Stop], Job]] = {
        "fork": _fork,
        "rollback": _rollback,
        "delete": _delete,
        "pin": _pin,
        "unpin": _unpin,
        "evict": _evict,
        "prefetch": _prefetch,
        "save": _save,
        "compact": _compact,
        "shrink": _shrink,
        "export": export_agent,
        "import": import_agent,
        "wake": _wake,
        "verify": _verify,
        "expire": _expire,
    }
    return operations[request.operation](core, request, stop)


def _fork(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    parent = core.agents.get(request.ref)
    child_ref = AgentRef(request.ref.namespace, AgentId(str(request.arguments["new_agent"])))
    if core.agents.find(child_ref) is not None:
        raise AgentExists(f"agent {child_ref} exists already", agent=child_ref.agent)
    wanted = request.arguments.get("tokens")
    tokens = len(parent.branch.tokens) if wanted is None else _cut_point(parent.branch.tokens, wanted)
    tokens = parent.branch.border_at_most(tokens)
    refuse_over_budget(core, parent, parent.branch, tokens)
    ttl_s = request.arguments.get("ttl_s")
    noting = ForkNoting(core, parent, child_ref, tokens, ttl_s if isinstance(ttl_s, float) else None)
    child = yield from core.fork_agent(parent, child_ref, tokens, stop, noting.begin)
    child.created_s = noting.created_s
    give_end(core, child, noting.ttl_s)
    use(core, child)
    use(core, parent)
    if (told := (yield from noting.end(child))) is not None:
        return told
    return (yield from _save_and_tell(core, child, "create", stop))


def _rollback(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    agent = core.agents.get(request.ref)
    branch = agent.branch
    tokens = branch.border_at_most(_cut_point(branch.tokens, request.arguments["tokens"]))
    refuse_over_budget(core, agent, branch, tokens)
    yield from cut_held(core, branch, tokens, stop)
    use(core, agent)
    return (yield from _save_and_tell(core, agent, "rollback", stop))


def _cut_point(tokens: list[int], wanted: object) -> int:
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= len(tokens):
        raise InvalidParams(f"tokens must be from 0 to {len(tokens)} for this agent, not {wanted}", parameter="tokens")
    return wanted


def _delete(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    error = yield from delete_agent(core, core.agents.get(request.ref))
    if error is not None:
        raise NotDeleted(f"{request.ref.agent} was not deleted, it is still there: {error}", agent=request.ref.agent)
    return {"agent": request.ref.agent, "deleted": True}


def _expire(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    """Delete an agent whose time is over, if that is still so; the engine asks for it by itself."""
    agent = core.agents.get(request.ref)
    if not is_due(core, agent):
        return agent_info(core, agent)
    tokens, began_s = len(agent.branch.tokens), core.clock()
    deleted = yield from _delete(core, request, stop)
    core.stats.agents_expired += 1
    core.log("agent_expired", level="info", agent=str(agent.ref), ttl_s=agent.ttl_s, tokens=tokens)
    core.journal.tell(
        "operation", agent.ref, operation="expire", outcome="ok", total_s=round(core.clock() - began_s, 6)
    )
    return deleted


def _pin(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    agent = core.agents.get(request.ref)
    if not agent.pinned:
        # turns that run were promised what they reserved, and one that made way for a pin might never fit beside it
        reservation = reserve(core, agent.branch, refuse_pin_over_budget(core, agent), is_background=True)
        try:
            yield from until_in(core, reservation, stop)
            refuse_pin_over_budget(core, agent)  # others may have been pinned meanwhile
            core.memory.apply(Pinned(agent.branch.space))
            agent.pinned = True
        finally:
            core.reservations.release(reservation)
    return (yield from _save_and_tell(core, agent, "turn", stop))


def _unpin(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    agent = core.agents.get(request.ref)
    core.memory.apply(Unpinned(agent.branch.space))
    agent.pinned = False
    return (yield from _save_and_tell(core, agent, "turn", stop))


def _evict(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    agent = core.agents.get(request.ref)
    if agent.pinned:
        raise SpaceInUse(f"agent {agent.ref} is pinned; unpin it first", agent=agent.ref.agent)
    branches = list(agent.branches.values())
    spaces = [branch.space for branch in branches]
    before_bytes = core.resident_bytes(agent)
    for space in spaces:
        core.memory.apply(EvictionWanted(space))
    # dirty pages are written first; a disk that refuses ends the wait, and what is dirty stays
    # it runs beside other requests, which may let go of a branch or delete the agent meanwhile
    yield from until_written(core, spaces, lambda: stop() if branches == list(agent.branches.values()) else "changed")
    agent = core.agents.get(request.ref)
    return agent_info(core, agent) | {"evicted_bytes": max(0, before_bytes - core.resident_bytes(agent))}


def _prefetch(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    agent = core.agents.get(request.ref)
    core.memory.apply(PrefetchHinted(agent.branch.space))
    return agent_info(core, agent)
    yield None  # a generator like its siblings; a hint never waits


def _save(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    """Try again to make durable what a disk refused; the engine asks for it by itself."""
    agent = core.agents.get(request.ref)
    if agent.unsaved is None:  # a turn that ended meanwhile has seen to it
        return agent_info(core, agent)
    for other in unsaved_others(agent, agent.branch):
        try:
            yield from make_recordable(core, agent, other, stop)
        except (BudgetExceeded, Busy):
            continue  # the others need not wait for it
    return (yield from _save_and_tell(core, agent, "turn", stop))


def _compact(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    """Take out of the log what nobody needs; the engine asks for it by itself when nothing else is to do."""
    agent = core.agents.get(request.ref)
    yield from compact(core, agent)
    return agent_info(core, agent)


def _shrink(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    """Do without KV that a full quota has no room for; the engine asks for it by itself."""
    agent = core.agents.get(request.ref)
    if agent.pinned:
        core.to_shrink.pop(agent.ref, None)
        return (yield from _save(core, request, stop))
    done = yield from shrink(core, agent)
    return agent_info(core, agent) | {"durable": done.durable, "durable_reason": done.reason}


def _verify(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    agent = core.agents.get(request.ref)
    figures = yield from verify_agent(core, agent, stop)
    return agent_info(core, agent) | figures


def _wake(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    """Nothing but to have been woken, as every operation's agent is."""
    agent = core.agents.known(request.ref)
    return {} if agent is None else agent_info(core, agent)
    yield None  # a generator like its siblings


def _save_and_tell(core: EngineCore, agent: Agent, kind: RecordKind, stop: Stop) -> Job:
    # RAM has changed: until the record is written the change would be lost with the process, whatever ends this job
    agent.refused = agent.refused or NOT_WRITTEN
    yield from make_recordable(core, agent, agent.branch, stop)
    done = yield from commit(core, agent, agent.branch, kind)
    if agent.branch.doubtful:
        # pages that only the disk was thought to have: read them, compute what is lost, and say so again
        yield from make_recordable(core, agent, agent.branch, stop)
        done = yield from commit(core, agent, agent.branch, kind)
    return agent_info(core, agent) | {"durable": done.durable, "durable_reason": done.reason}
