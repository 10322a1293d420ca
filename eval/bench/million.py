"""A million passages: does a repeatedly killed build lose anything, how much memory does it take, how fast is search?

    python -m eval.bench.million [--passages 1000000] [--kill read encode add bm25] [--limit-gib 6] [--work DIR] [--record]

Generates passages (eval/generated_corpus.py) and runs `python -m retrieval build --no-split` on them in a process. SIGKILL ends
the process at a random moment of each stage of `--kill` (eval/killed_build.py); it is run again each time, finally to its end.
The index is then checked: it holds all passages, each once and in order, without copies; texts, vectors and words of a sample are
right, and the sample includes the passages on both sides of every interruption. `checks` lists the results. The command fails if
a check fails, or if a build's peak memory, pages of mapped files included, exceeds the limit. Stage times are read from progress
bars; `fit` (or loading the fitted encoder) and `train` have no bar and are the intervals between two bars.

Search is `Retriever.search` in this process, one thread: every repetition sends its own 32 questions through all arms, one by
one and as one batch, in a rotating order. CPU times are reported with wall times, since other processes affect them less. JSON
comes last.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from eval.generated_corpus import GeneratedCorpus
from eval.intervals import quantile
from eval.killed_build import STAGES, BuildRun, build
from eval.record import make_record, write_record
from retrieval.encoder import Encoder, load_encoder
from retrieval.hashed_encoder import STATE_FILE
from retrieval.index import Index
from retrieval.manifest import MANIFEST, PASSAGES, VECTORS
from retrieval.retriever import Mode, Retriever

SEED = 0
SAMPLE = 300
MAX_ROUNDING = 1e-3
"""Between a vector and its float16 copy; components are below 1."""
MIN_FOUND_BY_TEXT = 0.95
"""Share of passages that are the first hit for their own text; below 1, because questions are weighted differently."""
Searches = Callable[[Mode, str, int], list[str]]
"""(mode, query, k) -> ids."""


def check(
    index: Index, encoder: Encoder, corpus: GeneratedCorpus, search: Searches, cuts: Sequence[int]
) -> dict[str, Any]:
    """Check an index over all of `corpus` whose build was interrupted at the rows `cuts`."""
    count = corpus.num_passages
    rng = random.Random(SEED)
    near = {row for cut in cuts for row in range(cut - 2, cut + 2) if 0 <= row < count}
    rows = sorted(near | set(rng.sample(range(count), min(SAMPLE, count))))
    texts = corpus.sample(set(rows))
    stored = np.concatenate([index.vectors(row, row + 1) for row in rows])
    encoded = encoder.encode_passages([texts[row] for row in rows])
    in_order = all(passage.id == f"p{row}" for row, passage in index.store.iterate(0, index.num_rows))
    by_marker = [search("bm25", corpus.marker(row), 1) == [f"p{row}"] for row in rows]
    by_text = sum(search("dense", texts[row], 1) == [f"p{row}"] for row in rows) / len(rows)
    return {
        "passages": index.num_live == index.num_rows == count,
        "each_once_in_order": in_order,
        "texts": [passage.text for passage in index.store.get(rows)] == [texts[row] for row in rows],
        "vectors": bool(np.abs(stored - encoded).max() < MAX_ROUNDING),
        "found_by_marker": all(by_marker),
        "found_by_text": by_text >= MIN_FOUND_BY_TEXT,
        "share_by_text": round(by_text, 4),
        "sampled": len(rows),
    }


def measure(
    retriever: Retriever, corpus: GeneratedCorpus, *, num_questions: int, batch: int, nprobe: int
) -> list[dict[str, Any]]:
    """Search in every mode at k = 5 and 20, single and in batches: milliseconds, and hits on the question's topic."""
    questions = corpus.questions(num_questions)
    blocks = [questions[first : first + batch] for first in range(0, len(questions) - batch + 1, batch)]
    arms = [(mode, k, size) for mode in retriever.modes for k in (5, 20) for size in (1, batch)]
    samples = []
    for turn, block in enumerate([blocks[0], *blocks]):
        for at in range(len(arms)):
            mode, k, size = arms[(turn + at) % len(arms)]
            for first in range(0, batch, size):
                part = block[first : first + size]
                cpu_start, start = time.process_time(), time.perf_counter()
                result = retriever.search([question for _, question in part], k=k, mode=mode, nprobe=nprobe)
                took, cpu_took = time.perf_counter() - start, time.process_time() - cpu_start
                hits = [(topic, hit) for (topic, _), found in zip(part, result.hits, strict=True) for hit in found]
                on_topic = sum(corpus.topic_of(int(hit.passage.id[1:])) == topic for topic, hit in hits)
                if turn:  # the first is warm-up
                    times = {"ms": round(1000 * took, 3), "cpu_ms": round(1000 * cpu_took, 3)}
                    samples.append({"arm": f"{mode}/{k}/{size}", **times, "hits": len(hits), "on_topic": on_topic})
        print(f"search {turn}/{len(blocks)}", file=sys.stderr, flush=True)
    return samples


