"""A record may go on naming pages that the engine can do without, though no good file of them is known."""

from __future__ import annotations

import pytest

from kvd.ids import PageId
from kvd.store.errors import PageMissing, PageNotDurable
from kvd.store.swap_ops import AppendRecordOp, ReadPageOp
from kvd.store.swap_store import SwapStore
from tests.support.lossy_disk import LossyFileSystem
from tests.support.store_data import FINGERPRINT, LAYOUTS, ModelAgent, header_of
from tests.support.store_turns import good, names


def test_only_the_pages_the_engine_names_may_be_missing(store: SwapStore, fs: LossyFileSystem) -> None:
    """P3: the record is refused with the page, and taken when just that page is said to be done without."""
    agent = good(store, ModelAgent("ada"), 600)
    gone, other = (page.page_id for page in agent.pages[0][:2])
    fs.unlink(names().page_path(FINGERPRINT, gone))
    page = agent.pages[0][0]
    assert isinstance(store.perform(ReadPageOp(header_of(page, 0), LAYOUTS[0])).error, PageMissing)
    _, record, _ = agent.turn(1)
    for missing in (frozenset[PageId](), frozenset({other})):
        with pytest.raises(PageNotDurable) as caught:
            raise_error(store, AppendRecordOp(record, missing))
        assert caught.value.page_ids == (gone,)
    assert store.perform(AppendRecordOp(record, frozenset({gone}))).error is None


def raise_error(store: SwapStore, op: AppendRecordOp) -> None:
    """Perform an operation and raise its error."""
    error = store.perform(op).error
    if error is not None:
        raise error
