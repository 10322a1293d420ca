"""`python -m eval replay --storage`: how often a prefix cache stores a chunk again, and how much a lookup by chunk saves.

    python -m eval replay --storage                          FusionRAG 5.3.3 under our assumptions, with the paper's figures
    python -m eval replay --storage --sweep                  assumptions under which the paper's figures result

The paper's simulation has 1,000 queries; of their chunks 60% are in the knowledge base, 30% new and shared, 10% unique.
It does not give the number of chunks per query, the sizes of the pools, the popularity or the order of chunks: those are assumed
here, and varied by the sweep. Three stores, each of unlimited capacity:

    prefix         each prefix before a chunk gives another replica of the chunk, and another computation
    backtracking   FusionRAG 4.1 to the letter: try the prefix, then ever fewer chunks before the chunk, until a replica is found
    by chunk       one replica per chunk, found at any position: our store

In all three the knowledge base was computed offline, each chunk alone. A recomputation is a computation of a chunk of which
another replica is stored; the hit rate is the share of all retrieved chunks that are found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from eval.progress import tracked
from eval.replay.text_table import text_table
from eval.run import Run, Sample, new_folder

PAPER = {"storage_reduction": 0.710, "recomputations": 4036, "eliminated": 0.823, "hit_rate": 0.779}
"""FusionRAG 5.3.3, "Storage Efficiency"."""
NEAR = {"storage_reduction": 0.05, "recomputations": 400, "eliminated": 0.05, "hit_rate": 0.05}
"""Largest distances that the sweep calls near the paper: 5 points, 10%."""
SWEEP: dict[str, Sequence[Any]] = {
    "k": (5, 6, 8, 10),
    "known_pool": (100, 300, 1000, 3000),
    "shared_pool": (100, 300, 1000),
    "zipf": (0.0, 0.5, 1.0, 1.5),
    "order": ("shuffled", "popular"),
}
STORES = ("backtracking", "by chunk")
NUM_SEEDS = 5
NUM_NEAREST = 3
KINDS = ("known", "shared", "unique")


@dataclass(frozen=True, slots=True)
class Assumptions:
    """First the values that the paper gives, then those that it leaves open."""

    queries: int = 1000
    known: float = 0.6
    shared: float = 0.3
    k: int = 10
    """Chunks per query: FusionRAG's top-n in preprocessing; CRAFT retrieves 5."""
    known_pool: int = 1000
    """One chunk of the knowledge base for each query."""
    shared_pool: int = 500
    """Its ratio to `known_pool` is that of the shares."""
    zipf: float = 1.0
    """Chunk r of a pool is drawn in proportion to r**-zipf: the common assumption on popularity; 0 is uniform."""
    order: str = "shuffled"
    """`shuffled`: a retriever ranks by the query, not by popularity; `popular`: popular chunks first, the same order always."""


class Counts(NamedTuple):
    """Counts of one store over all queries, in chunks."""

    replicas: int
    computed: int
    recomputed: int
    found: int


def main(argv: Sequence[str]) -> int:
    """Simulate and print the figures with the paper's; writes a run's folder."""
    parser = argparse.ArgumentParser(
        prog="python -m eval replay --storage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sweep", action="store_true", help="also vary everything that the paper leaves open")
    parser.add_argument("--out", type=Path, help="the run's folder; default: runs/<time>-storage")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(argv)
    todo = {f"seed={seed}": (Assumptions(), seed, False) for seed in range(NUM_SEEDS)}
    for values in itertools.product(*SWEEP.values()) if options.sweep else ():
        varied = dict(zip(SWEEP, values, strict=True))
        todo["/".join(f"{name}={value}" for name, value in varied.items())] = (Assumptions(**varied), 0, True)
    folder = options.out or new_folder("storage")
    with Run(folder, kind="replay", spec={**vars(options), "json": None}, summarize=summarize) as run:
        for key in tracked("storage", [key for key in todo if key not in run]):
            assumptions, seed, swept = todo[key]
            figures = compare(*queries(assumptions, seed=seed))
            run.add(key, {"assumptions": asdict(assumptions), "swept": swept, **figures})
        results = run.results()
    if options.json:
        print(json.dumps(results))
    else:
        print("\n\n".join([*map(text_table, results["tables"]), *results["verdict"], f"record: {folder}"]))
    return 0


def queries(assumptions: Assumptions, *, seed: int) -> tuple[list[str], list[list[str]]]:
    """(the knowledge base, each query's distinct chunks in retriever order)."""
    rng = random.Random(seed)
    sizes = {"known": assumptions.known_pool, "shared": assumptions.shared_pool}
    popularity = {kind: [(rank + 1) ** -assumptions.zipf for rank in range(size)] for kind, size in sizes.items()}
    summed = {kind: [*itertools.accumulate(weights)] for kind, weights in popularity.items()}
    weights = (assumptions.known, assumptions.shared, max(0.0, 1 - assumptions.known - assumptions.shared))
    drawn: list[list[str]] = []
    for number in range(assumptions.queries):
        chunks: dict[str, int] = {}
        kinds = rng.choices(KINDS, weights, k=assumptions.k)
        for kind, size in sizes.items():
            ranks: dict[int, None] = {}
            while len(ranks) < min(kinds.count(kind), size):
                (rank,) = rng.choices(range(size), cum_weights=summed[kind])
                ranks[rank] = None
            chunks |= {f"{kind}-{rank}": rank for rank in ranks}
        chunks |= {f"unique-{number}-{i}": sys.maxsize for i in range(kinds.count("unique"))}
        names = [*chunks]
        rng.shuffle(names)
        drawn.append(sorted(names, key=chunks.__getitem__) if assumptions.order == "popular" else names)
    return [f"known-{rank}" for rank in range(assumptions.known_pool)], drawn


