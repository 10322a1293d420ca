"""`Fuser` and its store: what enters it, from where, what counts as a use.
Cases of one scheduler; see test_promise.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from radix_ext import FusionRequest, chunk_id
from radix_ext.cfo import Scored
from radix_ext.costs import NOMINAL, Line, Phase
from sglang_chunkcache.config import MAX_KEPT_S, MAX_SCORED_S
from sglang_chunkcache.fusion import capture
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.fusion.fill import Captured
from sglang_chunkcache.scheduler.node import facts
from sglang_chunkcache.wire.state import CalibrationPrompt
from tests.kit.fused import Rank, sources, wheres
from tests.kit.requests import HEAD, OTHER_HEAD, QUESTION, A, B, C, D, ahead, asks, fused, rag
from tests.reference.scheduler import SCORED, FakeReq, marked


def variants(rank: Rank, chunk: list[int]) -> list[tuple[Any, ...]]:
    """(chunks before it, its tokens, how much is scored, whether preprocessed)."""
    return [(v.prefix, rank.tokens(v), v.scored, v.preprocessed) for v in rank.stored(chunk)]


def names(*chunks: list[int]) -> tuple[str, ...]:
    return tuple(map(chunk_id, chunks))


class Late:
    """A copy that arrives when told to."""

    def __init__(self, captured: Captured) -> None:
        self.captured, self.has_arrived = captured, False
        self.slots, self.arrived = captured.slots, captured.arrived

    def is_done(self) -> bool:
        return self.has_arrived

    def read(self) -> Any:
        assert self.has_arrived
        return self.captured.read()


def delay(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """All copies from now on, in the order in which they are made."""
    late: list[Late] = []
    capture = rank.fusion_pass.capture

    def delayed(captures: Any) -> Any:
        late.extend(map(Late, capture(captures)))
        return late[-len(captures) :]

    monkeypatch.setattr(rank.fusion_pass, "capture", delayed)
    return late


# What enters it


def test_a_chunk_with_all_its_variants_gets_those_that_are_asked_for() -> None:
    """Every new chain would cost a scoring pass, so behind C the second request brings it."""
    rank = Rank(capacity=100, store_variants=1)
    for before, expected in ((A, [A]), (C, [A]), (C, [A, C])):
        rank.store_chunks(before, B, keep=[1])
        assert rank.held(B) == [names(each) for each in expected]
    rank.store_chunks(D, B, keep=[1], is_preprocessing=True)
    assert [variant.preprocessed for variant in rank.stored(B)] == [False, False, True]


def test_chunks_that_have_earned_it_enter_the_store() -> None:
    """Copied behind the forward after they were computed; then no lock is left."""
    rank = Rank()
    rank.serve(rag(A, B, C, keep=[1, 2]), answer=[50])
    assert rank.num_pending == 2
    rank.forward()
    rank.check()
    assert rank.cache.protected_size() == 0
    assert variants(rank, A) == []
    assert variants(rank, B) == [(names(A), B, Scored.NOTHING, False)]
    assert variants(rank, C) == [(names(A, B), C, Scored.NOTHING, False)]


def test_what_is_stored_is_not_captured_again() -> None:
    rank = Rank(capacity=100)
    for head in (HEAD, OTHER_HEAD, HEAD):
        rank.store_chunks(A, B, head=head, keep=[1])
    assert rank.fusion_pass.num_captured == 2
    rank.store_chunks(C, B, keep=[1])
    assert rank.held(B) == [names(A), names(A), names(C)]


def test_moved_chunks_are_captured_from_their_source() -> None:
    """As they were computed, behind A: what was moved is no source, or errors would add up."""
    rank = Rank(rag(A, B))
    for _ in range(2):
        rank.store_chunks(B, D, fusion=asks())
    assert variants(rank, B) == [(names(A), B, Scored.NOTHING, False)]
    assert len(variants(rank, D)) == 1
    assert rank.fuser.stats()["store"]["dropped"] == 0


def test_a_chunk_that_is_recomputed_whole_is_a_variant_and_the_closest_is_moved() -> None:
    """Cache-Craft 3.3. Behind A and behind C, B is two variants; each is moved where it fits."""
    rank = Rank(capacity=200, **SCORED)
    for before in (A, C):
        rank.store_chunks(before, B, keep=[1], fusion=asks("set", 0.9999))
    assert variants(rank, B) == [(names(each), B, Scored.ALL, False) for each in (A, C)]
    rank.evict(1000)  # the store alone has them
    alpha = replace(asks("context", 0.15), alpha=1.0)
    for before in (A, C):
        told = rank.ask(rag(D, before, B, fusion=alpha))
        assert [each[1:4] for each in sources(told) if each[0] == 2] == [("host", 1, 1)]
    stats = rank.fuser.stats()["store"]
    assert (stats["num_chunks"], stats["num_variants"]) == (1, 2)


def test_what_waits_for_the_store_does_not_leave_first() -> None:
    """A full pool: each prompt takes the room of the one before, fused for its question alone."""
    rank = Rank(*[rag([200 + number] * 8) for number in range(8)], rag(A))
    for number in range(8):
        chunk, fusion = [100 + number] * 5, asks(recipe=f"r/question={number}")
        rank.store_chunks(D, A, chunk, keep=[2], fusion=fusion)
        assert len(variants(rank, chunk)) == 1
    assert rank.fuser.stats()["store"]["dropped"] == 0


@pytest.mark.parametrize(
    ("knobs", "selector", "scored"),
    [
        ({}, "critical", Scored.NOTHING),
        ({}, "context", Scored.MASSES),
        ({"selector": "context"}, None, Scored.MASSES),
        ({"selector": "context"}, "h2o", Scored.ALL),
        (SCORED, "context", Scored.ALL),
    ],
)
def test_what_is_scored(knobs: dict[str, Any], selector: str | None, scored: Scored) -> None:
    rank = Rank(**{"selector": "query", **knobs})
    rank.store_chunks(A, fusion=None if selector is None else asks(selector, 0.15))
    assert variants(rank, A) == [((), A, scored, False)]


def test_more_is_scored_when_it_is_asked_for() -> None:
    """Once each; an unscored variant is not copied again for those who do not read scores."""
    rank, made = Rank(capacity=200), []
    for selector in ("first", "query", "context", "first", "h2o", "context"):
        rank.store_chunks(A, fusion=asks(selector, 0.15, recipe=selector))
        made.append((rank.fusion_pass.num_captured, rank.fusion_pass.num_scored))
    assert made == [(1, 0), (1, 0), (2, 1), (2, 1), (3, 2), (3, 2)]
    assert variants(rank, A) == [((), A, Scored.ALL, False)]


# What is taken, and what counts as a use


def test_a_source_is_used_as_much_as_a_hit() -> None:
    """Every second request asks for B, never found as a prefix; the pool holds five prompts."""
    for eviction in ("reused", "lru"):
        rank = Rank(rag(A, B), capacity=80, eviction=eviction)
        for number in range(20):
            rank.serve(rag([100 + number] * 8), answer=[50])
            told = rank.ask(fused(B, fusion=asks(recipe=f"r/question={number}")))
            assert wheres(told) == ["device"]


def test_text_between_chunks_is_part_of_a_source() -> None:
    """A follow-up turn's chunk has seen a question and an answer, which is told."""
    rank = Rank(rag(A), capacity=200)
    ids = [*HEAD, *A, *QUESTION, 50, *B]
    spans = [(2, 6), (10, len(ids))]
    rank.serve(FakeReq([*ids, *QUESTION], marked(spans, namespace=str(HEAD))), answer=[50])
    assert rank.ask(fused(A, D, B)).sources[-1].other_head


