"""What can go wrong with kvd's durable state, split by fault.

    EnvironmentFault
    ├── FileFault            a system call failed on a file outside the data folder
    ├── DiskFault            a system call failed (full, read-only, I/O error); `errno`, `path`
    │   └── LogUnreadable    the disk refused to read the agent's log at start; it is kept as it is
    ├── QuotaExceeded        the write would pass the disk quota; both figures
    ├── DataFolderExposed    not a folder of kvd's, not empty, and readable by others
    ├── DataFolderLocked     another daemon holds the folder; `pid`
    ├── DataFolderTooNew     written by a newer kvd; both versions
    ├── DataFolderMalformed  VERSION is not a version
    ├── PageCorrupt          a page file is not, byte for byte, what was written
    ├── PageMissing          no file for that page
    │   └── PageDropped      swap is off: a page that left RAM is gone
    ├── SwapOff              swap is off: nothing is written
    ├── LogCorrupt           a log's tail fragment no longer has its checksum
    └── LogVanished          the log is shorter than what was committed, or gone
        └── LogDamaged       the log is there, but a replay would not get through it
    CallerError
    ├── FilePathRefused      a path for an export or import cannot be used
    ├── AgentFileInvalid     not an exported agent, or a damaged one
    ├── AgentFileTooNew      exported by a newer kvd; both versions
    └── AgentFileForeign     of another model, arithmetic or page format
    InternalError
    ├── RecordInvalid        a record cannot be encoded, decoded or applied to its agent
    ├── PageNotDurable       a record names pages whose files are not durable; nothing was written
    ├── PageReferenced       a page that a log still names was to be deleted; nothing was deleted
    └── FormatUnknown        no layout is known for a segment's page format

May import kvd.errors only.
"""

from __future__ import annotations

import errno as errno_names
import os

from kvd.errors import CallerError, EnvironmentFault, InternalError


class DiskFault(EnvironmentFault):
    """A system call on the data folder failed. What was durable before is still durable.

    Attributes:
        nameless: the message without what was worked on, which may be anybody's agent.
    """

    name = "disk"

    def __init__(self, doing: str, path: str, error: OSError) -> None:
        code = error.errno or 0
        reason, advice = os.strerror(code), "Check the disk that holds the data folder; it is retried."
        self.nameless = f"{reason if code else 'it failed'}. {advice}"
        super().__init__(
            f"{doing} failed: {reason if code else error}. {advice}",
            path=path,
            errno=code,
            errno_name=errno_names.errorcode.get(code, ""),
        )


class FileFault(EnvironmentFault):
    """A system call on an export's or import's file failed. No file was left, no agent was made."""

    name = "file"

    def __init__(self, path: str, error: OSError) -> None:
        code = error.errno or 0
        reason = os.strerror(code) if code else str(error)
        super().__init__(
            f"{path} cannot be read or written: {reason}. Check its disk, or use another one.",
            path=path,
            errno=code,
            errno_name=errno_names.errorcode.get(code, ""),
        )


class FilePathRefused(CallerError):
    """What is at the path of an export or import, or is not there, makes it useless; nothing was touched."""

    name = "file_refused"

    def __init__(self, *, path: str, reason: str, exists: bool = False) -> None:
        super().__init__(f"{path} cannot be used: {reason}.", path=path, reason=reason, exists=exists)


class AgentFileInvalid(CallerError):
    """The file is not an exported agent, or not as it was written. Nothing of it was used."""

    name = "agent_file_invalid"

    def __init__(self, *, path: str, reason: str) -> None:
        super().__init__(f"{path} is no exported agent that can be used: {reason}.", path=path, reason=reason)


class AgentFileTooNew(CallerError):
    """A newer kvd exported the agent. Nothing of it was used."""

    name = "agent_file_too_new"

    def __init__(self, *, path: str, found: int, supported: int) -> None:
        super().__init__(
            f"{path} has version {found}; this kvd reads up to {supported}. Upgrade kvd.",
            path=path,
            found=found,
            supported=supported,
        )


class AgentFileForeign(CallerError):
    """The agent was computed by another model or arithmetic, or in a page format that is not known here."""

    name = "agent_file_foreign"

    def __init__(self, *, path: str, what: str, found: str, here: str) -> None:
        super().__init__(
            f"{path} was exported with {what} {found}; this daemon has {here}. Its KV cannot be used here.",
            path=path,
            what=what,
            found=found,
            here=here,
        )


