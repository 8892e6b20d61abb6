"""The decode kernel: one query position over packed pages that are never dequantised.

Theory of operation. For each page: scores straight from the packed keys, an online softmax over the page (base 2), and
the packed values summed with the weights. What makes it fast:

- A vector holds packed *words*, not values. The n-th code of every word is cut out with one AND, converted, and
  multiplied with a query vector that is laid out the same way; the shift that is left out is a power of two inside the
  query. Sums of a group then lie in neighbouring lanes and are added in a tree over several vectors.
- Scales and biases stay out of the inner product: a group's sum is multiplied once, sum(q) once with the bias. For
  values the weight is multiplied with the scale before the codes, and weight times bias is summed apart.
- All query heads of a KV head share each load and each conversion.

Names: a *word* is 32 bits of codes; `codes` = codes a word; `group_words` = words that share a scale; `lanes` = lanes
of a vector; a *block* is as many tokens as there are lanes. One block of keys is `dim / group` vectors of group sums.

May import kvd.native, kvd.quant.spec.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from kvd.native import mathematics as maths
from kvd.native.build import Address, Integer, Number, compile_kernel, processor
from kvd.native.emit import F32, I32, I64, PTR, Emitter, Slot, Value, vector
from kvd.quant.spec import PAGE_TOKENS

ACCUMULATORS: Final = 24
"""Vectors a loop may keep in registers beside its operands (AVX-512 and NEON have 32)."""


@dataclass(frozen=True, slots=True)
class SideShape:
    """Packed keys or values of one head.

    Attributes:
        bits: of a code.
        group: values that share a scale.
        dim: values of a token.
        lanes: float32 lanes of a vector.
    """

    bits: int
    group: int
    dim: int
    lanes: int

    @property
    def codes(self) -> int:
        """Codes in a word."""
        return 32 // self.bits

    @property
    def words(self) -> int:
        """Words of a token."""
        return self.dim // self.codes

    @property
    def groups(self) -> int:
        """Groups of a token."""
        return self.dim // self.group

    @property
    def group_words(self) -> int:
        """Words of a group."""
        return self.group // self.codes

    @property
    def word_phases(self) -> int:
        """How many different places in a token a vector of words can start at."""
        return self.words // math.gcd(self.words, self.lanes)

    @property
    def group_phases(self) -> int:
        """How many different groups of a token a vector of group figures can start with."""
        return self.groups // math.gcd(self.groups, self.lanes)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a decode kernel is compiled for.

    Attributes:
        k: keys.
        v: values.
        rows: query heads of a KV head that are computed together.
        repeats: query heads of a KV head, a multiple of `rows`.
    """

    k: SideShape
    v: SideShape
    rows: int
    repeats: int

    @property
    def lanes(self) -> int:
        """Lanes of a vector, tokens of a block."""
        return self.k.lanes

    @property
    def scratch_floats(self) -> int:
        """float32 numbers of scratch a call needs."""
        return _Scratch(self).total