def test_explain_is_no_use() -> None:
    """Nothing that is only asked for outlives what is used."""
    rank = Rank(rag(A), rag(B))
    before = facts(rank.node(HEAD, A)).used
    rank.explain(rag(A))
    assert facts(rank.node(HEAD, A)).used == before


def test_neighbors_are_plain_though_an_exact_chain_has_them() -> None:
    """B in the chain has seen A, so only A is matched; B is moved from where it stood alone."""
    rank = Rank(rag(A, B, C), rag(B))
    told = rank.ask(ahead(A, B, D))
    assert told.exact == len(HEAD) + len(A)
    assert sources(told) == [(1, "device", 0, 0, 1)]
    rank.idle()
    assert variants(rank, D) == [(names(A, B), D, Scored.NOTHING, True)]


def test_a_neighbor_is_not_used() -> None:
    """Else plain variants, moved again and again, would push out the preprocessed ones."""
    rank = Rank()
    rank.store_chunks(B)
    rank.evict(100)
    assert sources(rank.ask(ahead(A, B, D)))[-1][:2] == (1, "host")
    assert rank.store.stats().num_uses == 0


# Copies that take their time, or fail


def test_copies_that_arrive_late_are_stored_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile none is queued or stored twice, and no other batch takes memory."""
    rank = Rank(capacity=200)
    late = delay(rank, monkeypatch)
    for _ in range(2):
        rank.serve(rag(A, B, C, keep=[0, 1, 2]), answer=[50])
        rank.forward()
        assert (len(late), rank.num_pending) == (3, 3)
    rank.serve(rag(D, keep=[0]), answer=[50])
    counts = []
    for number in (1, 0, 2, 3):
        late[number].has_arrived = True
        rank.forward()
        counts.append((len(late), rank.num_pending, rank.store.stats().num_added))
    assert counts == [(3, 4, 0), (3, 2, 2), (4, 1, 3), (4, 0, 4)]
    serials = [[variant.serial for variant in rank.stored(chunk)] for chunk in (A, B, C, D)]
    assert serials == [[1], [2], [3], [4]]
    rank.check()


def test_copies_under_way_do_not_outlive_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may have changed: what was computed by the old ones must not arrive."""
    rank = Rank()
    late = delay(rank, monkeypatch)
    rank.serve(rag(A, keep=[0]), answer=[50])
    rank.forward()
    rank.flush()
    assert rank.num_pending == 0
    late[0].has_arrived = True
    rank.forward()
    assert rank.store.stats().num_added == 0
    rank.serve(rag(A, keep=[0]), answer=[50])
    rank.forward()
    assert len(late) == 2


