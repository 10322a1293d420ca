"""The attention benchmark without a GPU: positions, work, arms, what samples say, and the whole command in a small size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from eval.bench.attention import command, figures
from eval.bench.attention.arms import Arm, FlashInferPrefill, Run, arms_of, runs_of
from eval.bench.attention.cells import Cell, cells_of, layouts_of, make_requests, positions_of, work_of
from eval.bench.attention.figures import NO_GPU, PAPER, TARGETS, judge, summarize
from eval.bench.attention.measure import Settings, check_arms, measure_cell
from eval.errors import CommandError
from eval.recorded import read_recorded
from sglang_chunkcache.attention.base import HeadShape, SparseAttention, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from sglang_chunkcache.attention.reference import ReferenceAttention
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
CELL_IDS = [cell.name for cell in CELLS]


def make_settings(page_size: int = 1, repetitions: int = 2) -> Settings:
    return Settings(shape=SHAPE, device=CPU, page_size=page_size, repetitions=repetitions)


def make_samples(
    times: dict[str, list[float]] | None = None,
    *,
    request: int = 0,
    context: int = 32_768,
    failed: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """32k at 15%: ours takes 2 ms, FA3 dense 12 on a machine whose speed drifts, and a seventh of its work is needed."""
    drift = [1.0 + 0.1 * turn for turn in range(8)]
    ms = {"fa2": 3.0, "fa3": 2.0, "dense_fa3": 12.0, "dense_fa2": 24.0, "sdpa": 6.0, "custom_mask": 9.0}
    times = {name: [each * d for d in drift] for name, each in ms.items()} if times is None else times
    cell = vars(Cell("scattered", context, 1 + request, 0.15))
    work = {"queries": 1, "pairs": 1, "flops": 10**9, "bytes": 10**6, "dense_flops": 7 * 10**9, "dense_bytes": 10**7}
    about = {"cell": cell, "request": "0"}
    layout = {"executed_over_needed": 3.0, "index_mib": 5.0, "layout_s": 0.00025}
    samples = [
        {"arm": "work", **about, "device": "cuda", "metrics": work},
        {"arm": "layout fa3", **about, "metrics": layout},
    ]
    for name, taken in times.items():
        plan = {"plan_s": 0.001, "index_mib": 1.0} | ({"mask_mib": 7.0} if name == "custom_mask" else {})
        samples += [{"arm": name, **about, "metrics": {"layer_s": each / 1000, **plan}} for each in taken]
    return samples + [{"arm": name, **about, "metrics": {}, "error": why} for name, why in (failed or {}).items()]


def rows_of(results: dict[str, Any], title: str) -> list[dict[str, Any]]:
    return next((table["rows"] for table in results["tables"] if table["title"] == title), [])


# Positions and work


@pytest.mark.parametrize("pattern", ["scattered", "clustered"])
@pytest.mark.parametrize("ratio", [0.02, 0.15, 0.5, 0.98, 1.0])
def test_positions_have_the_ratio_and_are_the_same_again(pattern: str, ratio: float) -> None:
    """Another number of tokens would be another ratio; another draw would be another cell."""
    positions = positions_of(pattern, 4096, ratio, seed=3)
    assert positions.numel() == round(4096 * ratio)
    assert int(positions[0]) >= 0
    assert int(positions[-1]) < 4096
    assert bool((positions.diff() > 0).all())
    assert torch.equal(positions, positions_of(pattern, 4096, ratio, seed=3))
    assert ratio == 1 or not torch.equal(positions, positions_of(pattern, 4096, ratio, seed=4))


def test_clustered_tokens_stand_in_runs_of_about_64() -> None:
    """Else both patterns would be one. Runs never touch, so each is as long as it was drawn, but for the last."""
    request = SparseRequest(positions_of("clustered", 32_768, 0.15, seed=0), torch.arange(32_768), 32_768)
    lengths = [run.num_rows for run in runs_of([request])]
    assert all(32 <= length <= 96 for length in lengths[:-1])
    assert 56 <= sum(lengths) / len(lengths) <= 72
    scattered = SparseRequest(positions_of("scattered", 32_768, 0.15, seed=0), torch.arange(32_768), 32_768)
    lone = [run.num_rows for run in runs_of([scattered])]
    assert sum(lone) / len(lone) < 1.3


def test_requests_of_a_batch_share_nothing() -> None:
    """Other positions, other pages; together the pages are the pool."""
    requests = make_requests(Cell("scattered", 100, 3, 0.3), page_size=16)
    assert torch.equal(torch.cat([r.kv_pages for r in requests]).sort().values, torch.arange(3 * 7))
    assert len({tuple(r.positions.tolist()) for r in requests}) == 3


def test_grid_has_everything_once() -> None:
    """At ratio 1 both patterns are the same work."""
    cells = cells_of(["scattered", "clustered"], [8, 16], [1, 2], [0.5, 1.0])
    assert len(cells) == len(set(cells)) == 2 * 2 * 3
    assert [cell.name for cell in cells[:3]] == ["scattered/8/1/0.5", "clustered/8/1/0.5", "all/8/1/1"]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("cell", CELLS, ids=CELL_IDS)
def test_work_is_what_slow_loops_count(cell: Cell, page_size: int) -> None:
    """All rates rest on it: each pair once, each query, output and distinct key once."""
    requests = make_requests(cell, page_size=page_size)
    pairs, num_queries, keys = 0, 0, set()
    for request in requests:
        for position in request.positions.tolist():
            num_queries += 1
            for key in range(position + 1):
                pairs += 1
                keys.add((int(request.kv_pages[key // page_size]), key % page_size))
    work = work_of(requests, SHAPE, page_size=page_size)
    numbers = num_queries * 4 * 16 * 2 + len(keys) * 2 * 16 * 2
    assert work == {"queries": num_queries, "pairs": pairs, "flops": pairs * 4 * (16 * 2 * 2), "bytes": 4 * numbers}


def test_shared_keys_are_read_once() -> None:
    """Two requests over the same pages: bytes in are those of the one that sees more."""
    pages = torch.arange(10)
    one = SparseRequest(torch.tensor([7]), pages, 10)
    other = SparseRequest(torch.tensor([3, 4]), pages, 10)
    work = work_of([one, other], SHAPE, page_size=1)
    assert work["bytes"] == 4 * (3 * 2 * 4 * 16 + 8 * 2 * 2 * 16)


def test_layouts_execute_at_least_what_is_needed() -> None:
    """A layout that executes less than is needed leaves keys out; one without kernels for the shape has no figures."""
    requests = make_requests(Cell("scattered", 2048, 2, 0.15), page_size=1)
    found = layouts_of(requests, HeadShape(32, 8, 128, torch.bfloat16), page_size=1)
    assert list(found) == list(KERNELS)
    assert all(1 <= layout["executed_over_needed"] < 2 and layout["index_mib"] > 0 for layout in found.values())
    assert layouts_of(requests, SHAPE, page_size=1) == {}


# Arms


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([0, 1, 2, 5, 7, 8], [Run(0, 3, 3), Run(0, 1, 6), Run(0, 2, 9)]),
        ([4], [Run(0, 1, 5)]),
        ([], []),
    ],
    ids=["several", "one", "none"],
)
def test_runs(positions: list[int], expected: list[Run]) -> None:
    """A run ends where the next position is not the next number."""
    request = SparseRequest(torch.tensor(positions, dtype=torch.int64), torch.arange(10), 10)
    assert runs_of([request]) == expected


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("cell", CELLS, ids=CELL_IDS)
def test_cpu_arms_agree_with_the_reference(cell: Cell, page_size: int) -> None:
    """What is timed is attention; of a wrong arm a time says nothing."""
    arms = arms_of(SHAPE, device=CPU, page_size=page_size)
    assert [arm.name for arm in arms] == ["reference", "sdpa", "dense", "virtual"]
    assert check_arms([cell], arms, make_settings(page_size)) == {}


class MaskingWrapper:
    """What FlashInfer does with an unpacked mask: entry by entry, bits of [rows, keys]."""

    def plan(self, *args: Any, custom_mask: Any, causal: bool, sm_scale: float, **kwargs: Any) -> None:
        assert not causal
        self._args, self._mask, self._scale = args, custom_mask, sm_scale

    def run(self, queries: Any, pool: tuple[Any, Any], *, out: Any) -> Any:
        qo_indptr, kv_indptr, indices, last_page_len, num_heads, num_kv_heads, _, page_size = self._args
        start = 0
        for entry, last in enumerate(last_page_len.tolist()):
            rows = slice(*qo_indptr[entry : entry + 2].tolist())
            pages = indices[slice(*kv_indptr[entry : entry + 2].tolist())].long()
            num_keys = (len(pages) - 1) * page_size + last
            keys, values = (
                p[pages].flatten(0, 1)[:num_keys].repeat_interleave(num_heads // num_kv_heads, 1) for p in pool
            )
            end = start + (rows.stop - rows.start) * num_keys
            logits = torch.einsum("nhd,mhd->hnm", queries[rows], keys) * self._scale
            logits = logits.masked_fill(~self._mask[start:end].view(-1, num_keys), float("-inf"))
            out[rows] = torch.einsum("hnm,mhd->nhd", logits.softmax(-1), values)
            start = end
        return out


@pytest.mark.parametrize("masked", [False, True], ids=["runs", "mask"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("cell", CELLS, ids=CELL_IDS)
def test_flashinfer_baselines_are_planned_right(cell: Cell, page_size: int, masked: bool) -> None:
    """Indices, lengths and masks of the arms that need a GPU, by a wrapper that computes what FlashInfer's would."""

    def create(device: Any, backend: str) -> Any:
        workspace = torch.empty(16, dtype=torch.uint8)
        return (
            MaskingWrapper() if masked else flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
        )

    def make() -> SparseAttention:
        return FlashInferPrefill(
            SHAPE, device=CPU, scale=0.25, page_size=page_size, backend="fa2", masked=masked, create=create
        )

    for whole in (False, True):
        assert check_arms([cell], [Arm("stock", make, whole=whole)], make_settings(page_size)) == {}


