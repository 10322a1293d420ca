"""Approximate FAISS indexes against exact search: recall, latency, throughput.

    python -m eval bench ann [--factories IVF4096,Flat IVF4096,PQ64 HNSW32]

Indexes are made by retrieval/dense.py as in `python -m retrieval`: created from float16 vectors,
written, mapped, searched. Vectors are generated: a cluster's centre of length 1 plus Gaussian noise
of length `--spread`, normalised; queries are further draws from the same clusters, not copies. So
the mean cosine within a cluster is 1 / (1 + spread^2). Up to a spread of 1.5 a query's neighbours
belong to its cluster, which is a few lists; from 2 on clusters overlap, and neighbours may be in
any list. Real embeddings have another distribution: recall depends on this mixture, times depend on
the index.

An arm is a factory at an `nprobe` (HNSW: efSearch). Every repetition sends its own queries through
all arms, one by one and then as one batch, in a rotating order. Recall is the share of exact
search's 5 best that an arm finds. Ratios are Flat's median time over the arm's: above 1, the arm is
faster. One thread; times are CPU times, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from eval.bench.rounds import by_cell, take_rounds, told_ratio
from eval.errors import CommandError
from eval.outcome import add_out_option, interval, open_run, table, tell
from eval.progress import tracked
from eval.run import Run, Sample
from eval.stats import quantile, summary
from retrieval.command_line import Parser
from retrieval.dense import (
    ADD_ROWS,
    Segment,
    create_faiss,
    read_faiss,
    search_segments,
    write_faiss,
)
from retrieval.errors import RetrievalError
from retrieval.vectors import VectorFile

EXACT = "Flat"
SEED = 0
NUM_CLUSTERS, DIM = 2000, 256
K, BATCH = 5, 32
Vectors = NDArray[np.float32]


class Mixture:
    """Gaussian clusters on the sphere around centres in random directions;
    noise of length `spread`."""

    def __init__(self, num_clusters: int, dim: int, spread: float) -> None:
        centers = np.random.default_rng(SEED).standard_normal((num_clusters, dim), dtype=np.float32)
        self._centers, self._spread = (
            centers / np.linalg.norm(centers, axis=1, keepdims=True),
            spread,
        )

    def draw(self, count: int, *, seed: int) -> Vectors:
        """[count, dim] of length 1, each from a cluster drawn uniformly;
        the same for the same seed."""
        rng = np.random.default_rng(seed)
        num_clusters, dim = self._centers.shape
        # a vector of `dim` such numbers is about `spread` long
        vectors = rng.standard_normal((count, dim), dtype=np.float32) * np.float32(
            self._spread / np.sqrt(dim)
        )
        vectors += self._centers[rng.integers(0, num_clusters, count)]
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors


def build(factory: str, vectors: VectorFile, path: Path) -> dict[str, Any]:
    """Create and write an index over all vectors.
    Returns seconds to the first added rows and in all, and the file's bytes."""
    start, marks = time.perf_counter(), list[float]()

    def mark(stage: str, done: int, total: int | None) -> None:
        if stage == "add":  # for the first time when the index is trained
            marks.append(time.perf_counter() - start)

    try:
        index = create_faiss(factory, vectors, 0, vectors.num_rows, seed=SEED, progress=mark)
    except RetrievalError as error:
        raise CommandError(str(error)) from None
    write_faiss(index, path)
    seconds = time.perf_counter() - start
    return {
        "train_s": round(marks[0], 1),
        "build_s": round(seconds, 1),
        "bytes": path.stat().st_size,
    }


