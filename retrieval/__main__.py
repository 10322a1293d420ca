"""`python -m retrieval COMMAND`: build, search and inspect an index.

Progress goes to stderr, results to stdout. A mistake gives exit code 2 and one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval.command_line import Parser
from retrieval.errors import RetrievalError
from retrieval.passage import Passage, utf8
from retrieval.progress import bar, progress_bars
from retrieval.settings import DIM, NPROBE, SETTINGS, IndexSettings, read_settings

if TYPE_CHECKING:
    from retrieval.build import Pruning
    from retrieval.corpus import Corpus
    from retrieval.encoder import Encoder

K = 5
"""Passages per question, as in CRAFT section 5."""
TOP_N = 10
"""Neighbours per passage: FusionRAG's figure 7a is above 80% from ten on."""
DEVICE_BATCH = 64
"""Passages that a model encodes at once."""
RERANK_DEPTH = 4
"""Candidates of the reranker for each passage asked for."""
EMBEDDED = "default"
"""What --encoder calls the embedded encoder."""
COLLECTION = "http(s)://host:port/collection, or file.db"
ENCODER_FLAGS = ("dim", "query_prefix", "passage_prefix", "normalize")
EPILOG = """from a folder of documents to an answered question in three commands:
  python -m retrieval build docs --out index
  python -m sglang_chunkcache.launch_server --model-path M --index index
  curl http://127.0.0.1:30000/rag/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "default", "retrieve": {"k": 5}, \
         "messages": [{"role": "user", "content": "..."}]}'
"""


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)

    def failed(reason: object, code: int = 2) -> int:
        print(f"retrieval {args.command}: {reason}", file=sys.stderr)
        return code

    try:
        args.run(args)
    # Before OSError, of which it is one. Else Python's flush at exit would fail once more.
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (RetrievalError, OSError) as error:
        return failed(error)
    except ModuleNotFoundError as error:
        return failed(f"{error.name} is not installed; install the extra 'retrieval'")
    except KeyboardInterrupt:
        return failed("stopped; run it again to continue", 130)  # 128 + SIGINT, as a shell tells it
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m retrieval",
        description="A retriever for RAG: cut documents into passages, index them with FAISS and"
        " BM25, search.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run: Callable[[argparse.Namespace], None], summary: str) -> argparse.ArgumentParser:
        name, text = run.__name__.removeprefix("_"), run.__doc__
        added = commands.add_parser(name, help=summary, description=text, allow_abbrev=False)
        added.set_defaults(run=run)
        return added

    def add_index(add: Callable[..., Any], *, searched: bool = False, loads: bool = False) -> None:
        if searched and loads:
            text = f"the index's directory, or a Milvus collection: {COLLECTION}"
            add("index", metavar="INDEX", help=text)
        else:
            add("index", type=Path, metavar="DIR", help="the index's directory")
        if searched:
            text = f"lists visited in an IVF index; candidates in HNSW (default: {NPROBE})"
            add("--nprobe", type=int, metavar="N", default=NPROBE, help=text)
        if loads:
            text = "path of the index's encoder, if it has moved; a collection's encoder, or the"
            add("--encoder", metavar="PATH", help=f"{text} directory of an index that has it")
            add("--device", metavar="NAME", help="device of the encoder")

    summary = "make an index of documents, continue a build, or add documents to an index"
    _add_build(command(_build, summary))

    add = command(_search, "find the best passages for a question").add_argument
    add_index(add, searched=True, loads=True)
    add("query", nargs="+", help="the question")
    add("--k", type=int, metavar="N", default=K, help=f"number of passages (default: {K})")
    text = "default: filled (bm25's, then dense's), or fusion if the index was built with --encoder"
    add("--mode", choices=("filled", "fusion", "dense", "bm25"), help=text)
    text = "a sentence-transformers CrossEncoder that ranks what is found, path or hub name"
    add("--reranker", metavar="PATH", help=text)
    text = f"candidates that it reads, as a multiple of --k (default: {RERANK_DEPTH})"
    add("--rerank-depth", type=int, metavar="N", default=RERANK_DEPTH, help=text)
    add("--json", action="store_true", help="print one JSON object")

    add = command(_neighbors, "write every passage's nearest passages to a file").add_argument
    add_index(add, searched=True)
    add("--out", type=Path, required=True, metavar="FILE", help="file for the neighbours")
    text = "also write the passages' texts, for the same program"
    add("--corpus", type=Path, metavar="FILE", help=text)
    text = f"neighbours of each passage (default: {TOP_N})"
    add("--top-n", type=int, metavar="N", default=TOP_N, help=text)

    add = command(_copy, "copy an index into a new Milvus collection").add_argument
    add_index(add)
    add("--to", required=True, metavar="PLACE", help=f"the collection: {COLLECTION}")

    add = command(_inspect, "show the contents of an index and check its files").add_argument
    add_index(add)
    add("--verify", action="store_true", help="read every file and compare its checksum")
    add("--passage", metavar="ID", help="show this passage, or a document's passages")
    add("--json", action="store_true", help="print one JSON object")

    add = command(_remove, "hide passages or documents of an index").add_argument
    add_index(add, loads=True)
    text = "id of a passage, or of a document with all its passages"
    add("ids", nargs="+", metavar="ID", help=text)
    return parser


