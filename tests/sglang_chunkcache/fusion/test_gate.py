"""The start-up gate: it passes on every model family we support,
and it fails where moving or recomputing is broken."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch

from sglang_chunkcache.attention import choice as attention_choice
from sglang_chunkcache.attention import flashinfer as flashinfer_sparse
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from sglang_chunkcache.attention.sparse_layout import (
    Launch,
    SparseLayout,
    page_indices,
    plan_sparse,
)
from sglang_chunkcache.fusion import gate
from sglang_chunkcache.fusion.gate import GateFigures, gated_attention, run_gate
from sglang_chunkcache.fusion.relocate import RotaryTable
from tests import models
from tests.kit.tensors import flashinfer_of, params_of, reference_of, see_more, spoil, table_of
from tests.reference import flashinfer

pytestmark = pytest.mark.engine

FIGURES = GateFigures(
    moved_ulps=1.0,
    stored_ulps=1.5,
    noise_ulps=0.5,
    kv_error=3.0,
    logit_error=0.02,
    logit_noise=0.01,
    logit_error_unrecomputed=3.0,
    scattered_error=2.0,
    scattered_error_off_by_one=50.0,
    dtype="bfloat16",
)
FIELDS = [field for field in dataclasses.fields(GateFigures) if field.name != "dtype"]


# Figures and limits


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        ({}, True),
        ({"moved_ulps": 5.0, "stored_ulps": 5.0}, True),
        ({"moved_ulps": 5.1}, False),
        ({"stored_ulps": 5.1}, False),
        ({"stored_ulps": 5.1, "noise_ulps": 0.6}, True),
        ({"logit_error": 0.08}, True),
        ({"logit_error": 0.081}, False),
        ({"logit_error": 0.081, "logit_noise": 0.02}, True),
        ({"kv_error": 8.0}, True),
        ({"kv_error": 8.1}, False),
        ({"scattered_error": 8.0}, True),
        ({"scattered_error": 8.1}, False),
        *(
            ({field.name: float("nan")}, "_un" in field.name or "off_by" in field.name)
            for field in FIELDS
        ),
    ],
    ids=str,
)
def test_what_passes(change: dict[str, Any], passed: bool) -> None:
    """Each figure alone fails the gate; one that is no number, too,
    but for those that tell what mistakes would give."""
    figures = dataclasses.replace(FIGURES, **change)
    assert figures.passed is passed
    assert figures.as_dict()["passed"] is passed


def test_a_rounding_per_layer_is_granted() -> None:
    """Where prefill's kernels do not differ from themselves at all."""
    assert gate._rounding(torch.bfloat16, 0) == gate._rounding(torch.bfloat16, 1) == 2**-8
    assert gate._rounding(torch.bfloat16, 4) == 2**-7
    assert gate._rounding(torch.float32, 4) == gate.MIN_NOISE


@pytest.mark.parametrize(
    "change", [{"logit_error_unrecomputed": 0.079}, {"scattered_error_off_by_one": 7.9}], ids=str
)
def test_what_says_nothing(change: dict[str, Any]) -> None:
    """A gate that a broken pass would get through as well."""
    assert FIGURES.conclusive
    assert not dataclasses.replace(FIGURES, **change).conclusive


def test_figures_are_told_with_their_limits() -> None:
    """What the refusal and the command's JSON say."""
    told = FIGURES.as_dict()
    assert (told["moved_ulps"], told["max_ulps"]) == (1.0, 5.0)
    assert told["max_logit_error"] == FIGURES.max_logit_error
    for part in (
        "1.50 by way of the store (limit 5.00)",
        "K/V off by 3 times prefill's own noise (limit 8.0)",
        "without recomputing 3",
        "off by 2 times prefill's own noise (limit 8.0, with limits off by one 50)",
    ):
        assert part in str(FIGURES)


# On real models. Every family, and what mistakes give: test_gate_sweep.py.


@pytest.fixture
def yarn() -> Any:
    """A model whose table carries YaRN's mscale, in float32 so that little is excused."""
    return models.runner("qwen3_yarn", "float32")


@pytest.fixture
def half() -> Any:
    """What FlashInfer takes."""
    return models.runner("llama", "bfloat16", head_dim=64)


def gate_of(runner: Any, table: RotaryTable | None = None, **options: Any) -> GateFigures:
    return run_gate(runner, table or table_of(runner), params_of(runner), **options)


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
    """Keys turned by slightly other angles are off in layer 0."""
    table = table_of(yarn)
    num_positions, num_pairs = table.cos.shape
    dims = torch.arange(num_pairs) / num_pairs
    other = torch.arange(num_positions)[:, None] / (10000.0 * theta) ** dims
    figures = gate_of(yarn, RotaryTable(other.cos(), other.sin(), table.is_neox))
    assert not figures.passed
    assert figures.moved_ulps > 100
    assert figures.stored_ulps > 100


def turn_with_mscale(self: RotaryTable, old: Any, new: Any) -> Any:
    """A turn that is not normalised makes keys longer or shorter."""
    (old_cos, old_sin), (new_cos, new_sin) = self._at(old), self._at(new)
    parts = new_cos * old_cos + new_sin * old_sin, new_sin * old_cos - new_cos * old_sin
    return SimpleNamespace(cos=parts[0].unsqueeze(1), sin=parts[1].unsqueeze(1), stays=None)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("_turn", turn_with_mscale), ("_apply_", lambda self, keys, turn: keys)],
    ids=["mscale left in", "not turned at all"],
)
def test_a_wrong_turn_fails(
    yarn: Any, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any
) -> None:
    table = table_of(yarn)
    assert float(torch.hypot(table.cos[0, 0], table.sin[0, 0])) > 1.05
    monkeypatch.setattr(RotaryTable, name, wrong)
    figures = gate_of(yarn)
    assert not figures.passed
    assert figures.moved_ulps > 100


