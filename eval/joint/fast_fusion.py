"""Algorithm 1 of Fast Fusion: similar blocks of different units become one direction. One layer;
knows no tokens and no pool.

A unit is what the paper's tree has as a leaf: a request (BFF) or a chunk (CFF). Units are split
into halves until one is left:

    units            1   2   3   4   5          left half: the first num_units // 2
    level 3                     (4   5)
    level 2         (1   2) (3  [4   5])
    level 1        ([1   2] [3   4   5])

A pair's left blocks keep their place. A right block that is more similar than the threshold to a
left one joins it: the left direction becomes the normalised sum. The other right blocks stay. All
pairs of a level are computed together, so there are ceil(log2 num_units) steps, or more where units
differ so much in length that padding would take too much memory.

NOTE: the paper's O(B log B) holds where most right blocks join. Where none does, a pair compares
all its blocks, n^2 / 2 in all.

What the paper leaves open, and what was chosen:
- A right block may exceed the threshold with several left ones. It joins the most similar, among
  equals the first. Line by line the algorithm adds it to each of them, but a block has one entry in
  the table.
- A right block is added with its unit direction, whatever the number of blocks that it stands for.
- Similarities of a pair are taken once, before its left directions move.
- Blocks of one unit are never compared: a leaf is returned as it is.
- Values join where keys do. Their own similarity is not asked for.
- Figure 2 pairs six requests two by two, the algorithm's halves give 1 + 2 and 1 + 2. The algorithm
  counts.
- The order of units is the caller's (remark 4.1: units with fewer blocks first).
- Some blocks may be fixed, which the paper has not: others join them in their direction, and they
  join nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

NEVER = 1.0
"""A threshold that no similarity exceeds."""
MAX_PADDED = 1 << 26
"""Numbers that are compared together: pairs of a level are padded to its longest units.
One pair may be more."""


@dataclass(frozen=True, eq=False)
class FusedBlocks:
    """Which blocks are one, and in which direction. On the blocks' device."""

    table: Tensor
    """[num_blocks] int64: the shared block of each block.
    Shared blocks are numbered as their first blocks are."""
    leaders: Tensor
    """[num_shared] int64, ascending: the block that stayed in its place each time."""
    keys: Tensor
    """[num_shared, key_size] float32, unit length; 0 for a block of zeros."""
    values: Tensor
    """[num_shared, value_size] float32, likewise."""
    fused_at: Tensor
    """[num_blocks] float32: the similarity at which a block, with what had joined it,
    joined another. NaN: a leader."""

    @property
    def references(self) -> Tensor:
        """[num_shared] int64: blocks that point to each shared one; at least 1."""
        return torch.bincount(self.table, minlength=len(self.leaders))


