"""The splitter: nothing lost, nothing too long, sentences whole, equal to the naive one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval import splitter as splitter_module
from retrieval.errors import RetrievalError
from retrieval.passage import Document, Passage
from retrieval.splitter import MIN_TOKENS, Splitter
from retrieval.tokens import Tokens, load_tokens
from tests.examples import examples
from tests.reference.naive_splitter import NaiveSplitter
from tests.retrieval.small_index import train_bpe

WORDS = ["One", " two", " three", "Four", " of", " the", "a", "I", "Dr", " 3.14", "e.g", "x" * 40]
MARKS = [*'.!?,—")', "...", ". ", "! ", ".\n", "? ", " ", "  ", "\n", "\n\n", "\r\n", "\u00a0"]
MARKUP = ["\n# Head\n", "\n## Sub\n\n", "\n- item", "\n1. item", "\n```\n"]
SCRIPTS = ["中文字符。", "「引用。」", "ひらが", "한국어", "é", "e\u0301"]
SCRIPTS += ["👩\u200d👩\u200d👧", "🇩🇪"]
PIECES = [*WORDS, " superlongword", *MARKS, *MARKUP, *SCRIPTS, "ﬁ", "\u200b", "Ω", "הטקסט"]
CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), min_size=30, max_size=90).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=10).map("".join),
    st.text(CHARACTERS, max_size=80),
)


def make_bpe(folder: Path) -> Tokens:
    train_bpe("One two three. Four of the items, of the others!\n\n# Head\n\nOne").save(
        str(folder / "tokenizer.json")
    )
    return load_tokens(str(folder))


def make_spaced(folder: Path) -> Tokens:
    """Llama's kind: a space in front of each text, so a passage alone counts otherwise."""
    pytest.importorskip("transformers")
    from tests.reference.tiny_tokenizer import make_spaced_tokenizer

    make_spaced_tokenizer(vocab_size=400).save_pretrained(folder)
    return load_tokens(str(folder))


