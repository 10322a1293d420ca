"""VariantIndex: what it keeps, what it refuses, what it evicts first.
At the end, against a plain list."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radix_ext import IntegrityError
from radix_ext.cfo import Scored
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import RESERVED_SHARE, RESERVED_WINDOWS, Variant
from tests.examples import examples
from tests.kit.integrity import check_store
from tests.reference.naive_store import NaiveStore, NaiveVariant, num_bytes
from tests.reference.sources import Sums, ids

TOKEN_BYTES = 48
SCORE_BYTES = 8
OUTWARD_BYTES = 4


@dataclass(eq=False)
class Bytes:
    """A blob of which only the size is known."""

    nbytes: int


def chunk(name: str, tenant: str = "") -> tuple[str, str]:
    return name, tenant


def make_scores(names: str, num_tokens: int, scored: Scored) -> Sums:
    n = len(names)
    return Sums((1.0,) * n, (4,) * n, 1.0, num_tokens, SCORE_BYTES * num_tokens, scored)


def make_variant(
    names: str = "",
    *,
    num_tokens: int = 1,
    scored: Scored = Scored.NOTHING,
    preprocessed: bool = False,
    has_outward: bool = False,
) -> Variant:
    scores = make_scores(names, num_tokens, scored) if scored else None
    outward = Bytes(OUTWARD_BYTES * num_tokens) if has_outward else None
    blob = Bytes(TOKEN_BYTES * num_tokens)
    return Variant(ids(names), blob, scores=scores, preprocessed=preprocessed, outward=outward)


def make_store(
    *, tokens: int = 100, chunks: int = 100, variants: int = 100, window: int = 1000
) -> VariantIndex:
    return VariantIndex(
        max_bytes=tokens * TOKEN_BYTES, max_chunks=chunks, max_variants=variants, window=window
    )


def ask(store: VariantIndex, names: str, before: str = "") -> None:
    """One request a letter."""
    for name in names:
        store.ask([(chunk(name), "", ids(before))])


def test_a_chunk_with_all_its_variants_gets_another_one_for_a_prefix_asked_for_more_often() -> None:
    """At M it takes the place of the chunk's own lowest where the store is full;
    other chunks are left alone."""
    store = make_store(tokens=3, chunks=2, variants=2)
    other, x, y = make_variant(), make_variant("x"), make_variant("y")
    for name, variant in (("b", other), ("a", x), ("a", y)):
        store.put(chunk(name), variant)
    store.held.use(x)
    ask(store, "a", "y")
    ask(store, "a", "z")
    assert not store.wants(chunk("a"), "", ids("z"))
    assert not store.put(chunk("a"), make_variant("z"))
    ask(store, "a", "z")
    assert store.put(chunk("a"), make_variant("z"))
    assert [v.prefix for v in store.find(chunk("a"))] == [ids("x"), ids("z")]
    assert store.find(chunk("b")) == (other,)


def test_exact_variant_replaces_what_is_asked_for_less_often() -> None:
    """An exact one is for its own place, a moved one for all."""
    index = VariantIndex(max_bytes=TOKEN_BYTES, max_chunks=9, max_variants=9, window=100)
    for is_exact, expected in ((True, True), (False, False)):
        index.clear()
        assert index.insert(chunk("a"), replace(make_variant("x"), is_exact=is_exact))
        for _ in range(3):
            index.ask([(chunk("a"), "", ids("y")), (chunk("b"), "", ())])
        index.ask([(chunk("a"), "", ids("x"))])
        assert not index.gains(chunk("c"), "", (), TOKEN_BYTES)
        assert index.gains(chunk("b"), "", (), TOKEN_BYTES) is expected
        assert index.gains(chunk("b"), "", ids("z"), TOKEN_BYTES) is False


def test_what_was_popular_leaves_once_the_store_has_turned_over() -> None:
    """However often it was used: nobody asks for it any more."""
    store = make_store(tokens=4)
    popular = make_variant()
    store.put(chunk("a"), popular)
    for _ in range(30):
        store.held.use(popular)
    left = next(
        n
        for n in range(1000)
        if not store.find(chunk("a")) or not store.put((n, ""), make_variant())
    )
    assert 4 * 10 < left < 4 * 30


def test_an_uncommon_corpus_leaves_room_for_live_traffic() -> None:
    """A preprocessed corpus of four times the store: half of it is reserved, until its windows are
    over."""
    store = make_store(tokens=20, window=3)
    taken = [store.put((n, ""), make_variant(preprocessed=True)) for n in range(80)]
    assert sum(taken) == 20, "what is not reserved comes as long as there is room"
    assert store.held.num_reserved == 20 * RESERVED_SHARE
    assert all(store.put((n, "live"), make_variant()) for n in range(60))
    held = [bool(store.find((n, ""))) for n in range(80)]
    assert (sum(held), store.stats().num_variants) == (10, 20)
    ask(store, "x" * (RESERVED_WINDOWS * 3))
    assert store.held.num_reserved == 0
    assert all(store.put((n, "later"), make_variant()) for n in range(20))
    assert not any(store.find((n, "")) for n in range(80))
    check_store(store)


def test_what_is_reserved_leaves_for_no_ordinary_variant() -> None:
    """Though all else stays: what is read, or has others behind it."""
    store = make_store(tokens=10)
    big, ahead = make_variant(num_tokens=6), make_variant("n", num_tokens=4, preprocessed=True)
    store.put(chunk("a"), big)
    store.put(chunk("p"), ahead)
    store.held.stay_if(lambda variant: variant is big)
    ask(store, "xxx")
    assert not store.put(chunk("x"), make_variant(num_tokens=3))
    assert store.find(chunk("p")) == (ahead,)
    check_store(store)


def test_restored_variant_goes_on_as_it_was() -> None:
    """With its priority and its uses, though nobody has asked for its chunk yet;
    nothing leaves for it."""
    store = make_store(tokens=2, variants=1)
    kept = replace(make_variant("x", preprocessed=True), priority=3.5, num_uses=2)
    assert store.restore(chunk("a"), kept)
    assert not store.restore(chunk("a"), make_variant("x"))
    assert store.restore(chunk("a"), make_variant("y"))
    assert not store.restore(chunk("b"), make_variant())
    assert store.find(chunk("a"))[0] is kept
    assert (kept.priority, kept.num_uses, kept.is_reserved) == (3.5, 2, False)
    check_store(store)


def test_what_is_restored_first_leaves_last() -> None:
    """Of equals, as before the restart. What had no room is told."""
    store, names = make_store(tokens=3, variants=1), "abcd"
    kept = [(chunk(name), make_variant()) for name in names]
    assert store.restore_all(kept) == [kept[-1][1]]
    check_store(store)
    for name, left in (("x", "ab"), ("y", "a"), ("z", "")):
        store.put(chunk(name), make_variant())
        assert "".join(each for each in names if store.find(chunk(each))) == left


def test_whoever_watches_is_told_of_all_that_comes_and_leaves() -> None:
    """By whatever way: put, replaced, evicted, dropped, restored, cleared."""
    store, told = make_store(tokens=2), list[tuple[Any, bool]]()
    store.watchers.append(lambda identity, variant, is_here: told.append((variant, is_here)))
    a, better, b, c = (
        make_variant(),
        make_variant(preprocessed=True),
        make_variant(),
        make_variant(),
    )
    store.put(chunk("a"), a)
    store.put(chunk("a"), better)
    store.restore(chunk("b"), b)
    store.put(chunk("c"), c)
    store.drop(better)
    store.drop(better)
    store.clear()
    assert told == [
        (a, True),
        (a, False),
        (better, True),
        (b, True),
        (b, False),
        (c, True),
        (better, False),
        (c, False),
    ]
    assert store.stats().num_evicted == 1
    assert list(store.held) == []


def test_a_variant_is_in_one_place_only() -> None:
    """Twice it would be counted twice and freed once."""
    store, variant = make_store(), make_variant()
    assert store.put(chunk("a"), variant)
    assert not store.put(chunk("b"), variant)
    assert store.stats().num_variants == 1


def test_what_has_left_is_freed() -> None:
    """The eviction order must not keep KV in memory."""
    store = make_store(tokens=1)
    gone = make_variant("x")
    watch = weakref.ref(gone.blob)
    store.put(chunk("a"), gone)
    del gone
    store.put(chunk("a"), make_variant("y"))
    gc.collect()
    assert watch() is None


def test_eviction_order_does_not_grow_with_replacement() -> None:
    """A store of one variant leaves an entry at each put."""
    store = make_store(tokens=1)
    for index in range(1000):
        store.put(chunk("a"), make_variant(f"{index}"))
    assert len(store.held._order) < 50
    check_store(store)


def test_clear_keeps_the_counts() -> None:
    """Metrics are counters."""
    store, variant = make_store(), make_variant()
    store.put(chunk("a"), variant)
    store.held.use(variant)
    store.clear()
    assert store.find(chunk("a")) == ()
    stats = store.stats()
    assert (stats.num_chunks, stats.num_variants, stats.num_bytes) == (0, 0, 0)
    assert (stats.num_added, stats.num_uses, stats.num_evicted) == (1, 1, 0)
    store.held.use(variant)
    assert variant.num_uses == 1
    assert store.put(chunk("a"), variant)
    check_store(store)


HARMS: list[tuple[str, Callable[[VariantIndex, Variant], object]]] = [
    ("the variants count", lambda store, held: setattr(store.held, "num_bytes", 1)),
    ("over max_bytes", lambda store, held: setattr(store.held, "max_bytes", 1)),
    ("1 variants over 0", lambda store, held: setattr(store.held, "max_entries", 0)),
    ("0 variants are reserved but 1", lambda store, held: setattr(store.held, "num_reserved", 1)),
    ("0 variants listed by chunk but 1 held", lambda store, held: store._chunks.clear()),
    ("is not where", lambda store, held: setattr(held, "prefix", ids("z"))),
    ("is not where", lambda store, held: setattr(held, "serial", 7)),
    ("came with", lambda store, held: setattr(held, "scores", make_scores("", 1, Scored.ALL))),
    ("in the eviction order", lambda store, held: setattr(held, "priority", -1)),
    ("in the eviction order", lambda store, held: store.held._order.clear()),
]


@pytest.mark.parametrize(("message", "harm"), HARMS)
def test_integrity_names_each_harm(
    message: str, harm: Callable[[VariantIndex, Variant], object]
) -> None:
    """A check that never fails checks nothing."""
    store, held = make_store(), make_variant()
    store.put(chunk("a"), held)
    check_store(store)
    harm(store, held)
    with pytest.raises(IntegrityError, match=message):
        check_store(store)


names = st.sampled_from("abc")
befores = st.sampled_from(["", "x", "y", "xy"])


class StoreMachine(RuleBasedStateMachine):
    """VariantIndex and list do the same; they hold the same after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store(tokens=12, chunks=2, variants=2, window=5)
        self.naive = NaiveStore(12 * TOKEN_BYTES, 2, 2, 5)
        self.pairs: list[tuple[Variant, NaiveVariant]] = []

    @rule(
        name=names,
        before=befores,
        head=st.sampled_from(["", "", "other"]),
        num_tokens=st.integers(1, 4) | st.sampled_from([12, 13]),
        known=st.fixed_dictionaries(
            {
                "scored": st.sampled_from(Scored),
                "preprocessed": st.sampled_from([False, False, True]),
                "has_outward": st.booleans(),
            }
        ),
    )
    def put(
        self, name: str, before: str, head: str, num_tokens: int, known: dict[str, Any]
    ) -> None:
        made = make_variant(before, num_tokens=num_tokens, **known)
        variant = replace(made, head=head)
        naive = NaiveVariant(
            chunk(name),
            ids(before),
            TOKEN_BYTES * num_tokens,
            known["scored"],
            known["preprocessed"],
            head,
            SCORE_BYTES * num_tokens * bool(known["scored"]),
            OUTWARD_BYTES * num_tokens * known["has_outward"],
        )
        taken = self.store.put(chunk(name), variant)
        assert taken == self.naive.put(naive)
        if taken:
            self.pairs.append((variant, naive))

    @rule(
        asked=st.lists(
            st.tuples(names, befores), min_size=1, max_size=4, unique_by=lambda pair: pair[0]
        )
    )
    def ask(self, asked: list[tuple[str, str]]) -> None:
        places = [(chunk(name), "", ids(before)) for name, before in asked]
        self.store.ask(places)
        self.naive.ask(places)

    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        if self.naive.variants:
            chosen = data.draw(st.sampled_from(self.naive.variants))
            self.naive.use(chosen)
            self.store.held.use(next(variant for variant, naive in self.pairs if naive is chosen))

    @rule(data=st.data())
    def keep_below(self, data: st.DataObject) -> None:
        if self.naive.variants:
            chosen = data.draw(st.sampled_from(self.naive.variants))
            chosen.is_below = True
            self.store.held.set_below(
                next(variant for variant, naive in self.pairs if naive is chosen)
            )

    @rule()
    def use_what_has_left(self) -> None:
        for variant, naive in self.pairs:
            if naive not in self.naive.variants:
                self.store.held.use(variant)
                self.store.held.set_below(variant)

    @invariant()
    def same(self) -> None:
        check_store(self.store)
        assert self.store.stats().num_bytes == num_bytes(self.naive.variants)
        assert self.store.stats().num_variants == len(self.naive.variants)
        assert self.store.stats().num_evicted == len(self.naive.evicted)
        for name in "abc":
            expected = [
                (v.prefix, v.head, v.priority)
                for v in self.naive.variants
                if v.identity == chunk(name)
            ]
            assert [
                (v.prefix, v.head, v.priority) for v in self.store.find(chunk(name))
            ] == expected


TestStoreMachine: Any = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=examples(500), stateful_step_count=30)