class LogUnreadable(DiskFault):
    """The agent has a log that could not be read at start. It is neither served nor replaced nor deleted."""

    name = "log_unreadable"

    def __init__(self, *, agent: str, path: str) -> None:
        EnvironmentFault.__init__(
            self,
            f"The log of agent {agent!r} could not be read when kvd started. Check the disk that holds the data folder "
            "and restart kvd; the log is kept.",
            agent=agent,
            path=path,
        )


class DataFolderExposed(EnvironmentFault):
    """The folder is not kvd's, holds files, and others may read it. Its mode is not ours to change: untouched."""

    name = "data_folder_exposed"

    def __init__(self, *, path: str, mode: int) -> None:
        super().__init__(
            f"{path} holds files that are not kvd's and is open to others (mode {mode:o}). Use a folder of its own, "
            f"such as {path}/kvd, or run `chmod 700 {path}` first.",
            path=path,
            mode=f"{mode:o}",
        )


class QuotaExceeded(EnvironmentFault):
    """The write would take the data folder, or the files of one namespace, past a quota. Nothing was written.

    Attributes:
        over_bytes: by how much.
        quota_bytes: the quota.
    """

    name = "quota_exceeded"

    def __init__(
        self,
        *,
        used_bytes: int,
        wanted_bytes: int,
        quota_bytes: int,
        reserved_bytes: int = 0,
        namespace: str | None = None,
    ) -> None:
        what = "The data folder holds" if namespace is None else f"The files of namespace {namespace!r} hold"
        of_it = "agents or raise the disk" if namespace is None else "agents of it or raise its disk"
        kept = f", {reserved_bytes} are kept free for the catalog and logs," if reserved_bytes else ""
        super().__init__(
            f"{what} {used_bytes} bytes{kept} and {wanted_bytes} more would pass the quota of "
            f"{quota_bytes}. Delete {of_it} quota.",
            used_bytes=used_bytes,
            wanted_bytes=wanted_bytes,
            reserved_bytes=reserved_bytes,
            quota_bytes=quota_bytes,
        )
        if namespace is not None:
            self.data["namespace"] = namespace
        self.over_bytes = used_bytes + wanted_bytes + reserved_bytes - quota_bytes
        self.quota_bytes = quota_bytes


class DataFolderLocked(EnvironmentFault):
    """Another daemon owns the data folder.

    Attributes:
        pid: the owner's process id, None when it could not be read.
    """

    name = "data_folder_locked"

    def __init__(self, *, path: str, pid: int | None) -> None:
        owner = "another process" if pid is None else f"process {pid}"
        super().__init__(
            f"The data folder is in use by {owner}. Stop it or use another --data-dir.", path=path, pid=pid
        )
        self.pid = pid


class DataFolderTooNew(EnvironmentFault):
    """The folder was written by a newer format. Nothing in it was touched."""

    name = "data_folder_too_new"

    def __init__(self, *, path: str, found: int, supported: int) -> None:
        super().__init__(
            f"{path} has format {found}; this kvd reads up to {supported}. Upgrade kvd or use another data folder.",
            path=path,
            found=found,
            supported=supported,
        )


class DataFolderMalformed(EnvironmentFault):
    """VERSION does not hold a format number. Nothing in the folder was touched."""

    name = "data_folder_malformed"

    def __init__(self, *, path: str, content: bytes) -> None:
        super().__init__(
            f"{path} does not hold a format number. Restore it, or delete it if the folder holds nothing to keep.",
            path=path,
            content=content[:64],
        )


class PageCorrupt(EnvironmentFault):
    """A page file differs from what was written. It is never served.

    Attributes:
        reason: `length`, `header`, `checksum` or `payload length`.
        offset: first byte known to differ, None when unknown.
    """

    name = "page_corrupt"

    def __init__(self, *, page_id: str, reason: str, offset: int | None = None) -> None:
        place = "" if offset is None else f" at byte {offset}"
        super().__init__(
            f"The swap file of page {page_id} is corrupt: wrong {reason}{place}. Its tokens are computed again.",
            page_id=page_id,
            reason=reason,
            offset=offset,
        )
        self.reason = reason
        self.offset = offset


