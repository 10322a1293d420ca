"""FusionRAG's storage simulation: counts by hand, the assumptions as drawn, and the command."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.replay.storage import (
    NEAR,
    PAPER,
    Assumptions,
    Counts,
    backtracking_store,
    chunk_store,
    compare,
    prefix_store,
    queries,
)

pytestmark = pytest.mark.nightly

SMALL = ["--queries", "50", "--known-pool", "20", "--shared-pool", "10", "--k", "4", "--seeds", "2"]


def run_json(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> dict[str, Any]:
    assert main(["replay", "--storage", "--out", str(folder), *options, "--json"]) == 0
    storage = json.loads(capsys.readouterr().out)["storage"]
    assert isinstance(storage, dict)
    return storage


def test_the_papers_three_queries() -> None:
    """Fig. 10: `b`, then `ab`, then `ba`. A prefix cache computes `a` again, the alternative path finds it."""
    requests = [["b"], ["a", "b"], ["b", "a"]]
    assert prefix_store([], requests) == Counts(replicas=4, computed=4, recomputed=2, found=1)
    assert backtracking_store([], requests) == Counts(replicas=2, computed=2, recomputed=0, found=3)
    assert chunk_store([], requests) == Counts(replicas=2, computed=2, recomputed=0, found=3)


def test_backtracking_misses_what_is_stored_behind_another_chunk() -> None:
    """`b` was computed after `a` only: no shorter path leads to it, and it is stored again."""
    requests = [["a", "b"], ["c", "b"], ["d", "c", "b"]]
    assert backtracking_store([], requests) == Counts(replicas=5, computed=5, recomputed=1, found=2)
    assert chunk_store([], requests) == Counts(replicas=4, computed=4, recomputed=0, found=3)


def test_known_chunks_are_stored_before_the_first_query() -> None:
    """Each alone, in all stores: a prefix cache finds one at the front only, and so computes the second again."""
    known, requests = ["a", "b"], [["a", "b"]]
    assert prefix_store(known, requests) == Counts(replicas=3, computed=1, recomputed=1, found=1)
    assert backtracking_store(known, requests) == Counts(replicas=2, computed=0, recomputed=0, found=2)
    assert chunk_store(known, requests) == Counts(replicas=2, computed=0, recomputed=0, found=2)


@pytest.mark.parametrize("seed", range(5))
def test_accounts_agree(seed: int) -> None:
    """Every chunk is found or computed. Replicas are what was computed and what was there. Finding more computes less."""
    rng = random.Random(seed)
    known = [str(n) for n in range(5)]
    requests = [[str(n) for n in rng.sample(range(20), 4)] for _ in range(60)]
    counts = [store(known, requests) for store in (prefix_store, backtracking_store, chunk_store)]
    assert all(c.computed + c.found == 240 for c in counts)
    assert all(c.replicas == c.computed + len(known) for c in counts)
    assert len({c.computed - c.recomputed for c in counts}) == 1  # each chunk is new once
    assert counts[0].recomputed > counts[1].recomputed > counts[2].recomputed == 0


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
    assert prefix_store(known, drawn).found > prefix_store(*shuffled).found


def test_pool_smaller_than_a_query_is_no_endless_loop() -> None:
    """There are only so many distinct chunks to draw."""
    _, drawn = queries(Assumptions(queries=5, known_pool=1, shared_pool=1, known=0.9, shared=0.1, k=10), seed=0)
    assert max(map(len, drawn)) <= 2


def test_command_prints_the_papers_figures_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what was assumed."""
    assert main(["replay", "--storage", "--out", str(tmp_path / "run"), *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["storage_reduction", "71.0%"],
        ["recomputations", "4,036"],
        ["eliminated", "82.3%"],
        ["hit_rate", "77.9%"],
    ]
    assert any(line.startswith("Assumed: queries 50,") and "2 seeds" in line for line in lines)
    assert json.loads(lines[-1])["storage"]["paper"] == PAPER
    assert json.loads((tmp_path / "run" / "record.json").read_text())["complete"]


def test_sweep_ranks_by_distance_to_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest of all settings is nearest in its worst figure; ranges hold every setting."""
    storage = run_json(capsys, tmp_path / "run", "--queries", "20", "--seeds", "1", "--sweep")
    found = storage["sweep"]["backtracking"]
    assert found["num_settings"] == 4 * 4 * 3 * 4 * 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    rates = [row["figures"]["backtracking"]["hit_rate"] for row in rows if row["swept"]]
    assert found["ranges"]["hit_rate"] == [min(rates), max(rates)]
    worst = [
        max(abs(row["figures"]["backtracking"][f] - PAPER[f]) / NEAR[f] for f in PAPER) for row in rows if row["swept"]
    ]
    nearest = max(abs(found["nearest"][0][f] - PAPER[f]) / NEAR[f] for f in PAPER)
    assert nearest == min(worst)
    assert found["num_near"] == sum(distance <= 1 for distance in worst)


def test_trace_has_no_known_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures on real requests."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"passages": ids} for ids in (["b"], ["a", "b"], ["b", "a"])] + [{"passages": [], "conversation": "x"}]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    storage = run_json(capsys, tmp_path / "run", "--trace", str(trace))
    (only,) = storage["runs"]
    assert (only["assumptions"], only["num_queries"]) == (None, 3)
    assert only["counts"]["prefix"] == prefix_store([], [["b"], ["a", "b"], ["b", "a"]])._asdict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--k", "0"], "must be at least 1"),
        (["--queries", "100000000"], "at most 10,000,000"),
        (["--known", "0.8", "--shared", "0.3"], "must be shares that sum to at most 1"),
        (["--known", "nan"], "must be shares that sum to at most 1"),
        (["--zipf", "-1"], "--zipf must be from 0 to 10"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
    ],
)
def test_nonsense_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """And no folder is left."""
    assert main(["replay", "--storage", "--out", str(tmp_path / "run"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_simulation_runs_without_any_installed_package(tmp_path: Path) -> None:
    """`-S` hides site-packages."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "eval", "replay", "--storage", "--out", str(tmp_path / "run"), *SMALL],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(json.loads(done.stdout.splitlines()[-1])["storage"]["runs"]) == 2
    assert done.stderr == ""
