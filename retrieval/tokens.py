"""Tokens as character spans, by which the splitter measures passages.

Three sources: plain words, a `tokenizer.json`, or a model on the hub. Knows no token ids: passages
are cut in characters, and the server tokenises them itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from retrieval.errors import RetrievalError, first_line
from retrieval.model_path import find_model
from retrieval.scripts import CJK

WORDS = "words"
TOKENIZER_FILE = "tokenizer.json"
FINGERPRINT_BYTES = 4

# Han and kana are written without spaces, so each character is a token; and no word has more than
# 32 characters, so that a page of base64 is not one token.
_WORD = re.compile(rf"[^\W{CJK}]{{1,32}}|\S")


class Tokens(NamedTuple):
    """Counts and places the tokens of a text.

    Attributes:
        name: the path's last part and a fingerprint. The index records it, so that a build with
            another tokenizer is refused.
        offsets: `[start, end)` in characters of every token of a text, without special tokens.
            Starts and ends never decrease. Spans may touch, overlap (a character of several bytes
            in several tokens), omit characters (whitespace, and characters that a tokenizer drops)
            or begin with the space before a word (byte-level BPE).
    """

    name: str
    offsets: Callable[[str], Sequence[tuple[int, int]]]


def word_offsets(text: str) -> list[tuple[int, int]]:
    """Words, punctuation marks and CJK characters, one token each; every character but whitespace
    is in exactly one."""
    return [match.span() for match in _WORD.finditer(text)]


def load_tokens(name: str) -> Tokens:
    """Load a tokenizer: "words", a `tokenizer.json`, or a model's, by a name for `find_model`.

    Raises:
        RetrievalError: the name does not exist, or is not a tokenizer.
    """
    if name == WORDS:
        return Tokens(WORDS, word_offsets)
    found = find_model(name, file=TOKENIZER_FILE)
    path = Path(found)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    elif not path.exists():
        path = _download(found)
    if not path.is_file():
        what = f"tokenizer {name!r}: no {TOKENIZER_FILE} there"
        raise RetrievalError(f"{what}; AutoTokenizer.save_pretrained writes one")
    label = Path(found).resolve()
    base = label.parent.name if label.name == TOKENIZER_FILE else label.name
    fingerprint = hashlib.blake2b(path.read_bytes(), digest_size=FINGERPRINT_BYTES).hexdigest()
    return Tokens(f"{base}@{fingerprint}", _file_offsets(path))


def _file_offsets(path: Path) -> Callable[[str], list[tuple[int, int]]]:
    """`Tokens.offsets` of a `tokenizer.json`, cut by the library `tokenizers`."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise RetrievalError(f"{path} is not a tokenizer: {error}") from error
    # the file may enable truncation and padding, and each would falsify counts
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def offsets(text: str) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = tokenizer.encode(text, add_special_tokens=False).offsets
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        if starts == sorted(starts) and ends == sorted(ends):
            return spans
        # Unicode normalisation may reorder combining marks
        return list(zip(accumulate(starts, max), accumulate(ends, max), strict=True))

    return offsets


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, TOKENIZER_FILE))
    except Exception as error:  # many classes of two libraries, none common
        what = f"tokenizer {name!r}: {TOKENIZER_FILE} cannot be loaded from the hub"
        raise RetrievalError(f"{what}: {first_line(error)}") from error
