"""The bench of moving KV runs on the CPU, at a small size. Its rates depend on the machine; what it reports does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("triton")

import torch

from eval.bench.relocate import SHAPES, Arm, Bench, main, measure, summarize
from sglang_chunkcache.fusion import relocate_kernel

SMALL = ["--device", "cpu", "--shapes", "small", "--tokens", "8", "--rounds", "3"]


def test_dry_run_without_cuda(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every arm that a CPU has, and a plain word on what is missing; the record holds the same, and every sample."""
    assert main([*SMALL, "--record", str(tmp_path)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert "the GPU figures are missing" in report["missing"]
    assert report["missing"] in lines
    assert list(report["configurations"]) == ["small, 8, contiguous", "small, 8, scattered"]
    for result in report["configurations"].values():
        assert list(result["arms"]) == ["copy", "move/torch", "write/torch", "read/torch"]
        for name, arm in result["arms"].items():
            low, high = arm["gb_per_s"][1:]
            assert 0 < low <= arm["gb_per_s"][0] <= high
            assert ("share" in arm) == (name != "copy")
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "record.json").read_text())["results"] == report
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 3


def test_rates_are_of_bytes_read_and_written() -> None:
    """A pass that takes as long as a plain copy has a share of 1, and both have the rate of all bytes twice."""
    bench = Bench(SHAPES["small"], 8, "scattered", torch.device("cpu"))
    in_pool = sum(buffer[bench.source].nbytes for buffer in bench.buffers)
    assert bench.num_bytes == 2 * in_pool
    assert bench.plain[0].nbytes == in_pool
    arms: dict[str, Arm] = {"copy": Arm(int, None), "move": Arm(int, "copy")}
    rows = summarize([{"copy": 1.0, "move": 4.0}, {"copy": 2.0, "move": 8.0}], arms, 10**9)
    assert rows["move"]["share"] == (0.25, 0.25, 0.25)
    assert rows["copy"]["gb_per_s"] == (0.75, 0.5, 1.0)


def test_every_round_takes_every_arm_in_turn() -> None:
    """Each once a round, none always first; the first round warms up and is dropped."""
    order = []

    def timed(work: Any) -> float:
        order.append(work())
        return float(len(order))

    done = measure({name: Arm(lambda name=name: name, None) for name in "abc"}, 2, timed)  # type: ignore[misc]
    assert "".join(order) == "abcbcacab"
    assert done == [{"b": 4.0, "c": 5.0, "a": 6.0}, {"c": 7.0, "a": 8.0, "b": 9.0}]


def test_slots_are_apart() -> None:
    """What is moved must not be where it came from; slot 0 is SGLang's own."""
    for slots in ("contiguous", "scattered"):
        bench = Bench(SHAPES["small"], 8, slots, torch.device("cpu"))
        assert sorted([*bench.source.tolist(), *bench.target.tolist()]) == list(range(1, 17))


def test_check_sees_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed of a kernel that writes nothing is none."""
    bench = Bench(SHAPES["small"], 8, "contiguous", torch.device("cpu"))
    monkeypatch.setattr(relocate_kernel, "relocate", lambda *_, **__: None)
    assert bench.check()["move"] is False
    assert bench.check()["write"] is False


def test_tuned_arm_sets_what_the_kernel_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all of them would measure the same kernel; afterwards it is as it was."""
    seen = []

    def look(*_: object, **__: object) -> None:
        seen.append((relocate_kernel.TILE_BYTES, relocate_kernel.OPTIONS))

    monkeypatch.setattr(relocate_kernel, "relocate", look)
    bench = Bench(SHAPES["small"], 8, "contiguous", torch.device("cpu"))
    bench._move_tuned(1234, 16)
    bench.move(use_kernel=True)
    (tile_bytes, options), usual = seen
    assert (tile_bytes, options) == (1234, usual[1] | {"num_warps": 16})
    assert usual[0] != tile_bytes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cuda"], "relocate: --device cuda: there is no CUDA device"),
        (["--device", "cpu", "--tune"], "relocate: --tune: only the kernel has block sizes"),
    ],
)
def test_cuda_must_be_there_if_asked_for(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that falls back would be read as the GPU's. One line, no traceback."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--tokens", "0"]])
def test_counts_of_none_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A zero must not become the default."""
    with pytest.raises(SystemExit) as refused:
        main([*SMALL, *flags])
    assert refused.value.code == 2
    assert "--tokens and --rounds must be at least 1" in capsys.readouterr().err


def test_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the exit code that a shell knows."""
    monkeypatch.setattr("eval.bench.relocate.measure", Mock(side_effect=KeyboardInterrupt))
    assert main(SMALL) == 130
    assert capsys.readouterr().err == "relocate: interrupted\n"
