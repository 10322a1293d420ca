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
from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from sglang_chunkcache.attention.reference import ReferenceAttention
from sglang_chunkcache.attention.sparse_layout import SparseLayout, page_indices, plan_sparse
from sglang_chunkcache.fusion import gate
from sglang_chunkcache.fusion.gate import GateFigures, gated_attention, run_gate
from sglang_chunkcache.fusion.relocate import RotaryTable
from tests import models
from tests.reference import flashinfer

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
    assert (told["moved_ulps"], told["max_ulps"], told["max_logit_error"]) == (
        1.0,
        5.0,
        FIGURES.max_logit_error,
    )
    assert "1.50 by way of the store (limit 5.00)" in str(FIGURES)
    assert "K/V off by 3 times prefill's own noise (limit 8.0)" in str(FIGURES)
    assert "without recomputing 3" in str(FIGURES)
    assert "off by 2 times prefill's own noise (limit 8.0, with limits off by one 50)" in str(
        FIGURES
    )


# On real models


EVERY_DAY = (("qwen2", "float32"), ("qwen3_yarn", "float32"), ("stablelm", "bfloat16"))


@pytest.fixture(
    params=[
        pytest.param(
            (f, d), marks=() if (f, d) in EVERY_DAY else pytest.mark.nightly, id=f"{f}-{d}"
        )
        for f in models.FAMILIES
        for d in ("float32", "bfloat16")
    ]
)
def runner(request: pytest.FixtureRequest) -> Any:
    """A ModelRunner of each family."""
    return models.runner(*request.param)


@pytest.fixture
def yarn() -> Any:
    """A model whose table carries YaRN's mscale, in float32 so that little is excused."""
    return models.runner("qwen3_yarn", "float32")


@pytest.fixture
def half() -> Any:
    """What FlashInfer takes."""
    return models.runner("llama", "bfloat16", head_dim=64)


def heads_of(runner: Any) -> tuple[HeadShape, float]:
    layer = runner.model.model.layers[0].self_attn.attn
    return HeadShape(
        layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, runner.dtype
    ), layer.scaling


def reference(runner: Any) -> ReferenceAttention:
    shape, scale = heads_of(runner)
    return ReferenceAttention(shape, scale=scale)


def on_flashinfer(runner: Any, kernel: str) -> FlashInferSparse:
    """On the torch model of it."""
    shape, scale = heads_of(runner)
    return FlashInferSparse(
        shape, device=torch.device("cpu"), scale=scale, kernel=kernel, modules=flashinfer
    )


def params_of(runner: Any) -> Any:
    return SimpleNamespace(
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
    )


def table_of(runner: Any) -> RotaryTable:
    return RotaryTable.of(runner.model.model.layers[0].self_attn.rotary_emb)


def spoil(runner: Any) -> None:
    """NaN everywhere: the gate must write what it reads."""
    for buffer in (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer):
        buffer.fill_(float("nan"))


@pytest.mark.engine
@pytest.mark.parametrize("sparse", [False, True], ids=["masked", "sparse"])
def test_every_family_passes_and_gives_all_back(runner: Any, sparse: bool) -> None:
    """Moving is right to the last place or two, recomputing to prefill's own noise;
    slots and rows are as before."""
    params = params_of(runner)
    num_slots, rows = (
        params.token_to_kv_pool_allocator.available_size(),
        set(params.req_to_token_pool.free_slots),
    )
    spoil(runner)
    figures = run_gate(
        runner, table_of(runner), params, sparse=reference(runner) if sparse else None
    )
    assert figures.passed, str(figures)
    assert figures.conclusive
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
    assert figures.moved_ulps > 100
    assert figures.stored_ulps > 100


