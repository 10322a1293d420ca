"""A request of the sparse attention says how many keys each query sees,
and refuses what cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_chunkcache.attention.base import SparseRequest


def make_request(
    positions: list[int], kv_positions: list[int] | None, num_keys: int
) -> SparseRequest:
    keys = None if kv_positions is None else torch.tensor(kv_positions, dtype=torch.int64)
    return SparseRequest(torch.tensor(positions, dtype=torch.int64), torch.arange(num_keys), keys)


@pytest.mark.parametrize(
    ("positions", "kv_positions", "expected"),
    [
        ([0, 2, 3], None, [1, 3, 4]),
        ([0, 3, 4, 9], None, [1, 4, 4, 4]),
        ([2, 3, 4, 5, 99], [2, 3, 5, 8], [1, 2, 2, 3, 4]),
        ([], None, []),
    ],
)
def test_visible_counts_keys_at_or_before(
    positions: list[int], kv_positions: list[int] | None, expected: list[int]
) -> None:
    request = make_request(positions, kv_positions, 4)
    assert request.visible().dtype == torch.int64
    assert request.visible().tolist() == expected
    keys = kv_positions or [0, 1, 2, 3]
    assert request.has_key().tolist() == [position in keys for position in positions]
    assert request.key_positions().tolist() == keys


FOUR = torch.arange(4)
ONE = FOUR[1:2]
REFUSED: list[tuple[Callable[[], object], str]] = [
    # positions out of order would make `visible` fall
    (lambda: make_request([1, 1], None, 4), "positions: expected strictly ascending"),
    (lambda: make_request([-1, 1], None, 4), "positions: expected strictly ascending"),
    (lambda: make_request([3], [0, 2, 2, 3], 4), "kv_positions: expected strictly ascending"),
    (lambda: make_request([3], [0, 2, 3], 4), "kv_positions: expected 4, got 3"),
    # a query without keys has no softmax
    (lambda: make_request([1, 3], [2, 3], 2).visible(), "position 1 has nothing to attend to"),
    (lambda: make_request([1], None, 0).visible(), "position 1 has nothing to attend to"),
    # planning reads positions; on a device each look would wait for it
    (lambda: SparseRequest(ONE.int(), FOUR), "positions: expected"),
    (lambda: SparseRequest(ONE[None], FOUR), "positions: expected"),
    (lambda: SparseRequest(ONE.to("meta"), FOUR), "positions: expected"),
    # fractions would be cut off on the way to the kernel, and other slots read
    (lambda: SparseRequest(ONE, FOUR.float()), r"kv_slots: expected \[m\] integers"),
    (lambda: SparseRequest(ONE, FOUR[None]), "kv_slots: expected"),
]


def test_what_cannot_be_is_refused() -> None:
    for make, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            make()
