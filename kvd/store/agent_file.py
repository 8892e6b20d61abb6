"""An exported agent as bytes: one safetensors file, checksummed as a whole, that another daemon can continue.

Theory of operation. The file is `length (u64), header (JSON), payload, xxh3_128 (16 bytes)`, as a page file is; the
last tensor is the checksum of every byte before it. Before it come the conditioning constants of formats that have
any, the agent's branch as one record of the log's own kind (text, ids, spans, tail KV), then per cache group its pages,
one a row, in frame order. The header is canonical: it is built again from what was read and must be equal.

Both ends work page by page, see `kvd.store.agent_file_io`.

Pure but for `FileSystem`. May import kvd.ids, kvd.quant.spec and the siblings errors, fs, page_file and record_codec.
"""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from kvd.quant.spec import PAGE_TOKENS
from kvd.store.errors import AgentFileInvalid, AgentFileTooNew, FilePathRefused
from kvd.store.fs import FileSystem, NotRegularFile
from kvd.store.page_file import CHECKSUM_BYTES, MAX_HEADER_BYTES
from kvd.store.record_codec import MAX_RECORD_BYTES

AGENT_FILE_VERSION: Final = 1
"""Raised when an older kvd could misread a file."""

_LENGTH: Final = struct.Struct("<Q")
_NUMBER: Final = 1 << 53
CALLERS_ERRNOS: Final = frozenset(
    (errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EINVAL)
)
"""What the path is to blame for, not the disk."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Conditioning constants of one cache group: float32 `[layers, kv_heads, k_dim]`, centre and scale."""

    group: int
    shape: tuple[int, int, int]

    @property
    def side_bytes(self) -> int:
        """Bytes of centre, and of scale."""
        layers, heads, dim = self.shape
        return 4 * layers * heads * dim


@dataclass(frozen=True, slots=True)
class AgentFileHeader:
    """What an exported agent's file says before its content.

    Attributes:
        agent, namespace: whose state it is.
        model: the model's name, for people.
        fingerprint: the model.
        numerics: version of the arithmetic and of the codec that computed the KV.
        created_s: wall clock of the export, seconds since the epoch.
        tokens: ids in the file.
        computed_tokens: of these, tokens with KV.
        format_ids: page format of each cache group.
        page_bytes: bytes of a page of each group.
        absent: (group, number) of pages that the file lacks: they lie behind a window and were lost.
        constants: of groups whose format is conditioned, in order of group.
        record_bytes: length of the record.
    """

    agent: str
    namespace: str
    model: str
    fingerprint: str
    numerics: str
    created_s: float
    tokens: int
    computed_tokens: int
    format_ids: tuple[str, ...]
    page_bytes: tuple[int, ...]
    absent: frozenset[tuple[int, int]]
    constants: tuple[Constants, ...]
    record_bytes: int

    def pages(self, group: int) -> list[int]:
        """Numbers of the sealed pages of a group that the file holds, in order of its rows."""
        return [page for page in range(self.computed_tokens // PAGE_TOKENS) if (group, page) not in self.absent]

    @property
    def file_bytes(self) -> int:
        """Exact length of the file."""
        head = header_bytes(self)
        return len(head) + sum(length for _, length in self.parts()) + CHECKSUM_BYTES

    @property
    def pages_bytes(self) -> int:
        """Bytes of all pages in the file."""
        return sum(len(self.pages(group)) * size for group, size in enumerate(self.page_bytes))

    def parts(self) -> list[tuple[str, int]]:
        """Name and length of each piece of the payload in order: constants, record, each page."""
        found: list[tuple[str, int]] = []
        for each in self.constants:
            found += [(f"conditioning.{each.group}.{side}", each.side_bytes) for side in ("centre", "scale")]
        found.append(("record", self.record_bytes))
        for group, size in enumerate(self.page_bytes):
            found += [(f"pages.{group}.{number}", size) for number in self.pages(group)]
        return found


def header_bytes(header: AgentFileHeader) -> bytes:
    """The canonical first bytes of the file: u64 length and JSON, padded with spaces to a multiple of 8."""
    metadata = {
        "format": "kvd-agent",
        "version": str(AGENT_FILE_VERSION),
        "agent": header.agent,
        "namespace": header.namespace,
        "model": header.model,
        "fingerprint": header.fingerprint,
        "numerics": header.numerics,
        "created_s": repr(header.created_s),
        "tokens": str(header.tokens),
        "computed_tokens": str(header.computed_tokens),
        "page_tokens": str(PAGE_TOKENS),
        "format_ids": ",".join(header.format_ids),
        "page_bytes": ",".join(map(str, header.page_bytes)),
        "absent": _absent_text(header.absent),
    }
    entries: dict[str, object] = {"__metadata__": metadata}
    at = 0

    def add(name: str, dtype: str, shape: Iterable[int], length: int) -> None:
        nonlocal at
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + length]}
        at += length

    for each in header.constants:
        for side in ("centre", "scale"):
            add(f"conditioning.{each.group}.{side}", "F32", each.shape, each.side_bytes)
    add("record", "U8", (header.record_bytes,), header.record_bytes)
    for group, size in enumerate(header.page_bytes):
        rows = len(header.pages(group))
        add(f"pages.{group}", "U8", (rows, size), rows * size)
    add("xxh3_128", "U8", (CHECKSUM_BYTES,), CHECKSUM_BYTES)
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _absent_text(absent: frozenset[tuple[int, int]]) -> str:
    """`group:first+pages`, joined by commas."""
    runs: list[str] = []
    for (group, _), members in groupby(enumerate(sorted(absent)), key=lambda each: (each[1][0], each[1][1] - each[0])):
        pages = [page for _, (_, page) in members]
        runs.append(f"{group}:{pages[0]}+{len(pages)}")
    return ",".join(runs)


