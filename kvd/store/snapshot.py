"""An agent's state as bytes and records again: joining tail fragments, and the records of a compacted log.

Pure; the disk comes in as a function. May import kvd.quant.spec, kvd.store.agent_image and kvd.store.records only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvd.quant.spec import PAGE_TOKENS, PageLayout
from kvd.store.agent_image import AgentImage, Fragment, SegmentState
from kvd.store.records import AgentRecord, SegmentDelta

ReadTail = Callable[[int, int], bytes]
"""Tail KV of (branch, group): `[kv_heads, tail_tokens, width]` per tensor, in `PageLayout` order."""


def join_tail(segment: SegmentState, layout: PageLayout, read: Callable[[Fragment], bytes | memoryview]) -> bytes:
    """The tail's KV in one piece.

    Args:
        segment: whose tail.
        layout: its page layout.
        read: verified bytes of a fragment.

    Returns:
        `[kv_heads, tail_tokens, width]` per tensor, in layout order; `tail_tokens * layout.token_bytes` bytes.
    """
    sources = [(fragment, memoryview(read(fragment))) for fragment in segment.fragments]
    if len(sources) == 1 and sources[0][0].upto == sources[0][0].end:
        return bytes(sources[0][1])
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


def snapshot_records(
    image: AgentImage, read_tail: ReadTail, *, keep: frozenset[int] | None = None
) -> Iterator[AgentRecord]:
    """The records of a compacted log: one `snapshot` a branch, the current one last.

    The last record has the number `image.seq`, so that the numbers of records to come do not depend on compaction.

    Args:
        image: the agent.
        read_tail: reads tails from the present log.
        keep: branches to keep (None: all); the current one always stays.
    """
    others = sorted(number for number in image.branches if number != image.current and (keep is None or number in keep))
    numbers = [*others, image.current]
    for index, number in enumerate(numbers):
        branch = image.branches[number]
        last = index == len(numbers) - 1
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
                    tail_kv=read_tail(number, segment.group) if segment.tail_tokens else b"",
                )
                for segment in branch.segments
            ),
            time_s=branch.time_s,
            numerics=branch.numerics,
            meta=dict(image.meta) if last else {},
        )


__all__ = ["ReadTail", "join_tail", "snapshot_records"]
