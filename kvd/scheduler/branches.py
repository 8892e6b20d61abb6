"""How many branches an agent keeps beside its current one: four, and no more bytes than the limit.

What the other branches take is counted in pages that the current one does not map, each once, wherever it is: every
page is on disk sooner or later. The branch used longest ago goes first, the current one never. It is looked at when a
turn commits; a restart brings back what the log has, and the next turn looks again.

Owner: the engine thread. May import kvd.ids and siblings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.scheduler.agents import MAX_BRANCHES, Agent

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore


def other_branch_bytes(core: EngineCore, agent: Agent) -> int:
    """Bytes of the pages that only branches beside the current one map."""
    others = agent.other_branches
    if not others:
        return 0
    pages = {page: size for branch in others for page, size in core.pager.page_sizes(branch.space).items()}
    return sum(pages[page] for page in pages.keys() - core.pager.page_sizes(agent.branch.space).keys())


def close_surplus(core: EngineCore, agent: Agent) -> None:
    """Let go of the branches used longest ago while there are too many, or they take too much."""
    limit_bytes = core.limits.branch_limit_bytes
    for branch in agent.spare_branches():
        is_many = len(agent.other_branches) > MAX_BRANCHES
        if not is_many and (limit_bytes is None or other_branch_bytes(core, agent) <= limit_bytes):
            return
        core.close_branch(agent, branch)
