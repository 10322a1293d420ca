"""The bench of rounds while many requests wait."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.bench import round_server, waiting
from eval.bench.together import bodies, chunks
from eval.bench.waiting import measure, rounds_of, summarize

WRITTEN = "300 299 0.002000\n299 299 0.004000\n200 199 9.000000\n"


def test_rounds_of_a_crowd_count() -> None:
    assert rounds_of(WRITTEN, 256) == [(0.002, 1), (0.004, 0)]
    assert rounds_of(WRITTEN, 300) == [(0.002, 1)]


def test_rounds_in_which_requests_wait_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many before and after, and the thread's seconds."""
    from sglang.srt.managers.scheduler import Scheduler

    def admit(scheduler: Any, running_batch: Any) -> Any:
        scheduler.waiting_queue = scheduler.waiting_queue[1:]
        return running_batch

    times = iter([7.0, 7.25, 8.0, 8.5, 1.0, 2.0])
    monkeypatch.setattr(round_server, "thread_time", lambda: next(times))
    monkeypatch.setattr(Scheduler, "get_new_batch_prefill", admit)
    round_server.install(path := tmp_path / "rounds")
    for queue in ([1, 2], [1, 2, 3], []):
        scheduler: Any = SimpleNamespace(waiting_queue=queue)
        assert Scheduler.get_new_batch_prefill(scheduler, path) is path
    assert path.read_text() == "2 1 0.250000\n3 2 0.500000\n"


@pytest.mark.parametrize("arm", sorted(waiting.ARMS))
def test_arms_are_asked_the_same_text(
    arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, rounds, found = list[tuple[str, Any]](), tmp_path / "rounds", chunks(2)

    def post(url: str, body: Any = None) -> dict[str, Any]:
        if body is not None:
            asked.append((url, body))
            rounds.write_text(WRITTEN)
        return {}

    monkeypatch.setattr(waiting, "post", post)
    args = SimpleNamespace(requests=3, waiting=256)
    taken = measure("http://x", rounds, arm, found, 1, args=args)
    assert taken["metrics"] == {"round_ms": 3.0, "admitted_ms": 6.0}
    assert (taken["num_rounds"], taken["num_admitted"]) == (2, 1)
    expected = bodies(1, 3, found, common=0, output=waiting.OUTPUT)
    asked.sort(key=lambda each: str(each[1]["messages"][0]["content"].split()[-12:]))
    expected.sort(key=lambda body: str(body["messages"][0]["content"].split()[-12:]))
    if arm == "fused":
        assert asked == [("http://x/rag/v1/chat/completions", body) for body in expected]
        return
    texts = [
        "\n\n".join([*(c["text"] for c in body["chunks"]), body["messages"][0]["content"]])
        for body in expected
    ]
    assert [body["messages"][0]["content"] for _, body in asked] == texts
    assert {url for url, _ in asked} == {"http://x/v1/chat/completions"}
    assert all(body["max_tokens"] == waiting.OUTPUT and body["ignore_eos"] for _, body in asked)


def test_rounds_are_compared_with_stocks() -> None:
    samples: list[dict[str, Any]] = [
        {
            "arm": arm,
            "cell": {"waiting": 256},
            "request": str(number),
            "warm_up": not number,
            "metrics": {"round_ms": mean if number else 99.0, "admitted_ms": 4 * mean},
            "num_rounds": 50,
            "num_admitted": 20,
        }
        for number in range(3)
        for arm, mean in (("stock", 1.0), ("fused", 1.5))
    ]
    found = summarize(samples)
    stock, fused = found["tables"][0]["rows"]
    assert (stock["round_ms"], fused["round_ms"], fused["rounds"]) == (1.0, 1.5, 100)
    assert (fused["admitted"], fused["admitted_ms"]) == (40, 6.0)
    assert found["verdict"] == ["A round takes 0.5 ms more than stock's, a request 2.0 ms more."]
    assert summarize([{**one, "num_admitted": 0} for one in samples])["verdict"] == []


def test_amounts_that_measure_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        waiting.main(["--requests", "9"])
    assert "must be" in capsys.readouterr().err
