"""Token spans in characters, for each kind of tokenizer."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, processors

from retrieval.errors import RetrievalError
from retrieval.tokens import load_tokens, word_offsets
from sglang_chunkcache import bundled_model
from tests.retrieval.small_index import train_bpe


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that adds a special token, cuts off after 3 tokens and pads to 9."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    bpe = train_bpe("the cat and the hat", special_tokens=["<s>"])
    bpe.normalizer = normalizers.NFC()
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    bpe.enable_truncation(3)
    bpe.enable_padding(length=9)
    bpe.save(str(folder / "tokenizer.json"))
    return folder


def test_words_are_words_marks_and_cjk_characters() -> None:
    """Scripts without spaces count by character; a page of base64 is more than one word."""
    for text, words in {
        "It's 3.5 µm, naïve!": ["It", "'", "s", "3", ".", "5", "µm", ",", "naïve", "!"],
        "漢字かな한국어": ["漢", "字", "か", "な", "한국어"],
        "x" * 70: ["x" * 32, "x" * 32, "x" * 6],
    }.items():
        assert [text[start:end] for start, end in word_offsets(text)] == words


def test_file_tokens_are_neither_special_nor_cut_nor_padded(model_dir: Path) -> None:
    """Truncation set in tokenizer.json would hide most of a document from the splitter."""
    tokens = load_tokens(str(model_dir))
    ends = [0, 3, 7, 11, 15, 19]
    assert list(tokens.offsets("the cat and the hat")) == list(pairwise(ends))
    assert list(tokens.offsets("")) == []


def test_file_tokens_count_in_characters(model_dir: Path) -> None:
    """A character of four bytes is four tokens with one and the same span, not four characters."""
    tokens = load_tokens(str(model_dir))
    assert list(tokens.offsets("a👩b")) == [(0, 1), (1, 2), (1, 2), (1, 2), (1, 2), (2, 3)]
    spans = tokens.offsets("e\u0301 the")
    assert (spans[0][0], spans[-1]) == (0, (2, 6))


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_spans_ascend_and_lie_within_the_text(model_dir: Path, text: str) -> None:
    """The splitter searches them by bisection; normalisation reorders combining marks."""
    for tokens in (load_tokens("words"), load_tokens(str(model_dir))):
        spans = tokens.offsets(text)
        assert all(0 <= start <= end <= len(text) for start, end in spans)
        assert all(one[0] <= other[0] and one[1] <= other[1] for one, other in pairwise(spans))


def test_name_is_a_last_part_and_a_fingerprint(model_dir: Path, tmp_path: Path) -> None:
    """It stays when the model moves."""
    name = load_tokens(str(model_dir)).name
    assert re.fullmatch("tiny@.{8}", name)
    assert load_tokens(str(model_dir / "tokenizer.json")).name == name
    moved = shutil.copytree(model_dir, tmp_path / "tiny")
    assert load_tokens(str(moved)).name == name
    Tokenizer(models.BPE()).save(str(moved / "tokenizer.json"))
    assert load_tokens(str(moved)).name != name
    assert load_tokens("words").name == "words"
    assert load_tokens("bundled").name == load_tokens(str(bundled_model.model_dir())).name


def test_load_tokens_refuses_what_is_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mistake by its name; offline, a hub name that is not in the cache is one, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "bad.json").write_text("{}")
    for name, message in {
        str(tmp_path): r"no tokenizer\.json there",
        str(tmp_path / "bad.json"): r"bad\.json is not a tokenizer",
        "none.json": "no such file or folder$",
        "no-such-user/no-such-model": "nor in the hub's cache, and the hub does not answer",
    }.items():
        with pytest.raises(RetrievalError, match=message):
            load_tokens(name)
