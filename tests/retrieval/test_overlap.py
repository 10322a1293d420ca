"""CRAFT's overlap measures: the paper's example, equality with its formulas, and a real trace's figures.

CHUNKCACHE_DATA=DIR python -m pytest tests/retrieval/test_overlap.py      DIR: holds ragpulse/requests.jsonl.gz
"""

from __future__ import annotations

import gzip
import json
from itertools import takewhile
from pathlib import Path
from random import Random

import pytest

from retrieval.overlap import hit_share, prefix_share, repeated_share, total_share

PAPER = [["c1", "c4", "c5", "c6", "c7"], ["c1", "c2", "c3", "c4", "c5"]]


def slow_prefix(requests: list[list[int]], k: int) -> float:
    """The paper's formula, every pair compared."""

    def lcp(a: list[int], b: list[int]) -> int:
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))

    best = [max(lcp(ids, earlier) for earlier in requests[:i]) for i, ids in enumerate(requests) if i]
    return sum(best) / k / len(best)


def slow_total(requests: list[list[int]], k: int) -> float:
    """The paper's formula, every pair compared."""
    best = [max(len({*ids} & {*earlier}) for earlier in requests[:i]) for i, ids in enumerate(requests) if i]
    return sum(best) / k / len(best)


def test_the_papers_example() -> None:
    """One chunk lies in front in both requests, three are in both."""
    assert prefix_share(PAPER, k=5) == pytest.approx(1 / 5)
    assert total_share(PAPER, k=5) == pytest.approx(3 / 5)
    assert hit_share(PAPER) == pytest.approx(3 / 10)
    assert repeated_share(PAPER, ["a", "a"]) == pytest.approx(3 / 5)


@pytest.mark.parametrize("num_chunks", [6, 12, 40])
@pytest.mark.parametrize("seed", range(5))
def test_equal_to_the_formulas(num_chunks: int, seed: int) -> None:
    """The trie and the inverted index find the pair that comparing all pairs finds, also in lists that came out short."""
    random = Random(seed)
    requests = [random.sample(range(num_chunks), random.randint(0, 5)) for _ in range(60)]
    assert prefix_share(requests, k=5) == pytest.approx(slow_prefix(requests, 5))
    assert total_share(requests, k=5) == pytest.approx(slow_total(requests, 5))


def test_prefix_does_not_depend_on_the_order_of_full_lists() -> None:
    """So a figure needs no seed next to it; Total does."""
    random = Random(0)
    requests = [random.sample(range(7), 3) for _ in range(50)]
    backwards = requests[::-1]
    # The first request is left out of the mean, and shares nothing: the sums are equal, and so are the means.
    assert prefix_share(requests, k=3) == pytest.approx(prefix_share(backwards, k=3))


def test_short_lists_are_divided_by_k_or_by_their_length() -> None:
    """Half of k found is half a saving of what a full list costs, and all of what this one does."""
    requests: list[list[str]] = [["a", "b"], ["a", "b"], []]
    assert prefix_share(requests, k=4) == total_share(requests, k=4) == pytest.approx(1 / 4)
    assert prefix_share(requests, k=None) == total_share(requests, k=None) == pytest.approx(1.0)


def test_nothing_to_look_back_to() -> None:
    """No division by zero."""
    cases: list[list[list[str]]] = [[], [["a"]], [[], []]]
    for requests in cases:
        assert prefix_share(requests, k=None) == total_share(requests, k=None) == 0.0
        assert hit_share(requests) == repeated_share(requests, range(len(requests))) == 0.0


def test_repetition_stays_inside_a_conversation() -> None:
    """Turns of two conversations may alternate; a turn that retrieves nothing is a turn, but has no share."""
    requests = [["a", "b"], ["a"], [], ["a", "c"], ["a"], ["c", "d", "b", "e"]]
    conversations = ["x", "y", "y", "x", "y", "x"]
    assert repeated_share(requests, conversations) == pytest.approx((1 / 2 + 1 + 2 / 4) / 3)


@pytest.mark.data
def test_ragpulse_as_recorded(data_dir: Path) -> None:
    """The figures published with the trace: logged order, each list divided by its own length, repeats as turns' mean."""
    with gzip.open(data_dir / "ragpulse" / "requests.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    requests = [row["passages"] for row in rows]
    figures = (prefix_share(requests, k=None), total_share(requests, k=None), hit_share(requests))
    assert figures == pytest.approx((0.270, 0.650, 0.886), abs=0.0005)
    assert repeated_share(requests, [row["session_id"] for row in rows]) == pytest.approx(0.321, abs=0.0005)
