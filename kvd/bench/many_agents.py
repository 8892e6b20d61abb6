"""A data folder of many agents, made through the store's own classes, as a daemon that served them would leave it.

Everything is what it says it is: pages with their checksums, logs, catalog; only the KV is zeros. Zeros are left out of
the files where the file system can do that, so that agents of a real model's geometry take little room and time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvd.ids import Fingerprint, FormatId, PageId, PageKey
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.store.fs import FileHandle, RealFileSystem
from kvd.store.layout import DataFolder
from kvd.store.page_file import PageHeader
from kvd.store.records import AgentRecord, PageEntry, PositionRun, SegmentDelta
from kvd.store.recovery import recover
from kvd.store.swap_ops import AppendRecordOp, SwapOp, WritePageOp
from kvd.store.swap_store import SwapStore
from kvd.vm.text import Span

TAIL_TOKENS: Final = 100
"""Tokens of each agent after its last whole page; their KV is in the log."""

NAMESPACE: Final = "default"
_QUOTA_BYTES: Final = 1 << 50
_HOLE_BYTES: Final = 1 << 14


class SparseFileSystem(RealFileSystem):
    """Leaves long runs of zeros out of files, and flushes nothing: a folder for a bench may go with the power."""

    def write(self, handle: FileHandle, data: bytes | memoryview) -> None:
        """See `FileSystem.write`."""
        if len(data) < _HOLE_BYTES or bytes(data).count(0) != len(data):
            super().write(handle, data)
            return
        end = os.lseek(handle, 0, os.SEEK_END) + len(data)
        os.ftruncate(handle, end)
        os.lseek(handle, end, os.SEEK_SET)

    def fsync(self, handle: FileHandle) -> None:
        """Nothing."""

    def fsync_dir(self, path: Path) -> None:
        """Nothing."""


def make_agents(
    root: Path, fingerprint: Fingerprint, layouts: Sequence[PageLayout], *, agents: int, pages: int, numerics: str
) -> int:
    """Fill a data folder.

    Args:
        root: the folder; made if missing.
        fingerprint: of the model.
        layouts: of each cache group's pages.
        agents: how many.
        pages: whole pages of each group of each agent.
        numerics: what their headers and records say.

    Returns:
        Tokens of each agent.

    Raises:
        KvdError: the store refused.
    """
    fs = SparseFileSystem()
    folder = DataFolder(root, fs)
    folder.open()
    known: dict[tuple[int, str], PageLayout] = {(n, layout.format_id): layout for n, layout in enumerate(layouts)}
    try:
        found = recover(folder, fingerprint, lambda group, name: known.get((group, name)), fs)
        store = SwapStore(
            folder=folder,
            fingerprint=fingerprint,
            fs=fs,
            quota_bytes=_QUOTA_BYTES,
            layouts=lambda group, name: known.get((group, name)),
            recovered=found,
        )
        payloads = [bytes(layout.payload_bytes) for layout in layouts]
        for number in range(agents):
            for op in _agent_ops(f"agent-{number}", fingerprint, layouts, payloads, pages, numerics):
                result = store.perform(op)
                if result.error is not None:
                    raise result.error
        store.close()
    finally:
        folder.close()
    return pages * PAGE_TOKENS + TAIL_TOKENS


def _agent_ops(
    name: str,
    fingerprint: Fingerprint,
    layouts: Sequence[PageLayout],
    payloads: Sequence[bytes],
    pages: int,
    numerics: str,
) -> list[SwapOp]:
    """What the engine would send for an agent's first turn: its pages, then the record."""
    ops: list[SwapOp] = []
    deltas: list[SegmentDelta] = []
    for group, (layout, payload) in enumerate(zip(layouts, payloads, strict=True)):
        entries: list[PageEntry] = []
        for page in range(pages):
            runs = (PositionRun(page * PAGE_TOKENS, PAGE_TOKENS),)
            entry = PageEntry(PageId(secrets.token_hex(16)), PageKey(secrets.token_hex(16)), runs)
            header = PageHeader(
                page_id=entry.page_id,
                key=entry.key,
                fingerprint=fingerprint,
                domain=NAMESPACE,
                group=group,
                format_id=FormatId(layout.format_id),
                runs=runs,
                numerics=numerics,
            )
            entries.append(entry)
            ops.append(WritePageOp(header, layout, payload))
        tail = bytes(TAIL_TOKENS * layout.token_bytes)
        deltas.append(SegmentDelta(group, layout.format_id, 0, tuple(entries), 0, TAIL_TOKENS, tail))
    tokens = pages * PAGE_TOKENS + TAIL_TOKENS
    text = (name + " ").encode()
    text = (text * (tokens // len(text) + 1))[:tokens]
    record = AgentRecord(
        seq=1,
        agent=name,
        namespace=NAMESPACE,
        kind="create",
        branch=1,
        parent=None,
        base_tokens=0,
        base_text_bytes=0,
        token_ids=tuple(text),
        token_bytes=(1,) * tokens,
        spans=(Span("content", tokens),),
        text=text,
        computed_tokens=tokens,
        segments=tuple(deltas),
        time_s=1.0,
        numerics=numerics,
        meta={"pinned": False, "created_s": 1.0},
    )
    return [*ops, AppendRecordOp(record)]


__all__ = ["NAMESPACE", "TAIL_TOKENS", "SparseFileSystem", "make_agents"]
