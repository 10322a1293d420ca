"""Token spans in characters, for each kind of tokenizer."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from retrieval.errors import RetrievalError
from retrieval.tokens import WordTokens, load_tokens
from sglang_chunkcache import bundled_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE tokenizer that adds a special token,
    cuts off after 3 tokens and pads to 9."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    bpe.train_from_iterator(["the cat and the hat"] * 9, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    bpe.enable_truncation(3)
    bpe.enable_padding(length=9)
    bpe.save(str(folder / "tokenizer.json"))
    return folder


def cut(text: str) -> list[str]:
    """The text's words."""
    return [text[start:end] for start, end in WordTokens().offsets(text)]


def test_words_are_words_marks_and_cjk_characters() -> None:
    """Scripts without spaces count by character."""
    assert cut("It's 3.5 µm, naïve!") == ["It", "'", "s", "3", ".", "5", "µm", ",", "naïve", "!"]
    assert cut("漢字かな한국어") == ["漢", "字", "か", "な", "한국어"]


def test_words_are_never_longer_than_32_characters() -> None:
    """A page of base64 would otherwise count as one token, and be one passage."""
    assert [len(word) for word in cut("x" * 70)] == [32, 32, 6]


def test_file_tokens_are_neither_special_nor_cut_nor_padded(model_dir: Path) -> None:
    """Truncation set in tokenizer.json would hide most of a document from the splitter."""
    tokens = load_tokens(str(model_dir))
    assert list(tokens.offsets("the cat and the hat")) == [
        (0, 3),
        (3, 7),
        (7, 11),
        (11, 15),
        (15, 19),
    ]
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
    """An index moved with its model keeps its tokenizer's name;
    another tokenizer of the same name is noticed."""
    name = load_tokens(str(model_dir)).name
    assert name.startswith("tiny@")
    assert len(name) == len("tiny@") + 8
    assert load_tokens(str(model_dir / "tokenizer.json")).name == name
    moved = shutil.copytree(model_dir, tmp_path / "tiny")
    assert load_tokens(str(moved)).name == name
    Tokenizer(models.BPE()).save(str(moved / "tokenizer.json"))
    assert load_tokens(str(moved)).name != name
    assert load_tokens("words").name == "words"


def test_load_tokens_refuses_what_is_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mistake by its name; offline, a hub name that is not in the cache is one, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RetrievalError, match=r"no tokenizer\.json there"):
        load_tokens(str(tmp_path))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(RetrievalError, match=r"bad\.json is not a tokenizer"):
        load_tokens(str(tmp_path / "bad.json"))
    for name in (str(tmp_path / "none"), "none.json", "./none"):
        with pytest.raises(RetrievalError, match=r"no such file or folder$"):
            load_tokens(name)
    with pytest.raises(
        RetrievalError,
        match="no such file or folder here nor in the hub's cache, and the hub does not answer",
    ):
        load_tokens("no-such-user/no-such-model")


def test_bundled_is_the_bundled_models_tokenizer() -> None:
    """By the name that `--model-path` takes, from any working directory."""
    assert load_tokens("bundled").name == load_tokens(str(bundled_model.model_dir())).name
