"""`Fuser` and its store: what enters it, from where, what counts as a use.
Cases of one scheduler; see test_promise.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("sglang")

from radix_ext import FusionRequest, chunk_id
from radix_ext.cfo import Scored
from sglang_chunkcache.fusion import capture
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.fusion.fill import Captured
from sglang_chunkcache.scheduler.node import ChunkIdentity, facts
from sglang_chunkcache.storage.codec import CODECS
from sglang_chunkcache.wire.spans import unpack
from sglang_chunkcache.wire.state import CalibrationPrompt, ExplainRequest
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.scheduler import SCORED, SECRET, FakeReq, marked
from tests.sglang_chunkcache.fusion.test_promise import (
    HEAD,
    OTHER_HEAD,
    QUESTION,
    A,
    B,
    C,
    D,
    asks,
    finish,
    fused,
    make_scheduler,
    node_of,
    rag,
    report,
    sources,
    start_of,
)


def variants(scheduler: FusedScheduler, chunk: list[int]) -> list[tuple[Any, ...]]:
    """(chunks before it, its tokens, how much is scored, whether preprocessed)."""
    found = scheduler.store.find(ChunkIdentity(chunk_id(chunk), None, None))
    return [
        (
            v.prefix,
            [round(float(x)) for x in v.blob.read()[0][-1, :, 0, 0]],
            v.scored,
            v.preprocessed,
        )
        for v in found
    ]


class Late:
    """A copy that arrives when told to."""

    def __init__(self, captured: Captured) -> None:
        self.captured, self.has_arrived = captured, False

    def is_done(self) -> bool:
        return self.has_arrived

    def read(self) -> Any:
        assert self.has_arrived
        return self.captured.read()


def delay(scheduler: FusedScheduler, monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """All copies from now on, in the order in which they are made."""
    late: list[Late] = []
    capture = scheduler.fusion_pass.capture

    def delayed(captures: Any) -> Any:
        made = [Late(each) for each in capture(captures)]
        late.extend(made)
        return made

    monkeypatch.setattr(scheduler.fusion_pass, "capture", delayed)
    return late


def pending(scheduler: FusedScheduler) -> int:
    found: int = scheduler.fuser.stats()["store"]["pending"]
    return found


def test_chunks_that_have_earned_it_enter_the_store() -> None:
    """Asked for by the front, computed where they stand;
    copied behind the next forward, then no lock is left."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, C, keep=[1, 2]), answer=[50])
    assert scheduler.fuser.stats()["store"]["pending"] == 2
    scheduler.forward()
    scheduler.check()
    assert scheduler.cache.protected_size() == 0
    assert variants(scheduler, A) == []
    assert variants(scheduler, B) == [((chunk_id(A),), B, Scored.NOTHING, False)]
    assert variants(scheduler, C) == [((chunk_id(A), chunk_id(B)), C, Scored.NOTHING, False)]


def test_what_is_stored_is_not_captured_again() -> None:
    """Another head or another chain is another variant."""
    scheduler = make_scheduler(100)
    for head in (HEAD, OTHER_HEAD, HEAD):
        scheduler.serve(rag(A, B, head=head, keep=[1]), answer=[50])
        scheduler.idle()
    assert scheduler.fusion_pass.num_captured == 2
    scheduler.serve(rag(C, B, keep=[1]), answer=[50])
    scheduler.idle()
    assert [prefix for prefix, *_ in variants(scheduler, B)] == [
        (chunk_id(A),),
        (chunk_id(A),),
        (chunk_id(C),),
    ]


