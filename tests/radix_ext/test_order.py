"""Order policies: what they choose, the bounded search against brute force,
planned against held nodes."""

import random
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_ext import (
    AccessTable,
    Chunk,
    ChunkError,
    ChunkId,
    ChunkPrefixTree,
    Ordering,
    OrderPolicy,
    Tier,
    fused_chunk,
    order_chunks,
)
from radix_ext import order as order_module

LENGTHS = {"a": 4, "b": 4, "c": 9, "d": 4, "e": 17}


def make_chunks(names: str) -> list[Chunk]:
    """A capital is the chunk fused by recipe r."""
    return [
        Chunk(
            fused_chunk("r", ChunkId(name.lower())) if name.isupper() else ChunkId(name),
            LENGTHS.get(name.lower(), 4),
        )
        for name in names
    ]


def make_tree(*chains: str, rank: int = 0) -> ChunkPrefixTree:
    tree = ChunkPrefixTree(max_nodes=100_000)
    for chain in chains:
        tree.insert("", make_chunks(chain), rank=rank, tier=Tier.DEVICE, promoted_len=0)
    return tree


def order(
    names: str,
    tree: ChunkPrefixTree,
    *,
    policy: OrderPolicy = "tree",
    seen: str = "",
    rank: int | None = 0,
    max_visits: int = 1000,
    recipe: str | None = None,
    host_worth: float = 1.0,
) -> Ordering:
    table = AccessTable(window=100)
    for name in seen:
        table.observe([ChunkId(name)])
    return order_chunks(
        policy,
        tree,
        table,
        "",
        make_chunks(names),
        rank=rank,
        max_visits=max_visits,
        recipe=recipe,
        host_worth=host_worth,
    )


def names_of(ordering: Ordering) -> str:
    return "".join(chunk.id for chunk in ordering.chunks)


@pytest.mark.parametrize(
    ("policy", "expected", "held_len"),
    [("retriever", "abcd", 0), ("frequency", "dbac", 0), ("tree", "cbda", 1)],
)
def test_policies_order_as_named(policy: OrderPolicy, expected: str, held_len: int) -> None:
    """c is cached; d was seen three times and b twice in the window."""
    ordering = order("abcd", make_tree("c"), policy=policy, seen="dbdbd")
    assert (names_of(ordering), ordering.held_len) == (expected, held_len)


def test_planned_nodes_guide_but_do_not_count_as_held() -> None:
    """A queued request's chain is followed, and told apart from what is held."""
    tree = make_tree("b")
    plan = tree.plan("", make_chunks("bca"), rank=0)
    ordering = order("abc", tree)
    assert names_of(ordering) == "bca"
    assert (ordering.held_len, ordering.planned_len) == (1, 2)
    assert (ordering.held_tokens, ordering.planned_tokens, ordering.cached_tokens) == (4, 13, 17)
    tree.release(plan)
    assert names_of(order("abc", tree)) == "bac"


def test_other_ranks_do_not_help() -> None:
    """Nor other namespaces; what rank 1 holds is of use where any rank will do."""
    tree = make_tree("ba", rank=1)
    tree.insert("other", make_chunks("a"), rank=0, tier=Tier.DEVICE, promoted_len=0)
    assert [order("ab", tree, rank=rank).held_len for rank in (0, 1, None)] == [0, 2, 2]


def test_order_serves_a_router() -> None:
    """Each rank gets its own best order, with the tokens it would save."""
    tree = make_tree("ba", rank=1)
    tree.insert("", make_chunks("c"), rank=0, tier=Tier.HOST, promoted_len=0)

    def per_rank(*worths: float) -> list[Ordering]:
        return [
            order("abc", tree, rank=rank, host_worth=worth)
            for rank, worth in enumerate(worths or (1.0,) * 3)
        ]

    assert [ordering.cached_tokens for ordering in per_rank()] == [9, 8, 0]
    assert [ordering.worth(0.4) for ordering in per_rank()] == [4, 8, 0]
    assert [*map(names_of, per_rank())] == ["cab", "bac", "abc"]
    tree.insert("", make_chunks("a"), rank=0, tier=Tier.DEVICE, promoted_len=0)
    # 4 tokens against .4 of 9
    assert [*map(names_of, per_rank(0.4, 1.0, 1.0))] == ["abc", "bac", "abc"]


