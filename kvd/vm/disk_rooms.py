"""Room that namespaces with a quota of the disk have left, and dirty pages that wait for it.

Who has how much the engine says from time to time; between two times what starts to be written is taken off here. A
page without room is put aside, so that those behind it in the queue need not wait.

May import kvd.ids and kvd.vm.page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvd.ids import Namespace, PageId
from kvd.vm.page import Page

Queue = dict[PageId, Page]


class DiskRooms:
    """Owned by `kvd.vm.transfers`, which alone changes it.

    Attributes:
        waiting: dirty pages without room, in the order in which they came.
    """

    def __init__(self) -> None:
        self.waiting: Queue = {}
        self._left: dict[Namespace, int] = {}

    def allot(self, rooms: Mapping[Namespace, int], writing: Iterable[Page], queues: tuple[Queue, ...]) -> None:
        """The rooms are these from here on; of pages in the queues those that do not fit are put aside, in their order.

        Args:
            rooms: bytes by namespace, writes under way included; namespaces that are not named have any.
            writing: pages whose writes are under way.
            queues: pages to be written, the last queue those that may wait; what waited goes to its front again.
        """
        behind = queues[-1]
        others, waited = dict(behind), self.waiting
        behind.clear()
        behind.update(waited | others)
        self.waiting, self._left = {}, dict(rooms)
        for page in writing:
            self.take(page)
        left = Counter(self._left)
        for queue in queues if rooms else ():
            for page in tuple(queue.values()):
                if page.namespace not in rooms:
                    continue
                if left[page.namespace] < page.page_bytes:
                    self.waiting[page.page_id] = queue.pop(page.page_id)
                else:
                    left[page.namespace] -= page.page_bytes

    def has_room(self, page: Page) -> bool:
        """Whether a page may be written now."""
        return self._left.get(page.namespace, page.page_bytes) >= page.page_bytes

    def take(self, page: Page) -> None:
        """A page is being written."""
        if page.namespace in self._left:
            self._left[page.namespace] -= page.page_bytes

    @property
    def waiting_bytes(self) -> dict[Namespace, int]:
        """Bytes of the pages that wait, by namespace."""
        sums: Counter[Namespace] = Counter()
        for page in self.waiting.values():
            sums[page.namespace] += page.page_bytes
        return dict(sums)


__all__ = ["DiskRooms"]
