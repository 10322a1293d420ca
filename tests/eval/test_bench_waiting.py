"""The bench of rounds while many requests wait."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.bench import waiting
from eval.bench.round_server import install
from eval.bench.together import chunks
from eval.bench.waiting import measure, rounds_of, summarize

WRITTEN = "300 299 0.002000\n299 299 0.004000\n200 199 9.000000\n"


def test_rounds_of_a_crowd_count() -> None:
    assert rounds_of(WRITTEN, 256) == [0.002, 0.004]
    assert rounds_of(WRITTEN, 300) == [0.002]


def test_each_round_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which requests wait: how many before it and after it."""
    from sglang.srt.managers.scheduler import Scheduler

    def admit(scheduler: Any, running: str) -> str:
        scheduler.waiting_queue.pop()
        return running

    monkeypatch.setattr(Scheduler, "get_new_batch_prefill", admit)
    install(tmp_path / "rounds")
    scheduler: Any = SimpleNamespace(waiting_queue=[1, 2])
    assert Scheduler.get_new_batch_prefill(scheduler, "batch") == "batch"
    (line,) = (tmp_path / "rounds").read_text().splitlines()
    assert line.split()[:2] == ["2", "1"]
    assert 0 <= float(line.split()[2]) < 60


@pytest.mark.parametrize("arm", sorted(waiting.ARMS))
def test_arms_are_asked_the_same_text(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, rounds = list[tuple[str, Any]](), tmp_path / "rounds"

    def post(url: str, body: Any = None) -> dict[str, Any]:
        if body is not None:
            asked.append((url, body))
            rounds.write_text(WRITTEN)
        return {}

    monkeypatch.setattr(waiting, "post", post)
    args = SimpleNamespace(requests=3, waiting=256)
    taken = measure("http://x", rounds, arm, chunks(2), 1, args=args)
    assert taken == {"metrics": {"mean_ms": 3.0, "p90_ms": pytest.approx(3.8)}, "num_rounds": 2}
    assert len(asked) == 3
    for url, body in asked:
        assert url.endswith("/v1/chat/completions")
        assert ("/rag/" in url) == ("chunks" in body) == (arm != "stock")
        assert ("reuse" in body) == (arm == "fused")


def test_rounds_are_compared_with_stocks() -> None:
    samples: list[dict[str, Any]] = [
        {
            "arm": arm,
            "cell": {"waiting": 256},
            "request": str(number),
            "warm_up": not number,
            "metrics": {"mean_ms": mean if number else 99.0, "p90_ms": 2 * mean},
            "num_rounds": 50,
        }
        for number in range(3)
        for arm, mean in (("stock", 1.0), ("fused", 1.5))
    ]
    found = summarize(samples)
    stock, fused = found["tables"][0]["rows"]
    assert (stock["mean_ms"], fused["mean_ms"], fused["rounds"]) == (1.0, 1.5, 100)
    assert found["verdict"] == ["fused: a round takes 0.5 ms more than stock's."]