def fast_fusion(
    keys: Tensor,
    values: Tensor,
    lens: Sequence[int],
    threshold: float,
    *,
    fixed: Tensor | None = None,
) -> FusedBlocks:
    """Fuse similar blocks of different units in one layer (algorithm 1).

    Args:
        keys: [num_blocks, key_size] float, any device, the units one after the other; only read. A
            block whose keys or values are not finite stays alone.
        values: [num_blocks, value_size], otherwise likewise.
        lens: number of blocks of each unit, 0 included.
        threshold: cosine similarity, at least 0. Only what is more similar fuses; from `NEVER` on
            nothing does.
        fixed: [num_blocks] bool, on the blocks' device: blocks that may lead and never change.
            None: no block is.
    Returns:
        New tensors. On CUDA one synchronisation a level; sums of three blocks and more depend on
        the order of additions.
    Raises:
        ValueError: keys and values are no matrices of as many rows as the lens sum to; names what
            was expected and got. Or the threshold is below 0, where sums could cancel out, or NaN.
            Or `fixed` has another shape.
    Equals tests/reference/naive_joint.py: the same table, directions within 1e-5.
    """
    num_blocks = sum(lens)
    for name, blocks in (("keys", keys), ("values", values)):
        if blocks.ndim != 2 or len(blocks) != num_blocks:
            raise ValueError(f"{name}: expected [{num_blocks}, size], got {list(blocks.shape)}")
    if not threshold >= 0:
        raise ValueError(f"threshold: expected 0 or more, got {threshold}")
    if fixed is None:
        fixed = torch.zeros(num_blocks, dtype=torch.bool, device=keys.device)
    if fixed.shape != (num_blocks,):
        raise ValueError(f"fixed: expected [{num_blocks}], got {list(fixed.shape)}")
    key_units, value_units = normalize(keys), normalize(values)
    # Keys decide, so what is wrong with a value has to show in them.
    key_units[~value_units.isfinite().all(1)] = torch.nan
    owner = torch.arange(num_blocks, device=keys.device)
    fused_at = torch.full((num_blocks,), torch.nan, device=keys.device)
    alive = owner
    for pairs in _levels(lens, keys.shape[1]) if threshold < NEVER else ():
        left, right = ([pair[:2] for pair in pairs], [pair[1:] for pair in pairs])
        (left_ids, is_left), (right_ids, is_right) = _padded(alive, left), _padded(alive, right)
        if not left_ids.numel() or not right_ids.numel():
            continue
        # `max` returns a NaN wherever there is one, and would hide the similarities beside it.
        similarity = cosine(key_units[left_ids], key_units[right_ids]).nan_to_num(nan=-torch.inf)
        best, row = similarity.masked_fill(~is_left.unsqueeze(2), -torch.inf).max(1)
        joins = is_right & (best > threshold) & ~fixed[right_ids]
        joined, into = right_ids[joins], left_ids.gather(1, row)[joins]
        turns = ~fixed[into]
        # Several may join one: it is normalised once, when all of them are added.
        touched = torch.unique(into[turns])
        for units in (key_units, value_units):
            # `units[into] += ...` would keep only one of several that join the same block.
            units.index_add_(0, into[turns], units[joined[turns]])
            units[touched] = normalize(units[touched])
        owner[joined], fused_at[joined] = into, best[joins]
        # Ascending, as `_padded` and the table's search need it.
        alive = (owner == torch.arange(num_blocks, device=keys.device)).nonzero()[:, 0]
    for _ in lens:  # an owner may have joined another at each later level
        if torch.equal(owner, owner[owner]):
            break
        owner = owner[owner]
    table = torch.searchsorted(alive, owner)
    return FusedBlocks(table, alive, key_units[alive], value_units[alive], fused_at)


def normalize(blocks: Tensor) -> Tensor:
    """[.., size] float32, own memory: each block over its norm; zeros stay zeros."""
    blocks = blocks.float()
    norms: Tensor = torch.linalg.vector_norm(blocks, dim=-1, keepdim=True)
    return blocks / norms.masked_fill(norms == 0, 1)


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """Similarities of unit vectors [.., m1, size] and [.., m2, size]:
    [.., m1, m2], at most 1 whatever the rounding."""
    return (left @ right.mT).clamp_max(1.0)


# Private, in order of use


def _levels(lens: Sequence[int], size: int) -> Iterator[list[tuple[int, int, int]]]:
    """Pairs of the tree, deepest level first: first block of the left half, of the right half, and
    their end. A level in several parts if padding would take too much."""
    starts = [0, *accumulate(lens)]
    levels, nodes = [], [(0, len(lens))]
    while splits := [(a, a + (b - a) // 2, b) for a, b in nodes if b - a > 1]:
        levels.append([(starts[a], starts[middle], starts[b]) for a, middle, b in splits])
        nodes = [half for a, middle, b in splits for half in ((a, middle), (middle, b))]
    for level in reversed(levels):
        part, left, right = list[tuple[int, int, int]](), 0, 0
        for a, middle, b in level:
            left, right = max(left, middle - a), max(right, b - middle)
            # The blocks of both sides, and the similarities between them.
            if part and (len(part) + 1) * ((left + right) * size + left * right) > MAX_PADDED:
                yield part
                part, left, right = [], middle - a, b - middle
            part.append((a, middle, b))
        yield part


def _padded(alive: Tensor, ranges: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The blocks of each range that are still there, padded to the longest:
    ids and whether they are meant, [num_ranges, m]."""
    bounds = torch.searchsorted(alive, torch.tensor(ranges, device=alive.device))
    first, end = bounds[:, :1], bounds[:, 1:]
    at = first + torch.arange(int((end - first).max()), device=alive.device)
    # What pads a range must be some block's number; it is masked by its caller.
    return alive[at.clamp_max(len(alive) - 1)], at < end
