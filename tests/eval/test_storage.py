"""FusionRAG's storage simulation: counts by hand, the assumptions as drawn, and the command."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from eval.__main__ import main
from eval.replay import storage
from eval.replay.storage import NEAR, PAPER, Assumptions, Counts, compare, queries, simulate

pytestmark = pytest.mark.nightly

STORES = ("prefix", "backtracking", "by chunk")


def counts(known: list[str], requests: list[list[str]]) -> list[Counts]:
    return [simulate(store, known, requests) for store in STORES]


def test_the_papers_three_queries() -> None:
    """Fig. 10: `b`, then `ab`, then `ba`. A prefix cache computes `a` again, the alternative path finds it."""
    assert counts([], [["b"], ["a", "b"], ["b", "a"]]) == [
        Counts(replicas=4, computed=4, recomputed=2, found=1),
        Counts(replicas=2, computed=2, recomputed=0, found=3),
        Counts(replicas=2, computed=2, recomputed=0, found=3),
    ]


def test_backtracking_misses_what_is_stored_behind_another_chunk() -> None:
    """`b` was computed after `a` only: no shorter path leads to it, and it is stored again."""
    _, backtracking, by_chunk = counts([], [["a", "b"], ["c", "b"], ["d", "c", "b"]])
    assert backtracking == Counts(replicas=5, computed=5, recomputed=1, found=2)
    assert by_chunk == Counts(replicas=4, computed=4, recomputed=0, found=3)


def test_known_chunks_are_stored_before_the_first_query() -> None:
    """Each alone, in all stores: a prefix cache finds one at the front only, and so computes the second again."""
    assert counts(["a", "b"], [["a", "b"]]) == [
        Counts(replicas=3, computed=1, recomputed=1, found=1),
        Counts(replicas=2, computed=0, recomputed=0, found=2),
        Counts(replicas=2, computed=0, recomputed=0, found=2),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_accounts_agree(seed: int) -> None:
    """Every chunk is found or computed. Replicas are what was computed and what was there. Finding more computes less."""
    rng = random.Random(seed)
    known = [str(n) for n in range(5)]
    found = counts(known, [[str(n) for n in rng.sample(range(20), 4)] for _ in range(60)])
    assert all(c.computed + c.found == 240 for c in found)
    assert all(c.replicas == c.computed + len(known) for c in found)
    assert len({c.computed - c.recomputed for c in found}) == 1  # each chunk is new once
    assert found[0].recomputed > found[1].recomputed > found[2].recomputed == 0


def test_figures_are_the_papers_definitions() -> None:
    """By hand from the counts of fig. 10."""
    sample = compare([], [["b"], ["a", "b"], ["b", "a"]])
    assert sample["figures"]["by chunk"] == {
        "storage_reduction": 0.5,
        "recomputations": 2,
        "eliminated": 1.0,
        "hit_rate": pytest.approx(3 / 5),
    }


def test_queries_are_drawn_as_assumed() -> None:
    """Shares of the three kinds, distinct chunks, unique ones once, popular ones often; the same for the same seed."""
    assumptions = Assumptions(queries=400)
    known, drawn = queries(assumptions, seed=1)
    assert (known, drawn) == queries(assumptions, seed=1)
    assert len(known) == assumptions.known_pool
    assert {len(set(chunks)) for chunks in drawn} == {assumptions.k}
    uses = Counter(chunk for chunks in drawn for chunk in chunks)
    kinds = Counter(chunk.partition("-")[0] for chunks in drawn for chunk in chunks)
    assert {kind: round(n / 4000, 1) for kind, n in kinds.items()} == {"known": 0.6, "shared": 0.3, "unique": 0.1}
    assert {n for chunk, n in uses.items() if chunk.startswith("unique")} == {1}
    assert uses["known-0"] > 3 * uses["known-20"]


def test_popular_order_is_the_same_everywhere() -> None:
    """Which makes prefixes meet: the prefix cache finds more than with any shuffling."""
    popular = replace(Assumptions(queries=200), order="popular")
    known, drawn = queries(popular, seed=0)
    assert all(chunks.index("known-0") == 0 for chunks in drawn if "known-0" in chunks and "shared-0" not in chunks)
    shuffled = queries(replace(popular, order="shuffled"), seed=0)
    assert simulate("prefix", known, drawn).found > simulate("prefix", *shuffled).found


def test_pool_smaller_than_a_query_is_no_endless_loop() -> None:
    """There are only so many distinct chunks to draw."""
    _, drawn = queries(Assumptions(queries=5, known_pool=1, shared_pool=1, known=0.9, shared=0.1, k=10), seed=0)
    assert max(map(len, drawn)) <= 2


def test_defaults_give_the_recorded_figures(tmp_path: Path) -> None:
    """The table of eval/README.md, with the paper's figures; without any installed package and with nothing on stderr."""
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-S", "-m", "eval", "replay", "--storage", "--out", str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith(f"record: {folder}\n")
    results = json.loads((folder / "record.json").read_text())["results"]
    (table,) = results["tables"]
    assert [[value.split()[0] for value in row.values()] for row in table["rows"]] == [
        ["storage_reduction", "71.0%", "66.9%", "76.2%"],
        ["recomputations", "4,036", "7,774", "7,774"],
        ["eliminated", "82.3%", "87.8%", "100.0%"],
        ["hit_rate", "77.9%", "76.2%", "85.7%"],
    ]
    assert "5 seeds" in table["note"]


def test_sweep_ranks_by_distance_to_the_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest of all settings is nearest in its worst figure; ranges hold every setting."""
    monkeypatch.setattr(storage, "NUM_SEEDS", 1)
    monkeypatch.setattr(storage, "SWEEP", {"k": (5, 6), "queries": (20, 40), "zipf": (0.0, 1.0)})
    assert main(["replay", "--storage", "--sweep", "--out", str(tmp_path / "run"), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["tables"][1]
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    found = [row["figures"]["backtracking"] for row in rows if row["swept"]]
    assert table["title"] == "backtracking, 8 settings"
    least, most = (figures["hit_rate"] for figures in table["rows"][-2:])
    rates = [figures["hit_rate"] for figures in found]
    assert (least, most) == (f"{min(rates):.1%}", f"{max(rates):.1%}")
    nearest = min(found, key=lambda figures: max(abs(figures[name] - PAPER[name]) / NEAR[name] for name in PAPER))
    assert table["rows"][0]["hit_rate"] == f"{nearest['hit_rate']:.1%}"
