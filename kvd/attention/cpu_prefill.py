"""The prefill kernel: many queries over packed pages, a page dequantised at a time, products by BLAS.

Theory of operation. As flash attention (Dao et al., 2022, algorithm 1) with a page as key tile: a work item is a KV
head and up to `block` query positions of all its query heads. For each page the item sees, keys and values are
dequantised into scratch that stays in the second-level cache, scores are one BLAS product, the softmax is folded in row
by row (base 2), and a second product adds the weighted values. Scratch is the item's own and does not grow with the
context, so threads share nothing but the pages they read.

What a query sees is a range of the segment's tokens, [low, high): positions ascend, so causality, windows and segments
whose tokens are scattered over the sequence all come down to two numbers a query. May import kvd.native,
kvd.quant.spec and kvd.attention.cpu_decode (shapes).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvd.attention import cpu_decode
from kvd.attention.cpu_decode import SideShape
from kvd.native import mathematics as maths
from kvd.native.build import Address, Integer, Number, compile_kernel
from kvd.native.emit import F32, I32, I64, PTR, Emitter, Value, vector
from kvd.quant.spec import PAGE_TOKENS

_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112
"""Constants of the CBLAS interface."""


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What a prefill kernel is compiled for.

    Attributes:
        k: keys.
        v: values.
        repeats: query heads of a KV head.
        block: query positions of a work item.
    """

    k: SideShape
    v: SideShape
    repeats: int
    block: int

    @property
    def rows(self) -> int:
        """Queries of a work item, all heads."""
        return self.repeats * self.block

    @property
    def scratch_floats(self) -> int:
        """float32 numbers of scratch a thread needs."""
        return _Scratch(self).total


class _Scratch:
    """Where things lie in a thread's scratch buffer, in floats."""

    def __init__(self, shape: PrefillShape) -> None:
        rows, k_dim, v_dim = shape.rows, shape.k.dim, shape.v.dim
        self.queries = 0
        self.scores = self.queries + rows * k_dim
        self.out = self.scores + rows * PAGE_TOKENS
        self.keys = self.out + rows * v_dim
        self.values = self.keys + PAGE_TOKENS * k_dim
        self.top = self.values + PAGE_TOKENS * v_dim
        self.sum = self.top + rows
        self.total = self.sum + rows + shape.k.lanes


ARGUMENTS: Final = {
    "first": Integer,
    "stop": Integer,
    "step": Integer,
    "length": Integer,
    "heads": Integer,
    "pages": Integer,
    "table": Address,
    "low": Address,
    "high": Address,
    "query": Address,
    "head_stride": Integer,
    "query_stride": Integer,
    "factor": Number,
    "scratch": Address,
    "out": Address,
    "top": Address,
    "sum": Address,
    "sgemm": Address,
}
"""Arguments of a prefill kernel:

- first, stop, step: the work items to do; item i is KV head i / blocks and query block i mod blocks, where blocks =
  ceil(length / block).
- length: query positions.
- heads: query heads.
- pages: pages of the segment.
- table: addresses [kv_heads, pages, 6] of k codes, scales, biases, v codes, scales, biases.
- low, high: int64 [length], ascending: query i sees tokens [low, high) of the segment; low = high for none.
- query: float32, head h and position i at h * head_stride + i * query_stride (in floats), k_dim values.
- factor: of the scores, times log2(e).
- scratch: float32 [scratch_floats], the thread's own.
- out: float32 [length, heads, v_dim], C order.
- top, sum: float32 [heads, length], greatest score (in powers of two) and sum of the weights relative to it.
- sgemm: address of `cblas_sgemm`.
"""


@functools.cache
def prefill_kernel(shape: PrefillShape) -> Callable[..., None]:
    """The compiled kernel of a shape; see `ARGUMENTS`.

    Raises:
        KernelUnavailable: this processor cannot run it.
    """
    return compile_kernel(
        "prefill",
        functools.partial(_write, shape),
        ARGUMENTS,
        parameters=(shape,),
        sources=(maths.__name__, cpu_decode.__name__, __name__),
    )


def _write(shape: PrefillShape, e: Emitter) -> None:
    _Prefill(shape, e).write()


