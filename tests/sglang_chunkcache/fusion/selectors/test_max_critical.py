"""The slots that a plan reserves are enough for whatever a selector takes."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from radix_ext import Span
from radix_ext.moved_plan import Limits, make_plan, max_critical
from radix_ext.sources import DeviceCopy
from sglang_chunkcache.config import SELECTORS
from sglang_chunkcache.fusion import selectors
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk
from sglang_chunkcache.own_selectors import own_selectors
from sglang_chunkcache.scheduler.node import ChunkFacts
from tests.examples import examples
from tests.reference.moved_chunks import cases
from tests.reference.sources import make_request

ROOMY = Limits(max_pass_tokens=1000, max_gap_tokens=1000)


@settings(max_examples=examples(300))
@given(data=st.data(), case=cases())
def test_no_selector_takes_more_than_foreseen(data: st.DataObject, case: tuple[list[MovedChunk], Evidence]) -> None:
    """Slots are reserved for as many: of any of the chunks, at any ratio or alpha."""
    chunks, evidence = case
    fusion = make_request(
        data.draw(st.sampled_from((*SELECTORS, *own_selectors("eval.selectors")))),
        data.draw(st.sampled_from([0.0, 0.01, 0.15, 0.5, 0.9, 1.0])),
        alpha=data.draw(st.sampled_from([None, None, 0.0, 0.1, 0.5, 2.0])),
    )
    options = {
        chunk.start: DeviceCopy("node", ChunkFacts(prefix=chunk.prefix_old, scores=chunk.scores)) for chunk in chunks
    }
    spans = [Span(chunk.start, chunk.start + chunk.num_tokens, chunk.chunk) for chunk in chunks]
    by_chunk = {chunk.chunk: [options[chunk.start]] for chunk in chunks}
    plan = make_plan(
        spans,
        start=0,
        limit=spans[-1].end,
        candidates=lambda chunk, head: by_chunk[chunk],
        fusion=fusion,
        limits=ROOMY,
    )
    moved = [piece for piece in plan.pieces if piece.source is not None]
    selection = selectors.get(fusion.selector, "eval.selectors").select(chunks, fusion, evidence)
    which = data.draw(st.sets(st.integers(0, len(chunks) - 1)))
    taken = sum(len(selection.offsets[index]) for index in which)
    bound = max_critical([moved[index] for index in which], plan, fusion)
    assert taken <= bound <= sum(chunks[index].num_tokens for index in which)
    if set(which) == set(range(len(chunks))):
        assert bound <= max(taken, math.ceil(fusion.ratio * plan.moved_len)) + len(chunks) or fusion.alpha is not None