def test_repeated_chunk_is_refused() -> None:
    """With the error class the edge turns into a 400."""
    with pytest.raises(ChunkError, match="1 are repeated"):
        order("aba", make_tree())


chains = st.lists(
    st.permutations("abcde").map("".join).flatmap(lambda s: st.integers(0, 5).map(lambda n: s[:n]))
)


@given(
    chains=chains,
    request_names=st.permutations("abcdz").map("".join),
    other=chains,
    seen=st.text("abcdez"),
)
def test_unbounded_search_equals_brute_force(
    chains: list[str], request_names: str, other: list[str], seen: str
) -> None:
    """Over all permutations: most tokens, then most chunks,
    then lexicographically first by retriever rank; then the tail."""
    tree = make_tree(*chains)
    for chain in other:
        tree.insert("", make_chunks(chain), rank=1, tier=Tier.DEVICE, promoted_len=0)
    held = {chain[:end] for chain in chains for end in range(1, len(chain) + 1)}

    def goodness(permuted: tuple[str, ...]) -> tuple[int, int, list[int]]:
        length = max(
            end for end in range(len(permuted) + 1) if end == 0 or "".join(permuted[:end]) in held
        )
        run = permuted[:length]
        ranks = [-request_names.index(name) for name in run]
        return sum(LENGTHS.get(name, 4) for name in run), length, ranks

    best_tokens, best_len, best_ranks = max(map(goodness, permutations(request_names)))
    ordering = order(request_names, tree, seen=seen)
    assert (ordering.held_tokens, ordering.held_len) == (best_tokens, best_len)
    assert [-request_names.index(name) for name in names_of(ordering)[:best_len]] == best_ranks
    rest = [name for name in request_names if name not in names_of(ordering)[:best_len]]
    rest.sort(key=lambda name: name not in seen)
    assert names_of(ordering)[best_len:] == "".join(rest)


@given(on_device=chains, on_host=chains, parts=st.integers(0, 4))
def test_search_that_weighs_loads_equals_brute_force(
    on_device: list[str], on_host: list[str], parts: int
) -> None:
    """A token in host memory counts for a part of one on the device;
    what both have is on the device."""
    tree = make_tree()
    for tier, chains in ((Tier.HOST, on_host), (Tier.DEVICE, on_device)):
        for chain in chains:
            tree.insert("", make_chunks(chain), rank=0, tier=tier, promoted_len=0)
    worth = {
        chain[:end]: LENGTHS[chain[end - 1]] * tier_parts
        for tier_parts, chains in ((parts, on_host), (4, on_device))
        for chain in chains
        for end in range(1, len(chain) + 1)
    }

    def goodness(permuted: str) -> tuple[int, int]:
        names = [permuted[:end] for end in range(1, 6)]
        run = names[: next((end for end, name in enumerate(names) if name not in worth), 5)]
        return sum(worth[name] for name in run), len(run)

    best = max(map("".join, permutations("abcde")), key=goodness)
    assert names_of(order("abcde", tree, host_worth=parts / 4)) == best


@pytest.mark.parametrize("policy", ["tree", "retriever"])
def test_planned_fused_chains_guide_too(policy: OrderPolicy) -> None:
    """Of what is held and what is planned, exact or fused, the held continuation is followed where
    the order is given."""
    tree = make_tree("aB")
    tree.plan("", make_chunks("aBC"), rank=0)
    ordering = order("abc", tree, policy=policy, recipe="r")
    assert (ordering.held_len, ordering.planned_len, ordering.num_fused) == (2, 1, 2)


