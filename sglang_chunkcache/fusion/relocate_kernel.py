"""relocate.py on CUDA: one Triton launch gathers, turns and scatters the KV of tokens in all
layers.

    program = token block x layer x K or V   values:  rows as they are   keys:  pairs turned, the
                                                                                rest as it is

A token may keep its slot: one program reads its elements, then writes them. But programs run in any
order, so no target may be another token's source. The formula is relocate.py's, in float32 without
fused multiply-add, rounded once: bit by bit what torch computes. Layers vary fastest in the grid,
so that a block's cos and sin stay in the cache while all layers use them.
"""

# Triton's decorators and the arguments of its kernels have no types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_chunkcache.attention.upload import upload

TILE_BYTES = 8192
"""Of rows that one program moves: four 16-byte loads a thread.
Computed from latency times bandwidth, not measured."""

# Fused multiply-add would round differently from torch.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def relocate(*sides: Any, **how: Any) -> None:
    """Copy tokens' KV from `source` to `target`, keys turned. Queued on the current stream.
    Arguments and errors as in `launch_arguments`. No synchronisation.
    """
    arguments, num_programs = launch_arguments(*sides, **how)
    if num_programs:
        _relocate[(num_programs,)](**arguments, **OPTIONS)


def launch_arguments(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    is_neox: bool,
    source: Tensor,
    target: Tensor,
) -> tuple[dict[str, Any], int]:
    """The kernel's arguments by name and how many programs it takes.

    Args:
        keys: the pool's, a layer each: [slots, num_kv_heads, head_dim], contiguous, bfloat16,
            float16 or float32.
        values: [slots, num_kv_heads, v_head_dim], otherwise like `keys`. None: they stay.
        cos: [num_tokens, 1, rotary_dim / 2] float32, of the angle each pair turns by; rotary_dim <=
            head_dim.
        sin: Like `cos`.
        is_neox: As in `RotaryTable`.
        source: [num_tokens] int64 slots of the pool.
        target: Likewise, each slot once and none the source of another token.
    Raises:
        ValueError: a tensor is not contiguous; names it.
    """
    for name, tensors in {"keys": keys, "values": values, "cos, sin": (cos, sin)}.items():
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError(f"{name}: expected contiguous")
    addresses, alignment = _addresses(
        tuple(buffer.data_ptr() for buffer in (*keys, *values)), keys[0].device
    )
    (num_tokens, _, num_pairs), (_, num_heads, head_dim) = cos.shape, keys[0].shape
    v_row = values[0][0].numel() if values else 1
    row_bytes = max(num_heads * head_dim, v_row) * keys[0].element_size()
    tokens = 1 << min(6, max(0, (TILE_BYTES // row_bytes).bit_length() - 1))
    arguments = {
        "addresses": addresses,
        "source_slots": source.contiguous(),
        "target_slots": target.contiguous(),
        "cos": cos,
        "sin": sin,
        "num_tokens": num_tokens,
        "NUM_LAYERS": len(keys),
        "NUM_PARTS": len(keys) + len(values),
        "ELEMENT": ELEMENTS[keys[0].dtype],
        "ALIGNMENT": alignment,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "V_ROW": v_row,
        "NUM_PAIRS": num_pairs,
        "IS_NEOX": is_neox,
        # Triton's `arange` takes powers of two alone: what is too much is masked.
        "HEADS_WIDTH": _power_of_two(num_heads),
        "PAIRS_WIDTH": _power_of_two(num_pairs),
        "REST_WIDTH": _power_of_two(head_dim - 2 * num_pairs),
        "V_WIDTH": _power_of_two(v_row),
        "TOKENS": tokens,
    }
    return arguments, triton.cdiv(num_tokens, tokens) * (len(keys) + len(values))


@lru_cache(maxsize=1024)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """The addresses on the device, and the alignment in bytes that all of them share, up to 16.

    Cached by address, not by pool: a pool may be given new buffers. Layers that are written one by
    one have an entry each, as has each number of layers before a pass. Queued on the current
    stream: another one that moves the same buffers later has to wait for it, for their sake.
    """
    return upload(torch.tensor(pointers, dtype=torch.int64), device), math.gcd(16, *pointers)


def _power_of_two(size: int) -> int:
    """At least `size`. SGLang replaces Triton's by a function that no kernel can call."""
    return 1 << max(0, size - 1).bit_length()


# Compiled once per kind of move: neither the number of tokens nor the offset of a slice of slots
# causes another compilation.
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["source_slots", "target_slots"],
)
def _relocate(
    addresses,
    source_slots,
    target_slots,
    cos,
    sin,
    num_tokens,
    NUM_LAYERS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_ROW: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    IS_NEOX: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
    PAIRS_WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Move TOKENS tokens of one layer's keys or values."""
    K_ROW: tl.constexpr = NUM_HEADS * HEAD_DIM
    part = tl.program_id(0) % NUM_PARTS
    tokens = (tl.program_id(0) // NUM_PARTS) * TOKENS + tl.arange(0, TOKENS)
    live = tokens < num_tokens
    # Of addresses out of memory Triton knows no alignment, and would load narrowly.
    pool = tl.multiple_of(tl.load(addresses + part).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
    if part < NUM_LAYERS:
        from_rows = _rows(pool, source_slots, tokens, live, K_ROW)
        to_rows = _rows(pool, target_slots, tokens, live, K_ROW)
        _turn_heads(
            from_rows,
            to_rows,
            cos,
            sin,
            tokens,
            live,
            ELEMENT,
            NUM_HEADS,
            HEAD_DIM,
            NUM_PAIRS,
            IS_NEOX,
            HEADS_WIDTH,
            PAIRS_WIDTH,
        )
        if HEAD_DIM > 2 * NUM_PAIRS:
            _copy_heads(
                from_rows,
                to_rows,
                live,
                NUM_HEADS,
                HEAD_DIM,
                2 * NUM_PAIRS,
                HEADS_WIDTH,
                REST_WIDTH,
            )
    else:
        from_rows = _rows(pool, source_slots, tokens, live, V_ROW)
        to_rows = _rows(pool, target_slots, tokens, live, V_ROW)
        _copy_heads(from_rows, to_rows, live, 1, V_ROW, 0, 1, V_WIDTH)


@triton.jit
def _rows(pool, slots, tokens, live, ROW: tl.constexpr):
    """[TOKENS, 1]: where the tokens' rows begin."""
    return pool + tl.load(slots + tokens, mask=live, other=0)[:, None] * ROW


@triton.jit
def _copy_heads(
    from_rows,
    to_rows,
    live,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The elements of every head from FIRST on."""
    column = tl.arange(0, HEADS_WIDTH * WIDTH)
    head, number = column // WIDTH, FIRST + column % WIDTH
    mask = live[:, None] & ((head < NUM_HEADS) & (number < HEAD_DIM))[None, :]
    at = (head * HEAD_DIM + number)[None, :]
    tl.store(to_rows + at, tl.load(from_rows + at, mask=mask), mask=mask)


@triton.jit
def _turn_heads(
    from_rows,
    to_rows,
    cos,
    sin,
    tokens,
    live,
    ELEMENT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    IS_NEOX: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The NUM_PAIRS pairs of every head."""
    PAIRS: tl.constexpr = HEADS_WIDTH * WIDTH
    column = tl.arange(0, PAIRS)
    head, pair = column // WIDTH, column % WIDTH
    mask = live[:, None] & ((head < NUM_HEADS) & (pair < NUM_PAIRS))[None, :]
    turn_at = tokens[:, None] * NUM_PAIRS + pair[None, :]
    if IS_NEOX:  # i is paired with i + NUM_PAIRS
        at = (head * HEAD_DIM + pair)[None, :]
        # Both halves are read before one is written: a token may keep its slot.
        first = tl.load(from_rows + at, mask=mask)
        second = tl.load(from_rows + at + NUM_PAIRS, mask=mask)
        first, second = _turn(first, second, cos + turn_at, sin + turn_at, mask, ELEMENT)
        tl.store(to_rows + at, first, mask=mask)
        tl.store(to_rows + at + NUM_PAIRS, second, mask=mask)
    else:  # 2i with 2i + 1: loaded together, for wide loads, and split in registers
        both = tl.arange(0, 2 * PAIRS)
        both_head, number = both // (2 * WIDTH), both % (2 * WIDTH)
        both_mask = live[:, None] & ((both_head < NUM_HEADS) & (number < 2 * NUM_PAIRS))[None, :]
        at = (both_head * HEAD_DIM + number)[None, :]
        numbers = tl.load(from_rows + at, mask=both_mask)
        first, second = tl.split(tl.reshape(numbers, [numbers.shape[0], PAIRS, 2]))
        first, second = _turn(first, second, cos + turn_at, sin + turn_at, mask, ELEMENT)
        tl.store(
            to_rows + at,
            tl.reshape(tl.join(first, second), [numbers.shape[0], 2 * PAIRS]),
            mask=both_mask,
        )


@triton.jit
def _turn(first, second, cos, sin, mask, ELEMENT: tl.constexpr):
    """Pairs times cos + i sin. What does not turn keeps every bit:
    infinity times 0 would not be 0."""
    c, s = tl.load(cos, mask=mask), tl.load(sin, mask=mask)
    a, b = first.to(tl.float32), second.to(tl.float32)
    stays = (c == 1) & (s == 0)
    first = tl.where(stays, first, (a * c - b * s).to(ELEMENT))
    second = tl.where(stays, second, (b * c + a * s).to(ELEMENT))
    return first, second
