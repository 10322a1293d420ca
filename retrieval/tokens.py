"""Tokens as character spans, by which the splitter measures passages.

Three sources with one interface: plain words, a `tokenizer.json`, or a model on the hub. Knows no
token ids: passages are cut in characters, and the server tokenises them itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from retrieval.errors import RetrievalError
from retrieval.model_path import find_model

WORDS = "words"
TOKENIZER_FILE = "tokenizer.json"
FINGERPRINT_BYTES = 4

# Han and kana are written without spaces, so each character is a token; and no word has more than
# 32 characters, so that a page
# of base64 is not one token.
_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[^\W{_CJK}]{{1,32}}|\S")


class Tokens(Protocol):
    """Counts and places the tokens of a text.

    The index records `name`, the path's last part and a fingerprint, so that a build with another
    tokenizer is refused.
    """

    @property
    def name(self) -> str: ...

    def offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """`[start, end)` in characters of every token, without special tokens. Starts and ends
        never decrease.

        Spans may touch, overlap (a character of several bytes in several tokens), omit characters
        (whitespace, and characters that a tokenizer drops) or begin with the space before a word
        (byte-level BPE).
        """
        ...


class WordTokens:
    """Words, punctuation marks and CJK characters, one token each. Needs no model."""

    name = WORDS

    def offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """See `Tokens`; every character but whitespace is in exactly one token."""
        return [match.span() for match in _WORD.finditer(text)]


class FileTokens:
    """The tokens of a `tokenizer.json`, cut by the library `tokenizers`."""

    def __init__(self, path: Path, *, name: str) -> None:
        from tokenizers import Tokenizer

        self.name = name
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise RetrievalError(f"{path} is not a tokenizer: {error}") from error
        # the file may enable truncation and padding, and each would falsify counts
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def offsets(self, text: str) -> Sequence[tuple[int, int]]:
        """See `Tokens`."""
        spans: list[tuple[int, int]] = self._tokenizer.encode(
            text, add_special_tokens=False
        ).offsets
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        if starts == sorted(starts) and ends == sorted(ends):
            return spans
        # Unicode normalisation may reorder combining marks
        return list(zip(accumulate(starts, max), accumulate(ends, max), strict=True))


def load_tokens(name: str) -> Tokens:
    """Load a tokenizer by name.

    Args:
        name: "words", a `tokenizer.json`, or a model's name as `find_model` takes it.
    Raises:
        RetrievalError: the name does not exist, or is not a tokenizer.
    """
    if name == WORDS:
        return WordTokens()
    found = find_model(name, file=TOKENIZER_FILE)
    path = Path(found)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    elif not path.exists():
        path = _download(found)
    if not path.is_file():
        raise RetrievalError(
            f"tokenizer {name!r}: no {TOKENIZER_FILE} there; AutoTokenizer.save_pretrained"
            " writes one"
        )
    label = Path(found).resolve()
    base = label.parent.name if label.name == TOKENIZER_FILE else label.name
    fingerprint = hashlib.blake2b(path.read_bytes(), digest_size=FINGERPRINT_BYTES).hexdigest()
    return FileTokens(path, name=f"{base}@{fingerprint}")


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, TOKENIZER_FILE))
    except Exception as error:  # many classes of two libraries, none common
        reason = str(error).strip().split("\n")[0]
        raise RetrievalError(
            f"tokenizer {name!r}: {TOKENIZER_FILE} cannot be loaded from the hub: {reason}"
        ) from error
