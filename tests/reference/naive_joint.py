"""Fast Fusion from the paper's text: algorithm 1 block by block, its equations term by term,
in Python's own floats."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

Vector = list[float]


@dataclass
class Block:
    """A shared block: two directions and the blocks that point to it, the first one its leader.
    A fixed one never changes."""

    keys: Vector
    values: Vector
    members: list[int]
    is_fixed: bool = False


@dataclass
class Trace:
    """`compared`: every similarity that was taken.
    `fused_at`: block -> the one at which it joined another."""

    compared: list[float] = field(default_factory=list)
    fused_at: dict[int, float] = field(default_factory=dict)


def normalize(vector: Vector) -> Vector:
    """Over its norm; zeros stay."""
    norm = math.sqrt(math.fsum(x * x for x in vector))
    return [x / norm for x in vector] if norm else list(vector)


def dot(left: Vector, right: Vector) -> float:
    return math.fsum(a * b for a, b in zip(left, right, strict=True))


def fast_fusion(
    units: Sequence[Sequence[tuple[Vector, Vector]]],
    threshold: float,
    trace: Trace,
    fixed: Collection[int] = (),
) -> list[Block]:
    """Algorithm 1 for units of (keys, values) blocks. A right block joins the most similar left
    one, not each of them. `fixed`: blocks that join none, and whose directions stay."""
    numbered, at = [], 0
    for unit in units:
        numbered.append(
            [
                Block(list(keys), list(values), [at + i], at + i in fixed)
                for i, (keys, values) in enumerate(unit)
            ]
        )
        at += len(unit)
    return _fused(numbered, threshold, trace) if numbered else []


def _fused(units: list[list[Block]], threshold: float, trace: Trace) -> list[Block]:
    if len(units) == 1:
        return [
            replace(block, keys=normalize(block.keys), values=normalize(block.values))
            for block in units[0]
        ]
    left = _fused(units[: len(units) // 2], threshold, trace)
    right = _fused(units[len(units) // 2 :], threshold, trace)
    similarity = [[dot(row.keys, block.keys) for block in right] for row in left]
    trace.compared += [each for row in similarity for each in row]
    joined: set[int] = set()
    for row, block in enumerate(left):
        fused = []
        for i in range(len(right)):
            column = [similarity[other][i] for other in range(len(left))]
            if (
                similarity[row][i] > threshold
                and column.index(max(column)) == row
                and not right[i].is_fixed
            ):
                fused.append(i)
                trace.fused_at[right[i].members[0]] = similarity[row][i]
        if fused and not block.is_fixed:
            block.keys = normalize(
                [sum(xs) for xs in zip(block.keys, *(right[i].keys for i in fused), strict=True)]
            )
            block.values = normalize(
                [
                    sum(xs)
                    for xs in zip(block.values, *(right[i].values for i in fused), strict=True)
                ]
            )
        block.members += [member for i in fused for member in right[i].members]
        joined.update(fused)
    return left + [block for i, block in enumerate(right) if i not in joined]


def normal_cdf(z: float) -> float:
    """Phi."""
    return (1 + math.erf(z / math.sqrt(2))) / 2


def kernel_density(x: float, samples: Sequence[float], h: float) -> float:
    """f_h as written."""
    kernels = [
        math.exp(-(((x - sample) / h) ** 2) / 2) / math.sqrt(2 * math.pi) for sample in samples
    ]
    return sum(kernels) / (len(samples) * h)


def kernel_distribution(x: float, samples: Sequence[float], h: float) -> float:
    """Eq. 1 as written."""
    return sum(normal_cdf((x - sample) / h) for sample in samples) / len(samples)


def extreme_rate(u: float, samples: Sequence[float], h: float) -> float:
    """Eq. 2 as written."""
    n = len(samples)
    a_n = (2 * math.log(n)) ** (-1 / 2)
    b_n = (2 * math.log(n)) ** (1 / 2) - 1 / 2 * (2 * math.log(n)) ** (-1 / 2) * (
        math.log(math.log(n)) + math.log(4 * math.pi)
    )
    return sum(math.exp(-(u - (h * b_n + sample)) / (h * a_n)) for sample in samples) / n


def attention_drift(before: Sequence[float], after: Sequence[float]) -> float:
    """|s' - s|_1 of two vectors of logits."""

    def softmax(logits: Sequence[float]) -> list[float]:
        weights = [math.exp(each - max(logits)) for each in logits]
        return [each / math.fsum(weights) for each in weights]

    return math.fsum(abs(a - b) for a, b in zip(softmax(before), softmax(after), strict=True))
