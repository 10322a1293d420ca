"""How a stored variant is named: by all that its KV depends on, so that what is found under a name
is right or damaged.

    model     config with its RoPE overrides, weights, layout of KV
    tenant    extra_key and cache_salt
    place     model, tenant, chunk, head, chunks before it, preprocessed or not; if it is exact,
              the chain that it ends and what has computed it
    name      place, what was measured of it, in which heads
    pointer   model, tenant, chunk or chain, a number: where others look for names (pointer.py)

All of it is hashed, with the secret if there is one. So a tenant's salt stands in no name and in no
file, and cannot be guessed from them without the secret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import astuple

from radix_ext import ChunkId
from sglang_chunkcache.storage.entry import Layout

SECRET_VAR = "SGLANG_CHUNKCACHE_STORAGE_SECRET"
SECRET_FILE_VAR = f"{SECRET_VAR}_FILE"

NOT_OF_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version")
"""Keys of a config that say where a model is from, not what it computes."""


class StoredChunk(NamedTuple):
    """A chunk of one tenant as a storage may have it, of one model and its weights."""

    model: str
    tenant: str
    chunk: ChunkId


class Place(NamedTuple):
    """What one variant's KV depends on."""

    model: str
    tenant: str
    chunk: ChunkId  # the hash of its tokens
    head: str  # names the text before it that is no chunk
    prefix: tuple[ChunkId, ...]  # the chunks before it, in order
    preprocessed: bool
    exact: str = ""
    """If an ordinary prefill computed it: names the chain that it ends, and what has computed it.
    Its request finds it by that, and others that move the chunk find it like any variant."""

    @property
    def stored_chunk(self) -> StoredChunk:
        return StoredChunk(*self[:3])

    @property
    def index_key(self) -> tuple[StoredChunk, str, tuple[ChunkId, ...]]:
        """Chunk, head and prefix, as a `VariantIndex` takes them."""
        return self.stored_chunk, self.head, self.prefix

    @property
    def pointed_from(self) -> tuple[StoredChunk, ...]:
        """What its pointers are found by, the most precise one first."""
        chains = [StoredChunk(self.model, self.tenant, ChunkId(self.exact))] if self.exact else []
        return (*chains, self.stored_chunk)


class Names:
    """`secret` b"": none; at most 64 bytes, as `secret_of` makes them. `shard` tells apart what
    tensor-parallel ranks have of one entry."""

    def __init__(self, secret: bytes, shard: str = "") -> None:
        self.secret, self._shard = secret, shard

    def model(self, config: Mapping[str, object], layout: Layout, weights: int, *how: str) -> str:
        """`config` is the model's, with what was overridden. `weights`: their fingerprint.
        `how`: what else KV depends on."""
        told = {key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL}
        text = json.dumps(told, sort_keys=True, default=str)
        # Not the codec: chains have none, and variants name theirs in `how`.
        *sizes, _ = astuple(layout)
        return self._hash("model", text, str(weights), *map(str, sizes), *how)

    def tenant(self, extra_key: str | None, cache_salt: str | None) -> str:
        """None is kept apart from an empty one."""
        told = ("-" if each is None else f"+{each}" for each in (extra_key, cache_salt))
        return self._hash("tenant", *told)

    def entry(
        self, place: Place, scored: int, has_outward: bool, heads: Sequence[tuple[int, int]]
    ) -> str:
        """Entries with more measured are other entries: a backend overwrites none."""
        # Heads matter where something was measured in them: plain KV has one name under all.
        measured = f"{int(scored)} {has_outward} {sorted(heads) if scored or has_outward else ()}"
        kind = ("exact", place.exact) if place.exact else ("entry",)
        told = self._hash(*kind, *place[:4], str(place.preprocessed), measured, *place.prefix)
        return f"cc1-{told}{self._shard}"

    def pointer(self, chunk: StoredChunk, number: int) -> str:
        return f"ccp1-{self._hash('pointer', *chunk)}-{number}"

    def _hash(self, *parts: str) -> str:
        """No two lists of parts are hashed alike."""
        data = b"".join(
            b"%d:%b" % (len(each), each)
            # A salt may have lone surrogates, which JSON allows and plain UTF-8 refuses.
            for each in (part.encode("utf-8", "surrogatepass") for part in parts)
        )
        return blake2b(data, key=self.secret, digest_size=20).hexdigest()


def secret_of(environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret that the environment names, made short; b"" without one. Raises ValueError: both
    variables are set, or the file cannot be read or is empty."""
    text, file = environ.get(SECRET_VAR, ""), environ.get(SECRET_FILE_VAR, "")
    if text and file:
        raise ValueError(f"{SECRET_VAR} and {SECRET_FILE_VAR} are both set")
    if file:
        try:
            # Editors end a file with a newline, which is no part of the secret.
            text = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"{SECRET_FILE_VAR}: {error}") from None
        if not text:
            raise ValueError(f"{SECRET_FILE_VAR}: {file} is empty")
    # Hashed, since a key of blake2b has 64 bytes at most.
    return blake2b(text.encode(), digest_size=32).digest() if text else b""
