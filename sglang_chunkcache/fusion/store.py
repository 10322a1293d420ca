"""The tensors in host memory of radix_ext/variants.py's index, which decides what stays: a chunk's KV, un-rotated, and scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radix_ext.cfo import Attention


@dataclass(frozen=True, eq=False)
class ChunkScores(Attention):
    """With what selectors choose tokens by.

    Raises:
        ValueError: lengths or shapes disagree.
    """

    context: Tensor
    """[num_tokens] float32, CPU: mass of each token on all chunks of the prefix (Cache-Craft eq. 14)."""
    received: Tensor
    """[num_tokens] float32, CPU: mass each token receives from later tokens of this chunk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context.dim() != 1 or self.received.shape != self.context.shape:
            shapes = f"{tuple(self.context.shape)} and {tuple(self.received.shape)}"
            raise ValueError(f"context and received must both be [num_tokens] but got {shapes}")

    @property
    def num_tokens(self) -> int:
        return len(self.context)

    @property
    def nbytes(self) -> int:
        return self.context.nbytes + self.received.nbytes


@dataclass(frozen=True, eq=False)
class HostBlob:
    """One chunk's KV: plain CPU tensors, keys un-rotated.

    Raises:
        ValueError: not [num_layers, num_tokens, num_kv_heads, head_dim], sizes disagree, not on the CPU, or a view of
            something larger, which would stay in memory uncounted.
    """

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        if self.keys.dim() != 4 or self.keys.shape[:3] != self.values.shape[:3] or self.values.dim() != 4:
            shapes = f"{tuple(self.keys.shape)} and {tuple(self.values.shape)}"
            raise ValueError(
                f"keys and values must be [num_layers, num_tokens, num_kv_heads, head_dim] but got {shapes}"
            )
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            if tensor.device != torch.device("cpu"):
                raise ValueError(f"{name} must be on the cpu but are on {tensor.device}")
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                held = tensor.untyped_storage().nbytes()
                raise ValueError(f"{name} must own their memory but are {tensor.nbytes} of {held} bytes")

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def read(self) -> tuple[Tensor, Tensor]:
        """(keys, values): the tensors themselves, not to be written."""
        return self.keys, self.values
