"""The worked example of CRAFT 4.2 (C1, C2, C5; threshold 2), step by step, one test per step."""

import pytest

from radix_ext import AccessTable, Chunk, ChunkId, ChunkPrefixTree, Tier, order_chunks
from tests.reference.chains import chain_of

GPU_1 = 1
THRESHOLD = 2
C1, C2, C5, C6 = (Chunk(ChunkId(name), num_tokens=4) for name in ("C1", "C2", "C5", "C6"))


class Example:
    """The paper's loop with its own admission: only promoted runs enter the tree."""

    def __init__(self) -> None:
        self.table = AccessTable(window=100)
        self.tree = ChunkPrefixTree(max_nodes=100)
        self.table.observe([C1.id])
        self.table.observe([C2.id])

    def serve(self, *chunks: Chunk) -> int:
        """Serve a request on GPU 1; returns how many chunks were reused."""
        ordering = order_chunks(
            "frequency", "rank", self.tree, self.table, "", chunks, rank=GPU_1, max_visits=16
        )
        ids = [chunk.id for chunk in ordering.chunks]
        self.table.observe(ids)
        run = self.table.promoted_run(ids, THRESHOLD)
        self.tree.insert("", ordering.chunks[:run], rank=GPU_1, tier=Tier.DEVICE, promoted_len=run)
        self.tree.check_integrity()
        return ordering.held_len

    def counts(self, *chunks: Chunk) -> list[int]:
        return [self.table.count(chunk.id) for chunk in chunks]

    def chain(self, *chunks: Chunk) -> list[Tier | None]:
        """Where GPU 1 keeps each node along a chain that must exist to its end."""
        node = self.tree.find(chain_of("", [chunk.id for chunk in chunks]))
        assert node is not None
        return [step.tier(GPU_1) for step in node.path()]


@pytest.fixture
def example() -> Example:
    return Example()


def test_start_has_counts_of_one_and_an_empty_tree(example: Example) -> None:
    """C1 and C2 were accessed once each; nothing is cached."""
    assert example.counts(C1, C2) == [1, 1]
    assert len(example.tree) == 0


def test_first_request_promotes_the_leading_run(example: Example) -> None:
    """[C1, C2, C5] finds nothing. C1 and C2 reach the threshold, C5 does not.
    C2 becomes C1's child on GPU 1."""
    assert example.serve(C1, C2, C5) == 0
    assert example.counts(C1, C2, C5) == [2, 2, 1]
    assert example.chain(C1, C2) == [Tier.DEVICE, Tier.DEVICE]
    assert len(example.tree) == 2
    assert example.tree.stats.num_promoted == 2


def test_second_request_reuses_the_run_and_changes_nothing(example: Example) -> None:
    """[C1, C2, C6] reuses two chunks; C6 counts 1, so the tree stays as it was."""
    example.serve(C1, C2, C5)
    assert example.serve(C1, C2, C6) == 2
    assert example.counts(C1, C2, C6) == [3, 3, 1]
    assert len(example.tree) == 2


def test_third_request_extends_the_chain(example: Example) -> None:
    """The same request again: C6 reaches the threshold and becomes a child of C2."""
    example.serve(C1, C2, C5)
    example.serve(C1, C2, C6)
    assert example.serve(C1, C2, C6) == 2
    assert example.chain(C1, C2, C6) == [Tier.DEVICE] * 3
    assert example.serve(C1, C2, C6) == 3


def test_a_shorter_request_reuses_a_slice_of_the_chain(example: Example) -> None:
    """Prefix slicing: [C1, C5] reuses C1 alone out of [C1, C2]."""
    example.serve(C1, C2, C5)
    assert example.serve(C1, C5) == 1


def test_migration_to_cpu_memory_updates_the_location(example: Example) -> None:
    """[C1, C2] goes from GPU 1 to CPU memory: the entries stay and say so, and still match."""
    example.serve(C1, C2, C5)
    for chain in ([C1.id], [C1.id, C2.id]):
        assert example.tree.move(chain_of("", chain), rank=GPU_1, tier=Tier.HOST)
    assert example.chain(C1, C2) == [Tier.HOST, Tier.HOST]
    assert [(held.tier, held.num_nodes, held.num_tokens) for held in example.tree.stats.held] == [
        ("host", 2, 8)
    ]
    assert example.serve(C1, C2, C6) == 2


def test_removal_deletes_the_nodes(example: Example) -> None:
    """The KV is removed altogether: C1's entry goes and C2's below it;
    nothing is reused any more."""
    example.serve(C1, C2, C5)
    assert example.tree.evict(chain_of("", [C1.id]), rank=GPU_1) == 2
    assert len(example.tree) == 0
    assert example.tree.root("") is None
    assert example.serve(C1, C2, C6) == 0