def test_moved_chunks_are_captured_from_their_source() -> None:
    """As they were computed, behind A: what was moved is no source, or errors would add up."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    for _ in range(2):
        scheduler.serve(fused(B, D, keep=[0, 1]), answer=[50])
        scheduler.idle()
    assert variants(scheduler, B) == [((chunk_id(A),), B, Scored.NOTHING, False)]
    assert len(variants(scheduler, D)) == 1
    assert scheduler.fuser.stats()["store"]["dropped"] == 0


def test_a_source_is_used_as_much_as_a_hit() -> None:
    """A and B are asked for by every second request and never found as a prefix;
    the pool holds five such prompts."""
    for eviction in ("reused", "lru"):
        scheduler = make_scheduler(80, eviction=eviction)
        scheduler.serve(rag(A, B), answer=[50])
        for number in range(20):
            scheduler.serve(rag([100 + number] * 8), answer=[50])
            req = fused(B, fusion=asks(recipe=f"r/question={number}"))
            scheduler.serve(req, answer=[50])
            assert [where for _, where, *_ in sources(req)] == ["device"]
        scheduler.check()


def test_use_of_a_copy_counts_for_its_variant() -> None:
    """f_r: B was computed behind A alone, and half of what is before it now was there."""
    scheduler = make_scheduler(200)
    scheduler.serve(rag(A, B, keep=[1]), answer=[50])
    scheduler.idle()
    for number in range(10):
        scheduler.serve(fused(D, A, B, fusion=asks(recipe=f"{number}")), answer=[50])
    (variant,) = scheduler.store.find(ChunkIdentity(chunk_id(B), None, None))
    assert variant.num_uses == 10
    assert variant.reuse >= 10


def test_latest_used_copy_is_found_first() -> None:
    """Of hundreds of copies a plan looks at a few."""
    scheduler = make_scheduler(200)
    for before in (A, C, D):
        scheduler.serve(rag(before, B), answer=[50])
    scheduler.serve(fused([9, 9], A, B), answer=[50])
    identity = ChunkIdentity(chunk_id(B), None, None)
    (latest,) = scheduler.cache.copies.find(identity, str(HEAD), 1)
    assert facts(latest).prefix == (chunk_id(A),)
    scheduler.check()


def test_what_waits_for_the_store_does_not_leave_first() -> None:
    """A full pool: each prompt takes the room of the one before,
    which was fused for its question alone."""
    scheduler = make_scheduler(60)
    for number in range(8):
        scheduler.serve(rag([200 + number] * 8), answer=[50])
    scheduler.serve(rag(A), answer=[50])
    for number in range(8):
        chunk = [100 + number] * 5
        req = fused(D, A, chunk, keep=[2], fusion=asks(recipe=f"r/question={number}"))
        scheduler.serve(req, answer=[50])
        scheduler.idle()
        assert len(variants(scheduler, chunk)) == 1
    assert scheduler.fuser.stats()["store"]["dropped"] == 0


def test_text_between_chunks_is_part_of_a_source() -> None:
    """A follow-up turn's chunk has seen a question and an answer, which is told."""
    scheduler = make_scheduler(200)
    scheduler.serve(rag(A), answer=[50])
    between = [*QUESTION, 50]
    ids = [*HEAD, *A, *between, *B]
    spans = [(2, 6), (2 + 4 + len(between), len(ids))]
    scheduler.serve(FakeReq([*ids, *QUESTION], marked(spans, namespace=str(HEAD))), answer=[50])
    req = fused(A, D, B)
    scheduler.serve(req, answer=[50])
    assert report(req).sources[-1].other_head


