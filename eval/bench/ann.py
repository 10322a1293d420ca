"""Approximate FAISS indexes against exact search: recall, latency, throughput.

    python -m eval.bench.ann [--factories IVF4096,Flat IVF4096,PQ64 HNSW32] [--record]

Indexes are made by retrieval/dense.py as in `python -m retrieval`: created from float16 vectors, written, mapped, searched.
Vectors are generated: a cluster's centre of length 1 plus Gaussian noise of length `--spread`, normalised; queries are further
draws from the same clusters, not copies. So the mean cosine within a cluster is 1 / (1 + spread^2). Up to a spread of 1.5 a
query's neighbours belong to its cluster, which is a few lists; from 2 on clusters overlap, and neighbours may be in any list.
Real embeddings have another distribution: recall depends on this mixture, times depend on the index.

An arm is a factory at an `nprobe` (HNSW: efSearch). Every repetition sends its own queries through all arms, one by one and
then as one batch, in a rotating order; `Flat` is the first arm. Recall is the share of exact search's k best that an arm
finds. Ratios are Flat's median time over the arm's: above 1, the arm is faster. With one thread, times are CPU times, so that
other processes do not count; with more, wall times. Prints a table, then JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from eval.errors import CommandError
from eval.intervals import bootstrap, quantile
from eval.record import make_record, write_record
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


@dataclass(frozen=True)
class Arm:
    """A factory and its `nprobe`, which an exact index ignores."""

    factory: str
    nprobe: int

    @property
    def name(self) -> str:
        """The arm's name in tables and records."""
        return EXACT if self.factory == EXACT else f"{self.factory}/{self.nprobe}"


@dataclass
class Repetition:
    """One arm's answers to one block of queries: rows [n, k], seconds of each query alone, seconds of the batch."""

    rows: NDArray[np.int64]
    single_s: list[float]
    batch_s: float


def measure(
    indexes: dict[str, Any],
    arms: Sequence[Arm],
    queries: NDArray[np.float32],
    *,
    k: int,
    batch: int,
    clock: Callable[[], float],
) -> dict[str, list[Repetition]]:
    """Send every block of `batch` queries through every arm, after an unmeasured run of the first block as warm-up."""
    segments = {
        name: (create_segment(index, first_row=0, removed=np.zeros(0, np.int64)),) for name, index in indexes.items()
    }
    done: dict[str, list[Repetition]] = {arm.name: [] for arm in arms}
    blocks = [queries[first : first + batch] for first in range(0, len(queries) - batch + 1, batch)]
    for turn, block in enumerate([blocks[0], *blocks]):
        for at in range(len(arms)):
            arm = arms[(turn + at) % len(arms)]
            repetition = _repeat(segments[arm.factory], block, k=k, nprobe=arm.nprobe, clock=clock)
            if turn:
                done[arm.name].append(repetition)
    return done


def _repeat(
    segments: Any, block: NDArray[np.float32], *, k: int, nprobe: int, clock: Callable[[], float]
) -> Repetition:
    single_s = []
    for at in range(len(block)):
        start = clock()
        search_segments(segments, block[at : at + 1], k=k, nprobe=nprobe)
        single_s.append(clock() - start)
    start = clock()
    _, rows = search_segments(segments, block, k=k, nprobe=nprobe)
    return Repetition(rows, single_s, clock() - start)


def summarize(done: dict[str, list[Repetition]]) -> dict[str, Any]:
    """Figures of each arm; ratios with 95% bootstrap intervals over repetitions, recall over queries."""
    exact = done[EXACT]
    arms: dict[str, Any] = {}
    for name, repetitions in done.items():
        single_ms = [1000 * s for r in repetitions for s in r.single_s]
        pairs = list(zip(exact, repetitions, strict=True))
        recalls = [_recall(a.rows[i], b.rows[i]) for a, b in pairs for i in range(len(a.rows))]
        arms[name] = {
            "recall": bootstrap(recalls, lambda sample: sum(sample) / len(sample)),
            "single_p50_ms": quantile(single_ms, 0.5),
            "single_p99_ms": quantile(single_ms, 0.99),
            "batch_queries_per_s": median(len(r.rows) / r.batch_s for r in repetitions),
            "single_ratio": _ratio([(median(a.single_s), median(b.single_s)) for a, b in pairs]),
            "batch_ratio": _ratio([(a.batch_s, b.batch_s) for a, b in pairs]),
        }
    return arms


def samples(done: dict[str, list[Repetition]]) -> Iterator[dict[str, Any]]:
    """Every measured time."""
    for name, repetitions in done.items():
        for number, repetition in enumerate(repetitions):
            yield {
                "arm": name,
                "repetition": number,
                "single_ms": [round(1000 * s, 4) for s in repetition.single_s],
                "batch_ms": round(1000 * repetition.batch_s, 4),
            }


def _recall(wanted: NDArray[np.int64], found: NDArray[np.int64]) -> float:
    return len(set(wanted.tolist()) & set(found.tolist())) / len(wanted)


def _ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    return bootstrap(pairs, lambda sample: median(a for a, _ in sample) / median(b for _, b in sample))


def table(arms: dict[str, Any], built: dict[str, Any]) -> str:
    """A Markdown table, one row per arm."""
    head = "| index / nprobe | recall | one query, p50 / p99 ms | faster | batch, queries/s | faster | file, MiB |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name, arm in arms.items():
        size = built[name.rsplit("/", 1)[0]]["bytes"] >> 20
        lines.append(
            f"| {name} | {_interval(arm['recall'], 3)} | {arm['single_p50_ms']:.2f} / {arm['single_p99_ms']:.2f} "
            f"| {_interval(arm['single_ratio'], 1)} | {arm['batch_queries_per_s']:.0f} "
            f"| {_interval(arm['batch_ratio'], 1)} | {size} |"
        )
    return "\n".join(lines)


def _interval(triple: tuple[float, float, float], digits: int) -> str:
    value, low, high = (f"{x:.{digits}f}" for x in triple)
    return f"{value} [{low}, {high}]"


def main(argv: Sequence[str]) -> int:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m eval.bench.ann", description="Approximate against exact search.")
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
    add("--record", action="store_true", help="write eval/results/")
    options = parser.parse_args(argv)
    if options.queries < options.batch:
        parser.error("--queries must be at least --batch")
    faiss.omp_set_num_threads(options.threads)
    mixture = create_mixture(options.clusters, options.dim, options.spread)
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        vectors = write_vectors(mixture, options.vectors, Path(work, "vectors.f16"))
        built, indexes = {}, {}
        for number, factory in enumerate(dict.fromkeys([EXACT, *options.factories])):
            path = Path(work, f"{number}.faiss")
            try:
                built[factory] = build(factory, vectors, path)
            except RetrievalError as error:
                raise CommandError(str(error)) from None
            indexes[factory] = read_faiss(path)
            print(f"{factory}: {built[factory]}", file=sys.stderr, flush=True)
        arms = [Arm(EXACT, 1), *(Arm(f, n) for f in indexes if f != EXACT for n in options.nprobe)]
        clock = time.thread_time if options.threads == 1 else time.perf_counter
        queries = mixture.draw(options.queries, seed=SEED + 2)
        done = measure(indexes, arms, queries, k=options.k, batch=options.batch, clock=clock)
    results: dict[str, Any] = {
        "arms": summarize(done),
        "indexes": built,
        "repetitions": len(done[EXACT]),
        "faiss": faiss.__version__,
    }
    print(table(results["arms"], built))
    if options.record:
        folder = write_record(make_record("ann", spec=vars(options), results=results))
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples(done)))
        print("record:", folder)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
