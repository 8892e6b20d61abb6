"""What the engine does about paging beyond what a running request demands: load ahead, and notice thrashing.

Pages are loaded ahead for a turn that waits in the queue, and for the agents that the order of past turns makes likely
(`kvd.scheduler.prediction`), as far as the setting allows: `predict` both, `hints` the first only, `off` neither (what
a client asks for by `agent.prefetch` is always done). Turns that end tell `kvd.scheduler.thrashing` what they needed.

Owner: the engine thread. May import kvd.config, kvd.vm and siblings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvd.scheduler.prediction import Predictor
from kvd.scheduler.requests import AgentRef, JobRequest, TurnRequest
from kvd.vm.events import HintWithdrawn, PrefetchHinted, SpacesPredicted

if TYPE_CHECKING:
    from kvd.ids import SpaceId
    from kvd.scheduler.core import EngineCore


class Paging:
    """Owner: the engine thread. `EngineCore` has one.

    Args:
        core: the engine's parts.
        prefetch: `predict`, `hints` or `off`.
    """

    def __init__(self, core: EngineCore, prefetch: str) -> None:
        self._core = core
        self._hints = prefetch != "off"
        self._predicts = prefetch == "predict"
        self._told: tuple[SpaceId, ...] = ()
        self._seen = core.pager.paging
        self.predictor = Predictor()

    def queued(self, request: TurnRequest) -> None:
        """A turn waits: the pages it will go on from can come in meanwhile, if they can be resident at all."""
        agent = self._core.agents.known(request.ref)
        if not self._hints or agent is None:
            return
        if request.append or request.prompt.data.startswith(bytes(agent.branch.text)):
            self.expect(agent.branch.space)

    def expect(self, space: SpaceId) -> None:
        """A turn on this space waits for room."""
        if self._hints and self._fits(space):
            self._core.memory.apply(PrefetchHinted(space, "queued"))

    def started(self, request: TurnRequest) -> None:
        """A turn starts. Nothing is loaded for its successors before its own pages are held (`activated`)."""
        if self._predicts:
            self.predictor.started(request.ref, request.connection)

    def activated(self) -> None:
        """A turn's pages are held: whoever comes after it can be loaded while it computes.

        Not earlier: who has started is expected no more, so those who are would take its pages from it.
        """
        if self._predicts:
            self._predict()

    def ended(self, request: TurnRequest | JobRequest, *, has_run: bool, waits: Callable[[AgentRef], bool]) -> None:
        """A request was answered.

        Args:
            request: it.
            has_run: it held pages.
            waits: whether another turn of an agent has not been answered.
        """
        core = self._core
        agent = core.agents.known(request.ref)
        if agent is not None and isinstance(request, TurnRequest) and not waits(request.ref):
            for branch in agent.branches.values():
                core.memory.apply(HintWithdrawn(branch.space))
        if agent is None:
            self.predictor.forget(request.ref)
        if has_run and isinstance(request, TurnRequest):
            before, self._seen = self._seen, core.pager.paging
            core.thrashing.turn_ended(
                needed=self._seen.demanded - before.demanded,
                refaults=self._seen.refaults - before.refaults,
                together=core.reservations.holding + 1,
            )
        if self._told:
            self._predict()

    def tick(self) -> None:
        """A second passed."""
        self._core.thrashing.tick()
        self._core.reservations.tick()

    def _predict(self) -> None:
        """Tell the pager who is expected, when that has changed."""
        known = (self._core.agents.known(ref) for ref in self.predictor.expected() if isinstance(ref, AgentRef))
        spaces = tuple(agent.branch.space for agent in known if agent is not None and self._fits(agent.branch.space))
        if spaces != self._told:
            self._told = spaces
            self._core.memory.apply(SpacesPredicted(spaces))

    def _fits(self, space: SpaceId) -> bool:
        pager = self._core.pager
        return pager.fits(pager.working_set_bytes(space))
