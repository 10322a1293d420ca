"""Whether Python's `re` may try very many ways to match a pattern. SGLang searches with a client's
`stop_regex` in its scheduler.

    (a+)+b    (a|a.)*b    (a?){60}b   a text of n letters can be divided in 2^n ways
    (a+b)+c   (ab|cd)*x                one way: a `b` ends each round, and the first letter tells
                                      the branch
    a*a*a*a*b                         n^4 ways

Not exact: some patterns that are found are fast on every text, as `re` may find out.
"""

from __future__ import annotations

import re
import re._parser as sre  # type: ignore[import-not-found]
from collections import Counter
from collections.abc import Iterator
from typing import Any

MANY = 10
"""A repetition of a repetition up to this often stays small."""
MOST_ALIKE = 3
"""Unbounded repetitions in one pattern that can match the same character:
the work grows with that power of the text's length."""

REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)
# two letters stand for those beyond ASCII, which the classes of `re` match alike
ALPHABET = frozenset(map(chr, range(128))) | {"é", "中"}
CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}


def explodes(pattern: str) -> bool:
    """Whether the pattern has repetitions that can share a text in very many ways.
    False for what `re` refuses."""
    try:
        tree = sre.parse(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    many = [(kind, of) for kind, of in _nodes(tree) if kind in REPEATS and of[1] > MANY]
    unbounded = (char for kind, of in many if _varies(kind, of) for char in _chars(of[2]))
    most_alike = max(Counter(unbounded).values(), default=0)
    return most_alike > MOST_ALIKE or any(_is_ambiguous(of[2]) for _, of in many)


# Private, in order of use


def _nodes(pattern: Any) -> Iterator[tuple[Any, Any]]:
    for kind, value in pattern:
        yield kind, value
        for inner in _inside(kind, value):
            yield from _nodes(inner)


def _inside(kind: Any, value: Any) -> list[Any]:
    # Possessive ones and atomic groups give nothing back, so they are no repeats of ours; within
    # them `re` tries as often as anywhere.
    if kind in REPEATS or kind == sre.POSSESSIVE_REPEAT:
        return [value[2]]
    if kind == sre.SUBPATTERN:
        return [value[3]]
    if kind in (sre.BRANCH, sre.ASSERT, sre.ASSERT_NOT):
        return list(value[1]) if kind == sre.BRANCH else [value[1]]
    if kind == sre.GROUPREF_EXISTS:
        return [part for part in value[1:] if part is not None]
    return [value] if kind == sre.ATOMIC_GROUP else []


def _varies(kind: Any, value: Any) -> bool:
    return kind in REPEATS and value[0] != value[1]


def _is_ambiguous(body: Any) -> bool:
    """Whether rounds of a repeated body can be told apart in more than one way: it varies in
    length, and no character that the varying parts do not match must come in each round; or two
    branches can begin alike."""
    nodes = list(_nodes(body))
    if any(kind == sre.BRANCH and _begin_alike(value[1]) for kind, value in nodes):
        return True
    varying = [frozenset(_chars(value[2])) for kind, value in nodes if _varies(kind, value)]
    return bool(varying) and all(chars & frozenset().union(*varying) for chars in _musts(body))


def _begin_alike(branches: Any) -> bool:
    first = [next(iter(branch), None) for branch in branches]
    sets = [_one(*node) if node else frozenset[str]() for node in first]
    # what a branch begins with, a group for one, may not be known: then it may be anything
    return not all(sets) or len(frozenset().union(*sets)) < sum(map(len, sets))


def _musts(body: Any) -> Iterator[frozenset[str]]:
    """The characters of each place that every round has."""
    for kind, value in body:
        if kind == sre.SUBPATTERN:
            yield from _musts(value[3])
        # what may come a varying number of times separates no rounds
        elif kind in REPEATS and value[0] > 0 and not _varies(kind, value):
            yield from _musts(value[2])
        elif chars := _one(kind, value):
            yield chars


def _chars(pattern: Any) -> frozenset[str]:
    """All characters that a pattern can match, of the alphabet and of its own."""
    return frozenset[str]().union(*(_one(kind, value) for kind, value in _nodes(pattern)))


def _one(kind: Any, value: Any) -> frozenset[str]:
    """Characters of a node that matches one; none for others."""
    if kind == sre.LITERAL:
        return frozenset({chr(value)})
    if kind == sre.NOT_LITERAL:
        return ALPHABET - {chr(value)}
    if kind == sre.ANY:
        return ALPHABET
    if kind != sre.IN:
        return frozenset()
    found: set[str] = set()
    for item, of in value:
        if item == sre.LITERAL:
            found.add(chr(of))
        elif item == sre.RANGE:
            # the first character stands for a range outside the alphabet
            found |= {char for char in ALPHABET if of[0] <= ord(char) <= of[1]} | {chr(of[0])}
        elif item == sre.CATEGORY:
            found |= {char for char in ALPHABET if re.match(CATEGORIES[of], char)}
    return ALPHABET - found if value[0][0] == sre.NEGATE else frozenset(found)
