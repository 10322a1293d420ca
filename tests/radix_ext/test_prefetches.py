"""What loads for requests that may come take, and whether they were wanted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_ext.prefetches import LIFE, Prefetches


def loaded(prefetches: Prefetches, *chunks: str) -> None:
    for chunk in chunks:
        prefetches.begin("t", 1, chunk)
        prefetches.end("t", 1, chunk, has_come=True)


def test_tenant_has_a_limit_of_its_own() -> None:
    prefetches = Prefetches(lambda: 10)
    assert prefetches.has_room("a", 11), "one load may come, whatever its size"
    prefetches.begin("a", 6, "c")
    assert prefetches.has_room("a", 4)
    assert not prefetches.has_room("a", 5)
    assert prefetches.has_room("b", 10)
    assert prefetches.num_bytes == 6
    prefetches.end("a", 6, "c", has_come=False)
    assert prefetches.has_room("a", 10)
    assert prefetches.num_bytes == 0


def test_chunk_that_is_asked_for_while_it_comes_is_used() -> None:
    """Its request waits for it, and will not ask again. What does not come is not used."""
    prefetches = Prefetches(lambda: 10)
    for chunk in ("comes", "fails"):
        prefetches.begin("t", 1, chunk)
        prefetches.asked(chunk)
    prefetches.next_request()
    prefetches.end("t", 1, "comes", has_come=True)
    prefetches.end("t", 1, "fails", has_come=False)
    for chunk in ("comes", "fails"):
        prefetches.asked(chunk)
    assert prefetches.stats() == {"requested": 2, "loaded": 1, "used": 1}


@pytest.mark.parametrize(("num_requests", "used"), [(LIFE, 1), (LIFE + 1, 0)])
def test_chunk_is_not_used_after_its_life(num_requests: int, used: int) -> None:
    prefetches = Prefetches(lambda: 10)
    loaded(prefetches, "c")
    for _ in range(num_requests):
        prefetches.next_request()
    prefetches.asked("c")
    assert prefetches.stats()["used"] == used


STEPS = st.lists(
    st.tuples(st.sampled_from(["load", "ask", "next"]), st.integers(0, 3)), max_size=200
)


@given(steps=STEPS)
def test_every_load_is_used_at_most_once(steps: list[tuple[str, int]]) -> None:
    """A chunk that is loaded again before anybody asks is used once."""
    prefetches, unused, num_used = Prefetches(lambda: 1000), set[int](), 0
    for kind, chunk in steps:
        if kind == "load":
            loaded(prefetches, str(chunk))
            unused.add(chunk)
        elif kind == "ask":
            prefetches.asked(str(chunk))
            num_used += chunk in unused
            unused.discard(chunk)
        else:
            prefetches.next_request()
    num_loads = sum(kind == "load" for kind, _ in steps)
    assert prefetches.stats() == {"requested": num_loads, "loaded": num_loads, "used": num_used}
