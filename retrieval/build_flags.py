"""The flags of `build` and `evaluate` that decide how an index is made, and the settings that follow from them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval.defaults import (
    BM25_MEMORY_MIB,
    CHUNK_TOKENS,
    DEVICE_BATCH,
    DIM,
    ENCODE_BATCH,
    FIT_PASSAGES,
    OVERLAP_TOKENS,
    SEED,
)
from retrieval.errors import RetrievalError

if TYPE_CHECKING:
    from retrieval.build import BuildOptions
    from retrieval.encoder import Encoder
    from retrieval.index import IndexSettings

Add = Callable[..., argparse.Action]
"""`add_argument` of a parser or of a group of flags."""


def add_passage_flags(add: Add) -> None:
    """Add the flags for cutting documents into passages."""
    _add_kept(
        add,
        "--tokenizer",
        "the served model, as its --model-path: a path, a hub name or `bundled`; `words` counts words",
        default="words",
        metavar="NAME",
    )
    _add_kept(
        add,
        "--chunk-tokens",
        "most tokens of a passage's text, at least 8",
        default=CHUNK_TOKENS,
        type=int,
        metavar="N",
    )
    _add_kept(
        add,
        "--overlap-tokens",
        "most tokens that a passage repeats from the previous one, less than half of --chunk-tokens",
        default=OVERLAP_TOKENS,
        type=int,
    )
    _add_kept(
        add, "--no-split", "every document is a passage already and keeps its id", default=None, action="store_true"
    )


def add_index_flags(add: Add, *, factory: str, kept: bool) -> None:
    """Add the flags for encoding and indexing passages.

    Args:
        factory: default of `--factory`.
        kept: whether a later run takes missing flags from the index: see `_add_kept`.
    """
    flag = _add_kept if kept else _add_set
    flag(
        add,
        "--encoder",
        "a sentence-transformers model, path or hub name; `default` needs no model",
        default="default",
        metavar="PATH",
    )
    flag(add, "--dim", "dimensions of the default encoder's vectors", default=DIM, type=int, metavar="N")
    flag(add, "--query-prefix", "text put before each question; default: the model's own", default=None)
    flag(add, "--passage-prefix", "text put before each passage; default: the model's own", default=None)
    flag(
        add,
        "--no-normalize",
        "rank by the inner product of unnormalized vectors instead of the cosine (Contriever)",
        default=None,
        action="store_true",
    )
    flag(
        add,
        "--factory",
        "FAISS factory string, e.g. Flat, IVF4096,Flat, IVF4096,PQ64 or HNSW32",
        default=factory,
    )
    flag(
        add,
        "--bm25",
        "stemmer of the BM25 index; `none`: no stemmer, `off`: no BM25 index",
        default="english",
        metavar="LANGUAGE",
    )


def add_device_flags(add: Add) -> None:
    """Add the flags for the device that runs the encoder's model."""
    add("--device", metavar="NAME", help="cpu or cuda; default: the GPU if there is one")
    add("--batch-size", type=int, metavar="N", default=DEVICE_BATCH, help="passages that a model encodes per batch")


def settings(args: argparse.Namespace, there: IndexSettings | None) -> tuple[IndexSettings, Encoder | None]:
    """The settings of an index, and its encoder; None for the embedded one.

    Args:
        there: settings of the index in `args.out`, used for missing flags; None: no index, and `args.out` is not read.

    Raises:
        RetrievalError: a value is too small, or the tokenizer or encoder cannot be loaded.
    """
    from retrieval.index import IndexSettings
    from retrieval.tokens import load_tokens

    given = vars(args)
    if args.batch_size < 1:
        raise RetrievalError("--batch-size must be at least 1")

    def pick(name: str, kept: Any, default: Any) -> Any:
        return given.get(name, kept if there else default)

    tokens = pick("tokenizer", there and there.tokens, "words")
    if Path(tokens).exists():
        tokens = str(Path(tokens).resolve())  # later builds may run elsewhere
    spec, encoder = _kept_encoder(args, there) if there else _new_encoder(args)
    bm25 = pick("bm25", there and (there.bm25_language or "off"), "english")
    chosen = IndexSettings(
        tokens=tokens,
        tokens_name=load_tokens(tokens).name,
        is_split=not pick("no_split", there and not there.is_split, False),
        max_tokens=pick("chunk_tokens", there and there.max_tokens, CHUNK_TOKENS),
        overlap_tokens=pick("overlap_tokens", there and there.overlap_tokens, OVERLAP_TOKENS),
        encoder=spec,
        factory=pick("factory", there and there.factory, "auto"),
        bm25_language=None if bm25 == "off" else bm25,
    )
    return chosen, encoder


def options(args: argparse.Namespace) -> BuildOptions:
    """The options of one run; defaults where the command has no flag. Raises RetrievalError."""
    from retrieval.build import BuildOptions

    memory = getattr(args, "bm25_memory_mib", BM25_MEMORY_MIB)
    fit = getattr(args, "fit_passages", FIT_PASSAGES)
    if memory < 15 or fit < 1:
        raise RetrievalError("--bm25-memory-mib must be at least 15, --fit-passages at least 1")
    return BuildOptions(fit_passages=fit, encode_batch=ENCODE_BATCH, bm25_memory_bytes=memory << 20, seed=SEED)


# Private, in order of use


def _add_kept(add: Add, name: str, text: str, *, default: Any, **rest: Any) -> None:
    """Add a flag that an existing index decides if it is not given: help shows the default, the namespace has no entry."""
    told = "" if default is None else f" (default: {default})"
    add(name, default=argparse.SUPPRESS, help=text + told, **rest)


def _add_set(add: Add, name: str, text: str, *, default: Any, **rest: Any) -> None:
    add(name, default=default, help=text, **rest)


def _kept_encoder(args: argparse.Namespace, there: IndexSettings) -> tuple[dict[str, Any], Encoder | None]:
    from retrieval.encoder import load_encoder

    given = vars(args)
    path = given.get("encoder", "default")
    named: dict[str, Any] = {name: given[name] for name in ("dim", "query_prefix", "passage_prefix") if name in given}
    named |= {"normalize": False} if "no_normalize" in given else {}
    named |= {"kind": "hashed"} if given.get("encoder") == "default" else {}
    spec = {**there.encoder, **named}
    if there.encoder["kind"] == "hashed" and path == "default":
        return spec, None
    override = None if path == "default" else path  # the model may have moved
    return spec, load_encoder(
        there.encoder, folder=args.out, override=override, device=args.device, batch_size=args.batch_size
    )


def _new_encoder(args: argparse.Namespace) -> tuple[dict[str, Any], Encoder | None]:
    given = vars(args)
    path = given.get("encoder", "default")
    if path == "default":
        dim = given.get("dim", DIM)
        if dim < 2:
            raise RetrievalError("--dim must be at least 2")
        return {"kind": "hashed", "dim": dim}, None
    from retrieval.sentence_encoder import SentenceEncoder

    encoder = SentenceEncoder(
        path,
        device=args.device,
        batch_size=args.batch_size,
        query_prefix=given.get("query_prefix"),
        passage_prefix=given.get("passage_prefix"),
        normalize=not given.get("no_normalize", False),
    )
    return encoder.spec(), encoder
