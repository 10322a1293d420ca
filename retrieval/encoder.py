"""What turns texts into vectors, and how an index's encoder is restored.

Similarity is always the inner product of the vectors that the two methods return; each encoder
decides whether its vectors have length 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.hashed_encoder import STATE_FILE, HashedEncoder
from retrieval.sentence_encoder import SentenceEncoder

QUERY_BATCH = 32
"""Queries that a model encodes at once."""


class Encoder(Protocol):
    """Texts to vectors. Thread-safe.
    A text's vector does not depend on the other texts of the batch."""

    @property
    def dim(self) -> int:
        """Columns of every vector."""

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, dim] float32, C-contiguous: the vectors that the index holds."""

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, dim] float32, C-contiguous: the vectors that the index is searched with."""

    def spec(self) -> dict[str, Any]:
        """JSON: `kind` and settings, enough for `load_encoder`."""


def load_encoder(
    spec: Mapping[str, Any],
    *,
    folder: Path,
    override: str | None,
    device: str | None,
    batch_size: int,
) -> Encoder:
    """Load the encoder that an index was built with; `index.check_encoder` compares a vector.

    Args:
        folder: holds the default encoder's state file, `STATE_FILE`.
        override: path of the same model now, if it has moved since the build.
        device, batch_size: for a model. `device` None selects CUDA if available.
    Raises:
        RetrievalError: the model does not exist, or the index was built with another one.
        CorruptIndexError: the spec or the state file was not written by an encoder.
    """
    try:
        if spec["kind"] == "hashed":
            if override is not None:
                what = "this index was built with the embedded encoder"
                raise RetrievalError(f"{what}: --encoder {override} does not fit")
            encoder: Encoder = HashedEncoder.load(folder / STATE_FILE)
        elif spec["kind"] == "sentence":
            kept = {name: spec[name] for name in ("query_prefix", "passage_prefix", "normalize")}
            model = override or spec["model"]
            encoder = SentenceEncoder(model, device=device, batch_size=batch_size, **kept)
        else:
            raise CorruptIndexError(f"unknown kind of encoder {spec['kind']!r}")
        # By now another model may lie at the path.
        if encoder.dim != spec["dim"]:
            raise CorruptIndexError(
                f"the encoder gives {encoder.dim} dimensions, the index has {spec['dim']}"
            )
    except KeyError as err:
        raise CorruptIndexError(f"the encoder's record lacks {err}") from err
    return encoder
