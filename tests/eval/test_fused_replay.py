"""The fused replay by hand, on made traces, and as a command."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from eval.replay.eviction_queue import EvictionPolicy
from eval.replay.exact import ReplaySettings
from eval.replay.fused import EvenAttention, FusedReplay, Timing
from eval.replay.fused_cell import KNOBS, add_options
from eval.run import read_record
from radix_ext import Chunk, ChunkId, OrderPolicy, Tier
from sglang_chunkcache import ChunkCacheConfig
from tests.kit.costs import GROWING
from tests.kit.integrity import check_store, check_tree, of_chains

ROOT = Path(__file__).parents[2]
SIZES: Any = {"kv_bytes": 1, "store_bytes": 1 << 30, "chunk_tokens": 1}


def make_replay(
    *,
    order: OrderPolicy = "retriever",
    eviction: EvictionPolicy = "lru",
    capacity_tokens: int | None = None,
    host: int = 0,
    timing: Timing | None = None,
    **knobs: object,
) -> FusedReplay:
    settings = ReplaySettings(
        order, "seen", eviction, "all", "shown", None, capacity_tokens, 1000, 2, 64, host
    )
    least: dict[str, Any] = {"max_pass_tokens": 1000}
    config = ChunkCacheConfig(**{**least, **knobs})
    return FusedReplay(settings, config, prefill_budget=10, timing=timing, **SIZES)


def request(names: str, num_tokens: int = 10) -> list[Chunk]:
    return [Chunk(ChunkId(name), num_tokens) for name in names]


def fates(
    replay: FusedReplay, names: str, conversation: str | None = None
) -> tuple[int, int, int, int]:
    """Tokens exact, relocated, recomputed, computed."""
    count = replay.step(request(names), conversation)
    found = (count.exact, count.relocated, count.recomputed, count.computed)
    assert sum(found) + count.dropped == count.tokens
    return found


def test_moved_chunks_by_hand() -> None:
    replay = make_replay()
    assert fates(replay, "AB") == (0, 0, 0, 20)
    assert fates(replay, "BA") == (0, 17, 3, 0)
    assert fates(replay, "ABB"[:2]) == (20, 0, 0, 0)
    assert fates(replay, "ACB") == (10, 8, 2, 10)
    assert fates(replay, "BD") == (0, 8, 2, 10)


def test_another_head_is_a_source_and_no_prefix() -> None:
    """Chunks behind another head are moved; a source behind the request's own head comes first."""
    replay = make_replay(selector="query")
    replay.step(request("AB"), head="x")
    moved = replay.step(request("AB"), head="y")
    assert (moved.exact, moved.relocated + moved.recomputed, moved.from_device) == (0, 20, 20)
    assert replay.step(request("AB"), head="x").exact == 20
    replay.step(request("CB"), head="y")
    copies = replay._sources.candidates(ChunkId("C"), "y")
    assert [copy.facts.head for copy in copies] == ["y"]


@pytest.mark.parametrize(
    ("timing", "told", "exact"),
    [(None, (10, 0, 20), 10), (Timing(GROWING, 32, 1000), (20, 0, 10), 20)],
)
def test_chunk_that_is_first_is_computed_where_that_costs_little(
    timing: Timing | None, told: tuple[int, int, int], exact: int
) -> None:
    """D, which is cached nowhere, comes before what is moved."""
    replay = make_replay(order="tree", timing=timing)
    replay.step(request("ABC"))
    count = replay.step(request("BCD"))
    assert (count.computed, count.behind, count.from_device) == told
    assert replay.step(request("BD")).exact == exact


def test_half_of_the_requests_fused_are_counted_apart() -> None:
    settings = ReplaySettings("tree", "seen", "lru", "all", "shown", None, None, 1000, 2, 64)
    config = ChunkCacheConfig(reuse="fused")
    replay = FusedReplay(settings, config, prefill_budget=100, share=0.5, **SIZES)
    counts = [replay.step(request(names)) for names in ("ABC", "BC", "BC", "BC")]
    told = [(each.opted_tokens, each.opted_exact, each.opted_computed) for each in counts]
    assert told == [(0, 0, 0), (20, 0, 0), (0, 0, 0), (20, 20, 0)]


