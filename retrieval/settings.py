"""How an index is made: the content of `settings.json`, and its defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from retrieval.errors import CorruptIndexError

SETTINGS = "settings.json"
NPROBE = 128
"""IVF lists visited per search, as in CRAFT section 5."""
DIM = 512
"""Dimensions of the embedded encoder's vectors."""


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """Settings of an index directory; they never change.

    Attributes:
        tokens, tokens_name: what measures passages: a name for `load_tokens`, and `Tokens.name`.
        is_split: whether documents are cut; otherwise every document is a passage.
        max_tokens, overlap_tokens: of a passage, if documents are cut. 256 is in the middle of
            CRAFT's 128 to 512.
        encoder: `Encoder.spec()`.
        factory: FAISS' factory string, or "auto".
        bm25_language: stemmer of the BM25 index, "none" for no stemmer, None for no BM25 index.
    """

    tokens: str = "words"
    tokens_name: str = "words"
    is_split: bool = True
    max_tokens: int = 256
    overlap_tokens: int = 32
    encoder: Mapping[str, Any] = field(default_factory=lambda: {"kind": "hashed", "dim": DIM})
    factory: str = "auto"
    bm25_language: str | None = "english"

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