def test_explain_is_no_use() -> None:
    """Nothing that is only asked for outlives what is used."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A), answer=[50])
    scheduler.serve(rag(B), answer=[50])
    before = facts(node_of(scheduler, HEAD, A)).used
    req = rag(A)
    spans = unpack(req.sampling_params.custom_params, req.origin_input_ids, secret=SECRET)
    assert spans is not None
    scheduler.cache.explain(ExplainRequest(list(req.origin_input_ids), spans, None, None))
    assert facts(node_of(scheduler, HEAD, A)).used == before


def test_source_behind_another_head_is_taken_last() -> None:
    """It is told, counted by the pass, and stored as a variant of its own."""
    scheduler = make_scheduler(200)
    scheduler.serve(rag(A, B, head=OTHER_HEAD, keep=[1]), answer=[50])
    scheduler.idle()
    req = fused(D, B)
    scheduler.serve(req, answer=[50])
    assert [(each.where, each.other_head) for each in report(req).sources][1:] == [
        ("gap", False),
        ("device", True),
    ]
    scheduler.serve(rag(C, B, keep=[1]), answer=[50])
    scheduler.idle()
    req = fused(D, A, B, fusion=asks(recipe="s"))
    scheduler.serve(req, answer=[50])
    assert not any(each.other_head for each in report(req).sources if each.span == 2)
    found = scheduler.store.find(ChunkIdentity(chunk_id(B), None, None))
    assert [variant.head for variant in found] == [str(OTHER_HEAD), str(HEAD)]
    scheduler.check()


@pytest.mark.parametrize(
    ("knobs", "selector", "scored"),
    [
        ({}, None, Scored.NOTHING),
        ({}, "query", Scored.NOTHING),
        ({}, "critical", Scored.NOTHING),
        ({}, "context", Scored.MASSES),
        ({}, "h2o", Scored.ALL),
        ({"selector": "context"}, None, Scored.MASSES),
        ({"selector": "context"}, "h2o", Scored.ALL),
        (SCORED, "context", Scored.ALL),
        (SCORED, None, Scored.ALL),
    ],
)
def test_what_is_scored(knobs: dict[str, Any], selector: str | None, scored: Scored) -> None:
    """Scoring costs a prefill: what the selectors in use read, the server's and the request's."""
    scheduler = make_scheduler(**{"selector": "query", **knobs})
    req = rag(A, keep=[0], fusion=None if selector is None else asks(selector, 0.15))
    scheduler.serve(req, answer=[50])
    scheduler.idle()
    assert variants(scheduler, A) == [((), A, scored, False)]


def test_more_is_scored_when_it_is_asked_for() -> None:
    """Once each; an unscored variant is not copied again for those who do not read scores."""
    scheduler = make_scheduler(200)
    for selector, num_captured, num_scored in [
        ("first", 1, 0),
        ("query", 1, 0),
        ("context", 2, 1),
        ("first", 2, 1),
        ("h2o", 3, 2),
        ("context", 3, 2),
    ]:
        scheduler.serve(
            fused(A, keep=[0], fusion=asks(selector, 0.15, recipe=selector)), answer=[50]
        )
        scheduler.idle()
        assert (scheduler.fusion_pass.num_captured, scheduler.fusion_pass.num_scored) == (
            num_captured,
            num_scored,
        )
    assert variants(scheduler, A) == [((), A, Scored.ALL, False)]


def test_what_is_known_of_a_node_is_stored_with_it() -> None:
    """Its variant has left the store, and the next request does not ask for scores:
    they cost nothing more."""
    scheduler = make_scheduler()
    scheduler.serve(fused(A, keep=[0], fusion=asks("context", 0.15)), answer=[50])
    scheduler.idle()
    scheduler.store.clear()
    scheduler.serve(rag(A, keep=[0]), answer=[50])
    scheduler.idle()
    assert variants(scheduler, A) == [((), A, Scored.MASSES, False)]
    assert scheduler.fusion_pass.num_scored == 1


def test_f_r_counts_scored_and_unscored_variants_on_one_scale() -> None:
    """An unscored one counts 1 / CFO as well, by the estimate:
    all of its two chunks are here again, or none."""
    scheduler = make_scheduler(200)
    scheduler.serve(rag(A, C, B, keep=[2]), answer=[50])
    scheduler.idle()
    (variant,) = scheduler.store.find(ChunkIdentity(chunk_id(B), None, None))
    for chunks, cfo in (((D, A, C, B), 1 / len(B)), ((D, B), 1.0)):
        before = variant.reuse
        req = fused(*chunks, fusion=asks(recipe=str(len(chunks))))
        scheduler.serve(req, answer=[50])
        assert sources(req)[-1][-1] == pytest.approx(cfo)
        assert variant.reuse - before == pytest.approx(1 / cfo)
    assert variant.scores is None


def test_copies_that_arrive_late_are_stored_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile they count as waiting: not queued again, none stored twice,
    and no other batch takes memory on the device."""
    scheduler = make_scheduler(200)
    late = delay(scheduler, monkeypatch)
    for _ in range(2):
        scheduler.serve(rag(A, B, C, keep=[0, 1, 2]), answer=[50])
        scheduler.forward()
        assert (len(late), pending(scheduler)) == (3, 3)
    scheduler.serve(rag(D, keep=[0]), answer=[50])
    late[1].has_arrived = True
    scheduler.forward()
    assert (len(late), pending(scheduler), scheduler.store.stats().num_added) == (3, 4, 0)
    late[0].has_arrived = True
    scheduler.forward()
    assert (len(late), pending(scheduler), scheduler.store.stats().num_added) == (3, 2, 2)
    late[2].has_arrived = True
    scheduler.forward()
    assert (len(late), pending(scheduler), scheduler.store.stats().num_added) == (4, 1, 3)
    late[3].has_arrived = True
    scheduler.forward()
    assert pending(scheduler) == 0
    found = [
        scheduler.store.find(ChunkIdentity(chunk_id(chunk), None, None)) for chunk in (A, B, C, D)
    ]
    assert [[variant.serial for variant in each] for each in found] == [[1], [2], [3], [4]]
    scheduler.check()


