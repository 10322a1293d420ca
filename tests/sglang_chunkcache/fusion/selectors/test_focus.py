"""Algorithm 1: by hand, its degenerate cases, and line by line."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_chunkcache.fusion.selectors.base import Selection
from sglang_chunkcache.fusion.selectors.focus import focused_chunks, spare_unfocused
from sglang_chunkcache.wire.report import Fallback
from tests.examples import examples
from tests.reference import listed_choice
from tests.reference.moved_chunks import make_chunk
from tests.reference.naive_selectors import predict_focused


def focused(*layers: list[float], window: int = 1) -> set[int]:
    return {*focused_chunks(torch.tensor(layers), window=window).nonzero()[:, 0].tolist()}


def test_split_by_hand() -> None:
    """Equal sums go to the earlier chunk; growth is not the widest gap."""
    # gaps 4, 1, 4 are p = 4/9, 1/9, 4/9; -p log p of the second .24, of the third .36: i* = 2
    assert focused([10, 6, 5, 1]) == {0, 1}
    # gaps 1, 5, 30: p = 1/36, 5/36, 30/36; -p log p of the second .27, of the third .15: i* = 1
    assert focused([36, 35, 30, 0]) == {0}
    # gaps 0, 5, 0, no growth anywhere, so i* = 1
    assert focused([5, 5, 0, 0]) == {0}
    assert focused([0, 5] * 50) == {1}


@pytest.mark.parametrize(
    "masses", [[], [3.0], [3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [1.0, float("nan"), 0.0, 0.0]]
)
def test_nothing_to_tell_apart_focuses_on_all(masses: list[float]) -> None:
    """No i* in an empty range, no p where all gaps are 0: no token is spared."""
    assert focused(masses, masses, window=2) == set(range(len(masses)))


def test_spare_unfocused_empties_the_others() -> None:
    offsets = tuple(torch.tensor([0, n]) for n in (1, 2, 3))
    chunks = [make_chunk(name, 0, 4) for name in "abc"]
    selection = Selection.of(chunks, offsets, (0.5, None, 1.0), (Fallback.UNSCORED,))
    spared = spare_unfocused(selection, torch.tensor([True, False, True]))
    assert [each.tolist() for each in spared.offsets] == [[0, 1], [], [0, 3]]
    assert spared.offsets[1].dtype == torch.int64
    assert (spared.cfo, spared.fallbacks) == (selection.cfo, selection.fallbacks)


@given(
    layers=st.integers(3, 6).flatmap(
        lambda k: st.lists(
            st.lists(st.integers(0, 9), min_size=k, max_size=k), min_size=1, max_size=6
        )
    ),
    window=st.integers(1, 4),
)
@settings(max_examples=examples(300))
def test_equals_the_papers_lines(layers: list[list[int]], window: int) -> None:
    """Where the paper says what to do: no layer of equal sums."""
    sums = torch.tensor(layers).cumsum(0)
    assume(bool((sums.max(1).values > sums.min(1).values).all()))
    expected, _ = predict_focused(layers, window) or (set(range(len(layers[0]))), None)
    masses = [[float(mass) for mass in layer] for layer in layers]
    assert focused(*masses, window=window) == expected


@given(
    layers=st.integers(1, 6).flatmap(
        lambda k: st.lists(
            st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, float("nan")]), min_size=k, max_size=k),
            min_size=1,
            max_size=6,
        )
    ),
    window=st.integers(1, 4),
)
@settings(max_examples=examples(300))
def test_equals_that_layer_by_layer(layers: list[list[float]], window: int) -> None:
    expected = listed_choice.focused_chunks(torch.tensor(layers), window)
    assert focused(*layers, window=window) == expected
