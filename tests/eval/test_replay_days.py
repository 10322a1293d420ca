"""`python -m eval replay --days`: what changes between days, and which window is the worst."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.replay.days import Days, windows
from eval.replay.trace import TraceRequest
from eval.run import read_record
from radix_ext import Chunk, ChunkId

Request = dict[str, Any]


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    folder = tmp_path / "run"
    assert main(["replay", *options, "--out", str(folder)]) == 0
    found: dict[str, Any] = read_record(folder)["results"]
    return found


def write(path: Path, requests: list[Request]) -> str:
    path.write_text("\n".join(map(json.dumps, requests)))
    return str(path)


def test_each_day_is_another_day() -> None:
    """Chunks or the head are new; conversations end with their day."""
    chunks = (Chunk(ChunkId("a"), 5), Chunk(ChunkId("b"), 7))
    trace = [TraceRequest(chunks, True, head="bot", conversation="c")]
    documents = list(Days(trace, "documents"))
    assert [[chunk.id for chunk in day.chunks] for day in documents] == [
        ["a", "b"],
        ["1:a", "1:b"],
        ["2:a", "2:b"],
    ]
    assert [chunk.num_tokens for chunk in documents[2].chunks] == [5, 7]
    assert {day.head for day in documents} == {"bot"}
    prompts = list(Days(trace, "prompt"))
    assert {day.chunks for day in prompts} == {chunks}
    assert len({day.head for day in prompts}) == len({day.conversation for day in prompts}) == 3


@pytest.mark.parametrize("change", ["documents", "prompt"])
def test_a_cache_follows_the_next_day(tmp_path: Path, change: str) -> None:
    """What a small cache finds on each day of traffic that is alike, beside LRU and stock."""
    rng = random.Random(1)
    popular = [f"p{number}" for number in range(6)]
    requests = [
        {"passages": [f"n{number}", rng.choice(popular)], "lengths": [1, 1]}
        for number in range(1200)  # more than the window: none of them is known again
    ]
    trace = write(tmp_path / "trace.jsonl", requests)
    grid = ("--order", "retriever", "tree", "--eviction", "lru", "reused", "--capacity", "8")
    results = run(tmp_path, "--trace", trace, "--days", change, *grid)
    (ours,) = (
        entry
        for entry in results["days"]
        if (entry["cell"]["order"], entry["cell"]["eviction"]) == ("tree", "reused")
    )
    first, *others = ours["days"]
    assert all(abs(day - first) < 0.02 for day in others), ours
    assert len(ours["windows"]) == 2  # of 3600 requests
    assert ours["lru"]["value"] >= 0
    assert ours["stock"]["low"] > 0.1
    assert "Day by day" in {table["title"] for table in results["tables"]}


def test_the_worst_window_is_named_with_its_own_interval() -> None:
    """A mean would hide it: over all both find as much."""

    def sample(eviction: str, hits: list[int]) -> dict[str, Any]:
        label = {"order": "tree", "eviction": eviction, "host": 0}
        label |= {"capacity": 5, "capacity_tokens": 0}
        zeros = [0] * len(hits)
        counts = {"tokens": [10] * len(hits), "token_hits": hits, "num_requests": len(hits)}
        return {"cell": label, **counts, "dropped_tokens": zeros, "lost_tokens": zeros}

    lru = sample("lru", [5] * 4500)
    ours = sample("reused", [7] * 1500 + [2] * 1500 + [6] * 1500)

    def share(whole: Any, parts: list[int], unit: str) -> dict[str, float]:
        assert len(parts) == len(whole[unit]) == 1500
        return {"value": sum(parts) / sum(whole[unit]), "low": -1.0, "high": 1.0}

    found = windows([lru, ours], share)
    assert found[1]["windows"] == found[1]["days"] == [0.7, 0.2, 0.6]
    assert found[1]["lru"] == {"value": -0.3, "low": -1.0, "high": 1.0, "window": 2}
    assert "stock" not in found[1]
    assert "lru" not in found[0]


@pytest.mark.nightly
def test_topics_of_a_generated_trace_are_replaced(tmp_path: Path) -> None:
    results = run(tmp_path, "--generate", "300", "--days", "topics", "--capacity-tokens", "20000")
    assert {entry["cell"]["order"] for entry in results["days"]} == {
        "retriever",
        "frequency",
        "tree",
    }
    assert results["cells"][0]["num_requests"] == 900
    assert main(["replay", "--task", "world", "--days", "topics"]) == 2
