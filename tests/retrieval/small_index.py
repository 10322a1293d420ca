"""A tiny index: an encoder that is a few lines, settings, and one call that builds."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from retrieval.build import BuildReport, Pruning, build_index, remove_passages
from retrieval.hits import Mode
from retrieval.index import Index
from retrieval.passage import Document
from retrieval.retriever import Retriever
from retrieval.settings import IndexSettings
from retrieval.tokens import load_tokens
from tests.polling import until

DIM = 8
TOKENS = load_tokens("words")


class WordEncoder:
    """The sum of a text's words, each a fixed random direction, at length 1.
    `seed` replaces the weights."""

    def __init__(self, *, seed: int = 0, dim: int = DIM) -> None:
        self.seed, self.dim = seed, dim

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, dim] float32."""
        return np.stack([self._encode(text) for text in texts])

    encode_queries = encode_passages

    def spec(self) -> dict[str, Any]:
        """As an index records it."""
        return {"kind": "words", "dim": self.dim}

    def _encode(self, text: str) -> NDArray[np.float32]:
        words = [_direction(word, self.seed, self.dim) for word in text.lower().split()]
        vector = np.sum([np.zeros(self.dim), *words], axis=0)
        return np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-9), np.float32)


@cache
def _direction(word: str, seed: int, dim: int) -> NDArray[np.float64]:
    return np.random.default_rng([seed, *word.encode()]).standard_normal(dim)


def make_settings(**changes: Any) -> IndexSettings:
    """Documents are passages, Flat, with BM25."""
    fields: dict[str, Any] = {
        "tokens": "words",
        "tokens_name": TOKENS.name,
        "is_split": False,
        "max_tokens": 8,
        "overlap_tokens": 0,
        "encoder": WordEncoder().spec(),
        "factory": "Flat",
        "bm25_language": "none",
    }
    return IndexSettings(**{**fields, **changes})


def make_documents(texts: Sequence[str], *, prefix: str = "d") -> list[Document]:
    """Documents d0, d1 … without titles."""
    return [Document(f"{prefix}{number}", "", text) for number, text in enumerate(texts)]


def quiet(stage: str, done: int, total: int | None) -> None:
    """No progress is shown."""


def build(
    folder: Path,
    documents: Iterable[Document],
    *,
    encoder: Any = WordEncoder(),  # noqa: B008 (it has no state)
    pruning: Pruning | None = None,
    **changes: Any,
) -> BuildReport:
    """`build_index` with what tests do not care about; None is the embedded encoder."""
    spec = encoder.spec() if encoder else {"kind": "hashed", "dim": DIM}
    with patch("retrieval.build.ENCODE_BATCH", 3):  # a tiny index has several batches
        return build_index(
            documents,
            folder,
            make_settings(encoder=spec, **changes),
            tokens=TOKENS,
            encoder=encoder,
            progress=quiet,
            pruning=pruning,
        )


def remove(folder: Path, *ids: str) -> int:
    """`remove_passages` likewise."""
    return remove_passages(folder, ids, load=WordEncoder, progress=quiet)


def make_retriever(folder: Path, *, verify: bool = True) -> Retriever:
    """Of an index that `build` has made."""
    return Retriever(Index.open(folder, verify=verify), WordEncoder(), verify=verify, threads=1)


def found_ids(retriever: Retriever, query: str, *, k: int = 3, mode: Mode) -> list[str]:
    """The passages, best first."""
    return [hit.passage.id for hit in retriever.search([query], k=k, mode=mode, nprobe=1).hits[0]]


def train_bpe(text: str, *, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """A byte-level tokenizer of 300 tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*special_tokens],
        show_progress=False,
    )
    bpe.train_from_iterator([text] * 9, trainer)
    return bpe


def flip(path: Path, at: int) -> None:
    """One bit of the byte `at`."""
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def delete(folder: Path) -> None:
    """While it is open tantivy looks at it, and may create its lock file again."""

    def is_gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    until(is_gone)
