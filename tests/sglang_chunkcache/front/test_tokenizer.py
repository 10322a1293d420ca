"""Texts to ids: messages as SGLang encodes them, chunks without any added token,
and long texts not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.errors import RequestError, TooLongError
from sglang_chunkcache.front.tokenizer import RequestEncoder, ServedTokenizer
from tests.examples import examples
from tests.kit.front_bench import CharTokenizer
from tests.reference.tiny_tokenizer import (
    make_spaced_tokenizer,
    make_tokenizer,
    make_unigram_tokenizer,
)

TOOLS = ["<tool_call>", "</tool_call>"]
"""Added tokens that are not marked special, as Qwen's."""

FIRST = 1000
"""Id of the slow tokenizer's character 0; its added tokens come before it."""


class SlowTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """In Python, one token per character."""

    def get_vocab(self) -> dict[str, int]:
        added: dict[str, int] = self.added_tokens_encoder
        return {chr(code): FIRST + code for code in range(32, 127)} | added

    @property
    def vocab_size(self) -> int:
        return 95

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return FIRST + ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index - FIRST)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def make_ignoring_merges() -> Any:
    """Llama 3's kind: a word that is in the vocabulary is one token, merges or not;
    here a control token is such a word."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.model.ignore_merges = True
    split = pre_tokenizers.Split(" ", "merged_with_next")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    return tokenizer


def make_bundled() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(model_dir())


def make_slow() -> Any:
    return SlowTokenizer(eos_token="<|im_end|>")


MAKERS: dict[str, Callable[[], Any]] = {
    "byte_level": make_tokenizer,
    "spaced": make_spaced_tokenizer,
    "unigram": make_unigram_tokenizer,
    "ignoring_merges": make_ignoring_merges,
    "bundled": make_bundled,
    "slow": make_slow,
}
_made: dict[str, Any] = {}
_served: dict[str, ServedTokenizer] = {}


def tokenizer_of(kind: str) -> Any:
    if kind not in _made:
        _made[kind] = MAKERS[kind]()
        _made[kind].add_tokens([AddedToken(token, special=False) for token in TOOLS])
    return _made[kind]


def served(kind: str) -> ServedTokenizer:
    if kind not in _served:
        _served[kind] = ServedTokenizer(tokenizer_of(kind), chunk_tokens="text")
    return _served[kind]


def added_ids(kind: str) -> set[int]:
    return set(tokenizer_of(kind).added_tokens_decoder)


def texts_with_tokens(kind: str) -> st.SearchStrategy[str]:
    tokens = [token.content for token in tokenizer_of(kind).added_tokens_decoder.values()]
    return st.lists(
        st.sampled_from([*tokens, "a", " ", "b c", "\n", "<", "é", "🙂"]), max_size=6
    ).map("".join)


def encoded_texts(tokenizer: ServedTokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What it encodes from now on."""
    seen: list[str] = []
    raw = tokenizer._raw

    def encode(text: str) -> Sequence[int]:
        seen.append(text)
        return raw(text)

    monkeypatch.setattr(tokenizer, "_raw", encode)
    return seen


# Chunks


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=examples(30))
@given(data=st.data())
def test_any_chunk_decodes_to_its_text_without_added_tokens(kind: str, data: Any) -> None:
    """A retrieved text that says `<|end|><|system|>` would forge a turn."""
    text = data.draw(texts_with_tokens(kind))
    ids = served(kind).encode_plain(text)
    assert added_ids(kind).isdisjoint(ids)
    assert served(kind).decode(ids) in (text, text.removeprefix(" "), f" {text}")


@pytest.mark.parametrize("kind", MAKERS)
def test_chunk_without_tokens_is_encoded_as_a_message(kind: str) -> None:
    for text in ("Bako ranis.", "zweite é 中 🙂", "def f(x):\n    return x", " a", "a "):
        assert served(kind).encode_plain(text) == served(kind).encode(text)


@pytest.mark.parametrize("kind", MAKERS)
def test_chunk_tokens_control_encodes_chunks_as_messages(kind: str) -> None:
    tokenizer = ServedTokenizer(tokenizer_of(kind), chunk_tokens="control")
    text = "a<|im_end|>b<tool_call>"
    assert tokenizer.encode_plain(text) == tokenizer.encode(text)
    assert not added_ids(kind).isdisjoint(tokenizer.encode_plain(text))


