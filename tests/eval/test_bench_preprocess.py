"""The bench of preprocessing."""

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
    samples: list[dict[str, Any]] = [
        {
            "arm": arm,
            "cell": {"chunk_tokens": 256, "neighbors": 10},
            "request": str(number),
            "warm_up": not number,
            "metrics": {"alone_s": s, "behind_s": 3 * s, "chunk_s": 4 * s if number else 3600.0},
            "chunk_tokens": 250,
            "neighbors": {"moved": 99, "computed": 1, "missing": 0},
            "entries": 20,
            "again": {"kept": 20, "chunks": 0, "seconds": 0.5},
        }
        for number in range(9)
        for arm, s in (("1", 0.5), ("32", 0.25))
    ]
    found = summarize(samples)
    one, many = found["tables"][0]["rows"]
    assert (one["chunks/s"], one["faster"], one["rounds"]) == (0.5, "1.00 [1.00, 1.00]", 8)
    assert (many["alone, chunks/s"], many["behind, chunks/s"], many["chunks/s"]) == (4.0, 1.33, 1.0)
    assert (many["moved"], many["computed"], many["missing"]) == (792, 8, 0)
    told = ("entries", "again, kept", "again, computed", "again (s)")
    assert [many[name] for name in told] == [20, 160, 0, 0.5]
    assert "1.0 chunks a second, 2.00 [2.00, 2.00] times as fast as 1." in found["verdict"][1]


def test_corpus_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeServer()
    monkeypatch.setattr(preprocess, "post", lambda url, body=None: {"count": 1000})
    try:
        args = _parse(["--chunks", "8", "--neighbors", "2"])
        taken = Blocks(fake.url, args, tmp_path).sample(2, 1)
    finally:
        fake.close()
    rows = [json.loads(line) for line in (tmp_path / "neighbors.jsonl").read_text().splitlines()]
    assert all(len({*row["neighbors"]} - {row["id"]}) == 2 for row in rows)
    assert [len(before) for _, before in fake.chunks] == [*[0] * 8, *[2] * 8] * 2
    assert (taken["entries"], taken["again"]["chunks"]) == (14, 16)


def test_block_of_too_few_chunks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(["--chunks", "10"])
    assert "--chunks: must be more than --neighbors" in capsys.readouterr().err
