"""Files and folders of the simulated disk: what programs see, what is certain, and the changes in between."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Write:
    """Bytes put at an offset; `doubtful` once a flush of them failed."""

    offset: int
    data: bytes
    doubtful: bool = False


@dataclass
class Truncate:
    """A new length."""

    file_bytes: int
    doubtful: bool = False


@dataclass
class File:
    """Content as programs see it, as is certain, and the changes in between."""

    live: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Write | Truncate] = field(default_factory=list)
    mode: int = 0o600
    mtime: int = 0


@dataclass
class Folder:
    """Names as programs see them, as are certain, and the changes in between."""

    live: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[list[tuple[str, File | Folder | None]]] = field(default_factory=list)
    mode: int = 0o700


def change_content(content: bytearray, change: Write | Truncate) -> None:
    """Carry out one change of a file."""
    if isinstance(change, Truncate):
        del content[change.file_bytes :]
        content.extend(bytes(change.file_bytes - len(content)))
        return
    if len(content) < change.offset:
        content.extend(bytes(change.offset - len(content)))
    content[change.offset : change.offset + len(change.data)] = change.data
