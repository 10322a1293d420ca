"""A change of weights shows, whatever it is; and a weight update of SGLang's is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from sglang_chunkcache.storage import fingerprint as module
from sglang_chunkcache.storage.fingerprint import fingerprint
from tests.reference import naive_fingerprint as naive


class Model(nn.Module):
    """Two types, an odd number of bytes, an odd offset, tied weights and a buffer."""

    flags: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 5, bias=False)
        self.narrow = nn.Parameter(torch.randn(3, 3).bfloat16())
        self.part = nn.Parameter(torch.randn(9).bfloat16()[1:])
        self.tied = self.narrow
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("flags", torch.tensor([True, False, True]))


@pytest.mark.parametrize("piece", [2, 16, 1 << 20])
def test_equals_the_naive_one(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Piece by piece or at once, to the last bit."""
    for each in (module, naive):
        monkeypatch.setattr(each, "PIECE_WORDS", piece)
    assert fingerprint(Model()) == naive.naive_fingerprint(Model())


CHANGES: dict[str, Callable[[Model], Any]] = {
    "one bit": lambda model: bits(model.first.weight, torch.int32)[6, 4].bitwise_xor_(1),
    "one bit of a half": lambda model: bits(model.narrow, torch.int16)[2, 2].bitwise_xor_(1),
    "two signs": lambda model: model.first.weight.data[2:4].neg_(),
    "swapped rows": lambda model: model.first.weight.data.copy_(
        model.first.weight.data[[1, 0, 2, 3, 4, 5, 6]]
    ),
    "swapped tensors": lambda model: swap(model.first.weight, model.second.weight),
    "moved by one": lambda model: model.second.weight.data.copy_(model.second.weight.data.roll(1)),
    "buffer": lambda model: model.flags[1].fill_(True),
}


def bits(weight: Tensor, kind: torch.dtype) -> Tensor:
    return weight.data.view(kind)


def swap(one: Tensor, other: Tensor) -> None:
    mine, theirs = one.data.flatten(), other.data.flatten()
    one.data, other.data = theirs.reshape(one.shape), mine.reshape(other.shape)


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_the_same_shapes_shows(change: str) -> None:
    """Also where every value stays and only its place is another."""
    model = Model()
    before = fingerprint(model)
    assert fingerprint(model) == before
    CHANGES[change](model)
    assert fingerprint(model) != before


def test_layout_in_memory_does_not_count() -> None:
    """A transposed copy of the same values, as a loader may leave it."""
    model, other = Model(), Model()
    weight: Tensor = other.first.weight.data
    other.first.weight.data = weight.T.contiguous().T
    assert not other.first.weight.is_contiguous()
    assert fingerprint(other) == fingerprint(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_does_not_count() -> None:
    """Sums wrap alike everywhere."""
    assert fingerprint(Model().cuda()) == fingerprint(Model())
