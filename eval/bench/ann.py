"""Approximate FAISS indexes against exact search: recall, latency, throughput.

    python -m eval bench ann [--factories IVF4096,Flat IVF4096,PQ64 HNSW32]

Indexes are made by retrieval/dense.py as in `python -m retrieval`: created from float16 vectors, written, mapped, searched.
Vectors are generated: a cluster's centre of length 1 plus Gaussian noise of length `--spread`, normalised; queries are further
draws from the same clusters, not copies. So the mean cosine within a cluster is 1 / (1 + spread^2). Up to a spread of 1.5 a
query's neighbours belong to its cluster, which is a few lists; from 2 on clusters overlap, and neighbours may be in any list.
Real embeddings have another distribution: recall depends on this mixture, times depend on the index.

An arm is a factory at an `nprobe` (HNSW: efSearch). Every repetition sends its own queries through all arms, one by one and
then as one batch, in a rotating order. Recall is the share of exact search's k best that an arm finds. Ratios are Flat's median
time over the arm's: above 1, the arm is faster. With one thread, times are CPU times, so that other processes do not count; with
more, wall times.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from eval.errors import CommandError
from eval.outcome import Row, add_out_option, interval, open_run, table, tell
from eval.run import Run, Sample
from eval.stats import contrast, quantile, summary
from retrieval.dense import ADD_ROWS, create_faiss, create_segment, read_faiss, search_segments, write_faiss
from retrieval.errors import RetrievalError
from retrieval.vectors import VectorFile

EXACT = "Flat"
SEED = 0


@dataclass(frozen=True)
class Mixture:
    """Gaussian clusters on the sphere; `draw` gives the same vectors for the same seed."""

    centers: NDArray[np.float32]
    spread: float

    def draw(self, count: int, *, seed: int) -> NDArray[np.float32]:
        """[count, dim] of length 1, each from a cluster drawn uniformly."""
        rng = np.random.default_rng(seed)
        dim = self.centers.shape[1]
        vectors = rng.standard_normal((count, dim), dtype=np.float32) * np.float32(self.spread / np.sqrt(dim))
        vectors += self.centers[rng.integers(0, len(self.centers), count)]
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors


def create_mixture(num_clusters: int, dim: int, spread: float) -> Mixture:
    """Centres of length 1 in random directions."""
    centers = np.random.default_rng(SEED).standard_normal((num_clusters, dim), dtype=np.float32)
    return Mixture(centers / np.linalg.norm(centers, axis=1, keepdims=True), spread)


def write_vectors(mixture: Mixture, count: int, path: Path) -> VectorFile:
    """Write `count` draws in the retriever's vector file."""
    vectors = VectorFile(path, dim=mixture.centers.shape[1])
    for first in range(0, count, ADD_ROWS):
        vectors.append(mixture.draw(min(ADD_ROWS, count - first), seed=SEED + 1 + first))
    return vectors


def build(factory: str, vectors: VectorFile, path: Path) -> dict[str, Any]:
    """Create and write an index over all vectors. Returns seconds to the first added rows and in all, and the file's bytes."""
    start, marks = time.perf_counter(), list[float]()

    def batches() -> Iterator[NDArray[np.float32]]:
        marks.append(time.perf_counter() - start)  # called when the index is trained
        for first in range(0, vectors.num_rows, ADD_ROWS):
            yield vectors.read(first, min(first + ADD_ROWS, vectors.num_rows))

    def sample(size: int) -> NDArray[np.float32]:
        rng = np.random.default_rng(SEED)
        return vectors.read_rows(np.sort(rng.choice(vectors.num_rows, size, replace=False)))

    index = create_faiss(factory, vectors.dim, vectors.num_rows, sample, batches(), lambda rows: None)
    write_faiss(index, path)
    seconds = time.perf_counter() - start
    return {"train_s": round(marks[0], 1), "build_s": round(seconds, 1), "bytes": path.stat().st_size}


