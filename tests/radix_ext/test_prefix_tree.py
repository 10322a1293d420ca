"""The tree's own promises that the model test does not show:
bounds, snapshot, notices, integrity, sizes."""

import json
import random
import sys
import tracemalloc

import pytest

from radix_ext import (
    ChainId,
    Chunk,
    ChunkId,
    ChunkPrefixTree,
    IntegrityError,
    Tier,
    snapshot,
)
from radix_ext.chain_node import ChainNode
from tests.kit.integrity import check_tree, newest_first
from tests.reference.chains import chain_of


def make_chunks(names: str) -> list[Chunk]:
    return [Chunk(ChunkId(name), 4) for name in names]


def make_tree(*chains: str, max_nodes: int = 100) -> ChunkPrefixTree:
    tree = ChunkPrefixTree(max_nodes=max_nodes)
    for chain in chains:
        hold(tree, chain)
    return tree


def hold(tree: ChunkPrefixTree, names: str, *, rank: int = 0, promoted_len: int = 0) -> None:
    tree.insert("", make_chunks(names), rank=rank, tier=Tier.DEVICE, promoted_len=promoted_len)
    check_tree(tree)


def chain(names: str) -> ChainId:
    return chain_of("", [ChunkId(name) for name in names])


def match_len(tree: ChunkPrefixTree, names: str, rank: int | None = None) -> int:
    return len(tree.match("", [ChunkId(name) for name in names], rank=rank))


def test_bound_forgets_the_least_recently_used_leaves() -> None:
    """Five nodes for four places: the leaf unused for longest goes,
    never a node with something below it."""
    tree = make_tree("ab", "c", max_nodes=4)
    hold(tree, "a")
    hold(tree, "de")
    assert [match_len(tree, names) for names in ("ab", "c", "de")] == [1, 1, 2]
    assert tree.num_trimmed == 1
    hold(tree, "fgh")
    assert [match_len(tree, names) for names in ("ab", "c", "de", "fgh")] == [0, 0, 1, 3]


def test_bound_spares_planned_nodes() -> None:
    """A queued request's chain must not vanish under it."""
    tree = make_tree(max_nodes=2)
    plan = tree.plan("", make_chunks("ab"), rank=0)
    hold(tree, "cd")
    assert len(tree.nodes) == 2
    assert tree.nodes.find(chain("ab")) is not None
    hold(tree, "ab")
    tree.release(plan)
    check_tree(tree)
    assert match_len(tree, "ab") == 2


@pytest.mark.parametrize("served", [True, False])
def test_bound_holds_again_once_a_large_plan_is_given_back(served: bool) -> None:
    """Planned nodes may exceed the bound, but only as long as they are planned."""
    tree = make_tree("xy", max_nodes=2)
    plan = tree.plan("", make_chunks("abcd"), rank=0)
    assert len(tree.nodes) == 4
    if served:
        hold(tree, "abcd")
    tree.release(plan)
    check_tree(tree)
    assert match_len(tree, "abcd") == (2 if served else 0)


def test_notices_about_unknown_chains_are_counted() -> None:
    """Mirrors lag: a chain never heard of, or held by another rank only."""
    tree = make_tree("ab")
    tree.evict(ChainId(12345), rank=0)
    tree.evict(chain("a"), rank=3)
    tree.move(chain("zz"), rank=0, tier=Tier.HOST)
    tree.extend(chain("b"), make_chunks("c"), rank=0, tier=Tier.DEVICE, promoted_len=0)
    assert (tree.num_unknown_notices, len(tree.nodes)) == (4, 2)