def test_copy_of_a_node_that_has_left_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the copy holds was read before.
    Computed and queued again meanwhile, the chunk is stored once."""
    scheduler = make_scheduler()
    late = delay(scheduler, monkeypatch)
    scheduler.serve(rag(A, keep=[0]), answer=[50])
    scheduler.forward()
    scheduler.evict(100)
    scheduler.serve(rag(A, keep=[0]), answer=[50])
    while pending(scheduler):
        for each in late:
            each.has_arrived = True
        scheduler.forward()
    assert len(late) == 2
    assert variants(scheduler, A) == [((), A, Scored.NOTHING, False)]
    assert scheduler.store.stats().num_added == 1
    scheduler.check()


def test_copies_under_way_do_not_outlive_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may have changed: what was computed by the old ones must not arrive."""
    scheduler = make_scheduler()
    late = delay(scheduler, monkeypatch)
    scheduler.serve(rag(A, keep=[0]), answer=[50])
    scheduler.forward()
    scheduler.flush()
    assert pending(scheduler) == 0
    late[0].has_arrived = True
    scheduler.forward()
    assert scheduler.store.stats().num_added == 0
    scheduler.serve(rag(A, keep=[0]), answer=[50])
    scheduler.forward()
    assert len(late) == 2


def test_a_chunk_that_its_codec_refuses_stays_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are not finite would make others wrong. What was copied with it is stored."""
    scheduler = make_scheduler(store_codec="int8")
    capture_all = scheduler.fusion_pass.capture

    def spoilt(captures: Any) -> Any:
        _, *others = capture_all(captures)
        nan = torch.full((1, len(A), 1, 1), torch.nan)
        return [Captured((nan, nan), None, codec=CODECS["int8"]), *others]

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.fusion_pass, "capture", spoilt)
        scheduler.serve(rag(A, B, keep=[0, 1]), answer=[50])
        scheduler.forward()
    assert scheduler.fuser.stats()["fallbacks"] == {"capture_failed": 1}
    assert [len(variants(scheduler, chunk)) for chunk in (A, B)] == [0, 1]
    assert pending(scheduler) == 0


def test_a_chunk_that_could_not_be_copied_may_be_queued_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted; else it would wait for ever, and its node would stay longer than others."""
    scheduler = make_scheduler()

    def fail(captures: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.fusion_pass, "capture", fail)
        scheduler.serve(rag(A, keep=[0]), answer=[50])
        scheduler.forward()
    assert scheduler.fuser.stats()["fallbacks"] == {"capture_failed": 1}
    assert (pending(scheduler), variants(scheduler, A)) == (0, [])
    scheduler.serve(rag(A, keep=[0]), answer=[50])
    scheduler.idle()
    assert len(variants(scheduler, A)) == 1


