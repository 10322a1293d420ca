"""The bench of approximate search runs, at a small size. Its times depend on the machine; its recall does not."""

import json
from typing import Any

import pytest

from eval.bench.ann import create_mixture, main
from eval.errors import CommandError

pytestmark = pytest.mark.nightly

SMALL = ["--vectors", "3000", "--clusters", "20", "--dim", "16", "--queries", "64"]


def report(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main([*SMALL, *args]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_recall_grows_with_nprobe_to_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """All lists visited is exact search: anything less than 1 there would be a fault of the bench."""
    arms = report(capsys, "--factories", "IVF32,Flat", "HNSW16", "--nprobe", "1", "4", "32")["arms"]
    assert list(arms) == ["Flat", *(f"{f}/{n}" for f in ("IVF32,Flat", "HNSW16") for n in (1, 4, 32))]
    assert arms["Flat"]["recall"][0] == 1
    assert arms["Flat"]["single_ratio"] == [1, 1, 1]
    narrow, wider, full = (arms[f"IVF32,Flat/{n}"]["recall"][0] for n in (1, 4, 32))
    assert 0.2 < narrow < wider <= full == 1
    for arm in arms.values():
        low, high = arm["single_ratio"][1:]
        assert 0 < low <= arm["single_ratio"][0] <= high
        assert 0 < arm["single_p50_ms"] <= arm["single_p99_ms"]


def test_same_command_same_recall(capsys: pytest.CaptureFixture[str]) -> None:
    """Vectors, training samples and queries are seeded."""
    first, second = (report(capsys, "--factories", "IVF32,Flat", "--nprobe", "2") for _ in range(2))
    assert first["arms"]["IVF32,Flat/2"]["recall"] == second["arms"]["IVF32,Flat/2"]["recall"]


def test_spread_is_the_cosine_within_a_cluster() -> None:
    """The docstring's formula, by which a reader judges how hard the mixture is."""
    vectors = create_mixture(1, 256, 2.0).draw(400, seed=1)
    cosines = vectors @ vectors.T
    mean = (cosines.sum() - len(vectors)) / (len(vectors) * (len(vectors) - 1))
    assert mean == pytest.approx(1 / (1 + 2.0**2), abs=0.02)


def test_unknown_factory_is_one_line() -> None:
    """A mistyped factory is the caller's mistake."""
    with pytest.raises(CommandError, match="IVX4"):
        main([*SMALL, "--factories", "IVX4"])
