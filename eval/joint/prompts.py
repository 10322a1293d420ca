"""Prompts whose KV is encoded jointly after the prefill, in one process: the chunks of one, or
several prompts whole.

    CFF   over "chunks"   units are a prompt's chunks                 each prompt alone
    BFF   over "batch"    units are the prompts of a batch
          over "private"  units are what the tree does not share of them
          over "unshared" nor one copy of a chunk, wherever another prompt has it

    head | A: block block tail | B: block block | question   what is between the blocks stays as it
                                                             is

That is how the paper measured accuracy (6.1 to 6.3). No memory is freed: each block gets the shared
direction at its own norm, or at the shared block's, as where it measured memory (6.4). Keys are
compared as they are cached, rotated, as in the paper.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from eval.bench.relocate import Pool
from eval.joint.encoding import decode, encode
from eval.joint.fast_fusion import NEVER
from eval.joint.kv import Cached
from eval.joint.ratio import thresholds_for_ratio


@dataclass(frozen=True)
class Target:
    """How similar blocks become one: over a threshold, or until there is a ratio."""

    block: int
    """Tokens."""
    threshold: float | None = None
    """Cosine similarity, of every layer."""
    ratio: float | None = None
    """Blocks before over after, in all layers together."""
    rescaled: bool = True
    """Each block keeps its norm. False: one row serves all tokens that share it."""


@dataclass(frozen=True)
class Fused:
    """Prompts after encoding."""

    prompts: list[Cached]
    """With KV of their own."""
    tokens: int
    """Of the units, also outside blocks."""
    blocks: int
    """Of each layer."""
    shared: list[int]
    """Blocks that are left, of each layer."""
    ms: float


def fuse(prompts: Sequence[Cached], target: Target, over: str) -> Fused:
    """Encode the prompts' blocks together, or those of the one prompt's chunks.
    The prompts stay as they are."""
    # Every cell encodes the same prompts, so what was computed must stay.
    made = [replace(each, pool=_copied(each.pool)) for each in prompts]
    spans = [_spans(made[: number + 1], over) for number in range(len(made))]
    units = _units(made, spans, target.block, over)
    layers = range(len(made[0].pool.k_buffer))
    num_blocks = sum(_num_blocks(units, target.block))
    shared = [num_blocks] * len(layers)
    started = time.perf_counter()
    # Blocks of one unit are never compared, and `thresholds_for_ratio` needs two units.
    if len(units) > 1:
        shared = [
            _fuse_layer(units, layer, target, u)
            for layer, u in zip(layers, _thresholds(units, target), strict=True)
        ]
    ms = 1000 * (time.perf_counter() - started)
    num_tokens = sum(end - start for own in spans for start, end in own)
    return Fused(made, num_tokens, num_blocks, shared, ms)


# Private, in order of use

Unit = tuple[Cached, Tensor]
"""Positions of a prompt's tokens that fill blocks."""


def _copied(pool: Pool) -> Pool:
    return Pool([each.clone() for each in pool.k_buffer], [each.clone() for each in pool.v_buffer])


def _spans(prompts: Sequence[Cached], over: str) -> list[tuple[int, int]]:
    """Of the last prompt: its chunks, or what nothing but fusing shares with those before it."""
    *before, last = prompts
    if over == "chunks":  # the first piece is the head and the last one the question
        return list(last.spans[1:-1])
    if over == "batch":
        return [(0, last.num_tokens)]
    start, spans = max(map(partial(_num_equal, last), before), default=0), []
    if over == "unshared":
        known = {_text(each, *span) for each in before for span in each.spans[1:-1]}
        for chunk_start, chunk_end in last.spans[1:-1]:
            if chunk_end > start and _text(last, chunk_start, chunk_end) in known:
                spans.append((start, chunk_start))
                start = chunk_end
    return [span for span in (*spans, (start, last.num_tokens)) if span[0] < span[1]]


def _units(
    prompts: Sequence[Cached], spans: Sequence[Sequence[tuple[int, int]]], block: int, over: str
) -> list[Unit]:
    """Chunks, or prompts, with a block, by length (remark 4.1)."""
    found: list[Unit] = []
    for prompt, own in zip(prompts, spans, strict=True):
        whole = [torch.arange(start, end - (end - start) % block) for start, end in own]
        parts = whole if over == "chunks" else [torch.cat([*whole, torch.arange(0)])]
        found += [(prompt, part) for part in parts]
    return sorted((unit for unit in found if len(unit[1])), key=lambda unit: len(unit[1]))


def _text(prompt: Cached, start: int, end: int) -> tuple[int, ...]:
    return tuple(prompt.token_ids[start:end])


def _num_equal(one: Cached, other: Cached) -> int:
    """Tokens of the prefix that both have."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _num_blocks(units: Sequence[Unit], block: int) -> list[int]:
    return [len(part) // block for _, part in units]


def _read(units: Sequence[Unit], layer: int) -> tuple[Tensor, Tensor]:
    keys = torch.cat([prompt.pool.k_buffer[layer][part] for prompt, part in units])
    return keys, torch.cat([prompt.pool.v_buffer[layer][part] for prompt, part in units])


def _thresholds(units: Sequence[Unit], target: Target) -> list[float]:
    num_layers, lens = len(units[0][0].pool.k_buffer), _num_blocks(units, target.block)
    if target.threshold is not None:
        return [target.threshold] * num_layers
    assert target.ratio is not None
    keys = [_read(units, layer)[0] for layer in range(num_layers)]
    return thresholds_for_ratio(
        [each.reshape(sum(lens), -1) for each in keys], lens, target.ratio, keys[0].shape[-1]
    )


def _fuse_layer(units: Sequence[Unit], layer: int, target: Target, threshold: float) -> int:
    """Write what the blocks become. Returns how many are left."""
    # Nothing fuses: `encode` and `decode` would only copy the layer to and fro.
    if threshold >= NEVER:
        return sum(_num_blocks(units, target.block))
    lens = [len(part) for _, part in units]
    fused = encode(*_read(units, layer), lens, block_size=target.block, threshold=threshold)
    if not target.rescaled:
        ones = torch.ones_like(fused.key_scales)
        fused = replace(fused, key_scales=ones, value_scales=ones)
    keys, values = (torch.split(side, lens) for side in decode(fused))
    for (prompt, part), unit_keys, unit_values in zip(units, keys, values, strict=True):
        prompt.pool.k_buffer[layer][part], prompt.pool.v_buffer[layer][part] = (
            unit_keys,
            unit_values,
        )
    return len(fused.keys)