def _add_build(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = ".txt, .md, .jsonl or .jsonl.gz files, or folders of them"
    add("sources", nargs="+", metavar="SOURCE", help=text)
    add("--out", type=Path, required=True, metavar="DIR", help="the index's directory")
    _add_kept(parser)
    add = parser.add_argument_group("options of this run").add_argument
    add("--device", metavar="NAME", help="cpu or cuda; default: the GPU if there is one")
    for flag, text in {
        "--skip-unreadable": "leave out what cannot be read, and name it at the end",
        "--prune": "remove documents that the sources, all of the index's, do not hold any more",
        "--prune-all": "the same, though it be more than half, or a source empty or missing",
        "--dry-run": "print what --prune would remove, and change nothing",
        "--json": "print the report as one JSON object",
    }.items():
        add(flag, action="store_true", help=text)


def _add_kept(parser: argparse.ArgumentParser) -> None:
    """The namespace gets, by field, only the settings that are given: a default would look like a
    wish, and contradict an index that was built with another value."""
    title = (
        "settings that the index keeps (given at the first build; later builds may leave them out)"
    )
    group = parser.add_argument_group(title, argument_default=argparse.SUPPRESS)

    def add(flag: str, dest: str, text: str, default: object = None, **rest: Any) -> None:
        text += "" if default is None else f" (default: {default})"
        group.add_argument(flag, dest=dest, help=text, **rest)

    def language(word: str) -> str | None:
        return None if word == "off" else word

    usual = IndexSettings()
    text = "the served model, as its --model-path: a path, a hub name or `bundled`; `words` counts"
    add("--tokenizer", "tokens", f"{text} words", usual.tokens, metavar="NAME")
    text = "every document is a passage already and keeps its id"
    add("--no-split", "is_split", text, action="store_false")
    text = "most tokens of a passage's text, at least 8"
    add("--chunk-tokens", "max_tokens", text, usual.max_tokens, type=int, metavar="N")
    text = "most tokens that a passage repeats from the previous one, less than half of"
    text += " --chunk-tokens"
    add("--overlap-tokens", "overlap_tokens", text, usual.overlap_tokens, type=int, metavar="N")
    text = "FAISS factory string, e.g. Flat, IVF4096,Flat, IVF4096,PQ64 or HNSW32"
    add("--factory", "factory", text, usual.factory, metavar="NAME")
    text = "stemmer of the BM25 index; `none`: no stemmer, `off`: no BM25 index"
    add("--bm25", "bm25_language", text, usual.bm25_language, type=language, metavar="LANGUAGE")
    text = f"a sentence-transformers model, path or hub name; `{EMBEDDED}` needs no model"
    add("--encoder", "model", text, EMBEDDED, metavar="PATH")
    add("--dim", "dim", "dimensions of the default encoder's vectors", DIM, type=int, metavar="N")
    text = "text put before each question; default: the model's own"
    add("--query-prefix", "query_prefix", text)
    text = "text put before each passage; default: the model's own"
    add("--passage-prefix", "passage_prefix", text)
    text = "rank by the inner product of unnormalized vectors instead of the cosine (Contriever)"
    add("--no-normalize", "normalize", text, action="store_false")


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
    pruning = Pruning(corpus.unread, even_most=args.prune_all) if prunes else None
    if args.dry_run:
        _show_gone(args, corpus, pruning)
        return
    there = read_settings(args.out) if (args.out / SETTINGS).exists() else None
    names = [one.name for one in fields(IndexSettings)]
    settings = replace(there or IndexSettings(), **_given(args, names))
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
            progress=progress,
            pruning=pruning,
        )
    facts = {
        **asdict(report),
        "files": corpus.num_files,
        "unreadable": corpus.unreadable,
        "without_text": corpus.num_empty,
        "other_files": corpus.num_other,
    }
    if args.json:
        print(json.dumps(facts))
        return

    def tell(line: str) -> None:
        print(line.format_map(facts))

    tell("documents: {documents} read, {unchanged} unchanged, {changed} changed")
    files = "files: {files} read, {without_text} of them without text"
    tell(f"{files}; {{other_files}} of other kinds skipped")
    for fault in corpus.unreadable:
        print(f"skipped: {fault}")
    if pruning:
        tell("pruned: {pruned} documents that are not there any more")
    tell("passages: {added} added, {removed} removed, {duplicates} left out as duplicates")
    print(f"{args.out}: {report.passages} passages, generation {report.generation}")


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _show_gone(args: argparse.Namespace, corpus: Corpus, pruning: Pruning | None) -> None:
    from retrieval.build import find_gone

    if pruning is None:
        raise RetrievalError("--dry-run shows what --prune would remove: give both")
    gone = find_gone(corpus.documents(), args.out, pruning)
    unreadable = corpus.unreadable
    if args.json:
        rows = [{"document": name, "passages": number} for name, number in gone.documents]
        print(json.dumps({"gone": rows, "unreadable": unreadable}, ensure_ascii=False))
    else:
        for name, number in gone.documents:
            print(f"would go: {name} ({number} passages)")
        for fault in unreadable:
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
    from retrieval.sentence_encoder import SentenceEncoder

    given, model = _given(args, ENCODER_FLAGS), getattr(args, "model", None)
    moved = None if model == EMBEDDED else model
    if there:
        # what differs is refused by the build
        spec = {**there.encoder, **given, **({"kind": "hashed"} if model == EMBEDDED else {})}
        if not moved and there.encoder["kind"] == "hashed":
            return spec, None
        place = {"folder": args.out, "device": args.device}
        with bar("load the encoder", None):
            encoder = load_encoder(there.encoder, **place, override=moved, batch_size=DEVICE_BATCH)
        return spec, encoder
    dim = given.pop("dim", DIM)
    if not moved:
        # `fit_default` would refuse it too, but only when all documents have been read.
        if dim < 2:
            raise RetrievalError("--dim must be at least 2")
        return {"kind": "hashed", "dim": dim}, None
    own = {"query_prefix": None, "passage_prefix": None, "normalize": True, **given}
    with bar("load the encoder", None):
        encoder = SentenceEncoder(moved, device=args.device, batch_size=DEVICE_BATCH, **own)
    return encoder.spec(), encoder


