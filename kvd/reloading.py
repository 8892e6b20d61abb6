"""The configuration file while the daemon runs: what changed in it is put in force, or told to need a restart.

Theory of operation. The file is read again as a whole, with flags and variables as they were, by the same code as at
the start; so what it comes to is settings again, checked again. The difference to those in force is what somebody
changed. `LIVE` settings are put in force by whoever owns them; the others are named in the log, with the reason, once
for each change. A file that is wrong changes nothing, and is told.

Part of the composition root; may import kvd.config, kvd.errors, kvd.ids and kvd.scheduler.limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Protocol

from kvd.config import Settings
from kvd.errors import KvdError
from kvd.ids import Namespace
from kvd.scheduler.limits import LimitChange

LIMITS: Final = ("budget_bytes", "namespace_quotas", "namespace_disk_quotas")
LIVE: Final = (*LIMITS, "log_level", "drain_grace_s")
"""Settings that can change while the daemon runs. Whatever else there is decides how KV is computed, stored or shared,
or what was built at the start."""


class SettingsFile:
    """A file that settings came from.

    Args:
        path: the file.
        settings: what it came to at the start, before the model was looked for.
        read: what it comes to now; raises KvdError.
    """

    def __init__(self, path: Path, settings: Settings, read: Callable[[], Settings]) -> None:
        self.path = path
        self.settings = settings
        self.read = read


class Hands(Protocol):
    """Puts settings in force."""

    async def change_limits(self, change: LimitChange) -> None:
        """Change limits of memory. Raises KvdError when they are refused; nothing changed then."""

    def set_log_level(self, level: str) -> None:
        """Log from this level on."""

    def set_drain_grace(self, seconds: float) -> None:
        """How long a later stop lets requests finish."""


class Reloader:
    """Owner: the event loop.

    Args:
        file: what to read.
        hands: put settings in force.
        log: takes what happened: (event, facts).
    """

    def __init__(self, file: SettingsFile, hands: Hands, log: Callable[..., None]) -> None:
        self._file = file
        self._now = file.settings
        self._told: dict[str, Any] = {}  # what was said to need a restart, by name
        self._hands = hands
        self._log = log

    async def reload(self) -> None:
        """Read the file again and act on what changed; never raises."""
        try:
            wanted = self._file.read()
        except KvdError as error:
            self._log("config_refused", file=str(self._file.path), reason=error.message)
            return
        changed = {
            each.name: getattr(wanted, each.name)
            for each in fields(Settings)
            if getattr(wanted, each.name) != getattr(self._now, each.name)
        }
        done: dict[str, Any] = {name: changed[name] for name in ("log_level", "drain_grace_s") if name in changed}
        for name in done:
            self._act(wanted, name)
        limits: dict[str, Any] = {name: changed[name] for name in LIMITS if name in changed}
        try:
            await self._limits(wanted, limits)
        except KvdError as error:
            self._log("config_refused", file=str(self._file.path), settings=sorted(limits), reason=error.message)
        else:
            done |= limits
        if done:
            self._now = replace(self._now, **done)
            self._log("config_reloaded", level="info", **{name: _plain(value) for name, value in done.items()})
        fixed = {name: value for name, value in changed.items() if name not in LIVE}
        news = sorted(name for name, value in fixed.items() if self._told.get(name, self) != value)
        self._told = fixed
        if news:
            reason = f"they take effect at the next start; at run time change {', '.join(sorted(LIVE))}"
            self._log("config_needs_restart", settings=news, reason=reason)

    def _act(self, wanted: Settings, name: str) -> None:
        if name == "log_level":
            self._hands.set_log_level(wanted.log_level)
        else:
            self._hands.set_drain_grace(wanted.drain_grace_s)

    async def _limits(self, wanted: Settings, changed: dict[str, Any]) -> None:
        if not changed:
            return
        now = self._now
        await self._hands.change_limits(
            LimitChange(
                wanted.budget_bytes if "budget_bytes" in changed else None,
                _changes(now.namespace_quotas, wanted.namespace_quotas),
                _changes(now.namespace_disk_quotas, wanted.namespace_disk_quotas),
            )
        )


def _changes(now: tuple[tuple[str, int], ...], wanted: tuple[tuple[str, int], ...]) -> dict[Namespace, int | None]:
    """Quotas that are others than now; None where there is none any more."""
    before, after = dict(now), dict(wanted)
    return {Namespace(name): after.get(name) for name in before | after if before.get(name) != after.get(name)}


def _plain(value: Any) -> object:  # noqa: ANN401  (a setting's)
    return [list(each) for each in value] if isinstance(value, tuple) else value


__all__ = ["LIVE", "Hands", "Reloader", "SettingsFile"]
