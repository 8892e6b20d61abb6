"""How a request of the scheduler's tests ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvd.errors import KvdError
from kvd.scheduler.requests import TurnResult


@dataclass
class Outcome:
    """How a request ended."""

    result: Any = None
    error: KvdError | None = None
    events: list[dict[str, object]] = field(default_factory=list)

    @property
    def turn(self) -> TurnResult:
        """The result of a turn that succeeded."""
        assert self.error is None, self.error
        assert isinstance(self.result, TurnResult)
        return self.result

    @property
    def facts(self) -> dict[str, Any]:
        """The result of a job that succeeded."""
        assert self.error is None, self.error
        assert isinstance(self.result, dict)
        return self.result

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids that a resumable stream told."""
        return tuple(token for event in self.events if event["type"] == "tokens" for token in event["ids"])  # type: ignore[attr-defined]

    @property
    def resume_key(self) -> str:
        """The key of a resumable stream's prompt."""
        return next(str(event["resume_key"]) for event in self.events if event["type"] == "matched")

    @property
    def streamed(self) -> str:
        """All text events together."""
        return "".join(str(event["text"]) for event in self.events if event["type"] == "text")