def _search(args: argparse.Namespace) -> None:
    """Find the best passages for a question."""
    from retrieval.hits import timed
    from retrieval.opening import open_searcher
    from retrieval.reranker import Reranker

    # Not verified: checksums would read every file for one question.
    with bar("open", None):
        retriever = open_searcher(
            args.index, encoder=args.encoder, device=args.device, verify=False, threads=None
        )
        reranker = Reranker(args.reranker, device=args.device) if args.reranker else None
    query, mode = utf8(" ".join(args.query)), args.mode or retriever.modes[0]
    depth = args.rerank_depth if reranker else 1
    found = retriever.search([query], k=args.k * depth, mode=mode, nprobe=args.nprobe)
    hits, ms = found.hits[0], found.ms
    if reranker:
        with timed(ms, "rerank"):
            hits = reranker.rerank(query, hits, k=args.k)
    if args.json:
        rows = [{**_row(hit.passage), "score": hit.score, "mode": hit.mode} for hit in hits]
        print(json.dumps({"query": query, "passages": rows, "ms": ms}, ensure_ascii=False))
        return
    for rank, hit in enumerate(hits, 1):
        print(f"{rank}. {hit.passage.id}  {hit.mode} {hit.score:.4f}  {hit.passage.title}")
        print("   " + " ".join(hit.passage.text.split())[:300])
    if not hits:
        print("nothing found")


