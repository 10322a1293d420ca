"""`python -m retrieval COMMAND`: build, search and inspect an index. Every default is in
settings.py.

Progress goes to stderr, results to stdout. A mistake gives exit code 2 and one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval.errors import RetrievalError
from retrieval.passage import Passage
from retrieval.progress import progress_bars
from retrieval.settings import (
    DEVICE_BATCH,
    NPROBE,
    SETTINGS,
    TOP_N,
    BuildOptions,
    EncoderFlags,
    IndexSettings,
    K,
    add_flags,
    given,
    read_settings,
)

if TYPE_CHECKING:
    from retrieval.build import Pruning
    from retrieval.corpus import Corpus
    from retrieval.encoder import Encoder

EPILOG = """from a folder of documents to an answered question in three commands:
  python -m retrieval build docs --out index
  python -m sglang_chunkcache.launch_server --model-path M --index index
  curl http://127.0.0.1:30000/rag/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "default", "retrieve": {"k": 5}, \
         "messages": [{"role": "user", "content": "..."}]}'
"""


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m retrieval",
        description=(
            "A retriever for RAG: cut documents into passages, index them with FAISS and BM25,"
            " search."
        ),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, add_options, run) in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=run.__doc__, allow_abbrev=False
        )
        add_options(command)
        command.set_defaults(run=run)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    # Before OSError, of which it is one. Else Python's flush at exit would fail once more.
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RetrievalError, OSError) as error:
        print(f"retrieval {args.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"retrieval {args.command}: {error.name} is not installed; install the extra"
            " 'retrieval'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(f"retrieval {args.command}: stopped; run it again to continue", file=sys.stderr)
        return 130  # 128 + SIGINT, as a shell tells it
    return 0


def _add_index(
    parser: argparse.ArgumentParser, *, searched: bool = False, loads: bool = False
) -> None:
    add = parser.add_argument
    add("index", type=Path, metavar="DIR", help="the index's directory")
    if searched:
        text = f"lists visited in an IVF index; candidates in HNSW (default: {NPROBE})"
        add("--nprobe", type=int, metavar="N", default=NPROBE, help=text)
    if loads:
        add("--encoder", metavar="PATH", help="path of the index's encoder, if it has moved")
        add("--device", metavar="NAME", help="device of the encoder")


def _add_build(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help=".txt, .md, .jsonl or .jsonl.gz files, or folders of them",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="the index's directory")
    kept = (
        "settings that the index keeps (given at the first build; later builds may leave them out)"
    )
    add_flags(parser.add_argument_group(kept).add_argument, IndexSettings, EncoderFlags)
    add = parser.add_argument_group("options of this run").add_argument
    add("--device", metavar="NAME", help="cpu or cuda; default: the GPU if there is one")
    add(
        "--skip-unreadable",
        action="store_true",
        help="leave out what cannot be read, and name it at the end",
    )
    add(
        "--prune",
        action="store_true",
        help="remove documents that the sources, all of the index's, do not hold any more",
    )
    add(
        "--prune-all",
        action="store_true",
        help="the same, though it be more than half, or a source empty or missing",
    )
    add(
        "--dry-run", action="store_true", help="print what --prune would remove, and change nothing"
    )
    add("--json", action="store_true", help="print the report as one JSON object")


def _build(args: argparse.Namespace) -> None:
    """Make an index of documents. Run it again to continue after an interruption, or to add more or
    changed documents; a server that has the index open switches to the new generation by itself."""
    # Commands import what they use: --help starts at once, and without the extra.
    from retrieval.build import Pruning, build_index
    from retrieval.corpus import Corpus
    from retrieval.model_path import BUNDLED
    from retrieval.tokens import WORDS, load_tokens

    corpus = Corpus(
        args.sources, skip_unreadable=args.skip_unreadable, may_be_missing=args.prune_all
    )
    prunes = args.prune or args.prune_all
    pruning = Pruning(corpus.reading.unread, even_most=args.prune_all) if prunes else None
    if args.dry_run:
        _show_gone(args, corpus, pruning)
        return
    there = read_settings(args.out) if (args.out / SETTINGS).exists() else None
    settings = replace(there or IndexSettings(), **given(args, IndexSettings))
    if settings.tokens not in (WORDS, BUNDLED) and Path(settings.tokens).exists():
        # later builds may run elsewhere
        settings = replace(settings, tokens=str(Path(settings.tokens).resolve()))
    tokens = load_tokens(settings.tokens)
    spec, encoder = _encoder(args, there)
    settings = replace(settings, tokens_name=tokens.name, encoder=spec)
    with progress_bars() as progress:
        report = build_index(
            corpus.documents(),
            args.out,
            settings,
            tokens=tokens,
            encoder=encoder,
            options=BuildOptions(),
            progress=progress,
            pruning=pruning,
        )
    reading = corpus.reading
    left_out = {
        "unreadable": reading.unreadable,
        "without_text": reading.num_empty,
        "other_files": reading.num_other,
    }
    if args.json:
        print(json.dumps({**asdict(report), "files": reading.files, **left_out}))
        return
    print(
        f"documents: {report.documents} read, {report.unchanged} unchanged, {report.changed}"
        " changed"
    )
    print(
        f"files: {reading.files} read, {reading.num_empty} of them without text;"
        f" {reading.num_other} of other kinds skipped"
    )
    for fault in reading.unreadable:
        print(f"skipped: {fault}")
    if report.unspaced:
        words = (
            "BM25 finds pairs of characters" if settings.bm25_language else "there is no BM25 index"
        )
        print(f"scripts without spaces: {report.unspaced} documents ({words})")
    if pruning:
        print(f"pruned: {report.pruned} documents that are not there any more")
    print(
        f"passages: {report.added} added, {report.removed} removed, {report.duplicates} left out as"
        " duplicates"
    )
    print(f"{args.out}: {report.passages} passages, generation {report.generation}")


def _show_gone(args: argparse.Namespace, corpus: Corpus, pruning: Pruning | None) -> None:
    from retrieval.build import find_gone

    if pruning is None:
        raise RetrievalError("--dry-run shows what --prune would remove: give both")
    gone = find_gone(corpus.documents(), args.out, pruning)
    if args.json:
        rows = [{"document": name, "passages": number} for name, number in gone.documents]
        print(
            json.dumps({"gone": rows, "unreadable": corpus.reading.unreadable}, ensure_ascii=False)
        )
    else:
        for name, number in gone.documents:
            print(f"would go: {name} ({number} passages)")
        for fault in corpus.reading.unreadable:
            print(f"skipped, and its documents stay: {fault}")
        print(f"{args.out}: {len(gone.documents)} documents would go")
    # Last: what would go is shown where a build would refuse, too.
    if gone.refusal:
        raise RetrievalError(gone.refusal)


def _encoder(
    args: argparse.Namespace, there: IndexSettings | None
) -> tuple[dict[str, Any], Encoder | None]:
    """The encoder's spec, and the encoder; None for the embedded one.
    `there`: settings of the index in `args.out`."""
    from retrieval.encoder import load_encoder

    named = given(args, EncoderFlags)
    wanted = EncoderFlags(**named)
    is_embedded = wanted.encoder == EncoderFlags.encoder
    if there:
        named |= {"kind": "hashed"} if named.pop("encoder", None) == EncoderFlags.encoder else {}
        spec = {**there.encoder, **named}  # what differs is refused by the build
        if is_embedded and there.encoder["kind"] == "hashed":
            return spec, None
        moved, place = (
            None if is_embedded else wanted.encoder,
            {"folder": args.out, "device": args.device},
        )
        return spec, load_encoder(there.encoder, **place, override=moved, batch_size=DEVICE_BATCH)
    if is_embedded:
        # `fit_default` would refuse it too, but only when all documents have been read.
        if wanted.dim < 2:
            raise RetrievalError("--dim must be at least 2")
        return {"kind": "hashed", "dim": wanted.dim}, None
    from retrieval.sentence_encoder import SentenceEncoder

    encoder = SentenceEncoder(
        wanted.encoder,
        device=args.device,
        batch_size=DEVICE_BATCH,
        query_prefix=wanted.query_prefix,
        passage_prefix=wanted.passage_prefix,
        normalize=wanted.normalize,
    )
    return encoder.spec(), encoder


def _add_search(parser: argparse.ArgumentParser) -> None:
    _add_index(parser, searched=True, loads=True)
    add = parser.add_argument
    add("query", nargs="+", help="the question")
    add("--k", type=int, metavar="N", default=K, help=f"number of passages (default: {K})")
    text = "default: filled (bm25's, then dense's), or fusion if the index was built with --encoder"
    add("--mode", choices=("filled", "fusion", "dense", "bm25"), help=text)
    add("--json", action="store_true", help="print one JSON object")


def _search(args: argparse.Namespace) -> None:
    """Find the best passages for a question."""
    from retrieval.retriever import Retriever

    # Not verified: checksums would read every file for one question.
    retriever = Retriever.open(
        args.index, encoder=args.encoder, device=args.device, verify=False, threads=None
    )
    query = _text(" ".join(args.query))
    result = retriever.search(
        [query], k=args.k, mode=args.mode or retriever.modes[0], nprobe=args.nprobe
    )
    hits = result.hits[0]
    if retriever.notice:
        print(retriever.notice, file=sys.stderr)
    if args.json:
        rows = [{**_row(hit.passage), "score": hit.score, "mode": hit.mode} for hit in hits]
        print(json.dumps({"query": query, "passages": rows, "ms": result.ms}, ensure_ascii=False))
        return
    for rank, hit in enumerate(hits, 1):
        print(f"{rank}. {hit.passage.id}  {hit.mode} {hit.score:.4f}  {hit.passage.title}")
        print("   " + " ".join(hit.passage.text.split())[:300])
    if not hits:
        print("nothing found")


def _add_neighbors(parser: argparse.ArgumentParser) -> None:
    _add_index(parser, searched=True)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="file for the neighbours")
    add(
        "--corpus",
        type=Path,
        metavar="FILE",
        help="also write the passages' texts, for the same program",
    )
    add(
        "--top-n",
        type=int,
        metavar="N",
        default=TOP_N,
        help=f"neighbours of each passage (default: {TOP_N})",
    )


def _neighbors(args: argparse.Namespace) -> None:
    """Write every passage's most similar passages, nearest first, one JSON object per line. `python
    -m sglang_chunkcache.preprocess` computes each chunk after these neighbours (FusionRAG 3.1)."""
    from retrieval.index import Index
    from retrieval.neighbors import write_corpus, write_neighbors

    index = Index.open(args.index, verify=False)
    with progress_bars() as progress:
        lines = write_neighbors(
            index, args.out, n=args.top_n, nprobe=args.nprobe, progress=progress
        )
        if args.corpus:
            write_corpus(index, args.corpus, progress=progress)
    print(f"{args.out}: {lines} passages")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_index(parser)
    parser.add_argument(
        "--verify", action="store_true", help="read every file and compare its checksum"
    )
    parser.add_argument(
        "--passage", metavar="ID", help="show this passage, or a document's passages"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _inspect(args: argparse.Namespace) -> None:
    """Show the contents of an index and check its files."""
    from retrieval.index import Index

    index = Index.open(args.index, verify=args.verify)
    if args.passage is not None:
        # The store may also have rows of a build that has not published them.
        rows = [row for row in index.store.rows_of(_text(args.passage)) if row < index.num_rows]
        if not rows:
            raise RetrievalError(
                f"{args.index}: no passage and no document has the id {args.passage!r}"
            )
        for passage in index.store.get(rows):
            print(json.dumps(_row(passage), ensure_ascii=False))
        return
    facts = {
        "generation": index.generation,
        "passages": index.num_live,
        "removed": len(index.removed),
        "segments": [f"{part.factory}: {part.num_rows}" for part in index.manifest.segments],
        "dim": index.dim,
        "analyzer": index.manifest.analyzer,
        **asdict(index.settings),
        "bytes": sum(path.stat().st_size for path in args.index.rglob("*") if path.is_file()),
        "verified": args.verify,
    }
    print(
        json.dumps(facts)
        if args.json
        else "\n".join(f"{name:15} {value}" for name, value in facts.items())
    )


def _add_remove(parser: argparse.ArgumentParser) -> None:
    _add_index(parser, loads=True)
    parser.add_argument(
        "ids",
        nargs="+",
        metavar="ID",
        help="id of a passage, or of a document with all its passages",
    )


def _remove(args: argparse.Namespace) -> None:
    """Hide passages or documents of an index; a build that still finds them adds them again."""
    from retrieval.build import remove_passages
    from retrieval.encoder import load_encoder

    def load() -> Encoder:
        spec, place = (
            read_settings(args.index).encoder,
            {"folder": args.index, "override": args.encoder},
        )
        return load_encoder(spec, **place, device=args.device, batch_size=DEVICE_BATCH)

    with progress_bars() as progress:
        ids = [_text(name) for name in args.ids]
        removed = remove_passages(
            args.index, ids, load=load, options=BuildOptions(), progress=progress
        )
    print(f"{args.index}: {removed} passages removed")


def _row(passage: Passage) -> dict[str, Any]:
    """A passage in the format of `/rag/v1/retrieve`;
    `text` is the `content` that encoder, BM25 and model read."""
    place = {"start": passage.start, "end": passage.end, "tokens": passage.num_tokens}
    names = {"id": passage.id, "document": passage.document_id, "title": passage.title}
    return {**names, "text": passage.content, **place}


def _text(word: str) -> str:
    """A command-line argument; bytes that are not UTF-8 become question marks."""
    return word.encode("utf-8", "replace").decode()


Command = tuple[
    str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]
]
COMMANDS: dict[str, Command] = {
    "build": (
        "make an index of documents, continue a build, or add documents to an index",
        _add_build,
        _build,
    ),
    "search": ("find the best passages for a question", _add_search, _search),
    "neighbors": ("write every passage's nearest passages to a file", _add_neighbors, _neighbors),
    "inspect": ("show the contents of an index and check its files", _add_inspect, _inspect),
    "remove": ("hide passages or documents of an index", _add_remove, _remove),
}
"""Name -> (summary, adds its options, runs it); `run`'s docstring is the description."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