class PageMissing(EnvironmentFault):
    """There is no swap file of that page."""

    name = "page_missing"

    def __init__(self, *, page_id: str) -> None:
        super().__init__(f"Page {page_id} has no swap file. Its tokens are computed again.", page_id=page_id)


class PageDropped(PageMissing):
    """Swap is off, so a page that made room for others is gone; its tokens are computed again."""

    name = "page_dropped"


class SwapOff(EnvironmentFault):
    """The daemon keeps KV in RAM only, and what was asked for would have written it to disk. Nothing was written."""

    name = "swap_off"

    def __init__(self) -> None:
        super().__init__("Swap is off: this daemon writes no KV to disk. Start kvd serve with --swap on for that.")


class LogCorrupt(EnvironmentFault):
    """The bytes of a log that were good when they were read first are not any more. They are never served."""

    name = "log_corrupt"

    def __init__(self, *, path: str, offset: int, reason: str) -> None:
        super().__init__(
            f"An agent's log is corrupt at byte {offset}: wrong {reason}. Its tail is computed again.",
            path=path,
            offset=offset,
            reason=reason,
        )


class LogVanished(EnvironmentFault):
    """A log is gone or shorter than what was committed. A `create` or `snapshot` record starts it anew."""

    name = "log_vanished"

    def __init__(self, *, path: str, committed_bytes: int, file_bytes: int) -> None:
        super().__init__(
            f"An agent's log lost committed bytes: {file_bytes} of {committed_bytes} are left. "
            "Something else changed the data folder; the agent is written anew.",
            path=path,
            committed_bytes=committed_bytes,
            file_bytes=file_bytes,
        )


class LogDamaged(LogVanished):
    """A replay of the log would stop at a bad frame: nothing appended to it would be durable. Nothing was written.

    The agent is known as before. A record that stands alone begins a new log, which keeps the other branches.
    """

    name = "log_damaged"

    def __init__(self, *, path: str) -> None:
        EnvironmentFault.__init__(
            self,
            "An agent's log does not hold what was committed any more. Something else changed the data folder, or its "
            "disk rots; the agent is written anew.",
            path=path,
        )


class RecordInvalid(InternalError):
    """A record does not follow from its agent's state. The state and the log are unchanged.

    Attributes:
        seq: the record's number, None when it could not be decoded so far.
    """

    name = "record_invalid"

    def __init__(self, reason: str, *, seq: int | None = None) -> None:
        super().__init__(f"Log record {'?' if seq is None else seq} is invalid: {reason}.", seq=seq, reason=reason)
        self.seq = seq
        self.reason = reason


class PageNotDurable(InternalError):
    """A record names pages that have no durable file. Nothing was written; write the pages and append again."""

    name = "page_not_durable"

    def __init__(self, *, page_ids: tuple[str, ...]) -> None:
        super().__init__(
            f"{len(page_ids)} pages of the record have no durable swap file; the turn stays in memory until they do.",
            page_ids=list(page_ids),
        )
        self.page_ids = page_ids


class PageReferenced(InternalError):
    """A log still names the page, or one that could not be read may do so; its file stays."""

    name = "page_referenced"

    def __init__(self, *, page_id: str, references: int, unreadable_logs: int = 0) -> None:
        super().__init__(
            f"Page {page_id} is named by {references} agents' logs, {unreadable_logs} logs could not be read: "
            "it was not deleted.",
            page_id=page_id,
            references=references,
            unreadable_logs=unreadable_logs,
        )


class FormatUnknown(InternalError):
    """No layout is known for a page format (its conditioning constants may be lost)."""

    name = "format_unknown"

    def __init__(self, *, group: int, format_id: str) -> None:
        super().__init__(
            f"No layout is known for format {format_id} of cache group {group}.", group=group, format_id=format_id
        )


__all__ = [
    "DataFolderExposed",
    "DataFolderLocked",
    "DataFolderMalformed",
    "DataFolderTooNew",
    "DiskFault",
    "FormatUnknown",
    "LogCorrupt",
    "LogDamaged",
    "LogUnreadable",
    "LogVanished",
    "PageCorrupt",
    "PageDropped",
    "PageMissing",
    "PageNotDurable",
    "PageReferenced",
    "QuotaExceeded",
    "RecordInvalid",
    "SwapOff",
]