@pytest.mark.parametrize("kernel", KERNELS)
def test_our_arms_run_in_the_bench(kernel: str) -> None:
    """Their order of rows, their pages, and that a check would not pass without them."""
    shape = HeadShape(4, 2, 64, torch.bfloat16)

    def make() -> SparseAttention:
        return FlashInferSparse(shape, device=CPU, scale=64**-0.5, kernel=kernel, page_size=4, modules=flashinfer)

    settings = Settings(shape=shape, device=CPU, page_size=4, repetitions=1)
    assert check_arms(command.CHECKED, [Arm(kernel, make)], settings) == {}


def test_too_many_indices_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone token's entry repeats its whole prefix; what no device holds must not be tried."""
    monkeypatch.setattr("eval.bench.attention.arms.MAX_INDEX_BYTES", 100)
    arm = FlashInferPrefill(
        SHAPE, device=CPU, scale=1.0, page_size=1, backend="fa2", create=lambda device, backend: None
    )
    with pytest.raises(ValueError, match="page indices of"):
        arm.plan(make_requests(Cell("scattered", 90, 2, 0.2), page_size=1))


class ShiftedAttention(ReferenceAttention):
    """Right but for one number."""

    def run(self, queries: Any, keys: Any, values: Any) -> Any:
        out = super().run(queries, keys, values)
        out[-1, 0, 0] += 0.01
        return out


