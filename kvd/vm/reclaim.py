"""Evicts in the background, beyond what a demand needs now.

Theory of operation. Eviction at demand is enough for every promise, but a demand that finds only dirty pages waits for
the disk. So when frames fill more than the high mark, idle pages go in the policy's order, dirty ones after their
write, until frames fill no more than the low mark. Below the high mark nothing goes: a page that is free to keep is
kept. What is held goes never, so marks below what runs do nothing. A namespace that has come to have more than its
quota, since its requests needed it or the quota shrank, gives up idle pages of its own in the same way.

Each look goes over all spaces. It is made when something became idle or a write ended, and once a second, not after
each step of each agent.

May import kvd.ids and the other modules of kvd.vm but pager.
"""

from __future__ import annotations

from kvd.ids import Namespace
from kvd.vm.budget import Budget
from kvd.vm.transfers import Transfers


class Reclaim:
    """Owned by the pager, which alone calls it.

    Args:
        budget: says where the marks are.
        transfers: evicts.

    Attributes:
        is_due: something may have become evictable since the last look.
    """

    def __init__(self, budget: Budget, transfers: Transfers) -> None:
        self._budget = budget
        self._transfers = transfers
        self.is_due = False

    def look(self) -> None:
        """Evict towards the low mark and the quotas, if need be, as far as that can be done now."""
        if not self.is_due:
            return
        self.is_due = False
        budget = self._budget
        for namespace in budget.quotas:
            self.free(budget.quota_shortage_bytes(namespace, 0), namespace)
        begin_bytes = budget.low_mark_bytes if budget.reclaiming else budget.high_mark_bytes
        budget.reclaiming = budget.resident_bytes > begin_bytes
        if budget.reclaiming:
            # when all that is left is held it is over: what comes to rest later has to exceed the high mark again
            budget.reclaiming = self.free(budget.resident_bytes - budget.low_mark_bytes)

    def free(self, wanted_bytes: int, namespace: Namespace | None = None) -> bool:
        """Evict so many bytes of idle pages, or all there are; dirty ones are written first and go at a later look.

        Returns:
            Whether there were so many.
        """
        counters = self._transfers.counters
        before = counters.evictions
        is_enough = self._transfers.free(wanted_bytes, namespace, reason="background")
        counters.reclaimed += counters.evictions - before
        return is_enough
