"""Metrics of an answer: exact match and F1 against the right answers, ROUGE-L and KL against
another answer.

Pure functions of texts, tokens and log probabilities; no server, model or data set.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Token = TypeVar("Token", bound=Hashable)
"""A token's id, or its text if only that is known."""

ROUNDING = 1e-6
"""Missing probability mass below this is a rounding error, since log probabilities are float32."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: Sequence[str]) -> bool:
    """Whether the answer is one of `gold` once both are normalised."""
    return normalize(answer) in map(normalize, gold)


def f1(answer: str, gold: Sequence[str]) -> float:
    """Best F1 of normalised words over `gold`, 0 to 1; 0 where `gold` is empty.
    Two empty texts are equal: 1."""
    return max(
        (_word_f1(normalize(answer).split(), normalize(right).split()) for right in gold),
        default=0.0,
    )


def rouge_l(answer: str, reference: str) -> float:
    """F of the longest common subsequence of words (lower case, letters and digits), 0 to 1.
    Two texts without words: 1."""
    words, wanted = _words(answer), _words(reference)
    if not words and not wanted:
        return 1.0
    return 2 * lcs_len(words, wanted) / (len(words) + len(wanted))


def jaccard(answer: str, reference: str) -> float:
    """Common words over all words of both (lower case, letters and digits), 0 to 1.
    Two texts without words: 1."""
    words, wanted = set(_words(answer)), set(_words(reference))
    return len(words & wanted) / len(words | wanted) if words | wanted else 1.0


def normalized_f1(f1: float, *, full_reuse: float, full_prefill: float) -> float | None:
    """FusionRAG equation 11 as a share: 0 is as good as full reuse, 1 as full prefill.

    None if full reuse loses nothing, so there is nothing to restore. None also if full reuse is
    *better* than full prefill: the scale would be inverted, and an F1 below both would be above 1.
    """
    lost = full_prefill - full_reuse
    return (f1 - full_reuse) / lost if lost > ROUNDING else None


def lcs_len(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, O(len(a) len(b))."""
    row = [0] * (len(b) + 1)
    for x in a:
        corner = 0  # row[j - 1] before this x
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], corner + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def kl_divergence(p: Mapping[Token, float], q: Mapping[Token, float]) -> float:
    """KL(p || q) in nats of two next-token distributions; infinite if q excludes a token that p
    allows, NaN for a NaN.

    Args:
        p, q: token -> natural log probability. Tokens that either lacks are merged into one, so the
            result is exact if both have the whole vocabulary, else a lower bound. Never below 0.
    Raises:
        ValueError: probabilities add up to more than 1.
    """
    for name, each in (("p", p), ("q", q)):
        # A thousandth over 1 is the rounding of many float32 numbers.
        if (total := math.fsum(map(math.exp, each.values()))) > 1 + 1e-3:
            raise ValueError(f"{name} must add up to at most 1 but adds up to {total}")
        if math.isnan(total):
            return math.nan  # comparisons below would make it 0: no difference at all
    shared = p.keys() & q.keys()
    # A token that p excludes adds nothing; 0 times -inf would be NaN.
    kl = math.fsum(math.exp(p[t]) * (p[t] - q[t]) for t in shared if p[t] > -math.inf)
    rest = 1 - math.fsum(math.exp(p[t]) for t in shared)
    if rest > ROUNDING:
        # By rounding alone q may have nothing left, which would make KL infinite.
        rest_q = max(ROUNDING, 1 - math.fsum(math.exp(q[t]) for t in shared))
        kl += rest * math.log(rest / rest_q)
    return max(0.0, kl)


def answer_kls(
    reference: Sequence[Mapping[Token, float]],
    reference_tokens: Sequence[Token],
    steps: Sequence[Mapping[Token, float]],
    tokens: Sequence[Token],
) -> list[float]:
    """KL(reference || answer) of each step with equal preceding tokens, that of the first different
    token included.

    Args:
        reference, steps: next-token distributions, one per token, as for `kl_divergence`.
    Raises:
        ValueError: an empty answer.
    """
    same = 0
    while (
        same < min(len(tokens), len(reference_tokens)) - 1
        and tokens[same] == reference_tokens[same]
    ):
        same += 1
    pairs = list(zip(reference[: same + 1], steps[: same + 1], strict=True))
    if not pairs:
        raise ValueError("an answer without tokens has no distribution")
    return [kl_divergence(p, q) for p, q in pairs]


def _word_f1(answer: Sequence[str], right: Sequence[str]) -> float:
    if not answer or not right:
        return float(answer == right)
    common = sum((Counter(answer) & Counter(right)).values())
    return 2 * common / (len(answer) + len(right))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())
