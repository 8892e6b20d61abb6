"""What recovery found and did, as plain data. May import kvd.ids and siblings of kvd.store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kvd.ids import PageId
from kvd.store.agent_image import AgentImage
from kvd.store.agent_log import LogScan
from kvd.store.catalog import AgentRow
from kvd.store.fork_notes import ForkNote
from kvd.store.layout import FolderUsage, log_name
from kvd.store.page_file import PageHeader
from kvd.store.sleeping import AgentRef, SleepingAgent, pack_pages, pack_summary


@dataclass(frozen=True, slots=True)
class LogTrouble:
    """A log that did not end where its last good record ends.

    Attributes:
        log: file name.
        agent: (namespace, agent), None when no record was readable.
        kind: `torn` (unacknowledged append, cut off), `corrupt` (committed bytes changed, rest in quarantine), `stale`
            (the catalog knows of later records: an older copy or a cut log) or `unreadable` (the disk refused; kept).
        offset: end of the good part.
        lost_bytes: bytes after it.
        reason: what was wrong.
    """

    log: str
    agent: AgentRef | None
    kind: Literal["torn", "corrupt", "stale", "unreadable"]
    offset: int
    lost_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What was found and done. Figures in bytes count file lengths.

    Attributes:
        agents: every agent whose log was read and has at least one good record.
        logs: where each agent's log stands; what `SwapStore` continues.
        pages: header of every page that has a durable file and is named by a log.
        file_bytes: length of those files; `file_times` when they were changed last, seconds since the epoch.
        missing_pages: pages that a log names and that cannot be served, with the reason.
        unknown_formats: (group, format_id) of pages that no layout is known for; their files stay.
        orphans: page files that no log names: deleted (or put aside, or kept, see the module).
        orphans_deleted: how many of them were deleted; `orphan_bytes` their bytes.
        temp_files_deleted: unfinished files.
        foreign_files: files kvd did not make; counted in `used_bytes`, never touched.
        quarantined: files put aside in this run.
        log_troubles: every log that was not perfect.
        adopted_pages: pages the catalog did not know.
        dropped_rows: catalog rows without a page or agent.
        facts: what happened to the catalog.
        usage: bytes of the model's page files, logs and quarantine, and of everything under the root.
        counters: lifetime counters of the catalog.
        seconds: how long it took.
        unreadable: names of logs that the disk refused to read, twice (see `kvd.store.layout.log_name`). Their agents
            exist: nobody may make them anew.
        asleep: agents whose logs were not read, since the catalog vouches for them.
        read_bytes: what was read of files, the catalog apart; `reads` how often.
        is_catalog_in_line: the catalog was brought in line with all this, durably.
        stuck_forks: notes of forks whose parents' logs the disk refused to read.
        waiting_forks: notes of forks whose own logs the disk refused to make. They are among the agents, with open
            pages in their parents' logs.
    """

    agents: dict[AgentRef, AgentImage]
    logs: dict[AgentRef, LogScan]
    pages: dict[PageId, PageHeader]
    file_bytes: dict[PageId, int]
    file_times: dict[PageId, float]
    missing_pages: dict[PageId, str]
    unknown_formats: tuple[tuple[int, str], ...]
    orphans: tuple[PageId, ...]
    orphans_deleted: int
    orphan_bytes: int
    temp_files_deleted: tuple[str, ...]
    foreign_files: tuple[str, ...]
    quarantined: tuple[str, ...]
    log_troubles: tuple[LogTrouble, ...]
    adopted_pages: int
    dropped_rows: int
    facts: tuple[str, ...]
    usage: FolderUsage
    counters: Mapping[str, int]
    seconds: float
    unreadable: frozenset[str] = frozenset()
    asleep: dict[AgentRef, SleepingAgent] = field(default_factory=dict)
    read_bytes: int = 0
    reads: int = 0
    is_catalog_in_line: bool = False
    stuck_forks: tuple[ForkNote, ...] = ()
    waiting_forks: tuple[tuple[ForkNote, AgentImage], ...] = ()

    @property
    def swap_bytes(self) -> int:
        """Bytes of page files."""
        return self.usage.swap_bytes

    @property
    def log_bytes(self) -> int:
        """Bytes of logs."""
        return self.usage.log_bytes

    @property
    def quarantine_bytes(self) -> int:
        """Bytes of what was put aside."""
        return self.usage.quarantine_bytes

    @property
    def used_bytes(self) -> int:
        """Every byte under the root."""
        return self.usage.used_bytes


EMPTY_REPORT: Final = RecoveryReport(
    agents={},
    logs={},
    pages={},
    file_bytes={},
    file_times={},
    missing_pages={},
    unknown_formats=(),
    orphans=(),
    orphans_deleted=0,
    orphan_bytes=0,
    temp_files_deleted=(),
    foreign_files=(),
    quarantined=(),
    log_troubles=(),
    adopted_pages=0,
    dropped_rows=0,
    facts=(),
    usage=FolderUsage(0, 0, 0, 0),
    counters={},
    seconds=0.0,
)
"""What a daemon starts from that does not look into its folder."""


def agent_row(image: AgentImage, checksum: bytes, last_offset: int, now_s: float) -> AgentRow:
    """The catalog row of an agent whose log ends with the record that starts at `last_offset`."""
    return AgentRow(
        namespace=image.namespace,
        agent=image.agent,
        log_name=log_name(image.namespace, image.agent),
        seq=image.seq,
        log_bytes=image.log_bytes,
        log_checksum=checksum,
        tokens=len(image.branch.tokens),
        branches=len(image.branches),
        updated_s=now_s,
        last_offset=last_offset,
        pages=pack_pages(image.page_ids()),
        summary=pack_summary(image),
    )


__all__ = ["EMPTY_REPORT", "AgentRef", "LogTrouble", "RecoveryReport", "agent_row"]
