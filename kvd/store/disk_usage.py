"""How many bytes the data folder takes, and the quota over all of them.

Every file counts: pages, logs, quarantine, temporary and foreign files, the catalog, other models (P21, P25). Own
writes are added as they happen; before anything is refused, and every so often, the folder is counted afresh, since
others may put files there too. May import siblings of kvd.store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvd.store.errors import QuotaExceeded
from kvd.store.fs import FileSystem
from kvd.store.layout import DataFolder, FolderUsage
from kvd.store.swap_dir import prune_quarantine

_RECOUNT_EVERY: Final = 512
"""Admissions between two counts of the folder (a count of 10 000 files takes tens of milliseconds)."""

_REFUSED_FOR_S: Final = 1.0
"""How long a refusal stands without another count, unless something was deleted: many writes are refused in a row."""


CATALOG_GROWTH_BYTES: Final = 384 * 1024
"""Set aside for the catalog: SQLite writes without asking (its log of 32 pages, pages of rows), a quota holds all the
same. At most a quarter of a small quota. What the catalog takes already is no part of it any more."""

CATALOG_SLACK_BYTES: Final = 192 * 1024
"""What SQLite's log and index grow to: kept free, less what they take, however large the catalog is."""

LOG_RESERVE_BYTES: Final = 64 * 1024
"""Least room that pages leave to records: pages whose record does not fit are of no use to anybody. At least 2 % of the
quota, at most an eighth of a small one."""


def catalog_reserve_bytes(quota_bytes: int, *, database_bytes: int = 0, log_bytes: int = 0) -> int:
    """Bytes of a quota that pages and logs may not take.

    Args:
        quota_bytes: the quota.
        database_bytes: what the catalog's database takes already.
        log_bytes: what SQLite's log and its index take already.
    """
    whole = min(CATALOG_GROWTH_BYTES, quota_bytes // 4)
    return max(0, whole - database_bytes - log_bytes, min(CATALOG_SLACK_BYTES, whole) - log_bytes)


def log_reserve_bytes(quota_bytes: int) -> int:
    """Bytes of a quota that only records may take."""
    return min(max(LOG_RESERVE_BYTES, quota_bytes // 50), quota_bytes // 8)


class DiskUsage:
    """Bytes under the data folder. Owned by the swap thread; other threads may read the figures.

    Args:
        folder, fingerprint, fs: what is counted.
        quota_bytes: limit over every byte.
        counted: what a count has just said; None: count now.
        clock: seconds, monotonic.

    Attributes:
        swap_bytes, log_bytes, quarantine_bytes: of the present model.
        other_bytes: everything else under the root.
        reserved_bytes: kept free for the catalog, as of the last count.
        promised_bytes: of logs that are still to be made (`kvd.store.fork_book`); the store sets it.
    """

    def __init__(
        self,
        folder: DataFolder,
        fingerprint: str,
        fs: FileSystem,
        quota_bytes: int,
        *,
        counted: FolderUsage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._fs = fs
        self.quota_bytes = quota_bytes
        self._clock = clock
        self._admissions = 0
        self._refused_bytes = 0  # used when the last admission was refused
        self._refused_until_s = 0.0
        self.promised_bytes = 0
        self.swap_bytes = self.log_bytes = self.quarantine_bytes = self.other_bytes = self.reserved_bytes = 0
        self._take(counted if counted is not None else folder.usage(fingerprint))

    @property
    def used_bytes(self) -> int:
        """Every byte under the root."""
        return self.swap_bytes + self.log_bytes + self.quarantine_bytes + self.other_bytes

    def recount(self) -> None:
        """Count all files."""
        self._take(self._folder.usage(self._fingerprint))

    def _take(self, used: FolderUsage) -> None:
        self.swap_bytes, self.log_bytes = used.swap_bytes, used.log_bytes
        self.quarantine_bytes, self.other_bytes = used.quarantine_bytes, used.other_bytes
        database_bytes, *log_bytes = (self._catalog_bytes(suffix) for suffix in ("", "-wal", "-shm"))
        self.reserved_bytes = catalog_reserve_bytes(
            self.quota_bytes, database_bytes=database_bytes, log_bytes=sum(log_bytes)
        )

    def _catalog_bytes(self, suffix: str) -> int:
        path = self._folder.catalog_path(self._fingerprint)
        found = self._fs.stat(path.with_name(path.name + suffix))
        return 0 if found is None else found.file_bytes

    def admit(self, wanted_bytes: int, delete_orphans: Callable[[], None] | None, *, kept_bytes: int = 0) -> None:
        """Return when `wanted_bytes` more fit the quota; orphans and quarantine make room first.

        Args:
            wanted_bytes: bytes about to be written.
            delete_orphans: removes files that nobody names; None when nothing may be deleted, quarantine included.
            kept_bytes: room that must stay for others after that.

        Raises:
            QuotaExceeded: they do not fit; nothing may be written.
        """
        self._admissions += 1
        if self._admissions % _RECOUNT_EVERY == 0:
            self.recount()
        if self._over(wanted_bytes + kept_bytes) <= 0:
            return
        if self._clock() < self._refused_until_s and self.used_bytes >= self._refused_bytes:
            raise self._refusal(wanted_bytes, kept_bytes)
        self.recount()
        if delete_orphans is not None and self._over(wanted_bytes + kept_bytes) > 0:
            delete_orphans()
            self.recount()
        if delete_orphans is not None and (over_bytes := self._over(wanted_bytes + kept_bytes)) > 0:
            prune_quarantine(self._fs, self._folder.quarantine_folder(self._fingerprint), wanted_bytes=over_bytes)
            self.recount()
        if self._over(wanted_bytes + kept_bytes) > 0:
            self._refused_bytes, self._refused_until_s = self.used_bytes, self._clock() + _REFUSED_FOR_S
            raise self._refusal(wanted_bytes, kept_bytes)

    def _refusal(self, wanted_bytes: int, kept_bytes: int) -> QuotaExceeded:
        return QuotaExceeded(
            used_bytes=self.used_bytes,
            wanted_bytes=wanted_bytes,
            quota_bytes=self.quota_bytes,
            reserved_bytes=self.reserved_bytes + kept_bytes,
        )

    def _over(self, wanted_bytes: int) -> int:
        """By how many bytes the quota would be passed; at most 0 when they fit."""
        return self.used_bytes + self.promised_bytes + wanted_bytes + self.reserved_bytes - self.quota_bytes


__all__ = ["DiskUsage", "catalog_reserve_bytes", "log_reserve_bytes"]
