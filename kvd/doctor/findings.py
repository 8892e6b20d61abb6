"""What an examination found, as plain data. Imports the standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "notice", "problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """One check's result.

    Attributes:
        name: which check; a check of models' folders comes once per folder.
        status: `ok`, `notice` (kvd copes; somebody may want to know) or `problem` (somebody has to act).
        text: one line of facts for people.
        remedy: a command or an action; None for `ok`.
        facts: the same for programs; plain JSON data, units in the keys.
    """

    name: str
    status: Status
    text: str
    remedy: str | None = None
    facts: Mapping[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "name": self.name,
            "status": self.status,
            "facts": dict(self.facts),
            "text": self.text,
            "remedy": self.remedy,
        }


def counted(number: int, noun: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ok(name: str, text: str, **facts: object) -> Check:
    """All is well."""
    return Check(name, "ok", text, None, facts)


def notice(name: str, text: str, remedy: str, **facts: object) -> Check:
    """Worth knowing; nothing has to be done at once."""
    return Check(name, "notice", text, remedy, facts)


def problem(name: str, text: str, remedy: str, **facts: object) -> Check:
    """Something has to be done."""
    return Check(name, "problem", text, remedy, facts)


@dataclass(frozen=True, slots=True)
class Report:
    """A whole examination.

    Attributes:
        checks: in the order of the table.
        repaired: one line for each thing a repair did, in order; empty when nothing was to be repaired.
        refused: why a repair that was asked for was not made; None if it was, or was not asked for.
    """

    checks: tuple[Check, ...]
    repaired: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def problems(self) -> int:
        """Checks with a problem."""
        return sum(check.status == "problem" for check in self.checks)

    @property
    def notices(self) -> int:
        """Checks with a notice."""
        return sum(check.status == "notice" for check in self.checks)

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "checks": [check.as_json() for check in self.checks],
            "problems": self.problems,
            "notices": self.notices,
            "repaired": list(self.repaired),
        }


__all__ = ["Check", "Report", "Status", "counted", "notice", "ok", "problem"]
