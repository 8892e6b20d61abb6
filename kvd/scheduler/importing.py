"""Import: an agent from an exported file, written page by page and committed by one record.

Theory of operation. The whole file is verified before anything is written. Then its pages are written under new ids and
keys (they belong to this agent's sharing domain, and an id is never used twice), and then one record. Its fsync is the
import: before it the pages are orphans, which a restart removes; after it the agent is there as if it had been
found at start. A replaced agent gets the file's branch beside its own, in one record, and lets go of its own only then:
there is no moment without the one or the other.

KV that was lost at the export is computed before the record is written, since no record can say that it lacks.

Owner: the engine thread. May import kvd.errors, kvd.ids, kvd.quant, kvd.store, kvd.vm and siblings.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from kvd.errors import AgentExists, BudgetExceeded, Cancelled, EnvironmentFault, InvalidParams, KvdError
from kvd.ids import FormatId, GroupId, Namespace, PageId
from kvd.quant.conditioning import Conditioning, save_conditioning
from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.scheduler.admission import context_full
from kvd.scheduler.agents import Agent, Baseline, Branch, page_runs
from kvd.scheduler.commit import commit, delete_agent, make_recordable, sweep
from kvd.scheduler.core import EngineCore
from kvd.scheduler.endings import give_end, use
from kvd.scheduler.file_steps import file_step, port_path, resumable, swap_answer
from kvd.scheduler.requests import AgentRef, JobRequest
from kvd.scheduler.restore import restore_branch
from kvd.scheduler.views import agent_info
from kvd.scheduler.waiting import Stop, Wait, raise_if_stopped
from kvd.scheduler.waking import wake
from kvd.store.agent_file import AgentFileHeader, Constants
from kvd.store.agent_file_io import AgentFileReader
from kvd.store.agent_image import BranchImage, SegmentState
from kvd.store.errors import AgentFileForeign, AgentFileInvalid, QuotaExceeded, RecordInvalid, SwapOff
from kvd.store.page_file import PageHeader
from kvd.store.record_codec import decode_record
from kvd.store.records import AgentRecord, PageEntry, SegmentDelta
from kvd.store.side_files import write_small_file
from kvd.store.swap_ops import StoreHands
from kvd.vm.errors import SpaceInUse
from kvd.vm.keys import KeyChain
from kvd.vm.window import most_pages

Importing = Generator[Wait, None, dict[str, object]]


def warm_first(
    core: EngineCore, refs: Sequence[AgentRef], stop: Stop, work: Generator[Wait, None, object]
) -> Generator[Wait, None, object]:
    """Do `work` once the agents it is about are awake, or imported if the warm tier has them and the data folder not.

    A file that turns out to be no use is named in the log; the work then finds no such agent.

    Raises:
        Cancelled: while an agent wakes, or during an import; the agent then stays in the tier.
        DiskFault: an agent's log cannot be read now.
        Exception: as `work`.
    """
    yield from wake(core, refs, stop)
    for ref in refs:
        path = core.warm.paths.pop(ref, None)
        if path is None or core.agents.known(ref) is not None:
            continue
        try:
            told = yield from _import_file(core, ref, path, replaces=False, stop=stop)
            core.log("warm_import", level="info", agent=str(ref), path=str(path), tokens=told["tokens"])
        except Cancelled:
            core.warm.paths[ref] = path
            raise
        except KvdError as error:
            core.log("warm_file_skipped", path=str(path), reason=error.message)
    return (yield from work)


def import_agent(core: EngineCore, request: JobRequest, stop: Stop) -> Importing:
    """Make the agent from the file `path`; one that exists is only replaced with `replace`.

    Raises:
        SwapOff: an import is written to disk, and nothing is.
        AgentExists, SpaceInUse: there is such an agent; it is pinned.
        FilePathRefused, AgentFileInvalid, AgentFileTooNew, AgentFileForeign: the file cannot be used.
        ContextFull, BudgetExceeded, QuotaExceeded, Cancelled, EnvironmentFault: in all these cases nothing was made.
    """
    path = port_path(request.arguments["path"])
    if core.swap_off:
        raise SwapOff
    core.warm.paths.pop(request.ref, None)
    return (yield from _import_file(core, request.ref, path, replaces=bool(request.arguments["replace"]), stop=stop))


def _import_file(core: EngineCore, ref: AgentRef, path: Path, *, replaces: bool, stop: Stop) -> Importing:
    old = core.agents.find(ref)
    if old is not None and not replaces:
        raise AgentExists(f"agent {ref} exists already; replace overwrites it", agent=ref.agent)
    if old is not None and old.pinned:
        raise SpaceInUse(f"agent {ref} is pinned; unpin it first", agent=ref.agent)
    reader = AgentFileReader(path)
    header = yield from file_step(core, path, lambda hands: reader.open(hands.fs))
    while not (yield from file_step(core, path, lambda hands: reader.verify(hands.fs))):
        raise_if_stopped(stop)
    raise_if_stopped(stop)
    layouts = yield from _known_layouts(core, reader)
    data = yield from file_step(core, path, lambda hands: reader.part(hands.fs, "record"))
    record = _checked_record(core, reader, data, layouts)
    _refuse_too_large(core, ref, header, layouts)
    agent = old if old is not None else Agent(ref, created_s=time.time())
    record = _own_record(core, agent, record)
    written: list[PageId] = []
    try:
        _refuse_over_disk_quota(core, ref, header.pages_bytes)
        yield from file_step(core, path, lambda hands: hands.admit(header.pages_bytes))
        for group, segment in enumerate(record.segments):
            for number in header.pages(group):
                raise_if_stopped(stop)
                page_header = _page_header(core, ref, segment, number)
                written.append(page_header.page_id)
                yield from file_step(core, path, partial(_write_page, reader, page_header, layouts[group]))
        if not _gap(record):
            absent = frozenset(record.segments[group].new_pages[number].page_id for group, number in header.absent)
            yield from _append(core, agent, old, record, absent)
    except Exception:
        core.forgotten |= dict.fromkeys(written)
        core.sweep_due = True
        sweep(core)
        raise
    if _gap(record):
        yield from _compute_lost(core, agent, old, record, stop)
    sweep(core)
    return {**agent_info(core, agent), "durable": True, "computed_again_tokens": _gap(record)}


def _known_layouts(core: EngineCore, reader: AgentFileReader) -> Generator[Wait, None, list[PageLayout]]:
    """The layouts of the file's pages; constants that come with it are kept in the data folder first.

    Raises:
        AgentFileForeign: another model, other numerics, an unknown format.
    """
    header, path = reader.header, str(reader.path)
    spec = core.spec
    if header.fingerprint != spec.fingerprint:
        here = f"{spec.model_name} ({spec.fingerprint})"
        raise AgentFileForeign(path=path, what="model", found=f"{header.model} ({header.fingerprint})", here=here)
    if header.numerics != core.numerics:
        raise AgentFileForeign(path=path, what="numerics", found=header.numerics, here=core.numerics)
    for each in header.constants:
        constants = yield from file_step(core, reader.path, partial(_read_constants, reader, each))
        group = spec.groups[each.group] if each.group < len(spec.groups) else None
        expected = None if group is None else (len(group.layer_indices), group.layer.kv_heads, group.layer.k_dim)
        if group is None or each.shape != expected:
            raise AgentFileInvalid(path=path, reason=f"its constants of group {each.group} do not fit the model")
        layout = group.layout(group.format("q4c", constants.digest))
        if layout.format_id != header.format_ids[each.group]:
            continue
        yield from file_step(core, reader.path, partial(_keep_constants, constants))
        if (each.group, layout.format_id) not in core.formats.layouts:
            core.formats.learn(each.group, layout, constants.layers)
    layouts: list[PageLayout] = []
    for number, format_id in enumerate(header.format_ids):
        known = core.formats.layouts.get((number, format_id))
        if known is None or len(header.format_ids) != len(spec.groups):
            here = ", ".join(sorted({name for _, name in core.formats.layouts}))
            raise AgentFileForeign(path=path, what="page format", found=", ".join(header.format_ids), here=here)
        layouts.append(known)
    if tuple(layout.payload_bytes for layout in layouts) != header.page_bytes:
        raise AgentFileInvalid(path=path, reason="its pages have another size than their format says")
    return layouts


def _read_constants(reader: AgentFileReader, each: Constants, hands: StoreHands) -> Conditioning:
    sides = [
        np.frombuffer(reader.part(hands.fs, f"conditioning.{each.group}.{side}"), "<f4").reshape(each.shape)
        for side in ("centre", "scale")
    ]
    try:
        return Conditioning(*sides)
    except InvalidParams as error:
        raise AgentFileInvalid(path=str(reader.path), reason=error.message) from error


def _keep_constants(constants: Conditioning, hands: StoreHands) -> None:
    save_conditioning(constants, hands.folder.root / "conditioning", partial(write_small_file, hands.fs))


def _checked_record(
    core: EngineCore, reader: AgentFileReader, data: bytes, layouts: Sequence[PageLayout]
) -> AgentRecord:
    """The record, if it is what an export writes: a checksum says that a file is whole, not that it makes sense."""
    header = reader.header
    try:
        record = decode_record(data)
        record.text.decode()
    except (RecordInvalid, UnicodeDecodeError) as error:
        raise AgentFileInvalid(path=str(reader.path), reason=f"its record cannot be read ({error})") from error
    pages, tail_tokens = divmod(record.computed_tokens, PAGE_TOKENS)
    problems = {
        "it does not agree with the header": (len(record.token_ids), record.computed_tokens)
        != (header.tokens, header.computed_tokens),
        "its KV is longer than its text": record.computed_tokens > len(record.token_ids),
        "its tokens do not stand for its text": len(record.token_ids) != len(record.token_bytes)
        or sum(record.token_bytes) != len(record.text),
        "its spans do not tile its text": sum(span.text_bytes for span in record.spans) != len(record.text),
        "it has tokens that the model does not": max(record.token_ids, default=0) >= core.spec.vocab_tokens,
        "it does not have one segment for each cache group": [(s.group, s.segment) for s in record.segments]
        != [(group, 0) for group in range(len(layouts))],
        "its open page lacks KV": any(
            (s.tail_start, s.tail_end, len(s.tail_kv)) != (0, tail_tokens, tail_tokens * layout.token_bytes)
            for s, layout in zip(record.segments, layouts, strict=False)
        ),
        "its pages are not those of its tokens": any(
            len(s.new_pages) != pages or s.kept_pages or s.tail_runs or s.format_id != header.format_ids[s.group]
            for s in record.segments[: len(layouts)]
        ),
        "a page is absent that its next step sees": resumable(
            set(header.absent), [group.layer.window for group in core.spec.groups], header.computed_tokens
        )
        != header.computed_tokens,
    }
    for problem, holds in problems.items():
        if holds:
            raise AgentFileInvalid(path=str(reader.path), reason=problem)
    return record


def _refuse_over_disk_quota(core: EngineCore, ref: AgentRef, pages_bytes: int) -> None:
    """Nothing of a namespace is given up for an import: who brings an agent may make room first."""
    core.govern()
    quota_bytes = core.disk_quotas.quotas.get(ref.namespace)
    used_bytes = core.disk_quotas.used.get(ref.namespace, 0)
    if quota_bytes is not None and used_bytes + pages_bytes > quota_bytes:
        raise QuotaExceeded(
            used_bytes=used_bytes, wanted_bytes=pages_bytes, quota_bytes=quota_bytes, namespace=ref.namespace
        )


def _refuse_too_large(core: EngineCore, ref: AgentRef, header: AgentFileHeader, layouts: Sequence[PageLayout]) -> None:
    """An agent that could never run here is refused now, not when somebody needs it."""
    if header.tokens > core.spec.context_tokens:
        raise context_full(core, header.tokens, 0)
    groups = zip(core.spec.groups, layouts, strict=True)
    needed = sum(
        most_pages(header.tokens, group.layer.window, core.chunk_tokens, PAGE_TOKENS) * layout.payload_bytes
        for group, layout in groups
    )
    quota = core.pager.budget.quotas.get(ref.namespace)
    if quota is not None and needed > quota:
        raise BudgetExceeded(
            f"{header.tokens} tokens need {needed} bytes of pages, the quota of namespace {ref.namespace!r} is {quota}",
            needed_bytes=needed,
            namespace=ref.namespace,
            namespace_quota_bytes=quota,
        )
    if needed > core.pager.usable_bytes:
        raise BudgetExceeded(
            f"{header.tokens} tokens need {needed} bytes of pages, the budget leaves {core.pager.usable_bytes}",
            needed_bytes=needed,
            usable_bytes=core.pager.usable_bytes,
            budget_bytes=core.pager.statistics().budget_bytes,
        )


def _own_record(core: EngineCore, agent: Agent, record: AgentRecord) -> AgentRecord:
    """The file's record as the next one of this agent's log: a branch of its own, pages with new ids and keys."""
    domain = Namespace(core.sharing.domain_of(agent.ref))
    segments = []
    for segment in record.segments:
        chain = KeyChain(domain, core.spec.fingerprint, GroupId(segment.group), core.numerics)
        chain.extend(record.token_ids[: len(segment.new_pages) * PAGE_TOKENS], FormatId(segment.format_id))
        entries = tuple(
            PageEntry(core.pager.new_page_id(), key, page_runs(number)) for number, key in enumerate(chain.keys)
        )
        segments.append(replace(segment, new_pages=entries))
    return replace(
        record,
        seq=agent.seq + 1,
        agent=agent.ref.agent,
        namespace=agent.ref.namespace,
        kind="snapshot" if agent.logged else "create",
        branch=agent.next_branch,
        segments=tuple(segments),
        meta={"pinned": False, "created_s": agent.created_s, "ttl_s": None},
    )


def _page_header(core: EngineCore, ref: AgentRef, segment: SegmentDelta, number: int) -> PageHeader:
    entry = segment.new_pages[number]
    return PageHeader(
        page_id=entry.page_id,
        key=entry.key,
        fingerprint=core.spec.fingerprint,
        domain=core.sharing.domain_of(ref),
        group=segment.group,
        format_id=FormatId(segment.format_id),
        runs=entry.runs,
        numerics=core.numerics,
    )


def _write_page(reader: AgentFileReader, header: PageHeader, layout: PageLayout, hands: StoreHands) -> None:
    number = header.runs[0].start // PAGE_TOKENS
    hands.write_page(header, layout, reader.part(hands.fs, f"pages.{header.group}.{number}"))


def _append(
    core: EngineCore, agent: Agent, old: Agent | None, record: AgentRecord, absent: frozenset[PageId]
) -> Generator[Wait, None, None]:
    """Commit the record and take the branch in."""
    result = yield from swap_answer(lambda take: core.store.append_record(record, take, missing=absent))
    if result.error is not None or result.image is None:
        if old is None:
            # a first record that the disk refused may be there all the same
            yield from swap_answer(lambda take: core.store.delete_log(agent.ref, take))
        raise result.error or EnvironmentFault("the record was not applied")
    core.stats.records_written += 1
    agent.seq, agent.logged, agent.refused = result.image.seq, True, None
    notices: list[str] = []
    branch = restore_branch(core, agent.ref, record.branch, result.image.branches[record.branch], notices)
    branch.missing = absent
    _take_in(core, agent, branch, old)


def _take_in(core: EngineCore, agent: Agent, branch: Branch, old: Agent | None) -> None:
    """The branch is the agent's only one from here on."""
    others = list(agent.branches.values())
    agent.branches[branch.branch_id] = branch
    agent.next_branch = branch.branch_id + 1
    give_end(core, agent, None)
    use(core, agent)
    core.make_current(agent, branch)
    for other in others:
        core.close_branch(agent, other)
    agent.compaction_due = bool(others)
    core.sweep_due = True
    if old is None:
        core.agents.add(agent)


