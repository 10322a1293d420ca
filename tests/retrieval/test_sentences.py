"""Where sentences and paragraphs are told apart."""

# ruff: noqa: RUF001 (the marks of several scripts look alike)
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.sentences import find_borders
from retrieval.tables import find_tables


def cut(text: str) -> list[str]:
    """The text at its borders, `¶` before what begins a paragraph."""
    parts, start, paragraph = [], len(text) - len(text.lstrip()), False
    for border in find_borders(text, find_tables(text)):
        parts.append("¶" * paragraph + text[start : border.end])
        start, paragraph = border.start, border.paragraph
    return parts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four… Five", ["One.", "Two!", "Three?", "Four…", "Five"]),
        ("He said “Go.” She went (far.) Then.", ["He said “Go.”", "She went (far.)", "Then."]),
        ("“Really?” he said. “Yes!” “No.”", ["“Really?” he said.", "“Yes!”", "“No.”"]),
        ("It is 3.14 or v1.2. Then 5. Six", ["It is 3.14 or v1.2.", "Then 5.", "Six"]),
        (
            "Dr. Who met J. R. Smith of the U.S. Army vs. Mr. X.",
            ["Dr. Who met J. R. Smith of the U.S. Army vs. Mr. X."],
        ),
        (
            "See Fig. 3 and No. 5, e.g. Paris. No. Not so.",
            ["See Fig. 3 and No. 5, e.g. Paris.", "No.", "Not so."],
        ),
        (
            "Takes approx. five etc. and so on. 2020 began.",
            ["Takes approx. five etc. and so on.", "2020 began."],
        ),
        ("all lower case. here too. done", ["all lower case.", "here too.", "done"]),
        ("Tokenised text . Next one .", ["Tokenised text .", "Next one ."]),
        ("www.example.org/a.b?c=d. Next.", ["www.example.org/a.b?c=d.", "Next."]),
        ("今日は。「はい。」元気！Yes.", ["今日は。", "「はい。」", "元気！", "Yes."]),
        ("यह है। वह है।", ["यह है।", "वह है।"]),
        ("Wait... What?! No.", ["Wait...", "What?!", "No."]),
        (
            "See below. Here:\n| a. B | c |\n|---|---|\n| d. E | f! G |\n|# h | i. |\nText. More",
            [
                "See below.",
                "Here:",
                "| a. B | c |\n|---|---|\n| d. E | f! G |",
                "|# h | i. |",
                "Text.",
                "More",
            ],
        ),
        ("# Head\na | b\n-|-\nc | d\n\ne | f", ["# Head\na | b\n-|-\nc | d", "¶e | f"]),
        ("  padded. \n Text. \n", ["padded.", "Text."]),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    """Abbreviations, initials, decimals, quotations and other scripts."""
    assert cut(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n\nthree", ["one\ntwo", "¶three"]),
        ("One.\r\n\r\nTwo.\n \n\n Three.", ["One.", "¶Two.", "¶Three."]),
        ("One.\n# Head. More!\n\nTwo. Three.", ["One.", "¶# Head. More!\n\nTwo.", "Three."]),
        ("# Head\n## Sub\nText.\n# Last. one", ["# Head\n## Sub\nText.", "¶# Last. one"]),
        (
            "List:\n- a\n- b. C\n\n1. one\n12) two\n#tag",
            ["List:", "- a", "- b.", "C", "¶1. one", "12) two\n#tag"],
        ),
        ("1. First. Second.\n  2. Third.", ["1. First.", "Second.", "2. Third."]),
    ],
)
def test_paragraphs_headings_and_lists(text: str, expected: list[str]) -> None:
    """A heading has a border before it, none after or inside it; a list item begins with one."""
    assert cut(text) == expected


@given(
    st.lists(
        st.sampled_from(
            ["A", "b", ". ", "!", "\n", "\n\n", " ", "# ", "- ", "1. ", "。", "”", "Dr"]
        ),
        max_size=40,
    )
)
def test_borders_ascend_and_enclose_whitespace_only(pieces: list[str]) -> None:
    """Nothing between two sentences is lost, and none is empty."""
    text = "".join(pieces)
    borders = find_borders(text, find_tables(text))
    assert (borders[-1].end, borders[-1].start) == (len(text.rstrip()), len(text))
    begin = len(text) - len(text.lstrip())
    for border in borders:
        sentence = text[begin : border.end]
        assert sentence == sentence.strip()
        assert sentence or not text.strip()
        assert not text[border.end : border.start].strip()
        begin = border.start
