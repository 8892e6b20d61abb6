"""Control operations that may have to wait for pages: generators like turns, run in the same queue.

Each returns plain facts for the client. All of them are durable when they return (`durable` says so, with the reason
when the disk refused).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

from kvd.errors import AgentExists, InvalidParams
from kvd.ids import AgentId
from kvd.scheduler.requests import AgentRef, JobRequest
from kvd.scheduler.turn import Wait
from kvd.scheduler.views import agent_info
from kvd.vm.events import Activated, Deactivated, EvictionWanted, Pinned, PrefetchHinted, Unpinned

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore

Job = Generator[Wait, None, dict[str, object]]


def run_job(core: EngineCore, request: JobRequest) -> Job:
    """Run one control operation.

    Raises:
        AgentNotFound: no such agent.
        InvalidParams, AgentExists: refused, nothing changed.
    """
    operations: Mapping[str, Callable[[EngineCore, AgentRef, Mapping[str, object]], Job]] = {
        "fork": _fork,
        "rollback": _rollback,
        "delete": _delete,
        "pin": _pin,
        "unpin": _unpin,
        "evict": _evict,
        "prefetch": _prefetch,
        "save": _save,
    }
    return operations[request.operation](core, request.ref, request.arguments)


def _fork(core: EngineCore, ref: AgentRef, arguments: Mapping[str, object]) -> Job:
    parent = core.agents.get(ref)
    child_ref = AgentRef(ref.namespace, AgentId(str(arguments["new_agent"])))
    if core.agents.find(child_ref) is not None:
        raise AgentExists(f"agent {child_ref} exists already", agent=child_ref.agent)
    wanted = arguments.get("tokens")
    tokens = len(parent.branch.tokens) if wanted is None else _cut_point(parent.branch.tokens, wanted)
    tokens = parent.branch.border_at_most(tokens)
    child = yield from core.fork_agent(parent, child_ref, tokens)
    durable, reason = yield from core.commit(child, child.branch, "create")
    return agent_info(core, child) | {"durable": durable, "durable_reason": reason}


def _rollback(core: EngineCore, ref: AgentRef, arguments: Mapping[str, object]) -> Job:
    agent = core.agents.get(ref)
    branch = agent.branch
    tokens = branch.border_at_most(_cut_point(branch.tokens, arguments["tokens"]))
    core.memory.apply(Activated(branch.space))
    try:
        # the page that is cut must be resident, since its first tokens are copied
        yield lambda: core.pager.is_ready(branch.space) or core.pager.lost_at(branch.space) is not None
        lost = core.pager.lost_at(branch.space)
        if lost is not None:
            core.cut_kv(branch, lost)
        core.cut_branch(branch, tokens)
        durable, reason = yield from core.commit(agent, branch, "rollback")
    finally:
        core.memory.apply(Deactivated(branch.space))
    return agent_info(core, agent) | {"durable": durable, "durable_reason": reason}


def _cut_point(tokens: list[int], wanted: object) -> int:
    if not isinstance(wanted, int) or not 0 <= wanted <= len(tokens):
        raise InvalidParams(f"tokens must be from 0 to {len(tokens)} for this agent, not {wanted}", parameter="tokens")
    return wanted


def _delete(core: EngineCore, ref: AgentRef, arguments: Mapping[str, object]) -> Job:
    agent = core.agents.get(ref)
    error = yield from core.delete_agent(agent)
    return {"agent": ref.agent, "deleted": error is None, "durable": error is None, "durable_reason": error}


def _pin(core: EngineCore, ref: AgentRef, arguments: Mapping[str, object]) -> Job:
    agent = core.agents.get(ref)
    space = agent.branch.space
    core.refuse_pin_over_budget(agent)
    core.memory.apply(Pinned(space))
    agent.pinned = True
    durable, reason = yield from core.commit(agent, agent.branch, "turn")
    return agent_info(core, agent) | {"durable": durable, "durable_reason": reason}


def _unpin(core: EngineCore, ref: AgentRef, arguments: Mapping[str, object]) -> Job:
    agent = core.agents.get(ref)
    core.memory.apply(Unpinned(agent.branch.space))
    agent.pinned = False
    durable, reason = yield from core.commit(agent, agent.branch, "turn")
    return agent_info(core, agent) | {"durable": durable, "durable_reason": reason}


def _evict(core: EngineCore, ref: AgentRef, arguments: Mapping[str, object]) -> Job:
    agent = core.agents.get(ref)
    spaces = [branch.space for branch in agent.branches.values()]
    before = core.resident_bytes(agent)
    for space in spaces:
        core.memory.apply(EvictionWanted(space))
    # dirty pages are written first; a disk that refuses ends the wait, and what is dirty stays
    failures = core.memory.statistics.write_failures
    yield (
        lambda: (
            core.memory.statistics.write_failures > failures or not any(core.has_evictable(space) for space in spaces)
        )
    )
    return agent_info(core, agent) | {"evicted_bytes": before - core.resident_bytes(agent)}


def _prefetch(core: EngineCore, ref: AgentRef, arguments: Mapping[str, object]) -> Job:
    agent = core.agents.get(ref)
    core.memory.apply(PrefetchHinted(agent.branch.space))
    return agent_info(core, agent)
    yield None  # a generator like its siblings; a hint never waits


def _save(core: EngineCore, ref: AgentRef, arguments: Mapping[str, object]) -> Job:
    """Try again to make durable what a disk refused; the engine asks for it by itself."""
    agent = core.agents.get(ref)
    durable, reason = yield from core.commit(agent, agent.branch, "turn")
    return {"agent": ref.agent, "durable": durable, "durable_reason": reason}
