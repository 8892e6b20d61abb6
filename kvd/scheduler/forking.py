"""Making a fork durable by a note, while its memory is being made (`kvd.store.fork_notes` says what a note is).

The note goes to the disk once nothing can prevent the fork any more; meanwhile the open page is copied and the child's
books are made. A note is short because the parent's log has everything already: where it does not (KV that is not
logged, a cut inside a sealed page, a log that is damaged) the store refuses or nothing is tried, and the child is
recorded like any other agent. So is one in a namespace with a quota on disk, whose room a record is held against.

Owner: the engine thread. May import kvd.store and siblings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import FIRST_BRANCH, NOT_WRITTEN, Agent, Branch
from kvd.scheduler.commit import committed, sweep
from kvd.scheduler.requests import AgentRef
from kvd.scheduler.views import agent_info
from kvd.scheduler.waiting import Wait
from kvd.store.fork_notes import ForkNote
from kvd.store.swap_ops import SwapResult

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore


STAND_ASIDE_S = 0.003
"""How long the engine waits at most until the note is on its way to the disk. Both threads share one interpreter: if it
went on at once, the flush would begin when its own work is done, instead of taking place meanwhile."""


class ForkNoting:
    """One fork on its way to the disk.

    Args:
        core: the engine's parts.
        parent: the agent that is forked.
        child: the new agent's name.
        tokens: ids that it keeps.
        ttl_s: how long after its last use it ends; None: never.

    Attributes:
        created_s: wall clock of the fork, seconds since the epoch.
        ttl_s: as given.
    """

    def __init__(self, core: EngineCore, parent: Agent, child: AgentRef, tokens: int, ttl_s: float | None) -> None:
        self.created_s = time.time()
        self.ttl_s = ttl_s
        self._core = core
        self._parent = parent
        self._child = child
        self._tokens = tokens
        self._is_noted = False
        self._answer: list[SwapResult] = []

    def begin(self, computed: int) -> None:
        """Send the note, if the parent's log says all of it.

        Args:
            computed: tokens whose KV the child keeps.
        """
        branch = self._parent.branch
        if self._core.swap_off or self._child.namespace in self._core.disk_quotas.quotas:
            return
        if computed != min(self._tokens, branch.computed) or not _is_logged(branch, self._tokens, computed):
            return
        meta = {"pinned": False, "created_s": self.created_s, "ttl_s": self.ttl_s}
        note = ForkNote(
            namespace=self._child.namespace,
            parent=self._parent.ref.agent,
            child=self._child.agent,
            branch=branch.branch_id,
            tokens=self._tokens,
            child_branch=FIRST_BRANCH,
            time_s=self.created_s,
            meta=meta,
        )
        self._is_noted = True
        flushing = threading.Event()
        self._core.store.fork_log(note, self._answer.append, flushing.set)
        flushing.wait(STAND_ASIDE_S)

    def end(self, child: Agent) -> Generator[Wait, None, dict[str, object] | None]:
        """Wait for the disk; what to tell of a child that is durable, None when it needs a record."""
        if not self._is_noted:
            return None
        child.refused = NOT_WRITTEN
        told = agent_info(self._core, child)  # while the disk is at work
        yield lambda: bool(self._answer)
        (result,) = self._answer
        if result.error is not None or result.image is None:
            return None
        child.refused = None
        committed(self._core, child, child.branch, result.image)
        sweep(self._core)
        return told | {"durable": True, "durable_reason": None}


def _is_logged(branch: Branch, tokens: int, computed: int) -> bool:
    """Whether the log holds the first `tokens` ids of a branch with the KV of `computed` of them as they are now."""
    base = branch.baseline
    if not branch.logged or base.parent is not None or base.tokens < tokens or branch.doubtful or branch.missing:
        return False
    if computed != min(tokens, base.logged_computed):
        return False
    pages, tail = divmod(computed, PAGE_TOKENS)
    return base.pages >= pages and (not tail or (base.pages == base.logged_pages == pages and base.tail >= tail))


__all__ = ["ForkNoting"]
