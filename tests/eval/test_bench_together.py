"""The bench of requests that come at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from eval.bench import together
from eval.bench.together import bodies, chunks, measure, summarize


def test_arms_of_a_round_are_asked_the_same() -> None:
    found = chunks(5)
    one, again, other = (bodies(n, 6, found, common=2, output=3) for n in (1, 1, 2))
    assert one == again != other
    lists = [[each["id"] for each in body["chunks"]] for body in one]
    assert {tuple(ids[:2]) for ids in lists} == {("c0", "c1")}
    assert {len(set(ids)) for ids in lists} == {together.K}
    assert len({tuple(ids) for ids in lists}) == 6


@pytest.mark.parametrize("at_once", [False, True])
def test_requests_come_after_each_chunk_alone(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, lock, inside = list[int](), threading.Lock(), [0, 0]
    all_there = threading.Barrier(4)

    def post(url: str, body: Any = None) -> dict[str, Any]:
        if body is None:
            return {}
        with lock:
            asked.append(len(body["chunks"]))
            inside[0] += 1
            inside[1] = max(inside)
        if at_once and len(body["chunks"]) > 1:
            all_there.wait(timeout=60)
        with lock:
            inside[0] -= 1
        fates = {"exact": 1, "relocated": 5, "computed": 2, "recomputed": 3}
        return {"chunkcache": {"fates": fates, "fallbacks": {"no_room": 1}}}

    monkeypatch.setattr(together, "post", post)
    settings: dict[str, Any] = {"count": 4, "common": 2, "output": 1, "at_once": at_once}
    taken = measure("http://x", chunks(2), 1, **settings)
    assert asked == [1] * together.NUM_CHUNKS + [together.K] * 4
    assert inside[1] == (4 if at_once else 1)
    assert (taken["computed"], taken["fates"]["relocated"]) == (20, 20)
    assert taken["fallbacks"] == {"no_room": 4}


def test_figures_are_against_the_first_arm() -> None:
    samples: list[dict[str, Any]] = [
        {
            "arm": arm,
            "cell": {"requests": 32, "output": 16},
            "request": str(number),
            "warm_up": not number,
            "metrics": {"all_s": seconds if number else 3600.0},
            "fates": {"exact": 9, "relocated": 90, "computed": computed, "recomputed": 0},
            "computed": computed,
            "fallbacks": {},
        }
        for number in range(9)
        for arm, seconds, computed in (("ample", 4.0, 100), ("tight", 5.0, 110))
    ]
    found = summarize(samples)
    _, tight = found["tables"][0]["rows"]
    assert (tight["computed / first"], tight["rounds"], tight["fallbacks"]) == (1.1, 8, 0)
    assert tight["time / first"] == "1.250 [1.250, 1.250]"
    assert found["verdict"] == [
        "32 requests, 16 tokens of answer, tight: 1.1 times the tokens computed, 1.250 [1.250,"
        " 1.250] times the time."
    ]


def test_amounts_that_measure_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        together.main(["--rounds", "0"])
    assert "must be" in capsys.readouterr().err
