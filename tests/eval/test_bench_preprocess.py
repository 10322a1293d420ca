"""The bench of preprocessing: what its samples say, its options, and the corpora it makes. No engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("requests")

from eval.bench import preprocess
from eval.bench.preprocess import Blocks, _parse, summarize
from tests.sglang_chunkcache.fake_server import FakeServer


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
            "entries": 20,
            "again": {"kept": 20, "chunks": 0, "seconds": 0.5},
        }
        for number in range(9)
        for arm, seconds in (("1", 0.5), ("32", 0.25))
    ]
    found = summarize(samples)
    one, many = found["tables"][0]["rows"]
    assert (one["chunks/s"], one["faster"], one["rounds"]) == (0.5, "1.00 [1.00, 1.00]", 8)
    assert (many["alone, chunks/s"], many["behind, chunks/s"], many["chunks/s"]) == (4.0, 1.33, 1.0)
    assert (many["moved"], many["computed"], many["missing"]) == (792, 8, 0)
    assert (many["entries"], many["again, kept"], many["again, computed"], many["again (s)"]) == (20, 160, 0, 0.5)
    assert found["verdict"][1] == "32 in flight: 1.0 chunks a second, 2.00 [2.00, 2.00] times as fast as 1."


def test_corpus_that_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command a user runs, on so many chunks with so many others as neighbours; no sample of what is really computed."""
    fake = FakeServer()
    fake.kept = {f"1.planned.{number}" for number in range(20)}
    monkeypatch.setattr(preprocess, "post", lambda url, body=None: {"count": 1000})
    try:
        args = _parse(["--chunks", "3", "--neighbors", "2", "--batch", "2"])
        taken = Blocks(fake.url, args, tmp_path).plan(20, 1)
    finally:
        fake.close()
    rows = [json.loads(line) for line in (tmp_path / "neighbors.jsonl").read_text().splitlines()]
    assert all(len({*row["neighbors"]} - {row["id"]}) == 2 for row in rows)
    assert len(fake.chunks) == 40
    found = summarize([{"arm": "plan", "cell": {"planned": 20}, "request": "1", **taken}])
    (row,) = found["tables"][0]["rows"]
    assert (row["chunks"], row["neighbors"], row["requests"]) == (20, 40, 40)
    assert (row["entries"], row["evicted"], row["neighbors again"]) == (40, 0, 0)
    assert (row["again, kept"], row["again, computed"]) == (40, 0)
    assert found["verdict"][0].startswith("20 chunks planned: 40 entries, 0 evicted, ")


def test_block_of_too_few_chunks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody is its own neighbour."""
    for flags in (["--chunks", "10"], ["--planned", "100", "10"]):
        with pytest.raises(SystemExit):
            _parse(flags)
        assert "--chunks, --planned: must be more than --neighbors" in capsys.readouterr().err
