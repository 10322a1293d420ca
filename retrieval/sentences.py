"""Finds where a text may be split: between sentences, and preferably between paragraphs.

By rules, without a model: closing punctuation followed by a space and no small letter, CJK full
stops, blank lines, Markdown headings and list items. The rules sometimes err ("Vitamin C. It helps"
is not split, since C looks like an initial). A missed border only makes a sentence longer; the
splitter enforces its limit in any case.

    One. Two! Dr. Who?⏎⏎# Head⏎⏎Three.⏎- four      | sentence  ║ paragraph
        |    |         ║                |            a heading stays with what follows
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# ruff: noqa: RUF001 (the marks of several scripts look alike)
_CLOSERS = r"[\"'”’»›)\]}*_]"  # Markdown's emphasis may close after the full stop
# Possessive quantifiers, and each match begins after the previous one: a megabyte of dots takes
# linear time.
_STOP = re.compile(rf"([.!?…؟।۔]++{_CLOSERS}*+)\s*+|([。！？｡]++[」』”’）】]*+)\s*+")
_LINE_BREAKS = re.compile(r"\n\s*+")
_HEADING = re.compile(r"#{1,6}[ \t]+\S")
_LIST_ITEM = re.compile(r"(?:[-*+•]|\d{1,3}[.)])[ \t]+\S")
_OPENERS = "\"'“‘«‹([{*_-–—¿¡"
_LONGEST_OPENING = 4  # characters
_ABBREVIATION = re.compile(
    "adm|al|approx|bros|ca|capt|cf|cmdr|co|col|corp|dept|dr|eg|est|gen|gov|hon|ie|inc|jr|lt|ltd|maj|mrs?|ms|mt|pres|prof|rep|rev|"
    "sen|sgt|sr|ste?|univ|viz|vs",
    re.IGNORECASE,
)
_BEFORE_A_NUMBER = re.compile(
    "art|ch|eds?|eq|figs?|nos?|pp?|sec|tab|vols?|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec",
    re.IGNORECASE,
)
_LONGEST_WORD = 12  # characters to look back for an abbreviation


class Border(NamedTuple):
    """Text ends at `end` and goes on at `start`; between them is only whitespace. In characters."""

    end: int
    start: int
    paragraph: bool


def find_borders(text: str) -> list[Border]:
    """All places where `text` may be split, ascending. The last one is its end, where `start` is
    the text's length."""
    length = len(text.rstrip())
    stops = list(_sentence_stops(text, length))
    borders: list[Border] = []
    taken = 0
    line = len(text) - len(text.lstrip())
    for breaks in _LINE_BREAKS.finditer(text, line, length):
        following = breaks.end()
        is_heading = _HEADING.match(text, line) is not None
        while taken < len(stops) and stops[taken].start <= following:
            if not is_heading:
                borders.append(stops[taken])
            taken += 1
        if not is_heading:
            paragraph = breaks[0].count("\n") > 1 or _HEADING.match(text, following) is not None
            if paragraph or _LIST_ITEM.match(text, following):
                if borders and borders[-1].start == following:
                    borders.pop()
                borders.append(Border(end_before(text, breaks.start()), following, paragraph))
        line = following
    if not _HEADING.match(text, line):
        borders.extend(stops[taken:])
    borders.append(Border(length, len(text), True))
    return borders


def _sentence_stops(text: str, length: int) -> Iterator[Border]:
    """Borders after closing punctuation, except at the text's end."""
    cased = text != text.lower()
    for match in _STOP.finditer(text, 0, length):
        if match.end() < length and (match[2] or _ends_sentence(text, match, cased)):
            yield Border(match.end(match.lastindex or 0), match.end(), False)


def _ends_sentence(text: str, stop: re.Match[str], cased: bool) -> bool:
    """Whether Latin punctuation ends a sentence there.
    `cased`: the text has capital letters at all."""
    after, before = stop.end(), stop.start()
    if after == stop.end(1):
        return False
    following = text[after : after + _LONGEST_OPENING].lstrip(_OPENERS)[:1]
    if cased and following.islower():
        return False
    words = text[max(0, before - _LONGEST_WORD) : before].split()
    if stop[1] != "." or not words or text[before - 1].isspace():
        return True
    word = words[-1].lstrip(_OPENERS)
    if _is_initial(word) or _ABBREVIATION.fullmatch(word):
        return False
    if following.isdigit() and _BEFORE_A_NUMBER.fullmatch(word):
        return False
    return not (word.isdigit() and _LIST_ITEM.match(text, _line_start(text, before)))


def _is_initial(word: str) -> bool:
    """J, U.S, e.g, p.m"""
    parts = word.split(".")
    are_letters = all(len(part) == 1 and part.isalpha() for part in parts)
    return are_letters and (len(parts) > 1 or word.isupper())


def _line_start(text: str, position: int) -> int:
    """Start of the last word before `position` if only blanks precede it in its line,
    else `position`."""
    start = position
    while start > 0 and not text[start - 1].isspace():
        start -= 1
    blank = start
    while blank > 0 and text[blank - 1] in " \t":
        blank -= 1
    return start if blank == 0 or text[blank - 1] == "\n" else position


def end_before(text: str, position: int) -> int:
    """Where the last character that is not whitespace ends, at or before `position`."""
    while position > 0 and text[position - 1].isspace():
        position -= 1
    return position
