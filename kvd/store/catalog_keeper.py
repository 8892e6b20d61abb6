"""Keeps a catalog alive beside the store: what SQLite refuses never fails a page or a turn.

On any SQLite error the catalog is made anew from what the store knows; if even that fails it is left out until the
next commit. May import siblings of kvd.store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection

from kvd.ids import PageId
from kvd.store.catalog import CATALOG_ERRORS, AgentRow, Catalog, PageRow, connect_catalog, open_catalog
from kvd.store.fs import FileSystem
from kvd.store.layout import DataFolder
from kvd.store.page_file import PageHeader

Known = Callable[[], tuple[dict[PageId, tuple[PageHeader, int]], list[AgentRow]]]
"""Every durable page with its file's bytes, and every agent's row."""


class CatalogKeeper:
    """The store's catalog. Owned by the swap thread.

    Args:
        folder, fingerprint, fs: where it lies.
        known: what a new catalog is filled with.
        facts: is told what a person should know.
        keep_logs: says names of logs whose rows stay although nobody knows their agents.
        is_in_line: the catalog says just what `known` does, and was read a moment ago: it need not be read again.

    Attributes:
        renewals: how often the catalog was brought in line with what the store knew then; a change before that one may
            be lost if the store did not know of it yet.
    """

    def __init__(
        self,
        folder: DataFolder,
        fingerprint: str,
        fs: FileSystem,
        known: Known,
        facts: Callable[[str], None],
        keep_logs: Callable[[], Collection[str]],
        *,
        is_in_line: bool = False,
    ) -> None:
        self._path = folder.catalog_path(fingerprint)
        self._fingerprint = fingerprint
        self._fs = fs
        self._known = known
        self._facts = facts
        self._keep_logs = keep_logs
        self._catalog: Catalog | None = None
        self._uncommitted = False
        self._complaint = ""
        self.renewals = 0
        if is_in_line:
            with contextlib.suppress(*CATALOG_ERRORS):
                self._catalog = connect_catalog(fs, self._path)
        if self._catalog is None:
            self.renew()

    def put_page(self, header: PageHeader, file_bytes: int) -> None:
        """Note a durable page (committed later)."""
        row = PageRow.of(header, file_bytes=file_bytes, created_s=time.time())
        self._do(lambda catalog: catalog.put_page(row))

    def drop_pages(self, page_ids: list[str]) -> None:
        """Note that pages are gone or about to be."""
        self._do(lambda catalog: catalog.drop_pages(page_ids))

    def put_agent(self, row: AgentRow) -> None:
        """Note how far an agent's log is committed."""
        self._do(lambda catalog: catalog.put_agent(row))

    def drop_agent(self, namespace: str, agent: str) -> None:
        """Note that an agent's log is about to go."""
        self._do(lambda catalog: catalog.drop_agent(namespace, agent))

    def commit(self, counters: dict[str, int]) -> None:
        """Make it durable, with the counters; does nothing when nothing changed."""
        if self._catalog is None:
            self.renew()
        if not self._uncommitted:
            return

        def write(catalog: Catalog) -> None:
            for name, value in counters.items():
                catalog.put_counter(name, value)
            catalog.commit()

        self._do(write)
        self._uncommitted = False

    def renew(self) -> None:
        """Open the catalog (or make one) and bring it in line with what the store knows."""
        self.renewals += 1
        self.close()
        try:
            catalog, contents, facts = open_catalog(self._fs, self._path, self._fingerprint)
        except CATALOG_ERRORS as error:
            self._complain(f"no catalog: {error}")
            return
        for fact in facts:
            self._facts(fact)
        pages, agents = self._known()
        try:
            catalog.drop_pages(page_id for page_id in contents.pages if page_id not in pages)
            for page_id, (header, file_bytes) in pages.items():
                if page_id not in contents.pages or contents.pages[page_id].file_bytes != file_bytes:
                    catalog.put_page(PageRow.of(header, file_bytes=file_bytes, created_s=time.time()))
            present = {(row.namespace, row.agent) for row in agents}
            kept = self._keep_logs()
            for ref, stored in contents.agents.items():
                if ref not in present and stored.log_name not in kept:
                    catalog.drop_agent(*ref)
            for row in agents:
                if not row.says_the_same(contents.agents.get((row.namespace, row.agent))):
                    catalog.put_agent(row)
            catalog.commit()
        except CATALOG_ERRORS as error:
            self._complain(f"no catalog: {error}")
            catalog.close()
            return
        self._catalog = catalog
        self._complaint = ""

    def close(self) -> None:
        """Close without committing."""
        if self._catalog is not None:
            with contextlib.suppress(*CATALOG_ERRORS):
                self._catalog.close()
            self._catalog = None
        self._uncommitted = False

    def _complain(self, fact: str) -> None:
        """Say it once, not at each commit for as long as it lasts (P38)."""
        if fact != self._complaint:
            self._complaint = fact
            self._facts(fact)

    def _do(self, action: Callable[[Catalog], None]) -> None:
        if self._catalog is None:
            return  # the next commit tries to make one, from everything known then
        try:
            action(self._catalog)
            self._uncommitted = True
        except CATALOG_ERRORS as error:
            self._facts(f"catalog failed: {error}")
            self.renew()


__all__ = ["CatalogKeeper"]
