"""Generates any number of passages from a seed, each with a topic and with one word that no other
passage has.

    half of a passage   words of its topic (50 of them), drawn evenly
    the other half      words of the whole vocabulary, Zipf-distributed: a few are nearly everywhere
    last                its marker, the word that no other passage has

So a question with words of a topic has right answers, common words cost a BM25 index as much as in
real text, and a passage that a build lost is detected. Words are syllables with an ending that
English stemmers keep. It is not language: times and counts carry over to real text, recall does
not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]
VOCABULARY = 200_000
TOPIC_WORDS = 50
COMMON_WORDS = 1000
"""The most common words, which are in no topic."""
COPY_EVERY = 1000
"""Number of documents between copies of an earlier text; an index keeps such a text once."""
_BLOCK = 1000
_TOPIC_STEP = 7919


@dataclass(frozen=True)
class GeneratedCorpus:
    """Texts of `num_words` words; equal arguments give equal texts."""

    num_passages: int
    num_topics: int
    num_words: int
    seed: int

    def topic_of(self, number: int) -> int:
        """Of a passage."""
        return number * _TOPIC_STEP % self.num_topics

    def marker(self, number: int) -> str:
        """The word that only this passage has."""
        return _word(number, num_syllables=4) + "x"

    def texts(self) -> Iterator[str]:
        """Passage 0, 1, 2 …"""
        rng = np.random.default_rng(self.seed)
        half = self.num_words // 2
        for first in range(0, self.num_passages, _BLOCK):
            common = self._zipf(rng, (_BLOCK, self.num_words - half - 1))
            picks = rng.integers(0, TOPIC_WORDS, (_BLOCK, half))
            for at in range(min(_BLOCK, self.num_passages - first)):
                numbers = np.concatenate(
                    [common[at], self._topics[self.topic_of(first + at)][picks[at]]]
                )
                rng.shuffle(numbers)
                yield " ".join([*self._vocabulary[numbers], self.marker(first + at)]) + "."

    def questions(self, count: int) -> list[tuple[int, str]]:
        """(topic, question): four words of the topic, four Zipf-distributed ones."""
        rng = np.random.default_rng(self.seed + 1)
        made = []
        for topic in rng.integers(0, self.num_topics, count):
            numbers = np.concatenate(
                [rng.choice(self._topics[topic], 4, replace=False), self._zipf(rng, (4,))]
            )
            made.append((int(topic), " ".join(self._vocabulary[rng.permutation(numbers)]) + "?"))
        return made

    def write(self, path: Path) -> int:
        """JSON Lines with ids p0, p1 …, and copies between them. Returns the number of lines."""
        written = 0
        with open(path, "w", encoding="utf-8") as file:
            for number, text in enumerate(self.texts()):
                names = [f"p{number}"] + [f"copy{number}"] * (number % COPY_EVERY == COPY_EVERY - 1)
                for name in names:
                    file.write(json.dumps({"id": name, "text": text}) + "\n")
                written += len(names)
        return written

    def sample(self, numbers: set[int]) -> dict[int, str]:
        """Texts of the given passages. Generates all passages up to the last of them."""
        return {
            n: text for n, text in enumerate(islice(self.texts(), max(numbers) + 1)) if n in numbers
        }

    # Private, in order of use

    @cached_property
    def _vocabulary(self) -> NDArray[np.object_]:
        # Spread over all words of three syllables, so that the first letters of common words
        # differ.
        return np.array(
            [_word(n * 4999 % 1_000_000, num_syllables=3) + "n" for n in range(VOCABULARY)],
            dtype=object,
        )

    @cached_property
    def _topics(self) -> NDArray[np.int64]:
        """[num_topics, TOPIC_WORDS]"""
        shape = (self.num_topics, TOPIC_WORDS)
        return np.random.default_rng(self.seed + 2).integers(COMMON_WORDS, VOCABULARY, shape)

    @cached_property
    def _zipf_sums(self) -> NDArray[np.float64]:
        return np.cumsum(1 / np.arange(1, VOCABULARY + 1))

    def _zipf(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int64]:
        ranks: NDArray[np.int64] = np.searchsorted(
            self._zipf_sums, rng.random(shape) * self._zipf_sums[-1]
        )
        return ranks


def _word(number: int, *, num_syllables: int) -> str:
    syllables = []
    for _ in range(num_syllables):
        number, digit = divmod(number, len(SYLLABLES))
        syllables.append(SYLLABLES[digit])
    return "".join(syllables)
