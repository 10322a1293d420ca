"""The tensors of the store: what a blob and its scores must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from radix_ext.variants import Variant
from sglang_chunkcache.fusion.store import ChunkScores, HostBlob, Offload
from sglang_chunkcache.storage.codec import Quantized

INT8 = Quantized(8)


def test_bytes_count_keys_values_and_scores() -> None:
    """An uncounted part would let the store outgrow its limit."""
    blob = HostBlob(torch.zeros(2, 3, 1, 3), torch.zeros(2, 3, 1, 3))
    scores = ChunkScores((), (), 1.0, torch.zeros(3), torch.zeros(3))
    assert Variant((), blob, scores=scores).nbytes == 3 * (2 * 2 * 3 * 4 + 2 * 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_coded_blob_counts_its_own_bytes_and_gives_back_what_it_decodes(bits: int) -> None:
    """The store's limit is in bytes that are really taken: .27 and .52 of bfloat16's."""
    codec, kv = Quantized(bits), torch.randn(2, 3, 5, 1, 64).bfloat16()
    blob = HostBlob(*codec.encode(*kv), codec=codec)
    assert blob.num_tokens == 5
    assert blob.nbytes == kv.nbytes * (bits + 16 / 64) / 16
    assert blob.nbytes + blob.saved_bytes == kv.nbytes
    for mine, coded, before in zip(blob.read(), codec.decode(blob.parts), kv, strict=True):
        assert torch.equal(mine, coded)
        assert 0 < float((mine - before).abs().max()) < 0.5


def kv(*shape: int) -> Any:
    return torch.zeros(*shape)


MALFORMED: list[tuple[Callable[[], object], str]] = [
    (lambda: HostBlob(kv(2, 1, 3), kv(2, 1, 3)), "must be"),
    (lambda: HostBlob(kv(2, 4, 1, 3), kv(2, 5, 1, 3)), "must be"),
    (lambda: HostBlob(kv(2, 4, 1, 3), kv(2, 4, 1, 3).to("meta")), "values must be on the cpu"),
    (lambda: HostBlob(kv(2, 8, 1, 3)[:, :4], kv(2, 4, 1, 3)), "keys must own their memory"),
    (lambda: HostBlob(kv(2, 4, 1, 8), kv(2, 4, 1, 8), codec=INT8), "as int8 keeps them"),
    (lambda: HostBlob(*INT8.encode(*[kv(2, 4, 1, 8) / 0] * 2), codec=INT8), "finite"),
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
    blob = HostBlob(keys, values)
    assert (blob.nbytes, blob.saved_bytes) == (2 * 32768, 0)
