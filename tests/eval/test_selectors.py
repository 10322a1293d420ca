"""The selectors that the papers compare with;
what holds for all is in tests/sglang_chunkcache/fusion/selectors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from sglang_chunkcache.fusion.selectors.base import Evidence  # noqa: E402
from sglang_chunkcache.own_selectors import own_selectors  # noqa: E402
from tests.reference.moved_chunks import as_lists, make_chunk, make_scores  # noqa: E402
from tests.reference.sources import make_request  # noqa: E402

ROOT = Path(__file__).parents[2]
OWN = own_selectors("eval.selectors")


def test_h2o_takes_what_is_attended_most() -> None:
    """By what a token receives inside the chunk, not by what it looks at outside."""
    scores = make_scores(context=[9, 9, 0, 0, 0], received=[1, 2, 5, 3, 4])
    chunks = [make_chunk("a", 3, 5, scores=scores)]
    selection = OWN["h2o"].select(chunks, make_request(ratio=0.4), Evidence())
    assert as_lists(selection) == [[2, 4]]


def test_set_reuses_behind_the_same_chunks_alone() -> None:
    """In any order; more before it is another set, as is fewer."""
    chunks = [
        make_chunk("d", 0, 3, old="ab", new="ba"),
        *(make_chunk("d", 0, 3, old=old, new="ab") for old in ("abc", "a", "")),
        replace(make_chunk("d", 0, 3), other_head=True),
        make_chunk("d", 0, 3),
    ]
    selection = OWN["set"].select(chunks, make_request(ratio=0.9999), Evidence())
    assert as_lists(selection) == [[], *[[0, 1, 2]] * 4, []]


def drawn(name: str, start: int, recipe: str) -> list[int]:
    chunks, request = [make_chunk(name, start, 1000)], make_request(ratio=0.1, recipe=recipe)
    return as_lists(OWN["random"].select(chunks, request, Evidence()))[0]


def test_random_depends_on_recipe_and_chunk_alone() -> None:
    """And not on the chunk's place in the prompt."""

    assert drawn("a", 0, "r") == drawn("a", 50, "r")
    assert drawn("a", 0, "r") != drawn("a", 0, "s")
    assert drawn("a", 0, "r") != drawn("b", 0, "r")
    assert max(drawn("a", 0, "r")) > 500  # over the whole chunk


def test_random_agrees_between_processes() -> None:
    """Each tensor-parallel rank is one, with its own hash seed."""
    code = "from tests.eval.test_selectors import drawn; print(drawn('a', 0, 'r'))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == str(drawn("a", 0, "r"))