def _absent_of(text: str, groups: int, most: int) -> frozenset[tuple[int, int]]:
    absent: set[tuple[int, int]] = set()
    for run in text.split(",") if text else ():
        group, _, pages = run.partition(":")
        first, _, count = pages.partition("+")
        if not (0 <= int(group) < groups and int(first) >= 0 and int(count) > 0 and int(first) + int(count) <= most):
            raise ValueError("an absent page that there cannot be")
        absent.update((int(group), page) for page in range(int(first), int(first) + int(count)))
    return frozenset(absent)


def parse_header(data: bytes, path: str) -> AgentFileHeader:
    """Read a header (without its u64 length). It proves nothing before the checksum has been seen to hold.

    Raises:
        AgentFileTooNew: a newer kvd wrote it.
        AgentFileInvalid: anything else that is not an exported agent.
    """
    try:
        entries = json.loads(data)
        meta = entries["__metadata__"]
        if meta["format"] != "kvd-agent":
            raise AgentFileInvalid(path=path, reason="it is another kind of safetensors file")
        version = _count(meta["version"])
        if version > AGENT_FILE_VERSION:
            raise AgentFileTooNew(path=path, found=version, supported=AGENT_FILE_VERSION)
        tokens, computed = _count(meta["tokens"]), _count(meta["computed_tokens"])
        page_bytes = tuple(_count(size) for size in str(meta["page_bytes"]).split(","))
        record_bytes = _count(entries["record"]["shape"][0])
        # nothing is counted up to a figure that no file can have: a record takes eight bytes a token
        if not computed <= tokens <= record_bytes // 8 <= MAX_RECORD_BYTES // 8:
            raise ValueError("its figures do not agree")
        header = AgentFileHeader(
            agent=str(meta["agent"]),
            namespace=str(meta["namespace"]),
            model=str(meta["model"]),
            fingerprint=str(meta["fingerprint"]),
            numerics=str(meta["numerics"]),
            created_s=float(meta["created_s"]),
            tokens=tokens,
            computed_tokens=computed,
            format_ids=tuple(str(meta["format_ids"]).split(",")),
            page_bytes=page_bytes,
            absent=_absent_of(str(meta["absent"]), len(page_bytes), computed // PAGE_TOKENS),
            constants=tuple(_constants(entries)),
            record_bytes=record_bytes,
        )
        if header_bytes(header) != _LENGTH.pack(len(data)) + data:
            raise ValueError("it is not the one its figures make")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise AgentFileInvalid(path=path, reason=f"its header is damaged ({error})") from None
    return header


def _constants(entries: dict[str, dict[str, list[int]]]) -> Iterable[Constants]:
    for name in entries:
        kind, _, rest = name.partition(".")
        if kind == "conditioning" and rest.endswith(".centre"):
            layers, heads, dim = (_count(number) for number in entries[name]["shape"])
            yield Constants(_count(rest.removesuffix(".centre")), (layers, heads, dim))


def _count(value: object) -> int:
    number = int(str(value))
    if not 0 <= number < _NUMBER:
        raise ValueError(f"{number} is out of range")
    return number


def read_header(fs: FileSystem, path: Path) -> tuple[AgentFileHeader, int]:
    """Header of an exported agent, and its length, the u64 included; of the rest only the length is looked at.

    Raises:
        FilePathRefused: no such file, a folder, a link, a pipe.
        AgentFileInvalid, AgentFileTooNew: as `parse_header`, and a file that was cut short or has more than it says.
        OSError: the disk refused.
    """
    try:
        found = fs.stat(path)
        start = fs.read(path, limit=_LENGTH.size)
        if len(start) < _LENGTH.size or found is None:
            raise AgentFileInvalid(path=str(path), reason=f"it has {len(start)} bytes")
        (length,) = _LENGTH.unpack(start)
        if length > MAX_HEADER_BYTES:
            raise AgentFileInvalid(path=str(path), reason="it is no safetensors file of kvd")
        data = fs.read(path, offset=_LENGTH.size, limit=length)
    except (NotRegularFile, IsADirectoryError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise FilePathRefused(path=str(path), reason=why_not(error)) from error
    except OSError as error:
        if error.errno in CALLERS_ERRNOS:
            raise FilePathRefused(path=str(path), reason=why_not(error)) from error
        raise
    header = parse_header(data, str(path))
    if found.file_bytes != header.file_bytes:
        raise AgentFileInvalid(
            path=str(path), reason=f"it has {found.file_bytes} bytes, its header says {header.file_bytes}"
        )
    return header, _LENGTH.size + length


def why_not(error: OSError) -> str:
    """Why a path cannot be used, in words."""
    match error:
        case NotRegularFile():
            return "it is a pipe, socket or device"
        case IsADirectoryError():
            return "it is a folder"
        case FileNotFoundError():
            return "there is no such file"
        case PermissionError():
            return "the daemon's user may not use it"
        case _:
            return "links are not followed" if error.errno == errno.ELOOP else (error.strerror or str(error))


__all__ = [
    "AGENT_FILE_VERSION",
    "CALLERS_ERRNOS",
    "AgentFileHeader",
    "Constants",
    "header_bytes",
    "parse_header",
    "read_header",
    "why_not",
]