def _neighbors(args: argparse.Namespace) -> None:
    """Write every passage's most similar passages, nearest first, one JSON object per line. `python
    -m sglang_chunkcache.preprocess` computes each chunk after these neighbours (FusionRAG 3.1)."""
    from retrieval.index import Index
    from retrieval.neighbors import write_corpus, write_neighbors

    with bar("open", None):
        index = Index.open(args.index, verify=False)
    with progress_bars() as progress:
        lines = write_neighbors(
            index, args.out, n=args.top_n, nprobe=args.nprobe, progress=progress
        )
        if args.corpus:
            write_corpus(index, args.corpus, progress=progress)
    print(f"{args.out}: {lines} passages")


def _copy(args: argparse.Namespace) -> None:
    """Copy an index's passages and vectors into a new Milvus collection, whose encoder is then the
    index's. The token is MILVUS_TOKEN's, or in the file that MILVUS_TOKEN_FILE names."""
    from retrieval.index import Index
    from retrieval.milvus import copy_index

    with bar("open", None):
        index = Index.open(args.index, verify=False)
    with progress_bars() as progress:
        copied = copy_index(index, args.to, progress=progress)
    print(f"{args.to}: {copied} passages")


def _inspect(args: argparse.Namespace) -> None:
    """Show the contents of an index and check its files."""
    from retrieval.index import Index

    with bar("verify" if args.verify else "open", None):
        index = Index.open(args.index, verify=args.verify)
    if args.passage is not None:
        # The store may also have rows of a build that has not published them.
        rows = [row for row in index.store.rows_of(utf8(args.passage)) if row < index.num_rows]
        if not rows:
            raise RetrievalError(
                f"{args.index}: no passage and no document has the id {args.passage!r}"
            )
        for passage in index.store.get(rows):
            print(json.dumps(_row(passage), ensure_ascii=False))
        return
    facts = {
        "generation": index.manifest.generation,
        "passages": index.num_live,
        "removed": len(index.removed),
        "segments": [f"{part.factory}: {part.num_rows}" for part in index.manifest.segments],
        "dim": index.settings.dim,
        "analyzer": index.manifest.analyzer,
        **asdict(index.settings),
        "bytes": sum(path.stat().st_size for path in args.index.rglob("*") if path.is_file()),
        "verified": args.verify,
    }
    lines = [f"{name:15} {value}" for name, value in facts.items()]
    print(json.dumps(facts) if args.json else "\n".join(lines))


def _remove(args: argparse.Namespace) -> None:
    """Hide passages or documents of an index; a build that still finds them adds them again."""
    from retrieval.build import remove_passages
    from retrieval.encoder import load_encoder

    def load() -> Encoder:
        place = {"folder": args.index, "override": args.encoder, "device": args.device}
        return load_encoder(read_settings(args.index).encoder, **place, batch_size=DEVICE_BATCH)

    with progress_bars() as progress:
        ids = [utf8(name) for name in args.ids]
        removed = remove_passages(args.index, ids, load=load, progress=progress)
    print(f"{args.index}: {removed} passages removed")


def _row(passage: Passage) -> dict[str, Any]:
    """A passage in the format of `/rag/v1/retrieve`;
    `text` is the `content` that encoder, BM25 and model read."""
    place = {"start": passage.start, "end": passage.end, "tokens": passage.num_tokens}
    names = {"id": passage.id, "document": passage.document_id, "title": passage.title}
    return {**names, "text": passage.content, **place}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