def test_later_turns_have_their_history_and_move_the_rest() -> None:
    replay = make_replay()
    replay.step(request("C"))
    assert fates(replay, "AB", "talk") == (0, 0, 0, 20)
    assert fates(replay, "AC", "talk") == (0, 8, 2, 0)
    count = replay.step(request("DA"), "talk")
    assert (count.computed, count.dropped, count.lost) == (10, 10, 0)


def test_a_history_that_has_left_is_moved_or_lost() -> None:
    """A and B are stored and moved back; C, asked for once, is computed again beside D."""
    replay = make_replay(capacity_tokens=60, store_threshold=2)
    replay.step(request("AB"))
    replay.step(request("ABC"), "talk")
    replay.step(request("EFGH"))
    replay.step(request("IJ"))
    count = replay.step(request("D"), "talk")
    assert (count.lost, count.computed, count.from_host) == (10, 10, 0)


def test_sources_and_prompt_are_not_evicted_for_the_request() -> None:
    replay = make_replay(capacity_tokens=50)
    replay.step(request("AB"))
    replay.step(request("CD"))
    assert fates(replay, "BA") == (0, 17, 3, 0)
    assert [replay.step(request(names)).exact for names in ("AB", "CD")] == [20, 10]


def test_nothing_is_moved_without_room() -> None:
    """As on a server: what is moved, its sources and what is computed must fit."""
    replay = make_replay(capacity_tokens=40)
    replay.step(request("AB"))
    assert fates(replay, "BA") == (0, 0, 0, 20)
    assert replay.fallbacks["no_room"] == 1


def test_chain_that_has_left_the_device_comes_back_by_hand() -> None:
    """A and B are kept since a request has found them, C once it is promoted."""
    replay = make_replay(capacity_tokens=50, host=100)
    replay.step(request("ABC"))
    assert replay.step(request("AB")).exact_from_host == 0
    replay.step(request("DEFGH"))
    count = replay.step(request("ABC"))
    assert (count.exact, count.exact_from_host, count.computed) == (20, 20, 10)
    replay.step(request("KLMNO"))
    moved = replay.step(request("IB"))
    assert (moved.from_host, moved.computed) == (10, 10)
    assert replay.host is not None
    assert (replay.host.counts.saved_tokens, replay.host.counts.loaded_tokens) == (30, 20)


def test_later_turns_stay_out_of_host_memory() -> None:
    """No other request asks for their chains."""
    replay = make_replay(capacity_tokens=50, host=100)
    for names in ("A", "B", "C"):
        replay.step(request(names), "talk")
        replay.step(request("A"))
    assert replay.host is not None
    assert len(replay.host.nodes) == 1


@pytest.mark.parametrize("host", [0, 100])
@pytest.mark.parametrize("seed", range(3))
def test_limits_hold_on_any_trace(seed: int, host: int) -> None:
    rng = random.Random(seed)
    room = {"store_chunks": 100} if host else {"store_chunks": 6, "store_variants": 2}
    limits: dict[str, Any] = {**room}
    replay = make_replay(order="tree", eviction="reused", capacity_tokens=150, host=host, **limits)
    for _ in range(400):
        names = "".join(
            dict.fromkeys(rng.choice("AAABBBCCDDEFGHIJKLMN") for _ in range(rng.randint(1, 5)))
        )
        fates(replay, names, rng.choice([None, None, "x", "y"]) if rng.random() < 0.3 else None)
        if rng.random() < 0.2:
            replay._histories.clear()
        num_nodes, num_tokens = replay._tree.holdings.held(0, Tier.DEVICE)
        assert num_tokens <= 150
        assert len(replay._known) == num_nodes >= len(replay._copies)
        if replay.host is not None:
            assert not [*of_chains(replay.host.nodes)]
            only_there = replay._tree.holdings.held(0, Tier.HOST)[1]
            assert only_there <= replay.store.stats().num_bytes <= host
        check_store(replay.store)
    check_tree(replay._tree)
    assert replay.num_evicted > 0
    assert replay.store.stats().num_evicted > 0


