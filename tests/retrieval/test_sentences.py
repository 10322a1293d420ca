"""Where sentences and paragraphs are told apart."""

# ruff: noqa: RUF001 (the marks of several scripts look alike)
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.sentences import find_borders


def cut(text: str) -> list[str]:
    """The text at its borders, `¶` before what begins a paragraph."""
    parts, start, paragraph = [], len(text) - len(text.lstrip()), False
    for border in find_borders(text):
        parts.append("¶" * paragraph + text[start : border.end])
        start, paragraph = border.start, border.paragraph
    return parts


@pytest.mark.parametrize(
    "marked",
    [
        "One.| Two!| Three?| Four…| Five",
        "He said “Go.”| She went (far.)| Then.",
        "“Really?” he said.| “Yes!”| “No.”",
        "It is 3.14 or v1.2.| Then 5.| Six",
        "Dr. Who met J. R. Smith of the U.S. Army vs. Mr. X.",
        "See Fig. 3 and No. 5, e.g. Paris.| No.| Not so.",
        "Takes approx. five etc. and so on.| 2020 began.",
        "all lower case.| here too.| done",
        "Tokenised text .| Next one .",
        "www.example.org/a.b?c=d.| Next.",
        "今日は。|「はい。」|元気！|Yes.",
        "यह है।| वह है।",
        "Wait...| What?!| No.",
        "  padded.| \n Text. \n",
        "one\ntwo\n\n|¶three",
        "One.\r\n\r\n|¶Two.\n \n\n |¶Three.",
        "One.\n|¶# Head. More!\n\nTwo.| Three.",
        "# Head\n## Sub\nText.\n|¶# Last. one",
        "List:|\n- a|\n- b.| C\n\n|¶1. one|\n12) two\n#tag",
        "1. First.| Second.|\n  2. Third.",
    ],
)
def test_sentences_and_paragraphs(marked: str) -> None:
    """A heading has a border before it, none after or inside it."""
    expected = [part.strip() for part in marked.split("|")]
    assert cut(marked.replace("|", "").replace("¶", "")) == expected


PIECES = ["A", "b", ". ", "!", "\n", "\n\n", " ", "# ", "- ", "1. ", "。", "”", "Dr"]


@given(st.lists(st.sampled_from(PIECES), max_size=40))
def test_borders_ascend_and_enclose_whitespace_only(pieces: list[str]) -> None:
    """Nothing between two sentences is lost, and none is empty."""
    text = "".join(pieces)
    borders = find_borders(text)
    assert (borders[-1].end, borders[-1].start) == (len(text.rstrip()), len(text))
    begin = len(text) - len(text.lstrip())
    for border in borders:
        sentence = text[begin : border.end]
        assert sentence == sentence.strip()
        assert sentence or not text.strip()
        assert not text[border.end : border.start].strip()
        begin = border.start
