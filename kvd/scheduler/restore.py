"""Agents as recovery found them in the data folder, back in the engine: nothing is read but what their logs said.

Pages stay on disk and are faulted in when somebody needs them. What cannot be used as it is (pages in a format nobody
knows any more, pins beyond the limit of this run) is given up in words, never silently.

Runs on the engine thread, before the first request; imports restore their branch the same way. May import kvd.errors,
kvd.ids, kvd.store, kvd.vm.events and siblings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvd.ids import AgentId, GroupId, Namespace
from kvd.scheduler.agents import Agent, Branch, mark_committed
from kvd.scheduler.endings import mark_passing
from kvd.scheduler.requests import AgentRef
from kvd.store.agent_image import AgentImage, BranchImage
from kvd.store.page_file import PageHeader
from kvd.store.recovery_report import RecoveryReport
from kvd.vm.events import PageRef, Pinned, SegmentImage, SpaceCreated, SpaceRestored

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore


def restore_agents(core: EngineCore, report: RecoveryReport) -> list[str]:
    """Register every recovered agent: awake or asleep.

    Returns:
        Notices for the operator.
    """
    notices: list[str] = []
    core.agents.unreadable = report.unreadable
    for (namespace, name), sleeping in report.asleep.items():
        core.agents.asleep[AgentRef(Namespace(namespace), AgentId(name))] = sleeping
    for (namespace, name), image in report.agents.items():
        headers = [report.pages[page] for page in image.page_ids() if page in report.pages]
        restore_agent(core, AgentRef(Namespace(namespace), AgentId(name)), image, headers, notices)
    _pin(core, notices)
    return notices


def restore_agent(
    core: EngineCore, ref: AgentRef, image: AgentImage, headers: Iterable[PageHeader], notices: list[str]
) -> None:
    """Register an agent as its log has it.

    Args:
        core: the engine's parts.
        ref: its name.
        image: what the log says.
        headers: of its pages that have files.
        notices: gets what had to be given up.
    """
    for header in headers:
        layout = core.formats.layouts.get((header.group, header.format_id))
        if layout is not None:
            core.memory.know_header(header, layout)
    for page in image.page_ids():  # nobody mapped them while this agent slept; from now on it does
        core.forgotten.pop(page, None)
    core.agents.add(_agent(core, ref, image, notices))


def _agent(core: EngineCore, ref: AgentRef, image: AgentImage, notices: list[str]) -> Agent:
    agent = Agent(
        ref,
        current=image.current,
        next_branch=max(image.branches) + 1,
        seq=image.seq,
        pinned=bool(image.meta.get("pinned", False)),
        created_s=float(str(image.meta.get("created_s", 0.0))),
        ttl_s=image.ttl_s,
        used_s=min(image.used_s, core.wall_s()),
        logged=True,
    )
    for branch_id, stored in sorted(image.branches.items()):
        agent.branches[branch_id] = restore_branch(core, ref, branch_id, stored, notices)
    if agent.ttl_s is not None:
        mark_passing(core, agent)
    return agent


def restore_branch(core: EngineCore, ref: AgentRef, branch_id: int, stored: BranchImage, notices: list[str]) -> Branch:
    """A branch as its log has it; its pages and tail are on disk. `notices` gets what had to be given up."""
    segments = sorted(stored.segments, key=lambda segment: segment.group)
    known = stored.uniform and all((segment.group, segment.format_id) in core.formats.layouts for segment in segments)
    format_ids = tuple(segment.format_id for segment in segments)
    stale = bool(segments) and stored.numerics != core.numerics
    if not known or stale or len(format_ids) != len(core.formats.default_ids):
        # text and ids are intact; only their KV cannot be used, so it is computed again when it is needed
        why = f"numerics {stored.numerics}" if stale else f"unknown formats {', '.join(format_ids)}"
        notices.append(f"pages of agent {ref} have {why}: its KV will be computed again")
        segments, format_ids = [], core.formats.default_ids
    space = core.open_space(ref, branch_id, format_ids)
    for segment in segments:
        for number, page in enumerate(segment.pages):
            core.memory.know_page(space, segment.group, number, page.page_id, page.key)
    images = tuple(
        SegmentImage(
            GroupId(segment.group),
            tuple(PageRef(page.page_id, page.key) for page in segment.pages),
            segment.tail_tokens,
        )
        for segment in segments
    )
    page_bytes = core.page_bytes(space)
    core.memory.apply(
        SpaceRestored(space, page_bytes, images, ref.namespace)
        if images
        else SpaceCreated(space, page_bytes, ref.namespace)
    )
    branch = Branch(
        branch_id,
        space,
        format_ids,
        tokens=list(stored.tokens),
        token_bytes=list(stored.token_bytes),
        spans=list(stored.spans),
        text=bytearray(stored.text),
        computed=stored.computed_tokens if images else 0,
        last_used=core.agents.tick(),
    )
    mark_committed(branch)
    core.sharing.note(branch)
    return branch


def _pin(core: EngineCore, notices: list[str]) -> None:
    """Pin again what was pinned; pins hold as much of it as the limit of this run allows."""
    for agent in core.agents:
        if not agent.pinned:
            continue
        space = agent.branch.space
        core.memory.apply(Pinned(space))
        held, needed = sum(core.pager.pinned_pages(space).values()), core.pager.residency(space).needed_bytes
        if held < needed:
            limit = core.pager.budget.pin_limit_bytes
            notices.append(f"agent {agent.ref} needs {needed} bytes and its pin holds {held}: pins may hold {limit}")