class _Scratch:
    """Where things lie in the scratch buffer, in floats."""

    def __init__(self, shape: DecodeShape) -> None:
        k, v, rows, lanes = shape.k, shape.v, shape.rows, shape.lanes
        # cyclic, in whole rounds: any vector of a token's words can be loaded whole
        self.query_row = -(-(k.words + lanes) // k.words) * k.words
        self.sum_row = k.groups + lanes
        self.query = 0
        self.sums = self.query + rows * k.codes * self.query_row
        self.group_scores = self.sums + rows * self.sum_row
        self.scores = self.group_scores + rows * lanes * k.groups
        self.weights = self.scores + rows * PAGE_TOKENS
        self.value_row = v.word_phases * lanes
        self.values = self.weights + rows * PAGE_TOKENS * v.groups + lanes
        self.bias_row = v.group_phases * lanes
        self.biases = self.values + rows * v.codes * self.value_row
        self.total = self.biases + rows * self.bias_row + lanes


ARGUMENTS: Final = {
    "heads": Integer,
    "pages": Integer,
    "table_row": Integer,
    "table": Address,
    "seen": Address,
    "query": Address,
    "factor": Number,
    "scratch": Address,
    "out": Address,
    "top": Address,
    "total": Address,
}
"""Arguments of a decode kernel:

- heads: KV heads.
- pages: pages to attend to.
- table_row: pages of a row of the table.
- table: addresses [heads, table_row, 6] of k codes, scales, biases, v codes, scales, biases in each page.
- seen: int64 [pages, 2]: tokens [low, high) of each page are attended to; low < high.
- query: float32 [heads * repeats, k_dim].
- factor: of the scores, times log2(e).
- scratch: float32 [scratch_floats].
- out: float32 [heads * repeats, v_dim], the weighted means of the values.
- top, total: float32 [heads * repeats], greatest score (in powers of two) and sum of the weights relative to it.
"""


@functools.cache
def decode_kernel(shape: DecodeShape) -> Callable[..., None]:
    """The compiled kernel of a shape; see `ARGUMENTS`.

    Raises:
        KernelUnavailable: this processor cannot run it.
    """
    return compile_kernel(
        "decode", functools.partial(_write, shape), ARGUMENTS, parameters=(shape,), sources=(maths.__name__, __name__)
    )


def side_shape(bits: int, group: int, dim: int) -> SideShape:
    """A side as this processor's vectors see it."""
    return SideShape(bits, group, dim, processor().lanes)


def _write(shape: DecodeShape, e: Emitter) -> None:
    """The kernel's body."""
    _Decode(shape, e).write()


class _Decode:
    """Writes one kernel; attributes are its arguments and what the parts share."""

    def __init__(self, shape: DecodeShape, e: Emitter) -> None:
        self.shape, self.e, self.at = shape, e, _Scratch(shape)
        self.rows, self.lanes = shape.rows, shape.lanes
        self.scratch = e.arguments["scratch"]
        self.query = self.out = self.top = self.total = self.scratch  # of the rows at hand, set by `write`

    def write(self) -> None:
        """All heads, some rows at a time."""
        e, shape = self.e, self.shape
        a = e.arguments
        rounds = shape.repeats // shape.rows
        with e.loop(0, a["heads"] * rounds) as number:
            first = number * shape.rows
            self.query = e.at(a["query"], first * shape.k.dim, F32)
            self.out = e.at(a["out"], first * shape.v.dim, F32)
            self.top, self.total = e.at(a["top"], first, F32), e.at(a["total"], first, F32)
            self._rows(e.at(a["table"], number // rounds * a["table_row"] * 6, PTR))

    def _rows(self, table: Value) -> None:
        """The rows at hand over all pages of their KV head."""
        e, at = self.e, self.at
        arguments = e.arguments
        self._lay_out_query()
        with e.loop(0, self.rows) as i:
            e.store(e.constant(F32, maths.LOWEST), self.top, i)
            e.store(e.constant(F32, 0.0), self.total, i)
        with e.loop(at.values, at.total) as i:
            e.store(e.constant(F32, 0.0), self.scratch, i)
        with e.loop(0, arguments["pages"]) as page:
            addresses = [e.load(table, page * 6 + part, PTR) for part in range(6)]
            low = e.load(arguments["seen"], page * 2, I64)
            high = e.load(arguments["seen"], page * 2 + 1, I64)
            first = low // self.lanes  # blocks that hold a token that is seen
            last = (high + (self.lanes - 1)) // self.lanes
            with e.loop(first, last) as block:
                self._score_block(block, *addresses[:3])
            for row in range(self.rows):
                self._softmax(row, first * self.lanes, last * self.lanes, low, high)
            self._weigh(first, last, *addresses[4:])
            self._sum_values(first, last, addresses[3])
        self._write_out()

    # ---- keys -------------------------------------------------------------------------------------------------------

    def _lay_out_query(self) -> None:
        """Queries in the order of codes in words, times factor and code weight; sums of each group."""
        e, at, k = self.e, self.at, self.shape.k
        query, factor = self.query, e.arguments["factor"]
        for row in range(self.rows):
            for number in range(k.codes):
                base = at.query + (row * k.codes + number) * at.query_row
                with e.loop(0, k.words) as word:
                    value = e.load(query, word * k.codes + (row * k.dim + number), F32)
                    value = value * factor * maths.code_weight(number, k.bits)
                    for place in range(base, base + at.query_row, k.words):
                        e.store(value, self.scratch, word + place)
            width = min(self.lanes, k.group)
            for group in range(k.groups):
                start = row * k.dim + group * k.group
                parts = [e.load(query, start + i, F32, width) for i in range(0, k.group, width)]
                total = e.fold(_sum(parts)) * factor
                for place in range(group, at.sum_row, k.groups):
                    e.store(total, self.scratch, at.sums + row * at.sum_row + place)

    def _score_block(self, block: Value, codes: Value, scales: Value, biases: Value) -> None:
        """Scores of the tokens of one block, stored at the tokens' places."""
        e, at, k, lanes = self.e, self.at, self.shape.k, self.lanes
        span = min(k.group_words, lanes)  # lanes of a vector that belong to one group
        vectors = k.group_words // span  # vectors of a group, where one does not hold it
        word0, group0 = block * (lanes * k.words), block * (lanes * k.groups)
        for tile in range(k.groups):  # a tile is `lanes` group sums
            e.barrier()
            tree: list[tuple[int, list[Value]]] = []
            for step in range(span):
                first = tile * lanes * k.group_words + step * lanes * vectors
                sums = self._products(codes, word0, first, vectors)
                tree.append((0, sums))
                # add neighbours as early as possible: fewer vectors are alive at once
                while len(tree) > 1 and tree[-1][0] == tree[-2][0]:
                    (level, right), (_, left) = tree.pop(), tree.pop()
                    tree.append((level + 1, [maths.sum_lanes(e, [a, b], 2) for a, b in zip(left, right, strict=True)]))
            at_group = group0 + tile * lanes
            scale, bias = (maths.load_bf16(e, part, at_group, lanes) for part in (scales, biases))
            for row in range(self.rows):
                sums_at = at.sums + row * at.sum_row + tile * lanes % k.groups
                shifted = bias * e.load(self.scratch, sums_at, F32, lanes)
                score = e.fma(tree[0][1][row], scale, shifted)
                e.store(score, self.scratch, at.group_scores + row * lanes * k.groups + tile * lanes)
        for row in range(self.rows):
            score = e.load(self.scratch, at.group_scores + row * lanes * k.groups, F32, lanes * k.groups)
            picked = [e.shuffle(score, range(group, lanes * k.groups, k.groups)) for group in range(k.groups)]
            e.store(_sum(picked), self.scratch, block * lanes + (at.scores + row * PAGE_TOKENS))

    def _products(self, codes: Value, word0: Value, first: int, vectors: int) -> list[Value]:
        """Per row: words [first, first + lanes * vectors) of a block times the query, vectors summed lane by lane."""
        e, at, k, lanes = self.e, self.at, self.shape.k, self.lanes
        sums: list[Value | None] = [None] * self.rows
        for part in range(vectors):
            start = first + part * lanes
            words = e.load(codes, word0 + start, I32, lanes)
            for number in range(k.codes):
                code = maths.masked_code(e, words, number, k.bits)
                for row in range(self.rows):
                    base = at.query + (row * k.codes + number) * at.query_row + start % k.words
                    query = e.load(self.scratch, base, F32, lanes)
                    so_far = sums[row]
                    sums[row] = code * query if so_far is None else e.fma(code, query, so_far)
        return [each for each in sums if each is not None]

    # ---- softmax ----------------------------------------------------------------------------------------------------

    def _softmax(self, row: int, start: Value, stop: Value, low: Value, high: Value) -> None:
        """Scores of one row to weights relative to the greatest score so far; what is not seen weighs nothing."""
        e, at, lanes = self.e, self.at, self.lanes
        top_at, total_at = self.top, self.total
        base = e.at(self.scratch, at.scores + row * PAGE_TOKENS, F32)
        for edge_start, edge_stop in ((start, low), (high, stop)):
            with e.loop(edge_start, edge_stop) as token:
                e.store(e.constant(F32, maths.LOWEST), base, token)
        best = e.slot(e.constant(vector(F32, lanes), maths.LOWEST))
        with e.loop(start, stop, lanes) as token:
            best.set(e.maximum(e.load(base, token, F32, lanes), best.get()))
        page_top, old_top = e.fold(best.get(), "max"), e.load(top_at, row, F32)
        with e.when(page_top > old_top):
            e.store(page_top, top_at, row)
            # before the first page everything is zero, and 2^(LOWEST - x) is small enough
            keep = maths.exp2(e, old_top - page_top)
            e.store(e.load(total_at, row, F32) * keep, total_at, row)
            v = self.shape.v
            for slot, width in (
                (at.values + row * v.codes * at.value_row, v.codes * at.value_row),
                (at.biases + row * at.bias_row, at.bias_row),
            ):
                with e.loop(slot, slot + width, lanes) as i:
                    e.store(e.load(self.scratch, i, F32, lanes) * e.splat(keep, lanes), self.scratch, i)
        top = e.splat(e.load(top_at, row, F32), lanes)
        total = e.slot(e.constant(vector(F32, lanes), 0.0))
        with e.loop(start, stop, lanes) as token:
            weight = maths.exp2(e, e.load(base, token, F32, lanes) - top)
            e.store(weight, base, token)
            total.set(total.get() + weight)
        for edge_start, edge_stop in ((start, low), (high, stop)):
            with e.loop(edge_start, edge_stop) as token:  # 2^-126 is next to nothing, but garbage may be large
                e.store(e.constant(F32, 0.0), base, token)
        e.store(e.load(total_at, row, F32) + e.fold(total.get()), total_at, row)

    # ---- values -----------------------------------------------------------------------------------------------------

    def _weigh(self, first: Value, last: Value, scales: Value, biases: Value) -> None:
        """Weights times scales, group by group; weights times biases are summed."""
        e, at, v, lanes = self.e, self.at, self.shape.v, self.lanes
        zero = e.constant(vector(F32, lanes), 0.0)
        sums = [
            [e.slot(e.load(self.scratch, at.biases + row * at.bias_row + phase * lanes, F32, lanes)) for phase in
             range(v.group_phases)]
            for row in range(self.rows)
        ]  # fmt: skip
        with e.loop(first, last) as block:
            for tile in range(v.groups):
                at_group = block * (lanes * v.groups) + tile * lanes
                scale, bias = (maths.load_bf16(e, part, at_group, lanes) for part in (scales, biases))
                for row in range(self.rows):
                    token = block * lanes + (at.scores + row * PAGE_TOKENS + tile * lanes // v.groups)
                    held = -(-lanes // v.groups) if lanes % v.groups == 0 else lanes
                    weight = self._spread(token, tile, held)
                    seen = weight > zero
                    slot = sums[row][tile % v.group_phases]
                    slot.set(e.fma(weight, e.select(seen, bias, zero), slot.get()))
                    target = at_group + (at.weights + row * PAGE_TOKENS * v.groups)
                    e.store(weight * e.select(seen, scale, zero), self.scratch, target)
        for row in range(self.rows):
            for phase in range(v.group_phases):
                e.store(sums[row][phase].get(), self.scratch, at.biases + row * at.bias_row + phase * lanes)

    def _spread(self, token: Value, tile: int, held: int) -> Value:
        """The weight of each lane's token, for lanes that are (token, group) pairs in order."""
        e, groups, lanes = self.e, self.shape.v.groups, self.lanes
        if groups == 1:
            return e.load(self.scratch, token, F32, lanes)
        shift = tile * lanes % groups
        weights = e.load(self.scratch, token, F32, held)
        return e.shuffle(weights, [(shift + lane) // groups for lane in range(lanes)])

    def _sum_values(self, first: Value, last: Value, codes: Value) -> None:
        """Codes of the values times their weights, summed over tokens, for every place in a word and phase."""
        e, at, v, lanes = self.e, self.at, self.shape.v, self.lanes
        at_once = max(1, min(v.codes, ACCUMULATORS // self.rows))
        span = max(1, lanes // v.group_words)  # groups a vector of words covers
        spread = [lane // v.group_words for lane in range(lanes)] if span > 1 else [0] * lanes
        vectors_first, vectors_last = (each * v.words // v.word_phases for each in (first, last))
        for numbers in _chunks(range(v.codes), at_once):
            for phase in range(v.word_phases):
                places = {
                    (row, number): at.values + (row * v.codes + number) * at.value_row + phase * lanes
                    for row in range(self.rows)
                    for number in numbers
                }
                slots: dict[tuple[int, int], Slot] = {
                    key: e.slot(e.load(self.scratch, place, F32, lanes)) for key, place in places.items()
                }
                with e.loop(vectors_first, vectors_last) as step:
                    vector_number = step * v.word_phases + phase
                    words = e.load(codes, vector_number * lanes, I32, lanes)
                    group = vector_number * lanes // v.group_words
                    weights = []
                    for row in range(self.rows):
                        some = e.load(
                            self.scratch, group + (at.weights + row * PAGE_TOKENS * v.groups), F32, max(span, 1)
                        )
                        weights.append(e.shuffle(some, spread))
                    for number in numbers:
                        code = maths.masked_code(e, words, number, v.bits)
                        for row in range(self.rows):
                            slot = slots[row, number]
                            slot.set(e.fma(code, weights[row], slot.get()))
                for key, place in places.items():
                    e.store(slots[key].get(), self.scratch, place)

    def _write_out(self) -> None:
        """Fold lanes into values, add the biases, divide by the sum of the weights."""
        e, at, v = self.e, self.at, self.shape.v
        out = self.out
        for row in range(self.rows):
            base = row * v.dim
            total_weight = e.load(self.total, row, F32)
            inverse = e.constant(F32, 1.0) / e.maximum(total_weight, e.constant(F32, 1e-37))
            with e.loop(0, v.groups) as group:
                total = e.slot(e.constant(F32, 0.0))
                with e.loop(group, at.bias_row, v.groups) as lane:
                    total.set(total.get() + e.load(self.scratch, lane + (at.biases + row * at.bias_row), F32))
                with e.loop(0, v.group) as i:
                    e.store(total.get(), out, group * v.group + i + base)
            for number in range(v.codes):
                values_at = at.values + (row * v.codes + number) * at.value_row
                weight = maths.code_weight(number, v.bits)
                with e.loop(0, v.words) as word:
                    rounds = range(values_at, values_at + at.value_row, v.words)
                    value = _sum([e.load(self.scratch, word + start, F32) for start in rounds]) * weight
                    place = word * v.codes + (base + number)
                    e.store((e.load(out, place, F32) + value) * inverse, out, place)


def _sum(values: list[Value]) -> Value:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _chunks(items: Iterable[int], size: int) -> list[list[int]]:
    """Lists of up to `size` items."""
    every = list(items)
    return [every[i : i + size] for i in range(0, len(every), size)]


__all__ = ["ARGUMENTS", "DecodeShape", "SideShape", "decode_kernel", "side_shape"]
