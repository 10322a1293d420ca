"""What a chunk attended to, and what follows from it: how far its KV depends on a changed prefix
(Cache-Craft 3.1 to 3.3).

    CFO = alpha * CCI * (1 - beta')     share of the chunk to recompute            eq. 12
    CCI = sigmoid(a / b)                how much the prefix went into its KV       eq. 9 to 11
    beta' = beta * (1 - gamma)          how much of that prefix is here again      eq. 6 to 8

Queries are always in this chunk, keys in earlier ones; the paper's index order wavers. The head,
all text before it that is no chunk, is part of the prefix only where it differs (`other_head`): one
that is here again says nothing about chunks, and the prompt's first token takes mass from every
query.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from math import exp, inf
from typing import Any

from radix_ext.chunk import ChunkId

Prefix = tuple[ChunkId, ...]


class Scored(IntEnum):
    """How much of a variant's attention is measured. Each includes what comes before it."""

    NOTHING = 0
    MASSES = 1  # what the chunk attends to: all that this module reads
    ALL = 2  # also what each of its tokens receives


@dataclass(frozen=True, eq=False)
class Attention(ABC):
    """Attention of one variant, measured once; means over layers and heads. Queries are this
    chunk's tokens.

    Raises:
        ValueError: lengths disagree.
    """

    inter: tuple[float, ...]
    """Per chunk of the variant's prefix: attention mass on that chunk,
    summed over this chunk's tokens (Cache-Craft eq. 3)."""
    prefix_lens: tuple[int, ...]  # tokens of each chunk of the prefix
    intra: float
    """Mass on earlier tokens of this chunk, a token's own position excluded (Cache-Craft eq. 4)."""
    head: float = field(default=0.0, kw_only=True)
    """As `inter`, on the tokens before it that are in no chunk."""
    head_len: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if len(self.inter) != len(self.prefix_lens):
            raise ValueError(
                f"inter must have {len(self.prefix_lens)} entries, one a prefix_len, but got"
                f" {len(self.inter)}"
            )

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens of the chunk."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it takes in a store."""

    @property
    def scored(self) -> Scored:
        return Scored.ALL


@dataclass(eq=False, slots=True)
class KvFacts:
    """One chunk's KV: where it was computed, and what was measured of it."""

    prefix: Prefix  # the chunks before it, in order
    _: KW_ONLY
    head: str = ""  # names the text before it that is no chunk: `text_before`
    start: int = 0  # position of the first token
    scores: Any = None  # an `Attention`. None: not measured
    outward: Any = None
    """Per token: attention beyond the chunk in the calibrated heads. None: not known."""
    preprocessed = False

    @property
    def is_alone(self) -> bool:
        """Whether it was computed after no chunk, and as an ordinary prefill does."""
        return not (self.prefix or self.preprocessed)


def prefix_overlap(
    prefix_old: Prefix, inter: Sequence[float], prefix_new: Prefix, other: float = 0.0
) -> float:
    """beta (eq. 6): the share of the chunk's attention to its old prefix that falls on chunks of
    this prompt.

    Args:
        prefix_old: the chunks that its KV was computed after.
        inter: mass on each chunk of `prefix_old`, as `Attention.inter`.
        prefix_new: the chunks before it in this prompt, in any order.
        other: mass on what else stood before it and does not now.
    Returns:
        0 to 1; 0 where the old prefix is empty or got no attention.
    Raises:
        ValueError: `inter` has not one entry a chunk of `prefix_old`.
    """
    total, here = sum(inter) + other, set(prefix_new)
    shared = sum(mass for chunk, mass in zip(prefix_old, inter, strict=True) if chunk in here)
    return shared / total if total > 0 else 0.0


def order_penalty(prefix_old: Prefix, prefix_new: Prefix) -> float:
    """gamma (eq. 7): Kendall's tau distance of the shared chunks' two orders, 0 (same) to 1
    (reversed).

    0 where fewer than two chunks are shared; a repeated chunk counts at its first place. O(m log m)
    compares.
    """
    # Reversed, so that the first place of a repeated chunk is written last.
    rank_new = {chunk: rank for rank, chunk in reversed(list(enumerate(prefix_new)))}
    ranks = [rank_new[chunk] for chunk in dict.fromkeys(prefix_old) if chunk in rank_new]
    if len(ranks) < 2:
        return 0.0
    seen: list[int] = []
    discordant = 0
    for rank in ranks:
        # those before it in the old order and after it in the new
        discordant += len(seen) - bisect_left(seen, rank)
        insort(seen, rank)
    return discordant / (len(ranks) * (len(ranks) - 1) / 2)


