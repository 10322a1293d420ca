"""Bounds below the least that makes sense are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from radix_ext import (
    AccessTable,
    ConversationMap,
    LimitError,
)
from radix_ext.variant_index import VariantIndex

BOUNDED: list[tuple[Callable[..., Any], dict[str, float]]] = [
    (AccessTable, {"window": 0}),
    (ConversationMap, {"max_conversations": 0, "max_tokens": 0, "idle_s": float("nan")}),
    (VariantIndex, {"max_bytes": 0, "max_chunks": 0, "max_variants": 0, "window": 0}),
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
