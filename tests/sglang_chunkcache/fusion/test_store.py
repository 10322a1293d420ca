"""Scores of chunks, and their way to host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_chunkcache.fusion.store import ChunkScores, Offload


def kv(*shape: int) -> Any:
    return torch.zeros(*shape)


MALFORMED: list[tuple[Callable[[], object], str]] = [
    (lambda: ChunkScores((1.0,), (), 1.0, kv(2), kv(2)), "inter must have 0"),
    (lambda: ChunkScores((), (), 1.0, kv(2), kv(3)), "context and received"),
    (lambda: ChunkScores((), (), 1.0, kv(2, 1), kv(2, 1)), "context and received"),
]


def test_malformed_parts_are_refused() -> None:
    for make, message in MALFORMED:
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_device_tensors_arrive_in_pinned_memory() -> None:
    """As they were when asked for, though their memory is given to others at once."""
    tensor = torch.arange(1 << 24, device="cuda").reshape(4, -1, 1, 1)[:, :1000].contiguous()
    expected = tensor.cpu()
    offload = Offload([tensor, tensor + 1])
    del tensor
    other = torch.zeros_like(expected, device="cuda")
    while not offload.is_done():
        other.add_(1)
    keys, values = offload.read()
    assert keys.is_pinned()
    assert torch.equal(keys, expected)
    assert torch.equal(values, expected + 1)