@given(
    chains=st.lists(
        st.tuples(st.permutations("abcde"), st.integers(0, 5), st.integers(0, 5)), max_size=8
    ),
    request_names=st.permutations("abcdz").map("".join),
    policy=st.sampled_from(["tree", "retriever"]),
)
def test_fused_search_equals_brute_force(
    chains: list[tuple[list[str], int, int]], request_names: str, policy: OrderPolicy
) -> None:
    """Over all permutations: most exact tokens, then most tokens, then chunks, then the retriever's
    first, exact before fused. A rank that matches exactly first and then what is fused finds just
    that."""
    cut = [
        "".join(names[:exact] + [name.upper() for name in names[exact:end]])
        for names, exact, end in chains
    ]
    tree = make_tree(*cut)
    held = {chain[:end] for chain in cut for end in range(len(chain) + 1)} | {""}

    def found(permuted: str) -> str:
        exact = max(end for end in range(len(permuted) + 1) if permuted[:end] in held)
        lengths = range(exact, len(permuted) + 1)
        return next(
            run
            for end in reversed(lengths)
            if (run := permuted[:exact] + permuted[exact:end].upper()) in held
        )

    def goodness(run: str) -> tuple[int, int, int, list[int]]:
        tokens = [chunk.num_tokens for chunk in make_chunks(run)]
        exact = sum(n for n, name in zip(tokens, run, strict=True) if name.islower())
        ranks = [-(request_names + request_names.upper()).index(name) for name in run]
        return exact, sum(tokens), len(run), ranks

    orders = (
        ["".join(order) for order in permutations(request_names)]
        if policy == "tree"
        else [request_names]
    )
    best = max(map(found, orders), key=goodness)
    ordering = order(request_names, tree, policy=policy, recipe="r")
    assert names_of(ordering)[: len(best)] == best.lower()
    assert (ordering.held_len, ordering.num_fused) == (len(best), sum(map(str.isupper, best)))
    assert ordering.held_tokens == goodness(best)[1]
    assert order(request_names, tree, policy=policy) == order(
        request_names,
        make_tree(*("".join(filter(str.islower, chain)) for chain in cut)),
        policy=policy,
    )


def scattered_tree(
    num_chunks: int, num_chains: int, max_len: int
) -> tuple[ChunkPrefixTree, list[Chunk]]:
    """Random orders of the same chunks, cut anywhere: nothing can be ruled out without looking."""
    rng = random.Random(0)
    chunks = [Chunk(ChunkId(f"{number}"), 4) for number in range(num_chunks)]
    tree = ChunkPrefixTree(max_nodes=1_000_000)
    for _ in range(num_chains):
        chain = rng.sample(chunks, rng.randint(1, max_len))
        tree.insert("", chain, rank=0, tier=Tier.DEVICE, promoted_len=0)
    return tree, chunks


def order_in(tree: ChunkPrefixTree, chunks: list[Chunk], *, max_visits: int) -> Ordering:
    return order_chunks("tree", tree, AccessTable(1), "", chunks, rank=0, max_visits=max_visits)


@pytest.mark.parametrize(("num_chunks", "max_len", "at_least"), [(10, 9, 8), (100, 40, 25)])
def test_bounded_search_is_good_on_adversarial_trees(
    num_chunks: int, max_len: int, at_least: int
) -> None:
    """With 64 visits in a tree of thousands of nodes, the chain found is long,
    if not the longest."""
    tree, chunks = scattered_tree(num_chunks, 1500, max_len)
    ordering = order_in(tree, chunks[::-1], max_visits=64)
    assert ordering.held_len >= at_least
    assert len({chunk.id for chunk in ordering.chunks}) == num_chunks


def test_search_stays_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks into at most max_visits nodes, whatever the tree,
    unless the request itself is longer."""
    tree, chunks = scattered_tree(10, 1500, 10)
    children_among = order_module._children_among
    num_visits = 0

    def counted(*args: Any) -> Any:
        nonlocal num_visits
        num_visits += 1
        return children_among(*args)

    monkeypatch.setattr(order_module, "_children_among", counted)
    for max_visits in (1, 10, 64):
        num_visits = 0
        order_in(tree, chunks, max_visits=max_visits)
        assert 0 < num_visits <= max(max_visits, len(chunks))


def test_one_visit_per_level_still_follows_a_chain_to_its_end() -> None:
    """A chain of 100 chunks is found even with the smallest bound."""
    chunks = [Chunk(ChunkId(f"{number}"), 4) for number in range(100)]
    tree = ChunkPrefixTree(max_nodes=200)
    tree.insert("", chunks, rank=0, tier=Tier.DEVICE, promoted_len=0)
    assert order_in(tree, chunks[::-1], max_visits=1).chunks == tuple(chunks)
