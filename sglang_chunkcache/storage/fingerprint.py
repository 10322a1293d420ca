"""Whether a model's weights are those they were: SGLang updates them in place, and names a version
only where the client does.

    fingerprint = sum of word * multiplier(its place)   modulo 2^64; a word is 4 bytes, a multiplier
                                                        an odd number of 64 bits

So one changed word always shows. Several changes, as an exchange of two values is, cancel out once
in 2^32 times or less: the multipliers look random, and a change of 32 bits leaves as many of
theirs. Not meant against somebody who chooses weights for it.

About .5 s of one core for 100 million float32 parameters (one-off); on a GPU a few reads of the
weights and four launches a piece: some .1 s for 8 billion in bfloat16 (estimate).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PIECE_WORDS = 1 << 20
"""Words multiplied at once: 4 MiB of weights, 8 MiB of products."""

_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd 64-bit numbers of mixing functions (splitmix64), as signed ones."""


def fingerprint(model: nn.Module) -> int:
    """A number for all parameters and buffers, the same on any device: every bit at its place
    counts, names do not.

    Reads each weight once, in pieces, on its own device, and waits for the result. Takes
    PIECE_WORDS * 24 bytes beside them, and a copy of a tensor that is not contiguous. Equals
    tests/reference/naive_fingerprint.py.
    """
    totals: dict[torch.device, Tensor] = {}
    multipliers: dict[torch.device, Tensor] = {}
    num_pieces = 0
    for tensor in (*model.parameters(), *model.buffers()):
        device = tensor.device
        if device not in totals:
            multipliers[device] = _mixed(torch.arange(PIECE_WORDS, device=device))
            totals[device] = torch.zeros((), dtype=torch.int64, device=device)
        pieces = torch.split(_words(tensor), PIECE_WORDS)
        # int64 wraps, which is the modulo. All pieces share multipliers, 8 MiB of them.
        sums = torch.stack([(piece * multipliers[device][: len(piece)]).sum() for piece in pieces])
        places = torch.arange(num_pieces, num_pieces + len(pieces), device=device)
        num_pieces += len(pieces)
        totals[device] += (sums * _mixed(~places)).sum()  # ~: no multiplier of a place in a piece
    return sum(int(total) for total in totals.values()) % 2**64  # one wait for each device


def _words(tensor: Tensor) -> Tensor:
    """[num_words] int32: the tensor's bytes, filled up with zeros. A view where it can be one."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if missing := -len(data) % 4:
        data = torch.cat([data, data.new_zeros(missing)])
    # `view` refuses an offset that is no multiple of 4, as a part of another tensor may have.
    if data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


def _mixed(positions: Tensor) -> Tensor:
    """Int64, odd: a different number that looks random for every position (splitmix64)."""
    mixed = positions * _ODD[0]
    for factor in _ODD[1:]:
        mixed = (mixed ^ (mixed >> 29)) * factor
    return mixed | 1