def measure(
    indexes: dict[str, Any],
    arms: Sequence[tuple[str, int]],
    queries: NDArray[np.float32],
    *,
    k: int,
    clock: Callable[[], float],
    first: int,
) -> dict[str, Sample]:
    """One repetition: `queries` through every arm (factory, nprobe), beginning with number `first`, one by one and as a batch."""
    found: dict[str, Sample] = {}
    rows: dict[str, list[list[int]]] = {}
    for at in range(len(arms)):
        factory, nprobe = arms[(first + at) % len(arms)]
        segments = (create_segment(indexes[factory], first_row=0, removed=np.zeros(0, np.int64)),)
        took = []
        for part in (*(queries[i : i + 1] for i in range(len(queries))), queries):
            start = clock()
            _, last = search_segments(segments, part, k=k, nprobe=nprobe)
            took.append(clock() - start)
        name = factory if factory == EXACT else f"{factory}/{nprobe}"
        rows[name] = last.tolist()
        found[name] = {"metrics": {"single_s": median(took[:-1]), "batch_s": took[-1]}, "single_ms": _ms(took[:-1])}
    for name, one in found.items():
        recalls = [len(set(wanted) & set(got)) / k for wanted, got in zip(rows[EXACT], rows[name], strict=True)]
        one |= {"recalls": recalls, "num_queries": len(queries)}
        one["metrics"]["recall"] = mean(recalls)
    return found


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Figures of each arm; ratios with intervals over repetitions, recall over queries."""
    arms: dict[str, list[Sample]] = {}
    for one in sorted(samples, key=lambda one: int(one["request"])):
        arms.setdefault(one["arm"], []).append(one)
    built = arms.pop("build", [])
    rows = []
    for name, taken in arms.items():
        single = [ms for one in taken for ms in one["single_ms"]]
        row: Row = {
            "index / nprobe": name,
            "recall": interval(_recall(taken)),
        }
        row |= {"one query, p50 (ms)": round(median(single), 3), "p99 (ms)": round(quantile(single, 0.99), 3)}
        row["times faster"] = _faster(arms[EXACT], taken, "single_s")
        row["batch (queries/s)"] = round(median(one["num_queries"] / one["metrics"]["batch_s"] for one in taken))
        rows.append({**row, "batch, times faster": _faster(arms[EXACT], taken, "batch_s")})
    tables = [table("Approximate against exact search", rows)] if rows else []
    tables += [table("Building", [{**one["cell"], **one["metrics"]} for one in built])] if built else []
    verdict = [
        f"{row['index / nprobe']}: recall {row['recall']}, {row['times faster']} times faster." for row in rows[1:]
    ]
    return {"verdict": verdict, "tables": tables, "faiss": faiss.__version__}


def main(argv: Sequence[str]) -> int:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m eval bench ann", description="Approximate against exact search.")
    add = parser.add_argument
    add("--vectors", type=int, default=500_000)
    add("--clusters", type=int, default=2000)
    add("--dim", type=int, default=256)
    add("--spread", type=float, default=2.0, help="length of the noise around a centre of length 1")
    add("--factories", nargs="+", default=["IVF4096,Flat"], help="FAISS factory strings, in addition to Flat")
    add("--nprobe", type=int, nargs="+", default=[1, 8, 32, 128])
    add("--queries", type=int, default=1024)
    add("--batch", type=int, default=32)
    add("--k", type=int, default=5)
    add("--threads", type=int, default=1)
    add("--work", type=Path, help="folder for vectors and indexes; default: a temporary one")
    add_out_option(parser)
    options = parser.parse_args(argv)
    if options.queries < options.batch:
        parser.error("--queries must be at least --batch")
    faiss.omp_set_num_threads(options.threads)
    with (
        open_run("ann", options, summarize, without=("work",)) as run,
        tempfile.TemporaryDirectory(dir=options.work) as work,
    ):
        _measure_all(run, options, Path(work))
    tell(run)
    return 0


def _measure_all(run: Run, options: argparse.Namespace, work: Path) -> None:
    mixture = create_mixture(options.clusters, options.dim, options.spread)
    vectors = write_vectors(mixture, options.vectors, work / "vectors.f16")
    indexes = {}
    for number, factory in enumerate(dict.fromkeys([EXACT, *options.factories])):
        try:
            built = build(factory, vectors, work / f"{number}.faiss")
        except RetrievalError as error:
            raise CommandError(str(error)) from None
        indexes[factory] = read_faiss(work / f"{number}.faiss")
        print(f"{factory}: {built}", file=sys.stderr, flush=True)
        if f"build/{factory}" not in run:
            run.add(f"build/{factory}", {"arm": "build", "cell": {"index": factory}, "request": "0", "metrics": built})
    arms = [(EXACT, 1), *((factory, n) for factory in indexes if factory != EXACT for n in options.nprobe)]
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    queries = mixture.draw(options.queries, seed=SEED + 2)
    blocks = [queries[first : first + options.batch] for first in range(0, len(queries), options.batch)]
    measure(indexes, arms, blocks[0], k=options.k, clock=clock, first=0)  # warm-up
    for number, block in enumerate(blocks):
        if f"{EXACT}/{number}" not in run and len(block) == options.batch:
            found = measure(indexes, arms, block, k=options.k, clock=clock, first=number)
            about = {"cell": {}, "request": str(number)}
            run.add_all((f"{name}/{number}", {"arm": name, **about, **one}) for name, one in found.items())


def _faster(exact: Sequence[Sample], taken: Sequence[Sample], metric: str) -> str:
    pairs = [(a["metrics"][metric], b["metrics"][metric]) for a, b in zip(exact, taken, strict=True)]
    return interval(contrast(pairs), 1)


def _recall(taken: Sequence[Sample]) -> list[float | None]:
    found = summary([share for one in taken for share in one["recalls"]])
    return [found[key] for key in ("mean", "low", "high")]


def _ms(seconds: Sequence[float]) -> list[float]:
    return [round(1000 * s, 4) for s in seconds]
