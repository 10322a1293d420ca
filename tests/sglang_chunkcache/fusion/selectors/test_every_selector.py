"""What holds for all selectors: names, needs, counts, ranges, repeatability,
and what they do without what they choose by."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from radix_ext.fusion_request import NEEDS
from sglang_chunkcache.config import SELECTORS
from sglang_chunkcache.fusion import selectors
from sglang_chunkcache.fusion.selectors.base import (
    Evidence,
    MovedChunk,
    Selection,
    Selector,
)
from sglang_chunkcache.fusion.selectors.focus import focused_chunks, spare_unfocused
from sglang_chunkcache.own_selectors import own_selectors
from tests.examples import examples
from tests.reference.moved_chunks import as_lists, cases, make_chunk, make_scores
from tests.reference.sources import make_request

Case = tuple[list[MovedChunk], Evidence]
PER_CHUNK = ("first", "random", "h2o")
JOINT = ("deviation", "query", "prophet", "critical")
OURS_AND_EVALS = (*SELECTORS, *own_selectors("eval.selectors"))
BY_RATIO = (*PER_CHUNK, *JOINT, "context")
ratios = st.integers(0, 20).map(lambda twentieths: Fraction(twentieths, 20))


def get(name: str) -> Selector:
    return selectors.get(name, "eval.selectors")


def select(name: str, case: Case, ratio: float | Fraction = 0.15) -> Selection:
    chunks, evidence = case
    return get(name).select(chunks, make_request(name, float(ratio)), evidence)


@pytest.mark.parametrize("name", SELECTORS)
def test_each_name_has_its_selector(name: str) -> None:
    selector = get(name)
    assert isinstance(selector, Selector)
    assert selector.name == name
    assert f"| `{name}` |" in (Path(selectors.__file__).parent / "README.md").read_text(
        encoding="utf-8"
    )


def test_unknown_names_are_refused() -> None:
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
    """The same on every rank. Per chunk the count rounds up in each, joint ones once."""
    chunks, selection = case[0], select(name, case, ratio)
    chosen = as_lists(selection)
    assert len(chosen) == len(selection.cfo) == len(chunks)
    for chunk, offsets, each in zip(chunks, selection.offsets, chosen, strict=True):
        assert (offsets.dtype, offsets.dim(), offsets.device.type) == (torch.int64, 1, "cpu")
        assert each == sorted(set(each))
        assert all(0 <= offset < chunk.num_tokens for offset in each)
    assert as_lists(select(name, case, ratio)) == chosen
    lens = [chunk.num_tokens for chunk in chunks]
    if name in PER_CHUNK:
        assert list(map(len, chosen)) == [ceil(ratio * num_tokens) for num_tokens in lens]
    if name in JOINT:
        assert sum(map(len, chosen)) == ceil(ratio * sum(lens))
    if name == "none":
        assert (chosen, selection.fallbacks) == ([[]] * len(chunks), ())
        assert selection.cfo == (None,) * len(chunks)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's, each a launch on a device."""

    number: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OURS_AND_EVALS)
def test_a_longer_prompt_takes_no_more_operations(name: str) -> None:
    def count(chunk_len: int) -> int:
        chunks = []
        for number, letter in enumerate("abc"):
            looks, received, outward = torch.rand(3, chunk_len).tolist()
            scores = make_scores([0.5], [4], context=looks, received=received)
            start = number * chunk_len
            chunks.append(
                make_chunk(letter, start, chunk_len, old="x", scores=scores, outward=outward)
            )
        question, deviation = torch.rand(2, 3 * chunk_len)
        request = make_request(name, 0.15)
        seen: Operations = Operations()  # type: ignore[no-untyped-call]
        with seen:
            get(name).candidates(chunks, request, Evidence(question=question))
            evidence = Evidence(question=question, deviation=deviation)
            assert get(name).select(chunks, request, evidence).tokens is not None
        return seen.number

    torch.manual_seed(0)
    assert count(2000) == count(20)


