"""Which texts are cut into pairs of characters, and how."""

# ruff: noqa: RUF001 (the marks of several scripts look alike)
from __future__ import annotations

import sys
from unicodedata import category

import pytest

from retrieval import scripts
from retrieval.scripts import paired

tantivy = pytest.importorskip("tantivy")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("退货政策 is new", "退货 货政 政策 is new"),
        ("用Python3写，好", "用 Python3 写 ， 好"),
        ("日々の勉強", "日々 々の の勉 勉強"),
        ("ラーメン・ライス", "ラー ーメ メン ライ イス"),
        ("한국어는 쉽다", "한국 국어 어는 쉽다"),
        ("\u1112\u1161\u11ab\u1100\u116e\u11a8", "한국"),
        ("แม่น้ำ", "แม มน นำ"),
        ("ຂອງຂ້ອຍ", "ຂອ ອງ ງຂ ຂອ ອຍ"),
        ("ខ្មែរ។ខ", "ខម មែ ែរ ខ"),
        ("Élan, naïve café 3.5", "Élan, naïve café 3.5"),
        ("Привет, мир", "Привет, мир"),
    ],
)
def test_text_is_cut_into_pairs(text: str, expected: str) -> None:
    """Marks that are no letters are left out; other scripts stay as they are."""
    assert paired(text).split() == expected.split()


def test_the_tokenizer_keeps_every_pair_whole() -> None:
    """What it takes for no letter is left out, or ends a run."""
    analyzer = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).build()
    chars = map(chr, range(sys.maxunicode))
    members = [char for char in chars if scripts._RUN.match(char) and category(char) != "Cn"]
    letters = set(analyzer.analyze(" ".join(members)))
    others = {char for char in members if char not in letters}
    assert others == {char for char in members if ord(char) in scripts._FOLDED}
    for char in others:
        assert scripts._FOLDED[ord(char)] == ("" if category(char)[0] == "M" else " ")
