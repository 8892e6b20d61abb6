"""An agent's state as bytes and records again: joining tail fragments, and the records of a compacted log.

Pure; the disk comes in as a function. May import kvd.quant.spec, kvd.vm.text and the siblings agent_image, errors
and records only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.store.agent_image import AgentImage, BranchImage, Fragment, SegmentState
from kvd.store.errors import LogCorrupt
from kvd.store.records import AgentRecord, SegmentDelta
from kvd.vm.text import cut_spans

ReadTail = Callable[[int, int, int], bytes]
"""Tail KV of (branch, group, segment): `[kv_heads, tail_tokens, width]` per tensor, in `PageLayout` order."""


def join_tail(segment: SegmentState, layout: PageLayout, read: Callable[[Fragment], bytes | memoryview]) -> bytes:
    """The tail's KV in one piece.

    Args:
        segment: whose tail.
        layout: its page layout.
        read: verified bytes of a fragment.

    Returns:
        `[kv_heads, tail_tokens, width]` per tensor, in layout order; `tail_tokens * layout.token_bytes` bytes.
    """
    if len(segment.fragments) == 1 and segment.fragments[0].upto == segment.fragments[0].end:
        return bytes(read(segment.fragments[0]))  # bytes of bytes: no copy
    sources = [(fragment, memoryview(read(fragment))) for fragment in segment.fragments]
    parts: list[memoryview] = []
    for tensor in layout.tensors:
        heads = tensor.shape[0]
        row_bytes = tensor.tensor_bytes // (heads * PAGE_TOKENS)  # one head of one token
        per_token = tensor.offset_bytes // PAGE_TOKENS  # bytes of one token in the tensors before this one
        for head in range(heads):
            for fragment, data in sources:
                tokens = fragment.end - fragment.start
                begin = tokens * (per_token + head * row_bytes)
                parts.append(data[begin : begin + (fragment.upto - fragment.start) * row_bytes])
    return b"".join(parts)


def without_tail(branch: BranchImage) -> BranchImage:
    """The branch cut to the last page border that every segment has sealed; for tails that are rotten.

    Only for branches of which each group holds all tokens in one segment: elsewhere a border in one segment is none
    in the others, and nothing is kept.
    """
    pages = min((len(segment.pages) for segment in branch.segments), default=0) if branch.uniform else 0
    tokens = min(pages * PAGE_TOKENS, branch.computed_tokens)
    pages = tokens // PAGE_TOKENS
    text_bytes = sum(branch.token_bytes[: pages * PAGE_TOKENS])
    return replace(
        branch,
        tokens=branch.tokens[: pages * PAGE_TOKENS],
        token_bytes=branch.token_bytes[: pages * PAGE_TOKENS],
        spans=tuple(cut_spans(branch.spans, text_bytes)),
        text=branch.text[:text_bytes],
        computed_tokens=pages * PAGE_TOKENS,
        segments=tuple(
            replace(segment, pages=segment.pages[:pages], tail_tokens=0, fragments=(), tail_runs=())
            for segment in branch.segments
        ),
    )


def snapshot_records(
    image: AgentImage,
    read_tail: ReadTail,
    *,
    keep: Collection[int] | None = None,
    cut_current: bool = False,
    on_cut: Callable[[int], None] = lambda branch: None,
) -> Iterator[AgentRecord]:
    """The records of a compacted log: one `snapshot` a branch, the current one last.

    The last record has the number `image.seq`, so that the numbers of records to come do not depend on compaction.

    Args:
        image: the agent.
        read_tail: reads tails from the present log.
        keep: branches to keep (None: all); the current one always stays.
        cut_current: cut the current branch like any other.
        on_cut: told of a branch whose tail is rotten: it is cut to a page border, since no compaction would ever end
            otherwise and its log would grow for ever.

    Raises:
        LogCorrupt: the current branch's tail is rotten and stays: its ids and text are worth more than a short log.
    """
    others = sorted(number for number in image.branches if number != image.current and (keep is None or number in keep))
    numbers = [*others, image.current]
    for index, number in enumerate(numbers):
        branch = image.branches[number]
        last = index == len(numbers) - 1
        try:
            tails = [
                read_tail(number, each.group, each.segment) if each.tail_tokens else b"" for each in branch.segments
            ]
        except LogCorrupt:
            if last and not cut_current:
                raise
            branch = without_tail(branch)
            tails = [b""] * len(branch.segments)
            on_cut(number)
        yield AgentRecord(
            seq=image.seq - len(numbers) + 1 + index,
            agent=image.agent,
            namespace=image.namespace,
            kind="snapshot",
            branch=number,
            parent=None,
            base_tokens=0,
            base_text_bytes=0,
            token_ids=branch.tokens,
            token_bytes=branch.token_bytes,
            spans=branch.spans,
            text=branch.text,
            computed_tokens=branch.computed_tokens,
            segments=tuple(
                SegmentDelta(
                    group=segment.group,
                    format_id=segment.format_id,
                    kept_pages=0,
                    new_pages=segment.pages,
                    tail_start=0,
                    tail_end=segment.tail_tokens,
                    tail_kv=tail,
                    segment=segment.segment,
                    tail_runs=segment.tail_runs,
                )
                for segment, tail in zip(branch.segments, tails, strict=True)
            ),
            time_s=branch.time_s,
            numerics=branch.numerics,
            meta=dict(image.meta) if last else {},
        )


def stands_alone(record: AgentRecord) -> bool:
    """Whether a record says everything about its branch: no byte of the log before it is needed to replay it."""
    based = any(delta.kept_pages or delta.tail_start for delta in record.segments)
    return record.parent is None and not record.base_tokens and not record.base_text_bytes and not based


__all__ = ["ReadTail", "join_tail", "snapshot_records", "stands_alone", "without_tail"]
