"""An access table for each tenant, so that what one of them asks for changes no other's counts.

Whoever may name a tenant can invent more, so all tables together are bounded: the least recently
counted tenants leave, whole. That costs them an order, never an answer.
"""

from collections import OrderedDict
from collections.abc import Iterable

from radix_ext.access_table import AccessTable
from radix_ext.chunk import ChunkId


class TenantTables:
    """Tables over `window` requests each, of at most `max_tenants` and with at most `max_entries`
    in all. The tenant counted last stays in any case; alone, its window bounds it."""

    def __init__(self, *, window: int, max_tenants: int, max_entries: int) -> None:
        self.window, self.max_tenants, self.max_entries = window, max_tenants, max_entries
        self._tables: OrderedDict[str, AccessTable] = OrderedDict()  # least recently counted first
        self.num_entries = 0  # of all tables

    def observe(self, tenant: str, ids: Iterable[ChunkId]) -> None:
        table = self._tables[tenant] = self.of(tenant)
        self._tables.move_to_end(tenant)
        self.num_entries -= table.num_entries
        table.observe(ids)
        self.num_entries += table.num_entries
        while len(self._tables) > 1 and self._is_over():
            _, forgotten = self._tables.popitem(last=False)
            self.num_entries -= forgotten.num_entries

    def of(self, tenant: str) -> AccessTable:
        """The tenant's table, to be read; an empty one if it is not known. Changes nothing."""
        table = self._tables.get(tenant)
        # Not kept: a look pushes nobody out.
        return AccessTable(self.window) if table is None else table

    def __contains__(self, tenant: str) -> bool:
        """Whether a request of the tenant's was counted and is not forgotten."""
        return tenant in self._tables

    def __len__(self) -> int:
        """Tenants."""
        return len(self._tables)

    def _is_over(self) -> bool:
        return len(self._tables) > self.max_tenants or self.num_entries > self.max_entries
