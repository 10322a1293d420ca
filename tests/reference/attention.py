"""Attention the slow, obvious way: loops over queries and heads, one weight at a time,
in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    key_positions: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """queries [n, num_heads, d]; keys, values [m, num_kv_heads, d]; a query sees the keys at or
    before its position.

    Returns [n, num_heads, d] and the weights [num_heads, n, m], float64.
    """
    num_tokens, num_heads, _ = queries.shape
    num_keys, num_kv_heads, _ = keys.shape
    out = torch.zeros(num_tokens, num_heads, values.shape[2], dtype=torch.float64)
    weights = torch.zeros(num_heads, num_tokens, num_keys, dtype=torch.float64)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        for i in range(num_tokens):
            seen = [j for j in range(num_keys) if int(key_positions[j]) <= int(positions[i])]
            logits = [
                scale * float(queries[i, head].double() @ keys[j, kv_head].double()) for j in seen
            ]
            shares = [math.exp(logit - max(logits)) for logit in logits]
            for j, share in zip(seen, shares, strict=True):
                weights[head, i, j] = share / sum(shares)
                out[i, head] += weights[head, i, j] * values[j, kv_head].double()
    return out, weights
