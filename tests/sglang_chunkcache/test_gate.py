"""The start-up gate: it passes on every model family we support, and it fails where moving or recomputing is broken."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch

from sglang_chunkcache import gate
from sglang_chunkcache.gate import GateFigures, run_gate
from sglang_chunkcache.relocate import RotaryTable
from tests.runners import FAMILIES, make_runner, write_model

FIGURES = GateFigures(
    moved_ulps=1.0,
    stored_ulps=1.5,
    logit_error=0.02,
    logit_noise=0.01,
    logit_error_unrecomputed=3.0,
    logit_scale=4.0,
    dtype="bfloat16",
)


# Figures and limits


def test_the_limit_is_prefills_own_noise() -> None:
    """Four times what prefill in two pieces differs by, and at least four units in the last place of the largest logit."""
    assert FIGURES.max_logit_error == pytest.approx(4 * 4.0 * 2**-7)
    assert dataclasses.replace(FIGURES, logit_noise=0.5).max_logit_error == 2.0
    assert dataclasses.replace(FIGURES, logit_noise=0.0, dtype="float32").max_logit_error == pytest.approx(16 * 2**-23)


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        ({}, True),
        ({"moved_ulps": 2.0, "stored_ulps": 2.0}, True),
        ({"moved_ulps": 2.1}, False),
        ({"stored_ulps": 2.1}, False),
        ({"logit_error": 0.125}, True),
        ({"logit_error": 0.126}, False),
        ({"logit_error": float("nan")}, False),
        ({"moved_ulps": float("nan")}, False),
        ({"stored_ulps": float("nan")}, False),
        ({"logit_noise": float("nan")}, False),
    ],
    ids=str,
)
def test_what_passes(change: dict[str, Any], passed: bool) -> None:
    """Each figure alone fails the gate; one that is no number, too."""
    figures = dataclasses.replace(FIGURES, **change)
    assert figures.passed is passed
    assert figures.as_dict()["passed"] is passed


def test_figures_are_told_with_their_limits() -> None:
    """What stands in the refusal and in the command's JSON."""
    told = FIGURES.as_dict()
    assert (told["moved_ulps"], told["max_ulps"], told["max_logit_error"]) == (1.0, 2.0, FIGURES.max_logit_error)
    assert "1.50 by way of the store (limit 2.0)" in str(FIGURES)
    assert "without recomputing 3" in str(FIGURES)


# On real models


@pytest.fixture(scope="module", params=[(f, d) for f in FAMILIES for d in ("float32", "bfloat16")], ids="-".join)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A ModelRunner of each family."""
    family, dtype = request.param
    return make(tmp_path_factory.mktemp(family), family, dtype)


@pytest.fixture(scope="module")
def yarn(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose table carries YaRN's mscale, in float32 so that little is excused."""
    return make(tmp_path_factory.mktemp("yarn"), "qwen3_yarn", "float32")


def make(path: Path, family: str, dtype: str) -> Any:
    write_model(path, family, dtype=getattr(torch, dtype))
    return make_runner(path, dtype=dtype)


def params_of(runner: Any) -> Any:
    return SimpleNamespace(
        req_to_token_pool=runner.req_to_token_pool, token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator
    )


def table_of(runner: Any) -> RotaryTable:
    return RotaryTable.of(runner.model.model.layers[0].self_attn.rotary_emb)


def spoil(runner: Any) -> None:
    """NaN everywhere: the gate must write what it reads."""
    for buffer in (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer):
        buffer.fill_(float("nan"))


@pytest.mark.engine
def test_every_family_passes_and_gives_all_back(runner: Any) -> None:
    """Moving is right to the last place or two, recomputing to prefill's own noise; slots and rows are as before."""
    params = params_of(runner)
    num_slots, rows = params.token_to_kv_pool_allocator.available_size(), set(params.req_to_token_pool.free_slots)
    spoil(runner)
    figures = run_gate(runner, table_of(runner), params)
    assert figures.passed, str(figures)
    assert figures.logit_error_unrecomputed > 5 * figures.max_logit_error
    assert figures.dtype == str(runner.token_to_kv_pool.dtype).removeprefix("torch.")
    assert params.token_to_kv_pool_allocator.available_size() == num_slots
    assert set(params.req_to_token_pool.free_slots) == rows
    assert len(params.req_to_token_pool.free_slots) == len(rows)


