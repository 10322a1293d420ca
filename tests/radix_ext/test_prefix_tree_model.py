"""ChunkPrefixTree against a dict of paths, driven by Hypothesis through every operation,
checked after every step."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from radix_ext import Chunk, ChunkId, ChunkPrefixTree, Plan, Tier
from tests.kit.integrity import check_tree, newest_first, num_plans
from tests.reference.chains import chain_of
from tests.reference.naive_tree import NaiveTree

CHUNKS = tuple(
    Chunk(ChunkId(name), tokens) for name, tokens in zip("abc", (4, 300, 7), strict=True)
)
namespaces = st.sampled_from(["", "tenant"])
chunk_lists = st.lists(st.sampled_from(CHUNKS), max_size=4)
ranks = st.integers(0, 1)
tiers = st.sampled_from(Tier)
OpenPlan = tuple[str, list[Chunk], int, Plan]


def ids_of(chunks: list[Chunk]) -> list[ChunkId]:
    return [chunk.id for chunk in chunks]


class TreeMachine(RuleBasedStateMachine):
    """Both trees do the same; they must agree on every answer and, after each step,
    on every node."""

    plans: Bundle[OpenPlan] = Bundle("plans")

    def __init__(self) -> None:
        super().__init__()
        self.tree = ChunkPrefixTree(max_nodes=10_000)
        self.naive = NaiveTree()
        self.num_open_plans = 0

    @rule(
        namespace=namespaces,
        chunks=chunk_lists,
        rank=ranks,
        tier=tiers,
        promoted_len=st.integers(0, 5),
    )
    def insert(
        self, namespace: str, chunks: list[Chunk], rank: int, tier: Tier, promoted_len: int
    ) -> None:
        node = self.tree.insert(namespace, chunks, rank=rank, tier=tier, promoted_len=promoted_len)
        self.naive.insert(namespace, chunks, rank, tier, promoted_len)
        assert node is self.tree.nodes.find(chain_of(namespace, ids_of(chunks)))

    @rule(
        namespace=namespaces,
        base=chunk_lists,
        chunks=chunk_lists,
        rank=ranks,
        tier=tiers,
        run=st.integers(0, 3),
    )
    def extend(
        self,
        namespace: str,
        base: list[Chunk],
        chunks: list[Chunk],
        rank: int,
        tier: Tier,
        run: int,
    ) -> None:
        chain = chain_of(namespace, ids_of(base))
        used = [node.chain for node in newest_first(self.tree)]
        node = self.tree.extend(chain, chunks, rank=rank, tier=tier, promoted_len=run)
        path = [] if node is None else [each.chain for each in node.path()]
        wanted = [*path, *(each for each in used if each not in path)]
        assert [each.chain for each in newest_first(self.tree)] == wanted
        known = self.naive.nodes.get((namespace, tuple(ids_of(base))))
        assert (node is not None) == (known is not None and rank in known.tiers)
        if node is not None:
            before = [
                (self.naive.nodes[namespace, tuple(ids_of(base[:end]))])
                for end in range(1, len(base) + 1)
            ]
            kept = [(naive.hits, naive.tiers[rank], naive.promoted) for naive in before]
            self.naive.insert(namespace, [*base, *chunks], rank, tier, len(base) + run)
            for naive, (hits, old_tier, promoted) in zip(before, kept, strict=True):
                naive.hits, naive.tiers[rank], naive.promoted = hits, old_tier, promoted

    @rule(namespace=namespaces, chunks=chunk_lists, promoted_len=st.integers(0, 5))
    def mark_promoted(self, namespace: str, chunks: list[Chunk], promoted_len: int) -> None:
        self.tree.mark_promoted(namespace, ids_of(chunks), promoted_len=promoted_len)
        self.naive.mark_promoted(namespace, ids_of(chunks), promoted_len)

    @rule(target=plans, namespace=namespaces, chunks=chunk_lists, rank=ranks)
    def plan(self, namespace: str, chunks: list[Chunk], rank: int) -> OpenPlan:
        self.naive.plan(namespace, chunks, rank)
        self.num_open_plans += 1
        return namespace, chunks, rank, self.tree.plan(namespace, chunks, rank=rank)

    @rule(open_plan=consumes(plans), twice=st.booleans())
    def release(self, open_plan: OpenPlan, twice: bool) -> None:
        namespace, chunks, rank, plan = open_plan
        self.tree.release(plan)
        if twice:
            self.tree.release(plan)
        self.naive.release(namespace, chunks, rank)
        self.num_open_plans -= 1

    @rule(open_plan=plans, num_chunks=st.integers(0, 5))
    def count_hits(self, open_plan: OpenPlan, num_chunks: int) -> None:
        namespace, chunks, _, plan = open_plan
        self.tree.count_hits(plan, num_chunks)
        self.naive.count_hits(namespace, chunks[:num_chunks])

    @rule(namespace=namespaces, chunks=chunk_lists, rank=ranks, tier=tiers)
    def notices_about_any_chain(
        self, namespace: str, chunks: list[Chunk], rank: int, tier: Tier
    ) -> None:
        self._move_and_evict(namespace, ids_of(chunks) or [ChunkId("unknown")], rank, tier)

    @precondition(lambda self: self.naive.nodes)
    @rule(pick=st.integers(0, 999), rank=ranks, tier=tiers, evict=st.booleans())
    def notices_about_a_node(self, pick: int, rank: int, tier: Tier, evict: bool) -> None:
        namespace, path = sorted(self.naive.nodes)[pick % len(self.naive.nodes)]
        self._move_and_evict(namespace, [ChunkId(chunk) for chunk in path], rank, tier, evict=evict)

    def _move_and_evict(
        self, namespace: str, ids: list[ChunkId], rank: int, tier: Tier, *, evict: bool = True
    ) -> None:
        chain = chain_of(namespace, ids)
        assert self.tree.move(chain, rank=rank, tier=tier) == self.naive.move(
            namespace, ids, rank, tier
        )
        if evict:
            assert self.tree.evict(chain, rank=rank) == self.naive.evict(namespace, ids, rank)

    @rule(rank=ranks)
    def drop_rank(self, rank: int) -> None:
        assert self.tree.drop_rank(rank) == self.naive.drop_rank(rank)

    @rule(namespace=namespaces, chunks=chunk_lists, rank=st.none() | ranks)
    def match(self, namespace: str, chunks: list[Chunk], rank: int | None) -> None:
        nodes = self.tree.match(namespace, ids_of(chunks), rank=rank)
        assert len(nodes) == self.naive.match(namespace, ids_of(chunks), rank)
        assert [node.chunk_id for node in nodes] == ids_of(chunks)[: len(nodes)]

    @invariant()
    def same_nodes(self) -> None:
        check_tree(self.tree)
        assert len(self.tree.nodes) == len(self.naive.nodes)
        for (namespace, path), naive in self.naive.nodes.items():
            node = self.tree.nodes.find(chain_of(namespace, [ChunkId(chunk) for chunk in path]))
            assert node is not None
            assert tuple(step.chunk_id for step in node.path()) == path
            assert dict(node.held_by()) == naive.tiers
            assert [num_plans(node, rank) for rank in range(2)] == [
                naive.plans.count(rank) for rank in range(2)
            ]
            assert (node.promoted, node.hits, node.num_tokens) == (
                naive.promoted,
                naive.hits,
                naive.num_tokens,
            )

    @invariant()
    def same_counts(self) -> None:
        assert {
            (rank, tier.name.lower()): held
            for rank in range(2)
            for tier in Tier
            if (held := self.tree.holdings.held(rank, tier))[0]
        } == self.naive.held()
        assert self.tree.num_promoted == sum(naive.promoted for naive in self.naive.nodes.values())
        assert len(self.tree.nodes.roots) == len({namespace for namespace, _ in self.naive.nodes})
        assert self.tree.num_open_plans == self.num_open_plans


TestTreeMachine: Any = TreeMachine.TestCase
TestTreeMachine.settings = settings(stateful_step_count=30)