def inter_density(scores: Attention, *, other_head: bool = False) -> float:
    """a-bar (eq. 9, 10): sum over the prefix of inter / (num_tokens * prefix_len); layer means."""
    parts, num_tokens = [*zip(scores.inter, scores.prefix_lens, strict=True)], scores.num_tokens
    if other_head and scores.head_len:
        parts.append((scores.head, scores.head_len))
    return sum(mass / (num_tokens * length) for mass, length in parts)


def intra_density(scores: Attention) -> float:
    """b-bar (eq. 9 and 10): intra / n**2."""
    return scores.intra / scores.num_tokens**2


def context_impact(scores: Attention, *, other_head: bool = False) -> float:
    """CCI (eq. 11): sigmoid(a / b), 0.5 (the prefix plays no part) to 1.
    Where b is 0: 1 if a is not 0, else 0.5."""
    a, b = inter_density(scores, other_head=other_head), intra_density(scores)
    if b <= 0:
        return 1.0 if a > 0 else 0.5
    return 1 / (1 + exp(-a / b))  # never of a positive number, so it cannot overflow


def fix_overhead(
    prefix_old: Prefix, scores: Attention | None, prefix_new: Prefix, *, other_head: bool = False
) -> float:
    """CCI * (1 - beta'): the CFO at alpha 1, before it is clamped.

    Args:
        scores: None: CCI is 1, and each chunk of the old prefix is attended alike, as is the head.
        other_head: its KV was computed after another head than this prompt's.
    Returns:
        0 to 1.
    """
    impact = 1.0 if scores is None else context_impact(scores, other_head=other_head)
    inter, head = (scores.inter, scores.head) if scores else ((1.0,) * len(prefix_old), 1.0)
    if prefix_old == prefix_new and not other_head:
        overlap = 1.0  # also where nothing precedes it and eq. 6 is 0 / 0
    else:
        other = head if other_head else 0.0
        overlap = prefix_overlap(prefix_old, inter, prefix_new, other)
        overlap *= 1 - order_penalty(prefix_old, prefix_new)  # beta' (eq. 8)
    return impact * (1 - overlap)


def cfo(alpha: float, overhead: float, num_tokens: int) -> float:
    """CFO (eq. 12): alpha * overhead, kept within [1 / num_tokens, 1]. 1 if `alpha` is infinite."""
    # `inf * 0` is NaN.
    return 1.0 if alpha == inf else min(1.0, max(1 / num_tokens, alpha * overhead))


def solve_alpha(overheads: Sequence[float], lens: Sequence[int], ratio: float) -> float:
    """The alpha at which the mean CFO of all tokens is `ratio`; replaces the paper's validation set
    (eq. 13).

    The mean is piecewise linear in alpha, with a corner where a CFO leaves or meets its clamp.

    Args:
        overheads: `fix_overhead` of each chunk.
        lens: tokens of each chunk, at least 1.
        ratio: 0 to 1.
    Returns:
        inf for ratio 1 (all CFO are 1), 0 for a ratio that the lower clamps alone reach or exceed
        (always for ratio 0).
        Where chunks with overhead 0 keep the mean below `ratio`: the least alpha that raises all
            others to 1.
    """
    # No finite alpha raises a CFO whose overhead is 0 to 1.
    if ratio >= 1:
        return inf

    def total(alpha: float) -> float:
        return sum(n * cfo(alpha, x, n) for x, n in zip(overheads, lens, strict=True))

    target = ratio * sum(lens)
    corners = sorted(
        {0.0}
        | {
            at / x
            for x, n in zip(overheads, lens, strict=True)
            if x > 0
            for at in (1 / n, 1.0)
            if at / x < inf  # a subnormal overhead makes it overflow
        }
    )
    # `total` never falls with alpha, so that a search over k chunks takes O(k log k), not O(k^2).
    above = bisect_left(corners, target, key=total)
    if above == 0 or above == len(corners):
        return corners[min(above, len(corners) - 1)]
    # total(low) < target <= total(high), and between corners it is a straight line.
    low, high = corners[above - 1], corners[above]
    return low + (high - low) * (target - total(low)) / (total(high) - total(low))