def _compute_lost(
    core: EngineCore, agent: Agent, old: Agent | None, record: AgentRecord, stop: Stop
) -> Generator[Wait, None, None]:
    """The same where KV was lost at the export: what no record can say is computed first.

    Until its record is written the branch stands beside the agent's own ones, which go only then.
    """
    stored = BranchImage(
        tokens=record.token_ids,
        token_bytes=record.token_bytes,
        spans=record.spans,
        text=record.text,
        computed_tokens=record.computed_tokens,
        segments=tuple(SegmentState(s.group, s.format_id, s.new_pages, 0, ()) for s in record.segments),
        time_s=record.time_s,
        numerics=record.numerics,
    )
    branch = restore_branch(core, agent.ref, record.branch, stored, [])
    branch.logged, branch.baseline = False, Baseline()
    before, ttl_s, agent.ttl_s = agent.current, agent.ttl_s, None
    agent.branches[branch.branch_id] = branch
    agent.next_branch = branch.branch_id + 1
    if old is None:
        agent.current = branch.branch_id
        core.agents.add(agent)
    try:
        yield from make_recordable(core, agent, branch, stop)
        core.make_current(agent, branch)
        done = yield from commit(core, agent, branch, "snapshot")
        if not done.durable:
            raise EnvironmentFault(f"the imported agent could not be made durable: {done.reason}")
    except Exception:
        if old is None:
            yield from delete_agent(core, agent)
        else:
            agent.ttl_s = ttl_s
            core.make_current(agent, agent.branches[before])
            core.close_branch(agent, branch)
            sweep(core)
        raise
    del agent.branches[branch.branch_id]
    _take_in(core, agent, branch, agent)


def _gap(record: AgentRecord) -> int:
    """Tokens besides a pending one whose KV the file lacks."""
    return max(0, len(record.token_ids) - 1 - record.computed_tokens)


__all__ = ["import_agent", "warm_first"]
