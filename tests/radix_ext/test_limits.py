"""Bounds below the least that makes sense are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radix_ext import (
    AccessTable,
    ChunkPrefixTree,
    ConversationMap,
    Heads,
    KvAware,
    LimitError,
    Places,
    RoundRobin,
    TenantTables,
)
from radix_ext.variant_index import VariantIndex

BOUNDED: list[tuple[Callable[..., Any], dict[str, float]]] = [
    (AccessTable, {"window": 0}),
    (ChunkPrefixTree, {"max_nodes": 0}),
    (ConversationMap, {"max_conversations": 0, "max_tokens": 0, "idle_s": float("nan")}),
    (Heads, {"max_heads": 0, "max_tokens": 0, "max_bytes": 0}),
    (Places, {"max_places": 0}),
    (TenantTables, {"window": 0, "max_tenants": 0, "max_entries": 0}),
    (VariantIndex, {"max_bytes": 0, "max_chunks": 0, "max_variants": 0, "window": 0}),
    (RoundRobin, {"num_ranks": 0}),
    (lambda max_load_ratio: KvAware(2, max_load_ratio=max_load_ratio), {"max_load_ratio": 0.9}),
]


@pytest.mark.parametrize(
    ("make", "bounds", "name"),
    [(make, bounds, name) for make, bounds in BOUNDED for name in bounds],
)
def test_bound_is_checked(make: Callable[..., Any], bounds: dict[str, float], name: str) -> None:
    good = dict.fromkeys(bounds, 1)
    make(**good)
    with pytest.raises(LimitError, match=f"{name} must be at least"):
        make(**good | {name: bounds[name]})
