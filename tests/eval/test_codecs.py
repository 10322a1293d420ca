"""What codecs do to answers, at a small size: nothing where they keep everything, and the less the more bits there are."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from eval.joint.codecs import SETTINGS, Asked, Setting, answered, asked, main, taken
from eval.joint.kv import ModelKv
from eval.recorded import read_recorded
from sglang_chunkcache.bundled_model import model_dir


@cache
def model() -> ModelKv:
    return ModelKv(model_dir())


@cache
def question() -> Asked:
    return asked(model(), random.Random(3), 4, 3)


def test_answers_over_the_prompts_own_kv_are_reproduced() -> None:
    """Also after all other settings have written their KV into the same prompt, which is why it must be restored each time."""
    of = question()
    assert len(of.answer) > 3
    answered(model(), Setting("int3"), of)
    found = answered(model(), Setting("none"), of)
    assert found["equal"] == 1
    assert found["kl"] < 1e-4


def test_variants_of_a_chunk_are_of_the_same_tokens() -> None:
    """In layer 0 they agree, so a chunk that got another one's variants would show. Later layers have seen other orders."""
    for keys, values in question().chunks:
        assert keys.shape[0] == 3
        assert torch.equal(values[0, 0], values[2, 0])
        assert not torch.equal(keys[0, 3], keys[2, 3])


def test_fewer_bits_are_fewer_bytes_and_larger_errors() -> None:
    """Of all plain settings, and of joint ones with the same leader and threshold."""
    kv = question().chunks[0]
    for name in ("int", "joint"):
        same = [
            each
            for each in SETTINGS
            if each.name.startswith(name) and (each.leader, each.threshold) in (("", 0), ("int8", 0.95))
        ]
        found = sorted((taken(each, *kv) for each in same), key=lambda row: row["bytes"])
        assert len(found) == 5
        errors = [sum(row[f"{side} {layer}"] for side in ("key", "value") for layer in range(4)) for row in found]
        assert errors == sorted(errors, reverse=True)


def test_quick_run_ends_with_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command as it is typed."""
    assert main(["--quick", "--out", str(tmp_path / "run")]) == 0
    run = read_recorded(tmp_path / "run")
    rows = run.record["results"]["tables"][0]["rows"]
    assert len(rows) == len(SETTINGS)
    assert rows[0]["bytes"] == 1
    assert "joint" in capsys.readouterr().out
