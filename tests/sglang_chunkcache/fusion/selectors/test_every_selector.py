"""What holds for all selectors: names, needs, counts, ranges, repeatability,
and what they do without what they choose by."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from radix_ext.fusion_request import NEEDS  # noqa: E402
from sglang_chunkcache.config import SELECTORS  # noqa: E402
from sglang_chunkcache.fusion import selectors  # noqa: E402
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selector  # noqa: E402
from sglang_chunkcache.own_selectors import own_selectors  # noqa: E402
from tests.examples import examples  # noqa: E402
from tests.reference.moved_chunks import as_lists, cases, make_chunk, make_scores  # noqa: E402
from tests.reference.sources import make_request  # noqa: E402

Case = tuple[list[MovedChunk], Evidence]
PER_CHUNK = ("first", "random", "h2o")
JOINT = ("deviation", "query", "prophet", "critical")
OURS_AND_EVALS = (*SELECTORS, *own_selectors("eval.selectors"))
BY_RATIO = (*PER_CHUNK, *JOINT, "context")
ratios = st.integers(0, 20).map(lambda twentieths: Fraction(twentieths, 20))


def get(name: str) -> Selector:
    return selectors.get(name, "eval.selectors")


@pytest.mark.parametrize("name", SELECTORS)
def test_each_name_has_its_selector(name: str) -> None:
    """In a file of that name, where the README says it is."""
    selector = get(name)
    assert isinstance(selector, Selector)
    assert selector.name == name
    assert f"| `{name}` |" in (Path(selectors.__file__).parent / "README.md").read_text(
        encoding="utf-8"
    )


def test_unknown_names_are_refused() -> None:
    """A module of the package that is no selector included."""
    for name in ("best", "base", ""):
        with pytest.raises(ValueError, match="selector must be one of none, first"):
            get(name)


def test_needs_are_declared() -> None:
    """What is not declared is not measured; what is declared in vain costs a pass."""
    assert {name: get(name).needs for name in SELECTORS if get(name).needs} == NEEDS


@pytest.mark.parametrize("name", OURS_AND_EVALS)
@given(case=cases(), ratio=ratios)
@settings(max_examples=examples(40))
def test_offsets_are_ascending_unique_and_inside(name: str, case: Case, ratio: Fraction) -> None:
    """The recompute pass relies on it; so do the ranks on the same answer twice."""
    chunks, evidence = case
    selection = get(name).select(chunks, make_request(name, float(ratio)), evidence)
    assert len(selection.offsets) == len(selection.cfo) == len(chunks)
    for chunk, offsets in zip(chunks, selection.offsets, strict=True):
        chosen = offsets.tolist()
        assert offsets.dtype == torch.int64
        assert offsets.dim() == 1
        assert offsets.device.type == "cpu"
        assert chosen == sorted(set(chosen))
        assert all(0 <= offset < chunk.num_tokens for offset in chosen)
    again = get(name).select(chunks, make_request(name, float(ratio)), evidence)
    assert as_lists(again) == as_lists(selection)


@pytest.mark.parametrize("name", BY_RATIO)
@given(case=cases())
@settings(max_examples=examples(40))
def test_ratio_one_is_everything_and_zero_nothing(name: str, case: Case) -> None:
    """The ends of every ratio curve: full prefill and full reuse."""
    chunks, evidence = case
    everything = get(name).select(chunks, make_request(name, 1.0), evidence)
    assert as_lists(everything) == [list(range(chunk.num_tokens)) for chunk in chunks]
    assert as_lists(get(name).select(chunks, make_request(name, 0.0), evidence)) == [
        [] for _ in chunks
    ]


@given(case=cases(), ratio=ratios)
@settings(max_examples=examples(10))
def test_full_reuse_recomputes_nothing(case: Case, ratio: Fraction) -> None:
    """Whatever the ratio."""
    chunks, evidence = case
    selection = get("none").select(chunks, make_request("none", float(ratio)), evidence)
    assert as_lists(selection) == [[] for _ in chunks]
    assert selection.cfo == (None,) * len(chunks)
    assert selection.fallbacks == ()


@pytest.mark.parametrize("name", PER_CHUNK)
@given(case=cases(), ratio=ratios)
@settings(max_examples=examples(40))
def test_selectors_of_one_chunk_round_up_in_each(name: str, case: Case, ratio: Fraction) -> None:
    """ceil(ratio * n), exactly."""
    chunks, evidence = case
    selection = get(name).select(chunks, make_request(name, float(ratio)), evidence)
    assert [len(offsets) for offsets in selection.offsets] == [
        ceil(ratio * chunk.num_tokens) for chunk in chunks
    ]


@pytest.mark.parametrize("name", JOINT)
@given(case=cases(), ratio=ratios)
@settings(max_examples=examples(40))
def test_joint_selectors_round_up_once(name: str, case: Case, ratio: Fraction) -> None:
    """ceil(ratio * all tokens), exactly."""
    chunks, evidence = case
    selection = get(name).select(chunks, make_request(name, float(ratio)), evidence)
    total = sum(chunk.num_tokens for chunk in chunks)
    assert sum(len(offsets) for offsets in selection.offsets) == ceil(ratio * total)


@pytest.mark.parametrize("name", OURS_AND_EVALS)
def test_no_chunks_no_selection(name: str) -> None:
    """Everything was an exact hit."""
    evidence = Evidence(question=torch.zeros(4), deviation=torch.zeros(4))
    selection = get(name).select([], make_request(name), evidence)
    assert (selection.offsets, selection.cfo, selection.fallbacks) == ((), (), ())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("query", "no_question"),
        ("prophet", "no_question"),
        ("deviation", "no_deviation"),
        ("critical", "no_deviation"),
    ],
)
def test_without_evidence_the_first_tokens(name: str, reason: str) -> None:
    """Named, not silent."""
    chunks = [make_chunk("a", 0, 4), make_chunk("b", 4, 6)]
    selection = get(name).select(chunks, make_request(name, 0.5), Evidence())
    assert as_lists(selection) == [[0, 1], [0, 1, 2]]
    assert selection.fallbacks == (reason,)
    assert selection.cfo == (None, None)


@pytest.mark.parametrize("name", ["h2o", "context"])
def test_unscored_chunks_give_their_first_tokens(name: str) -> None:
    """That chunk only, and named once."""
    scored = make_scores(context=[0, 0, 0, 1], received=[0, 0, 0, 1])
    chunks = [make_chunk("a", 0, 4), make_chunk("b", 4, 4, scores=scored), make_chunk("c", 8, 6)]
    selection = get(name).select(chunks, make_request(name, 0.25), Evidence())
    assert as_lists(selection) == [[0], [3], [0, 1]]
    assert selection.fallbacks == ("unscored",)
    assert selection.cfo[::2] == (None, None)


@pytest.mark.parametrize("name", ["h2o", "context"])
def test_scored_chunks_fall_back_on_nothing(name: str) -> None:
    """A reason that is always there says nothing."""
    chunk = make_chunk("a", 0, 2, scores=make_scores(context=[0, 1]))
    assert get(name).select([chunk], make_request(name), Evidence()).fallbacks == ()


def test_first_takes_the_head_of_each_chunk() -> None:
    """ceil(0.3 * 5) = 2 and ceil(0.3 * 10) = 3, not 3 and 0 of the prompt."""
    chunks = [make_chunk("a", 7, 5), make_chunk("b", 12, 10)]
    assert as_lists(get("first").select(chunks, make_request(ratio=0.3), Evidence())) == [
        [0, 1],
        [0, 1, 2],
    ]


def test_scores_of_another_chunk_are_refused() -> None:
    """By tokens and by prefix."""
    with pytest.raises(ValueError, match="scores must be of 3 tokens"):
        make_chunk("a", 0, 3, scores=make_scores(context=[0, 1]))
    with pytest.raises(ValueError, match="scores must know 1 prefix"):
        make_chunk("a", 0, 2, old="x", scores=make_scores(context=[0, 1]))
