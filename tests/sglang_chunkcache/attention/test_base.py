"""A request of the sparse attention says how many keys each query sees,
and refuses what cannot be."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from sglang_chunkcache.attention.base import HeadShape, SparseRequest


def make_request(
    positions: list[int], kv_positions: list[int] | None, num_keys: int
) -> SparseRequest:
    keys = None if kv_positions is None else torch.tensor(kv_positions, dtype=torch.int64)
    return SparseRequest(
        torch.tensor(positions, dtype=torch.int64), torch.arange(num_keys), num_keys, keys
    )


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
    """Its own position included, gaps left out, never more than there are."""
    visible = make_request(positions, kv_positions, 4).visible()
    assert visible.dtype == torch.int64
    assert visible.tolist() == expected


@pytest.mark.parametrize(
    ("positions", "kv_positions", "num_keys", "message"),
    [
        ([1, 1], None, 4, "positions: expected strictly ascending"),
        ([2, 1], None, 4, "positions: expected strictly ascending"),
        ([-1, 1], None, 4, "positions: expected strictly ascending"),
        ([3], [0, 2, 2, 3], 4, "kv_positions: expected strictly ascending"),
        ([3], [0, 2, 3], 4, "kv_positions: expected 4, got 3"),
    ],
)
def test_request_refuses(
    positions: list[int], kv_positions: list[int] | None, num_keys: int, message: str
) -> None:
    """Positions out of order would make `visible` fall."""
    with pytest.raises(ValueError, match=message):
        make_request(positions, kv_positions, num_keys)


@pytest.mark.parametrize(("positions", "kv_positions"), [([1, 3], [2, 3]), ([1], []), ([1], None)])
def test_a_query_without_keys_is_refused(
    positions: list[int], kv_positions: list[int] | None
) -> None:
    """It has no softmax."""
    request = make_request(positions, kv_positions, len(kv_positions or []))
    with pytest.raises(ValueError, match="position 1 has nothing to attend to"):
        request.visible()


@pytest.mark.parametrize(
    ("positions", "kv_positions", "expected"),
    [
        ([0, 3, 4, 9], None, [True, True, False, False]),
        ([2, 4, 8, 99], [2, 3, 5, 8], [True, False, True, False]),
    ],
)
def test_has_key_compares_positions(
    positions: list[int], kv_positions: list[int] | None, expected: list[bool]
) -> None:
    """A gap has none, whatever its neighbours are."""
    request = make_request(positions, kv_positions, 4)
    assert request.has_key().tolist() == expected
    assert request.key_positions().tolist() == (kv_positions or [0, 1, 2, 3])


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(2, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(1, device="meta"),
    ],
)
def test_request_refuses_other_dtype_shape_or_device(positions: torch.Tensor) -> None:
    """Planning reads positions; on a device each look would wait for it."""
    with pytest.raises(ValueError, match="positions: expected"):
        SparseRequest(positions, torch.arange(4), 4)


@pytest.mark.parametrize(
    ("pages", "num_keys", "message"),
    [
        (torch.zeros(4), 4, r"kv_pages: expected \[pages\] integers, got \[4\] torch.float32"),
        (torch.arange(4)[None], 4, "kv_pages: expected"),
        (torch.arange(4), -5, "num_keys: expected a number of keys, got -5"),
        (torch.arange(4), 4.0, "num_keys: expected a number of keys, got 4.0"),
    ],
)
def test_request_refuses_pages_that_are_none(
    pages: torch.Tensor, num_keys: int, message: str
) -> None:
    """Fractions would be cut off on the way to the kernel, and other slots read."""
    with pytest.raises(ValueError, match=message):
        SparseRequest(torch.tensor([1]), pages, num_keys)


def test_group_size_is_query_heads_per_kv_head() -> None:
    assert HeadShape(32, 8, 128, torch.bfloat16).group_size == 4
