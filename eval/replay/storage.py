"""`python -m eval replay --storage`: how often a prefix cache stores a chunk again, and how much a lookup by chunk saves.

    python -m eval replay --storage                          FusionRAG 5.3.3 under our assumptions, with the paper's figures
    python -m eval replay --storage --sweep                  assumptions under which the paper's figures result
    python -m eval replay --storage --trace FILE             the same figures on a trace: no chunk is known beforehand

The paper's simulation has 1,000 queries; of their chunks 60% are in the knowledge base, 30% new and shared, 10% unique.
It does not give the number of chunks per query, the sizes of the pools, the popularity or the order of chunks: here those are
options. Three stores, each of unlimited capacity:

    prefix         each prefix before a chunk gives another replica of the chunk, and another computation
    backtracking   FusionRAG 4.1 to the letter: try the prefix, then ever fewer chunks before the chunk, until a replica is found
    by chunk       one replica per chunk, found at any position: our store

In all three the knowledge base was computed offline, each chunk alone. A recomputation is a computation of a chunk of which
another replica is stored; the hit rate is the share of all retrieved chunks that are found.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from eval.errors import CommandError
from eval.progress import tracked
from eval.replay.trace import TraceFile
from eval.run import Run, Sample
from radix_ext import Chunk, ChunkId, ChunkPrefixTree, Tier

PAPER = {"storage_reduction": 0.710, "recomputations": 4036, "eliminated": 0.823, "hit_rate": 0.779}
"""FusionRAG 5.3.3, "Storage Efficiency"."""
NEAR = {"storage_reduction": 0.05, "recomputations": 400, "eliminated": 0.05, "hit_rate": 0.05}
"""Largest distances that the sweep calls near the paper: 5 points, 10%."""
NUM_NEAREST = 3
_Row = tuple[str, Sample, Callable[[], tuple[list[str], list[list[str]]]]]
"""Key, the sample's description, and (knowledge base, requests)."""
STORES = ("backtracking", "by chunk")
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


SWEEP: dict[str, Sequence[Any]] = {
    "k": (5, 6, 8, 10),
    "known_pool": (100, 300, 1000, 3000),
    "shared_pool": (100, 300, 1000),
    "zipf": (0.0, 0.5, 1.0, 1.5),
    "order": ("shuffled", "popular"),
}


class Counts(NamedTuple):
    """Counts of one store over all queries, in chunks."""

    replicas: int
    computed: int
    recomputed: int
    found: int


def main(argv: Sequence[str]) -> int:
    """Simulate or replay, and print the figures with the paper's; writes a run's folder."""
    options = _parser().parse_args(argv)
    todo = [*_traced(options.trace)] if options.trace is not None else [*_simulated(options)]
    now = datetime.datetime.now().strftime("%Y-%m-%dT%H%M%S")
    folder = options.out or Path("runs") / f"{now}-storage"
    with Run(folder, kind="replay", spec={**vars(options), "json": None}, summarize=summarize) as run:
        for key, labels, known_and_requests in tracked("storage", [row for row in todo if row[0] not in run]):
            run.add(key, labels | compare(*known_and_requests()))
        results = run.results()
    if not options.json:
        print("\n".join([*_report(results["storage"]), *results["verdict"], "", f"record: {folder}"]))
    print(json.dumps(results))
    return 0


def queries(assumptions: Assumptions, *, seed: int) -> tuple[list[str], list[list[str]]]:
    """(the knowledge base, each query's distinct chunks in retriever order)."""
    rng = random.Random(seed)
    pools = {"known": _Pool("known", assumptions.known_pool, assumptions.zipf, rng)}
    pools["shared"] = _Pool("shared", assumptions.shared_pool, assumptions.zipf, rng)
    weights = (assumptions.known, assumptions.shared, max(0.0, 1 - assumptions.known - assumptions.shared))
    drawn: list[list[str]] = []
    for number in range(assumptions.queries):
        chunks: dict[str, int] = {}
        kinds = rng.choices(KINDS, weights, k=assumptions.k)
        for kind in KINDS[:2]:
            chunks |= pools[kind].draw(min(kinds.count(kind), pools[kind].size))
        chunks |= {f"unique-{number}-{i}": sys.maxsize for i in range(kinds.count("unique"))}
        names = [*chunks]
        rng.shuffle(names)
        drawn.append(sorted(names, key=chunks.__getitem__) if assumptions.order == "popular" else names)
    return pools["known"].names, drawn


def prefix_store(known: Sequence[str], requests: Sequence[Sequence[str]]) -> Counts:
    """A standard prefix cache, simulated with the tree of our plugin."""
    tree, stored = ChunkPrefixTree(max_nodes=sys.maxsize), set(known)
    computed = recomputed = found = 0
    for request in itertools.chain(([chunk] for chunk in known), requests):
        chunks = [Chunk(ChunkId(name), 1) for name in request]
        held = len(tree.match("", (chunk.id for chunk in chunks)))
        computed += len(request) - held
        recomputed += sum(name in stored for name in request[held:])
        found += held
        stored.update(request)
        tree.insert("", chunks, rank=0, tier=Tier.DEVICE, promoted_len=0)
    return Counts(len(tree), computed - len(known), recomputed - len(known), found)


