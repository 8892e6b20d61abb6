"""Steps of several address spaces in one forward pass.

Theory of operation. A `BatchCache` is nothing but a list of `SequenceCache`s and one cache object per model layer over
all of them. A step of n tokens is the model called with ids [rows, n]: products read the weights once for all rows,
each row's tokens go into its own frames at its own positions, and one call of the backend attends for every row over
its own pages. Nothing is padded: rows have any lengths, page formats, and windows that begin where they like; a row
that computes its last token again (EXACT) runs beside rows that grow. Rows join and leave between steps by making
another batch, which costs some microseconds a layer, since no KV moves.

A step is all or nothing for the count of tokens: if any layer, row or value is wrong, no row's tokens count.

May import kvd.model.cache, layer_cache and kvd.errors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvd.errors import InternalError
from kvd.model.cache import SequenceCache
from kvd.model.layer_cache import KvLayerCache, StepState


class BatchCache:
    """Several sequences that take a step together. Owner: the engine thread.

    Args:
        sequences: one per row, each of the same pool, backend and model; no sequence twice.

    Raises:
        InternalError: they cannot be one batch, or there are none.
    """

    def __init__(self, sequences: Sequence[SequenceCache]) -> None:
        rows = tuple(sequences)
        if not rows:
            raise InternalError("a batch has at least one row")
        if len(set(map(id, rows))) != len(rows):
            raise InternalError("a sequence is in the batch twice")
        first = rows[0]
        if any(
            row.pool is not first.pool or row.backend is not first.backend or row.spec != first.spec for row in rows
        ):
            raise InternalError("rows of a batch have the same model, pool and backend")
        self._rows = rows
        self._state = StepState()
        self._layer_caches = [
            KvLayerCache(layers, self._state) for layers in zip(*(r.layers for r in rows), strict=True)
        ]

    @classmethod
    def merge(cls, sequences: Sequence[SequenceCache]) -> BatchCache:
        """A batch of these sequences, in this order.

        In a contiguous cache a merge pads and copies every row; here it copies nothing: rows stay in their frames, and
        the sequences can still be used alone between steps.

        Raises:
            InternalError: they cannot be one batch.
        """
        return cls(sequences)

    def extract(self, row: int) -> SequenceCache:
        """The sequence of a row: the very object that was merged, with every token of the steps it took part in.

        It may go on alone or in another batch; this batch is not changed by the call.

        Raises:
            InternalError: there is no such row.
        """
        if not 0 <= row < len(self._rows):
            raise InternalError(f"a batch of {len(self._rows)} has no row {row}")
        return self._rows[row]

    def __len__(self) -> int:
        """Rows."""
        return len(self._rows)

    @property
    def layer_caches(self) -> list[KvLayerCache]:
        """One cache per model layer, in order: the model's `cache` argument, for ids [rows, n]."""
        return list(self._layer_caches)

    def begin_step(self, n_tokens: int, *, replays: Collection[int] = ()) -> None:
        """The next model call appends `n_tokens` tokens to every row.

        Args:
            n_tokens: tokens of each row.
            replays: rows that compute their last token again instead and write nothing; only in steps of one token.

        Raises:
            InternalError: a row is in a step, lacks frames, or cannot replay; no row is in this step then.
        """
        if replays and n_tokens != 1:
            raise InternalError(f"a row replays one token, not {n_tokens}")
        if any(not 0 <= row < len(self._rows) for row in replays):
            raise InternalError(f"a batch of {len(self._rows)} has not all of the rows {sorted(replays)}")
        begun: list[SequenceCache] = []
        try:
            for number, row in enumerate(self._rows):
                if number in replays:
                    row.begin_replay()
                else:
                    row.begin_step(n_tokens)
                begun.append(row)
        except InternalError:
            # the row that refused may be in a step of somebody else's
            for row in begun:
                row.abort_step()
            raise

    def end_step(self) -> None:
        """The model call is over: each row's tokens count (none of a replay).

        Raises:
            InternalError: a row is in no step, or a layer did not write; no row's tokens count then.
            NonFiniteValues: a device found that a value does not fit its format; likewise.
        """
        behind = {number: row.layers_behind() for number, row in enumerate(self._rows)}
        behind = {number: layers for number, layers in behind.items() if layers}
        if behind or not all(row.stepping for row in self._rows):
            self.abort_step()
            raise InternalError(f"not every row and layer took part in the step: behind are {behind}")
        try:
            self._rows[0].pool.check_appended()
        except BaseException:
            self.abort_step()
            raise
        self._state.clear()
        for row in self._rows:
            row.end_step()

    def abort_step(self) -> None:
        """Forget the running step, if any; no row's tokens count and all will be overwritten."""
        self._state.clear()
        for row in self._rows:
            row.abort_step()


__all__ = ["BatchCache"]
