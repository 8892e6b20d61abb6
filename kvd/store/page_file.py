"""A page as bytes on disk: one safetensors file that is canonical, so that any other byte is an error.

Theory of operation. A file is `length (u64), header (JSON), payload, xxh3_128 (16 bytes)`. The last tensor is the
checksum of every byte before it. A checksum alone would prove that the file is what somebody wrote, not that it is
*this* page: so the header is built again from what the caller expects and must be equal byte for byte. A flipped bit
that turns `layers.1` into `layers.5` still loads with ordinary readers; here it does not (P4).

The payload is in `PageLayout` order, which is the frame's memory order. The header is padded with spaces to a multiple
of 8 bytes, so that the payload is aligned for whoever maps the file.

May import kvd.ids, kvd.quant.spec, kvd.store.errors and kvd.store.records only.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import xxhash

from kvd.ids import Fingerprint, FormatId, PageId, PageKey
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.store.errors import PageCorrupt
from kvd.store.records import PositionRun

PAGE_FILE_VERSION: Final = "1"
CHECKSUM_BYTES: Final = 16
MAX_HEADER_BYTES: Final = 1 << 20
"""A header longer than this is not ours (100 layers take about 50 KB)."""

_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class PageHeader:
    """Which page a file holds; everything in it is in the file's `__metadata__`.

    Attributes:
        page_id: names the file.
        key: what the content depends on, see `kvd.ids.PageKey`.
        fingerprint: the model.
        domain: sharing domain whose text is in the page.
        group: cache group.
        format_id: page format.
        runs: positions of the tokens.
        numerics: version of the arithmetic and of the codec that computed it.
        page_tokens: tokens of the page.
    """

    page_id: PageId
    key: PageKey
    fingerprint: Fingerprint
    domain: str
    group: int
    format_id: FormatId
    runs: tuple[PositionRun, ...]
    numerics: str
    page_tokens: int = PAGE_TOKENS

    @property
    def namespace(self) -> str:
        """Whose the page is: a domain is a namespace, or an agent of one."""
        return self.domain.partition("\0")[0]


def header_bytes(header: PageHeader, layout: PageLayout) -> bytes:
    """The canonical first bytes of a page file: u64 length and JSON, padded with spaces to a multiple of 8."""
    metadata = {
        "format": "kvd-page",
        "version": PAGE_FILE_VERSION,
        "page_id": header.page_id,
        "key": header.key,
        "fingerprint": header.fingerprint,
        "domain": header.domain,
        "group": str(header.group),
        "format_id": header.format_id,
        "runs": ",".join(f"{run.start}+{run.tokens}" for run in header.runs),
        "numerics": header.numerics,
        "page_tokens": str(header.page_tokens),
    }
    text = f'{{"__metadata__":{_compact(metadata)},{_tensor_entries(layout)}'.encode("ascii")
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


@lru_cache(maxsize=64)
def _tensor_entries(layout: PageLayout) -> str:
    """The rest of the header's JSON, which all pages of a layout share; making it takes longer than hashing a page.

    A layout is immutable and hashed by identity; there are a few in a process.
    """
    entries: dict[str, object] = {}
    for tensor in layout.tensors:
        begin, end = tensor.offset_bytes, tensor.offset_bytes + tensor.tensor_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    end = layout.payload_bytes
    entries["xxh3_128"] = {"dtype": "U8", "shape": [CHECKSUM_BYTES], "data_offsets": [end, end + CHECKSUM_BYTES]}
    return _compact(entries).removeprefix("{")


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


def file_bytes_for(header: PageHeader, layout: PageLayout) -> int:
    """Exact length of the page's file."""
    return len(header_bytes(header, layout)) + layout.payload_bytes + CHECKSUM_BYTES


def encode_page(header: PageHeader, layout: PageLayout, payload: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    """The parts of a page file in order: header, payload (not copied), checksum.

    Raises:
        PageCorrupt: the payload is not `layout.payload_bytes` long.
    """
    if len(payload) != layout.payload_bytes:
        raise PageCorrupt(page_id=header.page_id, reason="payload length")
    head = header_bytes(header, layout)
    digest = xxhash.xxh3_128(head)
    digest.update(payload)
    return head, payload, digest.digest()


def decode_page(data: bytes | memoryview, expected: PageHeader, layout: PageLayout) -> memoryview:
    """Verify a whole page file against the page that is wanted.

    Args:
        data: the file.
        expected: the page.
        layout: its layout.

    Returns:
        The payload, a view into `data` of `layout.payload_bytes` bytes.

    Raises:
        PageCorrupt: length, header or checksum differ; nothing of the file may be used.
    """
    view = memoryview(data).cast("B")
    head = header_bytes(expected, layout)
    if view[: len(head)] != head:
        offset = next(
            (i for i, (a, b) in enumerate(zip(view, head, strict=False)) if a != b), min(len(view), len(head))
        )
        raise PageCorrupt(page_id=expected.page_id, reason="header", offset=offset)
    end = len(head) + layout.payload_bytes
    if len(view) != end + CHECKSUM_BYTES:
        raise PageCorrupt(page_id=expected.page_id, reason="length", offset=min(len(view), end + CHECKSUM_BYTES))
    if xxhash.xxh3_128_digest(view[:end]) != view[end:]:
        raise PageCorrupt(page_id=expected.page_id, reason="checksum")
    return view[len(head) : end]


def parse_header(data: bytes) -> tuple[PageHeader, int] | None:
    """Read the page's identity from the first bytes of a file, for recovery without a catalog.

    What is returned is only as good as the disk: `decode_page` still has to verify it when the page is loaded.

    Args:
        data: at least the header; more is ignored.

    Returns:
        The header and its length in bytes, the u64 included; None when this is not a page file of ours.
    """
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    if length > MAX_HEADER_BYTES or len(data) < _LENGTH.size + length:
        return None
    try:
        meta = json.loads(data[_LENGTH.size : _LENGTH.size + length])["__metadata__"]
        if meta["format"] != "kvd-page" or meta["version"] != PAGE_FILE_VERSION:
            return None
        header = PageHeader(
            page_id=PageId(str(meta["page_id"])),
            key=PageKey(str(meta["key"])),
            fingerprint=Fingerprint(str(meta["fingerprint"])),
            domain=str(meta["domain"]),
            group=int(meta["group"]),
            format_id=FormatId(str(meta["format_id"])),
            runs=runs_of_text(str(meta["runs"])),
            numerics=str(meta["numerics"]),
            page_tokens=int(meta["page_tokens"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return header, _LENGTH.size + length


@lru_cache(maxsize=4096)  # a start reads thousands of headers, and most pages of a number have the same run
def runs_of_text(text: str) -> tuple[PositionRun, ...]:
    """Read `start+tokens,start+tokens`; ValueError when it is not that."""
    runs = []
    for part in text.split(",") if text else ():
        start, _, tokens = part.partition("+")
        runs.append(PositionRun(int(start), int(tokens)))
    return tuple(runs)


__all__ = [
    "CHECKSUM_BYTES",
    "MAX_HEADER_BYTES",
    "PAGE_FILE_VERSION",
    "PageHeader",
    "decode_page",
    "encode_page",
    "file_bytes_for",
    "header_bytes",
    "parse_header",
    "runs_of_text",
]