def backtracking_store(known: Sequence[str], requests: Sequence[Sequence[str]]) -> Counts:
    """FusionRAG's alternative path: replicas are keyed by their prefix, and ever shorter prefixes are tried."""
    paths: set[tuple[str, ...]] = {(chunk,) for chunk in known}
    stored = set(known)
    computed = recomputed = found = 0
    for request in requests:
        for end in range(1, len(request) + 1):
            if any(tuple(request[start:end]) in paths for start in range(end)):
                found += 1
                continue
            computed += 1
            recomputed += request[end - 1] in stored
            stored.add(request[end - 1])
            paths.add(tuple(request[:end]))
    return Counts(len(paths), computed, recomputed, found)


def chunk_store(known: Sequence[str], requests: Sequence[Sequence[str]]) -> Counts:
    """One replica per chunk, regardless of the chunks before it."""
    stored = set(known)
    num_chunks = 0
    for request in requests:
        num_chunks += len(request)
        stored.update(request)
    computed = len(stored) - len(known)
    return Counts(len(stored), computed, 0, num_chunks - computed)


def compare(known: Sequence[str], requests: Sequence[Sequence[str]]) -> Sample:
    """The paper's four figures for both ways of finding a chunk, relative to the prefix cache."""
    prefix = prefix_store(known, requests)
    stores = {"backtracking": backtracking_store(known, requests), "by chunk": chunk_store(known, requests)}
    num_chunks = sum(map(len, requests))
    figures = {name: _figures(prefix, counts, num_chunks) for name, counts in stores.items()}
    counts = {name: counts._asdict() for name, counts in {"prefix": prefix, **stores}.items()}
    return {"num_queries": len(requests), "num_chunks": num_chunks, "counts": counts, "figures": figures}


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """`results` of the record."""
    swept = [sample for sample in samples if sample.get("swept")]
    storage = {
        "paper": PAPER,
        "runs": [sample for sample in samples if not sample["swept"]],
        "sweep": {store: _sweep_figures(swept, store) for store in STORES} if swept else None,
    }
    return {"cells": [], "overlap": None, "contrasts": [], "verdict": [*_sentences(storage)], "storage": storage}


class _Pool:
    """Chunks of one kind, by popularity."""

    def __init__(self, kind: str, size: int, zipf: float, rng: random.Random) -> None:
        self.size, self.names = size, [f"{kind}-{rank}" for rank in range(size)]
        self._cumulative = list(itertools.accumulate((rank + 1) ** -zipf for rank in range(size)))
        self._rng = rng

    def draw(self, n: int) -> dict[str, int]:
        """n distinct chunks -> their popularity ranks, in the order drawn."""
        drawn: dict[str, int] = {}
        while len(drawn) < n:
            (rank,) = self._rng.choices(range(self.size), cum_weights=self._cumulative)
            drawn[self.names[rank]] = rank
        return drawn


