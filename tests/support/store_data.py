"""Small layouts, pages and agents for the store's tests: real formats, tiny geometry."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvd.ids import Fingerprint, FormatId, PageId, PageKey
from kvd.quant.spec import PAGE_TOKENS, PageLayout, named_format
from kvd.store.agent_image import AgentImage
from kvd.store.fork_notes import ForkNote
from kvd.store.fs import FileSystem
from kvd.store.layout import DataFolder
from kvd.store.page_file import PageHeader
from kvd.store.records import AgentRecord, PageEntry, PositionRun, SegmentDelta
from kvd.store.recovery import recover
from kvd.store.recovery_report import RecoveryReport
from kvd.store.sleeping import READ_AGENTS
from kvd.store.swap_store import SwapStore
from kvd.vm.text import Span

FINGERPRINT = Fingerprint(hashlib.blake2b(b"a tiny model", digest_size=16).hexdigest())
NUMERICS = "1/reference"
ROOT = Path("/data/kvd")


def memory_folder() -> Iterator[Path]:
    """Body of a fixture: a private folder, on a memory disk where there is one (SQLite's fsyncs are slow elsewhere)."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="kvd-", dir=base))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def tiny_layout(*, layers: tuple[int, ...] = (0, 1), kv_heads: int = 2, name: str = "q4", dim: int = 32) -> PageLayout:
    """Layout of a group of small layers."""
    page_format = named_format(name, k_dim=dim, v_dim=dim, layer_count=len(layers))
    return PageLayout(layer_indices=layers, kv_heads=kv_heads, k_dim=dim, v_dim=dim, page_format=page_format)


LAYOUTS = (tiny_layout(layers=(0,), kv_heads=1), tiny_layout(layers=(1,), kv_heads=2, name="q2"))


def layouts(group: int, format_id: str) -> PageLayout | None:
    """What the composition root gives the store."""
    if group < len(LAYOUTS) and LAYOUTS[group].format_id == format_id:
        return LAYOUTS[group]
    return None


def hex_of(*parts: object) -> str:
    """32 hex digits that depend on the parts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def kv_of(layout: PageLayout, seed: object, *, tokens: int = PAGE_TOKENS) -> bytes:
    """Bytes of the first `tokens` tokens of a page whose content depends on `seed`, in layout order."""
    page = random.Random(repr(seed)).randbytes(layout.payload_bytes)
    return slice_kv(layout, page, 0, tokens)


def slice_kv(layout: PageLayout, page: bytes, start: int, end: int) -> bytes:
    """Tokens [start, end) of a page: `[kv_heads, end - start, width]` per tensor."""
    parts = []
    for tensor in layout.tensors:
        heads = tensor.shape[0]
        row = tensor.tensor_bytes // heads // PAGE_TOKENS
        for head in range(heads):
            at = tensor.offset_bytes + head * PAGE_TOKENS * row
            parts.append(page[at + start * row : at + end * row])
    return b"".join(parts)


def header_of(page: PageEntry, group: int, *, domain: str = "default") -> PageHeader:
    """Header of a page of one of `LAYOUTS`."""
    return PageHeader(
        page_id=page.page_id,
        key=page.key,
        fingerprint=FINGERPRINT,
        domain=domain,
        group=group,
        format_id=FormatId(LAYOUTS[group].format_id),
        runs=page.runs,
        numerics=NUMERICS,
    )


@dataclass
class ModelAgent:
    """A simple model of an agent: whole KV in memory, no fragments. Makes records and says what must be read back.

    Attributes:
        tokens: ids of the current branch.
        tails: open page content per group (whole page bytes).
        pages: sealed pages per group.
        kv_of: whose KV it began with; empty: its own.
    """

    name: str
    namespace: str = "default"
    seq: int = 0
    branch: int = 0
    tokens: tuple[int, ...] = ()
    pages: tuple[tuple[PageEntry, ...], ...] = ((), ())
    created: bool = False
    salt: int = 0
    kv_of: str = ""

    def page_bytes(self, group: int, number: int) -> bytes:
        """Content of page `number`: depends on the tokens up to its end, as KV does."""
        return random.Random(repr((self.kv_of or self.name, self.salt, group, number))).randbytes(
            LAYOUTS[group].payload_bytes
        )

    def tail(self, group: int) -> bytes:
        """What a tail read must return."""
        tokens = len(self.tokens) % PAGE_TOKENS
        return slice_kv(LAYOUTS[group], self.page_bytes(group, len(self.tokens) // PAGE_TOKENS), 0, tokens)

    def entry(self, group: int, number: int) -> PageEntry:
        """The sealed page `number`."""
        page_id = PageId(hex_of(self.namespace, self.name, self.salt, group, number))
        return PageEntry(page_id, PageKey(hex_of("key", page_id)), (PositionRun(number * PAGE_TOKENS, PAGE_TOKENS),))

    def fork(self, name: str, tokens: int | None = None) -> tuple[ModelAgent, ForkNote]:
        """Another agent with the first tokens (None: all), and the note that makes it durable."""
        kept = len(self.tokens) if tokens is None else tokens
        child = replace(
            self,
            name=name,
            seq=1,
            branch=1,
            tokens=self.tokens[:kept],
            pages=tuple(pages[: kept // PAGE_TOKENS] for pages in self.pages),
            kv_of=self.kv_of or self.name,
        )
        return child, ForkNote(self.namespace, self.name, name, self.branch, kept, 1, 2.0, {"named": True})

    def turn(self, tokens: int, *, time_s: float = 1.0) -> tuple[ModelAgent, AgentRecord, list[tuple[int, PageEntry]]]:
        """Append tokens; returns the next state, the record, and the pages it seals (group, entry)."""
        begin, end = len(self.tokens), len(self.tokens) + tokens
        ids = tuple(random.Random(position).randrange(50_000) for position in range(begin, end))
        sealed: list[tuple[int, PageEntry]] = []
        segments = []
        pages = []
        for group, layout in enumerate(LAYOUTS):
            new = tuple(self.entry(group, number) for number in range(begin // PAGE_TOKENS, end // PAGE_TOKENS))
            sealed += [(group, page) for page in new]
            tail_end = end % PAGE_TOKENS
            tail_start = 0 if new else begin % PAGE_TOKENS
            kv = slice_kv(layout, self.page_bytes(group, end // PAGE_TOKENS), tail_start, tail_end)
            segments.append(
                SegmentDelta(group, layout.format_id, len(self.pages[group]), new, tail_start, tail_end, kv)
            )
            pages.append(self.pages[group] + new)
        record = AgentRecord(
            seq=self.seq + 1,
            agent=self.name,
            namespace=self.namespace,
            kind="turn" if self.created else "create",
            branch=self.branch,
            parent=None,
            base_tokens=begin,
            base_text_bytes=begin,
            token_ids=ids,
            token_bytes=(1,) * tokens,
            spans=(Span("generated", tokens),) if tokens else (),
            text=b"x" * tokens,
            computed_tokens=end,
            segments=tuple(segments),
            time_s=time_s,
            numerics=NUMERICS,
            meta={"named": True},
        )
        after = replace(self, seq=self.seq + 1, tokens=self.tokens + ids, pages=tuple(pages), created=True)
        return after, record, sealed


def content(image: AgentImage, read_tail: object = None) -> object:
    """An image without the places of its bytes: what must survive compaction."""
    return (
        image.namespace,
        image.agent,
        image.current,
        dict(image.meta),
        image.seq,
        {
            number: (
                branch.tokens,
                branch.token_bytes,
                branch.spans,
                branch.text,
                branch.computed_tokens,
                branch.time_s,
                branch.numerics,
                tuple(
                    (
                        segment.group,
                        segment.format_id,
                        segment.pages,
                        segment.tail_tokens,
                        segment.segment,
                        segment.tail_runs,
                        read_tail(number, segment.group, segment.segment)
                        if callable(read_tail) and segment.tail_tokens
                        else None,
                    )
                    for segment in branch.segments
                ),
            )
            for number, branch in image.branches.items()
        },
    )


def open_store(
    fs: FileSystem, root: Path = ROOT, *, quota_bytes: int = 1 << 40, read_agents: int = READ_AGENTS
) -> tuple[DataFolder, RecoveryReport, SwapStore]:
    """Open the folder, recover, and make a store: what a daemon does at start."""
    folder = DataFolder(root, fs)
    folder.open()
    report = recover(folder, FINGERPRINT, layouts, fs, read_agents=read_agents)
    store = SwapStore(
        folder=folder,
        fingerprint=FINGERPRINT,
        fs=fs,
        quota_bytes=quota_bytes,
        layouts=layouts,
        recovered=report,
    )
    return folder, report, store