def test_a_chunk_that_its_codec_refuses_stays_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are not finite would make others wrong. What was copied with it is stored."""
    rank = Rank(store_codec="int8")
    capture_all = rank.fusion_pass.capture

    def spoilt(captures: Any) -> Any:
        refused, *others = capture_all(captures)
        return [Captured(refused.slots, None, are_kept=[torch.tensor(False)]), *others]

    monkeypatch.setattr(rank.fusion_pass, "capture", spoilt)
    rank.serve(rag(A, B, keep=[0, 1]), answer=[50])
    rank.forward()
    assert rank.fuser.stats()["fallbacks"] == {"capture_failed": 1}
    assert [len(rank.stored(chunk)) for chunk in (A, B)] == [0, 1]
    assert rank.num_pending == 0


def test_what_could_not_be_copied_may_be_queued_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted; else it would wait for ever, and its node would stay longer than others."""
    rank = Rank()
    with monkeypatch.context() as patch:
        fail = mock.Mock(side_effect=RuntimeError("no memory"))
        patch.setattr(rank.fusion_pass, "capture", fail)
        rank.serve(rag(A, keep=[0]), answer=[50])
        rank.forward()
    assert rank.fuser.stats()["fallbacks"] == {"capture_failed": 1}
    assert (rank.num_pending, rank.stored(A)) == (0, [])
    rank.store_chunks(A)
    assert len(rank.stored(A)) == 1


# Copies that wait


