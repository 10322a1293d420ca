"""Recall of BM25, vectors and rank fusion, and overlap of their result lists, on real questions. No server.

    python -m eval.bench.recall --data DIR [--sets squad nq ...] [--encoder PATH] [--record]

DIR holds a folder for each set, in the format of `python -m retrieval evaluate`. Conversations are searched by their last
question, their last two, and the rewritten question. With `--encoder` a sentence-transformers model replaces the embedded
encoder. Prints a Markdown table for each figure; the last line is JSON. CRAFT 3.1 defines prefix and total, FusionRAG's figure 7a
neighbours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.errors import CommandError
from eval.record import make_record, write_record
from retrieval import RetrievalError
from retrieval.build import BuildOptions
from retrieval.defaults import BM25_MEMORY_MIB, DIM, ENCODE_BATCH, FIT_PASSAGES, N_VALUES, NPROBE, SEED
from retrieval.encoder import Encoder
from retrieval.evaluate import MODES, evaluate
from retrieval.index import IndexSettings
from retrieval.questions import Query, read_questions

SETS = ("squad", "hotpotqa", "2wikimqa", "musique", "nq", "triviaqa", "mtrag")
CONVERSATION_QUERIES: tuple[Query, ...] = (1, 2, "rewrite")
OPTIONS = BuildOptions(
    fit_passages=FIT_PASSAGES, encode_batch=ENCODE_BATCH, bm25_memory_bytes=BM25_MEMORY_MIB << 20, seed=SEED
)
MODEL_BATCH = 32


class RememberingEncoder:
    """Encodes each text once, since the three retrievers search the same passages."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._passages: dict[str, NDArray[np.float32]] = {}

    @property
    def dim(self) -> int:
        return self._encoder.dim

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        fresh = [text for text in dict.fromkeys(texts) if text not in self._passages]
        if fresh:
            self._passages.update(zip(fresh, self._encoder.encode_passages(fresh), strict=True))
        return np.stack([self._passages[text] for text in texts])

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._encoder.encode_queries(texts)

    def spec(self) -> dict[str, Any]:
        return self._encoder.spec()


def main(argv: Sequence[str]) -> int:
    """Ask all, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--sets", nargs="+", default=list(SETS), metavar="NAME")
    parser.add_argument(
        "--encoder", metavar="PATH", help="a sentence-transformers model instead of the embedded encoder"
    )
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--limit", type=int, metavar="N", help="N questions of each set only")
    parser.add_argument("--record", action="store_true", help="write eval/results/")
    args = parser.parse_args(argv)
    try:
        rows = list(ask(args.data, args.sets, _encoder(args.encoder), k=args.k, limit=args.limit))
    except RetrievalError as error:
        raise CommandError(str(error)) from None
    print(tables(rows))
    record = make_record("recall", spec=vars(args), results={"rows": rows, "means": means(rows)})
    if args.record:
        print("record:", write_record(record))
    print(json.dumps(record["results"]))
    return 0


def ask(
    data: Path, sets: Sequence[str], encoder: Encoder | None, *, k: int, limit: int | None
) -> Iterator[dict[str, Any]]:
    """`retrieval.evaluate`'s figures for every set, query and retriever."""
    settings = IndexSettings(
        tokens="words",
        tokens_name="words",
        is_split=False,
        max_tokens=256,
        overlap_tokens=0,
        encoder=encoder.spec() if encoder else {"kind": "hashed", "dim": DIM},
        factory="Flat",
        bm25_language="english",
    )
    for name in sets:
        has_turns = not (data / name / "questions.jsonl.gz").exists()
        for query in CONVERSATION_QUERIES if has_turns else (1,):
            asked = read_questions(data / name, file=None, query=query, seed=SEED, limit=limit)
            for retriever in MODES:
                row = evaluate(
                    asked,
                    k=k,
                    retriever=retriever,
                    nprobe=NPROBE,
                    n_values=N_VALUES if retriever != "bm25" and query == 1 else (),
                    settings=settings,
                    encoder=encoder,
                    options=OPTIONS,
                    progress=lambda *_: None,
                )
                print(f"{name} {query} {retriever}: recall {row['recall']}", file=sys.stderr)
                if row["encoder"] and "model" in row["encoder"]:
                    row["encoder"] = {**row["encoder"], "model": Path(row["encoder"]["model"]).name}
                yield {**row, "data": name}


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means over the sets, by retriever, of last questions only, since only conversations have the others."""
    found: dict[str, dict[str, Any]] = {}
    for retriever in MODES:
        chosen = [row for row in rows if row["retriever"] == retriever and row["query"] == 1]
        if chosen:
            found[retriever] = {
                name: round(fmean(row[name] for row in chosen), 4) for name in ("prefix", "total", "hit")
            }
            shares = [row["co_retrieval"] for row in chosen if "co_retrieval" in row]
            if shares:
                found[retriever]["co_retrieval"] = {
                    reading: {str(n): round(fmean(_at(share[reading], n) for share in shares), 4) for n in N_VALUES}
                    for reading in shares[0]
                }
    return found


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    asked = list(dict.fromkeys((row["data"], row["query"]) for row in rows))
    by_key = {(row["data"], row["query"], row["retriever"]): row for row in rows}
    lines = []
    for figure in ("recall", "prefix", "total", "repeated"):
        lines += ["", f"| {figure} | {' | '.join(MODES)} |", "|---|" + "---|" * len(MODES)]
        for name, query in asked:
            values = [by_key[name, query, retriever][figure] for retriever in MODES]
            if None not in values:
                label = name if query == 1 else f"{name}, {query if query == 'rewrite' else f'last {query}'}"
                lines.append(f"| {label} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    shown = [2, 3, 5, 10, 15]
    lines += ["", "| neighbours, default | reading | " + " | ".join(map(str, shown)) + " |", "|---|---|" + "---|" * 5]
    for row in rows:
        if row["retriever"] == "default" and "co_retrieval" in row:
            for reading, share in row["co_retrieval"].items():
                cells = " | ".join(f"{_at(share, n):.2f}" for n in shown)
                lines.append(f"| {row['data']} | {reading} | {cells} |")
    return "\n".join(lines[1:])


# Private, in order of use


def _encoder(path: str | None) -> Encoder | None:
    if path is None:
        return None
    from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

    define_torchvision_ops()
    from retrieval.sentence_encoder import SentenceEncoder

    return RememberingEncoder(
        SentenceEncoder(
            path, device=None, batch_size=MODEL_BATCH, query_prefix=None, passage_prefix=None, normalize=True
        )
    )


def _at(share: Mapping[Any, float], n: int) -> float:
    return share[n] if n in share else share[str(n)]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CommandError as error:
        sys.exit(f"eval.bench.recall: {error}")