@pytest.mark.engine
def test_mscale_left_in_fails(yarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that is not normalised makes keys longer or shorter."""
    table = table_of(yarn)
    assert float(torch.hypot(table.cos[0, 0], table.sin[0, 0])) > 1.05

    def turn(self: RotaryTable, old: Any, new: Any) -> Any:
        (old_cos, old_sin), (new_cos, new_sin) = self._at(old), self._at(new)
        parts = new_cos * old_cos + new_sin * old_sin, new_sin * old_cos - new_cos * old_sin
        return SimpleNamespace(cos=parts[0].unsqueeze(1), sin=parts[1].unsqueeze(1), stays=None)

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

    def again_or_not(runner: Any, row: Any, ids: Any, requests: Any, sparse: Any) -> Any:
        return (
            None
            if len(requests[0]) == gate.CHUNK_LEN
            else again(runner, row, ids, requests, sparse)
        )

    monkeypatch.setattr(gate, "_again", again_or_not)
    figures = run_gate(yarn, table_of(yarn), params_of(yarn))
    assert not figures.passed
    assert figures.logit_error == pytest.approx(figures.logit_error_unrecomputed, rel=1e-3)
    assert figures.kv_error > 100 * gate.NOISE_FACTOR


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kind", "needed"), [("slots", "392 KV slots"), ("rows", "4 request rows")]
)
def test_no_room_is_said(yarn: Any, kind: str, needed: str) -> None:
    """Too small a pool stops the start with the numbers, and nothing is kept."""
    params = params_of(yarn)
    allocator, rows = params.token_to_kv_pool_allocator, params.req_to_token_pool
    taken = (
        allocator.alloc(allocator.available_size() - 300)
        if kind == "slots"
        else rows.alloc_rows(len(rows.free_slots) - 3)
    )
    before = allocator.available_size(), len(rows.free_slots)
    with pytest.raises(RuntimeError, match=f"needs {needed}"):
        run_gate(yarn, table_of(yarn), params)
    assert (allocator.available_size(), len(rows.free_slots)) == before
    if kind == "slots":
        allocator.free(taken)
    else:
        rows.free_slots.extend(taken)


@pytest.mark.engine
def test_an_error_gives_all_back(yarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of(yarn)
    before = (
        params.token_to_kv_pool_allocator.available_size(),
        len(params.req_to_token_pool.free_slots),
    )

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(gate, "copy_moved", fail)
    with pytest.raises(ValueError, match="broken"):
        run_gate(yarn, table_of(yarn), params)
    after = (
        params.token_to_kv_pool_allocator.available_size(),
        len(params.req_to_token_pool.free_slots),
    )
    assert after == before


# Sparse attention


@pytest.mark.engine
@pytest.mark.parametrize("kernel", KERNELS)
def test_flashinfer_passes(half: Any, kernel: str) -> None:
    """Every kernel, in the dtype that is served."""
    figures = run_gate(half, table_of(half), params_of(half), sparse=on_flashinfer(half, kernel))
    assert figures.passed, str(figures)
    assert figures.conclusive


def see_more(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """Every query sees other keys than it should."""
    visible = SparseRequest.visible
    monkeypatch.setattr(
        SparseRequest, "visible", lambda r: (visible(r) + more).clamp(1, r.num_keys)
    )


def see_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits do nothing: a query sees what its tile's last one sees."""
    monkeypatch.setattr(
        flashinfer.BatchPrefillWithPagedKVCacheWrapper, "_extra", lambda w, args, n: (None, args[1])
    )


def shift_limits(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    """The limits alone are off by one."""

    def plan(*args: Any, **kwargs: Any) -> SparseLayout:
        layout = plan_sparse(*args, **kwargs)
        launches = tuple(
            each
            if each.limits is None
            else each._replace(limits=(each.limits + shift).clamp(min=1))
            for each in layout.launches
        )
        return dataclasses.replace(layout, launches=launches)

    monkeypatch.setattr(flashinfer_sparse, "plan_sparse", plan)


def forget_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are laid out in another order than told."""
    plan = FlashInferSparse.plan

    def shuffled(self: FlashInferSparse, requests: Any) -> Any:
        plan(self, requests)
        num_rows = sum(len(request.positions) for request in requests)
        return torch.arange(num_rows).roll(1)

    monkeypatch.setattr(FlashInferSparse, "plan", shuffled)


def swap_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's pages are read from the wrong place."""
    indices = page_indices
    monkeypatch.setattr(
        flashinfer_sparse,
        "page_indices",
        lambda launch, pages, starts: indices(launch, pages.roll(1), starts),
    )


MUTANTS = {
    "sees one more": lambda patch: see_more(patch, 1),
    "sees one less": lambda patch: see_more(patch, -1),
    "limits one up": lambda patch: shift_limits(patch, 1),
    "limits one down": lambda patch: shift_limits(patch, -1),
    "no limits": see_all,
    "unforced mask": lambda patch: patch.setattr(
        FlashInferSparse, "_masks", lambda self, kind: False
    ),
    "order": forget_order,
    "pages": swap_requests,
}


@pytest.mark.engine
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_broken_kernel_fails(half: Any, monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    """In bfloat16, where rounding hides most."""
    mutant(monkeypatch)
    figures = run_gate(half, table_of(half), params_of(half), sparse=on_flashinfer(half, "fa2"))
    assert not figures.scattered_error <= gate.NOISE_FACTOR, str(figures)
    assert not figures.passed


@pytest.mark.engine
def test_dummy_weights_pass_and_say_nothing(half: Any) -> None:
    """SGLang's `--load-format dummy`: no mistake would show, and none is seen."""
    parameters = list(half.model.parameters())
    kept = [parameter.data.clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.data.uniform_(-1e-3, 1e-3, generator=generator)
    try:
        for sparse in (None, on_flashinfer(half, "fa2")):
            figures = run_gate(half, table_of(half), params_of(half), sparse=sparse)
            assert figures.passed, str(figures)
            assert not figures.conclusive
    finally:
        for parameter, data in zip(parameters, kept, strict=True):
            parameter.data.copy_(data)


# What a server gets


@pytest.fixture
def offered(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer is there."""
    choice = (
        on_flashinfer(half, "fa2"),
        attention_choice.described("sparse", "the fastest here", "fa2", {"fa2": 1.0}),
    )
    monkeypatch.setattr(
        attention_choice,
        "create",
        lambda runner, setting: choice if setting != "masked" else (None, {}),
    )


def gated(runner: Any, setting: str) -> Any:
    return gated_attention(runner, table_of(runner), params_of(runner), setting)


@pytest.mark.engine
@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("setting", ["auto", "sparse"])
def test_what_passes_is_taken(half: Any, setting: str) -> None:
    sparse, attention, figures = gated(half, setting)
    assert isinstance(sparse, FlashInferSparse)
    assert (attention["kind"], attention["kernel"]) == ("sparse", "fa2")
    assert figures.passed


@pytest.mark.engine
@pytest.mark.usefixtures("offered")
def test_auto_gives_up_what_fails(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masked pass is measured in its place; the stats say which kernel failed, and how."""
    shift_limits(monkeypatch, -1)
    sparse, attention, figures = gated(half, "auto")
    assert sparse is None
    assert (attention["kind"], attention["kernel"], attention["ms"]) == (
        "masked",
        None,
        {"fa2": 1.0},
    )
    assert attention["reason"].startswith("fa2 failed the gate: layer-0 keys off by")
    assert figures.passed


@pytest.mark.engine
@pytest.mark.usefixtures("offered")
def test_sparse_that_fails_is_not_given_up(half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures refuse the start."""
    shift_limits(monkeypatch, -1)
    sparse, attention, figures = gated(half, "sparse")
    assert sparse is not None
    assert attention["kind"] == "sparse"
    assert not figures.passed


@pytest.mark.engine
@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("name", ["plan", "run"])
def test_auto_gives_up_what_raises(half: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Slots and rows come back from a gate that did not get through."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(FlashInferSparse, name, fail)
    free = half.token_to_kv_pool_allocator.available_size()
    sparse, attention, figures = gated(half, "auto")
    assert sparse is None
    assert "no kernel image" in attention["reason"]
    assert figures.passed
    assert half.token_to_kv_pool_allocator.available_size() == free
