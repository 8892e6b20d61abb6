"""Whether files of the store are what was written, byte for byte, without serving them (`kvd doctor --deep`).

Pages whose layout is known are held against the canonical header, as a load does. Of others only the checksum and the
identity can be judged. Nothing is written. May import kvd.ids and siblings of kvd.store.
"""

from __future__ import annotations

import xxhash

from kvd.ids import PageId
from kvd.store.agent_image import Layouts
from kvd.store.errors import PageCorrupt
from kvd.store.page_file import CHECKSUM_BYTES, decode_page, parse_header


def page_fault(data: bytes, page_id: PageId, fingerprint: str, layouts: Layouts) -> str:
    """Why a file's bytes are not the page its name stands for; empty when they are.

    Args:
        data: the whole file.
        page_id: the page its name stands for.
        fingerprint: the model whose folder it lies in.
        layouts: page layouts by (group, format_id); None for formats it does not know.
    """
    parsed = parse_header(data)
    if parsed is None:
        return "header unreadable"
    header, _ = parsed
    if header.page_id != page_id or header.fingerprint != fingerprint:
        return "header of another page"
    layout = layouts(header.group, header.format_id)
    if layout is None:
        end = max(0, len(data) - CHECKSUM_BYTES)
        return "" if xxhash.xxh3_128_digest(data[:end]) == data[end:] else "wrong checksum"
    try:
        decode_page(data, header, layout)
    except PageCorrupt as error:
        return f"wrong {error.reason}"
    return ""


__all__ = ["page_fault"]
