"""A sentence-transformers model as an encoder: any local path or hub name, on CPU or GPU.

A folder with a plain transformers model (Contriever) has no pooling of its own:
sentence-transformers then averages over tokens. Texts are truncated to the model's own limit: build
passages that fit.

Many models were trained with a prefix that distinguishes queries from passages, and lose recall
without it. Order of precedence: the caller's prefix ("" for none), the model's own `prompts`, the
prefix published for a model of that name.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import RetrievalError, first_line
from retrieval.passage import utf8

BGE_PREFIX = "Represent this sentence for searching relevant passages: "
PUBLISHED_PREFIXES = {
    # Model cards of intfloat/e5-*, e5-*-v2 and multilingual-e5-*; the instruct variants bring
    # prompts of their own.
    r"(multilingual-)?e5-(small|base|large)(-v2)?": ("query: ", "passage: "),
    # Model cards of BAAI/bge-*-en and -en-v1.5: an instruction for queries only.
    r"bge-(small|base|large)-en(-v1\.5)?": (BGE_PREFIX, ""),
}
"""Name without its organisation -> query prefix, passage prefix."""


class SentenceEncoder:
    """See the module. One call at a time: a tokenizer's truncation settings are not thread-safe.

    Args:
        path_or_name: a folder, or a name on the hub, downloaded unless it is in the cache.
        device: torch's name; None selects CUDA if available.
        batch_size: texts per forward pass; sentence-transformers sorts by length first.
        query_prefix, passage_prefix: None selects the model's own, see the module.
        normalize: scale every vector to length 1, so that the inner product is the cosine.
    Raises:
        RetrievalError: sentence-transformers is not installed, or cannot load `path_or_name`.
    """

    def __init__(
        self,
        path_or_name: str,
        *,
        device: str | None,
        batch_size: int,
        query_prefix: str | None,
        passage_prefix: str | None,
        normalize: bool,
    ) -> None:
        self._path_or_name = path_or_name
        self._options = {"batch_size": batch_size, "normalize_embeddings": normalize}
        self._model = load_model(path_or_name, device, kind="SentenceTransformer")
        self._lock = threading.Lock()
        own_query, own_passage = own_prefixes(path_or_name, self._model.prompts)
        self.query_prefix = own_query if query_prefix is None else query_prefix
        self.passage_prefix = own_passage if passage_prefix is None else passage_prefix

    @property
    def dim(self) -> int:
        return int(self._model.get_embedding_dimension())

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, dim] float32."""
        return self._encode(self._model.encode_document, texts, self.passage_prefix)

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, dim] float32."""
        return self._encode(self._model.encode_query, texts, self.query_prefix)

    def spec(self) -> dict[str, Any]:
        """What the index records; without batch size and device, which may differ by run."""
        return {
            "kind": "sentence",
            "model": self._path_or_name,
            "dim": self.dim,
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "normalize": self._options["normalize_embeddings"],
            # to which texts are truncated, prefix and special tokens included; None: no limit
            "max_tokens": self._model.max_seq_length,
        }

    def _encode(self, encode: Any, texts: Sequence[str], prefix: str) -> NDArray[np.float32]:
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        clean = [*map(utf8, texts)]  # a tokenizer refuses lone surrogates
        with self._lock:
            vectors = encode(clean, prompt=prefix, show_progress_bar=False, **self._options)
        return np.ascontiguousarray(vectors, dtype=np.float32)


def own_prefixes(path_or_name: str, prompts: Mapping[str, str | None]) -> tuple[str, str]:
    """(query, passage) prefix of a model: its configured prompts,
    else those published for its name, else "" for both."""
    query = prompts.get("query") or ""
    passage = prompts.get("document") or prompts.get("passage") or prompts.get("corpus") or ""
    if query or passage:
        return query, passage
    name = path_or_name.rstrip("/").rsplit("/", 1)[-1].lower()
    published = (
        both for pattern, both in PUBLISHED_PREFIXES.items() if re.fullmatch(pattern, name)
    )
    return next(published, ("", ""))


def load_model(path_or_name: str, device: str | None, *, kind: str) -> Any:
    """The model, of the class `kind` of sentence-transformers. Raises RetrievalError."""
    try:
        _hide_broken_torchvision()
        load = vars(importlib.import_module("sentence_transformers"))[kind]
        return load(path_or_name, device=device)
    except ModuleNotFoundError as err:
        what = f"sentence-transformers does not start: {err}"
        if err.name in ("sentence_transformers", "transformers", "torch"):
            what = f"{path_or_name} needs sentence-transformers: install the encoders extra"
        raise RetrievalError(what) from err
    # loaders of weights, tokenizers and configurations share no class of error
    except Exception as err:
        reason = first_line(err) or type(err).__name__
        raise RetrievalError(f"cannot load {path_or_name} as a {kind}: {reason}") from err


def _hide_broken_torchvision() -> None:
    """Hide a torchvision built for another torch:
    transformers imports it, for images only, and would fail."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    except (ImportError, OSError, RuntimeError):
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # makes an import fail and a search find nothing