def _parser() -> argparse.ArgumentParser:
    default = Assumptions()
    parser = argparse.ArgumentParser(
        prog="python -m eval replay --storage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, help="a trace instead of the simulation (`python -m eval replay --help`)")
    parser.add_argument("--queries", type=int, default=default.queries, help="default: %(default)s")
    parser.add_argument("--known", type=float, default=default.known, help="share of chunks; default: %(default)s")
    parser.add_argument("--shared", type=float, default=default.shared, help="share of chunks; default: %(default)s")
    parser.add_argument("--k", type=int, default=default.k, help="chunks a query; default: %(default)s")
    parser.add_argument("--known-pool", type=int, default=default.known_pool, help="chunks; default: %(default)s")
    parser.add_argument("--shared-pool", type=int, default=default.shared_pool, help="chunks; default: %(default)s")
    parser.add_argument("--zipf", type=float, default=default.zipf, help="popularity exponent; default: %(default)s")
    parser.add_argument("--order", choices=("shuffled", "popular"), default=default.order, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="simulations with these assumptions; default: %(default)s")
    parser.add_argument("--sweep", action="store_true", help="also vary everything that the paper leaves open")
    parser.add_argument("--out", type=Path, help="the run's folder; default: runs/<time>-storage")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _assumptions(options: argparse.Namespace) -> Assumptions:
    chosen = Assumptions(**{name: getattr(options, name) for name in asdict(Assumptions())})
    smallest = min(chosen.queries, chosen.k, chosen.known_pool, chosen.shared_pool, options.seeds)
    if smallest < 1 or max(chosen.known_pool, chosen.shared_pool, chosen.queries * chosen.k) > 10_000_000:
        raise CommandError(
            "queries, k, pools and seeds must be at least 1, and pools and all chunks at most 10,000,000"
        )
    if not (0 <= chosen.known <= 1 and 0 <= chosen.shared <= 1 and chosen.known + chosen.shared <= 1 + 1e-9):
        raise CommandError(f"--known {chosen.known} and --shared {chosen.shared} must be shares that sum to at most 1")
    if not 0 <= chosen.zipf <= 10:
        raise CommandError(f"--zipf must be from 0 to 10 but got {chosen.zipf}")
    return chosen


def _simulated(options: argparse.Namespace) -> Iterator[_Row]:
    """The chosen assumptions under each seed, then the sweep."""
    chosen = _assumptions(options)
    for seed in range(options.seeds):
        yield f"seed={seed}", {"assumptions": asdict(chosen), "swept": False}, partial(queries, chosen, seed=seed)
    for values in itertools.product(*SWEEP.values()) if options.sweep else ():
        varied = dict(zip(SWEEP, values, strict=True))
        swept = replace(chosen, **varied)
        key = "/".join(f"{name}={value}" for name, value in varied.items())
        yield key, {"assumptions": asdict(swept), "swept": True}, partial(queries, swept, seed=0)


def _traced(path: Path) -> Iterator[_Row]:
    requests = [[str(chunk.id) for chunk in request.chunks] for request in TraceFile(path) if request.chunks]
    yield "trace", {"assumptions": None, "swept": False}, lambda: ([], requests)


def _figures(prefix: Counts, counts: Counts, num_chunks: int) -> dict[str, float]:
    return {
        "storage_reduction": 1 - counts.replicas / max(1, prefix.replicas),
        "recomputations": prefix.recomputed,
        "eliminated": 1 - counts.recomputed / max(1, prefix.recomputed),
        "hit_rate": counts.found / max(1, num_chunks),
    }


def _sweep_figures(swept: Sequence[Sample], store: str) -> dict[str, Any]:
    """The range of each figure, the number of settings near the paper in all four, and the nearest setting."""
    ranked = sorted(swept, key=lambda sample: _distance(sample["figures"][store]))
    values = {name: [sample["figures"][store][name] for sample in swept] for name in PAPER}
    return {
        "num_settings": len(swept),
        "num_near": sum(_distance(sample["figures"][store]) <= 1 for sample in swept),
        "ranges": {name: (min(found), max(found)) for name, found in values.items()},
        "nearest": [{"assumptions": s["assumptions"], **s["figures"][store]} for s in ranked[:NUM_NEAREST]],
    }


def _distance(figures: dict[str, float]) -> float:
    """Largest distance of a figure from the paper's, in units of the limit: up to 1 is near."""
    return max(abs(figures[name] - PAPER[name]) / NEAR[name] for name in PAPER)


def _sentences(storage: dict[str, Any]) -> Iterator[str]:
    runs = storage["runs"]
    if runs:
        mean = {
            store: {name: sum(run["figures"][store][name] for run in runs) / len(runs) for name in PAPER}
            for store in STORES
        }
        back, by_chunk = mean.values()
        yield (
            f"Of {runs[0]['num_chunks']:,} chunks retrieved a prefix cache computes {back['recomputations']:,.0f} although they "
            f"are stored after another prefix; backtracking avoids {back['eliminated']:.1%} of these, a store by chunk all, "
            f"with {back['storage_reduction']:.1%} and {by_chunk['storage_reduction']:.1%} less stored."
        )
    for store, found in (storage["sweep"] or {}).items():
        yield f"{store}: all four figures near the paper's in {found['num_near']} of {found['num_settings']} settings."


def _report(storage: dict[str, Any]) -> Iterator[str]:
    """Each figure: the paper's, then both stores' mean and range over the seeds."""
    runs = storage["runs"]
    yield f"{'':<20} {'paper':>8}" + "".join(f"   {store:<26}" for store in STORES)
    for name, paper in PAPER.items():
        cells = []
        for store in STORES:
            values = [run["figures"][store][name] for run in runs]
            cells.append(f"{_show(sum(values) / len(values)):>8} [{_show(min(values))}, {_show(max(values))}]")
        yield f"{name:<20} {_show(paper):>8}" + "".join(f"   {cell:<26}" for cell in cells).rstrip()
    first = runs[0]
    if first["assumptions"]:
        said = ", ".join(f"{name} {value}" for name, value in first["assumptions"].items())
        yield f"Assumed: {said}; {len(runs)} seeds, mean [least, most]."
    else:
        yield f"{first['num_queries']:,} requests, {first['num_chunks']:,} chunks; none known beforehand."
    if storage["sweep"]:
        yield from _report_sweep(storage["sweep"])


def _report_sweep(sweep: dict[str, Any]) -> Iterator[str]:
    for store, found in sweep.items():
        yield f"Over {found['num_settings']} settings, {store}:"
        yield "  " + ", ".join(f"{name} {_show(low)} to {_show(high)}" for name, (low, high) in found["ranges"].items())
        for nearest in found["nearest"]:
            yield "  nearest: " + ", ".join(f"{name} {_show(nearest[name])}" for name in PAPER)
            yield "    with " + ", ".join(f"{name} {nearest['assumptions'][name]}" for name in SWEEP)


def _show(value: float) -> str:
    return f"{value:,.0f}" if value > 1 else f"{value:.1%}"