def test_colliding_chain_ids_cut_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two paths with one id: the second is not mirrored beyond that point."""
    for module in ("radix_ext.chunk_trie", "tests.kit.integrity"):
        monkeypatch.setattr(f"{module}.extend_chain", lambda parent, chunk: ChainId(7))
    tree = ChunkPrefixTree(max_nodes=10)
    tree.insert("", make_chunks("ab"), rank=0, tier=Tier.DEVICE, promoted_len=0)
    tree.insert("", make_chunks("c"), rank=0, tier=Tier.DEVICE, promoted_len=0)
    check_tree(tree)
    assert [match_len(tree, names) for names in ("ab", "c")] == [1, 0]


def test_snapshot_shows_levels_as_json() -> None:
    """What the debug endpoint sends: names, sizes, marks, places, and how much is not shown."""
    tree = make_tree()
    hold(tree, "ab", promoted_len=1)
    tree.plan("", make_chunks("ac"), rank=1)
    shown = json.loads(json.dumps(snapshot(tree, depth=1, max_nodes=10)))
    node = {"chunk": "a", "tokens": 4, "hits": 0, "promoted": True, "planned": True}
    node |= {"num_children": 2, "ranks": {"0": "device"}, "children": []}
    assert shown == {
        "num_nodes": 3,
        "num_namespaces": 1,
        "num_shown": 1,
        "namespaces": [{"namespace": "", "children": [node]}],
    }


def test_deep_chains_are_served_without_recursion() -> None:
    """3,000 chunks in one chain: shown in part, checked, evicted and dropped in one go."""
    tree = ChunkPrefixTree(max_nodes=10_000)
    deep = [Chunk(ChunkId(f"{number}"), 1) for number in range(3000)]
    tree.insert("", deep, rank=0, tier=Tier.DEVICE, promoted_len=0)
    for depth, num_shown in ((3000, 100), (2, 2), (0, 0)):
        assert snapshot(tree, depth=depth, max_nodes=100)["num_shown"] == num_shown
    check_tree(tree)
    assert tree.evict(chain_of("", [ChunkId("0")]), rank=0) == 3000


def test_integrity_error_names_every_violation() -> None:
    """All contradictions in one message, with their numbers."""
    tree = make_tree("ab")
    node = tree.nodes.find(chain("ab"))
    assert node is not None
    node.tiers = 3 << 8
    node.promoted = True
    with pytest.raises(IntegrityError) as error:
        check_tree(tree)
    assert str(error.value).count("; ") == 3
    assert "(b) is held by rank 4 but its parent is not" in str(error.value)
    assert "1 nodes are promoted but 0 were counted" in str(error.value)


def test_integrity_compares_the_parts() -> None:
    """A node that leaves the order of use, or the trie, without the other."""
    for part, message in (("_lru", "2 nodes are indexed but 1 are"), ("nodes", "1 nodes .* but 2")):
        tree = make_tree("ab")
        getattr(tree, part).remove(tree.nodes.find(chain("ab")))
        with pytest.raises(IntegrityError, match=message):
            check_tree(tree)


@pytest.mark.parametrize(("num_chunks", "limit"), [(3000, 260), (10**9, 260 + 81 + 28)])
def test_bytes_of_a_node(num_chunks: int, limit: int) -> None:
    """A node is 128 bytes, its chain id 32, its entry in the index 30 to 60: here the most, since
    the index has just doubled.

    The rest is for the dicts of nodes with several children. `chunk_id` gives equal ids as one
    string; a chunk that occurs once adds its own string and length. eval/bench/tree.py measures
    larger trees.
    """
    rng = random.Random(0)
    chunks: dict[int, Chunk] = {}
    tracemalloc.start()
    tree = ChunkPrefixTree(max_nodes=100_000)
    while len(tree.nodes) < 21_900:
        names = dict.fromkeys(int(num_chunks * rng.random() ** 2) for _ in range(10))
        request = [
            chunks.get(name) or Chunk(ChunkId(f"{name:032x}"), 300 + name % 200) for name in names
        ]
        if num_chunks == 3000:
            chunks |= dict(zip(names, request, strict=True))
        tree.insert("", request, rank=0, tier=Tier.DEVICE, promoted_len=0)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    shared = len(chunks) * (81 + 28 + 48) + sys.getsizeof(chunks)
    assert (size - shared) / len(tree.nodes) < limit


def test_chain_told_node_by_node_costs_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank tells a prompt of many chunks:
    what is above a new node was used last, and is not walked again."""
    tree, walked = ChunkPrefixTree(max_nodes=10_000), list[int]()
    path = ChainNode.path

    def counted(node: ChainNode) -> tuple[ChainNode, ...]:
        found = path(node)
        walked.append(len(found))
        return found

    monkeypatch.setattr(ChainNode, "path", counted)
    chunks = [Chunk(ChunkId(str(number)), 4) for number in range(500)]
    node = tree.insert("", chunks[:1], rank=0, tier=Tier.DEVICE, promoted_len=0)
    for chunk in chunks[1:]:
        assert node is not None
        node = tree.extend(node.chain, [chunk], rank=0, tier=Tier.DEVICE, promoted_len=0)
    assert sum(walked) == 0
    check_tree(tree)
    assert [each.chunk_id for each in newest_first(tree)] == [chunk.id for chunk in chunks]


def test_use_makes_a_chain_the_newest_and_is_no_hit() -> None:
    """Its KV was read for a prompt that has the chunk elsewhere. A plan is released once."""
    tree = make_tree("ab", "xy")
    node = tree.nodes.find(chain("ab"))
    assert node is not None
    plan = tree.plan("", make_chunks("xy"), rank=0)
    for _ in range(2):
        tree.release(plan)
    tree.touch(node)
    check_tree(tree)
    assert "".join(each.chunk_id for each in newest_first(tree)) == "abxy"
    assert node.hits == 0
