"""What is computed of a prompt equals what lists say: every selector, whatever is asked of it."""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radix_ext import ChunkId, FusionRequest, Need
from radix_ext.moved_plan import Piece, ReusePlan
from radix_ext.sources import CopyFacts, DeviceCopy
from sglang_chunkcache.config import SELECTORS, ChunkCacheConfig
from sglang_chunkcache.fusion import choosing, selectors
from sglang_chunkcache.fusion.choosing import Chooser
from sglang_chunkcache.fusion.measure import DeviationProbe, QuestionProbe
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.selectors import critical, focus
from sglang_chunkcache.fusion.selectors.base import Evidence
from sglang_chunkcache.own_selectors import own_selectors
from tests.examples import examples
from tests.reference import listed_choice
from tests.reference.moved_chunks import cases

pytestmark = pytest.mark.engine

CONFIG = ChunkCacheConfig(reuse="fused", selectors="eval.selectors")
OURS_AND_EVALS = (*SELECTORS, *own_selectors(CONFIG.selectors))
NUM_LAYERS, FAR = 4, 1000


def make_chooser() -> Chooser:
    """Of a model that measures nothing itself."""
    pool = SimpleNamespace(layer_num=NUM_LAYERS)
    runner: Any = SimpleNamespace(device="cpu", token_to_kv_pool=pool)
    pricing: Any = SimpleNamespace(timed=lambda *_: nullcontext())
    return Chooser(runner, CONFIG, pricing)


def asked(name: str) -> st.SearchStrategy[FusionRequest]:
    """Ratios 0 and 1 among them, limits, fixed numbers, alpha and focus."""
    optional: dict[str, Any] = {
        "above": st.sampled_from([None, 0.25]),
        "focus": st.sampled_from(["off", "spare"]),
    }
    if name == "context":
        optional["alpha"] = st.sampled_from([None, 0.5])
    if name == "first":
        optional["tokens"] = st.sampled_from([None, 2])
    ratios = st.sampled_from([0.0, 0.15, 0.5, 1.0])
    return st.builds(FusionRequest, st.just(name), ratios, **optional)


@st.composite
def prompts(draw: st.DrawFn, name: str, number: int) -> tuple[Move, Evidence]:
    """A request, and what measuring all of its tokens gives; its slots begin at `number * FAR`."""

    def measured(size: int) -> Tensor:
        values = st.sampled_from([0.0, 0.25, 0.5, 1.0, float("nan")])
        return torch.tensor(draw(st.lists(values, min_size=size, max_size=size)))

    chunks, _ = draw(cases())
    pieces, end = [], chunks[0].start
    for span, chunk in enumerate(chunks):
        if chunk.start > end:
            pieces.append(Piece(end, chunk.start, None, None))
        looks = measured(chunk.num_tokens) if draw(st.booleans()) else None
        facts = CopyFacts(chunk.prefix_old, scores=chunk.scores, outward=looks)
        end = chunk.start + chunk.num_tokens
        source, other_head = DeviceCopy(facts, None), draw(st.booleans())
        piece = Piece(chunk.start, end, span, source, chunk.chunk, chunk.prefix_new)
        pieces.append(replace(piece, other_head=other_head))
    if num_behind := draw(st.integers(0, 2)):
        pieces.append(Piece(end, end + num_behind, None, None))
    end += num_behind
    fusion = draw(asked(name))
    move = Move(
        plan=ReusePlan(tuple(pieces), fusion=fusion),
        fusion=fusion,
        slots=torch.arange(end) + number * FAR,
        token_ids=array("q", range(end)),
        question_ids=array("q", range(draw(st.integers(0, 2)))),
        question_start=end,
        row_index=lambda: 0,
    )
    # Layers agree: with masses of their own hardly any split would settle.
    by_layer = measured(len(chunks)).expand(NUM_LAYERS, -1)
    return move, Evidence(measured(end), by_layer, measured(end))


