"""How an index is made and how one run works: a field is a flag of the command line, its help and
its default.

`IndexSettings` is also the content of `settings.json`. No other file of this package has defaults;
the server's are in `sglang_chunkcache/config.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from retrieval.errors import CorruptIndexError

SETTINGS = "settings.json"
K = 5
"""Passages per question, as in CRAFT section 5."""
NPROBE = 128
"""IVF lists visited per search, as in CRAFT section 5."""
TOP_N = 10
"""Neighbours per passage: FusionRAG's figure 7a is above 80% from ten on."""
DEVICE_BATCH = 64
"""Passages that a model encodes at once."""


def _flag(default: Any, name: str, text: str, **rest: Any) -> Any:
    """A field with a flag; `rest`: of `add_argument`."""
    text += "" if default in (None, True) else f" (default: {default})"
    return field(default=default, metadata={"flag": name, "help": text, "rest": rest})


def _language(word: str) -> str | None:
    return None if word == "off" else word


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """Settings of an index directory; they never change.

    Attributes:
        tokens: the tokenizer that measures passages, a name for `load_tokens`; `tokens_name` is the
            tokenizer's `name`.
        is_split: whether documents are cut; otherwise every document is a passage.
        max_tokens, overlap_tokens: of a passage, if documents are cut. 256 is in the middle of
            CRAFT's 128 to 512.
        encoder: `Encoder.spec()`.
        factory: FAISS' factory string, or "auto".
        bm25_language: stemmer of the BM25 index, "none" for no stemmer, None for no BM25 index.
    """

    tokens: str = _flag(
        "words",
        "--tokenizer",
        "the served model, as its --model-path: a path, a hub name or `bundled`; `words` counts"
        " words",
        metavar="NAME",
    )
    tokens_name: str = "words"
    is_split: bool = _flag(
        True,
        "--no-split",
        "every document is a passage already and keeps its id",
        action="store_false",
    )
    max_tokens: int = _flag(
        256, "--chunk-tokens", "most tokens of a passage's text, at least 8", type=int, metavar="N"
    )
    overlap_tokens: int = _flag(
        32,
        "--overlap-tokens",
        "most tokens that a passage repeats from the previous one, less than half of"
        " --chunk-tokens",
        type=int,
        metavar="N",
    )
    encoder: Mapping[str, Any] = field(
        default_factory=lambda: {"kind": "hashed", "dim": EncoderFlags.dim}  # defined below
    )
    factory: str = _flag(
        "auto",
        "--factory",
        "FAISS factory string, e.g. Flat, IVF4096,Flat, IVF4096,PQ64 or HNSW32",
        metavar="NAME",
    )
    bm25_language: str | None = _flag(
        "english",
        "--bm25",
        "stemmer of the BM25 index; `none`: no stemmer, `off`: no BM25 index",
        type=_language,
        metavar="LANGUAGE",
    )

    @property
    def dim(self) -> int:
        """Dimensions of the vectors."""
        return int(self.encoder["dim"])

    def differences(self, other: IndexSettings) -> list[str]:
        """Names of the settings that differ. Paths may differ: tokenizers are compared by
        fingerprint, and models by `check_encoder`."""
        # After "@" is the fingerprint, which alone counts.
        mine, theirs = (
            {**asdict(s), "tokens_name": s.tokens_name.rpartition("@")[2]} for s in (self, other)
        )
        return [name for name in mine if name != "tokens" and mine[name] != theirs[name]]

    def to_json(self) -> str:
        """The content of the settings file."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True, kw_only=True)
class EncoderFlags:
    """The flags from which `IndexSettings.encoder` is made."""

    encoder: str = _flag(
        "default",
        "--encoder",
        "a sentence-transformers model, path or hub name; `default` needs no model",
        metavar="PATH",
    )
    dim: int = _flag(
        512, "--dim", "dimensions of the default encoder's vectors", type=int, metavar="N"
    )
    query_prefix: str | None = _flag(
        None, "--query-prefix", "text put before each question; default: the model's own"
    )
    passage_prefix: str | None = _flag(
        None, "--passage-prefix", "text put before each passage; default: the model's own"
    )
    normalize: bool = _flag(
        True,
        "--no-normalize",
        "rank by the inner product of unnormalized vectors instead of the cosine (Contriever)",
        action="store_false",
    )


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of one run, which the index does not keep.

    Attributes:
        fit_passages: size of the sample on which the embedded encoder is fitted.
        encode_batch: passages per call of the encoder.
        bm25_memory_bytes: buffer of BM25's writer, at least 15 MB.
        seed: of the samples and of the embedded encoder.
    """

    fit_passages: int = 100_000
    encode_batch: int = 1024
    bm25_memory_bytes: int = 256 << 20
    seed: int = 0


def add_flags(add: Callable[..., Any], *kinds: type[Any]) -> None:
    """Add the flags of these dataclasses to a parser or a group.
    The namespace gets those that are given, by field."""
    for one in (one for kind in kinds for one in fields(kind) if one.metadata):
        add(
            one.metadata["flag"],
            dest=one.name,
            # A default would look like a wish, and contradict an index that was built with another
            # value.
            default=argparse.SUPPRESS,
            help=one.metadata["help"],
            **one.metadata["rest"],
        )


def given(args: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """The values of a dataclass' flags that are on the command line."""
    return {
        one.name: getattr(args, one.name)
        for one in fields(kind)
        if one.metadata and hasattr(args, one.name)
    }


def read_settings(folder: Path) -> IndexSettings:
    """The directory's settings. Raises CorruptIndexError."""
    path = folder / SETTINGS
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        # Defaults must not stand in for what a file of another version lacks.
        if missing := [one.name for one in fields(IndexSettings) if one.name not in stored]:
            raise KeyError(missing[0])
        settings = IndexSettings(**stored)
        int(settings.dim)  # else a spec without it would fail in the middle of a search
        return settings
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CorruptIndexError(f"{path}: not settings that this version reads: {error}") from None