@pytest.mark.parametrize("above", [None, 0.5])
@pytest.mark.parametrize("name", OURS_AND_EVALS)
def test_a_device_is_not_asked(name: str, above: float | None) -> None:
    """How many tokens there are is known without what is chosen: torch's meta device has nothing to
    tell."""
    scores = make_scores([0.5], [4], context=[0.0] * 20, received=[0.0] * 20)
    chunks = [
        make_chunk(letter, 20 * i, 20, old="x", scores=scores, outward=[0.0] * 20 if i else None)
        for i, letter in enumerate("abc")
    ]
    evidence = Evidence(torch.rand(60), deviation=torch.rand(60))
    question, by_layer, deviation = (
        torch.empty(shape, device="meta") for shape in ((60,), (9, 3), (60,))
    )
    on_meta = Evidence(question, deviation=deviation)
    request = replace(make_request(name, 0.3), above=above)
    named = get(name).candidates(chunks, request, on_meta)
    assert named is None or named.shape == (60,)
    selection = get(name).select(chunks, request, on_meta)
    assert selection.tokens.shape == get(name).select(chunks, request, evidence).tokens.shape
    spared = spare_unfocused(selection, focused_chunks(by_layer))
    assert (spared.tokens.device.type, spared.tokens.shape) == ("meta", selection.tokens.shape)


@pytest.mark.parametrize("name", BY_RATIO)
@given(case=cases())
@settings(max_examples=examples(40))
def test_ratio_one_is_everything_and_zero_nothing(name: str, case: Case) -> None:
    everything = [list(range(chunk.num_tokens)) for chunk in case[0]]
    assert as_lists(select(name, case, 1.0)) == everything
    assert as_lists(select(name, case, 0.0)) == [[] for _ in case[0]]


@pytest.mark.parametrize("name", OURS_AND_EVALS)
def test_no_chunks_no_selection(name: str) -> None:
    evidence = Evidence(question=torch.zeros(4), deviation=torch.zeros(4))
    selection = select(name, ([], evidence))
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
    selection = select(name, ([make_chunk("a", 0, 4), make_chunk("b", 4, 6)], Evidence()), 0.5)
    assert as_lists(selection) == [[0, 1], [0, 1, 2]]
    assert (selection.fallbacks, selection.cfo) == ((reason,), (None, None))


def test_first_takes_a_fixed_number_whatever_the_ratio() -> None:
    chunks = [make_chunk("a", 0, 2), make_chunk("b", 2, 9)]
    for number, expected in ((3, [[0, 1], [0, 1, 2]]), (0, [[], []])):
        request = replace(make_request("first", 1.0), tokens=number)
        assert as_lists(get("first").select(chunks, request, Evidence())) == expected


@pytest.mark.parametrize("name", ["h2o", "context"])
def test_unscored_chunks_give_their_first_tokens(name: str) -> None:
    """That chunk only, and named once. A reason that is always there would say nothing."""
    scored = make_scores(context=[0, 0, 0, 1], received=[0, 0, 0, 1])
    known = make_chunk("b", 4, 4, scores=scored)
    chunks = [make_chunk("a", 0, 4), known, make_chunk("c", 8, 6)]
    selection = select(name, (chunks, Evidence()), 0.25)
    assert as_lists(selection) == [[0], [3], [0, 1]]
    assert selection.fallbacks == ("unscored",)
    assert selection.cfo[::2] == (None, None)
    assert select(name, ([known], Evidence())).fallbacks == ()


def test_scores_of_another_chunk_are_refused() -> None:
    with pytest.raises(ValueError, match="scores must be of 3 tokens"):
        make_chunk("a", 0, 3, scores=make_scores(context=[0, 1]))
    with pytest.raises(ValueError, match="scores must know 1 prefix"):
        make_chunk("a", 0, 2, old="x", scores=make_scores(context=[0, 1]))