@pytest.fixture(scope="module", params=["words", "bpe", "spaced", "bundled"])
def tokens(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """One tokenizer of each kind."""
    if request.param in ("words", "bundled"):
        return load_tokens(request.param)
    make = {"bpe": make_bpe, "spaced": make_spaced}[request.param]
    return make(tmp_path_factory.mktemp(request.param))


def split(tokens: Tokens, text: str, max_tokens: int, overlap_tokens: int) -> list[Passage]:
    splitter = Splitter(tokens, max_tokens=max_tokens, overlap_tokens=overlap_tokens)
    return list(splitter.split(Document("d", "", text)))


def words(text: str, max_tokens: int, overlap_tokens: int = 0) -> list[str]:
    """The passages' texts, counted in words."""
    return [
        passage.text for passage in split(load_tokens("words"), text, max_tokens, overlap_tokens)
    ]


def offset(passage: Passage) -> int:
    """Where the passage begins in its document, in characters."""
    return int(passage.id.removeprefix("d#"))


def check(
    tokens: Tokens, text: str, passages: Sequence[Passage], max_tokens: int, overlap_tokens: int
) -> None:
    covered = [0] * len(text)
    for passage in passages:
        first = offset(passage)
        assert text[first : first + len(passage.text)] == passage.text == passage.text.strip() != ""
        assert len(tokens.offsets(passage.text)) == passage.num_tokens <= max_tokens
        assert 0 <= passage.start <= passage.end
        for place in range(first, first + len(passage.text)):
            covered[place] += 1
    assert all(count > 0 or char.isspace() for count, char in zip(covered, text, strict=True))
    if overlap_tokens == 0:
        assert all(count <= 1 for count in covered)
    for one, other in pairwise(passages):
        assert offset(one) < offset(other), "a start is used twice, or out of order"
        ends = [offset(each) + len(each.text) for each in (one, other)]
        assert ends[0] < ends[1], "a passage within another"
        if offset(other) < ends[0]:
            assert one.end - other.start <= overlap_tokens


@given(text=TEXTS, max_tokens=st.integers(MIN_TOKENS, 50), overlap=st.floats(0, 0.49))
@settings(max_examples=examples(60))
def test_split_keeps_every_promise_and_equals_the_naive_splitter(
    tokens: Tokens, text: str, max_tokens: int, overlap: float
) -> None:
    """Nothing lost, nothing too long, at most so much repeated."""
    limits = {"max_tokens": max_tokens, "overlap_tokens": int(overlap * max_tokens)}
    passages = split(tokens, text, **limits)
    check(tokens, text, passages, **limits)
    assert passages == NaiveSplitter(tokens, **limits).split(Document("d", "", text))


@given(text=TEXTS)
@settings(max_examples=examples(60))
def test_split_over_several_blocks_loses_nothing(tokens: Tokens, text: str) -> None:
    """A block's border may fall anywhere in a long text, and positions continue after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitter_module, "BLOCK_CHARS", 40)
        passages = split(tokens, text, 40, 10)
    check(tokens, text, passages, 40, 10)
    assert [passage.start for passage in passages] == sorted(passage.start for passage in passages)


@pytest.mark.parametrize(
    ("text", "limits", "expected"),
    [
        ("One two three. Four five six. Seven.", (8,), ["One two three. Four five six.", "Seven."]),
        ("A b c d. F g. H i. J k l m n.", (11, 5), ["A b c d. F g. H i.", "H i. J k l m n."]),
        ("A b c d e. F g. H i j k l m n.", (10, 4), ["A b c d e. F g.", "H i j k l m n."]),
        ("One two three.\n\nFour. Five six.", (8,), ["One two three.", "Four. Five six."]),
        ("One.\n\nFour five. Six seven eight.", (8,), ["One.\n\nFour five.", "Six seven eight."]),
        ("One two three.\n\n# Head\n\nFive six.", (8,), ["One two three.", "# Head\n\nFive six."]),
        ("a b c d e\nf g h i j\nk l m n o", (12,), ["a b c d e\nf g h i j", "k l m n o"]),
        ("a b c d e f g h i j k l", (8, 3), ["a b c d e f g h", "f g h i j k l"]),
        ("-" * 20, (8,), ["-" * 8, "-" * 8, "-" * 4]),
        (" \n\t\u3000 ", (8,), []),
    ],
)
def test_split_cuts_where_a_reader_would(
    text: str, limits: tuple[int, ...], expected: list[str]
) -> None:
    """Sentences, else lines, else words; headings keep company."""
    assert words(text, *limits) == expected


@pytest.mark.parametrize(
    ("max_tokens", "overlap_tokens"), [(7, 0), (0, 0), (8, 4), (8, -1), (9, 5)]
)
def test_splitter_refuses_limits_out_of_range(max_tokens: int, overlap_tokens: int) -> None:
    """An overlap of half a passage would not get ahead."""
    with pytest.raises(RetrievalError, match="tokens, got"):
        Splitter(load_tokens("words"), max_tokens=max_tokens, overlap_tokens=overlap_tokens)


def test_split_refuses_a_character_that_no_passage_holds() -> None:
    """Rather than breaking the limit, or looping."""

    def bits(text: str) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in range(len(text)) for _ in range(21)]

    with pytest.raises(RetrievalError, match="'d': the character 'a' has more than 20 tokens"):
        split(Tokens("bits", bits), "ab", 20, 5)


UNITS = ["word ", "Short one. ", ".", "\n", "x", "a\n\n", "# h\n", "- i\n", "é", '."', ". ", "中。"]


@pytest.mark.parametrize("unit", UNITS)
def test_split_takes_linear_time(unit: str) -> None:
    """Eight times the text takes eight times as long; by a quadratic rule, 64."""

    def seconds(num_chars: int) -> float:
        text = "Start " + unit * (num_chars // len(unit))
        began = time.process_time()
        assert split(load_tokens("words"), text, 128, 16)
        return time.process_time() - began

    long, short = splitter_module.BLOCK_CHARS, splitter_module.BLOCK_CHARS // 8
    # a busy machine stretches some
    assert any(seconds(long) < 30 * seconds(short) for _ in range(5))
