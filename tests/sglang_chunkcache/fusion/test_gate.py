"""The start-up gate: it passes on every model family we support,
and it fails where moving or recomputing is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sglang_chunkcache.attention import choice as attention_choice
from sglang_chunkcache.attention.base import SparseAttention, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from sglang_chunkcache.attention.per_pass import KernelPerPass
from sglang_chunkcache.attention.sparse_layout import (
    Launch,
    SparseLayout,
)
from sglang_chunkcache.fusion import gate, trial_rows
from sglang_chunkcache.fusion.gate import GateFigures, gated_attention, open_trial
from sglang_chunkcache.fusion.relocate import RotaryTable
from tests import models
from tests.kit.tensors import flashinfer_of, means_of, reference_of, spoil, table_of

pytestmark = pytest.mark.engine

# the noise of keys is 0.5 units, that of logits .01
FIGURES = GateFigures(1.0, 1.5, 2.5, 0.5, 3.0, 0.02, 0.01, 3.0, 2.0, 50.0, dtype="bfloat16")
TOLD = ("logit_error_unrecomputed", "scattered_error_off_by_one")
"""What mistakes would give: too little of it, and the gate says nothing."""
PASSES: list[tuple[dict[str, float], bool]] = [
    ({}, True),
    ({"moved_ulps": 5.0, "stored_ulps": 5.0, "kv_error": 8.0, "logit_error": 0.08}, True),
    ({"moved_ulps": 5.1}, False),
    ({"stored_ulps": 5.1}, False),
    ({"far_ulps": 5.1}, False),
    ({"stored_ulps": 5.1, "noise_ulps": 0.6}, True),
    ({"logit_error": 0.081}, False),
    ({"logit_error": 0.081, "logit_noise": 0.02}, True),
    ({"kv_error": 8.1}, False),
    ({"scattered_error": 8.1}, False),
]


def test_what_passes() -> None:
    """Each figure alone fails the gate; one that is no number, too."""
    names = {field.name for field in dataclasses.fields(GateFigures)} - {"dtype"}
    nans = [({name: float("nan")}, name in TOLD) for name in names]
    for change, passed in (*PASSES, *nans):
        figures = dataclasses.replace(FIGURES, **change)  # type: ignore[arg-type]
        assert figures.passed is figures.as_dict()["passed"] is passed, change
    assert "stored_ulps 1.5 (limit 5), far_ulps 2.5 (limit 5)" in str(FIGURES)
    assert FIGURES.conclusive
    for name in TOLD:
        assert not dataclasses.replace(FIGURES, **{name: 0.05}).conclusive  # type: ignore[arg-type]


# Figures and limits


Mutant = Callable[[pytest.MonkeyPatch], object]

# On real models. Every family, and what mistakes give: test_gate_sweep.py.


@pytest.fixture
def yarn() -> Any:
    """A model whose table carries YaRN's mscale, in float32 so that little is excused."""
    return models.runner("qwen3_yarn", "float32")


@pytest.fixture
def half() -> Any:
    """What FlashInfer takes."""
    return models.runner("llama", "bfloat16", head_dim=64)


def gate_of(
    runner: Any, table: RotaryTable | None = None, sparse: SparseAttention | None = None
) -> GateFigures:
    with open_trial(means_of(runner, table)) as trial:
        return trial.measure(sparse)


def free(runner: Any) -> tuple[int, list[int]]:
    """Slots and rows."""
    rows = runner.req_to_token_pool.free_slots
    return runner.token_to_kv_pool_allocator.available_size(), sorted(rows)


