"""The bench of approximate search runs, at a small size."""

from pathlib import Path
from typing import Any

import pytest

from eval.bench.ann import Mixture, main
from eval.errors import CommandError
from eval.recorded import Recorded, read_recorded

pytestmark = pytest.mark.nightly

SMALL = ["--vectors", "3000", "--rounds", "2"]


def bench(out: Path, *args: str) -> Recorded:
    assert main([*SMALL, *args, "--out", str(out)]) == 0
    return read_recorded(out)


def recalls(run: Recorded) -> dict[str, Any]:
    return {
        row["index / nprobe"]: float(row["recall"].split()[0])
        for row in run.results["tables"][0]["rows"]
    }


def test_recall_grows_with_nprobe_to_exact(tmp_path: Path) -> None:
    run = bench(tmp_path, "--factories", "IVF32,Flat", "HNSW16", "--nprobe", "1", "4", "32")
    found = recalls(run)
    assert list(found) == [
        "Flat",
        *(f"{f}/{n}" for f in ("IVF32,Flat", "HNSW16") for n in (1, 4, 32)),
    ]
    assert found["Flat"] == 1
    assert 0 < found["IVF32,Flat/1"] < found["IVF32,Flat/4"] <= found["IVF32,Flat/32"] == 1
    assert run.results["tables"][0]["rows"][0]["times faster"] == "1.0 [1.0, 1.0]"
    assert len(run.samples) == 3 + 7 * (1 + 2)
    for row in run.results["tables"][0]["rows"]:
        assert 0 < row["one query, p50 (ms)"] <= row["p99 (ms)"]


def test_spread_is_the_cosine_within_a_cluster() -> None:
    """The docstring's formula, by which a reader judges how hard the mixture is."""
    vectors = Mixture(1, 256, 2.0).draw(400, seed=1)
    cosines = vectors @ vectors.T
    mean = (cosines.sum() - len(vectors)) / (len(vectors) * (len(vectors) - 1))
    assert mean == pytest.approx(1 / (1 + 2.0**2), abs=0.02)


def test_unknown_factory_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="IVX4"):
        main([*SMALL, "--factories", "IVX4", "--out", str(tmp_path / "run")])
