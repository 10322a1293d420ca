"""What a rank's entries are found by, and what is kept of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from radix_ext import ChunkId
from sglang_chunkcache.storage.entry import Layout
from sglang_chunkcache.storage.key import Names, StoredChunk
from sglang_chunkcache.storage.manifest import Row
from sglang_chunkcache.storage.ranks import Ranks

POSITIONED = ("positioned",)
"""What KV depends on beside model, weights and tokens: it is at its position, in no codec."""


class Naming:
    """Of one rank, by the weights that it serves now.

    Args:
        model_of: names model, weights (by their fingerprint) and what else KV depends on.
        layout: of the pool's KV.
    """

    def __init__(
        self, names: Names, model_of: Callable[..., str], layout: Layout, ranks: Ranks | None
    ) -> None:
        self._names, self._model_of, self._layout, self._ranks = names, model_of, layout, ranks
        self.heads: tuple[tuple[int, int], ...] = ()
        """What was measured in others is not used."""
        self.is_off = True
        """Nobody knows the weights, so nothing can be named: nothing is written or loaded."""
        self.era = 0
        """What is under way for an earlier one is not used."""
        self._weights, self._models = 0, dict[tuple[str, ...], str]()
        self._tenant: tuple[tuple[str | None, str | None], str] = (
            (None, None),
            names.tenant(None, None),
        )
        """The last one, and its name."""
        self._saved: dict[tuple[str, ...], int] = {}
        """By what KV depends on: bytes saved of each token."""
        self._num_bytes, self._num_tokens = (Counter[tuple[str, bool]]() for _ in range(2))
        """Of own entries, by model and whether they are exact."""

    def start(self, weights: int, heads: tuple[tuple[int, int], ...]) -> None:
        """From now on with these weights and calibrated heads."""
        self._weights = weights if self._ranks is None else self._ranks.fingerprint(weights)
        self.heads, self.is_off = heads, False
        self._models.clear()

    def measure_in(self, heads: tuple[tuple[int, int], ...]) -> None:
        """The model was calibrated."""
        self.heads = heads

    def stop(self) -> None:
        """Until `start` nothing has a name."""
        self.is_off = True
        self.era += 1

    def keeps(self, how: tuple[str, ...], layout: Layout) -> None:
        """Entries whose `chunk` was told `how` have this layout."""
        self._saved[how] = self._layout.token_bytes - layout.token_bytes

    def chunk(
        self, how: tuple[str, ...], extra_key: str | None, cache_salt: str | None, chunk: ChunkId
    ) -> StoredChunk:
        """What a tenant's entries of a chunk are found by.
        `how`: what KV depends on beside model, weights and tokens."""
        if (extra_key, cache_salt) != self._tenant[0]:  # a request's chunks have one
            self._tenant = (extra_key, cache_salt), self._names.tenant(extra_key, cache_salt)
        return StoredChunk(self._model(how), self._tenant[1], chunk)

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
        """Of all other entries nobody knows what they would take as plain KV."""
        models = {self._model(how): each for how, each in self._saved.items()}
        kinds = {"chains": True, "variants": False}
        found = {
            kind: sum(self._num_bytes[model, is_exact] for model in models)
            for kind, is_exact in kinds.items()
        }
        saved = {
            kind: sum(each * self._num_tokens[model, is_exact] for model, each in models.items())
            for kind, is_exact in kinds.items()
        }
        return {"bytes": {**found, "other": num_bytes - sum(found.values())}, "saved_bytes": saved}

    def _model(self, how: tuple[str, ...]) -> str:
        if how not in self._models:
            self._models[how] = self._model_of(self._weights, *how)
        return self._models[how]