@pytest.mark.parametrize("sparse", [False, True], ids=["masked", "sparse"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_passes_and_gives_all_back(sparse: bool, dtype: str) -> None:
    """Over a pool of NaN: the gate writes what it reads. Slots and rows are as before."""
    runner = models.runner("llama", dtype)
    before = free(runner)
    spoil(runner)
    figures = gate_of(runner, sparse=reference_of(runner) if sparse else None)
    assert figures.passed, str(figures)
    assert figures.conclusive
    assert figures.dtype == dtype
    assert free(runner) == before


@pytest.mark.parametrize("theta", [1.001, 5.0])
def test_a_wrong_table_fails(yarn: Any, theta: float) -> None:
    table = table_of(yarn)
    num_positions, num_pairs = table.cos.shape
    dims = torch.arange(num_pairs) / num_pairs
    other = torch.arange(num_positions)[:, None] / (10000.0 * theta) ** dims
    figures = gate_of(yarn, RotaryTable(other.cos(), other.sin(), table.is_neox))
    assert not figures.passed
    assert min(figures.moved_ulps, figures.stored_ulps) > 100


def test_a_table_that_is_wrong_far_away_alone_fails(yarn: Any) -> None:
    """The gate's prompt is short: a model that turns otherwise from some position on would pass."""
    table = table_of(yarn)
    at = torch.arange(table.num_positions).clamp(max=table.num_positions * 3 // 4)
    figures = gate_of(yarn, RotaryTable(table.cos[at], table.sin[at], table.is_neox))
    assert not figures.passed
    assert max(figures.moved_ulps, figures.stored_ulps) < figures.max_ulps < figures.far_ulps


@pytest.mark.parametrize(
    ("kind", "needed"), [("slots", "392 KV slots"), ("rows", "4 request rows")]
)
def test_no_room_is_said(yarn: Any, kind: str, needed: str) -> None:
    allocator, rows = yarn.token_to_kv_pool_allocator, yarn.req_to_token_pool
    if kind == "slots":
        taken, give = allocator.alloc(allocator.available_size() - 300), allocator.free
    else:
        taken, give = rows.alloc_rows(len(rows.free_slots) - 3), rows.free_slots.extend
    before = free(yarn)
    with pytest.raises(RuntimeError, match=f"needs {needed}"):
        gate_of(yarn)
    assert free(yarn) == before
    give(taken)


def fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("no kernel image")


def test_an_error_gives_all_back(yarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = free(yarn)
    monkeypatch.setattr(trial_rows, "copy_moved", fail)
    with pytest.raises(RuntimeError, match="no kernel image"):
        gate_of(yarn)
    assert free(yarn) == before


# Sparse attention


@pytest.mark.parametrize("kernel", KERNELS)
def test_flashinfer_passes(half: Any, kernel: str) -> None:
    figures = gate_of(half, sparse=flashinfer_of(half, kernel))
    assert figures.passed, str(figures)
    assert figures.conclusive


def shift_limits(monkeypatch: pytest.MonkeyPatch, shift: int, kernel: str | None = None) -> None:
    """The limits alone are off by one; None: of every kernel."""
    lay_out = FlashInferSparse.lay_out

    def shifted(launch: Launch) -> Launch:
        if launch.limits is None:
            return launch
        return launch._replace(limits=(launch.limits + shift).clamp(min=1))

    def plan(attention: FlashInferSparse, requests: Sequence[SparseRequest]) -> SparseLayout:
        layout = lay_out(attention, requests)
        if kernel not in (None, attention._kernel):
            return layout
        return dataclasses.replace(layout, launches=tuple(map(shifted, layout.launches)))

    monkeypatch.setattr(FlashInferSparse, "lay_out", plan)


MUTANTS: dict[str, Mutant] = {
    "limits one down": lambda patch: shift_limits(patch, -1),
    "unforced mask": lambda patch: patch.setattr(FlashInferSparse, "_masks", lambda *_: False),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_broken_kernel_fails(half: Any, monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    """The smallest mistakes, in bfloat16, where rounding hides most."""
    mutant(monkeypatch)
    figures = gate_of(half, sparse=flashinfer_of(half, "fa2"))
    assert not figures.scattered_error <= gate.NOISE_FACTOR, str(figures)
    assert not figures.passed


def test_dummy_weights_pass_and_say_nothing(half: Any) -> None:
    """SGLang's `--load-format dummy`: no mistake would show, and none is seen."""
    parameters = list(half.model.parameters())
    kept = [parameter.data.clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.data.uniform_(-1e-3, 1e-3, generator=generator)
    try:
        for sparse in (None, flashinfer_of(half, "fa2")):
            figures = gate_of(half, sparse=sparse)
            assert figures.passed, str(figures)
            assert not figures.conclusive
    finally:
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data.copy_(data)


# What a server gets


@pytest.fixture
def offered(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer is there, with kernels of which the gate's passes would all take the first."""
    ms = dict.fromkeys(KERNELS, 1.0)
    told = attention_choice.described("sparse", "the fastest here", ", ".join(KERNELS), ms)
    kernels = {kernel: flashinfer_of(half, kernel) for kernel in KERNELS}
    choice = KernelPerPass(kernels, {**ms, "fa2": 1e-9}), told
    created = {"auto": choice, "sparse": choice, "masked": (None, {})}
    monkeypatch.setattr(attention_choice, "create", lambda runner, setting: created[setting])


HARM: dict[str, tuple[Mutant, list[str]]] = {
    "": (lambda patch: None, [*KERNELS]),
    "fa2 failed the gate: moved_ulps": (lambda patch: shift_limits(patch, -1), []),
    "fa3 failed the gate: moved_ulps": (lambda patch: shift_limits(patch, -1, "fa3"), ["fa2"]),
    "no kernel image": (lambda patch: patch.setattr(FlashInferSparse, "plan", fail), []),
    "no kernel image ": (lambda patch: patch.setattr(FlashInferSparse, "run", fail), []),
}
"""Why a kernel is given up -> how it comes about, and which are left."""


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("reason", HARM)
def test_auto_gives_up_what_fails(half: Any, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Where none is left, the masked pass is measured; the stats say which failed, and how."""
    harm, left = HARM[reason]
    harm(monkeypatch)
    before = free(half)
    sparse, attention, figures = gated_attention(means_of(half), "auto")
    assert figures.passed
    assert free(half) == before
    assert attention["ms"] == dict.fromkeys(KERNELS, 1.0)
    kind = ("sparse", ", ".join(left)) if left else ("masked", None)
    assert (attention["kind"], attention["kernel"]) == kind
    assert (sparse and [*sparse.kernels]) == (left or None)
    assert reason.strip() in attention["reason"]


@pytest.mark.usefixtures("offered")
def test_sparse_that_fails_is_not_given_up(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        shift_limits(patch, -1)
        sparse, _, figures = gated_attention(means_of(half), "sparse")
        assert (sparse is None, figures.passed) == (False, False)
    shift_limits(monkeypatch, -1, "fa3")
    sparse, attention, figures = gated_attention(means_of(half), "sparse")
    assert (sparse and [*sparse.kernels], figures.passed) == (["fa2"], True)
    assert "fa3 failed the gate" in attention["reason"]
    monkeypatch.setattr(FlashInferSparse, "plan", fail)
    with pytest.raises(RuntimeError, match=r"fa2 failed the gate: .*no kernel image"):
        gated_attention(means_of(half), "sparse")
