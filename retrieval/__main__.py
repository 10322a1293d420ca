"""`python -m retrieval COMMAND`: build, search and inspect an index. Every default is in defaults.py.

Progress goes to stderr, results to stdout. A mistake gives exit code 2 and one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from retrieval.build_flags import add_device_flags, add_index_flags, add_passage_flags, options, settings
from retrieval.defaults import BM25_MEMORY_MIB, DEVICE_BATCH, FIT_PASSAGES, N_VALUES, NPROBE, SEED, TOP_N, K
from retrieval.errors import RetrievalError
from retrieval.passage import Passage
from retrieval.progress import progress_bars

EPILOG = """from a folder of documents to an answered question in three commands:
  python -m retrieval build docs --out index
  python -m sglang_chunkcache.launch_server --model-path M --index index
  curl http://127.0.0.1:30000/rag/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "default", "messages": [{"role": "user", "content": "..."}], "retrieve": {"k": 5}}'
"""


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RetrievalError, OSError) as error:
        print(f"retrieval {args.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"retrieval {args.command}: {error.name} is not installed; install the extra 'retrieval'", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print(f"retrieval {args.command}: stopped; run it again to continue", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m retrieval",
        description="A retriever for RAG: cut documents into passages, index them with FAISS and BM25, search.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_build(
        _command(
            commands, "build", "make an index of documents, continue a build, or add documents to an index", _build
        )
    )
    _add_search(_command(commands, "search", "find the best passages for a question", _search))
    _add_neighbors(_command(commands, "neighbors", "write every passage's nearest passages to a file", _neighbors))
    _add_inspect(_command(commands, "inspect", "show the contents of an index and check its files", _inspect))
    _add_remove(
        _command(
            commands,
            "remove",
            "hide passages or documents of an index; a build that still finds them adds them again",
            _remove,
        )
    )
    _add_evaluate(_command(commands, "evaluate", "measure recall and overlap of retrieval on a data set", _evaluate))
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None and False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def _command(commands: Any, name: str, summary: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


# build


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make an index of documents. Run it again to continue after an interruption, or to add more or changed documents; "
        "a server that has the index open switches to the new generation by itself."
    )
    add = parser.add_argument
    add("sources", nargs="*", metavar="SOURCE", help=".txt, .md, .jsonl or .jsonl.gz files, or folders of them")
    add("--out", type=Path, required=True, metavar="DIR", help="the index's directory")
    dataset = parser.add_argument_group("a data set instead of files, or in addition to them")
    dataset.add_argument("--dataset", metavar="NAME", help="for Hugging Face `datasets`: a hub name or a local path")
    dataset.add_argument("--dataset-config", metavar="NAME", help="configuration of the data set")
    dataset.add_argument("--split", default="train", help="split of the data set")
    dataset.add_argument("--id-field", metavar="FIELD", help="field with the document's id; default: the row's number")
    dataset.add_argument("--title-field", metavar="FIELD", help="field with the title")
    dataset.add_argument(
        "--text-field", metavar="FIELD", default="text", help="field with the text; .jsonl files use id, title and text"
    )
    kept = parser.add_argument_group(
        "settings that the index keeps (given at the first build; later builds may leave them out)"
    )
    add_passage_flags(kept.add_argument)
    add_index_flags(kept.add_argument, factory="auto", kept=True)
    run = parser.add_argument_group("options of this run")
    add_device_flags(run.add_argument)
    run.add_argument(
        "--fit-passages",
        type=int,
        metavar="N",
        default=FIT_PASSAGES,
        help="passages in the sample on which the default encoder is fitted",
    )
    run.add_argument(
        "--bm25-memory-mib",
        type=int,
        metavar="N",
        default=BM25_MEMORY_MIB,
        help="buffer for writing the BM25 index",
    )
    run.add_argument("--json", action="store_true", help="print the report as one JSON object")


def _build(args: argparse.Namespace) -> None:
    from retrieval.build import build_index
    from retrieval.corpus import count_documents, read_documents
    from retrieval.index import SETTINGS, read_settings
    from retrieval.tokens import load_tokens

    if not args.sources and not args.dataset:
        raise RetrievalError("no documents given: name files or folders, or use --dataset")
    there = read_settings(args.out) if (args.out / SETTINGS).exists() else None
    chosen, encoder = settings(args, there)
    parts = [read_documents(source) for source in args.sources]
    if args.dataset:
        from retrieval.corpus import read_dataset

        fields = {"id_field": args.id_field, "title_field": args.title_field, "text_field": args.text_field}
        parts.append(read_dataset(args.dataset, split=args.split, config=args.dataset_config, **fields))
    counts = [None if args.dataset else 0, *map(count_documents, args.sources)]
    total = None if None in counts else sum(filter(None, counts))
    with progress_bars() as progress:
        report = build_index(
            chain.from_iterable(parts),
            args.out,
            chosen,
            tokens=load_tokens(chosen.tokens),
            encoder=encoder,
            options=options(args),
            progress=lambda stage, done, of: progress(stage, done, total if stage == "read" else of),
        )
    if args.json:
        print(json.dumps(asdict(report)))
        return
    print(f"documents: {report.documents} read, {report.unchanged} unchanged, {report.changed} changed")
    print(f"passages: {report.added} added, {report.removed} removed, {report.duplicates} left out as duplicates")
    print(f"{args.out}: {report.passages} passages, generation {report.generation}")


# search


def _add_search(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("index", type=Path, metavar="DIR", help="the index's directory")
    add("query", nargs="+", help="the question")
    add("--k", type=int, metavar="N", default=K, help="number of passages")
    add(
        "--mode",
        choices=("fusion", "dense", "bm25"),
        help="default: bm25, or fusion if the index was built with --encoder",
    )
    add("--nprobe", type=int, metavar="N", default=NPROBE, help="lists visited in an IVF index; candidates in HNSW")
    add("--encoder", metavar="PATH", help="path of the index's encoder, if it has moved")
    add("--device", metavar="NAME", help="device of the encoder")
    add("--json", action="store_true", help="print one JSON object")


def _search(args: argparse.Namespace) -> None:
    from retrieval.retriever import Retriever

    retriever = Retriever.open(args.index, encoder=args.encoder, device=args.device, verify=False, threads=None)
    query = _text(" ".join(args.query))
    result = retriever.search([query], k=args.k, mode=args.mode or retriever.modes[0], nprobe=args.nprobe)
    hits = result.hits[0]
    if args.json:
        rows = [{**_row(hit.passage), "score": hit.score} for hit in hits]
        print(json.dumps({"query": query, "passages": rows, "ms": result.ms}, ensure_ascii=False))
        return
    for rank, hit in enumerate(hits, 1):
        print(f"{rank}. {hit.passage.id}  {hit.score:.4f}  {hit.passage.title}")
        print("   " + " ".join(hit.passage.text.split())[:300])
    if not hits:
        print("nothing found")


# neighbors


def _add_neighbors(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write every passage's most similar passages, nearest first, one JSON object per line. "
        "`python -m sglang_chunkcache.preprocess` computes each chunk after these neighbours (FusionRAG 3.1)."
    )
    add = parser.add_argument
    add("index", type=Path, metavar="DIR", help="the index's directory")
    add("--out", type=Path, required=True, metavar="FILE", help="file for the neighbours")
    add("--corpus", type=Path, metavar="FILE", help="also write the passages' texts, for the same program")
    add("--top-n", type=int, metavar="N", default=TOP_N, help="neighbours of each passage")
    add("--nprobe", type=int, metavar="N", default=NPROBE, help="lists visited in an IVF index; candidates in HNSW")


def _neighbors(args: argparse.Namespace) -> None:
    from retrieval.index import Index
    from retrieval.neighbors import write_corpus, write_neighbors

    index = Index.open(args.index, verify=False)
    with progress_bars() as progress:
        lines = write_neighbors(index, args.out, n=args.top_n, nprobe=args.nprobe, progress=progress)
        if args.corpus:
            write_corpus(index, args.corpus, progress=progress)
    print(f"{args.out}: {lines} passages")


# inspect, remove


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", type=Path, metavar="DIR", help="the index's directory")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    parser.add_argument("--passage", metavar="ID", help="show this passage, or a document's passages")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _inspect(args: argparse.Namespace) -> None:
    from retrieval.index import Index

    index = Index.open(args.index, verify=args.verify)
    if args.passage is not None:
        rows = [row for row in index.store.rows_of(_text(args.passage)) if row < index.num_rows]
        if not rows:
            raise RetrievalError(f"{args.index}: no passage and no document has the id {args.passage!r}")
        for passage in index.store.get(rows):
            print(json.dumps(_row(passage), ensure_ascii=False))
        return
    manifest, settings = index.manifest, index.settings
    facts = {
        "generation": manifest.generation,
        "passages": index.num_live,
        "removed": len(index.removed),
        "segments": [f"{part.factory}: {part.num_rows}" for part in manifest.segments],
        "dim": index.dim,
        **asdict(settings),
        "bytes": sum(path.stat().st_size for path in args.index.rglob("*") if path.is_file()),
        "verified": args.verify,
    }
    if args.json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        print(f"{name:15} {value}")


def _row(passage: Passage) -> dict[str, Any]:
    """A passage in the format of `/rag/v1/retrieve`; `text` is the `content` that encoder, BM25 and model read."""
    place = {"start": passage.start, "end": passage.end, "tokens": passage.num_tokens}
    names = {"id": passage.id, "document": passage.document_id, "title": passage.title}
    return {**names, "text": passage.content, **place}


def _text(word: str) -> str:
    """A command-line argument; bytes that are not UTF-8 become question marks."""
    return word.encode("utf-8", "replace").decode()


def _add_remove(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("index", type=Path, metavar="DIR", help="the index's directory")
    parser.add_argument("ids", nargs="+", metavar="ID", help="id of a passage, or of a document with all its passages")
    parser.add_argument("--encoder", metavar="PATH", help="path of the index's encoder, if it has moved")
    parser.add_argument("--device", metavar="NAME", help="device of the encoder")


def _remove(args: argparse.Namespace) -> None:
    from retrieval.build import remove_passages
    from retrieval.encoder import load_encoder
    from retrieval.index import read_settings

    def load() -> Any:
        spec = read_settings(args.index).encoder
        return load_encoder(spec, folder=args.index, override=args.encoder, device=args.device, batch_size=DEVICE_BATCH)

    with progress_bars() as progress:
        ids = [_text(name) for name in args.ids]
        removed = remove_passages(args.index, ids, load=load, options=options(args), progress=progress)
    print(f"{args.index}: {removed} passages removed")


# evaluate


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Build a temporary index of a data set, search its questions, and report recall and the overlap of the results. The "
        "last line of stdout is one JSON object."
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with passages.jsonl.gz and questions.jsonl.gz")
    add(
        "--file",
        metavar="NAME",
        help="file of questions or conversations in DIR; default: questions.jsonl.gz or conversations.jsonl.gz",
    )
    add(
        "--retriever",
        choices=("bm25", "default", "fusion"),
        default="fusion",
        help="bm25: words; default: vectors, of the default encoder or --encoder; fusion: both",
    )
    add("--k", type=int, metavar="N", default=K, help="passages per question")
    add(
        "--query",
        default="last",
        help="query of a conversation's turn: last (its question), rewrite, or turns:N (the last N questions)",
    )
    add("--limit", type=int, metavar="N", help="use N questions only")
    add("--seed", type=int, metavar="N", default=SEED, help="of the order of questions; conversations keep theirs")
    add("--neighbors", action="store_true", help="report how often passages found together are each other's neighbours")
    add("--nprobe", type=int, metavar="N", default=NPROBE, help="lists visited in an IVF index; candidates in HNSW")
    add_index_flags(add, factory="Flat", kept=False)
    add_device_flags(add)
    add("--json", action="store_true", help="print nothing but the JSON object")


def _evaluate(args: argparse.Namespace) -> None:
    from retrieval.evaluate import evaluate, table
    from retrieval.questions import parse_query, read_questions

    chosen, encoder = settings(args, None)
    asked = read_questions(args.data, file=args.file, query=parse_query(args.query), seed=args.seed, limit=args.limit)
    with progress_bars() as progress:
        result = evaluate(
            asked,
            k=args.k,
            retriever=args.retriever,
            nprobe=args.nprobe,
            n_values=N_VALUES if args.neighbors else (),
            settings=chosen,
            encoder=encoder,
            options=options(args),
            progress=progress,
        )
    if not args.json:
        print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
