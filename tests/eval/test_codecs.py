"""What codecs do to answers, at a small size."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from eval.__main__ import main as eval_main
from eval.errors import CommandError
from eval.joint.codecs import (
    ONE_EACH,
    SETTINGS,
    STORED,
    Asked,
    Setting,
    answered,
    asked,
    main,
    read_stores,
    summarize,
)
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
    of = question()
    assert len(of.answer) > 3
    answered(model(), Setting("int3"), of)
    found = answered(model(), Setting("none"), of)
    assert found["equal"] == 1
    assert found["kl"] < 1e-4


def test_variants_of_a_chunk_are_of_the_same_tokens() -> None:
    for keys, values in question().chunks:
        assert keys.shape[0] == 3
        assert torch.equal(values[0, 0], values[2, 0])
        assert not torch.equal(keys[0, 3], keys[2, 3])


def test_only_what_is_equal_bit_by_bit_is_kept_once() -> None:
    """By hand: of 2 x 2 further tokens of keys one is the first variant's, none of the values."""
    first = torch.arange(8.0).view(1, 1, 2, 2, 2)
    keys = torch.cat([first, first.clone(), first + 1])
    keys[1, 0, 1, 1, 1] = 100
    values = torch.arange(24.0).view(3, 1, 2, 2, 2)
    num_bytes, decoded = Setting("dedup").kept(keys, values)
    assert num_bytes == (12 - 1) * 16
    assert torch.equal(decoded()[0], keys)


def test_bytes_of_a_replays_store() -> None:
    """By hand: 3 chunks of one variant, 1 of four, each 2 MiB a variant; plain 14 MiB."""
    store: Any = {"arm": "stores", "cell": {"store": "r"}, "metrics": {}}
    store["variants"] = {"1": [3, 6.0], "4": [1, 2.0]}
    errors = {f"{side} 0{suffix}": 0 for side in ("key", "value") for suffix in ("", " largest")}
    metrics = {"bytes": 0.4, "first": 0.5, "further": 0.25, **errors}
    kept = {"arm": "kept", "cell": STORED[-1].cell, "metrics": metrics}
    results = summarize([kept, store])
    (row,) = results["tables"][-1]["rows"]
    told = {"store": "r", "chunks": 4, "variants": 7, "a chunk": 1.75, "MiB": 14.0}
    share = round((8 * 0.5 + 6 * 0.25) / 14, 3)
    assert row == told | {ONE_EACH: round(8 / 14, 3), STORED[-1].name: share}
    assert f"1.75 variants a chunk, {STORED[-1].name} 0.393" in results["verdict"][0]


def test_quick_run_ends_with_every_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = tmp_path / "replay"
    argv = ["replay", "--fusionrag", "20", "--order", "tree", "--json", "--out", str(replay)]
    assert eval_main([*argv, "--reuse", "fused"]) == 0
    assert main(["--quick", "--stores", str(replay), "--out", str(tmp_path / "run")]) == 0
    run = read_recorded(tmp_path / "run")
    rows = run.record["results"]["tables"][0]["rows"]
    assert len(rows) == len(SETTINGS)
    assert rows[0]["bytes"] == 1
    (store,) = run.record["results"]["tables"][-1]["rows"]
    assert store["store"] == "replay"
    assert store["int4"] < store["int8"] < store["dedup"] <= 1
    assert run.record["spec"]["stores"] == ["replay"]
    assert "int4" in capsys.readouterr().out


def test_a_run_without_a_fused_replay_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = ["replay", "--fusionrag", "20", "--order", "tree", "--out", str(run), "--json"]
    assert eval_main(argv) == 0
    with pytest.raises(CommandError, match="--stores takes runs of one"):
        read_stores([run])
