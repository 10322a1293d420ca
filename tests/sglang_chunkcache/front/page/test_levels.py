"""The tree, a page of children at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from radix_ext import Chunk, ChunkId, ChunkPrefixTree, Tier
from sglang_chunkcache.front.page.levels import KEPT_S, MAX_NODES, SLICE, Levels


def make_tree(*chains: str) -> ChunkPrefixTree:
    """A chunk a letter, of 4 tokens."""
    tree = ChunkPrefixTree(max_nodes=1_000_000)
    for chain in chains:
        chunks = [Chunk(ChunkId(name), 4) for name in chain]
        tree.insert("n", chunks, rank=0, tier=Tier.DEVICE, promoted_len=0)
    return tree


def children(levels: Levels, node: Any = None, offset: int = 0) -> dict[str, Any]:
    found = asyncio.run(levels.children(node, offset, {"a": "label"}))
    assert found is not None
    return found


def test_the_largest_come_first_with_what_is_behind_them() -> None:
    levels = Levels(make_tree("z", "ab", "ac", "ace"))
    (root,) = children(levels)["children"]
    assert (root["is_root"], root["nodes_behind"], root["tokens_behind"]) == (True, 5, 20)
    first, second = children(levels, int(root["node"]))["children"]
    assert (first["label"], first["nodes_behind"], first["tokens_behind"]) == ("label", 3, 12)
    assert (second["chunk"], second["label"], second["num_children"]) == ("z", None, 0)
    assert first["held"] == {"0": "device"}
    assert asyncio.run(levels.children(first["tokens"], 0, {})) is None, "no such node"


def test_a_page_has_at_most_a_thousand() -> None:
    tree = make_tree()
    for i in range(MAX_NODES + 5):
        chunk = Chunk(ChunkId(str(i)), 1 + i)
        tree.insert("n", [chunk], rank=0, tier=Tier.HOST, promoted_len=0)
    levels = Levels(tree)
    (root,) = children(levels)["children"]
    pages = [children(levels, int(root["node"]), at) for at in (0, MAX_NODES)]
    assert [len(page["children"]) for page in pages] == [MAX_NODES, 5]
    tokens = [each["tokens"] for page in pages for each in page["children"]]
    assert tokens == [*range(MAX_NODES + 5, 0, -1)]
    assert pages[0]["num_children"] == MAX_NODES + 5


def test_others_run_while_a_large_tree_is_added_up() -> None:
    """And the sum is kept for a while."""
    tree, now = make_tree(), 0.0
    for i in range(5 * SLICE):
        chunk = Chunk(ChunkId(str(i)), 1)
        tree.insert("n", [chunk], rank=0, tier=Tier.DEVICE, promoted_len=0)
    levels = Levels(tree, clock=lambda: now)
    turns = 0

    async def look() -> None:
        nonlocal turns
        asked = asyncio.ensure_future(levels.children(None, 0, {}))
        while not asked.done():
            turns += 1
            await asyncio.sleep(0)
        await asked

    asyncio.run(look())
    assert turns >= 5
    tree.insert("n", [Chunk(ChunkId("new"), 1)], rank=0, tier=Tier.DEVICE, promoted_len=0)
    assert children(levels)["children"][0]["nodes_behind"] == 5 * SLICE
    now += KEPT_S
    assert children(levels)["children"][0]["nodes_behind"] == 5 * SLICE + 1
