"""The pure part of the bench of loads ahead: what its samples say. No server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from eval.bench import ahead
from eval.bench.ahead import _parse, _prompts, marker, summarize
from eval.errors import CommandError


def samples(cell: Mapping[str, Any], loaded: int = 1000, **seconds: float) -> list[dict[str, Any]]:
    """Three rounds and a warm-up."""
    return [
        {
            "arm": arm.replace("_", " "),
            "cell": {"tokens": 2000, **cell},
            "request": str(number),
            "warm_up": not number,
            "metrics": {"ttft_s": taken + number / 1000 if number else 3600.0},
            "prompt_tokens": 2100,
            "loaded": loaded if arm != "computed" else 0,
            "layers_ahead": 3,
            "prefetch": {"requested": 2, "loaded": 2, "used": 1},
        }
        for number in range(4)
        for arm, taken in seconds.items()
    ]


@pytest.mark.parametrize("part", ["us_per_token", "moved_us_per_token"])
def test_hidden_is_a_share_of_what_a_copy_sleeps(part: str) -> None:
    """Of 1,000 tokens at 500 microseconds half a second."""
    found = summarize(samples({part: 500}, computed=4.0, in_line=1.5, beside=1.2))
    computed, in_line, beside = found["tables"][0]["rows"]
    assert (computed["hidden"], in_line["hidden"], beside["hidden"]) == (None, None, 0.6)
    assert (computed["loaded tokens"], beside["loaded tokens"], beside["rounds"]) == (0, 1000, 3)
    assert beside["computed / arm"].startswith("3.33")
    assert found["verdict"] == [
        f"tokens 2000, {part} 500, arm beside: {beside['computed / arm']} times sooner than"
        " computed, hidden 0.6"
    ]


def test_won_is_told_against_the_arrival() -> None:
    found = summarize(samples({"search_ms": 50}, computed=4.0, arrival=0.2, hint=0.12))
    won = {row["arm"]: row["won (ms)"] for row in found["tables"][0]["rows"]}
    assert won == {"computed": None, "arrival": None, "hint": 80.0}
    assert found["tables"][0]["rows"][2]["prefetch used"] == 3


def test_what_was_not_loaded_hides_nothing() -> None:
    """A server leaves a copy that is slower than computing."""
    found = summarize(samples({"us_per_token": 500}, 0, computed=4.0, in_line=1.5, beside=1.2))
    assert found["tables"][0]["rows"][2]["hidden"] is None


def test_copy_that_does_not_sleep_hides_nothing() -> None:
    """`--us-per-token 0` is a machine's own speed."""
    found = summarize(samples({"us_per_token": 0}, computed=4.0, in_line=1.5, beside=1.2))
    assert found["tables"][0]["rows"][2]["hidden"] is None


def test_server_that_cannot_flush_says_so_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits as long as the URL has it before it says why."""

    def get(url: str, *, timeout_s: float = 60.0) -> NoReturn:
        assert timeout_s > int(url.split("timeout=")[1])
        raise CommandError("not flushed")

    monkeypatch.setattr(ahead, "get", get)
    lane = ahead.Lane("", tmp_path / "switch", {}, _parse([]))
    with pytest.raises(CommandError, match="not flushed"):
        lane.sample("beside", {"moved_us_per_token": 25, "selector": "first"}, 1)


def test_prompts_are_told_apart_by_a_word() -> None:
    args = _parse(["--rounds", "1"])
    prompts = _prompts(500, args)
    assert len(prompts) == 4 + 2 * 2 * 3, "kept ones, and one to compute each round"
    for name, texts in prompts.items():
        assert all(marker(name) in text.split() for text in texts)
        assert not any(
            marker(name) in text.split()
            for other in prompts
            if other != name
            for text in prompts[other]
        )
