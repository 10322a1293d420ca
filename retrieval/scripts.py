"""Scripts whose words are not told by spaces, and their words' stand-in: pairs of neighbouring
characters.

    退货政策 is new   ->    退货 货政 政策  is new   한국어는   ->   한국 국어 어는
    แม่น้ำ            ->    แม มน นำ                a mark that is no letter (a tone, a virama) is
                                                  left out, as accents are

Korean has spaces, but hangs its particles on to the words, so that a word alone would not be found.
A single character between others is its own pair. Knows no index.
"""

from __future__ import annotations

import re
import unicodedata

CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
UNSPACED = f"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff{CJK}"
"""Thai, Lao, Burmese, Khmer, kana and Chinese characters: their words are not separated by spaces.
The embedded encoder's state depends on it."""

_HANGUL = "\u1100-\u11ff\uac00-\ud7a3"
_ITERATION = "\u3005-\u3007"  # 々 among them
_HALF_WIDTH = "\uff66-\uff9f"
_RUN = re.compile(f"[{UNSPACED}{_HANGUL}{_ITERATION}{_HALF_WIDTH}]+")
_MARKS = (
    "\u0e47-\u0e4c\u0e4e\u0eba\u0ec8-\u0ecc\u1037\u1039\u103a\u17b4\u17b5\u17c9-\u17d3\u17dd"
    "\u3099\u309a"
)
_PUNCTUATION = (
    "\u0e3f\u0e4f\u0e5a\u0e5b\u104a-\u104f\u109e\u109f\u17d4-\u17d6\u17d8-\u17db"
    "\u309b\u309c\u30a0\u30fb"
)


_FOLDED = {
    number: folded
    for ranges, folded in ((_MARKS, ""), (_PUNCTUATION, " "))
    for number in range(0x0E00, 0x3100)  # all of them lie there
    if re.match(f"[{ranges}]", chr(number))
}


def paired(text: str) -> str:
    """The text with spaces between the pairs of neighbouring characters of each run in such a
    script; the rest as it is."""
    return text if text.isascii() else _RUN.sub(_pairs, text)


def _pairs(run: re.Match[str]) -> str:
    # Composed first: a kana's voicing mark, which makes another letter, would be left out by
    # itself.
    parts = unicodedata.normalize("NFC", run[0]).translate(_FOLDED).split()
    pairs = [part[at : at + 2] for part in parts for at in range(max(1, len(part) - 1))]
    return f" {' '.join(pairs)} "
