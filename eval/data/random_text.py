"""Text of a given length for traces without text:
random words, always the same for the same key."""

from __future__ import annotations

import random

WORDS = tuple(
    a + b + c
    for a in "bdfgklmnprst"
    for b in ("a", "e", "i", "o")
    for c in ("ran", "sel", "tor", "min", "dus")
)
"""A tokenizer trained on these words has one token for each; others need two or three."""


def random_text(key: str, num_words: int) -> str:
    """`num_words` words, at least one."""
    return " ".join(random.Random(key).choices(WORDS, k=max(1, num_words)))
