"""Algorithm 1 at once against algorithm 1 block by block,
and what must hold whatever the blocks are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from eval.joint import fast_fusion as fast_fusion_module
from eval.joint.fast_fusion import FusedBlocks, fast_fusion
from tests.reference import naive_joint

MARGIN = 1e-4
"""A similarity nearer to the threshold may fall on either side of it by rounding."""


class Case(NamedTuple):
    keys: Tensor
    values: Tensor
    lens: list[int]
    threshold: float
    fixed: Tensor | None = None

    def fused(self) -> FusedBlocks:
        return fast_fusion(*self[:4], fixed=self.fixed)


@st.composite
def cases(draw: st.DrawFn, *thresholds: float) -> Case:
    """Up to nine units of 0 to 4 blocks: a few directions with noise, so that some fuse,
    some more than once; a few zeros."""
    lens = draw(st.lists(st.integers(0, 4), min_size=1, max_size=9))
    generator, total = torch.Generator().manual_seed(draw(st.integers(0, 2**32))), sum(lens)
    size, noise = draw(st.sampled_from((3, 6))), draw(st.sampled_from((0.02, 0.2, 0.7)))
    centres = torch.randn(3, size, generator=generator)
    picked = torch.randint(3, (total,), generator=generator)
    keys = centres[picked] + noise * torch.randn(total, size, generator=generator)
    keys *= torch.rand(total, 1, generator=generator) + 0.5
    if draw(st.booleans()):
        keys[::5] = 0
    values = torch.randn(total, 3, generator=generator)
    fixed = torch.rand(total, generator=generator) < 0.3 if draw(st.booleans()) else None
    threshold = draw(st.sampled_from(thresholds or (0.0, 0.5, 0.8, 0.95)))
    return Case(keys, values, lens, threshold, fixed)


def slow(case: Case) -> tuple[list[naive_joint.Block], naive_joint.Trace]:
    """The reference's blocks in its order. Cases in which rounding decides are left out."""
    blocks = list(zip(case.keys.tolist(), case.values.tolist(), strict=True))
    parts = torch.split(torch.arange(len(blocks)), case.lens)
    trace = naive_joint.Trace()
    fixed = () if case.fixed is None else case.fixed.nonzero()[:, 0].tolist()
    shared = naive_joint.fast_fusion(
        [[blocks[i] for i in part] for part in parts], case.threshold, trace, fixed
    )
    assume(all(abs(each - case.threshold) > MARGIN for each in trace.compared))
    over = sorted(each for each in trace.compared if each > case.threshold)
    assume(all(b - a > 1e-6 for a, b in pairwise(over)))  # which one is the most similar
    return shared, trace


def table_of(shared: Sequence[naive_joint.Block], num_blocks: int) -> list[int]:
    table = [-1] * num_blocks
    for number, block in enumerate(shared):
        for member in block.members:
            assert table[member] == -1, "a block has one entry"
            table[member] = number
    return table


@given(cases(0.3, 0.5, 0.8, 0.95))
def test_fast_equals_slow(case: Case) -> None:
    shared, trace = slow(case)
    fused = case.fused()
    assert fused.table.tolist() == table_of(shared, sum(case.lens))
    assert fused.leaders.tolist() == [block.members[0] for block in shared]
    for found, expected in (
        (fused.keys, [block.keys for block in shared]),
        (fused.values, [block.values for block in shared]),
    ):
        wanted = torch.tensor(expected).view(found.shape)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    at = {i: each for i, each in enumerate(fused.fused_at.tolist()) if each == each}
    assert at == pytest.approx(trace.fused_at, abs=1e-5)


@given(cases(0.3, 0.8), st.sampled_from((1, 60, 200)))
def test_levels_in_parts_give_the_same(case: Case, limit: int) -> None:
    whole = case.fused()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_fusion_module, "MAX_PADDED", limit)
        parts = case.fused()
    assert torch.equal(parts.table, whole.table)
    for found, expected in ((parts.keys, whole.keys), (parts.values, whole.values)):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@given(cases())
def test_tables_and_references_add_up(case: Case) -> None:
    """Leaders have joined nothing, others what was similar. Blocks are only read."""
    before = case.keys.clone(), case.values.clone()
    fused, num_blocks = case.fused(), sum(case.lens)
    num_shared, joined = len(fused.leaders), fused.fused_at[~fused.fused_at.isnan()]
    assert fused.table.shape == (num_blocks,)
    assert fused.references.sum() == num_blocks
    assert bool((fused.references >= 1).all())
    assert fused.table[fused.leaders].tolist() == list(range(num_shared))
    assert len(fused.keys) == len(fused.values) == num_shared
    assert len(joined) == num_blocks - num_shared
    assert bool((joined > case.threshold).all())
    assert bool(fused.fused_at[fused.leaders].isnan().all())
    assert torch.equal(case.keys, before[0])
    assert torch.equal(case.values, before[1])