def test_a_chunk_with_all_its_variants_gets_those_that_are_asked_for() -> None:
    """Every new chain would cost a scoring pass, so behind C the second request brings it.
    Preprocessed ones come in any case."""
    scheduler = make_scheduler(100, store_variants=1)
    for before, expected in ((A, [A]), (C, [A]), (C, [A, C])):
        scheduler.serve(rag(before, B, keep=[1]), answer=[50])
        scheduler.idle()
        assert [prefix for prefix, *_ in variants(scheduler, B)] == [
            (chunk_id(each),) for each in expected
        ]
    scheduler.serve(rag(D, B, keep=[1], is_preprocessing=True), answer=[50])
    scheduler.idle()
    assert [ahead for _, _, _, ahead in variants(scheduler, B)] == [False, False, True]


def test_preprocessed_chunk_is_moved_first() -> None:
    """FusionRAG: that is what it was computed for."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, keep=[1], is_preprocessing=True), answer=[50])
    scheduler.idle()
    req = fused(C, B)
    scheduler.serve(req, answer=[50])
    assert report(req).sources[-1].where == "host"
    scheduler.check()


def test_neighbors_are_plain_though_an_exact_chain_has_them() -> None:
    """B behind A in a chain has seen A, so only A is matched;
    B is moved from where it stood alone."""
    scheduler = make_scheduler()
    for chunks in ((A, B, C), (B,)):
        scheduler.serve(rag(*chunks), answer=[50])
    req = rag(A, B, D, fusion=replace(asks(fresh=[2]), plain=True), keep=[2], is_preprocessing=True)
    scheduler.serve(req, answer=[50])
    assert report(req).exact == len(HEAD) + len(A)
    assert sources(req) == [(1, "device", 0, 0, 1)]
    scheduler.idle()
    assert variants(scheduler, D) == [((chunk_id(A), chunk_id(B)), D, Scored.NOTHING, True)]
    scheduler.check()


def test_a_neighbor_is_not_used() -> None:
    """Only requests count: else plain variants, moved again and again,
    would push out the preprocessed ones."""
    scheduler = make_scheduler()
    scheduler.serve(rag(B, keep=[0]), answer=[50])
    scheduler.idle()
    scheduler.evict(100)
    req = rag(A, B, D, fusion=replace(asks(fresh=[2]), plain=True), keep=[2], is_preprocessing=True)
    scheduler.serve(req, answer=[50])
    assert sources(req)[-1][:2] == (1, "host")
    assert scheduler.store.stats().num_uses == 0


def test_chunk_preprocessed_behind_nothing_is_an_ordinary_variant() -> None:
    """It has seen no neighbour, so nothing is gained by taking it before others."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, keep=[0], is_preprocessing=True), answer=[50])
    scheduler.idle()
    assert variants(scheduler, A) == [((), A, Scored.NOTHING, False)]


