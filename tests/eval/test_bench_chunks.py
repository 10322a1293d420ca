"""The pure parts of the chunks bench: how a text is cut, and what the samples say. No server."""

from __future__ import annotations

import pytest

from eval.bench.chunks import BETWEEN, cut, main, summarize
from eval.run import Sample


def test_arms_have_the_same_text_in_the_same_order() -> None:
    few, many = cut("1", 1000, 10), cut("1", 1000, 1000)
    assert (len(few), len(many)) == (10, 1000)
    assert BETWEEN.join(chunk.text for chunk in few) == BETWEEN.join(chunk.text for chunk in many)
    assert sorted(chunk.text for chunk in many) == [f"{number:03}" for number in range(1000)]
    assert [chunk.text for chunk in cut("2", 1000, 1000)] != [chunk.text for chunk in many]


def samples(many_s: list[float], *, cpu: bool = True) -> list[Sample]:
    """Rounds in which ten chunks take a second, behind one of warm-up in which all take an hour."""
    made: list[Sample] = []
    for number, seconds in enumerate([3600.0, *many_s]):
        for arm, taken in (("10", 1.0 if number else 3600.0), ("1000", seconds)):
            about = {"cell": {"reuse": "fused"}, "request": str(number), "warm_up": not number}
            metrics = {"ttft_s": taken, **({"cpu_s": 2 * taken} if cpu else {})}
            tokens = {"prompt_tokens": 4000, "fates": {"computed": 3990}}
            made.append({"arm": arm, **about, "metrics": metrics, **tokens})
    return made


@pytest.mark.parametrize(("many_s", "kept"), [(1.1, True), (1.15, True), (1.2, False)])
def test_ratio_is_that_of_medians_without_the_warm_up(many_s: float, kept: bool) -> None:
    found = summarize(samples([many_s] * 9))
    base, row = found["tables"][0]["rows"]
    assert (base["chunks"], base["ratio"]) == (10, "1.000 [1.000, 1.000]")
    assert (row["chunks"], row["base"]) == (1000, 10)
    assert row["ratio"] == row["ratio of CPU"] == f"{many_s:.3f} [{many_s:.3f}, {many_s:.3f}]"
    assert row["kept"] is kept
    assert found["verdict"][0].endswith(f" tokens: {'kept' if kept else 'NOT kept'}.")
    untold = summarize(samples([many_s] * 9, cpu=False))["tables"][0]["rows"][1]
    assert untold["ratio of CPU"] is None


def test_counts_must_divide_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--counts", "300", "1000"])
    assert "--counts: each must divide the largest, 1000" in capsys.readouterr().err
