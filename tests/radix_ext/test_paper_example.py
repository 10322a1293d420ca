"""The worked example of CRAFT 4.2 (C1, C2, C5; threshold 2), step by step."""

from radix_ext import AccessTable, Chunk, ChunkId, ChunkPrefixTree, Tier, order_chunks
from tests.kit.integrity import check_tree
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

    def serve(self, *chunks: Chunk) -> tuple[int, list[int]]:
        """Serve a request on GPU 1; returns how many chunks were reused, and the counts."""
        ordering = order_chunks(
            "frequency", self.tree, self.table, "", chunks, rank=GPU_1, max_visits=16
        )
        ids = [chunk.id for chunk in ordering.chunks]
        self.table.observe(ids)
        run = self.table.promoted_run(ids, THRESHOLD)
        self.tree.insert("", ordering.chunks[:run], rank=GPU_1, tier=Tier.DEVICE, promoted_len=run)
        check_tree(self.tree)
        return ordering.held_len, [self.table.count(chunk.id) for chunk in chunks]

    def chain(self, *chunks: Chunk) -> list[Tier | None]:
        """Where GPU 1 keeps each node along a chain that must exist to its end."""
        node = self.tree.nodes.find(chain_of("", [chunk.id for chunk in chunks]))
        assert node is not None
        return [step.tier(GPU_1) for step in node.path()]


def test_chain_grows_by_promoted_chunks() -> None:
    example = Example()
    # C1 and C2 reach the threshold, C5 does not
    assert example.serve(C1, C2, C5) == (0, [2, 2, 1])
    assert example.chain(C1, C2) == [Tier.DEVICE] * 2
    assert (len(example.tree.nodes), example.tree.num_promoted) == (2, 2)
    assert example.serve(C1, C2, C6) == (2, [3, 3, 1])
    assert len(example.tree.nodes) == 2
    assert example.serve(C1, C2, C6) == (2, [4, 4, 2])
    assert example.chain(C1, C2, C6) == [Tier.DEVICE] * 3
    assert example.serve(C1, C2, C6)[0] == 3
    assert example.serve(C1, C5)[0] == 1  # a slice of it


def test_migration_and_removal_change_the_location() -> None:
    """In CPU memory the entries stay, say so, and still match; removed, C2's goes with C1's."""
    example = Example()
    example.serve(C1, C2, C5)
    for chain in ([C1.id], [C1.id, C2.id]):
        assert example.tree.move(chain_of("", chain), rank=GPU_1, tier=Tier.HOST)
    assert example.chain(C1, C2) == [Tier.HOST, Tier.HOST]
    assert example.serve(C1, C2, C6)[0] == 2
    assert example.tree.evict(chain_of("", [C1.id]), rank=GPU_1) == 2
    assert example.tree.nodes.root("") is None
    assert example.serve(C1, C2, C6)[0] == 0
