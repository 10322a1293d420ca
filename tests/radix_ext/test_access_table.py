"""The access table against a Counter over the last W requests."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from radix_ext import AccessTable, ChunkId

ids = st.sampled_from([ChunkId(name) for name in "abcdef"])


@given(
    window=st.integers(1, 5),
    requests=st.lists(st.lists(ids, max_size=5), max_size=20),
    threshold=st.integers(1, 3),
)
def test_table_equals_a_counter_over_the_window(
    window: int, requests: list[list[ChunkId]], threshold: int
) -> None:
    """A chunk that a request names twice counts once."""
    table = AccessTable(window)
    for number, request in enumerate(requests, start=1):
        table.observe(request)
        naive = Counter(
            chunk for recent in requests[max(0, number - window) : number] for chunk in set(recent)
        )
        assert [table.count(chunk) for chunk in map(ChunkId, "abcdef")] == [
            naive[chunk] for chunk in map(ChunkId, "abcdef")
        ]
        assert (len(table), len(table._requests)) == (len(naive), min(number, window))
        run = next((i for i, chunk in enumerate(request) if naive[chunk] < threshold), len(request))
        assert table.promoted_run(request, threshold) == run