@pytest.mark.engine
@pytest.mark.parametrize("theta", [1.001, 5.0])
def test_a_wrong_table_fails(yarn: Any, theta: float) -> None:
    """Keys turned by slightly other angles are off in layer 0."""
    table = table_of(yarn)
    angles = torch.atan2(table.sin, table.cos)
    positions = torch.arange(len(angles))[:, None]
    dims = torch.arange(angles.shape[1]) / angles.shape[1]
    other = positions / (10000.0 * theta) ** dims
    figures = run_gate(yarn, RotaryTable(other.cos(), other.sin(), table.is_neox), params_of(yarn))
    assert not figures.passed
    assert figures.moved_ulps > 2
    assert figures.stored_ulps > 2


@pytest.mark.engine
def test_mscale_left_in_fails(yarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that is not normalised makes keys longer or shorter."""
    table = table_of(yarn)
    assert float(torch.hypot(table.cos[0, 0], table.sin[0, 0])) > 1.05

    def turn(self: RotaryTable, old: Any, new: Any) -> Any:
        (old_cos, old_sin), (new_cos, new_sin) = self._at(old), self._at(new)
        parts = new_cos * old_cos + new_sin * old_sin, new_sin * old_cos - new_cos * old_sin
        return SimpleNamespace(cos=parts[0].unsqueeze(1), sin=parts[1].unsqueeze(1))

    monkeypatch.setattr(RotaryTable, "_turn", turn)
    figures = run_gate(yarn, table, params_of(yarn))
    assert not figures.passed
    assert figures.moved_ulps > 100


@pytest.mark.engine
def test_keys_not_turned_at_all_fail(yarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotaryTable, "_apply_", lambda self, keys, turn: keys)
    figures = run_gate(yarn, table_of(yarn), params_of(yarn))
    assert not figures.passed
    assert figures.moved_ulps > 100


@pytest.mark.engine
def test_recomputing_nothing_fails(yarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is then that of KV that was only moved."""
    again = gate._again

    def again_or_not(runner: Any, row: Any, ids: Any, start: int, end: int) -> Any:
        return None if end - start != gate.QUESTION_LEN else again(runner, row, ids, start, end)

    monkeypatch.setattr(gate, "_again", again_or_not)
    figures = run_gate(yarn, table_of(yarn), params_of(yarn))
    assert not figures.passed
    assert figures.logit_error == figures.logit_error_unrecomputed


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["slots", "rows"])
def test_no_room_is_said(yarn: Any, kind: str) -> None:
    """Too small a pool stops the start with the numbers, and nothing is kept."""
    params = params_of(yarn)
    allocator, rows = params.token_to_kv_pool_allocator, params.req_to_token_pool
    taken = (
        allocator.alloc(allocator.available_size() - 300)
        if kind == "slots"
        else rows.alloc_rows(len(rows.free_slots) - 3)
    )
    before = allocator.available_size(), len(rows.free_slots)
    with pytest.raises(RuntimeError, match="392 KV slots and 4 request rows"):
        run_gate(yarn, table_of(yarn), params)
    assert (allocator.available_size(), len(rows.free_slots)) == before
    if kind == "slots":
        allocator.free(taken)
    else:
        rows.free_slots.extend(taken)


@pytest.mark.engine
def test_an_error_gives_all_back(yarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of(yarn)
    before = params.token_to_kv_pool_allocator.available_size(), len(params.req_to_token_pool.free_slots)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(gate, "copy_moved", fail)
    with pytest.raises(ValueError, match="broken"):
        run_gate(yarn, table_of(yarn), params)
    after = params.token_to_kv_pool_allocator.available_size(), len(params.req_to_token_pool.free_slots)
    assert after == before
