"""The eviction order of a replay."""

from eval.replay.eviction_queue import EvictionQueue
from radix_ext import ChunkPrefixTree, Tier
from tests.kit.letters import make_chunks


def test_eviction_queue_survives_many_uses_of_the_same_leaf() -> None:
    tree = ChunkPrefixTree(max_nodes=100)
    queue = EvictionQueue(tree, "lru")
    for names in ["ab", "c"] * 500:
        node = tree.insert("", make_chunks(names), rank=0, tier=Tier.DEVICE, promoted_len=0)
        assert node is not None
        queue.push(node)
        assert len(queue._heap) <= 4 * 3 + 64
    victims = [queue.pop(), queue.pop(), queue.pop()]
    assert [victim and victim.chunk_id for victim in victims] == ["b", "c", None]
