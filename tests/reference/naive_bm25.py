"""BM25 in plain Python: what retrieval/bm25.py must equal, score by score, on an index without
removals.

Knows nothing of tantivy but its two liberties: the constants, and a passage's length kept in one
byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from unicodedata import category, name, normalize

K1 = 1.2
B = 0.75


PAIRED = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI", "LAO", "KHMER", "MYANMAR")
"""How the names begin of characters that are indexed in pairs."""


_VOICED = "COMBINING KATAKANA-HIRAGANA VOICED SOUND MARK"
LEFT_OUT = (_VOICED, "MAI EK", "MAI THO", "MAI TRI", "COENG", "VIRAMA", "ASAT", "SIGN DOT BELOW")
"""Last words of the names of tones and viramas, of those that tests use."""


def words(text: str) -> list[str]:
    """Runs of letters and digits in small letters;
    in `PAIRED` scripts each two neighbouring letters, or one alone."""
    found: list[str] = []
    run, was_paired = "", False
    for char in [*normalize("NFC", text), " "]:
        is_paired = name(char, "").startswith(PAIRED)
        if name(char, "").endswith(LEFT_OUT):
            continue
        is_letter = char.isalnum() or (is_paired and category(char)[0] == "M")
        if run and not (is_letter and is_paired == was_paired):
            pairs = [run[at : at + 2] for at in range(max(1, len(run) - 1))]
            found += pairs if was_paired else [run.lower()]
            run = ""
        if is_letter:
            run, was_paired = run + char, is_paired
    return found


def rounded_length(length: int) -> int:
    """The largest representable length that is not above:
    exact up to 40, then four significant bits, as in Lucene."""
    excess = length - 24
    if excess < 16:
        return length
    shift = excess.bit_length() - 4
    return 24 + (excess >> shift << shift)


def bm25_scores(passages: Sequence[Sequence[str]], query: Sequence[str]) -> list[float]:
    """One score per passage, 0.0 where it shares no word with the query;
    both are given as words."""
    mean_length = sum(map(len, passages)) / len(passages)
    scores = [0.0] * len(passages)
    for word in set(query):
        frequency = sum(word in passage for passage in passages)
        idf = log(1 + (len(passages) - frequency + 0.5) / (frequency + 0.5))
        for number, passage in enumerate(passages):
            if count := passage.count(word):
                norm = K1 * (1 - B + B * rounded_length(len(passage)) / mean_length)
                scores[number] += idf * (K1 + 1) * count / (count + norm)
    return scores
