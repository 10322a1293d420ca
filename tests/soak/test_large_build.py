"""Does a build that is killed again and again lose anything, how much memory does it take, and does
search stay fast?

Generates passages (generated_corpus.py) and builds an index of them. SIGKILL ends the build at a
random moment of each stage (killed_build.py); it is run again each time, finally to its end. The
index must then hold all passages, each once and in order, without copies; texts, vectors and words
of a sample must be right, and the sample has the passages on both sides of every interruption.
SOAK_SCALE=20 builds a million passages: 15 minutes, 6 GB of disk.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from retrieval.encoder import Encoder, load_encoder
from retrieval.hits import Mode
from retrieval.index import Index
from retrieval.manifest import MANIFEST
from retrieval.retriever import Retriever
from tests.soak.generated_corpus import GeneratedCorpus
from tests.soak.killed_build import STAGES, Build, BuildRun
from tests.soak.sizes import scaled

pytestmark = pytest.mark.nightly
SEED = 0
SAMPLE = 300
MAX_ROUNDING = 1e-3
"""Between a vector and its float16 copy; components are below 1."""
MIN_FOUND_BY_TEXT = 0.95
"""Share of passages that are the first hit for their own text;
below 1, because questions are weighted differently."""
Searches = Callable[[Mode, str, int], list[str]]
"""(mode, query, k) -> ids."""


def check(
    index: Index, encoder: Encoder, corpus: GeneratedCorpus, search: Searches, cuts: Sequence[int]
) -> dict[str, bool]:
    """Check an index over all of `corpus` whose build was interrupted at the rows `cuts`."""
    count = corpus.num_passages
    rng = random.Random(SEED)
    near = {row for cut in cuts for row in range(cut - 2, cut + 2) if 0 <= row < count}
    rows = sorted(near | set(rng.sample(range(count), min(SAMPLE, count))))
    texts = corpus.sample(set(rows))
    stored = np.concatenate([index.vectors.read(row, row + 1) for row in rows])
    encoded = encoder.encode_passages([texts[row] for row in rows])
    kept = index.store.iterate(0, index.num_rows)
    in_order = all(passage.id == f"p{row}" for row, passage in kept)
    same_texts = [passage.text for passage in index.store.get(rows)] == [texts[row] for row in rows]
    by_marker = [search("bm25", corpus.marker(row), 1) == [f"p{row}"] for row in rows]
    by_text = sum(search("dense", texts[row], 1) == [f"p{row}"] for row in rows) / len(rows)
    return {
        "passages": index.num_live == index.num_rows == count,
        "each_once_in_order": in_order,
        "texts": same_texts,
        "vectors": bool(np.abs(stored - encoded).max() < MAX_ROUNDING),
        "found_by_marker": all(by_marker),
        "found_by_text": by_text >= MIN_FOUND_BY_TEXT,
    }


def test_killed_build_loses_nothing(tmp_path: Path) -> None:
    """Memory stays within 6 GiB for a million passages, and questions find their topic."""
    num_passages = scaled(50_000)
    corpus = GeneratedCorpus(num_passages, max(10, num_passages // 200), 60, SEED)
    source, folder, rng = tmp_path / "passages.jsonl", tmp_path / "index", random.Random(SEED)
    corpus.write(source)
    runs, build = list[BuildRun](), Build(source, folder, num_passages, dim=128, rng=rng)
    for stage in (*STAGES, None):
        if not (folder / MANIFEST).exists():
            runs.append(build.run(stage))
    print(*runs, sep="\n")
    assert any(run.killed_in for run in runs)
    assert runs[-1].killed_in is None
    assert 0 < max(run.peak_gib for run in runs) < 6
    retriever = Retriever.open(folder, encoder=None, device=None, verify=True, threads=1)

    def search(mode: Mode, query: str, k: int) -> list[str]:
        hits = retriever.search([query], k=k, mode=mode, nprobe=128).hits[0]
        return [hit.passage.id for hit in hits]

    name = retriever.index.settings.encoder
    encoder = load_encoder(name, folder=folder, override=None, device=None, batch_size=1)
    cuts = [cut for run in runs for cut in (run.passages, run.vectors)]
    assert all(check(retriever.index, encoder, corpus, search, cuts).values())
    for mode in retriever.modes:
        times, on_topic = [], 0
        for topic, question in corpus.questions(64):
            start = time.perf_counter()
            found = search(mode, question, 5)
            times.append(time.perf_counter() - start)
            on_topic += sum(corpus.topic_of(int(hit[1:])) == topic for hit in found)
        print(f"{mode}: {1000 * median(times):.1f} ms a question, {on_topic / 320:.3f} on topic")
        assert median(times) < 0.5
        assert on_topic / 320 > 0.5 or mode == "dense"  # a small encoder alone finds less