def test_even_attention_is_the_sum_over_tokens() -> None:
    lens, num_tokens = (7, 5), 20
    scores = EvenAttention.of(12, lens, num_tokens)
    weights = [1 / (12 + offset + 1) for offset in range(num_tokens)]
    assert scores.inter == pytest.approx([length * sum(weights) for length in lens], rel=1e-3)
    assert scores.intra == pytest.approx(
        sum(offset * w for offset, w in enumerate(weights)), rel=1e-2
    )
    assert EvenAttention.of(0, (), num_tokens).inter == ()


def test_defaults_are_the_servers() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    options, config = vars(parser.parse_args([])), asdict(ChunkCacheConfig())
    assert {name: options[name] for name in KNOBS} == {name: config[name] for name in KNOBS}


def replay_command(*options: str, bare: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-S"] if bare else []), "-m", "eval", "replay", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


def test_command_runs_on_python_alone(tmp_path: Path) -> None:
    done = replay_command(
        "--generate", "300", "--reuse", "fused", "--out", str(tmp_path / "run"), bare=True
    )
    assert done.returncode == 0, done.stderr
    results = read_record(tmp_path / "run")["results"]
    for entry in results["fused"]:
        assert sum(share["value"] for share in entry["fates"].values()) == pytest.approx(1)
        assert entry["fates"]["exact"]["value"] <= entry["exact_without"]["value"] + 0.02
        assert entry["fates"]["relocated"]["value"] > 0
        store = entry["store"]
        variants = {int(num): held for num, held in entry["variants"].items()}
        assert sum(chunks for chunks, _ in variants.values()) == store["num_chunks"]
        assert sum(num * chunks for num, (chunks, _) in variants.items()) == store["num_variants"]
        kv = sum(num * mib for num, (_, mib) in variants.items())
        assert kv == pytest.approx(store["num_bytes"] / 2**20, rel=0.01), "the rest is scores"
    assert [table["title"] for table in results["tables"]][-1] == "All requests fused"
    assert results["tables"][-1]["rows"][0]["exact without"] in done.stdout


def test_command_with_host_memory(tmp_path: Path) -> None:
    """Of its size is the store; a cell without it has the store of its own option."""
    options = ("--reuse", "fused", "--capacity", "60", "--host", "0", "200", "--store-mib", "2000")
    half = ("--fused-share", "0.5", "--out", str(tmp_path / "run"))
    done = replay_command("--generate", "300", *options, *half)
    assert done.returncode == 0, done.stderr
    alone, hosted = read_record(tmp_path / "run")["results"]["fused"]
    assert "exact_from_host" not in alone
    assert alone["store"]["num_bytes"] > 1000 << 20
    assert 0 < hosted["exact_from_host"]["value"] < hosted["fates"]["exact"]["value"]
    assert hosted["host"]["loaded_tokens"] > 0
    assert hosted["store"]["num_bytes"] <= 200 * 500 * 131_072
    assert "exact, from host" in done.stdout


@pytest.mark.data
@pytest.mark.nightly
def test_all_of_ragpulse_fused(tmp_path: Path) -> None:
    folder = Path(os.environ.get("CHUNKCACHE_DATA", "/nowhere")) / "ragpulse"
    if not folder.exists():
        pytest.skip("no RAGPulse data")
    files = [str(folder / f"{name}.jsonl.gz") for name in ("requests", "components")]
    trace = ["--trace", files[0], "--components", files[1], "--capacity-tokens", "0"]
    done = replay_command(*trace, "--reuse", "fused", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    (entry,) = read_record(tmp_path / "run")["results"]["fused"]
    shares = {fate: round(share["value"], 4) for fate, share in entry["fates"].items()}
    assert shares.pop("dropped") == 0
    assert [*shares.items()] == [
        *(("exact", 0.2543), ("relocated", 0.5415)),
        *(("recomputed", 0.0959), ("computed", 0.1084)),
    ]
    assert round(entry["exact_without"]["value"], 4) == 0.5074