@given(cases(1.0, 1.5))
@example(Case(torch.ones(6, 3), torch.ones(6, 3), [2, 2, 2], 1.0))
def test_nothing_fuses_from_one_on(case: Case) -> None:
    fused = case.fused()
    assert fused.table.tolist() == list(range(sum(case.lens)))
    assert bool(fused.fused_at.isnan().all())


@given(
    st.integers(1, 9), st.integers(1, 3), st.sampled_from((0.0, 0.9, 1 - 1e-5)), st.integers(0, 99)
)
def test_equal_units_become_one(
    num_units: int, num_blocks: int, threshold: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(num_blocks, size, generator=generator) for size in (32, 16))
    similarity = torch.nn.functional.cosine_similarity(keys[:, None], keys[None], dim=2)
    assume(num_blocks == 1 or bool((similarity - 2 * torch.eye(num_blocks) < threshold).all()))
    fused = fast_fusion(
        keys.repeat(num_units, 1), values.repeat(num_units, 1), [num_blocks] * num_units, threshold
    )
    assert fused.table.tolist() == list(range(num_blocks)) * num_units
    assert fused.references.tolist() == [num_units] * num_blocks


def canonical(fused: FusedBlocks, names: Sequence[int]) -> set[frozenset[int]]:
    """Which blocks are one, by name."""
    pairs = list(zip(names, fused.table.tolist(), strict=True))
    shared = range(len(fused.leaders))
    return {frozenset(name for name, row in pairs if row == each) for each in shared}


@given(cases(0.5, 0.8), st.randoms(use_true_random=False))
def test_order_within_units_changes_nothing(case: Case, rng: object) -> None:
    """The tree orders units, not their blocks nor a block's numbers."""
    slow(case)  # where rounding decides, ties would depend on the order
    order: list[int] = []
    at = 0
    for num_blocks in case.lens:
        order += rng.sample(range(at, at + num_blocks), num_blocks)  # type: ignore[attr-defined]
        at += num_blocks
    fixed = None if case.fixed is None else case.fixed[order]
    keys, values = case.keys[order].flip(1), case.values[order]
    fused, other = case.fused(), case._replace(keys=keys, values=values, fixed=fixed).fused()
    assert canonical(fused, range(at)) == canonical(other, order)
    leaders = {int(leader): row for row, leader in enumerate(fused.leaders)}
    for row, leader in enumerate(other.leaders.tolist()):
        before = leaders[order[leader]]
        torch.testing.assert_close(other.keys[row].flip(0), fused.keys[before], atol=1e-5, rtol=0)


@given(cases())
def test_fixed_blocks_lead_as_they_are(case: Case) -> None:
    """They join nothing, and whatever joins them, their directions are their own."""
    fused = case.fused()
    rows = {leader: row for row, leader in enumerate(fused.leaders.tolist())}
    for leader in [] if case.fixed is None else case.fixed.nonzero()[:, 0].tolist():
        for units, blocks in ((fused.keys, case.keys), (fused.values, case.values)):
            own = torch.nn.functional.normalize(blocks[leader], dim=0, eps=1e-30)
            torch.testing.assert_close(units[rows[leader]], own, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize(("place", "table"), [(1, [0, 1, 0, 0]), (3, [0, 1, 0, 2])])
def test_block_that_is_not_finite_stays_alone(
    bad: float, side: str, place: int, table: list[int]
) -> None:
    """It must not get into the directions of others, nor keep them from fusing."""
    blocks = {"keys": torch.ones(4, 2), "values": torch.ones(4, 2)}
    blocks[side][place, 0] = bad
    fused = fast_fusion(blocks["keys"], blocks["values"], [2, 2], 0.5)
    assert fused.table.tolist() == table
    assert bool(fused.keys[0].isfinite().all())
    assert bool(fused.values[0].isfinite().all())


TWO = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("keys", "values", "threshold", "fixed", "names"),
    [
        (torch.ones(3, 2), TWO, 0.5, None, r"keys: expected \[2, size\], got \[3, 2\]"),
        (TWO, torch.ones(2), 0.5, None, r"values: expected \[2, size\], got \[2\]"),
        (TWO, TWO, -0.1, None, "threshold: expected 0 or more, got -0.1"),
        (TWO, TWO, float("nan"), None, "threshold: expected 0 or more, got nan"),
        (TWO, TWO, 0.5, torch.ones(3).bool(), r"fixed: expected \[2\], got \[3\]"),
    ],
)
def test_wrong_arguments(
    keys: Tensor, values: Tensor, threshold: float, fixed: Tensor | None, names: str
) -> None:
    with pytest.raises(ValueError, match=names):
        fast_fusion(keys, values, [1, 1], threshold, fixed=fixed)
