"""What queries see of a segment: tiles of tokens, the visible part of each, masks at its edges.

A tile whose tokens follow each other in the sequence (any tile of a uniform segment) needs two integers to know what is
visible; a tile that holds several runs looks its positions up. May import numpy, kvd.quant.spec and
kvd.attention.interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvd.attention.interface import Run, Segment
from kvd.quant.spec import PAGE_TOKENS

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TileSpan:
    """Tokens [start, end) of a segment.

    Attributes:
        start: number of the first token in the segment.
        end: one past the last.
        position: position in the sequence of the first.
        positions: of all of them, ascending, when they do not simply count up from `position`; else None.
    """

    start: int
    end: int
    position: int
    positions: Positions | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the tile."""
        return self.end - self.start


def tile_spans(segment: Segment, tile_tokens: int, first_visible: int, last_visible: int) -> Iterator[TileSpan]:
    """Cut what queries can see of a segment into tiles that start on page borders.

    Args:
        segment: the tokens.
        tile_tokens: tokens of a tile, a multiple of 256.
        first_visible: lowest position any query sees (0 or less without a window).
        last_visible: highest position any query sees.
    """
    runs = segment.runs
    stop = _tokens_before(runs, last_visible + 1)
    first = _tokens_before(runs, first_visible) // PAGE_TOKENS * PAGE_TOKENS
    scattered = positions_of(runs) if len(runs) > 1 else None
    for start in range(first, stop, tile_tokens):
        end = min(start + tile_tokens, stop)
        if scattered is None:
            yield TileSpan(start, end, runs[0].start + start)
            continue
        positions = scattered[start:end]
        position = int(positions[0])
        # Ascending, so equal ends mean that nothing is missing between them.
        whole = int(positions[-1]) - position == end - start - 1
        yield TileSpan(start, end, position, None if whole else positions)


def positions_of(runs: Sequence[Run]) -> Positions:
    """Position of each token of some runs: int64 [tokens]."""
    starts, tokens = np.array(runs, np.int64).reshape(-1, 2).T
    ends = np.cumsum(tokens)
    return np.repeat(starts - (ends - tokens), tokens) + np.arange(ends[-1] if len(ends) else 0)


def visible_range(span: TileSpan, query_start: int, queries: int, window: int | None) -> tuple[int, int, bool]:
    """Which tokens of a tile a block of queries sees.

    Args:
        span: the tile.
        query_start: position of the block's first query.
        queries: queries of the block.
        window: tokens a query sees, itself included; None for all.

    Returns:
        (low, high, masked): all tokens of the tile that some query sees are in [low, high); `masked` when not every
        query sees all of these.
    """
    query_last = query_start + queries - 1
    if span.positions is None:
        high = min(span.tokens, query_last + 1 - span.position)
        low = 0 if window is None else max(0, query_start - window + 1 - span.position)
        first, last = span.position + low, span.position + high - 1
    else:
        high = int(np.searchsorted(span.positions, query_last, "right"))
        low = 0 if window is None else int(np.searchsorted(span.positions, query_start - window + 1))
        if low >= high:
            return low, high, False
        first, last = int(span.positions[low]), int(span.positions[high - 1])
    masked = last > query_start or (window is not None and first < query_last - window + 1)
    return low, high, masked


def hidden(
    span: TileSpan, low: int, high: int, query_start: int, queries: int, window: int | None
) -> npt.NDArray[np.bool_]:
    """True where token low + j of a tile is not visible to query i of a block: bool [queries, high - low]."""
    if span.positions is None:
        keys: Positions = np.arange(span.position + low, span.position + high)
    else:
        keys = span.positions[low:high]
    ages = np.arange(query_start, query_start + queries)[:, None] - keys[None]
    unseen: npt.NDArray[np.bool_] = ages < 0
    if window is not None:
        unseen |= ages >= window
    return unseen


def _tokens_before(runs: Sequence[Run], position: int) -> int:
    """How many tokens of some runs lie before a position."""
    return sum(min(max(position - run.start, 0), run.tokens) for run in runs)
