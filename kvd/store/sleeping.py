"""Agents whose logs nobody has read yet, and which logs need not be read at start.

Theory of operation. A start must not cost what all agents together weigh. The catalog has, for each agent, how far its
log was committed, the pages that its branches map and what a list shows of it. Its word is taken when cheap facts agree
with it: the log has the length of the row, and at the place where the last record should start there are this record's
number, length and checksum (28 bytes; the checksum continues those of all records before it, so that no other log,
and no older state of this one, ends like that); and each page has a row, and a file of the row's length. Such an agent
sleeps: nothing else of it is read until somebody uses it. Then its log is read whole, and every byte is verified as a
start without a catalog would (`kvd.store.log_replay`); pages are verified when they are loaded, as ever.

Agents that were used last are read at start all the same, as far as that costs next to nothing, and so are those that
are pinned. The catalog may lag behind the logs after a kill, never run ahead of them: a log that is longer than its row
says is read.

May import kvd.ids and siblings of kvd.store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack

from kvd.ids import PageId
from kvd.store.agent_image import AgentImage
from kvd.store.agent_log import FRAME, LogScan, is_last_frame
from kvd.store.catalog import AgentRow, CatalogContents
from kvd.store.fs import FileStat, FileSystem

AgentRef = tuple[str, str]
"""(namespace, agent)."""

READ_AGENTS: Final = 32
"""How many of the agents that were used last are read at start."""

READ_BYTES: Final = 16 << 20
"""What their logs take together at most: tens of milliseconds."""

_ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """What can be said of an agent without its log.

    Attributes:
        computed_tokens: of the current branch, as the other figures of a branch.
        text_bytes: length of its text.
        format_ids: page format of each cache group, in order.
        all_formats: (group, format id) of every branch.
        numerics: version of the arithmetic that computed it.
        pinned: the user pinned it.
        created_s: wall clock of its first record.
        ttl_s: it ends so long after its last use; None: never.
        used_s: wall clock of its last record.
    """

    computed_tokens: int
    text_bytes: int
    format_ids: tuple[str, ...]
    all_formats: tuple[tuple[int, str], ...]
    numerics: str
    pinned: bool
    created_s: float
    ttl_s: float | None = None
    used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SleepingAgent:
    """An agent that the catalog vouches for.

    Attributes:
        row: its row.
        page_ids: every page that any of its branches maps.
        summary: what a list shows of it.
    """

    row: AgentRow
    page_ids: tuple[PageId, ...]
    summary: AgentSummary

    @property
    def scan(self) -> LogScan:
        """Where its log stands."""
        return LogScan((), self.row.log_bytes, self.row.log_checksum, None, self.row.last_offset)


def pack_pages(page_ids: Iterable[PageId]) -> bytes:
    """Page ids as a row has them: 16 bytes each, ascending."""
    return b"".join(sorted(map(bytes.fromhex, page_ids)))


def pack_summary(image: AgentImage) -> bytes:
    """What a row says of an agent, as msgpack."""
    branch = image.branch
    segments = sorted(branch.segments, key=lambda each: (each.group, each.segment))
    formats = {(each.group, each.format_id) for other in image.branches.values() for each in other.segments}
    fields = [
        branch.computed_tokens,
        len(branch.text),
        [each.format_id for each in segments],
        [list(each) for each in sorted(formats)],
        branch.numerics,
        bool(image.meta.get("pinned", False)),
        float(str(image.meta.get("created_s", 0.0))),
        image.ttl_s,
        image.used_s,
    ]
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def sleeping(row: AgentRow) -> SleepingAgent | None:
    """The agent of a row; None for a row that does not say all of it (another kvd wrote it)."""
    if not row.summary or row.last_offset < 0 or len(row.pages) % _ID_BYTES:
        return None
    try:
        fields: Any = msgpack.unpackb(row.summary, raw=False)
        computed, text_bytes, format_ids, formats, numerics, pinned, created_s, *more = fields
        ttl_s, used_s = more or (None, row.updated_s)  # rows of an older kvd say neither
        summary = AgentSummary(
            int(computed),
            int(text_bytes),
            tuple(map(str, format_ids)),
            tuple((int(group), str(name)) for group, name in formats),
            str(numerics),
            bool(pinned),
            float(created_s),
            None if ttl_s is None else float(ttl_s),
            float(used_s),
        )
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    pages, step = row.pages.hex(), 2 * _ID_BYTES
    return SleepingAgent(row, tuple(PageId(pages[at : at + step]) for at in range(0, len(pages), step)), summary)


def who_sleeps(
    fs: FileSystem,
    folder: Path,
    logs: Mapping[str, FileStat],
    contents: CatalogContents,
    page_files: Mapping[PageId, int],
    *,
    read_agents: int = READ_AGENTS,
    read_bytes: int = READ_BYTES,
) -> dict[AgentRef, SleepingAgent]:
    """The agents whose logs need not be read now.

    Args:
        fs: the disk.
        folder: where logs are.
        logs: what is there, by name.
        contents: the catalog's.
        page_files: length of each page's file.
        read_agents: how many of those used last are read although they need not be.
        read_bytes: bytes of their logs, together.
    """
    found: dict[AgentRef, SleepingAgent] = {}
    for agent in _candidates(contents, logs, page_files):
        row = agent.row
        if read_agents > 0 and row.log_bytes <= read_bytes:
            read_agents, read_bytes = read_agents - 1, read_bytes - row.log_bytes
        elif _ends_as_committed(fs, folder / row.log_name, row):
            found[row.namespace, row.agent] = agent
    return found


def _candidates(
    contents: CatalogContents, logs: Mapping[str, FileStat], page_files: Mapping[PageId, int]
) -> Iterator[SleepingAgent]:
    """Agents whose rows agree with the lengths of all their files, the one that was used last first."""
    for row in sorted(contents.agents.values(), key=lambda row: row.updated_s, reverse=True):
        log = logs.get(row.log_name)
        if log is None or log.is_folder or log.is_special or log.file_bytes != row.log_bytes:
            continue
        agent = sleeping(row)
        if agent is not None and not agent.summary.pinned and _has_files(agent.page_ids, contents, page_files):
            yield agent


def _has_files(page_ids: Collection[PageId], contents: CatalogContents, page_files: Mapping[PageId, int]) -> bool:
    return all(
        page_id in contents.pages and contents.pages[page_id].file_bytes == page_files.get(page_id)
        for page_id in page_ids
    )


def _ends_as_committed(fs: FileSystem, path: Path, row: AgentRow) -> bool:
    try:
        head = fs.read(path, offset=row.last_offset, limit=FRAME.size)
    except OSError:
        return False  # whoever reads the log whole has a name for what is wrong with it
    frame_bytes = row.log_bytes - row.last_offset
    return is_last_frame(head, seq=row.seq, checksum=row.log_checksum, frame_bytes=frame_bytes)


__all__ = [
    "READ_AGENTS",
    "READ_BYTES",
    "AgentRef",
    "AgentSummary",
    "SleepingAgent",
    "pack_pages",
    "pack_summary",
    "sleeping",
    "who_sleeps",
]