def test_captures_of_one_forward_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers under way wait for it; a chunk that exceeds it alone goes alone."""
    monkeypatch.setattr(capture, "MAX_CAPTURED_TOKENS", 6)
    rank = Rank()
    rank.serve(rag(A, B, D, C, keep=[0, 1, 2, 3]), answer=[50])
    captured = []
    while rank.num_pending:
        rank.forward()
        rank.check()
        captured.append(rank.fusion_pass.num_captured)
    assert captured == [1, 2, 4]


@pytest.mark.parametrize(("knobs", "expected"), [({}, [1, 2, 4]), (SCORED, [1, 2, 3, 4])])
def test_captures_of_one_forward_are_bounded_in_time(
    knobs: dict[str, Any], expected: list[int]
) -> None:
    """By what copying them takes, and by what measuring them does."""
    rank = Rank(**knobs)
    costs = dict(NOMINAL)
    costs[Phase.LOAD] = Line(each=MAX_KEPT_S / 6.5)
    costs[Phase.QUESTION] = Line(fixed=0.9 * MAX_SCORED_S)
    rank.fusion_pass.pricing.agreed = costs
    rank.serve(rag(A, B, D, C, keep=[0, 1, 2, 3]), answer=[50])
    captured = []
    while rank.num_pending:
        rank.forward()
        captured.append(rank.fusion_pass.num_captured)
    assert captured == expected


def test_first_tokens_do_not_wait_for_captures() -> None:
    """A forward that decodes takes them; where there is none, every second prefill."""
    rank = Rank()
    for chunks, forwards in (((A, B), ((True, 0), (False, 2))), ((D, C), ((True, 2), (True, 4)))):
        rank.serve(rag(*chunks, keep=[0, 1]), answer=[50])
        for waits, expected in forwards:
            rank.fuser.after(first_tokens_wait=waits, is_ahead=False)
            assert rank.fusion_pass.num_captured == expected


def test_too_many_waiting_captures_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MAX_WAITING_CAPTURES", 2)
    rank = Rank()
    rank.serve(rag(A, B, C, keep=[0, 1, 2]))
    assert (rank.num_pending, rank.fuser.stats()["store"]["dropped"]) == (2, 1)
    rank.idle()
    assert rank.stored(C) == []
    rank.check()


def test_waiting_captures_hold_no_slots() -> None:
    """Nothing runs, so nothing captures them: a prompt that needs their slots must not wait."""
    # it ends on its first token, no forward follows
    rank = Rank(rag(A, B, C, keep=[0, 1, 2]), capacity=14)
    assert rank.serve(FakeReq(range(100, 114))) == 0
    assert rank.store.stats().num_chunks == 0
    assert rank.fuser.stats()["store"]["dropped"] == 3


# Calibration


class FakeCalibrator:
    """Needs as many slots as the first prompt has head tokens."""

    def __init__(self) -> None:
        self.found = Calibration(3, 2, ((1, 0),), figures={"places": 1})

    def num_slots(self, prompts: Any, room: int) -> int:
        if (needed := len(prompts[0].head)) > room:
            raise ValueError(f"{needed} KV slots")
        return needed

    def measure(self, prompts: Any, weights: int) -> Calibration:
        return self.found


def calibrate(rank: Rank, num_slots: int = 1) -> None:
    rank.fuser.calibrator = cast("Any", FakeCalibrator())
    rank.fuser.calibrate([CalibrationPrompt([0] * num_slots, [], [])])


def are_scored(rank: Rank) -> list[bool]:
    return [variant.scores is not None for variant in rank.store.held]


def test_calibration_makes_scores_and_fused_kv_of_before_stale() -> None:
    """What the store holds counts as not scored, and a recipe names what it was made by."""
    rank, fusion = Rank(**SCORED), FusionRequest("critical", 0.5, "r", depth=None)
    rank.store_chunks(A, B)
    assert are_scored(rank) == [True, True]
    free, held = rank.allocator.available_size(), rank.cache.evictable_size()
    with pytest.raises(ValueError, match="KV slots"):
        calibrate(rank, free + held + 1)
    assert rank.cache.evictable_size() == held
    recipe = rank.fuser.fusion_pass.calibration.resolve(fusion).recipe
    calibrate(rank, free + 1)
    assert free + held > rank.allocator.available_size() > free
    assert are_scored(rank) == [False, False]
    assert facts(rank.node(HEAD, A)).scores is None
    assert rank.fuser.fusion_pass.calibration.resolve(fusion).recipe != recipe
    assert rank.fuser.stats()["calibration"]["depth"] == 3
    rank.check()


def test_what_prefill_showed_is_stored_with_the_chunk() -> None:
    """A copy without it is replaced, once; a calibration forgets it, here and in the tree."""
    rank, shown = Rank(), torch.ones(len(A))
    rank.store_chunks(A)
    assert [variant.outward for variant in rank.stored(A)] == [None]

    def tell(req: Any, nodes: Any) -> None:
        for node in nodes:
            facts(node).outward = shown

    rank.fuser.outward.tell = tell  # type: ignore[method-assign]
    for _ in range(2):
        rank.store_chunks(A)
        assert [variant.outward is shown for variant in rank.stored(A)] == [True]
        assert rank.fusion_pass.num_captured == 2
    calibrate(rank)
    assert [variant.outward for variant in rank.stored(A)] == [None]
    assert facts(rank.node(HEAD, A)).outward is None


def test_what_waits_for_the_store_outlives_a_calibration() -> None:
    rank = Rank(rag(A, B, keep=[0, 1]), **SCORED)
    assert rank.num_pending == 2
    calibrate(rank)
    assert rank.num_pending == 2
    rank.idle()
    assert are_scored(rank) == [True, True]
    rank.check()


def test_weights_that_changed_unnoticed_are_not_calibrated_for() -> None:
    """The cache is of other weights: what is found would be kept under their name."""
    rank = Rank()
    rank.weights = -1
    with pytest.raises(ValueError, match="flush it first"):
        calibrate(rank)
    assert rank.fuser.fusion_pass.calibration == Calibration()


def test_weights_that_cannot_be_read_are_calibrated_for() -> None:
    """With --enable-memory-saver."""
    rank = Rank()
    rank.weights = cast("Any", None)
    rank.flush()
    rank.serve(ahead(A), answer=[50])
    rank.idle()
    assert rank.store.stats().num_variants == 1
    calibrate(rank)
    rank.flush()
    assert rank.store.stats().num_variants == 0
    assert rank.fuser.fusion_pass.calibration.depth == 3
