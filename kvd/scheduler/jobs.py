"""Control operations that may have to wait for pages: generators like turns, run in the same queue.

Each returns plain facts for the client. All of them are durable when they return (`durable` says so, with the reason
when the disk refused).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

from kvd.errors import AgentExists, InvalidParams
from kvd.ids import AgentId
from kvd.scheduler.admission import refuse_over_budget, refuse_pin_over_budget
from kvd.scheduler.agents import Agent
from kvd.scheduler.commit import commit, delete_agent, make_recordable
from kvd.scheduler.requests import AgentRef, JobRequest
from kvd.scheduler.views import agent_info
from kvd.scheduler.waiting import Stop, Wait, fault_in
from kvd.store.records import RecordKind
from kvd.vm.errors import SpaceInUse
from kvd.vm.events import Activated, Deactivated, EvictionWanted, Pinned, PrefetchHinted, Unpinned

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
    refuse_over_budget(core, parent, parent.branch, parent.branch.computed)
    child = yield from core.fork_agent(parent, child_ref, tokens, stop)
    return (yield from _save_and_tell(core, child, "create", stop))


def _rollback(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    agent = core.agents.get(request.ref)
    branch = agent.branch
    tokens = branch.border_at_most(_cut_point(branch.tokens, request.arguments["tokens"]))
    refuse_over_budget(core, agent, branch, branch.computed)
    core.memory.apply(Activated(branch.space))
    try:
        # the page that is cut must be resident, since its first tokens are copied
        yield from fault_in(core, branch, stop)
        yield from core.cut_branch(branch, tokens, stop)
    finally:
        core.memory.apply(Deactivated(branch.space))
    return (yield from _save_and_tell(core, agent, "rollback", stop))


def _cut_point(tokens: list[int], wanted: object) -> int:
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= len(tokens):
        raise InvalidParams(f"tokens must be from 0 to {len(tokens)} for this agent, not {wanted}", parameter="tokens")
    return wanted


def _delete(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    error = yield from delete_agent(core, core.agents.get(request.ref))
    return {
        "agent": request.ref.agent,
        "deleted": error is None,
        "durable": error is None,
        "durable_reason": error,
    }


def _pin(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    agent = core.agents.get(request.ref)
    refuse_pin_over_budget(core, agent)
    core.memory.apply(Pinned(agent.branch.space))
    agent.pinned = True
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
    spaces = [branch.space for branch in agent.branches.values()]
    before_bytes = core.resident_bytes(agent)
    for space in spaces:
        core.memory.apply(EvictionWanted(space))
    # dirty pages are written first; a disk that refuses ends the wait, and what is dirty stays
    failures = core.memory.statistics.write_failures
    yield (
        lambda: (
            stop() is not None
            or core.memory.statistics.write_failures > failures
            or not any(core.has_evictable(space) for space in spaces)
        )
    )
    return agent_info(core, agent) | {"evicted_bytes": before_bytes - core.resident_bytes(agent)}


def _prefetch(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    agent = core.agents.get(request.ref)
    core.memory.apply(PrefetchHinted(agent.branch.space))
    return agent_info(core, agent)
    yield None  # a generator like its siblings; a hint never waits


def _save(core: EngineCore, request: JobRequest, stop: Stop) -> Job:
    """Try again to make durable what a disk refused; the engine asks for it by itself."""
    return (yield from _save_and_tell(core, core.agents.get(request.ref), "turn", stop))


def _save_and_tell(core: EngineCore, agent: Agent, kind: RecordKind, stop: Stop) -> Job:
    yield from make_recordable(core, agent, agent.branch, stop)
    durable, reason = yield from commit(core, agent, agent.branch, kind)
    return agent_info(core, agent) | {"durable": durable, "durable_reason": reason}
