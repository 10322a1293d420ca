"""The attention benchmark without a GPU: positions, work, arms, what samples say, and the whole command in a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")

import torch

from eval.bench import attention
from eval.bench.attention_arms import Arm, FlashInferPrefill, Run, arms_of, runs_of
from eval.bench.attention_cells import Cell, cells_of, make_requests, positions_of, work_of
from eval.bench.attention_figures import TARGETS, judge, summarize, summarize_cell
from eval.bench.attention_plans import plan_figures
from eval.bench.attention_table import NO_GPU, render
from eval.bench.attention_timing import Settings, check_arms, measure_cell
from sglang_chunkcache.attention.base import HeadShape, SparseAttention, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from sglang_chunkcache.attention.reference import ReferenceAttention
from tests.reference import flashinfer

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
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
    return Settings(shape=SHAPE, device=CPU, page_size=page_size, warm_up=1, repetitions=repetitions)


def make_sample(**changed: Any) -> dict[str, Any]:
    """32k at 15%: ours takes 2 ms, FA3 dense 12 on a machine whose speed drifts, and a seventh of its work is needed."""
    drift = [1.0 + 0.1 * turn for turn in range(8)]
    arms = {"fa2": 3.0, "fa3": 2.0, "dense_fa3": 12.0, "dense_fa2": 24.0, "sdpa": 6.0, "custom_mask": 9.0}
    return {
        "key": "scattered/32768/1/0.15",
        "kind": "cell",
        **vars(Cell("scattered", 32_768, 1, 0.15)),
        "work": {"queries": 1, "pairs": 1, "flops": 10**9, "bytes": 10**6},
        "dense_work": {"queries": 1, "pairs": 7, "flops": 7 * 10**9, "bytes": 10**7},
        "plans": {},
        "arms": {
            name: {"ms": [ms * d for d in drift], "host_ms": [0.1] * 8, "plan_ms": 1.0, "index_bytes": 1 << 20}
            for name, ms in arms.items()
        },
        "failed": {},
        **changed,
    }


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


def test_plans_execute_at_least_what_is_needed() -> None:
    """A layout that executes less than is needed leaves keys out; one without kernels for the shape has no figures."""
    requests = make_requests(Cell("scattered", 2048, 2, 0.15), page_size=1)
    shape = HeadShape(32, 8, 128, torch.bfloat16)
    figures = plan_figures(requests, shape, page_size=1)
    assert list(figures) == list(KERNELS)
    needed = work_of(requests, shape, page_size=1)["pairs"]
    assert all(needed <= plan["executed_pairs"] < 2 * needed and plan["index_bytes"] > 0 for plan in figures.values())
    assert plan_figures(requests, SHAPE, page_size=1) == {}


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

    settings = Settings(shape=shape, device=CPU, page_size=4, warm_up=0, repetitions=1)
    assert check_arms(attention.CHECKED, [Arm(kernel, make)], settings) == {}


def test_too_many_indices_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone token's entry repeats its whole prefix; what no device holds must not be tried."""
    monkeypatch.setattr("eval.bench.attention_arms.MAX_INDEX_BYTES", 100)
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

    def timer(run: Callable[[], object]) -> tuple[float, float]:
        run()
        calls.append(1.0)
        return len(calls), 0.5

    sample = measure_cell(CELLS[0], arms, make_settings(), timer, {"early": "wrong: before"})
    assert list(sample["arms"]) == ["reference"]
    assert sample["arms"]["reference"]["ms"] == [2, 3]  # the first one warms up
    assert sample["failed"]["shifted"].startswith("wrong: differs from the reference by up to 0.01")
    assert sample["failed"]["large"] == "out of memory"
    assert sample["failed"]["early"] == "wrong: before"


def test_arm_that_fails_in_a_repetition_is_left_out_whole() -> None:
    """Its first times would be paired with nothing."""
    times = iter([1.0, 2.0])

    def timer(run: Callable[[], object]) -> tuple[float, float]:
        try:
            return next(times), 0.0
        except StopIteration:
            raise RuntimeError("no more") from None

    arms = [Arm("reference", lambda: ReferenceAttention(SHAPE, scale=0.25))]
    assert measure_cell(CELLS[0], arms, make_settings(), timer, {}) == {
        "arms": {},
        "failed": {"reference": "no more"},
    }


# What samples say


