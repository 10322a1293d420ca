"""What routers read of our tree: SGLang's KV events, in which a chunk is no plain text."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from radix_ext import Span, chunk_id
from sglang_chunkcache.scheduler.chunk_events import salt_of
from sglang_chunkcache.scheduler.chunk_key import ChunkKey, Fused
from tests.kit.kv_events import encoded
from tests.reference.scheduler import FakeReq, Scheduler, config, marked, walk

pytestmark = pytest.mark.matrix

Token = tuple[str | None, int]
"""As a reader knows it: with its salt."""


class Reader:
    """Keeps what is stored, by its hash, as a router does."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, Token]] = {}
        self.events: list[dict[str, Any]] = []
        """The last ones that were read."""

    def read(self, cache: Any) -> None:
        _, self.events, _ = msgspec.msgpack.decode(encoded(cache.take_events()))
        for event in self.events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockStored":
                parent, salt = event["parent_block_hash"], event.get("cache_salt")
                assert parent is None or parent in self.blocks
                for block, token in zip(event["block_hashes"], event["token_ids"], strict=True):
                    assert block not in self.blocks
                    self.blocks[block] = parent, (salt, token)
                    parent = block
            else:
                for block in event["block_hashes"]:
                    del self.blocks[block]

    def paths(self) -> set[tuple[Token, ...]]:
        """From the root to each block."""
        found = set()
        for block in self.blocks:
            path: list[Token] = []
            at: int | None = block
            while at is not None:
                parent, token = self.blocks[at]
                path.append(token)
                at = parent
            found.add(tuple(path[::-1]))
        assert len(found) == len(self.blocks), "two blocks are one to the reader"
        return found

    def found(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """What a reader that knows tokens alone expects to be cached of them."""
        paths, path = self.paths(), tuple((salt, token) for token in tokens)
        return next((n for n in range(len(path), 0, -1) if path[:n] in paths), 0)


def told(cache: Any) -> set[tuple[Token, ...]]:
    """What is to be read: slow, from the tree."""
    found = set[tuple[Token, ...]]()
    for keys, _ in walk(cache):
        if any(key.extra_key is not None or getattr(key, "fused", None) for key in keys):
            continue
        path = list[Token]()
        for key in keys:
            salt = salt_of(key) if isinstance(key, ChunkKey) else key.cache_salt
            path += [(salt, token) for token in key.token_ids]
        found |= {tuple(path[:end]) for end in range(1, len(path) + 1)}
    return found


@pytest.fixture
def rank() -> Scheduler:
    rank = Scheduler(100, config())
    rank.cache.kv_events.enabled = True
    return rank


def test_chunk_is_marked(rank: Scheduler) -> None:
    """Each node by itself, behind the one above; a reader of plain tokens finds nothing."""
    reader, ids = Reader(), [9, 1, 2, 3, 4, 5, 6]
    rank.serve(FakeReq(ids, marked([(1, 3), (3, 5)])), answer=[7])
    reader.read(rank.cache)
    salts = ["", chunk_id([1, 2]), chunk_id([3, 4]), ""]
    assert [(each["cache_salt"], each["token_ids"]) for each in reader.events[-4:]] == [
        (f"chunkcache/{chunk}/", tokens)
        for chunk, tokens in zip(salts, ([9], [1, 2], [3, 4], [5, 6]), strict=True)
    ]
    assert reader.found(ids) == 0
    rank.serve(FakeReq(ids))
    reader.read(rank.cache)
    assert reader.found(ids) == 7


def test_borders_and_salts_are_apart(rank: Scheduler) -> None:
    """The same tokens in other chunks, or of another tenant, are other blocks."""
    reader, ids = Reader(), [1, 2, 3, 4]
    for spans, salt in (
        ([(0, 4)], None),
        ([(0, 2), (2, 4)], None),
        ([(2, 4)], None),
        ([(0, 4)], "salt"),
    ):
        rank.serve(FakeReq(ids, marked(spans), cache_salt=salt))
        reader.read(rank.cache)
        assert reader.paths() == told(rank.cache)
    assert len(reader.blocks) == 16
    assert {each["cache_salt"] for each in reader.events} == {f"chunkcache/{chunk_id(ids)}/salt"}


@pytest.mark.parametrize("has_chunks", [True, False])
def test_what_an_event_cannot_tell_is_not_told(rank: Scheduler, has_chunks: bool) -> None:
    """SGLang tells plain text of any `extra_key` as it is."""
    reader = Reader()
    params = marked([(0, 2)]) if has_chunks else None
    rank.serve(FakeReq([1, 2, 3], params, extra_key="x"))
    reader.read(rank.cache)
    assert len(reader.blocks) == 3 * (not has_chunks)


def test_what_is_approximate_is_not_told(rank: Scheduler) -> None:
    """From the first moved chunk on, whatever leaves first."""
    reader, ids = Reader(), array("q", [1, 2, 3, 4, 5])
    spans = [Span(start, start + 2, chunk_id(ids[start : start + 2])) for start in (0, 2)]
    key = ChunkKey.cut(ids, spans, 5, fused=Fused(2, "recipe"))
    rank.cache.insert_segments(key, rank.allocator.alloc(5), "", 0, 0)
    reader.read(rank.cache)
    assert len(reader.blocks) == 2
    assert reader.paths() == told(rank.cache)
    for left in (2, 2, 0):
        rank.cache.evict(EvictParams(num_tokens=1))
        reader.read(rank.cache)
        assert len(reader.blocks) == left


def test_nothing_is_told_to_nobody() -> None:
    rank = Scheduler(48, config())
    rank.serve(FakeReq([1, 2, 3], marked([(0, 2)])))
    rank.serve(FakeReq([4, 5, 6]))
    assert rank.cache.take_events() == []


@pytest.mark.parametrize("seed", range(4))
def test_reader_knows_what_the_tree_has(rank: Scheduler, seed: int) -> None:
    """Under eviction, splits and flushes; after every request."""
    draw, reader = random.Random(seed), Reader()
    num_removed = 0
    for _ in range(150):
        ids, spans = [draw.choice([9, 1])] * draw.randint(0, 2), list[tuple[int, int]]()
        for _ in range(draw.randint(1, 3)):
            chunk = draw.choice([(1, 2, 3, 4), (1, 2, 5), (7, 8)])
            spans.append((len(ids), len(ids) + len(chunk)))
            ids += chunk
        ids += draw.choices([1, 2, 3], k=draw.randint(1, 6))
        names = draw.choice([{}, {}, {"cache_salt": "s"}, {"extra_key": "x"}])
        # of several plain namespaces SGLang tells the same
        params = None if not names and draw.random() < 0.5 else marked(spans)
        rank.serve(FakeReq(ids, params, **names), answer=draw.choices([1, 2], k=2))
        if draw.random() < 0.02:
            rank.cache.reset()
            rank.allocator.clear()
        reader.read(rank.cache)
        num_removed += sum(each["type"] == "BlockRemoved" for each in reader.events)
        assert reader.paths() == told(rank.cache)
    assert num_removed > 50