def simulate(store: str, known: Sequence[str], requests: Sequence[Sequence[str]]) -> Counts:
    """Counts of one store, whose replicas are paths: a chunk after the chunks before it, or alone.

    A chunk is found if one of the paths that the store tries is there: the whole prefix, ever shorter ends of it, or none of it.
    """
    paths: set[tuple[str, ...]] = {(chunk,) for chunk in known}
    stored = set(known)
    computed = recomputed = found = 0
    for request in requests:
        for end in range(1, len(request) + 1):
            tried = {"prefix": range(1), "backtracking": range(end), "by chunk": range(end - 1, end)}[store]
            if any(tuple(request[start:end]) in paths for start in tried):
                found += 1
                continue
            computed += 1
            recomputed += request[end - 1] in stored
            stored.add(request[end - 1])
            paths.add(tuple(request[tried[0] : end]))
    return Counts(len(paths), computed, recomputed, found)


def compare(known: Sequence[str], requests: Sequence[Sequence[str]]) -> Sample:
    """The paper's four figures for both ways of finding a chunk, relative to the prefix cache."""
    prefix, num_chunks = simulate("prefix", known, requests), sum(map(len, requests))
    figures = {}
    for name in STORES:
        store = simulate(name, known, requests)
        figures[name] = {
            "storage_reduction": 1 - store.replicas / max(1, prefix.replicas),
            "recomputations": prefix.recomputed,
            "eliminated": 1 - store.recomputed / max(1, prefix.recomputed),
            "hit_rate": store.found / max(1, num_chunks),
        }
    return {"num_chunks": num_chunks, "figures": figures}


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """`results` of the record: a table of the seeds, one of the sweep, and what they say."""
    runs, swept = ([sample for sample in samples if sample["swept"] is kind] for kind in (False, True))
    results: dict[str, Any] = {"cells": [], "contrasts": [], "verdict": [], "tables": []}
    if runs:
        results["tables"].append(_seeds_table(runs))
        back, by_chunk = (
            {name: fmean(run["figures"][store][name] for run in runs) for name in PAPER} for store in STORES
        )
        results["verdict"].append(
            f"Of {runs[0]['num_chunks']:,} chunks retrieved a prefix cache computes {back['recomputations']:,.0f} although they "
            f"are stored after another prefix; backtracking avoids {back['eliminated']:.1%} of these, a store by chunk all, "
            f"with {back['storage_reduction']:.1%} and {by_chunk['storage_reduction']:.1%} less stored."
        )
    for store in STORES if swept else ():
        results["tables"].append(_sweep_table(swept, store))
        near = sum(_distance(sample, store) <= 1 for sample in swept)
        results["verdict"].append(f"{store}: all four figures near the paper's in {near} of {len(swept)} settings.")
    return results


def _seeds_table(runs: Sequence[Sample]) -> dict[str, Any]:
    rows = []
    for name, paper in PAPER.items():
        row = {"figure": name, "paper": _show(paper)}
        for store in STORES:
            values = [run["figures"][store][name] for run in runs]
            row[store] = f"{_show(fmean(values))} [{_show(min(values))}, {_show(max(values))}]"
        rows.append(row)
    assumed = ", ".join(f"{name} {value}" for name, value in runs[0]["assumptions"].items())
    note = f"Assumed: {assumed}; {len(runs)} seeds, mean [least, most]."
    return {"title": "FusionRAG's storage simulation", "rows": rows, "note": note}


def _sweep_table(swept: Sequence[Sample], store: str) -> dict[str, Any]:
    """The range of each figure over all settings, and the settings that are nearest to the paper in their worst figure."""
    rows = []
    for place, sample in enumerate(sorted(swept, key=lambda sample: _distance(sample, store))[:NUM_NEAREST], start=1):
        setting = ", ".join(f"{name} {sample['assumptions'][name]}" for name in SWEEP)
        rows.append({"": f"nearest {place}: {setting}"} | sample["figures"][store])
    for name, choose in (("least", min), ("most", max)):
        rows.append({"": name} | {one: choose(sample["figures"][store][one] for sample in swept) for one in PAPER})
    shown = [{name: value if name == "" else _show(value) for name, value in row.items()} for row in rows]
    return {"title": f"{store}, {len(swept)} settings", "rows": shown}


def _distance(sample: Mapping[str, Any], store: str) -> float:
    """Largest distance of a figure from the paper's, in units of the limit: up to 1 is near."""
    return float(max(abs(sample["figures"][store][name] - PAPER[name]) / NEAR[name] for name in PAPER))


def _show(value: float) -> str:
    return f"{value:,.0f}" if value > 1 else f"{value:.1%}"