class BackwardsAttention(ReferenceAttention):
    """Wants its rows in another order."""

    def plan(self, requests: Any) -> Any:
        super().plan(requests)
        self._back = torch.arange(sum(r.positions.numel() for r in requests)).flip(0)
        return self._back

    def run(self, queries: Any, keys: Any, values: Any) -> Any:
        return super().run(queries[self._back], keys, values)[self._back]


def test_order_of_a_plan_is_followed() -> None:
    """Rows are given in the plan's order and compared in the requests'."""
    arm = Arm("backwards", lambda: BackwardsAttention(SHAPE, scale=0.25))
    assert check_arms(CELLS[:2], [arm], make_settings()) == {}


# Measuring


def _no_memory() -> SparseAttention:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_failing_arms_are_left_out_with_their_reason() -> None:
    """Wrong, broken, out of memory or excluded: the others are measured, each in every repetition."""
    arms = [
        Arm("reference", lambda: ReferenceAttention(SHAPE, scale=0.25)),
        Arm("shifted", lambda: ShiftedAttention(SHAPE, scale=0.25)),
        Arm("large", _no_memory),
        Arm("early", lambda: ReferenceAttention(SHAPE, scale=0.25)),
    ]
    calls: list[float] = []

    def timer(run: Callable[[], object]) -> float:
        run()
        calls.append(1.0)
        return len(calls)

    samples = list(measure_cell(CELLS[0], arms, make_settings(), timer, {"early": "wrong: before"}))
    assert [(one["arm"], one["metrics"]["layer_s"]) for one in samples if one["metrics"]] == [
        ("reference", 1),
        ("reference", 2),
    ]
    failed = {one["arm"]: one["error"] for one in samples if "error" in one}
    assert failed.pop("shifted").startswith("wrong: differs from the reference by up to 0.01")
    assert failed == {"large": "out of memory", "early": "wrong: before"}


