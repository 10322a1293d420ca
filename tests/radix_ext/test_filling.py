"""A store that is filled ahead of requests, simulated. That a server does the same is shown in
tests/sglang_chunkcache/fusion/test_ahead.py."""

from __future__ import annotations

from collections.abc import Sequence

from radix_ext.filling import FillCounts, Filling
from radix_ext.variants import VariantIndex

SIZES = dict.fromkeys("abcdefgh", 10)


def make_index(num_chunks: int) -> VariantIndex:
    return VariantIndex(max_bytes=10 * num_chunks, max_chunks=100, max_variants=5, window=1)


def held(index: VariantIndex) -> list[str]:
    """The chunks of what it has, each after its neighbours, oldest first."""
    named = [
        "".join((*variant.prefix, str(identity))) for identity, variant, _ in sorted(index._held.values(), key=_age)
    ]
    index.check_integrity()
    return named


def _age(entry: tuple[object, object, int]) -> int:
    return entry[1].last_used  # type: ignore[attr-defined, no-any-return]


def fill(filling: Filling, *requests: Sequence[str]) -> FillCounts:
    """The last of each after the others."""
    for request in requests:
        filling.request(request[-1], request[:-1])
    return filling.counts


def test_all_that_fits_is_there_and_is_kept() -> None:
    filling = Filling(make_index(8), None, SIZES)
    assert fill(filling, "a", "b", "c", "bca", "ac") == FillCounts(computed=5)
    assert held(filling.store) == ["a", "b", "c", "bca", "ac"]
    assert fill(filling, "a", "bca") == FillCounts(computed=5, kept=2)


def test_storage_has_what_the_store_has_lost() -> None:
    """Neighbours are loaded from there. What it has may leave the store, preprocessed or not."""
    filling = Filling(make_index(2), storage := make_index(8), SIZES)
    assert fill(filling, "a", "b", "c", "abc", "ca") == FillCounts(computed=5, loads=3)
    assert held(storage) == ["a", "b", "c", "abc", "ca"]
    assert held(filling.store) == ["c", "ca"]


def test_neighbors_that_nothing_has_are_computed_alone_again() -> None:
    """Plain chunks leave for preprocessed ones, which stay, and are computed anew for each that needs them."""
    filling = Filling(make_index(3), None, SIZES)
    assert fill(filling, "a", "b", "c", "d", "ad") == FillCounts(computed=5, again=1)
    assert held(filling.store) == ["d", "a", "ad"]
    assert fill(filling, "bc", "ca", "db") == FillCounts(computed=8, again=4)
    assert held(filling.store) == ["bc", "ca", "db"]


def test_what_is_started_again_on_the_storage_is_kept() -> None:
    """As far as it had room: what left it is computed again, and pushes out what it has."""
    work = ("a", "b", "c", "ab", "bc")
    roomy = make_index(5)
    fill(Filling(make_index(5), roomy, SIZES), *work)
    assert fill(Filling(make_index(5), roomy, SIZES), *work) == FillCounts(kept=5)
    tight = make_index(4)
    fill(Filling(make_index(5), tight, SIZES), *work)
    assert held(tight) == ["b", "c", "ab", "bc"]
    assert fill(Filling(make_index(5), tight, SIZES), *work) == FillCounts(computed=3, kept=2)
