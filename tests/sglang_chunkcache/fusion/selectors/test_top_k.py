"""Counts and top-k, and through them `query` and `deviation`, against the obvious form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from radix_ext.fusion_request import MIN_AUTO
from sglang_chunkcache.fusion.selectors import get
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, positions_of
from sglang_chunkcache.fusion.selectors.top_k import jointly_highest, leading, num_critical
from tests.reference import listed_choice
from tests.reference.moved_chunks import as_lists, by_chunk, cases, make_chunk
from tests.reference.naive_selectors import joint_top
from tests.reference.sources import make_request


def test_num_critical_rounds_up() -> None:
    """0.07 * 100 is over 7 in floating point and still 7."""
    rows = [(0.15, 10, 2), (0.07, 100, 7), (0.0, 9, 0), (1.0, 9, 9), (0.001, 9, 1), (0.5, 0, 0)]
    for ratio, num_tokens, expected in rows:
        assert num_critical(ratio, num_tokens) == expected
        assert leading(ratio, num_tokens).tolist() == list(range(expected))


@pytest.mark.parametrize(("name", "other"), [("query", "deviation"), ("deviation", "query")])
def test_top_k_is_joint(name: str, other: str) -> None:
    """The four highest of both chunks are in one; the gap at 3 and the head at 0 belong to none."""
    scores = torch.tensor([9.0, 0.1, 0.2, 9.0, 5.0, 1.0, 6.0, 7.0, 8.0, 0.0])
    fields = {"query": "question", "deviation": "deviation"}
    evidence = Evidence(**{fields[name]: scores, fields[other]: -scores})
    chunks = [make_chunk("a", 1, 2), make_chunk("b", 4, 6)]
    selection = get(name).select(chunks, make_request(name, 0.5), evidence)
    assert as_lists(selection) == [[], [0, 2, 3, 4]]
    assert selection.fallbacks == ()


@pytest.mark.parametrize("shape", [(5,), (1, 6)])
def test_short_evidence_is_refused(shape: tuple[int, ...]) -> None:
    """Slicing would quietly leave the last tokens out."""
    with pytest.raises(ValueError, match=r"evidence must be \[6\] or longer"):
        jointly_highest(torch.zeros(shape), [make_chunk("a", 2, 4)], 0.5)


@given(case=cases(), ratio=st.integers(0, 20).map(lambda twentieths: twentieths / 20))
def test_joint_equals_the_obvious_form(
    case: tuple[list[MovedChunk], Evidence], ratio: float
) -> None:
    chunks, evidence = case
    assert evidence.question is not None
    fast = by_chunk(chunks, jointly_highest(evidence.question, chunks, ratio))
    spans = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in chunks]
    assert fast == joint_top(evidence.question.tolist(), spans, ratio)


@given(
    case=cases(),
    ratio=st.sampled_from([0.2, 0.5, 1.0]),
    above=st.floats(0, 4, width=32),
)
def test_limit_equals_the_obvious_form(
    case: tuple[list[MovedChunk], Evidence], ratio: float, above: float
) -> None:
    chunks, evidence = case
    assert evidence.question is not None
    chosen = jointly_highest(evidence.question, chunks, ratio, above=above)
    spans = [(chunk.start, chunk.start + chunk.num_tokens) for chunk in chunks]
    expected = joint_top(evidence.question.tolist(), spans, ratio, above, MIN_AUTO)
    assert by_chunk(chunks, chosen) == expected


@given(case=cases(), data=st.data(), ratio=st.sampled_from([0.1, 0.3, 0.5, 0.9]))
def test_joint_choice_follows_the_chunks(
    case: tuple[list[MovedChunk], Evidence], data: st.DataObject, ratio: float
) -> None:
    """Where nothing ties, the order in which chunks are named plays no part."""
    chunks, _ = case
    end = chunks[-1].start + chunks[-1].num_tokens
    assume(end > 0)
    scores = torch.tensor(data.draw(st.permutations(range(end))), dtype=torch.float32)
    order = data.draw(st.permutations(range(len(chunks))))
    named = [chunks[i] for i in order]
    straight = by_chunk(chunks, jointly_highest(scores, chunks, ratio))
    shuffled = by_chunk(named, jointly_highest(scores, named, ratio))
    assert shuffled == [straight[i] for i in order]


@given(
    case=cases(),
    data=st.data(),
    ratio=st.sampled_from([0.1, 0.3, 0.9]),
    above=st.none() | st.floats(0, 1, width=32),
)
def test_choice_equals_that_by_lists(
    case: tuple[list[MovedChunk], Evidence],
    data: st.DataObject,
    ratio: float,
    above: float | None,
) -> None:
    """Which tokens, which positions, and what `critical` compares, in any order of chunks."""
    chunks = data.draw(st.permutations(case[0]))
    values = st.sampled_from([0.0, 0.5, 1.0, float("nan")])
    size = max(chunk.start + chunk.num_tokens for chunk in chunks)
    scores = torch.tensor(data.draw(st.lists(values, min_size=size, max_size=size)))
    chunks = [
        replace(c, outward=scores[c.start :][: c.num_tokens]) if data.draw(st.booleans()) else c
        for c in chunks
    ]
    tokens = jointly_highest(scores, chunks, ratio, above=above)
    expected = listed_choice.jointly_highest(scores, chunks, ratio, above=above)
    assert by_chunk(chunks, tokens) == [each.tolist() for each in expected]
    assert len(tokens) == num_critical(ratio, sum(chunk.num_tokens for chunk in chunks))
    selection = Selection(tokens, tuple(chunk.num_tokens for chunk in chunks), (None,))
    positions = positions_of(chunks)[selection.chosen].tolist()
    assert positions == listed_choice.positions_of(chunks, expected)
    request, evidence = make_request("critical", ratio), Evidence(question=scores)
    compared = by_chunk(chunks, get("critical").candidates(chunks, request, evidence))
    expected = listed_choice.candidates(chunks, request, evidence)
    assert compared == [each.tolist() for each in expected]
