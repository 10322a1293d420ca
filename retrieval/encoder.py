"""What turns texts into vectors, as the index sees it: a protocol, and the way back from an index's record to its encoder.

Knows neither FAISS nor the passages' store. Similarity is always the inner product of what the two methods return, so whether
vectors have length 1 is the encoder's own business.
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


class Encoder(Protocol):
    """Texts to vectors; thread-safe, and a text's vector does not depend on the texts beside it."""

    @property
    def dim(self) -> int:
        """Columns of every vector."""

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, dim] float32, C-contiguous: the vectors that the index holds."""

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, dim] float32, C-contiguous: the vectors that it is searched with."""

    def spec(self) -> dict[str, Any]:
        """JSON: `kind` and settings, enough for `load_encoder`."""


def load_encoder(
    spec: Mapping[str, Any], *, folder: Path, override: str | None, device: str | None, batch_size: int
) -> Encoder:
    """The encoder that an index was built with, as far as its record tells: `index.check_encoder` looks at its vectors.

    Args:
        spec: what `Encoder.spec` returned at build time.
        folder: holds the default encoder's state file, `STATE_FILE`.
        override: where the same model lies now, if not where the spec says.
        device, batch_size: for a model; None takes CUDA where there is a device.
    Raises:
        RetrievalError: no such model, or another one than the index was built with.
        CorruptIndexError: the spec or the state file is not what an encoder wrote.
    """
    try:
        if spec["kind"] == "hashed":
            if override is not None:
                raise RetrievalError(
                    f"this index was built with the embedded encoder: --encoder {override} does not fit"
                )
            encoder: Encoder = HashedEncoder.load(folder / STATE_FILE)
        elif spec["kind"] == "sentence":
            encoder = SentenceEncoder.from_spec(spec, path_or_name=override, device=device, batch_size=batch_size)
        else:
            raise CorruptIndexError(f"unknown kind of encoder {spec['kind']!r}")
        if encoder.dim != spec["dim"]:
            raise CorruptIndexError(f"the encoder gives {encoder.dim} dimensions, the index has {spec['dim']}")
    except KeyError as err:
        raise CorruptIndexError(f"the encoder's record lacks {err}") from err
    return encoder
