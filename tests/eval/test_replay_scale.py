"""Long traces: what a replay keeps does not grow with requests, generated traces,
and time and memory of a larger one."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.replay import cells
from eval.replay.cells import Bins, ReplayCell
from eval.replay.generated import (
    CHUNKS_PER_TOPIC,
    NOISE,
    POOL_SHARES,
    POOLS,
    GeneratedTrace,
    PooledTrace,
    SysXTrace,
)
from eval.replay.grid import grid
from eval.replay.trace import TraceRequest, scan
from eval.run import read_record
from radix_ext import Chunk, ChunkId


def create_cell(trace: list[TraceRequest], **axes: Any) -> ReplayCell:
    facts = scan(trace)
    (cell,) = grid(
        {name: [value] for name, value in axes.items()}, has_conversations=bool(facts.num_turns)
    )
    return ReplayCell(cell, facts, warm_up=0)


def test_bins_are_sums_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many, all but the last equally long; the warm-up is in none."""
    monkeypatch.setattr(cells, "MAX_BINS", 4)
    for num_requests, size, sums in (
        (4, 1, [1, 2, 3, 4]),
        (5, 2, [3, 7, 5]),
        (8, 2, [3, 7, 11, 15]),
        (9, 4, [10, 26, 9]),
    ):
        bins = Bins(("a", "b"), warm_up=2)
        for number in (99, 98, *range(1, num_requests + 1)):
            bins.add((number, 10 * number))
        tens = [10 * total for total in sums]
        counts = {"bin": size, "num_requests": num_requests}
        assert bins.sample == counts | {"a": sums, "b": tens}


def test_what_a_long_replay_reports_is_what_a_short_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Few bins and an estimated overlap: the same shares, similar intervals, a label."""
    options = "--generate 600 --order retriever tree --capacity 500 --out"
    command = ["replay", *options.split()]
    assert main([*command, str(tmp_path / "exact")]) == 0
    monkeypatch.setattr(cells, "MAX_BINS", 128)
    monkeypatch.setattr(cells, "OVERLAP_WINDOW", 200)
    assert main([*command, str(tmp_path / "binned")]) == 0
    exact, binned = (read_record(tmp_path / name)["results"] for name in ("exact", "binned"))
    for one, other in zip(
        exact["cells"] + exact["contrasts"], binned["cells"] + binned["contrasts"], strict=True
    ):
        a, b = (found.get("chunk_hit_rate", found) for found in (one, other))
        assert a["value"] == b["value"]
        assert 0.5 < (b["high"] - b["low"]) / (a["high"] - a["low"]) < 2
    assert exact["overlap"]["seen_before"]["value"] == binned["overlap"]["seen_before"]["value"]
    assert (exact["overlap"]["estimated_from"], binned["overlap"]["estimated_from"]) == (None, 60)
    assert "estimated from 60 requests" in binned["tables"][0]["note"]


def test_conversations_are_forgotten_after_their_last_turn() -> None:
    """What is kept follows the conversations under way; what is counted does not depend on it."""
    rng = random.Random(2)
    turns = [
        TraceRequest((Chunk(ChunkId(f"{name}-{rng.randrange(9)}"), 1),), True, conversation=name)
        for start in range(0, 300, 3)
        for name in [str(start + n % 3) for n in range(12)]
    ]
    cell = create_cell(turns, capacity=20, dedup="shown")
    kept = []
    for turn in turns:
        cell.step(turn)
        kept.append(len(cell._replay._histories))
    assert (max(kept), kept[-1]) == (3, 0)
    forgetful = cell.sample
    cell = create_cell(turns, capacity=20, dedup="shown")
    cell._turns_left = dict.fromkeys(cell._turns_left, 99)  # never the last one
    for turn in turns:
        cell.step(turn)
    assert len(cell._replay._histories) == 300
    for name in ("hits", "dropped", "lost"):
        assert cell.sample[name] == forgetful[name]
    assert sum(forgetful["dropped"]) > 0


# --- generated traces ---


def test_generated_trace_is_the_same_for_the_same_seed() -> None:
    """As often as it is read, and whatever its length; another seed is another trace."""
    trace = GeneratedTrace(50, k=5, seed=3)
    first = [*trace]
    assert [*trace] == first == [*GeneratedTrace(80, k=5, seed=3)][:50]
    assert [*GeneratedTrace(50, k=5, seed=4)] != first
    assert first[0].chunks[0] is next(iter(trace)).chunks[0]
    assert {len({chunk.id for chunk in request.chunks}) for request in first} == {5}


def test_generated_trace_is_as_described() -> None:
    """Few topics and few chunks of each are popular; topics change; time passes."""
    requests = [*GeneratedTrace(4000)]
    topics = [
        Counter(chunk.id.partition("-")[0] for chunk in request.chunks) for request in requests
    ]
    main_topics = Counter(topic.most_common(1)[0][0] for topic in topics)
    (_, most), *_, (_, least) = main_topics.most_common()
    assert most > 50 * least
    own = sum(topic.most_common(1)[0][1] for topic in topics) / (10 * len(requests))
    assert 1 - 2 * NOISE < own < 1
    chunks = [chunk for request in requests for chunk in request.chunks]
    numbers = Counter(chunk.id.partition("-")[2] for chunk in chunks)
    assert numbers["0"] > 5 * numbers[f"{CHUNKS_PER_TOPIC - 1}"]
    times = [request.timestamp or 0 for request in requests]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2000, rel=0.1)
    assert all(128 <= chunk.num_tokens <= 512 for chunk in chunks)
    assert any(int(name[1:]) >= 2000 for topic in topics for name in topic)


def test_pooled_trace_is_as_described() -> None:
    """A unique chunk is seen once, a pool's first most often; one length a chunk."""
    requests = [*PooledTrace(1000)]
    assert requests == [*PooledTrace(2000)][:1000]
    assert {len({chunk.id for chunk in request.chunks}) for request in requests} == {10}
    chunks = Counter(chunk for request in requests for chunk in request.chunks)
    assert len({chunk.id for chunk in chunks}) == len(chunks)
    for kind, share in POOL_SHARES.items():
        found = {chunk.id: count for chunk, count in chunks.items() if chunk.id.startswith(kind)}
        assert sum(found.values()) == pytest.approx(10_000 * share, rel=0.1)
        if kind in POOLS:
            assert len(found) <= POOLS[kind]
            assert max(found, key=lambda name: found[name]) == f"{kind}-0"
        else:
            assert set(found.values()) == {1}