def summarize(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of each arm: a mode with a k and a number of queries per batch."""
    arms: dict[str, Any] = {}
    for name in dict.fromkeys(sample["arm"] for sample in samples):
        rows = [sample for sample in samples if sample["arm"] == name]
        ms, size = [row["ms"] for row in rows], int(name.split("/")[2])
        arms[name] = {
            "samples": len(rows),
            "p50_ms": round(quantile(ms, 0.5), 2),
            "p99_ms": round(quantile(ms, 0.99), 2),
            "cpu_p50_ms": round(quantile([row["cpu_ms"] for row in rows], 0.5), 2),
            "queries_per_s": round(1000 * size / median(ms), 1),
            "on_topic": round(sum(row["on_topic"] for row in rows) / max(1, sum(row["hits"] for row in rows)), 3),
        }
    return dict(sorted(arms.items(), key=_mode_k_size))


def _mode_k_size(arm: tuple[str, Any]) -> tuple[str, int, int]:
    mode, k, size = arm[0].split("/")
    return mode, int(k), int(size)


def open_seconds(folder: Path, *, verify: bool) -> float:
    """Seconds of `Retriever.open`, with files in the page cache."""
    start = time.perf_counter()
    Retriever.open(folder, encoder=None, device=None, verify=verify, threads=1)
    return round(time.perf_counter() - start, 2)


def main(argv: Sequence[str]) -> int:
    """Generate, build, kill, check, search, print."""
    options = _options(argv)
    corpus = GeneratedCorpus(options.passages, options.topics, options.words, SEED)
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        source, folder = Path(work, "passages.jsonl"), Path(work, "index")
        print(f"{corpus.write(source)} documents written", file=sys.stderr, flush=True)
        runs = list(_builds(source, folder, options))
        retriever = Retriever.open(folder, encoder=None, device=None, verify=True, threads=1)
        index = retriever.index

        def search(mode: Mode, query: str, k: int) -> list[str]:
            return [hit.passage.id for hit in retriever.search([query], k=k, mode=mode, nprobe=options.nprobe).hits[0]]

        encoder = load_encoder(index.settings.encoder, folder=folder, override=None, device=None, batch_size=1)
        cuts = [cut for run in runs for cut in (run.passages, run.vectors)]
        results: dict[str, Any] = {
            "builds": [asdict(run) for run in runs],
            "checks": check(index, encoder, corpus, search, cuts),
            "factory": [segment.factory for segment in index.manifest.segments],
            "bytes": _sizes(folder),
            "open_s": open_seconds(folder, verify=False),
            "open_verified_s": open_seconds(folder, verify=True),
        }
        samples = measure(
            retriever, corpus, num_questions=options.questions, batch=options.batch, nprobe=options.nprobe
        )
    results["search"] = summarize(samples)
    peak = max(run.peak_gib for run in runs)
    results["peak_gib"] = peak
    print(tables(results))
    if options.record:
        record = write_record(make_record("million", spec=vars(options), results=results))
        (record / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
        print("record:", record)
    failed = [name for name, held in results["checks"].items() if held is False]
    if peak > options.limit_gib:
        failed.append(f"peak memory {peak} GiB")
    if failed:
        print("FAILED:", ", ".join(failed))
    print(json.dumps(results))
    return 1 if failed else 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.bench.million", description="Build, kill, check, search.")
    add = parser.add_argument
    add("--passages", type=int, default=1_000_000)
    add("--topics", type=int, default=5000)
    add("--words", type=int, default=100, help="of a passage")
    add("--dim", type=int, default=384)
    add("--kill", nargs="*", choices=STAGES, default=STAGES, help="stages in which the build is killed once")
    add("--limit-gib", type=float, default=6.0)
    add("--questions", type=int, default=1024)
    add("--batch", type=int, default=32)
    add("--nprobe", type=int, default=128)
    add("--work", type=Path, help="folder for corpus and index, 6 GB; default: a temporary one")
    add("--record", action="store_true", help="write eval/results/")
    options = parser.parse_args(argv)
    if options.questions < options.batch:
        parser.error("--questions must be at least --batch")
    return options


def _builds(source: Path, folder: Path, options: argparse.Namespace) -> Iterator[BuildRun]:
    """Run builds: one for each stage in which a build is killed, then one to its end."""
    rng = random.Random(SEED)
    plan: list[str | None] = [stage for stage in STAGES if stage in options.kill]
    for stage in [*plan, None]:
        if (folder / MANIFEST).exists():
            return
        run = build(source, folder, num_passages=options.passages, dim=options.dim, kill_in=stage, rng=rng)
        print(f"build to be killed in {stage}: {asdict(run)}", file=sys.stderr, flush=True)
        yield run


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of an index's parts."""
    parts = {"texts": PASSAGES + "*", "vectors": VECTORS, "encoder": STATE_FILE, "faiss": "dense-*", "bm25": "bm25-*/*"}
    return {part: sum(path.stat().st_size for path in folder.glob(pattern)) for part, pattern in parts.items()}


def tables(results: Mapping[str, Any]) -> str:
    """Markdown."""
    runs = [
        [
            f"killed in {run['killed_in']}" if run["killed_in"] else "to its end",
            *(run[key] for key in ("seconds", "cpu_seconds", "passages", "vectors", "peak_gib", "peak_anonymous_gib")),
            ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in run["stages"].items()),
        ]
        for run in results["builds"]
    ]
    keys = ("p50_ms", "p99_ms", "cpu_p50_ms", "queries_per_s", "on_topic")
    searches = [[*name.split("/"), *(row[key] for key in keys)] for name, row in results["search"].items()]
    return "\n".join(
        [
            *_table("build, s, CPU s, passages, vectors, peak GiB, without mapped files, stages in s", runs),
            "",
            *_table("mode, k, queries, p50 ms, p99 ms, CPU p50 ms, queries/s, on topic", searches),
            "",
            f"checks: {results['checks']}",
            f"open: {results['open_s']} s, verified {results['open_verified_s']} s; bytes: {results['bytes']}",
        ]
    )


def _table(head: str, rows: Sequence[Sequence[object]]) -> list[str]:
    names = head.split(", ")
    return [f"| {' | '.join(map(str, row))} |" for row in (names, ["---"] * len(names), *rows)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
