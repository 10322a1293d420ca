"""The served model's tokenizer as a second object, so that encoding here never meets SGLang's use
of its own.

    messages, template   encode        what SGLang's object gives: added tokens are recognised in
                                       the text
    chunks               encode_plain  nothing in the text becomes an added token, white space aside

Two objects, since a switch on one that another thread encodes with raises "Already borrowed". Knows
texts and ids, no prompts.
"""

from __future__ import annotations

import copy
import json
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from sglang_chunkcache.errors import RequestError, TooLongError

Raw = Callable[[str], Sequence[int]]
"""As the backend encodes, which may join a piece to what is before it."""

WORDS = ("Aa", "b c", "\n\n", "Dd é 中 🙂")
"""Pieces that must join to their text."""

MOST_COMPOSED = 4
"""Characters that a normaliser makes one, at most: Unicode's composition (NFC)."""

WIDE_CHARS = 8
"""Characters per token that no language reaches:
a text that would need them is counted before it is encoded."""

COUNT_CHARS = 32_768
"""Characters that are counted at once."""


class ServedTokenizer:
    """Texts to ids for one model.

    Args:
        tokenizer: the served model's Hugging Face tokenizer; not changed, and not used to encode.
        chunk_tokens: as in the configuration; with `control`, `encode_plain` is `encode`.
    Raises:
        ValueError: a tokenizer whose pieces cannot be put together again, or that makes an added
            token of plain text.
    """

    def __init__(self, tokenizer: Any, *, chunk_tokens: str) -> None:
        self._tokenizer = tokenizer
        added = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        # Runs of white space are layout, which models learn as such: GPT-NeoX and Gemma have tokens
        # for them.
        self._control = {text: id for text, id in added.items() if text.replace("▁", " ").strip()}
        self._raw: Raw
        self._raw_plain: Raw
        composed = MOST_COMPOSED
        if own := _copied(tokenizer):
            self._raw = partial(_ids, own)
            self._raw_plain = partial(_ids, _without(own, self._control))
            composed = 1 if own.normalizer is None else MOST_COMPOSED
        else:
            one, other = (copy.deepcopy(tokenizer) for _ in range(2))  # each keeps its switch
            encode = partial(other.encode, add_special_tokens=False)
            self._raw = partial(one.encode, add_special_tokens=False)
            self._raw_plain = partial(encode, split_special_tokens=True)
        self._longest = composed * max(map(len, tokenizer.get_vocab()))
        bos_ids = tuple(tokenizer.encode(""))
        self.bos_ids = bos_ids if bos_ids == (tokenizer.bos_token_id,) else ()
        """What the tokenizer puts in front of a plain text prompt;
        chat templates bring their own."""
        self._guard = self._find_guard()
        if chunk_tokens == "control":
            self._raw_plain = self._raw
        else:
            self._check_plain()

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of one piece; pieces decode to their texts put together."""
        return self._piece(self._raw, text)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of one piece that is not trusted."""
        return self._piece(self._raw_plain, text)

    def decode(self, token_ids: Sequence[int], *, with_special: bool = True) -> str:
        how = {"skip_special_tokens": not with_special, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(token_ids), **how))

    def holds_control(self, text: str) -> bool:
        """Whether `encode` finds an added token in the text."""
        return not set(self._control.values()).isdisjoint(self.encode(text))

    def least_len(self, num_chars: int) -> int:
        """Tokens that this many characters have at least, by the vocabulary's longest one."""
        return num_chars // self._longest

    def is_longer(self, text: str, num_tokens: int) -> bool:
        """Whether the text surely has more tokens than that, found without encoding all of it: a
        text that `least_len` lets pass although no language is that dense is counted in pieces, up
        to where it is too long."""
        if self.least_len(len(text)) > num_tokens:
            return True
        if len(text) <= WIDE_CHARS * num_tokens:
            return False
        left = num_tokens
        for start in range(0, len(text), COUNT_CHARS):
            # a cut makes a token's characters into tokens of their own, at worst
            left += self._longest - len(self.encode(text[start : start + COUNT_CHARS]))
            if left < 0:
                return True
        return False

    # Private, in order of use

    def _piece(self, raw: Raw, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        if not self._guard:
            return tuple(raw(text))
        guarded, guard = tuple(raw(self._guard + text)), tuple(raw(self._guard))
        if guarded[: len(guard)] != guard:
            raise RequestError("messages: the tokenizer joins a piece to the text before it")
        return guarded[len(guard) :]

    def _find_guard(self) -> str:
        """Text to tokenise in front of a piece and take off again: "" for byte-level tokenizers, a
        newline for those that put a space in front of whatever they are given."""
        for guard in ("", "\n", "\n\n"):
            # `encode` reads it
            self._guard = guard
            try:
                ids = [id for word in WORDS for id in self.encode(word)]
                if self.decode(ids).removeprefix(" ") == "".join(WORDS):
                    return guard
            except RequestError:
                continue
        raise ValueError(
            "the tokenizer's pieces cannot be put together again: text would change between chunks"
        )

    def _check_plain(self) -> None:
        control = set(self._control.values())
        forms = ("{0}", "a{0}b", " {0} ", "{0}{0}")
        texts = [form.format(token) for token in self._control for form in forms]
        for text in (*WORDS, *texts):
            try:
                ids = self.encode_plain(text)
            except TypeError:  # an `encode` without the option
                ids = self.encode(text)
            # SentencePiece's put a space in front of what they are given
            is_same = self.decode(ids).removeprefix(" ") == text.removeprefix(" ")
            if not is_same or not control.isdisjoint(ids):
                raise ValueError(
                    f"the tokenizer cannot write {text!r} as plain text, so a chunk could forge a"
                    " message; --chunkcache-chunk-tokens control serves it all the same"
                )


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # NOTE: `encode` holds the GIL all the while and computes offsets; this one does neither.
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids  # type: ignore[no-any-return]


def _copied(tokenizer: Any) -> Tokenizer | None:
    """A second backend that encodes as SGLang's does.
    None for a tokenizer that does so in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return None
    own = Tokenizer.from_str(backend.to_str())
    # SGLang's calls switch both on in its object, and the copy begins as that stands
    own.no_truncation()
    own.no_padding()
    texts = (*WORDS, *(f"a{token.content} b" for token in tokenizer.added_tokens_decoder.values()))
    is_same = all(
        _ids(own, text) == tokenizer.encode(text, add_special_tokens=False) for text in texts
    )
    return own if is_same else None


def _without(tokenizer: Tokenizer, tokens: Iterable[str]) -> Tokenizer:
    """A tokenizer with the same ids that does not find these tokens in a text: each gets a name
    that no text can hold.

    The model's own vocabulary often has them, too, and SentencePiece's would find them there.
    """
    state, nonce = json.loads(tokenizer.to_str()), secrets.token_hex(8)
    model = state["model"]
    unknown = model.get("unk_token")  # the model looks it up by name
    hidden = {each: f"\ue000{nonce}{i}\ue001" for i, each in enumerate(tokens) if each != unknown}
    state["added_tokens"] = [
        {**token, "content": hidden.get(token["content"], token["content"])}
        for token in state["added_tokens"]
        if token["content"] != unknown
    ]
    # renamed and not left out: in a Unigram vocabulary the place is the id
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(token, token): id for token, id in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(token, token), score] for token, score in model["vocab"]]
    # `from_str` refuses a merge of or into what the vocabulary does not have
    if "merges" in model:
        model["merges"] = [
            pair for pair in model["merges"] if hidden.keys().isdisjoint((*pair, "".join(pair)))
        ]
    return Tokenizer.from_str(json.dumps(state))


class RequestEncoder:
    """Encodes one request's texts: each once, and none that cannot fit.

    Args:
        limit: tokens that a text may have.
        field: what the client calls its texts; errors name it.
        is_over: set when nobody waits for the request any more.
    """

    def __init__(
        self, tokenizer: ServedTokenizer, *, limit: int, field: str, is_over: threading.Event
    ) -> None:
        self.tokenizer, self._limit, self._field, self._is_over = tokenizer, limit, field, is_over
        self._known: dict[str, tuple[int, ...]] = {}

    def __call__(self, text: str) -> tuple[int, ...]:
        """Ids of one piece that is not a chunk's. Raises TooLongError."""
        if text not in self._known:
            if self.is_longer(text, limit := self._limit):
                raise TooLongError(f"{self._field}: more than {limit} tokens, which is the context")
            self._known[text] = self.tokenizer.encode(text)
        return self._known[text]

    def is_longer(self, text: str, limit: int) -> bool:
        """Whether the text surely has more tokens."""
        # a thread cannot be cancelled: it looks before each text whether anybody still waits
        if self._is_over.is_set():
            raise RequestError("body: the client has disconnected")
        return self.tokenizer.is_longer(text, limit)
