"""`storage/fingerprint.py` word by word, in Python's integers."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from sglang_chunkcache.storage.fingerprint import PIECE_WORDS

_MASK = 2**64 - 1


def naive_fingerprint(model: nn.Module) -> int:
    """The sum of all words times their places' multipliers."""
    total = num_pieces = 0
    for tensor in chain(model.parameters(), model.buffers()):
        data = bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())
        for index in range(0, max(1, len(data)), 4):
            offset = index // 4 % PIECE_WORDS
            num_pieces += offset == 0
            word = int.from_bytes(data[index : index + 4].ljust(4, b"\0"), "little", signed=True)
            total += word * _mixed(offset) * _mixed(-num_pieces)
    return total & _MASK


def _mixed(position: int) -> int:
    mixed = position * 0x9E3779B97F4A7C15 & _MASK
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        signed = mixed - (mixed >> 63 << 64)
        mixed = (mixed ^ signed >> 29) * factor & _MASK
    return mixed | 1
