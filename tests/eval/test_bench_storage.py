"""The pure part of the storage bench: what its samples say. No server."""

from __future__ import annotations

from typing import Any

import pytest

from eval.bench.storage import STATES, main, summarize
from eval.run import Sample

COUNTS = ("loaded", "written", "late", "skipped", "queue", "full", "pauses", "num_entries")
IDLE: dict[str, Any] = dict.fromkeys(COUNTS, 0) | {
    "pays": True,
    "load_ms_per_mib": None,
    "problems": {},
}


def samples(state: str, on_s: list[float], **counts: Any) -> list[Sample]:
    """Pairs in which the server without a storage takes a second,
    behind one of warm-up in which the other takes an hour."""
    made: list[Sample] = []
    for number, seconds in enumerate([3600.0, *on_s]):
        for arm, taken in (("off", 1.0), ("on", seconds)):
            fates = {"exact": 0, "relocated": 10, "recomputed": 5, "computed": 85}
            told = IDLE | counts | {"loaded": number * counts.get("loaded", 0)}
            about = {"cell": {"storage": state}, "request": str(number), "warm_up": not number}
            storage = told if arm == "on" else None
            metrics = {"ttft_s": taken}
            made.append(
                {"arm": arm, **about, "metrics": metrics, "fates": fates, "storage": storage}
            )
    return made


def test_ratio_is_that_of_pairs_without_the_warm_up() -> None:
    found = summarize(samples("healthy", [1.02] * 20, loaded=3))
    times, counts = (table["rows"] for table in found["tables"])
    assert times[0]["on / off"] == "1.020 [1.020, 1.020]"
    assert (times[0]["pairs"], times[0]["moved tokens on"], times[0]["kept"]) == (20, 15, True)
    assert counts[0]["loaded"] == 60
    assert found["idle"] == []
    assert "1.020 [1.020, 1.020] at the median, 1.02 at p99: kept." in found["verdict"][0]


@pytest.mark.parametrize(
    ("on_s", "kept"),
    [
        ([1.04] * 20, True),
        ([1.06] * 20, False),
        ([1.0] * 19 + [1.5], False),
        ([1.0] * 19 + [1.1], True),
    ],
)
def test_promise_is_of_the_median_and_of_the_last_hundredth(on_s: list[float], kept: bool) -> None:
    assert summarize(samples("slowed", on_s, late=1))["tables"][0]["rows"][0]["kept"] is kept


def test_storage_whose_thread_does_nothing_is_told() -> None:
    """It would keep any promise."""
    measured = [
        *samples("healthy", [1.0] * 8),
        *samples("refusing", [1.0] * 8, problems={"failed": 4}),
    ]
    assert summarize(measured)["idle"] == ["healthy"]


def test_unknown_state_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--states", "broken"])
    told = capsys.readouterr().err
    assert all(state in told for state in STATES)
