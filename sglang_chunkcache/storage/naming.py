"""What a rank's entries are found by, and what is kept of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, lru_cache, partial

from radix_ext import ChunkId
from sglang_chunkcache.storage.entry import Layout
from sglang_chunkcache.storage.key import Names, StoredChunk
from sglang_chunkcache.storage.manifest import Row

POSITIONED = ("positioned",)
"""What KV depends on beside model, weights and tokens: it is at its position, in no codec."""


class Naming:
    """Of one rank, by the weights that it serves now. `model_of` names model, weights (by their
    fingerprint) and what else KV depends on. `layout` is the pool's."""

    def __init__(self, names: Names, model_of: Callable[..., str], layout: Layout) -> None:
        self.names, self._model_of, self.layout = names, model_of, layout
        self.heads: tuple[tuple[int, int], ...] = ()
        self.is_off = True
        """Nobody knows the weights, so nothing can be named: nothing is written or loaded."""
        self.era = 0  # what is under way for an earlier one is not used
        self._model = cache(partial(model_of, 0))
        self._tenant = lru_cache(1)(names.tenant)  # a request's chunks have one
        self._saved: dict[tuple[str, ...], int] = {}  # by what KV depends on: bytes of each token
        # Of own entries, by model and whether they are exact.
        self._num_bytes, self._num_tokens = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()

    def start(self, weights: int, heads: tuple[tuple[int, int], ...]) -> None:
        """From now on with these weights and calibrated heads."""
        self._model = cache(partial(self._model_of, weights))
        self.is_off = False
        self.reads(heads)

    def reads(self, heads: tuple[tuple[int, int], ...]) -> None:
        """What was measured in other heads is not used any more."""
        self.heads = heads

    def stop(self) -> None:
        """Until `start` nothing has a name."""
        self.is_off = True
        self.era += 1

    def keeps(self, how: tuple[str, ...], layout: Layout) -> None:
        """Entries whose `chunk` was told `how` have this layout."""
        self._saved[how] = self.layout.token_bytes - layout.token_bytes

    def chunk(
        self, how: tuple[str, ...], extra_key: str | None, cache_salt: str | None, chunk: ChunkId
    ) -> StoredChunk:
        """What a tenant's entries of a chunk are found by.
        `how`: what KV depends on beside model, weights and tokens."""
        return StoredChunk(self._model(*how), self._tenant(extra_key, cache_salt), chunk)

    def in_these_heads(self, row: Row) -> Row:
        """What of the entry can be used."""
        return row if row.heads in ((), self.heads) else row._replace(scored=0, has_outward=False)

    def count(self, row: Row, sign: int) -> None:
        """An own entry comes (1) or leaves (-1)."""
        kind = row.place.model, bool(row.place.exact)
        self._num_bytes[kind] += sign * row.num_bytes
        self._num_tokens[kind] += sign * row.num_tokens

    def clear(self) -> None:
        """No entry is left, and what is under way is not used."""
        self.era += 1
        self._num_bytes.clear()
        self._num_tokens.clear()

    def bytes_by_kind(self, num_bytes: int) -> dict[str, dict[str, int]]:
        """Of `num_bytes` in all. Of `other` ones nobody knows what they would take as plain KV."""
        models = {self._model(*how): saved for how, saved in self._saved.items()}
        taken, saved = dict[str, int](), dict[str, int]()
        for kind, is_exact in (("chains", True), ("variants", False)):
            taken[kind] = sum(self._num_bytes[model, is_exact] for model in models)
            saved[kind] = sum(
                each * self._num_tokens[model, is_exact] for model, each in models.items()
            )
        return {"bytes": {**taken, "other": num_bytes - sum(taken.values())}, "saved_bytes": saved}
