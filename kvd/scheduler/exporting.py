"""Export: an agent's current branch as one file, written page by page.

Theory of operation. It runs as a job of the agent, so nobody changes it meanwhile. Pages in RAM are taken from there,
the others from swap; nothing is computed and no page is loaded, so an export needs no place in the budget but for one
page's copy. A page that turns out to be lost ends the KV where the next step would see it, and the file is begun anew:
its header says how much it holds. The ids beyond travel without KV, as the agent itself has them.

Owner: the engine thread. May import kvd.errors, kvd.ids, kvd.quant, kvd.store, kvd.vm and siblings.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvd.errors import Draining
from kvd.ids import GroupId
from kvd.quant.conditioning import Conditioning
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.scheduler.agents import Branch, page_runs
from kvd.scheduler.file_steps import file_step, port_path, resumable
from kvd.scheduler.memory import LOST
from kvd.scheduler.requests import AgentRef, JobRequest
from kvd.scheduler.waiting import Stop, Wait, raise_if_stopped
from kvd.store.agent_file import AgentFileHeader, Constants
from kvd.store.agent_file_io import AgentFileWriter
from kvd.store.errors import FilePathRefused
from kvd.store.page_file import PageHeader
from kvd.store.record_codec import encode_record
from kvd.store.records import AgentRecord, PageEntry, SegmentDelta
from kvd.store.swap_ops import StoreHands
from kvd.vm.page import OPEN, READABLE

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore

Exporting = Generator[Wait, None, dict[str, object]]
LostPage = tuple[int, int]
"""Group and number of a page whose bytes are gone."""


def export_agent(core: EngineCore, request: JobRequest, stop: Stop) -> Exporting:
    """Write the agent's current branch to `path`; what is in the way is only replaced with `force`.

    Raises:
        FilePathRefused: the path cannot be used.
        Cancelled, EnvironmentFault: there is no file, or the one that was there.
    """
    branch = core.agents.get(request.ref).branch
    path = port_path(request.arguments["path"])
    lost: set[LostPage] = set()
    tails = yield from _tails(core, request.ref, branch, path)
    writer: AgentFileWriter | None = None
    try:
        while True:
            plan = _plan(core, request.ref, branch, tails, lost)
            writer = yield from file_step(core, path, partial(_begin, path, bool(request.arguments["force"]), plan))
            missed = yield from _write_pages(core, branch, writer, plan.header, stop)
            if missed is None:
                file_bytes = yield from file_step(core, path, partial(_finish, writer))
                writer = None
                break
            lost.add(missed)
            _abandon(core, writer)
            writer = None
    except BaseException:
        if writer is not None:
            _abandon(core, writer)
        raise
    header = plan.header
    lost_tokens = max(0, len(branch.tokens) - 1 - header.computed_tokens)
    reason = f"KV from token {header.computed_tokens} on is lost: the importer computes it again"
    return {
        "agent": request.ref.agent,
        "namespace": request.ref.namespace,
        "path": str(path),
        "file_bytes": file_bytes,
        "tokens": header.tokens,
        "computed_tokens": header.computed_tokens,
        "lost_tokens": lost_tokens,
        "lost_reason": reason if lost_tokens else None,
    }


@dataclass(frozen=True)
class _Plan:
    """What an export writes before the pages."""

    header: AgentFileHeader
    parts: tuple[bytes, ...]


def _tails(
    core: EngineCore, ref: AgentRef, branch: Branch, path: Path
) -> Generator[Wait, None, list[tuple[int, bytes]] | None]:
    """Tokens and KV of each group's open page; None when one of them is lost."""
    tails: list[tuple[int, bytes]] = []
    for group, tail in enumerate(core.pager.tails(branch.space)):
        data = b""
        if tail is not None and tail.state in OPEN:
            data = core.memory.tail_bytes(tail, 0, tail.tokens)
        elif tail is not None:
            read = partial(_read_tail, ref, branch.branch_id, group)
            data = (yield from file_step(core, path, read)) or b""
            if len(data) != tail.tokens * core.memory.layouts(branch.space)[group].token_bytes:
                return None
        tails.append((0 if tail is None else tail.tokens, data))
    return tails


def _read_tail(ref: AgentRef, branch: int, group: int, hands: StoreHands) -> bytes | None:
    try:
        return hands.read_tail(ref.namespace, ref.agent, branch, group)
    except LOST:
        return None


