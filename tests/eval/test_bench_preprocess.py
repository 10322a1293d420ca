"""The pure part of the bench of preprocessing: what its samples say, and its options. No server."""

from __future__ import annotations

from typing import Any

import pytest

from eval.bench.preprocess import _parse, summarize


def test_rates_are_those_of_both_passes_against_the_first_arm() -> None:
    """Medians, without the warm-up; neighbours are added up."""
    samples: list[dict[str, Any]] = [
        {
            "arm": arm,
            "cell": {"chunk_tokens": 256, "neighbors": 10},
            "request": str(number),
            "warm_up": not number,
            "metrics": {"alone_s": seconds, "behind_s": 3 * seconds, "chunk_s": 4 * seconds if number else 3600.0},
            "chunk_tokens": 250,
            "neighbors": {"moved": 99, "computed": 1, "missing": 0},
        }
        for number in range(9)
        for arm, seconds in (("1", 0.5), ("32", 0.25))
    ]
    found = summarize(samples)
    one, many = found["tables"][0]["rows"]
    assert (one["chunks/s"], one["faster"], one["rounds"]) == (0.5, "1.00 [1.00, 1.00]", 8)
    assert (many["alone, chunks/s"], many["behind, chunks/s"], many["chunks/s"]) == (4.0, 1.33, 1.0)
    assert (many["moved"], many["computed"], many["missing"]) == (792, 8, 0)
    assert found["verdict"][1] == "32 in flight: 1.0 chunks a second, 2.00 [2.00, 2.00] times as fast as 1."


def test_block_of_too_few_chunks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody is its own neighbour."""
    with pytest.raises(SystemExit):
        _parse(["--chunks", "10"])
    assert "--chunks: must be more than --neighbors" in capsys.readouterr().err
