"""The rule of the live scheduler, and the queue of a replay."""

from radix_ext import ChunkPrefixTree, EvictionQueue, Tier, reused_priority
from tests.kit.letters import make_chunks


def test_each_doubling_of_hits_keeps_a_node_one_window_longer() -> None:
    """Of equal ends the one used longer ago leaves first."""
    ends = [reused_priority(hits=hits, last_access=7, window=10)[0] for hits in (0, 1, 2, 3, 4)]
    assert ends == [7, 17, 27, 27, 37]
    assert reused_priority(hits=1, last_access=7, window=10) < reused_priority(
        hits=0, last_access=17, window=10
    )


def test_eviction_queue_survives_many_uses_of_the_same_leaf() -> None:
    tree = ChunkPrefixTree(max_nodes=100)
    queue = EvictionQueue(tree, "lru", window=10)
    for names in ["ab", "c"] * 500:
        node = tree.insert("", make_chunks(names), rank=0, tier=Tier.DEVICE, promoted_len=0)
        assert node is not None
        queue.push(node)
        assert len(queue._heap) <= 4 * 3 + 64
    victims = [queue.pop(), queue.pop(), queue.pop()]
    assert [victim and victim.chunk_id for victim in victims] == ["b", "c", None]