def test_arm_that_fails_in_a_repetition_is_left_out_whole() -> None:
    """Its first times would be paired with nothing."""
    times = iter([1.0])

    def timer(run: Callable[[], object]) -> float:
        try:
            return next(times)
        except StopIteration:
            raise RuntimeError("no more") from None

    arms = [Arm("reference", lambda: ReferenceAttention(SHAPE, scale=0.25))]
    (sample,) = measure_cell(CELLS[0], arms, make_settings(), timer, {})
    assert (sample["arm"], sample["error"], sample["metrics"]) == ("reference", "no more", {})


# What samples say


def test_figures_are_those_the_samples_were_made_of() -> None:
    """Rates over needed work, ratios whatever the drift; planning on the host in rows of its own."""
    results = summarize(make_samples())
    (row,) = rows_of(results, "Times")
    assert (row["fastest"], row["fa3"], row["dense_fa3"]) == ("fa3", 2.7, 16.2)
    assert row["TFLOP/s"] == pytest.approx(1e9 / 2.7e-3 / 1e12, abs=0.01)
    assert row["over dense_fa3"].startswith("6.00 [6.00")
    assert row["over sdpa"].startswith("3.00 [")
    assert rows_of(results, "What the layouts execute over what is needed")[0]["worst"] == 3.0
    ours, *others = rows_of(results, "Layouts, cell by cell")
    assert (ours["arm"], ours["executed/needed"], ours["layout (ms)"], ours["plan (ms)"]) == ("fa3", 3.0, 0.25, 1.0)
    assert next(one for one in others if one["arm"] == "custom_mask")["indices (MiB)"] == 7.0


@pytest.mark.parametrize(
    ("ms", "verdict"),
    [([2.0] * 8, "met"), ([3.0] * 8, "not met"), ([2.2] * 8, "met"), ([1.9, 2.9] * 4, "open")],
    ids=["above", "below", "just above", "straddles"],
)
def test_verdicts_need_clear_intervals(ms: list[float], verdict: str) -> None:
    """A target is met or missed only where the interval lies on one side of it."""
    results = summarize(make_samples({"fa3": ms, "dense_fa3": [12.0] * 8}))
    targets = [said for said in results["verdict"] if said.startswith("Target")]
    assert [f": {verdict} in 1 cells" in said for said in targets] == [True, True]
    assert results["verdict"][-1] == PAPER


def test_target_is_met_by_one_arm_in_all_cells() -> None:
    """Two arms that win one cell each meet nothing: a machine runs one of them."""
    dense, fast, slow = [12.0] * 4, [1.0] * 4, [6.0] * 4
    one = make_samples({"fa2": fast, "fa3": slow, "dense_fa3": dense})
    two = make_samples({"fa2": slow, "fa3": fast, "dense_fa3": dense}, request=1)
    missing = make_samples({"fa3": fast, "dense_fa3": dense}, request=2)
    assert judge(TARGETS[0], figures.cells_of(one))["verdict"] == "met"
    assert judge(TARGETS[0], figures.cells_of([*one, *two]))["verdict"] == "not met"
    both = judge(TARGETS[0], figures.cells_of([*two, *missing, *one]))
    assert (both["verdict"], both["num_cells"]) == ("not met", 3)
    assert both["worst"]["fa2"][0]["requests"] == 2


