"""Reads the tail of a branch out of its agent's log, fragment by fragment, each checked against what was committed.

May import kvd.errors and siblings of kvd.store.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from kvd.errors import AgentNotFound
from kvd.store.agent_image import AgentImage, Fragment, Layouts
from kvd.store.errors import FormatUnknown, LogCorrupt
from kvd.store.fs import FileSystem, NotRegularFile
from kvd.store.snapshot import join_tail


def read_tail(fs: FileSystem, path: Path, image: AgentImage, layouts: Layouts, name: tuple[int, int, int]) -> bytes:
    """Tail KV of a segment, in layout order; empty when it has none.

    Args:
        fs: the disk.
        path: the log.
        image: the agent as the log says.
        layouts: page layouts.
        name: branch, group, segment.

    Raises:
        AgentNotFound: no such branch or segment.
        FormatUnknown: no layout for its format.
        LogCorrupt: the bytes are not what was committed.
        OSError: the disk refused.
    """
    branch, group, segment = name
    try:
        state = image.branches[branch].segment(group, segment)
    except KeyError as error:
        raise AgentNotFound(f"Agent {image.agent!r} has no branch {branch} with segment {group}.{segment}.") from error
    if not state.fragments:
        return b""
    layout = layouts(group, state.format_id)
    if layout is None:
        raise FormatUnknown(group=group, format_id=state.format_id)
    return join_tail(state, layout, lambda fragment: _fragment(fs, path, fragment))


def _fragment(fs: FileSystem, path: Path, fragment: Fragment) -> bytes:
    try:
        data = fs.read(path, offset=fragment.offset, limit=fragment.kv_bytes)
    except (FileNotFoundError, NotADirectoryError, NotRegularFile):
        data = b""
    if len(data) != fragment.kv_bytes or xxhash.xxh3_128_digest(data) != fragment.checksum:
        reason = "length" if len(data) != fragment.kv_bytes else "checksum"
        raise LogCorrupt(path=str(path), offset=fragment.offset, reason=reason)
    return data


__all__ = ["read_tail"]
