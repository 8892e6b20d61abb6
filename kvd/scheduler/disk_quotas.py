"""What namespaces may take of the disk: who is over, by how much, and what may still be written.

Theory of operation. Files belong to namespaces as pages and logs do: pages are shared inside a namespace only, so each
counts once, for one namespace, whoever of its agents maps it. A quota acts before anything is written, where the engine
decides, and not in the store: a refusal of the disk makes everybody's writes wait for trials, and the quota of one is
no business of the others. Pages of a namespace that has no room are held in RAM (`kvd.vm.transfers`), its records are
not appended, and its turns say `durable: false` with the reason; `kvd.scheduler.shedding` then gives up what is worth
least in that namespace. A part of each quota is left to records, as of the disk's: pages whose record does not fit are
of no use to anybody.

What is used is looked at once a second, before a record, and after files went; what starts to be written meanwhile is
taken off by the pager. A file is a little longer than its page: between two looks a quota may be passed by that much.

Owner: the engine thread; `full` and `too_small` may be read by others. May import kvd.ids, kvd.ops.sizes and kvd.store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kvd.ids import Namespace
from kvd.ops.sizes import format_size
from kvd.store.disk_usage import log_reserve_bytes

if TYPE_CHECKING:
    from kvd.vm.pager import Pager


class DiskQuotas:
    """See the module docstring.

    Attributes:
        quotas: bytes of disk by namespace; those without one share what there is.
        used: bytes of pages and logs by namespace, as of the last look.
        full: namespaces of which something waits for room, by name.
        too_small: namespaces that are over by more than all that may be given up, by name.
    """

    def __init__(self) -> None:
        self.quotas: dict[Namespace, int] = {}
        self.used: dict[Namespace, int] = {}
        self.full: tuple[str, ...] = ()
        self.too_small: tuple[str, ...] = ()
        self._refused: dict[Namespace, int] = {}  # bytes of the largest record that was refused since the last shortage
        self._stuck: dict[Namespace, int] = {}  # room that there was when something was refused

    def look(self, used: Mapping[str, int]) -> dict[Namespace, int]:
        """What the store says is used now.

        Returns:
            Bytes of pages that may be written, writes under way included, by namespace; those without a quota: any.
        """
        self.used = {Namespace(name): count for name, count in used.items()}
        return {name: quota - log_reserve_bytes(quota) - self.used.get(name, 0) for name, quota in self.quotas.items()}

    def refuses(self, namespace: Namespace, record_bytes: int) -> bool:
        """Whether a record of so many bytes must not be written now; one that must not is remembered as a shortage."""
        quota_bytes = self.quotas.get(namespace)
        if quota_bytes is None or self.used.get(namespace, 0) + record_bytes <= quota_bytes:
            return False
        self._refused[namespace] = max(record_bytes, self._refused.get(namespace, 0))
        return True

    def note_refusal(self, namespace: Namespace) -> str:
        """A record of a namespace was not written, for want of room; returns why, in words for the client."""
        self._stuck[namespace] = self._room_bytes(namespace)
        return self._why(namespace)

    def is_stuck(self, namespace: Namespace) -> bool:
        """Whether something was refused, and there is no more room since: another try would hardly end otherwise."""
        return (
            namespace in self.quotas
            and namespace in self._stuck
            and self._room_bytes(namespace) <= self._stuck[namespace]
        )

    def try_again(self, namespace: Namespace) -> None:
        """Something changed that makes another try worth while."""
        self._stuck.pop(namespace, None)

    def set_quota(self, namespace: Namespace, quota_bytes: int | None) -> None:
        """A namespace has another quota, or none; what was refused under the old one is worth a try."""
        self.try_again(namespace)
        if quota_bytes is None:
            self.quotas.pop(namespace, None)
        else:
            self.quotas[namespace] = quota_bytes

    def _room_bytes(self, namespace: Namespace) -> int:
        return self.quotas.get(namespace, 0) - self.used.get(namespace, 0)

    def shortages(self, held: Mapping[Namespace, int]) -> dict[Namespace, int]:
        """By how much namespaces are over, with what waits to be written; those that are not are left out.

        Args:
            held: bytes of pages that wait for room.
        """
        refused, self._refused = self._refused, {}
        over: dict[Namespace, int] = {}
        for name, quota_bytes in self.quotas.items():
            waiting_bytes = held.get(name, 0) + refused.get(name, 0)
            kept_bytes = log_reserve_bytes(quota_bytes) if waiting_bytes else 0
            over_bytes = self.used.get(name, 0) + waiting_bytes + kept_bytes - quota_bytes
            if over_bytes > 0:
                over[name] = over_bytes
        self._tell([name for name in self.quotas if held.get(name) or refused.get(name)])
        return over

    def _why(self, namespace: Namespace) -> str:
        quota = format_size(self.quotas.get(namespace, 0))
        return f"the disk quota of namespace {namespace!r} ({quota}) is full: saved once there is room in it"

    def tell_too_small(self, names: Iterable[Namespace]) -> list[Namespace]:
        """Namespaces whose quota all that may go would not meet; returns those of which that is new."""
        before, self.too_small = self.too_small, tuple(sorted(names))
        return [name for name in names if name not in before]

    def why_too_small(self, namespace: Namespace) -> str:
        """What is wrong and what helps, for an operator."""
        return (
            f"files of namespace {namespace!r} take {format_size(self.used.get(namespace, 0))}, and all that could be "
            f"given up would not meet its disk quota of {format_size(self.quotas[namespace])}: nothing is given up; "
            "raise the quota, or delete, unpin or roll back agents"
        )

    def _tell(self, names: Iterable[Namespace]) -> None:
        self.full = tuple(sorted(map(str, names)))


def use_by_namespace(pager: Pager, quotas: DiskQuotas, disk: Mapping[str, int]) -> dict[str, dict[str, int | None]]:
    """What each namespace takes of RAM and disk, and of its quotas, if it has any: as clients see it.

    Args:
        pager: knows what is in RAM.
        quotas: those of the disk.
        disk: bytes of files by namespace.
    """
    budget, held = pager.budget, pager.quota_held_bytes
    names = {*budget.namespaces, *budget.quotas, *quotas.quotas, *map(Namespace, disk)}
    return {
        name: {
            "resident_bytes": budget.namespaces.get(name, 0),
            "quota_bytes": budget.quotas.get(name),
            "disk_bytes": disk.get(name, 0),
            "disk_quota_bytes": quotas.quotas.get(name),
            "waiting_bytes": held.get(name, 0),
        }
        for name in sorted(names)
    }


__all__ = ["DiskQuotas", "use_by_namespace"]