def test_stored_chunk_outlives_the_tree() -> None:
    """Evicted from the pool, moved from host memory; the use is counted."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, keep=[1]), answer=[50])
    scheduler.idle()
    scheduler.evict(100)
    req = fused(C, B)
    assert scheduler.serve(req, answer=[50]) == len(HEAD) + len(C) + len(B)
    assert [source[:4] for source in sources(req)] == [
        (None, "gap", 0, 0),
        (0, "gap", 0, 0),
        (1, "host", 1, 0),
    ]
    assert scheduler.store.stats().num_uses == 1
    scheduler.check()


def test_variant_that_leaves_the_store_under_way_is_still_moved() -> None:
    """A reader holds it."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, keep=[1]), answer=[50])
    scheduler.idle()
    scheduler.evict(100)
    req = fused(B)
    start_of(scheduler, req)
    scheduler.store.clear()
    scheduler.forward()
    finish(scheduler, req)
    scheduler.check()


def test_captures_of_one_forward_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers under way wait for it; a chunk that exceeds it alone goes alone."""
    monkeypatch.setattr(capture, "MAX_CAPTURED_TOKENS", 6)
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, D, C, keep=[0, 1, 2, 3]), answer=[50])
    captured = []
    while scheduler.fuser.stats()["store"]["pending"]:
        scheduler.forward()
        scheduler.check()
        captured.append(scheduler.fusion_pass.num_captured)
    assert captured == [1, 2, 4]


def test_first_tokens_do_not_wait_for_captures() -> None:
    """A forward that decodes takes them; where there is none, every second prefill."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, keep=[0, 1]), answer=[50])
    for waits, expected in ((True, 0), (False, 2)):
        scheduler.fuser.after(first_tokens_wait=waits)
        assert scheduler.fusion_pass.num_captured == expected
    scheduler.serve(rag(D, C, keep=[0, 1]), answer=[50])
    for expected in (2, 4):
        scheduler.fuser.after(first_tokens_wait=True)
        assert scheduler.fusion_pass.num_captured == expected


def test_too_many_waiting_captures_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may earn their place another time."""
    monkeypatch.setattr(capture, "MAX_WAITING_CAPTURES", 2)
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, C, keep=[0, 1, 2]))
    assert (
        scheduler.fuser.stats()["store"]["pending"],
        scheduler.fuser.stats()["store"]["dropped"],
    ) == (2, 1)
    scheduler.idle()
    assert variants(scheduler, C) == []
    scheduler.check()


def test_waiting_captures_hold_no_slots() -> None:
    """Nothing runs, so nothing captures them:
    a prompt that needs their slots must not wait for ever."""
    scheduler = make_scheduler(14)
    scheduler.serve(rag(A, B, C, keep=[0, 1, 2]))  # ends on its first token, no forward follows
    assert scheduler.serve(FakeReq(range(100, 114))) == 0
    scheduler.check()
    assert scheduler.store.stats().num_chunks == 0
    assert scheduler.fuser.stats()["store"]["dropped"] == 3


def test_capture_evicted_and_computed_again_waits_again() -> None:
    """The old node is not taken for the new one."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, keep=[0]))
    scheduler.evict(100)
    scheduler.serve(rag(A, keep=[0]))
    scheduler.idle()
    assert len(variants(scheduler, A)) == 1
    scheduler.check()


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


def test_calibration_makes_scores_and_fused_kv_of_before_stale() -> None:
    """What the store holds counts as not scored, and a recipe names what it was made by. It evicts
    no more than it needs, and nothing where it is refused."""
    scheduler = make_scheduler(**SCORED)
    fuser, calibrator = scheduler.fuser, cast("Any", FakeCalibrator())
    fuser.calibrator = calibrator
    scheduler.serve(rag(A, B, keep=[0, 1]), answer=[50])
    scheduler.idle()
    assert [variant.scores is not None for _, variant, _ in scheduler.store._held.values()] == [
        True,
        True,
    ]
    free, held = scheduler.allocator.available_size(), scheduler.cache.evictable_size()
    with pytest.raises(ValueError, match="KV slots"):
        fuser.calibrate([CalibrationPrompt([0] * (free + held + 1), [], [])])
    assert scheduler.cache.evictable_size() == held
    recipe = fuser.fusion_pass.calibration.resolve(
        FusionRequest("critical", 0.5, "r", depth=None)
    ).recipe
    fuser.calibrate([CalibrationPrompt([0] * (free + 1), [], [])])
    assert free + held > scheduler.allocator.available_size() > free
    assert [variant.scores for _, variant, _ in scheduler.store._held.values()] == [None, None]
    assert facts(node_of(scheduler, HEAD, A)).scores is None
    assert (
        fuser.fusion_pass.calibration.resolve(
            FusionRequest("critical", 0.5, "r", depth=None)
        ).recipe
        != recipe
    )
    assert fuser.stats()["calibration"]["depth"] == 3
    scheduler.check()


