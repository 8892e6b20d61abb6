"""Limits that can be changed while the daemon runs: what is in force, and how it becomes so.

Theory of operation. A change is checked as a whole before anything happens, and holds until the next start: what the
daemon was started with is the operator's word, a change at run time the word of the moment. A larger budget counts at
once. A smaller one counts at once for whoever asks for room, and is *converging* until what is held fits: idle pages go
(dirty ones after their write), turns that fit one after the other make way for each other (`kvd.scheduler.reserving`),
and turns that can never fit any more end with both figures, what they have computed committed. The frame pool's own
limit follows the pager's: while it converges the pool must hold what is there, and may never get more.

Owner: the engine thread. May import kvd.config, kvd.errors, kvd.ids, kvd.ops.sizes, kvd.vm.events and siblings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.config import MIN_BUDGET_BYTES
from kvd.errors import BudgetExceeded, InvalidParams
from kvd.ids import Namespace, RequestId
from kvd.ops.footprint import measure_footprint
from kvd.ops.sizes import format_size
from kvd.scheduler.params import Params
from kvd.vm.events import BudgetChanged, QuotaChanged

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore
    from kvd.scheduler.messages import HeldRequest


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What the daemon was started with, beside the budget itself.

    Attributes:
        least_bytes: the smallest budget, and the smallest quota of a namespace.
        largest_budget_bytes: what the machine can hold; None when nobody has asked it.
        largest_reason: where that figure comes from, in words.
        branch_limit_bytes: what an agent's branches beside its current one may take; None for any.
        namespace_quotas: what pages of namespaces should take of the frames.
        namespace_disk_quotas: what files of namespaces may take of the disk.
    """

    least_bytes: int = MIN_BUDGET_BYTES
    largest_budget_bytes: int | None = None
    largest_reason: str = ""
    branch_limit_bytes: int | None = None
    namespace_quotas: Mapping[Namespace, int] = field(default_factory=dict)
    namespace_disk_quotas: Mapping[Namespace, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LimitChange:
    """What a caller wants changed; None leaves a limit as it is.

    Attributes:
        budget_bytes: RAM for pages, open tails and copies in flight.
        namespace_quotas: of these namespaces, what their pages should take of the frames; None for no quota.
        namespace_disk_quotas: of these namespaces, what their files may take of the disk; None for no quota.
    """

    budget_bytes: int | None = None
    namespace_quotas: Mapping[Namespace, int | None] = field(default_factory=dict)
    namespace_disk_quotas: Mapping[Namespace, int | None] = field(default_factory=dict)


def limit_change(params: Params) -> LimitChange:
    """What the parameters of `configure` ask for.

    Raises:
        InvalidParams: naming the parameter and what it may be.
    """
    params.refuse_unknown("budget", "namespace_quotas", "namespace_disk_quotas")
    return LimitChange(
        params.size("budget"),
        params.namespace_sizes("namespace_quotas"),
        params.namespace_sizes("namespace_disk_quotas"),
    )


class Limits:
    """Owner: the engine thread. `EngineCore` has one.

    Args:
        core: the engine's parts.
        settings: what the daemon was started with.

    Attributes:
        branch_limit_bytes: what an agent's branches beside its current one may take; None for any.
    """

    def __init__(self, core: EngineCore, settings: LimitSettings) -> None:
        self._core = core
        self._settings = settings
        self._start_budget_bytes = core.pager.budget.budget_bytes
        self._is_settling = False
        self._changed: dict[str, None] = {}  # an ordered set
        self.branch_limit_bytes = settings.branch_limit_bytes
        for namespace, quota_bytes in settings.namespace_quotas.items():
            core.memory.apply(QuotaChanged(namespace, quota_bytes))
        core.disk_quotas.quotas.update(settings.namespace_disk_quotas)
        core.govern()

    def change(self, change: LimitChange) -> None:
        """Put a change into force.

        Raises:
            InvalidParams: naming the allowed values; nothing changed.
        """
        if change.budget_bytes is not None:
            self._check_budget(change.budget_bytes)
        self._check_quotas("namespace_quotas", "quota", change.namespace_quotas)
        self._check_disk_quotas(change.namespace_disk_quotas)
        if change.budget_bytes is not None:
            self._set_budget(change.budget_bytes)
        for namespace, quota_bytes in change.namespace_quotas.items():
            self._core.memory.apply(QuotaChanged(namespace, quota_bytes))
        self._note_changed("namespace_quotas", bool(self._core.pager.budget.quotas != self._settings.namespace_quotas))
        if change.namespace_disk_quotas:
            self._set_disk_quotas(change.namespace_disk_quotas)

    def settle(self) -> None:
        """Once what is held fits a smaller budget, the pool is held to it, too."""
        pager = self._core.pager
        if self._is_settling and not pager.budget.converging:
            self._is_settling = False
            self._core.memory.pool.set_budget(pager.budget.budget_bytes)
            self._core.log("budget_reached", level="info", budget_bytes=pager.budget.budget_bytes)

    def facts(self) -> dict[str, object]:
        """The limits in force, and what they bound."""
        core, pager = self._core, self._core.pager.statistics()
        reserved_bytes = core.reservations.reserved_bytes
        exceeded = {
            "budget": pager.converging or reserved_bytes > pager.usable_bytes,
            "namespace_quotas": any(pager.namespaces.get(name, 0) > quota for name, quota in pager.quotas.items()),
            "namespace_disk_quotas": any(
                core.disk_quotas.used.get(name, 0) > quota for name, quota in core.disk_quotas.quotas.items()
            ),
        }
        return {
            "budget_bytes": pager.budget_bytes,
            "usable_bytes": pager.usable_bytes,
            "resident_bytes": pager.resident_bytes,
            "in_flight_bytes": pager.in_flight_bytes,
            "reserved_bytes": reserved_bytes,
            "high_mark_bytes": pager.high_mark_bytes,
            "low_mark_bytes": pager.low_mark_bytes,
            "pinned_bytes": pager.pinned_bytes,
            "pin_limit_bytes": pager.pin_limit_bytes,
            "namespace_quotas": dict(pager.quotas),
            "namespace_disk_quotas": dict(core.disk_quotas.quotas),
            "branch_limit_bytes": self.branch_limit_bytes,
            "start_budget_bytes": self._start_budget_bytes,
            "largest_budget_bytes": self._settings.largest_budget_bytes,
            "footprint_bytes": measure_footprint().footprint_bytes,
            "footprint_limit_bytes": core.pressure.hard_bytes,
            "converging": [name for name, holds in exceeded.items() if holds],
            "until_restart": list(self._changed),
        }

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _check_budget(self, wanted_bytes: int) -> None:
        least, most = self._settings.least_bytes, self._settings.largest_budget_bytes
        if wanted_bytes < least or (most is not None and wanted_bytes > most):
            reason = f" ({self._settings.largest_reason})" if self._settings.largest_reason else ""
            upto = "" if most is None else f" to {format_size(most)}{reason}"
            raise InvalidParams(
                f"budget must be from {format_size(least)}{upto}, not {format_size(wanted_bytes)}",
                parameter="budget",
                least_bytes=least,
                most_bytes=most,
            )

    def _check_quotas(self, parameter: str, what: str, quotas: Mapping[Namespace, int | None]) -> None:
        least = self._settings.least_bytes
        for namespace, quota_bytes in quotas.items():
            if quota_bytes is not None and quota_bytes < least:
                raise InvalidParams(
                    f"the {what} of namespace {namespace!r} must be at least {format_size(least)}, or none, not "
                    f"{format_size(quota_bytes)}",
                    parameter=parameter,
                    least_bytes=least,
                )

    def _check_disk_quotas(self, quotas: Mapping[Namespace, int | None]) -> None:
        self._check_quotas("namespace_disk_quotas", "disk quota", quotas)
        if self._core.swap_off and any(quota_bytes is not None for quota_bytes in quotas.values()):
            raise InvalidParams(
                "namespace_disk_quotas needs --swap on: nothing is on disk without it, so only none is allowed",
                parameter="namespace_disk_quotas",
            )

    def _set_disk_quotas(self, quotas: Mapping[Namespace, int | None]) -> None:
        """What is over a smaller one goes at the next shortage, what waited for a larger one is written now."""
        now = self._core.disk_quotas.quotas
        for namespace, quota_bytes in quotas.items():
            self._core.disk_quotas.set_quota(namespace, quota_bytes)
        self._core.govern()
        self._note_changed("namespace_disk_quotas", now != self._settings.namespace_disk_quotas)

    def _set_budget(self, budget_bytes: int) -> None:
        core, before_bytes = self._core, self._core.pager.budget.budget_bytes
        # first the pool: a larger budget maps frames at once
        core.memory.pool.set_budget(max(budget_bytes, core.pager.statistics().resident_bytes))
        core.memory.apply(BudgetChanged(budget_bytes))
        if budget_bytes < before_bytes:
            core.store.trim()
        self._is_settling = True
        self._note_changed("budget", budget_bytes != self._start_budget_bytes)
        core.log("budget_changed", level="info", before_bytes=before_bytes, budget_bytes=budget_bytes)
        self.settle()

    def _note_changed(self, name: str, is_changed: bool) -> None:
        self._changed.pop(name, None)
        if is_changed:
            self._changed[name] = None


def unfitting(requests: Mapping[RequestId, HeldRequest]) -> Iterator[tuple[RequestId, BudgetExceeded]]:
    """Turns that have been planned and can never fit any more, and why."""
    for request, held in requests.items():
        residence = held.state.residence if held.state is not None else None
        if residence is None or held.stopping:
            continue
        try:
            residence.needs()
        except BudgetExceeded as error:
            yield request, error
