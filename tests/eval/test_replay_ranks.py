"""A replay over several ranks: the rules are the server's, each rank has its own cache."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from eval.replay.command import main
from eval.replay.exact import Replay
from eval.replay.grid import Cell
from eval.replay.ranks import RanksReplay
from eval.run import read_record
from radix_ext import Chunk, ChunkId


def chunks(names: str) -> list[Chunk]:
    return [Chunk(ChunkId(name), 10) for name in names]


def make_ranks(num_ranks: int = 4, in_flight: int = 1, **settings: Any) -> RanksReplay:
    return RanksReplay(
        Cell(**settings).settings, num_ranks=num_ranks, in_flight=in_flight, max_load_ratio=1.25
    )


def test_one_rank_is_the_replay_without_ranks() -> None:
    """Counts of every request, evictions, and a conversation that loses some of its history."""
    rng = random.Random(1)
    ranks, one = make_ranks(1, capacity=8), Replay(Cell(capacity=8).settings)
    for _ in range(300):
        request, conversation = rng.sample("abcdefghij", 3), rng.choice([None, "x", "y"])
        is_last = rng.random() < 0.1
        counts = [
            each.step(chunks("".join(request)), conversation, is_last_turn=is_last)
            for each in (ranks, one)
        ]
        assert counts[0] == counts[1]
    assert (ranks.num_evicted, ranks.peak_nodes) == (one.num_evicted, one.peak_nodes)
    assert one.num_evicted > 0


def test_requests_go_to_the_rank_that_has_most() -> None:
    """And new ones around."""
    ranks = make_ranks()
    hits = [ranks.step(chunks(names)).num_hits for names in ("ab", "cd", "ef", "gh", "abx", "efy")]
    assert hits == [0, 0, 0, 0, 2, 2]
    assert [rank["requests"] for rank in ranks.figures["by_rank"]] == [2, 1, 2, 1]


def test_a_later_turn_finds_its_history_on_its_own_rank_alone() -> None:
    """Every rank has the first turn's chunks, one the second's: no turn leaves it."""
    ranks = make_ranks(in_flight=12)
    for _ in range(12):
        ranks.step(chunks("ab"))
    assert all(rank["requests"] for rank in ranks.figures["by_rank"])
    counts = [ranks.step(chunks("ab" if turn == 0 else f"{turn}"), "c") for turn in range(10)]
    assert sum(count.num_lost for count in counts) == 0
    assert (ranks.figures["later_turns"], ranks.figures["left"]) == (9, 0)


def test_a_turn_that_leaves_is_counted_and_computes_its_history_again() -> None:
    ranks = make_ranks(2, in_flight=100)
    for names in ("ab", "x"):
        ranks.step(chunks(names), "c")
    ranks._router.begin(0, 1000)
    count = ranks.step(chunks("y"), "c")
    assert (count.num_lost, ranks.figures["left"], ranks.figures["later_turns"]) == (3, 1, 2)


def test_64_conversations_on_4_ranks(tmp_path: Path) -> None:
    """Of 10 turns, in any order, popular chunks first: at most 10% of the later turns leave their
    rank, and the busiest rank has at most 1.25 times the mean in flight."""
    rng, lines = random.Random(0), []
    for turn in range(10):
        for chat in rng.sample(range(64), 64):
            names = [f"{chat}-{turn}-{i}" for i in range(rng.randint(0, 3))]
            if turn == 0:
                names = [f"popular {number}" for number in rng.sample(range(8), 2)]
            lengths = [100 + 7 * (sum(map(ord, name)) % 40) for name in names]
            line = {"passages": names, "lengths": lengths, "conversation": f"c{chat}"}
            lines.append(json.dumps(line) + "\n")
    (tmp_path / "trace.jsonl").write_text("".join(lines))
    command = ["--trace", str(tmp_path / "trace.jsonl"), "--out", str(tmp_path / "run")]
    assert main([*command, *["--ranks", "4", "--in-flight", "64", "--order", "tree"]]) == 0
    results = read_record(tmp_path / "run")["results"]
    ranks = results["cells"][0]["ranks"]
    assert ranks["later_turns"] == 576
    assert ranks["left"] <= 57
    assert 1 <= ranks["busiest"] <= ranks["busiest_now"] <= 1.25
    assert sum(rank["requests"] for rank in ranks["by_rank"]) == 640
    assert results["tables"][1]["rows"][0]["later turns"] == "576"