class Searches:
    """One batch of queries a round, through every index: one by one, then together."""

    def __init__(self, indexes: dict[str, Any], queries: Vectors) -> None:
        self._indexes, self._queries = indexes, queries
        # once a round and not once an arm: exact search is the slowest
        self._exact = cache(lambda number: self._found(EXACT, 1, self._batch(number)))

    def take(self, factory: str, nprobe: int, number: int) -> Sample:
        """The sample of an arm in round `number`."""
        batch, single, found = self._batch(number), list[float](), self._exact(number)
        # thread time is a search's CPU time, since FAISS has one thread
        for query in batch:
            start = time.thread_time()
            self._found(factory, nprobe, query[None])
            single.append(time.thread_time() - start)
        start = time.thread_time()
        last = self._found(factory, nprobe, batch)
        batch_s = time.thread_time() - start
        recalls = [len(set(wanted) & set(got)) / K for wanted, got in zip(found, last, strict=True)]
        metrics = {"single_s": median(single), "batch_s": batch_s, "recall": mean(recalls)}
        return {
            "metrics": metrics,
            "single_ms": [round(1000 * s, 4) for s in single],
            "recalls": recalls,
        }

    def _batch(self, number: int) -> Vectors:
        return self._queries[number * BATCH :][:BATCH]

    def _found(self, factory: str, nprobe: int, queries: Vectors) -> list[list[int]]:
        segment = Segment(self._indexes[factory], first_row=0, removed=np.zeros(0, np.int64))
        # through the function that the retriever calls, so that its overhead counts as well
        rows: list[list[int]] = search_segments((segment,), queries, k=K, nprobe=nprobe)[1].tolist()
        return rows


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Figures of each arm; ratios with intervals over repetitions, recall over queries."""
    built, rows = [], []
    for cell, arms in by_cell(samples):
        built += [{**cell, **one["metrics"]} for one in arms.pop("build", [])]
        for name, taken in arms.items():
            single = [ms for one in taken for ms in one["single_ms"]]
            found = summary([share for one in taken for share in one["recalls"]])
            row = {
                "index / nprobe": name,
                "recall": interval([found[key] for key in ("mean", "low", "high")]),
                "one query, p50 (ms)": round(median(single), 3),
                "p99 (ms)": round(quantile(single, 0.99), 3),
                "times faster": told_ratio(arms[EXACT], taken, "single_s", 1),
                "batch (queries/s)": round(
                    BATCH / median(one["metrics"]["batch_s"] for one in taken)
                ),
                "batch, times faster": told_ratio(arms[EXACT], taken, "batch_s", 1),
            }
            rows.append(row)
    tables = [table("Approximate against exact search", rows), table("Building", built)]
    verdict = [
        f"{row['index / nprobe']}: recall {row['recall']}, {row['times faster']} times faster."
        for row in rows[1:]
    ]
    return {
        "verdict": verdict,
        "tables": [one for one in tables if one["rows"]],
        "faiss": faiss.__version__,
    }


def main(argv: Sequence[str]) -> int:
    """Build, measure, print."""
    parser = Parser(
        prog="python -m eval bench ann", description="Approximate against exact search."
    )
    add = parser.add_argument
    add("--vectors", type=int, default=500_000)
    add("--spread", type=float, default=2.0, help="length of the noise around a centre of length 1")
    add(
        "--factories",
        nargs="+",
        default=["IVF4096,Flat"],
        help="FAISS factory strings, in addition to Flat",
    )
    add("--nprobe", type=int, nargs="+", default=[1, 8, 32, 128])
    add("--rounds", type=int, default=32, help=f"of {BATCH} queries each, after one of warm-up")
    add_out_option(parser)
    options = parser.parse_args(argv)
    faiss.omp_set_num_threads(1)
    with open_run("ann", options, summarize) as run, tempfile.TemporaryDirectory() as work:
        _measure(run, options, Path(work))
    tell(run)
    return 0


def _measure(run: Run, options: argparse.Namespace, work: Path) -> None:
    mixture, vectors = (
        Mixture(NUM_CLUSTERS, DIM, options.spread),
        VectorFile(work / "vectors.f16", dim=DIM),
    )
    for first in tracked("vectors", range(0, options.vectors, ADD_ROWS)):
        vectors.append(mixture.draw(min(ADD_ROWS, options.vectors - first), seed=SEED + 1 + first))
    # files are temporary: a run that goes on builds again, and keeps the first build's figures
    indexes = {}
    factories = [*enumerate(dict.fromkeys([EXACT, *options.factories]))]
    for number, factory in tracked("indexes", factories):
        built = build(factory, vectors, work / f"{number}.faiss")
        indexes[factory] = read_faiss(work / f"{number}.faiss")
        print(f"{factory}: {built}", file=sys.stderr, flush=True)
        if f"build/{factory}" not in run:
            run.add(
                f"build/{factory}",
                {"arm": "build", "cell": {"index": factory}, "request": "0", "metrics": built},
            )
    # SEED + 2 seeds no batch of vectors (these are ADD_ROWS apart): no query is a copy
    searches = Searches(indexes, mixture.draw((options.rounds + 1) * BATCH, seed=SEED + 2))
    arms = {EXACT: partial(searches.take, EXACT, 1)}
    for factory, nprobe in product(list(indexes)[1:], options.nprobe):
        arms[f"{factory}/{nprobe}"] = partial(searches.take, factory, nprobe)
    take_rounds(run, {"vectors": options.vectors}, arms, options.rounds)