def test_sys_x_has_the_published_shape() -> None:
    """Five chunks of 1,000 to 20,000 tokens, median 3,300; three quarters of them came before, 18%
    of the tokens in the same prefix."""
    requests = [*SysXTrace(3000)]
    assert requests[:1000] == [*SysXTrace(1000)]
    assert requests[:100] != [*SysXTrace(100, seed=1)]
    lens = sorted(sum(chunk.num_tokens for chunk in request.chunks) for request in requests)
    assert lens[0] >= 1000
    assert lens[-1] <= 20_000
    assert lens[len(lens) // 2] == pytest.approx(3300, rel=0.1)
    seen: set[ChunkId] = set()
    prefixes: set[tuple[ChunkId, ...]] = set()
    num_again = num_in_prefix = 0
    for request in requests:
        ids = [chunk.id for chunk in request.chunks]
        assert len(set(ids)) == 5
        num_again += len(seen.intersection(ids))
        seen.update(ids)
        for k, chunk in enumerate(request.chunks, 1):
            if tuple(ids[:k]) not in prefixes:
                break
            num_in_prefix += chunk.num_tokens
        prefixes.update(tuple(ids[:k]) for k in range(1, 6))
    assert num_again / (5 * len(requests)) == pytest.approx(0.75, abs=0.02)
    assert num_in_prefix / sum(lens) == pytest.approx(0.18, abs=0.03)


# --- time and memory ---


def test_memory_does_not_grow_with_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a full cache: less than 40 bytes each, where their counts alone took 450."""
    monkeypatch.setattr(cells, "MAX_BINS", 64)
    monkeypatch.setattr("eval.replay.exact._MAX_TIMES", 64)
    trace = [*GeneratedTrace(1000)]
    cell = create_cell(trace, capacity=200, window=50, eviction="reused")
    tracemalloc.start()
    for number, request in enumerate(trace):
        cell.step(request)
        if number == 299:
            full = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - full
    tracemalloc.stop()
    assert grown < 700 * 40


def cost(num_requests: int, folder: Path) -> tuple[float, int]:
    """(CPU seconds, peak KiB) of a process that replays so many requests."""
    code = (
        "import resource, sys; from eval.__main__ import main; main(sys.argv[1:]); used ="
        " resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime + used.ru_stime,"
        " used.ru_maxrss)"
    )
    options = f"replay --generate {num_requests} --order tree --eviction reused --capacity 20000"
    done = subprocess.run(
        [sys.executable, "-c", code, *options.split(), "--out", str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, peak = done.stdout.splitlines()[-1].split()
    return float(seconds), int(peak)


@pytest.mark.nightly
def test_request_of_a_long_trace_costs_no_more(tmp_path: Path) -> None:
    """100,000 requests: at most 1.3 times the CPU time of each of 10,000, start-up taken off, and
    less than 300 MB more.

    What grows are distinct chunks, here about 300 bytes for each of 60,000, and the bits of an
    estimate's window.
    """
    start_up, _ = cost(1, tmp_path / "1")
    before, small = cost(10_000, tmp_path / "before")
    long, large = cost(100_000, tmp_path / "long")
    after, _ = cost(10_000, tmp_path / "after")
    assert (long - start_up) / 100_000 < 1.3 * ((before + after) / 2 - start_up) / 10_000
    assert large - small < 300 * 1024
