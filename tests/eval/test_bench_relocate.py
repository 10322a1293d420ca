"""The bench of moving KV runs on the CPU, at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from eval.bench.relocate import Bench, main, summarize
from eval.errors import CommandError
from eval.recorded import read_recorded
from sglang_chunkcache.fusion import relocate_kernel

SMALL = ["--device", "cpu", "--quick"]


def test_dry_run_without_cuda(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main([*SMALL, "--out", str(out)]) == 0
    run = read_recorded(out)
    assert run.kind == "bench"
    assert run.record["spec"]["bench"] == "relocate"
    assert any("the GPU figures are missing" in said for said in run.results["verdict"])
    assert len(run.samples) == 2 * (2 + 2) * 4
    rows = run.results["tables"][0]["rows"]
    assert [row["arm"] for row in rows] == ["copy", "copy of keys", "move/torch", "turn/torch"] * 2
    assert all(
        (row["share of a plain copy"] is None) == row["arm"].startswith("copy") for row in rows
    )
    assert all(row["GB/s"] > 0 for row in rows)
    with pytest.raises(CommandError, match="complete"):
        main([*SMALL, "--out", str(out)])


def test_rates_are_of_bytes_read_and_written() -> None:
    bench = Bench("small", 8, "scattered", torch.device("cpu"))
    in_pool = sum(buffer[bench.source].nbytes for buffer in bench.buffers)
    assert bench.num_bytes == 2 * in_pool
    assert bench.plain[0].nbytes == in_pool
    about = {"cell": {"shape": "small"}, "bytes": 10**9, "wrong": ["move"], "device": "cuda"}
    samples = [
        {"arm": arm, **about, "request": n, "against": of, "metrics": {"moved_s": seconds}}
        for n, (copy_s, move_s) in {"0": (1.0, 4.0), "1": (2.0, 8.0)}.items()
        for arm, of, seconds in (("copy", None, copy_s), ("move", "copy", move_s))
    ]
    results = summarize(samples)
    copied, moved = results["tables"][0]["rows"]
    assert moved["share of a plain copy"] == "0.250 [0.250, 0.250]"
    assert copied["GB/s"] == 0.667
    assert results["wrong"] == ["{'shape': 'small'}: move"]


def test_slots_are_apart() -> None:
    """What is moved must not be where it came from; slot 0 is SGLang's own."""
    for slots in ("contiguous", "scattered"):
        bench = Bench("small", 8, slots, torch.device("cpu"))
        assert sorted([*bench.source.tolist(), *bench.target.tolist()]) == list(range(1, 17))


def test_check_sees_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("small", 8, "contiguous", torch.device("cpu"))
    monkeypatch.setattr(relocate_kernel, "relocate", lambda *_, **__: None)
    assert set(bench.wrong()) == {"move", "turn"}


def test_cuda_must_be_there_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CommandError, match="no CUDA device"):
        main(["--device", "cuda"])
