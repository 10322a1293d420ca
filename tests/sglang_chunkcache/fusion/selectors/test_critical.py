"""`critical`: what it compares, and that it takes what deviates most of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radix_ext.fusion_request import BY_CONTEXT, BY_QUESTION
from sglang_chunkcache.fusion.selectors import get
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk
from tests.examples import examples
from tests.reference.moved_chunks import as_lists, by_chunk, cases, make_chunk
from tests.reference.naive_selectors import joint_top
from tests.reference.sources import make_request

CRITICAL = get("critical")


def compared(chunks: Sequence[MovedChunk], ratio: float, evidence: Evidence) -> list[list[int]]:
    request = make_request("critical", ratio)
    return by_chunk(chunks, CRITICAL.candidates(chunks, request, evidence))


@given(case=cases(), data=st.data(), ratio=st.sampled_from([0.05, 0.15, 0.3, 0.6]))
@settings(max_examples=examples(60))
def test_what_context_and_question_propose_is_compared(
    case: tuple[list[MovedChunk], Evidence], data: st.DataObject, ratio: float
) -> None:
    """Of known chunks what looks outward most, of all what the question looks at, all of others."""
    chunks, evidence = case
    values = st.lists(st.integers(0, 3).map(float), min_size=12, max_size=12)
    chunks = [
        replace(c, outward=torch.tensor(data.draw(values)[: c.num_tokens])) if c.scores else c
        for c in chunks
    ]
    assert evidence.question is not None
    outward = torch.zeros(len(evidence.question))
    for chunk in chunks:
        if chunk.outward is not None:
            outward[chunk.start : chunk.start + chunk.num_tokens] = chunk.outward

    def top(scores: Tensor, of: Sequence[MovedChunk], share: float) -> list[list[int]]:
        spans = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in of]
        return joint_top(scores.tolist(), spans, min(1.0, max(1.0, 2 * ratio / BY_CONTEXT) * share))

    known = [chunk for chunk in chunks if chunk.outward is not None]
    looking, asked = (
        iter(top(outward, known, BY_CONTEXT)),
        top(evidence.question, chunks, BY_QUESTION),
    )
    found = compared(chunks, ratio, evidence)
    for chunk, offsets, by_question in zip(chunks, found, asked, strict=True):
        expected = range(chunk.num_tokens) if chunk.outward is None else next(looking)
        assert offsets == sorted({*expected, *by_question})


def test_without_a_question_the_context_proposes() -> None:
    chunk = make_chunk("a", 3, 10, outward=[0, 0, 9, 0, 8, 0, 0, 7, 0, 0])
    assert compared([chunk], 0.1, Evidence()) == [[2, 4, 7]]


def test_taken_is_what_deviates_most() -> None:
    """A chunk of which nothing is known was compared whole."""
    known = make_chunk("a", 0, 4, outward=[1, 2, 3, 4])
    deviation = torch.tensor([0.0, 0.0, 5.0, 3.0, 4.0, 0.0])
    request = make_request("critical", 0.5)
    selection = CRITICAL.select(
        [known, make_chunk("b", 4, 2)], request, Evidence(deviation=deviation)
    )
    assert (as_lists(selection), selection.fallbacks) == ([[2, 3], [0]], ())
