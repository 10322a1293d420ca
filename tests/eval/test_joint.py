"""KV for the joint encoding's figures."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from eval.joint.command import Blocks, logits, main, measured, similar_in_all_layers
from eval.joint.encoding import encode
from eval.joint.fast_fusion import NEVER
from eval.joint.kv import ModelKv
from eval.joint.units import DRAWN, Sizes, Units
from eval.recorded import read_recorded
from sglang_chunkcache.bundled_model import model_dir

SIZES = Sizes(variants=3, chunks=2, requests=2, passages=2)


@cache
def model() -> ModelKv:
    return ModelKv(model_dir())


@cache
def drawn(of: str, keys: str) -> Units:
    return DRAWN[of, keys](model(), random.Random(0), SIZES)


def test_variants_are_equal_in_layer_0_alone() -> None:
    units = drawn("variants", "un-rotated")
    assert len(set(units.lens)) == 1
    keys = units.keys.view(4, 3, units.lens[0], -1).float()
    differs = (keys - keys[:, :1]).abs().amax((1, 2, 3)) / keys.abs().amax((1, 2, 3))
    assert differs[0] < 0.02
    assert bool((differs[1:] > 0.1).all())
    values = units.values[0].view(3, units.lens[0], -1)
    assert torch.equal(values[0], values[1])


def test_neighbors_are_other_chunks_of_many_equal_words() -> None:
    units = drawn("neighbors", "un-rotated")
    for layer, is_alike in ((0, True), (3, False)):
        first, second = (
            {tuple(row.flatten().tolist()) for row in unit}
            for unit in torch.split(units.values[layer], units.lens)
        )
        assert first != second
        assert (len(first & second) > min(len(first), len(second)) / 4) == is_alike


def test_cached_and_stored_chunks_are_one_but_for_positions() -> None:
    """The same draw: values agree bit by bit, keys have the same length and are turned."""
    stored, cached = drawn("chunks", "un-rotated"), drawn("chunks", "as cached")
    assert stored.lens == cached.lens
    assert torch.equal(stored.values, cached.values)
    norms = [torch.linalg.vector_norm(each.keys.float(), dim=-1) for each in (stored, cached)]
    torch.testing.assert_close(norms[0], norms[1], rtol=0.01, atol=0)
    assert not torch.allclose(stored.keys.float(), cached.keys.float(), rtol=0.1)


def test_queries_attend_as_the_model_does() -> None:
    pieces = ["The company Lumex serves Marton.\n\n", "Which city does the company Lumex serve?"]
    cached = model().cached(pieces)
    llama: Any = model()._model
    encode_piece = model()._tokenizer.encode
    ids = [token for each in pieces for token in encode_piece(each, add_special_tokens=False)]
    llama.set_attn_implementation("eager")
    with torch.inference_mode():
        own = llama(torch.tensor([ids]), output_attentions=True).attentions
    llama.set_attn_implementation("sdpa")
    for layer, weights in enumerate(own):
        found = logits(cached.queries[layer][-5:], cached.pool.k_buffer[layer]).softmax(-1)
        assert float((found - weights[0, :, -5:].float()).abs().max()) < 0.05


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_blocks_are_those_that_are_encoded(block_size: int) -> None:
    """Predictions come from the same blocks."""
    units = drawn("requests", "as cached")
    blocks = Blocks(units, block_size)
    kv = (units.keys[1], units.values[1], units.lens)
    layer = encode(*kv, block_size=block_size, threshold=NEVER)
    assert torch.equal(layer.keys.flatten(1), blocks.keys(1))
    assert len(layer.keys) == sum(blocks.lens)


def test_measured_counts_blocks_and_bytes() -> None:
    blocks = Blocks(drawn("variants", "un-rotated"), 8)
    found = measured(blocks, NEVER)["metrics"]
    assert found["blocks"] == found["shared"] == 4 * sum(blocks.lens)
    assert found["kept"] == found["bytes"] + 12 * found["blocks"]
    assert measured(blocks, 0.95)["metrics"]["shared"] < found["shared"] / 2


def test_command_writes_a_record(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["--quick", "--variants", "3", "--chunks", "2", "--out", str(out)]) == 0
    run = read_recorded(out)
    assert run.kind == "bench"
    assert run.record["spec"]["bench"] == "joint"
    tables = [one["rows"] for one in run.results["tables"]]
    assert len(tables) == 4
    ratios = {(row["of"], row["keys"], row["threshold"]): row for row in tables[1]}
    variants, chunks = (ratios[of, "un-rotated", 0.95] for of in ("variants", "chunks"))
    assert variants["measured"] > chunks["measured"]
    assert {row["of"] for row in tables[2]} == {"requests"}
    for row in tables[2]:
        assert row["drift"] <= row["allowed by epsilon"] + 0.01
        assert row["epsilon"] <= row["epsilon by errors"] * 1.01 + 0.1
    assert all(row["reached"] >= 1 for row in tables[3])


def test_a_block_is_similar_in_all_layers_or_it_is_not() -> None:
    blocks = Blocks(drawn("chunks", "un-rotated"), 8)
    ends = torch.tensor(blocks.lens).cumsum(0).tolist()
    owner = [sum(number >= end for end in ends) for number in range(sum(blocks.lens))]
    keys = [torch.nn.functional.normalize(blocks.keys(layer).float(), dim=1) for layer in range(4)]
    expected = [
        max(
            min(float(each[i] @ each[j]) for each in keys)
            for j in range(len(owner))
            if owner[j] != owner[i]
        )
        for i in range(len(owner))
    ]
    assert similar_in_all_layers(blocks).tolist() == pytest.approx(expected, abs=1e-5)
