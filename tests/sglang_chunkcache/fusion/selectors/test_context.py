"""Which tokens Cache-Craft recomputes: by hand, then what must hold for all."""

from __future__ import annotations

from math import ceil, log
from unittest import mock

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_chunkcache.fusion.selectors import get
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk
from sglang_chunkcache.fusion.store import ChunkScores
from tests.reference.moved_chunks import as_lists, cases, make_chunk, make_scores
from tests.reference.sources import make_request

NOTHING = Evidence()
CONTEXT = get("context")


def three_quarters(num_tokens: int = 4) -> ChunkScores:
    """A chunk of CCI 0.75 after p and q: b = 1, a = log 3, three quarters of it from p,
    which is as long as q."""
    mass = num_tokens * log(3)
    context = [float(token) for token in range(num_tokens)]
    return make_scores([0.75 * mass, 0.25 * mass], [1, 1], intra=num_tokens**2, context=context)


def test_select_takes_the_most_contextualised() -> None:
    """Eq. 14: CFO = 2 * 0.1875 = 0.375, ceil(0.375 * 4) = 2 tokens."""
    chunk = make_chunk("c", 5, 4, old="pq", new="p", scores=three_quarters())
    selection = CONTEXT.select([chunk], make_request(alpha=2.0), NOTHING)
    assert as_lists(selection) == [[2, 3]]
    assert selection.cfo == pytest.approx((0.375,))


def test_alpha_rules_over_the_ratio() -> None:
    """An unscored chunk keeps to the ratio."""
    chunks = [
        make_chunk("c", 0, 4, old="pq", new="p", scores=three_quarters()),
        make_chunk("d", 4, 4),
    ]
    for ratio, rest in ((0.0, []), (1.0, [0, 1, 2, 3])):
        selection = CONTEXT.select(chunks, make_request(ratio=ratio, alpha=2.0), NOTHING)
        assert as_lists(selection) == [[2, 3], rest]


def test_a_longer_prefix_asks_no_tensor_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 chunks behind each other it would be 2,016 times."""

    def asked(old: str) -> int:
        scores = make_scores([1.0] * len(old), [4] * len(old), context=[0.0] * 4)
        chunk = make_chunk("z", 0, 4, old=old, scores=scores)
        length = mock.PropertyMock(return_value=4)
        with monkeypatch.context() as patch:
            patch.setattr(ChunkScores, "num_tokens", length)
            CONTEXT.select([chunk], make_request(ratio=0.5), NOTHING)
        return length.call_count

    assert asked("abcdefgh") == asked("a")


@given(case=cases(), ratio=st.floats(0.05, 0.95))
def test_counts_are_ceil_of_cfo(case: tuple[list[MovedChunk], Evidence], ratio: float) -> None:
    chunks, evidence = case
    assume(any(chunk.scores for chunk in chunks))
    selection = CONTEXT.select(chunks, make_request(ratio=ratio), evidence)
    for chunk, share, offsets in zip(chunks, selection.cfo, selection.offsets, strict=True):
        if chunk.scores is None:
            assert share is None
            continue
        assert share is not None
        assert len(offsets) == ceil(share * chunk.num_tokens - 1e-9) >= 1
        chosen = set(offsets.tolist())
        looks = chunk.scores.context.tolist()
        left = [mass for token, mass in enumerate(looks) if token not in chosen]
        assert max(left, default=0) <= min(looks[token] for token in chosen)