def _plan(
    core: EngineCore, ref: AgentRef, branch: Branch, tails: list[tuple[int, bytes]] | None, lost: set[LostPage]
) -> _Plan:
    computed = branch.computed if tails is not None else branch.computed // PAGE_TOKENS * PAGE_TOKENS
    windows = [group.layer.window for group in core.spec.groups]
    computed = resumable(lost, windows, computed)
    pages = computed // PAGE_TOKENS
    layouts = core.memory.layouts(branch.space)
    segments = []
    for group, segment in enumerate(core.pager.segments(branch.space)):
        tail_tokens, tail_kv = tails[group] if tails is not None and computed == branch.computed else (0, b"")
        entries = (PageEntry(p.page_id, p.key, page_runs(number)) for number, p in enumerate(segment.refs[:pages]))
        segments.append(SegmentDelta(group, branch.format_ids[group], 0, tuple(entries), 0, tail_tokens, tail_kv))
    now_s = time.time()
    record = encode_record(
        AgentRecord(
            seq=1,
            agent=ref.agent,
            namespace=ref.namespace,
            kind="snapshot",
            branch=1,
            parent=None,
            base_tokens=0,
            base_text_bytes=0,
            token_ids=tuple(branch.tokens),
            token_bytes=tuple(branch.token_bytes),
            spans=tuple(branch.spans),
            text=bytes(branch.text),
            computed_tokens=computed,
            segments=tuple(segments),
            time_s=now_s,
            numerics=core.numerics,
        )
    )
    constants = [(group, each) for group, layout in enumerate(layouts) if (each := _constants_of(core, layout))]
    header = AgentFileHeader(
        agent=ref.agent,
        namespace=ref.namespace,
        model=core.spec.model_name,
        fingerprint=core.spec.fingerprint,
        numerics=core.numerics,
        created_s=now_s,
        tokens=len(branch.tokens),
        computed_tokens=computed,
        format_ids=branch.format_ids,
        page_bytes=tuple(layout.payload_bytes for layout in layouts),
        absent=frozenset((group, number) for group, number in lost if number < pages),
        constants=tuple(Constants(group, _shape(each)) for group, each in constants),
        record_bytes=len(record),
    )
    sides = [np.ascontiguousarray(side, "<f4").tobytes() for _, each in constants for side in (each.centre, each.scale)]
    return _Plan(header, (*sides, record))


def _constants_of(core: EngineCore, layout: PageLayout) -> Conditioning | None:
    operators = [core.formats.conditioning.get((layout.format_id, layer)) for layer in layout.layer_indices]
    known = [each for each in operators if each is not None]
    if not known:
        return None
    return Conditioning(np.stack([each.centre for each in known]), np.stack([each.scale for each in known]))


def _shape(constants: Conditioning) -> tuple[int, int, int]:
    layers, heads, dim = constants.centre.shape
    return layers, heads, dim


def _begin(path: Path, force: bool, plan: _Plan, hands: StoreHands) -> AgentFileWriter:
    root = os.path.realpath(hands.folder.root)
    if os.path.commonpath([root, os.path.realpath(path.parent)]) == root:
        raise FilePathRefused(path=str(path), reason="it is inside kvd's data folder")
    writer = AgentFileWriter(path, force=force, notes=hands.folder.exports_folder())
    try:
        writer.begin(hands.fs, plan.header)
        for part in plan.parts:
            writer.append(hands.fs, part)
    except BaseException:
        writer.abandon(hands.fs)
        raise
    return writer


def _finish(writer: AgentFileWriter, hands: StoreHands) -> int:
    return writer.finish(hands.fs)


def _abandon(core: EngineCore, writer: AgentFileWriter) -> None:
    """Remove what was written; nobody waits for it. With a store that is closing the next start does."""
    with contextlib.suppress(Draining):
        core.store.file_step(str(writer.path), lambda hands: writer.abandon(hands.fs), lambda result: None)


def _write_pages(
    core: EngineCore, branch: Branch, writer: AgentFileWriter, header: AgentFileHeader, stop: Stop
) -> Generator[Wait, None, LostPage | None]:
    """Write all pages; the first one that is lost ends it and is returned."""
    for group in range(len(header.format_ids)):
        for number in header.pages(group):
            raise_if_stopped(stop)
            page = core.pager.page(branch.space, GroupId(group), number)
            data = None
            if page.frame is not None and page.state in READABLE:
                data = core.memory.pool.export(page.frame)
            facts = core.memory.facts(page.ref.page_id)
            append = partial(_append_page, writer, facts.header, facts.layout, data)
            if not (yield from file_step(core, writer.path, append)):
                return group, number
    return None


def _append_page(
    writer: AgentFileWriter, header: PageHeader, layout: PageLayout, data: bytes | None, hands: StoreHands
) -> bool:
    """Append a page, read from swap when it is not given; False when it is lost."""
    payload: bytes | memoryview
    try:
        payload = data if data is not None else hands.read_page(header, layout)
    except LOST:
        return False
    writer.append(hands.fs, payload)
    return True


__all__ = ["export_agent"]
