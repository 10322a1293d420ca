"""VariantIndex: what it keeps, what it refuses, what it evicts first. At the end, against a plain list."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radix_ext import IntegrityError
from radix_ext.errors import LimitError
from radix_ext.variants import Variant, VariantIndex
from tests.reference.naive_store import NaiveStore, NaiveVariant
from tests.reference.sources import Sums, ids

TOKEN_BYTES = 48
SCORE_BYTES = 8


@dataclass(eq=False)
class Bytes:
    """A blob of which only the size is known."""

    nbytes: int


def chunk(name: str, tenant: str = "") -> tuple[str, str]:
    return name, tenant


def make_scores(names: str, num_tokens: int = 1) -> Sums:
    n = len(names)
    return Sums((1.0,) * n, (4,) * n, 1.0, num_tokens, SCORE_BYTES * num_tokens)


def make_variant(names: str = "", *, num_tokens: int = 1, scored: bool = False, preprocessed: bool = False) -> Variant:
    blob = Bytes(TOKEN_BYTES * num_tokens)
    return Variant(ids(names), blob, make_scores(names, num_tokens) if scored else None, preprocessed)


def make_store(*, tokens: int = 100, chunks: int = 100, variants: int = 100) -> VariantIndex:
    return VariantIndex(max_bytes=tokens * TOKEN_BYTES, max_chunks=chunks, max_variants=variants)


def prefixes(store: VariantIndex, name: str) -> list[str]:
    return ["".join(variant.prefix) for variant in store.find(chunk(name))]


def test_find_gives_every_variant_of_one_identity() -> None:
    """Tenants that SGLang keeps apart share nothing."""
    store = make_store()
    first, second = make_variant(), make_variant("x")
    assert store.put(chunk("a"), first)
    assert store.put(chunk("a"), second)
    assert store.find(chunk("a")) == (first, second)
    assert store.find(chunk("a", "tenant")) == ()
    assert store.find(chunk("b")) == ()
    assert store.stats()[:3] == (1, 2, 2 * TOKEN_BYTES)


def test_bytes_count_keys_values_and_scores() -> None:
    """An uncounted part would let the store outgrow its limit."""
    store = make_store()
    store.put(chunk("a"), make_variant(num_tokens=3, scored=True))
    assert store.stats().num_bytes == 3 * (TOKEN_BYTES + SCORE_BYTES)


@pytest.mark.parametrize("limit", ["max_bytes", "max_chunks", "max_variants"])
def test_limits_below_one_are_refused(limit: str) -> None:
    """A store that can hold nothing is a mistake."""
    with pytest.raises(LimitError, match=limit):
        VariantIndex(**{"max_bytes": 1, "max_chunks": 1, "max_variants": 1, limit: 0})


@pytest.mark.parametrize("cfo", [0.0, -1.0, 1.5, float("nan")])
def test_use_refuses_what_is_no_share(cfo: float) -> None:
    """1/CFO of such a number would spoil the order for good."""
    store, variant = make_store(), make_variant()
    store.put(chunk("a"), variant)
    with pytest.raises(ValueError, match="cfo"):
        store.use(variant, cfo)
    assert variant.reuse == 0


def test_use_adds_the_inverse_of_cfo() -> None:
    """Cache-Craft 3.3; without a CFO a use counts 1."""
    store, variant = make_store(), make_variant()
    store.put(chunk("a"), variant)
    store.use(variant, 0.25)
    store.use(variant, None)
    assert variant.reuse == 5


def test_lowest_reuse_leaves_first() -> None:
    """Not the least recently used: `a` was used before `b`, but is worth more."""
    store = make_store(tokens=2)
    a, b = make_variant(), make_variant()
    store.put(chunk("a"), a)
    store.put(chunk("b"), b)
    store.use(a, 0.5)
    store.use(b, None)
    store.put(chunk("c"), make_variant())
    assert store.find(chunk("a")) == (a,)
    assert store.find(chunk("b")) == ()


def test_among_equals_the_least_recently_used_leaves() -> None:
    """Both were used once; `b` was put later but used earlier."""
    store = make_store(tokens=2)
    a, b = make_variant(), make_variant()
    store.put(chunk("a"), a)
    store.put(chunk("b"), b)
    store.use(b, None)
    store.use(a, None)
    store.put(chunk("c"), make_variant())
    assert store.find(chunk("b")) == ()


def test_newcomer_is_never_the_one_to_leave() -> None:
    """It has the lowest f_r of all, and would never get in."""
    store = make_store(tokens=1)
    old, new = make_variant(), make_variant()
    store.put(chunk("a"), old)
    store.use(old, 0.01)
    assert store.put(chunk("b"), new)
    assert store.find(chunk("b")) == (new,)


def test_larger_than_the_store_is_refused() -> None:
    """And nothing is evicted for it, not even what it would have replaced."""
    store = make_store(tokens=2)
    store.put(chunk("a"), make_variant(num_tokens=2))
    assert not store.put(chunk("b"), make_variant(num_tokens=3))
    assert not store.put(chunk("a"), make_variant(num_tokens=2, scored=True))  # the scores are too much
    assert store.stats().num_bytes == 2 * TOKEN_BYTES
    assert store.stats().num_refused == 2
    assert store.put(chunk("a"), make_variant("x", num_tokens=2))  # exactly as large


def test_variant_limit_evicts_the_chunks_own_lowest() -> None:
    """Other chunks are left alone, however little they are worth."""
    store = make_store(variants=2)
    other, x, y = make_variant(), make_variant("x"), make_variant("y")
    store.put(chunk("b"), other)
    store.put(chunk("a"), x)
    store.put(chunk("a"), y)
    store.use(x, None)
    store.put(chunk("a"), make_variant("z"))
    assert prefixes(store, "a") == ["x", "z"]
    assert store.find(chunk("b")) == (other,)


@pytest.mark.parametrize(("uses", "left"), [("xxy", "x"), ("yx", "x")])
def test_variant_limit_goes_by_reuse_then_by_use(uses: str, left: str) -> None:
    """As everywhere: what was used twice stays, though used before the other; of equals the last used stays."""
    store = make_store(variants=2)
    variants = {name: make_variant(name) for name in "xy"}
    for variant in variants.values():
        store.put(chunk("a"), variant)
    for name in uses:
        store.use(variants[name], None)
    store.put(chunk("a"), make_variant("z"))
    assert prefixes(store, "a") == [left, "z"]


def test_chunk_limit_evicts_until_a_chunk_is_gone() -> None:
    """Lowest first, of any chunk. A further variant of a known chunk needs no place of its own."""
    store = make_store(chunks=2)
    for name, before in (("a", ""), ("b", ""), ("a", "x")):
        store.put(chunk(name), make_variant(before))
    assert store.stats().num_variants == 3
    store.put(chunk("c"), make_variant())
    assert prefixes(store, "a") == ["x"]  # its other variant was the lowest, but its eviction freed no chunk's place
    assert prefixes(store, "b") == []


@pytest.mark.parametrize(
    ("old", "new", "replaced"),
    [
        ({}, {}, False),
        ({}, {"scored": True}, True),
        ({}, {"preprocessed": True}, True),
        ({"scored": True}, {}, False),
        ({"scored": True}, {"preprocessed": True}, True),
        ({"preprocessed": True}, {"scored": True}, False),
        ({"preprocessed": True}, {"scored": True, "preprocessed": True}, True),
        ({"scored": True, "preprocessed": True}, {"scored": True, "preprocessed": True}, False),
    ],
)
def test_same_prefix_is_replaced_only_by_better(old: dict[str, bool], new: dict[str, bool], replaced: bool) -> None:
    """A total order, so that two kinds never replace each other in turn; uses of the old one stay counted."""
    store = make_store()
    before, after = make_variant("x", **old), make_variant("x", **new)
    store.put(chunk("a"), before)
    store.use(before, 0.5)
    assert store.wants(chunk("a"), ids("x"), **new) is replaced
    assert store.put(chunk("a"), after) is replaced
    assert store.find(chunk("a")) == (after if replaced else before,)
    assert store.find(chunk("a"))[0].reuse == 2
    assert store.stats().num_bytes == store.find(chunk("a"))[0].nbytes
    assert store.stats().num_evicted == 0
    store.check_integrity()


def test_wants_a_new_prefix() -> None:
    """Asked before the KV is copied."""
    store = make_store()
    store.put(chunk("a"), make_variant("xy"))
    assert not store.wants(chunk("a"), ids("xy"))
    assert store.wants(chunk("a"), ids("yx"))
    assert store.wants(chunk("b"), ids("xy"))


def test_a_variant_is_in_one_place_only() -> None:
    """Twice it would be counted twice and freed once."""
    store, variant = make_store(), make_variant()
    assert store.put(chunk("a"), variant)
    assert not store.put(chunk("b"), variant)
    assert store.stats().num_variants == 1


def test_dropping_takes_nothing_from_a_reader() -> None:
    """And a use that comes too late changes nothing."""
    store, variant = make_store(tokens=1), make_variant()
    store.put(chunk("a"), variant)
    store.put(chunk("b"), make_variant())
    assert store.find(chunk("a")) == ()
    store.use(variant, 0.5)
    assert variant.reuse == 0
    assert variant.blob.nbytes == TOKEN_BYTES


def test_what_has_left_is_freed() -> None:
    """The eviction order must not keep KV in memory."""
    store = make_store(variants=1)
    gone = make_variant("x")
    watch = weakref.ref(gone.blob)
    store.put(chunk("a"), gone)
    del gone
    store.put(chunk("a"), make_variant("y"))
    gc.collect()
    assert watch() is None


def test_eviction_order_does_not_grow_with_replacement() -> None:
    """A chunk with a limit of one variant leaves an entry at each put."""
    store = make_store(variants=1)
    for index in range(1000):
        store.put(chunk("a"), make_variant(f"{index}"))
    assert len(store._order) < 50
    store.check_integrity()


def test_clear_keeps_the_counts() -> None:
    """Metrics are counters."""
    store, variant = make_store(), make_variant()
    store.put(chunk("a"), variant)
    store.use(variant, None)
    store.clear()
    assert store.find(chunk("a")) == ()
    stats = store.stats()
    assert (stats.num_chunks, stats.num_variants, stats.num_bytes) == (0, 0, 0)
    assert (stats.num_added, stats.num_uses, stats.num_evicted) == (1, 1, 0)
    store.use(variant, None)
    assert variant.reuse == 1
    assert store.put(chunk("a"), variant)
    store.check_integrity()


def lose_bytes(store: VariantIndex) -> None:
    store._num_bytes -= 1


def lower_byte_limit(store: VariantIndex) -> None:
    store._max_bytes = 1


def lower_chunk_limit(store: VariantIndex) -> None:
    store._max_chunks = 0


def lower_variant_limit(store: VariantIndex) -> None:
    store._max_variants = 0


def forget_chunk(store: VariantIndex) -> None:
    store._chunks.clear()


def move_variant(store: VariantIndex) -> None:
    store.find(chunk("a"))[0].prefix = ids("z")


def add_scores(store: VariantIndex) -> None:
    store.find(chunk("a"))[0].scores = make_scores("")


def lower_reuse(store: VariantIndex) -> None:
    store.find(chunk("a"))[0].reuse = -1


def forget_order(store: VariantIndex) -> None:
    store._order.clear()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lose_bytes, "the variants count"),
        (lower_byte_limit, "over max_bytes"),
        (lower_chunk_limit, "over max_chunks"),
        (lower_variant_limit, "not 1 to 0"),
        (forget_chunk, "0 variants listed by chunk but 1 held"),
        (move_variant, "is not where"),
        (add_scores, "came with"),
        (lower_reuse, "in the eviction order"),
        (forget_order, "in the eviction order"),
    ],
)
def test_integrity_names_each_harm(harm: Callable[[VariantIndex], None], message: str) -> None:
    """A check that never fails checks nothing."""
    store = make_store()
    store.put(chunk("a"), make_variant())
    store.check_integrity()
    harm(store)
    with pytest.raises(IntegrityError, match=message):
        store.check_integrity()


names = st.sampled_from("abc")
befores = st.sampled_from(["", "x", "y", "xy"])


class StoreMachine(RuleBasedStateMachine):
    """VariantIndex and list do the same; they hold the same after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store(tokens=12, chunks=2, variants=2)
        self.naive = NaiveStore(12 * TOKEN_BYTES, 2, 2)
        self.pairs: list[tuple[Variant, NaiveVariant]] = []

    @rule(
        name=names,
        before=befores,
        tokens=st.integers(1, 4) | st.just(13),
        scored=st.booleans(),
        preprocessed=st.booleans(),
    )
    def put(self, name: str, before: str, tokens: int, scored: bool, preprocessed: bool) -> None:
        variant = make_variant(before, num_tokens=tokens, scored=scored, preprocessed=preprocessed)
        naive = NaiveVariant(chunk(name), ids(before), variant.nbytes, scored, preprocessed, 0, 0)
        taken = self.store.put(chunk(name), variant)
        assert taken == self.naive.put(naive)
        if taken:
            self.pairs.append((variant, naive))

    @rule(data=st.data(), cfo=st.sampled_from([None, 1.0, 0.5, 0.25]))
    def use(self, data: st.DataObject, cfo: float | None) -> None:
        if self.naive.variants:
            chosen = data.draw(st.sampled_from(self.naive.variants))
            self.naive.use(chosen, cfo)
            self.store.use(next(variant for variant, naive in self.pairs if naive is chosen), cfo)

    @rule()
    def use_what_has_left(self) -> None:
        for variant, naive in self.pairs:
            if naive not in self.naive.variants:
                self.store.use(variant, None)

    @invariant()
    def same(self) -> None:
        self.store.check_integrity()
        assert self.store.stats().num_bytes == sum(naive.nbytes for naive in self.naive.variants)
        assert self.store.stats().num_variants == len(self.naive.variants)
        assert self.store.stats().num_evicted == len(self.naive.evicted)
        for name in "abc":
            expected = [(v.prefix, v.reuse) for v in self.naive.variants if v.identity == chunk(name)]
            assert [(v.prefix, v.reuse) for v in self.store.find(chunk(name))] == expected


TestStoreMachine: Any = StoreMachine.TestCase
TestStoreMachine.settings = settings(stateful_step_count=30)
