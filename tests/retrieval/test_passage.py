"""A passage's content: one text for encoder, BM25 and model."""

from __future__ import annotations

import pytest

from retrieval import Passage
from retrieval.passage import hash_of


def make_passage(title: str, text: str) -> Passage:
    return Passage("d#0", "d", title, text, 0, 1, 1)


@pytest.mark.parametrize(
    ("title", "text", "content"),
    [
        ("", "Solon is a town.", "Solon is a town."),
        ("Solon", "Solon is a town.", "Solon\nSolon is a town."),
        ("Solon", "# Solon\n\nA town.", "# Solon\n\nA town."),
        ("Solon", "Solon\nA town.", "Solon\nA town."),
        ("Solon", "## Trade\nBoots.", "Solon\n## Trade\nBoots."),
    ],
)
def test_content_has_the_title_once_as_a_line(title: str, text: str, content: str) -> None:
    assert make_passage(title, text).content == content


def test_content_hash_tells_titles_apart() -> None:
    """The same words under another title are another chunk to the model."""
    passages = [("Solon", "A town."), ("", "Solon\nA town."), ("Kelton", "A town.")]
    first, same, other = (hash_of(make_passage(*each).content) for each in passages)
    assert first == same != other