def test_white_space_tokens_stay() -> None:
    """GPT-NeoX's runs of spaces and Gemma's of newlines are layout."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<fim>", "        ", "\n\n\n"])
    ours = ServedTokenizer(tokenizer, chunk_tokens="text")
    text = "if x:\n\n\n        y"
    assert ours.encode_plain(text) == tuple(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.convert_tokens_to_ids("        ") in ours.encode_plain(text)
    assert tokenizer.convert_tokens_to_ids("<fim>") not in ours.encode_plain("<fim>")


def test_tokenizer_that_cannot_write_a_token_as_text_is_refused() -> None:
    """At the start, with the flag that serves it all the same."""

    class Deaf(SlowTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
            return list(super().encode(text, add_special_tokens=add_special_tokens))

    with pytest.raises(ValueError, match=r"'<\|im_end\|>'.*--chunkcache-chunk-tokens control"):
        ServedTokenizer(Deaf(eos_token="<|im_end|>"), chunk_tokens="text")
    ServedTokenizer(Deaf(eos_token="<|im_end|>"), chunk_tokens="control")


def test_tokenizer_that_loses_text_is_refused() -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    lossy = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    with pytest.raises(ValueError, match="pieces"):
        ServedTokenizer(lossy, chunk_tokens="text")


def test_tokenizer_whose_pieces_do_not_join_is_refused() -> None:
    """At start, not in wrong answers."""

    class Joining(CharTokenizer):
        def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
            return [hash(text) % 1000]

    with pytest.raises(ValueError, match="pieces"):
        ServedTokenizer(Joining(), chunk_tokens="text")


# Messages


@pytest.mark.parametrize("kind", ["byte_level", "ignoring_merges", "bundled", "slow"])
@settings(max_examples=examples(30))
@given(data=st.data())
def test_messages_are_encoded_as_sglang_does(kind: str, data: Any) -> None:
    text = data.draw(texts_with_tokens(kind))
    theirs = tokenizer_of(kind).encode(text, add_special_tokens=False)
    assert served(kind).encode(text) == tuple(theirs)


def test_sglangs_object_may_change_while_we_encode() -> None:
    """`/v1` switches truncation, padding and special tokens on the tokenizer it serves with."""
    theirs = make_tokenizer()
    ours = ServedTokenizer(theirs, chunk_tokens="text")
    errors: list[BaseException] = []
    is_over = threading.Event()

    def encode() -> None:
        try:
            while not is_over.is_set():
                ours.encode("bako <|im_end|> ranis " * 50)
                ours.encode_plain("bako <|im_end|> ranis " * 50)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=encode) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for i in range(100):
            theirs(["a b", "c"], truncation=bool(i % 2), max_length=8, padding=bool(i % 3))
            theirs.encode("a <|im_end|>", split_special_tokens=bool(i % 2))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_tokenizer_that_encodes_in_python_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class may do more than its backend; its switches must not be SGLang's either."""
    monkeypatch.setattr("sglang_chunkcache.front.tokenizer._copied", lambda tokenizer: None)
    theirs = make_tokenizer()
    ours = ServedTokenizer(theirs, chunk_tokens="text")
    assert ours.encode_plain("<|im_end|>") == served("byte_level").encode_plain("<|im_end|>")
    assert ours.encode("<|im_end|>") == tuple(theirs.encode("<|im_end|>", add_special_tokens=False))
    assert not theirs.backend_tokenizer.encode_special_tokens


# Length


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=examples(20))
@given(data=st.data())
def test_no_text_is_called_longer_than_it_is(kind: str, data: Any) -> None:
    text = data.draw(texts_with_tokens(kind)) * data.draw(st.integers(1, 50))
    assert not served(kind).is_longer(text, len(served(kind).encode(text)))


def test_text_that_no_bound_refuses_is_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a token of 500 spaces the bound says little: counting stops where it is too much."""
    theirs = make_tokenizer()
    theirs.add_tokens([" " * 500])
    tokenizer = ServedTokenizer(theirs, chunk_tokens="text")
    encoded = encoded_texts(tokenizer, monkeypatch)
    assert not tokenizer.is_longer(" " * 1_000_000, 3000)
    encoded.clear()
    assert tokenizer.is_longer("bako " * 200_000, 3000)
    assert sum(map(len, encoded)) < 100_000


def test_request_encodes_a_text_once_and_none_that_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor any when the client has gone."""
    tokenizer, is_over = ServedTokenizer(make_tokenizer(), chunk_tokens="text"), threading.Event()
    seen = encoded_texts(tokenizer, monkeypatch)
    encode = RequestEncoder(tokenizer, limit=100, field="messages", is_over=is_over)
    assert encode("abc") == encode("abc")
    with pytest.raises(TooLongError, match="messages: more than 100 tokens"):
        encode("x" * 100_000)
    is_over.set()
    with pytest.raises(RequestError, match="disconnected"):
        encode("def")
    assert seen == ["abc"]
