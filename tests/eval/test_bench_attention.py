"""The attention benchmark without a GPU: positions, work, arms, figures, and the command."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from eval.bench.attention import command
from eval.bench.attention.arms import Arm, FlashInferPrefill, arms_of, runs_of
from eval.bench.attention.cells import Cell, make_requests, pairs_of, positions_of
from eval.bench.attention.command import Prepared
from eval.bench.attention.figures import NO_GPU, PAPER, summarize
from eval.bench.attention.reference import ReferenceAttention
from eval.errors import CommandError
from eval.recorded import read_recorded
from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from tests.reference import flashinfer

pytestmark = pytest.mark.nightly

SHAPE = HeadShape(4, 2, 16, torch.float32)
CPU = torch.device("cpu")
CELLS = [
    Cell("scattered", 90, 2, 0.2),
    Cell("clustered", 300, 2, 0.5),
    Cell("all", 70, 1, 1.0),
    Cell("scattered", 50, 1, 0.01),
]
SMALL = [
    "--device=cpu",
    "--quick",
    "--contexts=64",
    "--batches=1",
    "--ratios",
    "0.1",
    "1",
    "--repetitions=2",
]
STEADY = {"fa2": 3, "fa3": 2, "dense_fa3": 12, "dense_fa2": 24, "sdpa": 6, "custom_mask": 9}
"""Milliseconds at 32k, 15%."""


@pytest.fixture(autouse=True)
def check_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cells are compared with the reference as wholes."""
    monkeypatch.setattr(command, "CHECKED_ROWS", 10_000)


def make_samples(
    ms: dict[str, list[float]], *, batch: int = 1, context: int = 32_768, device: str = "cuda"
) -> list[dict[str, Any]]:
    """A cell at 15%, of whose dense work a seventh is needed."""
    cell = vars(Cell("scattered", context, batch, 0.15))
    about = {"cell": cell, "request": "0", "device": device}
    work = {"pairs": 1, "flops": 10**9, "dense_flops": 7 * 10**9}
    layout = {"executed_over_needed": 3.0, "index_mib": 5.0, "layout_s": 0.00025}
    samples = [
        {"arm": "work", **about, "metrics": work},
        {"arm": "layout fa3", **about, "metrics": layout},
    ]
    for name, taken in ms.items():
        plan = {"plan_s": 0.001, "index_mib": 1.0}
        plan |= {"mask_mib": 7.0} if name == "custom_mask" else {}
        samples += [
            {"arm": name, **about, "metrics": {"layer_s": each / 1000, **plan}} for each in taken
        ]
    return samples


def rows_of(results: Any, title: str) -> list[dict[str, Any]]:
    return next((table["rows"] for table in results["tables"] if table["title"] == title), [])


@pytest.mark.parametrize("pattern", ["scattered", "clustered"])
@pytest.mark.parametrize("ratio", [0.02, 0.15, 0.5, 0.98, 1.0])
def test_positions_have_the_ratio_and_are_the_same_again(pattern: str, ratio: float) -> None:
    positions = positions_of(pattern, 4096, ratio, seed=3)
    assert positions.numel() == round(4096 * ratio)
    assert 0 <= int(positions[0]) <= int(positions[-1]) < 4096
    assert bool((positions.diff() > 0).all())
    assert torch.equal(positions, positions_of(pattern, 4096, ratio, seed=3))
    assert ratio == 1 or not torch.equal(positions, positions_of(pattern, 4096, ratio, seed=4))


def test_clustered_tokens_stand_in_runs_of_about_64() -> None:
    """Runs never touch, so each is as long as it was drawn, but for the last."""
    clustered, scattered = (
        [run.num_rows for run in runs_of([SparseRequest(drawn, torch.arange(32_768))])]
        for drawn in (positions_of(p, 32_768, 0.15, seed=0) for p in ("clustered", "scattered"))
    )
    assert all(32 <= length <= 96 for length in clustered[:-1])
    assert 56 <= sum(clustered) / len(clustered) <= 72
    assert sum(scattered) / len(scattered) < 1.3


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_work_is_what_slow_loops_count(cell: Cell) -> None:
    requests = make_requests(cell)
    assert pairs_of(requests) == sum(
        1 for r in requests for position in r.positions.tolist() for _ in range(position + 1)
    )


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cpu_arms_agree_with_the_reference(cell: Cell) -> None:
    arms = arms_of(SHAPE, CPU)
    assert list(arms) == ["reference", "sdpa", "dense"]
    for arm in arms.values():
        Prepared(arm, cell, SHAPE, CPU)


