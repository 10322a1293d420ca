"""What is fused together: the variants of a chunk, the chunks of a prompt, the requests of a batch.

variants    one chunk behind different passages, un-rotated: M KVs of the same tokens in the store
chunks      the passages of one prompt, un-rotated as in the store, or as cached (CFF)
neighbors   chunks that have most words in common, each alone behind the head, un-rotated: what a
            store might keep together
requests    whole prompts of one world, likewise (BFF)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.data.nearest import ranker
from eval.joint.kv import Cached, ModelKv
from eval.task import TextChunk
from eval.world.kinds import KINDS
from eval.world.tokenizer import turn_pieces
from eval.world.world import World


@dataclass(frozen=True)
class Sizes:
    """How many units of each kind are fused together."""

    variants: int
    """Of a chunk, each behind `chunks` - 1 others."""
    chunks: int
    """Of a prompt."""
    requests: int
    """Of a batch."""
    passages: int
    """Of a chunk: one has about 30 tokens, less than a large block."""


@dataclass(frozen=True, eq=False)
class Units:
    """Several units, one after the other."""

    keys: Tensor
    """[num_layers, num_tokens, num_kv_heads, head_dim]."""
    values: Tensor
    lens: list[int]
    """Tokens of each unit."""
    requests: list[Cached]
    """Where the units are whole requests as cached: with the queries that read them."""

    def query_norms(self) -> list[float]:
        """The largest norm of a head's query in each layer."""
        return [
            max(
                # Proposition 5.3 bounds a logit's drift by the longest query that reads it.
                float(torch.linalg.vector_norm(each.queries[layer].float(), dim=-1).max())
                for each in self.requests
            )
            for layer in range(len(self.keys))
        ]


def variants(model: ModelKv, rng: random.Random, sizes: Sizes) -> Units:
    """One chunk, computed behind other passages each time, un-rotated."""
    passages = [passage.text for passage in _world(rng).passages]
    rng.shuffle(passages)
    chunk, others = passages[: sizes.passages], passages[sizes.passages :]
    found = []
    for _ in range(sizes.variants):
        before = rng.sample(others, (sizes.chunks - 1) * sizes.passages)
        head, pieces, _ = turn_pieces([*before, *chunk], "", opens=True)
        cached = model.cached([head, *pieces])
        # The prompt ends with the chunk, which is several passages, so several pieces.
        found.append(model.stored(cached, (cached.spans[-sizes.passages][0], cached.num_tokens)))
    return _joined(found)


def stored_chunks(model: ModelKv, rng: random.Random, sizes: Sizes) -> Units:
    """The passages of one prompt, un-rotated."""
    cached = _prompt(model, _world(rng), rng, sizes)
    return _joined([model.stored(cached, span) for span in _chunks(cached, sizes)])


def cached_chunks(model: ModelKv, rng: random.Random, sizes: Sizes) -> Units:
    """The same, at their places in the prompt."""
    cached = _prompt(model, _world(rng), rng, sizes)
    return _joined([_part(cached, span) for span in _chunks(cached, sizes)])


def stored_requests(model: ModelKv, rng: random.Random, sizes: Sizes) -> Units:
    """Prompts about one world, whole, un-rotated."""
    found = _batch(model, rng, sizes)
    return _joined([model.stored(each, (0, each.num_tokens)) for each in found])


def neighbors(model: ModelKv, rng: random.Random, sizes: Sizes) -> Units:
    """A chunk and those of its world that are nearest to it by words, as many as a prompt has."""
    passages = [passage.text for passage in _world(rng).passages]
    rng.shuffle(passages)
    chunks = [
        passages[i : i + sizes.passages]
        # A rest of fewer passages would be a shorter chunk.
        for i in range(0, len(passages) - sizes.passages + 1, sizes.passages)
    ]
    corpus = [TextChunk(str(number), " ".join(chunk)) for number, chunk in enumerate(chunks)]
    found = []
    # The chunk itself is the first of these: nothing shares more words with it.
    for near in ranker(corpus)(corpus[0].text, sizes.chunks):
        head, pieces, _ = turn_pieces(chunks[int(near.id)], "", opens=True)
        cached = model.cached([head, *pieces])
        # Without the head, which is the same before each chunk and would fuse with itself.
        found.append(model.stored(cached, (cached.spans[1][0], cached.num_tokens)))
    return _joined(found)


def cached_requests(model: ModelKv, rng: random.Random, sizes: Sizes) -> Units:
    """The same, at their places in the prompt, with their queries."""
    found = _batch(model, rng, sizes)
    return _joined([_part(each, (0, each.num_tokens)) for each in found], found)


DRAWN: Mapping[tuple[str, str], Callable[[ModelKv, random.Random, Sizes], Units]] = {
    ("variants", "un-rotated"): variants,
    ("chunks", "un-rotated"): stored_chunks,
    ("chunks", "as cached"): cached_chunks,
    ("neighbors", "un-rotated"): neighbors,
    ("requests", "un-rotated"): stored_requests,
    ("requests", "as cached"): cached_requests,
}
"""What is fused and its keys -> how it is drawn."""


# Private, in order of use


def _world(rng: random.Random) -> World:
    return World(rng.getrandbits(48) | 1 << 60, links=True)  # beyond the seeds that training draws


def _batch(model: ModelKv, rng: random.Random, sizes: Sizes) -> list[Cached]:
    world = _world(rng)
    return [_prompt(model, world, rng, sizes) for _ in range(sizes.requests)]


def _prompt(model: ModelKv, world: World, rng: random.Random, sizes: Sizes) -> Cached:
    question, passages, _ = KINDS["linked"].draw(world, sizes.chunks * sizes.passages, rng)
    head, pieces, tail = turn_pieces(
        [passage.text for passage in passages], question.question, opens=True
    )
    return model.cached([head, *pieces, tail])


def _chunks(cached: Cached, sizes: Sizes) -> list[tuple[int, int]]:
    spans = cached.spans[1:-1]
    return [
        (spans[i][0], spans[i + sizes.passages - 1][1])
        for i in range(0, len(spans), sizes.passages)
    ]


def _part(cached: Cached, span: tuple[int, int]) -> tuple[Tensor, Tensor]:
    keys, values = (
        torch.stack(side)[:, slice(*span)] for side in (cached.pool.k_buffer, cached.pool.v_buffer)
    )
    return keys, values


def _joined(units: list[tuple[Tensor, Tensor]], whole: list[Cached] | None = None) -> Units:
    keys, values = (torch.cat(side, dim=1) for side in zip(*units, strict=True))
    return Units(keys, values, [unit.shape[1] for unit, _ in units], whole or [])
