"""`quality joint`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from eval.errors import CommandError
from eval.joint.kv import Cached, ModelKv
from eval.joint.prompts import Fused, Target, fuse
from eval.quality.greedy import FULL_PREFILL
from eval.quality.joint_curves import JOINT, JointCurves, fused_of
from eval.quality.mode import add_quality_options
from eval.world.tokenizer import turn_pieces
from eval.world.world import World
from sglang_chunkcache.bundled_model import model_dir

ALL, NONE = 0.0, 1.0
"""Thresholds: what fuses."""


@cache
def model() -> ModelKv:
    return ModelKv(model_dir())


@cache
def prompt(number: int) -> Cached:
    """Three chunks."""
    texts = [passage.text for passage in World(5).passages[3 * number : 3 * number + 3]]
    head, pieces, tail = turn_pieces(texts, "Who?", opens=True)
    return model().cached([head, *pieces, tail])


def tensors(prompt: Cached) -> list[torch.Tensor]:
    return [*prompt.pool.k_buffer, *prompt.pool.v_buffer]


def changed(after: Cached, before: Cached, layer: int) -> list[bool]:
    """By token, whether its keys or values are others."""
    ours, theirs = ((one.pool.k_buffer, one.pool.v_buffer) for one in (after, before))
    pairs = zip(ours, theirs, strict=True)
    differ = [(a[layer] != b[layer]).flatten(1).any(1) for a, b in pairs]
    found: list[bool] = torch.stack(differ).any(0).tolist()
    return found


def options(*argv: str) -> Namespace:
    parser = ArgumentParser()
    add_quality_options(parser)
    JointCurves.add_options(parser)
    args = parser.parse_args(["--requests", "3", *argv])
    args.server_flags = []
    return args


def rows_of(*argv: str) -> list[tuple[str, dict[str, Any]]]:
    mode = JointCurves(options("--k", "4", "--max-new-tokens", "12", *argv))
    mode._model = model()
    return list(mode.take(mode.cases, {}))


@pytest.mark.parametrize("over", ["chunks", "batch"])
def test_whole_blocks_of_units_change_alone(over: str) -> None:
    prompts = [prompt(0)] if over == "chunks" else [prompt(0), prompt(1)]
    before = [[each.clone() for each in tensors(one)] for one in prompts]
    fused = fuse(prompts, Target(4, threshold=ALL), over)
    for one, kept in zip(prompts, before, strict=True):
        assert all(map(torch.equal, tensors(one), kept))
    num_blocks = 0
    for one, after in zip(prompts, fused.prompts, strict=True):
        units = [(0, one.num_tokens)] if over == "batch" else one.spans[1:-1]
        inside = {i for start, end in units for i in range(start, end - (end - start) % 4)}
        num_blocks += len(inside) // 4
        for layer in range(4):
            mine = changed(after, one, layer)
            assert not any(is_changed for i, is_changed in enumerate(mine) if i not in inside)
            assert sum(mine) > len(inside) // 2
    assert fused.blocks == num_blocks
    assert len(fused.shared) == 4
    assert max(fused.shared) < num_blocks


def test_what_the_tree_shares_is_no_unit() -> None:
    """Two prompts with the same first chunk: fusing what is equal would count as a saving."""
    texts = [passage.text for passage in World(5).passages[:4]]
    asked = (texts[:2], [texts[0], texts[2]], texts[:2])
    built = [turn_pieces(chosen, "Who?", opens=True) for chosen in asked]
    prompts = [model().cached([head, *pieces, tail]) for head, pieces, tail in built]
    first, second, again = prompts
    pairs = zip(first.token_ids, second.token_ids, strict=False)
    shared = next(at for at, (mine, theirs) in enumerate(pairs) if mine != theirs)
    assert shared >= second.spans[2][0], "the head and a chunk"
    after = fuse(prompts, Target(4, threshold=ALL), "private")
    own = second.num_tokens - shared
    assert after.tokens == first.num_tokens + own
    assert after.blocks == first.num_tokens // 4 + own // 4
    for layer in range(4):
        assert not any(changed(after.prompts[1], second, layer)[:shared])
        assert not any(changed(after.prompts[2], again, layer))
        assert any(changed(after.prompts[1], second, layer))


def test_what_one_copy_shares_is_no_unit() -> None:
    """Two chunks behind another one: the tree does not share them, one copy does."""
    a, b, c = (passage.text for passage in World(5).passages[:3])
    built = [turn_pieces(texts, "Who?", opens=True) for texts in ([a, b], [c, b, a])]
    prompts = [model().cached([head, *pieces, tail]) for head, pieces, tail in built]
    found = {
        over: fuse(prompts, Target(4, threshold=ALL), over) for over in ("private", "unshared")
    }
    second, fused = prompts[1], found["unshared"]
    moved = {i for start, end in second.spans[2:-1] for i in range(start, end)}
    assert found["private"].tokens - fused.tokens == len(moved)
    for layer in range(4):
        mine = changed(fused.prompts[1], second, layer)
        assert any(mine)
        assert not any(is_changed and i in moved for i, is_changed in enumerate(mine))


def test_without_rescaling_tokens_that_share_a_block_have_one_row() -> None:
    for rescaled in (True, False):
        target = Target(4, threshold=ALL, rescaled=rescaled)
        fused = fuse([prompt(0), prompt(1)], target, "batch")
        for layer, num_shared in enumerate(fused.shared):
            sides = [each.pool.k_buffer[layer] for each in fused.prompts]
            blocks = torch.cat([each[: len(each) // 4 * 4] for each in sides])
            num_distinct = len(torch.unique(blocks.view(fused.blocks, -1), dim=0))
            assert num_distinct > num_shared if rescaled else num_distinct == num_shared


def test_what_is_not_fused_stays_bit_by_bit() -> None:
    """At a threshold of 1, and where there is one unit alone."""
    none = Target(4, threshold=NONE), Target(4, ratio=2)
    for target, over in zip(none, ("chunks", "batch"), strict=True):
        fused: Fused = fuse([prompt(0)], target, over)
        assert fused.shared == [fused.blocks] * 4
        assert not any(any(changed(fused.prompts[0], prompt(0), layer)) for layer in range(4))


def test_a_ratio_is_reached() -> None:
    fused = fuse([prompt(0), prompt(1), prompt(2)], Target(4, ratio=1.5), "batch")
    assert 4 * fused.blocks / sum(fused.shared) == pytest.approx(1.5, rel=0.06)


def test_answers_are_those_of_full_prefill_where_nothing_fuses() -> None:
    rows = rows_of("--blocks", "4", "--thresholds", "0", "1", "--ratios", "--batch", "2")
    assert len({key for key, _ in rows}) == len(rows) == 3 + 3 * 4
    joint = [row for _, row in rows if row["arm"] == JOINT]
    assert [row["arm"] for _, row in rows[:3]] == [FULL_PREFILL] * 3
    for row in joint:
        if row["cell"]["threshold"] == NONE:
            assert [row["metrics"][name] for name in ("same", "kl", "kl_first")] == [1, 0, 0]
        elif row["cell"]["over"] == "chunks":
            assert row["metrics"]["kl"] > 0
            assert row["metrics"]["kl_first"] == 0
    batches = [row["encoded"]["requests"] for row in joint if row["cell"]["over"] == "batch"]
    assert batches == [2, 2, 1] * 2


def test_compression_counts_each_block_once() -> None:
    alone = {"requests": 1, "blocks": 8, "shared": [8, 8], "ms": 1.0}
    both = {"requests": 2, "blocks": 16, "shared": [12, 8], "ms": 3.0}
    alone |= {"block": 4, "tokens": 40}
    both |= {"block": 4, "tokens": 72}
    figures = fused_of([both, both])
    assert (figures["compression"], figures["encode_ms"]) == (1.6, 3.0)
    assert figures["rows"] == pytest.approx(144 / (144 - 12 * 4), abs=1e-4)
    assert fused_of([both, both, alone])["compression"] == pytest.approx(48 / 36, abs=1e-4)
    assert fused_of([]) == {}


def test_figures_have_compression_beside_answers() -> None:
    argv = ["--over", "chunks", "--blocks", "4", "--thresholds", "0", "--ratios"]
    rows = [row for _, row in rows_of(*argv)]
    mode = JointCurves(options(*argv))
    results = mode.figures(rows)
    (row,) = results["tables"][0]["rows"]
    assert row.items() >= {"over": "chunks", "block": 4, "threshold": 0.0}.items()
    assert row["compression"] > 2
    (found,) = [each for each in results["contrasts"] if each["metric"] == "em"]
    assert (found["a"], found["b"]) == ("full-prefill", "joint")
    assert mode.figures([])["tables"] == []


@pytest.mark.parametrize(
    "option",
    ["thresholds 1.5", "ratios 1", "blocks 0", "batch 0", "worlds 0", "model-path random"],
)
def test_options_out_of_range_are_refused(option: str) -> None:
    name, value = option.split()
    with pytest.raises(CommandError, match=f"--{name}"):
        JointCurves(options(f"--{name}", value))


def test_a_job_is_a_batch() -> None:
    argv = ["--requests", "5", "--batch", "2", "--blocks", "8", "--ratios", "--thresholds", "0.5"]
    mode = JointCurves(options(*argv))
    ((arms, jobs),) = mode.stages()
    assert arms == ()
    assert len(jobs) == 3
    assert jobs[-1].key.endswith("over=batch/batch=2/block=8/threshold=0.5")
