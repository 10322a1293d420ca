"""How a separator has cut a log's messages: numbers for the record, and of one request the texts'
beginnings, by which a person sees whether the cut is right."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

SHOWN = 60
"""Characters of a text's beginning."""


class Cuts:
    """Requests that were cut, not those whose log names the passages.

    Attributes:
        example: of the first one, lines for a terminal alone: no record and no page has a text.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.example: list[str] = []
        self._leads: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, texts: Sequence[str], *, system: str, lead: str) -> None:
        """Count a request.

        Args:
            texts: of the message: before its passages, each passage, behind them.
            system: names the system messages before it, times and ids left out.
            lead: names the text before the passages in the same way.
        """
        self.num_requests += 1
        self._leads[system][lead] += 1
        if not self.example:
            self.example = _lines(texts)

    @property
    def num_differing(self) -> int:
        """Requests with another text before their passages than most behind the same system
        message."""
        return sum(leads.total() - max(leads.values()) for leads in self._leads.values())


# Private, in order of use


def _lines(texts: Sequence[str]) -> list[str]:
    before, *passages, behind = texts
    shown = [("before the passages", before), ("first passage", passages[0])]
    shown += [("second passage", passages[1])] if len(passages) > 2 else []
    shown += [("last passage", passages[-1])] if len(passages) > 1 else []
    shown += [("behind the passages", behind)]
    return [
        "The first request that was cut, its texts' beginnings, which no page and no record has:",
        *(f"  {name:<19}  {len(text):>6,} characters: {_beginning(text)}" for name, text in shown),
    ]


def _beginning(text: str) -> str:
    line = " ".join(text[: 4 * SHOWN].split())
    line = "".join(each if each.isprintable() else "?" for each in line)
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