def test_nothing_is_claimed_without_a_gpu() -> None:
    """No FA3 dense there: not measured, whatever ran; and without a GPU that is the first sentence."""
    samples = [*make_samples(context=8192), *make_samples({}, failed={"fa3": "out of memory"})]
    results = summarize(samples)
    assert sum("not measured" in said for said in results["verdict"]) == 2
    assert rows_of(results, "Left out") == [
        {"arm": "fa3", "reason": "out of memory", "cells": "scattered/32768/1/0.15"}
    ]
    on_cpu = summarize([{**one, "device": "cpu"} for one in make_samples({"reference": [2.0], "dense": [2.0]})])
    assert on_cpu["verdict"] == [NO_GPU]
    assert "fastest" not in rows_of(on_cpu, "Times")[0]


# The command

SMALL = [
    "--device",
    "cpu",
    "--quick",
    "--contexts",
    "64",
    "--batches",
    "1",
    "--ratios",
    "0.1",
    "1",
    "--repetitions",
    "2",
]


def test_dry_run_goes_on_after_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the limit no cell is begun; the same command measures what is missing, and says that this measures no GPU."""
    out = tmp_path / "run"
    assert command.main([*SMALL, "--out", str(out), "--limit-s", "0.000001"]) == 0
    assert "goes on" in capsys.readouterr().err
    assert read_recorded(out).record["complete"] is False
    assert command.main([*SMALL, "--out", str(out)]) == 0
    run = read_recorded(out)
    assert run.record["complete"] is True
    assert run.results["verdict"] == [NO_GPU]
    rows = rows_of(dict(run.results), "Times")
    assert [(row["pattern"], row["ratio"]) for row in rows] == [("scattered", 0.1), ("clustered", 0.1), ("all", 1)]
    assert all(row[arm] > 0 for row in rows for arm in ("reference", "sdpa", "dense", "virtual"))
    assert rows_of(dict(run.results), "Left out") == []
    assert sum(one["arm"] == "roof" for one in run.samples) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ratios", "0"], "--ratios: expected numbers above 0"),
        (["--contexts", "0"], "expected at least 1"),
        (["--heads", "6", "4", "64"], "--heads: query heads"),
        (["--dtype", "int8"], "--dtype"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the flag, no traceback."""
    with pytest.raises(SystemExit) as refused:
        command.main(["--device", "cpu", *flags])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_unknown_arms_and_missing_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what there is instead; nothing is written."""
    out = ["--out", str(tmp_path / "run")]
    with pytest.raises(CommandError, match="--arms fa9: on cpu there are reference, sdpa, dense, virtual"):
        command.main([*SMALL, "--arms", "fa9", *out])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for flags in ([], ["--arms"]):
        with pytest.raises(CommandError, match="no CUDA here; --device cpu"):
            command.main([*flags, *out])
    assert not (tmp_path / "run").exists()


def test_layouts_alone_need_no_arm(tmp_path: Path) -> None:
    """`--arms` without names: pairs and indices of the grid at its real sizes, in seconds."""
    grid = ["--device", "cpu", "--arms", "--contexts", "8192", "--batches", "1", "--ratios", "0.15"]
    assert command.main([*grid, "--out", str(tmp_path)]) == 0
    results = dict(read_recorded(tmp_path).results)
    assert rows_of(results, "Times") == []
    assert all(1 <= row["executed/needed"] < 1.2 for row in rows_of(results, "Layouts, cell by cell"))


def test_shapes_that_no_kernel_knows_have_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Instead of a table of layouts that is silently not there."""
    grid = ["--device", "cpu", "--arms", "--quick", "--dtype", "float32"]
    assert command.main([*grid, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("No layouts, since our kernels cannot be used: dtype torch.float32")