class MaskingWrapper:
    """What FlashInfer does with an unpacked mask: entry by entry, bits of [rows, keys]."""

    def plan(
        self, *args: Any, custom_mask: Any, causal: bool, sm_scale: float, **kwargs: Any
    ) -> None:
        assert not causal
        self._args, self._mask, self._scale = args, custom_mask, sm_scale

    def run(self, queries: Any, pool: tuple[Any, Any], *, out: Any) -> Any:
        qo_indptr, kv_indptr, indices, last_page_len, num_heads, num_kv_heads, _, page_size = (
            self._args
        )
        start = 0
        for entry, last in enumerate(last_page_len.tolist()):
            rows = slice(*qo_indptr[entry : entry + 2].tolist())
            pages = indices[slice(*kv_indptr[entry : entry + 2].tolist())].long()
            num_keys = (len(pages) - 1) * page_size + last
            keys, values = (
                p[pages].flatten(0, 1)[:num_keys].repeat_interleave(num_heads // num_kv_heads, 1)
                for p in pool
            )
            end = start + (rows.stop - rows.start) * num_keys
            logits = torch.einsum("nhd,mhd->hnm", queries[rows], keys) * self._scale
            logits = logits.masked_fill(~self._mask[start:end].view(-1, num_keys), float("-inf"))
            out[rows] = torch.einsum("hnm,mhd->nhd", logits.softmax(-1), values)
            start = end
        return out


@pytest.mark.parametrize("masked", [False, True], ids=["runs", "mask"])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_flashinfer_baselines_are_planned_right(cell: Cell, masked: bool) -> None:
    """Indices, lengths and masks, by a wrapper that computes what FlashInfer's would."""

    def create(device: Any, backend: str) -> Any:
        workspace = torch.empty(16, dtype=torch.uint8)
        made = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        return MaskingWrapper() if masked else made(workspace, backend=backend)

    for whole in (False, True):
        make = partial(FlashInferPrefill, SHAPE, CPU, "fa2", masked=masked, create=create)
        Prepared(Arm(make, whole=whole), cell, SHAPE, CPU)


@pytest.mark.parametrize("kernel", KERNELS)
def test_our_arms_run_in_the_bench(kernel: str) -> None:
    """Their order of rows is followed, else the check would not pass."""
    shape = HeadShape(4, 2, 64, torch.bfloat16)
    made = {"device": CPU, "scale": 64**-0.5, "kernel": kernel, "modules": flashinfer}
    for cell in (Cell("scattered", 640, 2, 0.15), Cell("clustered", 640, 2, 0.5)):
        Prepared(Arm(partial(FlashInferSparse, shape, **made)), cell, shape, CPU)


def test_too_many_indices_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.bench.attention.arms.MAX_INDEX_BYTES", 100)
    arm = FlashInferPrefill(SHAPE, CPU, "fa2", create=lambda device, backend: None)
    with pytest.raises(ValueError, match="slot indices of"):
        arm.plan(make_requests(CELLS[0]))


class ShiftedAttention(ReferenceAttention):
    """Right but for one number."""

    def run(self, queries: Any, keys: Any, values: Any) -> Any:
        out = super().run(queries, keys, values)
        out[-1, 0, 0] += 0.5
        return out


def _no_memory() -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_failing_arms_are_left_out_with_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, scale = command.QUICK_SHAPE, 64**-0.5
    arms = {
        "reference": Arm(partial(ReferenceAttention, shape, scale=scale)),
        "shifted": Arm(partial(ShiftedAttention, shape, scale=scale)),
        "large": Arm(_no_memory),
    }
    monkeypatch.setattr(command, "arms_of", lambda shape, device: arms)
    assert command.main([*SMALL, "--out", str(tmp_path)]) == 0
    run = read_recorded(tmp_path)
    cell = [one for one in run.samples if one["cell"]["pattern"] == "scattered"]
    assert [one["request"] for one in cell if "layer_s" in one["metrics"]] == ["1", "2"]
    assert [row["reason"] for row in rows_of(run.results, "Left out")][:2] == [
        "wrong: differs from the reference by up to 0.5",
        "out of memory",
    ]


def test_figures_are_those_the_samples_were_made_of() -> None:
    drift = [1.0 + 0.1 * turn for turn in range(8)]
    results = summarize(make_samples({k: [ms * d for d in drift] for k, ms in STEADY.items()}))
    (row,) = rows_of(results, "Times")
    assert (row["fastest"], row["fa3"], row["dense_fa3"]) == ("fa3", 2.7, 16.2)
    assert row["TFLOP/s"] == pytest.approx(1e9 / 2.7e-3 / 1e12, abs=0.01)
    assert row["over dense_fa3"].startswith("6.00 [6.00")
    assert row["over sdpa"].startswith("3.00 [")
    assert rows_of(results, "What the layouts execute over what is needed")[0]["worst"] == 3.0
    rows = {row["arm"]: row for row in rows_of(results, "Layouts and plans, cell by cell")}
    told = ("executed/needed", "indices (MiB)", "layout (ms)", "plan (ms)")
    assert [rows["fa3"][name] for name in told] == [3, 5, 0.25, 1]
    assert rows["custom_mask"]["mask (MiB)"] == 7.0


def test_verdict_is_on_the_worst_cell() -> None:
    """Other cells, and cells without FA3 dense, do not count."""
    dense = [12.0] * 4
    one = make_samples({"fa2": [3.0] * 4, "fa3": [2.0] * 4, "dense_fa3": dense})
    two = make_samples({"fa3": [4.0] * 4, "dense_fa3": dense}, batch=4)
    others = [*make_samples({"fa3": [1.0] * 4}, batch=8), *make_samples({}, context=8192)]
    fa2, fa3, paper = summarize([*one, *two, *others])["verdict"]
    assert "worst of 1 cells (scattered, 1 requests): 4.00 [4.00, 4.00] times" in fa2
    assert "worst of 2 cells (scattered, 4 requests): 3.00 [3.00, 3.00]" in fa3
    assert "at 43% of its rate" in fa3
    assert paper == PAPER


def test_dry_run_goes_on_after_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert command.main([*SMALL, "--out", str(out), "--limit-s", "0.000001"]) == 0
    assert "goes on" in capsys.readouterr().err
    assert read_recorded(out).record["complete"] is False
    assert command.main([*SMALL, "--out", str(out)]) == 0
    run = read_recorded(out)
    assert run.record["complete"] is True
    assert run.results["verdict"] == [NO_GPU]
    rows = rows_of(run.results, "Times")
    cells = [(row["pattern"], row["ratio"]) for row in rows]
    assert cells == [("scattered", 0.1), ("all", 1), ("clustered", 0.1)]
    assert all(row[arm] > 0 for row in rows for arm in ("reference", "sdpa", "dense"))
    assert "fastest" not in rows[0]
    assert rows_of(run.results, "Left out") == []


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ["--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        command.main([*SMALL, "--ratios", "15", *out])
    with pytest.raises(CommandError, match="--arms fa9: on cpu there are reference, sdpa, dense"):
        command.main([*SMALL, "--arms", "fa9", *out])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CommandError, match="there is no CUDA device; --device cpu"):
        command.main(out)
    assert not (tmp_path / "run").exists()


def test_layouts_alone_need_no_arm(tmp_path: Path) -> None:
    """`--arms` without names: pairs and indices of the grid at its real sizes, in seconds."""
    grid = ["--device", "cpu", "--arms", "--contexts", "8192", "--batches", "1", "--ratios", "0.15"]
    assert command.main([*grid, "--out", str(tmp_path)]) == 0
    results = read_recorded(tmp_path).results
    assert rows_of(results, "Times") == []
    rows = rows_of(results, "Layouts and plans, cell by cell")
    assert {row["arm"] for row in rows} == set(KERNELS)
    assert all(1 <= row["executed/needed"] < 1.2 and row["indices (MiB)"] > 0 for row in rows)
