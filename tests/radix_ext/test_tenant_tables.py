"""A table for each tenant against a plain list of requests; bounds."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from radix_ext import ChunkId, TenantTables

CHUNKS = [ChunkId(name) for name in "abcd"]
requests = st.lists(
    st.tuples(st.sampled_from("xyz"), st.lists(st.sampled_from(CHUNKS), unique=True, max_size=4)),
    max_size=30,
)


class NaiveTables:
    """All requests of each tenant in a list; the list of tenants is the order of use."""

    def __init__(self, window: int, max_tenants: int, max_entries: int) -> None:
        self.window, self.max_tenants, self.max_entries = window, max_tenants, max_entries
        self.requests: dict[str, list[list[ChunkId]]] = {}

    def observe(self, tenant: str, ids: list[ChunkId]) -> None:
        mine = self.requests.pop(tenant, [])
        self.requests[tenant] = [*mine, ids][-self.window :]
        while len(self.requests) > self.max_tenants or (
            self.num_entries > self.max_entries and len(self.requests) > 1
        ):
            del self.requests[next(iter(self.requests))]

    @property
    def num_entries(self) -> int:
        return sum(1 + len(ids) for mine in self.requests.values() for ids in mine)

    def count(self, tenant: str, chunk: ChunkId) -> int:
        return Counter(chunk for ids in self.requests.get(tenant, []) for chunk in ids)[chunk]


@given(
    window=st.integers(1, 4),
    max_tenants=st.integers(1, 3),
    max_entries=st.integers(1, 20),
    sent=requests,
)
def test_tables_equal_lists_of_requests(
    window: int, max_tenants: int, max_entries: int, sent: list[tuple[str, list[ChunkId]]]
) -> None:
    """After every request: same tenants, same counts, same size."""
    tables = TenantTables(window=window, max_tenants=max_tenants, max_entries=max_entries)
    naive = NaiveTables(window, max_tenants, max_entries)
    for tenant, ids in sent:
        tables.observe(tenant, ids)
        naive.observe(tenant, ids)
        assert [tables.of(name).count(chunk) for name in "xyz" for chunk in CHUNKS] == [
            naive.count(name, chunk) for name in "xyz" for chunk in CHUNKS
        ]
        assert [len(tables.of(name)._requests) for name in "xyz"] == [
            len(naive.requests.get(name, [])) for name in "xyz"
        ]
        assert (len(tables), tables.num_entries) == (len(naive.requests), naive.num_entries)