class _Prefill:
    """Writes one kernel; attributes are its arguments and what the parts share."""

    def __init__(self, shape: PrefillShape, e: Emitter) -> None:
        self.shape, self.e, self.at, self.lanes = shape, e, _Scratch(shape), shape.k.lanes
        self.scratch = e.arguments["scratch"]
        self.length, self.pages = e.arguments["length"], e.arguments["pages"]

    def write(self) -> None:
        """All work items of this call."""
        e, shape = self.e, self.shape
        blocks = (self.length + (shape.block - 1)) // shape.block
        arguments = e.arguments
        count = (arguments["stop"] - arguments["first"] + (arguments["step"] - 1)) // arguments["step"]
        with e.loop(0, count) as number:
            item = arguments["first"] + number * arguments["step"]
            start = (item % blocks) * shape.block
            queries = e.minimum(self.length - start, e.index(shape.block))
            self._item(item // blocks, start, queries)

    def _item(self, head: Value, start: Value, queries: Value) -> None:
        e, at, shape = self.e, self.at, self.shape
        rows = queries * shape.repeats
        self._take_queries(head, start, queries)
        with e.loop(0, rows * shape.v.dim) as i:
            e.store(e.constant(F32, 0.0), self.scratch, i + at.out)
        with e.loop(0, rows) as row:
            e.store(e.constant(F32, maths.LOWEST), self.scratch, row + at.top)
            e.store(e.constant(F32, 0.0), self.scratch, row + at.sum)
        low = e.load(e.arguments["low"], start, I64)
        high = e.load(e.arguments["high"], start + queries - 1, I64)
        with e.loop(low // PAGE_TOKENS, (high + (PAGE_TOKENS - 1)) // PAGE_TOKENS) as page:
            table = e.at(e.arguments["table"], (head * self.pages + page) * 6, PTR)
            begin = page * PAGE_TOKENS
            tokens = e.minimum(high - begin, e.index(PAGE_TOKENS))
            self._page(table, begin, tokens, start, queries, rows)
        self._write_out(head, start, queries)

    def _take_queries(self, head: Value, start: Value, queries: Value) -> None:
        """The item's queries times the factor, rows (head, position) in order."""
        e, at, shape, lanes = self.e, self.at, self.shape, self.lanes
        arguments = e.arguments
        factor = e.splat(arguments["factor"], lanes)
        with e.loop(0, shape.repeats) as repeat, e.loop(0, queries) as i:
            source = (head * shape.repeats + repeat) * arguments["head_stride"] + (start + i) * arguments[
                "query_stride"
            ]
            target = (repeat * queries + i) * shape.k.dim + at.queries
            with e.loop(0, shape.k.dim, lanes) as d:
                value = e.load(arguments["query"], source + d, F32, lanes)
                e.store(value * factor, self.scratch, target + d)

    def _page(self, table: Value, begin: Value, tokens: Value, start: Value, queries: Value, rows: Value) -> None:
        e, at, shape = self.e, self.at, self.shape
        addresses = [e.load(table, part, PTR) for part in range(6)]
        _dequantise(e, shape.k, tokens, addresses[:3], e.at(self.scratch, at.keys, F32))
        _dequantise(e, shape.v, tokens, addresses[3:], e.at(self.scratch, at.values, F32))
        self._product(
            (rows, tokens, shape.k.dim), (at.queries, shape.k.dim), (at.keys, shape.k.dim, True), (at.scores, 0.0)
        )
        padded = (tokens + (self.lanes - 1)) // self.lanes * self.lanes
        with e.loop(0, shape.repeats) as repeat, e.loop(0, queries) as i:
            position = start + i
            low = e.maximum(e.load(e.arguments["low"], position, I64) - begin, e.index(0))
            high = e.minimum(e.load(e.arguments["high"], position, I64) - begin, tokens)
            self._softmax(repeat * queries + i, low, high, tokens, padded)
        self._product(
            (rows, e.index(shape.v.dim), tokens),
            (at.scores, PAGE_TOKENS),
            (at.values, shape.v.dim, False),
            (at.out, 1.0),
        )

    def _product(
        self,
        size: tuple[Value, Value, int | Value],
        left: tuple[int, int],
        right: tuple[int, int, bool],
        target: tuple[int, float],
    ) -> None:
        """A product by BLAS, all in scratch.

        Args:
            size: rows, columns and inner dimension.
            left: place and row length of the left matrix.
            right: place and row length of the right one, and whether it is transposed.
            target: place of the result (the scores' rows have a page's length, the output's v_dim), and what is kept
                of what is there.
        """
        e = self.e
        rows, columns, inner = size
        place, keep = target
        row_length = PAGE_TOKENS if keep == 0.0 else self.shape.v.dim

        def word(value: Value | int) -> Value:
            return e.narrow(value, I32) if isinstance(value, Value) else e.constant(I32, value)

        e.call(
            e.arguments["sgemm"],
            *(word(each) for each in (_ROW_MAJOR, _PLAIN, _TRANSPOSED if right[2] else _PLAIN, rows, columns, inner)),
            e.constant(F32, 1.0),
            e.at(self.scratch, left[0], F32),
            word(left[1]),
            e.at(self.scratch, right[0], F32),
            word(right[1]),
            e.constant(F32, keep),
            e.at(self.scratch, place, F32),
            word(row_length),
        )

    def _softmax(self, row: Value, low: Value, high: Value, tokens: Value, padded: Value) -> None:
        """A row's scores of one page to weights relative to the row's greatest score so far."""
        e, at, lanes, shape = self.e, self.at, self.lanes, self.shape
        base = e.at(self.scratch, row * PAGE_TOKENS + at.scores, F32)
        lowest, zero = e.constant(F32, maths.LOWEST), e.constant(F32, 0.0)
        with e.either(low < high) as (some, none):
            with some:
                for begin, end in ((e.index(0), low), (high, padded)):
                    with e.loop(begin, end) as token:
                        e.store(lowest, base, token)
                best = e.slot(e.constant(vector(F32, lanes), maths.LOWEST))
                with e.loop(0, padded, lanes) as token:
                    best.set(e.maximum(e.load(base, token, F32, lanes), best.get()))
                page_top, old_top = e.fold(best.get(), "max"), e.load(self.scratch, row + at.top, F32)
                with e.when(page_top > old_top):
                    e.store(page_top, self.scratch, row + at.top)
                    keep = maths.exp2(e, old_top - page_top)
                    e.store(e.load(self.scratch, row + at.sum, F32) * keep, self.scratch, row + at.sum)
                    out = e.at(self.scratch, row * shape.v.dim + at.out, F32)
                    with e.loop(0, shape.v.dim, lanes) as d:
                        e.store(e.load(out, d, F32, lanes) * e.splat(keep, lanes), out, d)
                top = e.splat(e.load(self.scratch, row + at.top, F32), lanes)
                total = e.slot(e.constant(vector(F32, lanes), 0.0))
                with e.loop(0, padded, lanes) as token:
                    weight = maths.exp2(e, e.load(base, token, F32, lanes) - top)
                    e.store(weight, base, token)
                    total.set(total.get() + weight)
                e.store(e.load(self.scratch, row + at.sum, F32) + e.fold(total.get()), self.scratch, row + at.sum)
            with none, e.loop(0, tokens) as token:
                e.store(zero, base, token)

    def _write_out(self, head: Value, start: Value, queries: Value) -> None:
        """Divide by the sums; write output, greatest scores and sums."""
        e, at, shape, lanes = self.e, self.at, self.shape, self.lanes
        arguments = e.arguments
        with e.loop(0, shape.repeats) as repeat, e.loop(0, queries) as i:
            row = repeat * queries + i
            target = (head * shape.repeats + repeat) * self.length + start + i
            heads = arguments["heads"]
            place = (start + i) * heads + head * shape.repeats + repeat
            total = e.load(self.scratch, row + at.sum, F32)
            e.store(e.load(self.scratch, row + at.top, F32), arguments["top"], target)
            e.store(total, arguments["sum"], target)
            inverse = e.splat(e.constant(F32, 1.0) / e.maximum(total, e.constant(F32, 1e-37)), lanes)
            with e.loop(0, shape.v.dim, lanes) as d:
                value = e.load(self.scratch, row * shape.v.dim + d + at.out, F32, lanes)
                e.store(value * inverse, arguments["out"], place * shape.v.dim + d)


def _dequantise(e: Emitter, side: SideShape, tokens: Value, source: list[Value], target: Value) -> None:
    """Packed tokens as float32 [tokens, dim]: code * scale + bias with one rounding.

    Args:
        e: the emitter.
        side: shape of the tokens.
        tokens: how many.
        source: addresses of codes, scales and biases.
        target: where the floats go.
    """
    codes, scales, biases = source
    lanes = side.lanes
    held = max(1, lanes // side.codes)  # words that a vector of values comes from
    with e.loop(0, tokens) as token:
        for group in range(side.groups):
            place = token * side.groups + group
            scale, bias = (e.splat(maths.load_bf16_scalar(e, part, place), lanes) for part in (scales, biases))
            for first in range(group * side.group, (group + 1) * side.group, lanes):
                words = e.load(codes, token * side.words + first // side.codes, I32, held)
                spread = e.shuffle(words, [lane // side.codes for lane in range(lanes)])
                shifts = [side.bits * ((first + lane) % side.codes) for lane in range(lanes)]
                cut = (spread >> Value(e, e.constant(vector(I32, lanes), shifts).raw)) & ((1 << side.bits) - 1)
                e.store(e.fma(e.to_float(cut), scale, bias), target, token * side.dim + first)


__all__ = ["ARGUMENTS", "PrefillShape", "prefill_kernel"]