def listed(move: Move, told: Evidence) -> tuple[list[int], list[int] | None]:
    """Positions to compute, and which spans are focused."""
    chunks, fusion = [*map(choosing._chunk_of, move.moved)], move.fusion
    needs = selectors.get(fusion.selector, CONFIG.selectors).needs if fusion.is_choice else ()
    is_asked = fusion.is_choice and (Need.QUESTION in needs or fusion.focus != "off")
    seen = Evidence(told.question if is_asked and move.question_ids else None)
    if Need.DEVIATION in needs:
        deviation = told.deviation
        if fusion.selector == "critical":
            offsets = listed_choice.candidates(chunks, fusion, seen)
            deviation = only(deviation, listed_choice.positions_of(chunks, offsets))
        seen = replace(seen, deviation=deviation)
    chosen, focused = listed_choice.choose(chunks, fusion, seen), None
    if fusion.focus != "off" and seen.question is not None:
        assert told.question_by_layer is not None
        focused = sorted(listed_choice.focused_chunks(told.question_by_layer, focus.WINDOW))
        chosen = tuple(each if i in focused else each[:0] for i, each in enumerate(chosen))
    gaps = [p for g in move.plan.pieces if g.source is None for p in range(g.start, g.end)]
    return sorted([*listed_choice.positions_of(chunks, chosen), *gaps]), focused


def only(scores: Tensor | None, positions: Any) -> Tensor:
    assert scores is not None
    kept = torch.zeros_like(scores)
    kept[positions] = scores[positions]
    return kept


@pytest.mark.parametrize("name", OURS_AND_EVALS)
@given(data=st.data())
@settings(max_examples=examples(60))
def test_choice_equals_that_by_lists(name: str, data: st.DataObject) -> None:
    """Of two requests in one batch."""
    names = name, data.draw(st.sampled_from(OURS_AND_EVALS))
    batch = [data.draw(prompts(each, number)) for number, each in enumerate(names)]

    def question(_: Any, probes: list[QuestionProbe]) -> list[tuple[Tensor, Tensor | None]]:
        told = [batch[int(probe.kv_slots[0]) // FAR][1] for probe in probes]
        pairs = zip(told, probes, strict=True)
        return [(e.question, e.question_by_layer if p.in_all_layers else None) for e, p in pairs]  # type: ignore[misc]

    def deviation(_: Any, probes: list[DeviationProbe], **__: Any) -> list[Tensor]:
        told = [batch[int(probe.slots[0]) // FAR][1].deviation for probe in probes]
        pairs = zip(told, probes, strict=True)
        return [only(e, slice(None) if p.candidates is None else p.candidates) for e, p in pairs]

    moves = [move for move, _ in batch]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "question_evidence", question)
        patch.setattr(choosing, "deviation_evidence", deviation)
        found = make_chooser().choose(moves)
    for (move, told), positions in zip(batch, found, strict=True):
        expected, focused = listed(move, told)
        assert (positions.tolist(), move.focused) == (expected, focused)
        num_gaps = sum(p.end - p.start for p in move.plan.pieces if p.source is None)
        assert move.recomputed_len == len(expected) - num_gaps


def test_candidates_that_are_no_mask_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined with other requests' masks, numbers of tokens would mark others."""
    source = DeviceCopy(CopyFacts(()), None)
    plan = ReusePlan((Piece(0, 4, 0, source, ChunkId("a")),))
    fusion = FusionRequest("critical", 0.5)
    ids, nobody = array("q", range(4)), array("q")
    move = Move(plan, fusion, torch.arange(4), ids, nobody, 4, row_index=lambda: 0)
    numbers = torch.arange(2)
    monkeypatch.setattr(critical.Critical, "candidates", lambda *_: numbers)
    with pytest.raises(ValueError, match="candidates of critical: expected bool"):
        make_chooser().choose([move])