def test_recomputing_nothing_fails(yarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is then that of KV that was only moved."""
    again = gate._again

    def again_or_not(runner: Any, row: Any, ids: Any, requests: Any, sparse: Any) -> Any:
        is_all = len(requests[0]) == gate.CHUNK_LEN
        return None if is_all else again(runner, row, ids, requests, sparse)

    monkeypatch.setattr(gate, "_again", again_or_not)
    figures = gate_of(yarn)
    assert not figures.passed
    assert figures.logit_error == pytest.approx(figures.logit_error_unrecomputed, rel=1e-3)
    assert figures.kv_error > 100 * gate.NOISE_FACTOR


@pytest.mark.parametrize(
    ("kind", "needed"), [("slots", "392 KV slots"), ("rows", "4 request rows")]
)
def test_no_room_is_said(yarn: Any, kind: str, needed: str) -> None:
    """Too small a pool stops the start with the numbers, and nothing is kept."""
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
    monkeypatch.setattr(gate, "copy_moved", fail)
    with pytest.raises(RuntimeError, match="no kernel image"):
        gate_of(yarn)
    assert free(yarn) == before


# Sparse attention


@pytest.mark.parametrize("kernel", KERNELS)
def test_flashinfer_passes(half: Any, kernel: str) -> None:
    """Every kernel, in the dtype that is served."""
    figures = gate_of(half, sparse=flashinfer_of(half, kernel))
    assert figures.passed, str(figures)
    assert figures.conclusive


def see_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits do nothing: a query sees what its tile's last one sees."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setattr(wrapper, "_extra", lambda w, args, n: (None, args[1]))


def swap_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's pages are read from the wrong place."""

    def indices(launch: Launch, pages: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return page_indices(launch, pages.roll(1), starts)

    monkeypatch.setattr(flashinfer_sparse, "page_indices", indices)


def shift_limits(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """The limits alone are off by one."""

    def shifted(launch: Launch) -> Launch:
        if launch.limits is None:
            return launch
        return launch._replace(limits=(launch.limits + shift).clamp(min=1))

    def plan(*args: Any, **kwargs: Any) -> SparseLayout:
        layout = plan_sparse(*args, **kwargs)
        return dataclasses.replace(layout, launches=tuple(map(shifted, layout.launches)))

    monkeypatch.setattr(flashinfer_sparse, "plan_sparse", plan)


def forget_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are laid out in another order than told."""
    plan = FlashInferSparse.plan

    def shuffled(self: FlashInferSparse, requests: Any) -> Any:
        plan(self, requests)
        num_rows = sum(len(request.positions) for request in requests)
        return torch.arange(num_rows).roll(1)

    monkeypatch.setattr(FlashInferSparse, "plan", shuffled)


MUTANTS = {
    "sees one more": lambda patch: see_more(patch, 1),
    "sees one less": lambda patch: see_more(patch, -1),
    "limits one up": lambda patch: shift_limits(patch, 1),
    "limits one down": lambda patch: shift_limits(patch, -1),
    "no limits": see_all,
    "unforced mask": lambda patch: patch.setattr(FlashInferSparse, "_masks", lambda *_: False),
    "order": forget_order,
    "pages": swap_requests,
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_broken_kernel_fails(half: Any, monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    """In bfloat16, where rounding hides most."""
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
    """FlashInfer is there."""
    told = attention_choice.described("sparse", "the fastest here", "fa2", {"fa2": 1.0})
    choice = flashinfer_of(half, "fa2"), told
    created = {"auto": choice, "sparse": choice, "masked": (None, {})}
    monkeypatch.setattr(attention_choice, "create", lambda runner, setting: created[setting])


def gated(runner: Any, setting: str) -> Any:
    return gated_attention(runner, table_of(runner), params_of(runner), setting)


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("setting", ["auto", "sparse"])
def test_what_passes_is_taken(half: Any, setting: str) -> None:
    sparse, attention, figures = gated(half, setting)
    assert isinstance(sparse, FlashInferSparse)
    assert (attention["kind"], attention["kernel"]) == ("sparse", "fa2")
    assert figures.passed


@pytest.mark.usefixtures("offered")
def test_auto_gives_up_what_fails(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masked pass is measured in its place; the stats say which kernel failed, and how."""
    shift_limits(monkeypatch, -1)
    sparse, attention, figures = gated(half, "auto")
    assert sparse is None
    told = [attention[name] for name in ("kind", "kernel", "ms")]
    assert told == ["masked", None, {"fa2": 1.0}]
    assert attention["reason"].startswith("fa2 failed the gate: layer-0 keys off by")
    assert figures.passed


@pytest.mark.usefixtures("offered")
def test_sparse_that_fails_is_not_given_up(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures refuse the start."""
    shift_limits(monkeypatch, -1)
    sparse, attention, figures = gated(half, "sparse")
    assert sparse is not None
    assert attention["kind"] == "sparse"
    assert not figures.passed


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("name", ["plan", "run"])
def test_auto_gives_up_what_raises(half: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Slots and rows come back from a gate that did not get through."""
    monkeypatch.setattr(FlashInferSparse, name, fail)
    before = free(half)
    sparse, attention, figures = gated(half, "auto")
    assert sparse is None
    assert "no kernel image" in attention["reason"]
    assert figures.passed
    assert free(half) == before
