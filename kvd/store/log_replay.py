"""From the bytes of a log to the agent they are of; and cutting a log to the part that replays.

Used at start, and when an agent that slept is woken: both verify the same. May import siblings of kvd.store.
"""

from __future__ import annotations

from pathlib import Path

from kvd.store.agent_image import AgentImage, Layouts, apply
from kvd.store.agent_log import LogFrame, LogScan
from kvd.store.errors import RecordInvalid
from kvd.store.fs import FileSystem, write_file
from kvd.store.layout import log_name
from kvd.store.record_codec import decode_record
from kvd.store.swap_dir import aside_path


def replay(
    name: str, scan: LogScan, layouts: Layouts, full_groups: frozenset[int] | None
) -> tuple[AgentImage | None, LogFrame | None, str]:
    """What a log's good frames say.

    Args:
        name: the log's file name, which its records must agree with.
        scan: the frames.
        layouts: page layouts by (group, format_id).
        full_groups: groups whose pages hold every computed token; None: all.

    Returns:
        The agent, the last frame that replays, and why that is not the last one (empty when it is).
    """
    image: AgentImage | None = None
    last: LogFrame | None = None
    for frame in scan.frames:
        try:
            record = decode_record(frame.payload)
            if record.seq != frame.seq or log_name(record.namespace, record.agent) != name:
                raise RecordInvalid("its frame names another one", seq=frame.seq)
            image = apply(image, record, payload_end=frame.end, layouts=layouts, full_groups=full_groups)
        except RecordInvalid as error:
            return image, last, error.message
        last = frame
    return image, last, ""


def bare(last: LogFrame) -> LogScan:
    """Where a log stands that replays up to this frame; without frames, so that images of many agents keep no KV."""
    return LogScan((), last.end, last.checksum, None, last.offset)


def cut_log(fs: FileSystem, path: Path, good_bytes: int, rest: bytes | None, quarantine: Path) -> Path | None:
    """Cut a log to its good part; what is cut off goes to quarantine first when it was committed.

    Args:
        fs: the disk.
        path: the log.
        good_bytes: end of the good part.
        rest: what follows it, if it is to be kept.
        quarantine: where to.

    Returns:
        Where the rest is.

    Raises:
        OSError: the disk refused; run it again.
    """
    target = None
    if rest is not None:
        target = aside_path(fs, path.name, quarantine)
        write_file(fs, target, [rest])
    handle = fs.open_append(path)
    try:
        fs.truncate(handle, good_bytes)
        fs.fsync(handle)
    finally:
        fs.close(handle)
    return target


__all__ = ["bare", "cut_log", "replay"]
