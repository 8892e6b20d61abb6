"""Errors of the policy core, split by whose fault they are.

    InternalError
    ├── IllegalTransition   a page was asked for a move its table does not have
    ├── IllegalEvent        an event that cannot have happened in this state (the engine's bug)
    ├── NotResident         a cut or a block table needs a page that is not in RAM: activate the space first
    ├── IntegrityError      conservation does not hold
    └── BrokenText          spans or token lengths do not tile the text
    CallerError
    └── AgentBusy
        └── SpaceInUse      the space is active or pinned; it cannot be evicted
    EnvironmentFault
    └── Busy
        └── NoRoomForCopy   no frame for a partial page just now; nothing changed, try again after other work ends

`IllegalEvent`, `NotResident`, `SpaceInUse` and `NoRoomForCopy` are raised before anything has changed.
"""

from __future__ import annotations

from kvd.errors import AgentBusy, Busy, InternalError

__all__ = [
    "BrokenText",
    "IllegalEvent",
    "IllegalTransition",
    "IntegrityError",
    "NoRoomForCopy",
    "NotResident",
    "SpaceInUse",
]


class IllegalTransition(InternalError):
    """A page was asked for a move that its transition table does not have; `data["history"]` has its recent moves."""


class IllegalEvent(InternalError):
    """The event cannot have happened in this state; nothing has changed."""


class NotResident(InternalError):
    """A page that is needed in RAM is not there; activate the space and wait until it is ready."""


class IntegrityError(InternalError):
    """Conservation does not hold; `data` has the facts."""


class BrokenText(InternalError):
    """Spans or token lengths do not tile the text they describe."""


class SpaceInUse(AgentBusy):
    """The space is active or pinned and cannot be evicted."""


class NoRoomForCopy(Busy):
    """A cut inside a page needs a frame and none can be freed at once; nothing has changed, retry later."""