def test_figures_are_those_the_sample_was_made_of() -> None:
    """Rates over needed work, ratios whatever the drift; the dense arm's rate is over its own work."""
    cell = summarize_cell(make_sample())
    assert cell["fastest"] == "fa3"
    fa3, dense = cell["arms"]["fa3"], cell["arms"]["dense_fa3"]
    assert fa3["flops_per_s"] == pytest.approx(1e9 / 2.7e-3)
    assert fa3["bytes_per_s"] == pytest.approx(1e6 / 2.7e-3)
    assert dense["flops_per_s"] == pytest.approx(7e9 / 16.2e-3)
    assert fa3["speedup"]["dense_fa3"][0] == pytest.approx(6.0)
    assert fa3["speedup"]["sdpa"][0] == pytest.approx(3.0)
    assert fa3["of_dense_rate"]["dense_fa3"][0] == pytest.approx(fa3["flops_per_s"] / dense["flops_per_s"])
    assert "speedup" not in cell["arms"]["custom_mask"]


@pytest.mark.parametrize(
    ("ms", "speedup", "rate"),
    [
        ([2.0] * 8, "met", "met"),
        ([3.0] * 8, "not met", "not met"),
        ([2.2] * 8, "met", "met"),
        ([1.9, 2.9] * 4, "open", "open"),
    ],
    ids=["above", "below", "just above", "straddles"],
)
def test_verdicts_need_clear_intervals(ms: list[float], speedup: str, rate: str) -> None:
    """A target is met or missed only where the interval lies on one side of it."""
    arms = {name: {"ms": times, "host_ms": [0.1]} for name, times in (("fa3", ms), ("dense_fa3", [12.0] * 8))}
    targets = summarize([make_sample(arms=arms)])["targets"]
    assert [target["verdict"] for target in targets] == [speedup, rate]


def test_target_is_met_by_one_arm_in_all_cells() -> None:
    """Two arms that win one cell each meet nothing: a machine runs one of them."""
    dense = {"ms": [12.0] * 4, "host_ms": [0.1]}
    fast, slow = ({"ms": [ms] * 4, "host_ms": [0.1]} for ms in (1.0, 6.0))
    one = summarize_cell(make_sample(arms={"fa2": fast, "fa3": slow, "dense_fa3": dense}))
    two = summarize_cell(make_sample(arms={"fa2": slow, "fa3": fast, "dense_fa3": dense}))
    missing = summarize_cell(make_sample(arms={"fa3": fast, "dense_fa3": dense}))
    assert judge(TARGETS[0], {"a": one})["verdict"] == "met"
    assert judge(TARGETS[0], {"a": one, "b": two})["verdict"] == "not met"
    both = judge(TARGETS[0], {"b": two, "c": missing, "d": one})
    assert (both["verdict"], both["num_cells"]) == ("not met", 3)
    assert both["worst"]["fa2"][0] == "b"


def test_nothing_is_claimed_without_a_gpu() -> None:
    """No FA3, other ratios or contexts: not measured, and the table says whose figures are missing."""
    samples = [make_sample(context=8192), make_sample(key="b", arms={}, failed={"fa3": "out of memory"})]
    results = summarize(samples)
    assert [target["verdict"] for target in results["targets"]] == ["not measured"] * 2
    text = render(results, on_gpu=False)
    assert text.count("not measured") == 2
    assert text.startswith(NO_GPU)
    assert text.endswith(NO_GPU)
    assert "left out: fa3: out of memory (b)" in text


def test_reference_alone_is_no_arm_of_ours() -> None:
    """Plain torch is slow on purpose: neither the fastest nor held against a target or the paper."""
    row = {"ms": [2.0, 2.0], "host_ms": [2.0, 2.0], "plan_ms": 1.0}
    plan = {"executed_pairs": 3, "index_bytes": 5 << 20, "entries": 1, "layout_ms": 0.25}
    text = render(summarize([make_sample(plans={"fa3": plan}, arms={"reference": row, "dense": row})]), on_gpu=False)
    assert "reference (the oracle, not a kernel)" in text
    for word in ("fastest", "over dense", "target", "FusionRAG", "all ms", " - "):
        assert word not in text
    planned, times = (line.split() for line in text.splitlines() if line.startswith("scattered"))
    assert planned == ["scattered/32768/1/0.15", "1", "3.000", "5.00", "0.25"]
    assert times == ["scattered", "15%", "2.000", "2.000"]


def test_table_shows_times_speedups_and_the_paper_apart() -> None:
    """A figure of the paper is named as such, and is never in a row of ours."""
    roof = {"key": "roof/0", "kind": "roof", "product_flops": 1, "copy_bytes": 1, "product_ms": [1.0], "copy_ms": [1.0]}
    plan = {"executed_pairs": 3, "index_bytes": 5 << 20, "entries": 1, "layout_ms": 0.25}
    sample = make_sample(plans={"fa3": plan})
    sample["arms"]["custom_mask"] |= {"mask_bytes": 7 << 20, "plan_ms": 8.5}
    text = render(summarize([roof, sample]), on_gpu=True)
    planned, row = (line for line in text.splitlines() if line.startswith("scattered"))
    assert " ".join(planned.split()) == "scattered/32768/1/0.15 1 3.000 5.00 0.25 1.0 1.00 1.0 7.00 8.5"
    assert "2.700" in row
    assert "6.00 [" in row
    assert "4.2x" not in row
    assert "FusionRAG's own figures" in text
    assert NO_GPU not in text


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