def test_what_prefill_showed_is_stored_with_the_chunk() -> None:
    """A copy without it is replaced, once; a calibration forgets it, here and in the tree."""
    scheduler = make_scheduler()
    fuser, identity = scheduler.fuser, ChunkIdentity(chunk_id(A), None, None)
    scheduler.serve(rag(A, keep=[0]), answer=[50])
    scheduler.idle()
    assert [variant.outward for variant in scheduler.store.find(identity)] == [None]
    shown = torch.ones(len(A))

    def tell(req: Any, nodes: Any) -> None:
        for node in nodes:
            facts(node).outward = shown

    fuser.outward.tell = tell  # type: ignore[method-assign]
    for _ in range(2):
        scheduler.serve(rag(A, keep=[0]), answer=[50])
        scheduler.idle()
        assert [variant.outward is shown for variant in scheduler.store.find(identity)] == [True]
        assert scheduler.fusion_pass.num_captured == 2
    fuser.calibrator = cast("Any", FakeCalibrator())
    fuser.calibrate([CalibrationPrompt([0], [], [])])
    assert [variant.outward for variant in scheduler.store.find(identity)] == [None]
    assert facts(node_of(scheduler, [90, 91], A)).outward is None


def test_what_waits_for_the_store_outlives_a_calibration() -> None:
    """It is scored by the new heads."""
    scheduler = make_scheduler(**SCORED)
    scheduler.fuser.calibrator = cast("Any", FakeCalibrator())
    scheduler.serve(rag(A, B, keep=[0, 1]))
    assert pending(scheduler) == 2
    scheduler.fuser.calibrate([CalibrationPrompt([0], [], [])])
    assert pending(scheduler) == 2
    scheduler.idle()
    assert [variant.scores is not None for _, variant, _ in scheduler.store._held.values()] == [
        True,
        True,
    ]
    scheduler.check()


def test_weights_that_changed_unnoticed_are_not_calibrated_for() -> None:
    """The cache is of other weights: what is found would be kept under their name."""
    scheduler = make_scheduler()
    fuser = scheduler.fuser
    fuser.calibrator = cast("Any", FakeCalibrator())
    fuser._fingerprint = lambda: -1
    with pytest.raises(ValueError, match="flush it first"):
        fuser.calibrate([CalibrationPrompt([0], [], [])])
    assert fuser.fusion_pass.calibration == Calibration()


def test_weights_that_cannot_be_read_are_calibrated_for() -> None:
    """With --enable-memory-saver. A flush forgets what was preprocessed,
    since they may have changed, and not the calibration."""
    scheduler = make_scheduler()
    fuser, scheduler.weights = scheduler.fuser, cast("Any", None)
    scheduler.flush()
    fusion = FusionRequest("none", 0.0, "p", fresh=frozenset({0}), plain=True)
    scheduler.serve(rag(A, fusion=fusion, keep=[0], is_preprocessing=True), answer=[50])
    scheduler.idle()
    assert scheduler.store.stats().num_variants == 1
    fuser.calibrator = cast("Any", FakeCalibrator())
    fuser.calibrate([CalibrationPrompt([0], [], [])])
    scheduler.flush()
    assert scheduler.store.stats().num_variants == 0
    assert fuser.fusion_pass.calibration.depth == 3