def test_dry_run(tmp_path: Path) -> None:
    """As a file, from the root, everything runs on a CPU: a run, a record, and the words that this measures no GPU."""
    command = [
        sys.executable,
        "eval/bench/attention.py",
        *SMALL,
        "--out",
        str(tmp_path / "run"),
        "--record",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert NO_GPU in lines
    results = json.loads(lines[-1])
    assert list(results["cells"]) == ["scattered/64/1/0.1", "clustered/64/1/0.1", "all/64/1/1"]
    for cell in results["cells"].values():
        assert set(cell["arms"]) == {"reference", "sdpa", "dense", "virtual"}
        assert not cell["failed"]
    (record,) = (Path(line.removeprefix("record: ")) for line in lines if line.startswith("record: "))
    assert record.parent == tmp_path
    assert json.loads((record / "record.json").read_text())["results"] == results
    assert len((record / "samples.jsonl").read_text().splitlines()) == 4


def test_interrupted_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the limit no cell is begun; the same command measures only what is missing, and then there is a record."""
    out = tmp_path / "run"
    argv = [*SMALL, "--out", str(out), "--record", str(tmp_path)]
    assert attention.main([*argv, "--limit-s", "0.000001"]) == 0
    assert "goes on" in capsys.readouterr().err
    assert json.loads((out / "record.json").read_text())["complete"] is False
    assert not list(tmp_path.glob("*-attention"))
    assert attention.main(argv) == 0
    assert json.loads((out / "record.json").read_text())["complete"] is True
    kinds = [json.loads(line)["kind"] for line in (out / "samples.jsonl").read_text().splitlines()]
    assert kinds == ["roof", "roof", "cell", "cell", "cell"]
    assert len(list(tmp_path.glob("*-attention/samples.jsonl"))) == 1


def test_run_without_out_goes_on_with_the_folder_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted: the exit code that a shell knows, no traceback, and a command that is not refused for other settings."""
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "measure_cell", Mock(side_effect=[{"arms": {}, "failed": {}}, KeyboardInterrupt]))
        assert attention.main(SMALL) == 130
    _, _, told, last = capsys.readouterr().err.splitlines()
    assert last == "attention: interrupted"
    folder = told.split(" --out ")[1].removesuffix(" goes on")
    assert attention.main([*SMALL, "--out", folder]) == 0
    assert json.loads((Path(folder) / "record.json").read_text())["complete"] is True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ratios", "0"], "--ratios: expected numbers above 0"),
        (["--contexts", "0"], "expected at least 1"),
        (["--heads", "6", "4", "64"], "--heads: query heads"),
        (["--dtype", "int8"], "--dtype"),
        (["--warm-up", "-1"], "--warm-up: expected at least 0"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the flag, no traceback."""
    with pytest.raises(SystemExit) as refused:
        attention.main(["--device", "cpu", *flags])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_unknown_arms_and_missing_gpus_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what there is instead; nothing is written."""
    assert attention.main([*SMALL, "--arms", "fa9", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "attention: --arms fa9: on cpu there are reference, sdpa, dense, virtual\n"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for flags in ([], ["--arms"]):
        assert attention.main([*flags, "--out", str(tmp_path / "run")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("attention: no CUDA here; --device cpu")
    assert not (tmp_path / "run").exists()


def test_layouts_alone_need_no_arm(tmp_path: Path) -> None:
    """`--arms` without names: pairs and indices of the grid at its real sizes, in seconds."""
    grid = ["--device", "cpu", "--arms", "--contexts", "8192", "--batches", "1", "--ratios", "0.15"]
    assert attention.main([*grid, "--out", str(tmp_path)]) == 0
    cells = json.loads((tmp_path / "record.json").read_text())["results"]["cells"]
    assert len(cells) == 2
    for cell in cells.values():
        assert cell["arms"] == {}
        assert all(plan["executed_pairs"] < 1.2 * cell["work"]["pairs"] for plan in cell["plans"].values())


def test_shapes_that_no_kernel_knows_have_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Instead of a table of plans that is silently not there."""
    grid = ["--device", "cpu", "--arms", "--quick", "--dtype", "float32"]
    assert attention.main([*grid, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(
        "No table of plans, since our kernels cannot be used: dtype torch.float32"
    )
