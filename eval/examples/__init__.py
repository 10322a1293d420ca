"""What the examples ask about: passages of the bundled model's world, in an order per question."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable
from statistics import median

from retrieval.command_line import Parser
from sglang_chunkcache.integrations.server import DEFAULT_URL

PASSAGES = {
    "boris": "The engineer Boris visited Bramford. In 1972 Boris taught Milan. By now Boris plays"
    " banjo. In 1980 Boris joined Fenon.",
    "greta": "The engineer Greta visited Holton. Today Greta plays tuba. In 1986 Greta taught"
    " Oscar. At first Greta joined Kavix.",
    "peter": "The engineer Peter taught Georg. At first Peter visited Penville. Peter plays"
    " mandolin. In 1987 Peter joined Quarum.",
    "jonas": "The engineer Jonas joined Fenon. Once Jonas visited Elmford. Later Jonas taught"
    " Gustav. Still Jonas plays fiddle.",
    "simon": "The engineer Simon plays violin. Once Simon taught Dora. In 1974 Simon joined Zorex."
    " Once Simon visited Norburg.",
}
QUESTIONS = {
    "Which city did the engineer Boris visit?": "Bramford",
    "Which instrument does the engineer Greta play?": "tuba",
    "Which company did the engineer Peter join?": "Quarum",
    "Which engineer did the engineer Jonas teach?": "Gustav",
}


def options(description: str | None) -> argparse.Namespace:
    parser = Parser(description=description)
    parser.add_argument("--url", default=DEFAULT_URL)
    parser.add_argument("--requests", type=int, default=24)
    return parser.parse_args()


def asked(num_requests: int, seed: int) -> list[tuple[str, list[str]]]:
    """Questions, each with four passages in an order of its own, as retrievers find them."""
    draw = random.Random(seed)
    names = {text.split()[-2]: text for text in QUESTIONS}
    found = []
    for _ in range(num_requests):
        name, question = draw.choice(sorted(names.items()))
        others = [each for each in PASSAGES if each != name.lower()]
        ids = [name.lower(), *draw.sample(others, 3)]
        draw.shuffle(ids)
        found.append((question, ids))
    return found


class Timed:
    """Seconds to the first token and tokens found cached, by arm."""

    def __init__(self) -> None:
        self._first_s: dict[str, list[float]] = {}
        self._tokens: dict[str, list[tuple[int, int]]] = {}

    def first(self, arm: str, pieces: Iterable[str]) -> str:
        """The whole text of a stream."""
        started, texts = time.perf_counter(), list[str]()
        for text in pieces:
            if text and not any(texts):
                self._first_s.setdefault(arm, []).append(time.perf_counter() - started)
            texts.append(text)
        return "".join(texts)

    def usage(self, arm: str, prompt_tokens: int, cached_tokens: int) -> None:
        self._tokens.setdefault(arm, []).append((prompt_tokens, cached_tokens))

    def table(self) -> str:
        lines = [f"{'':12}{'first token, ms':>16}{'cached':>8}"]
        for arm, seconds in self._first_s.items():
            prompt, cached = map(sum, zip(*self._tokens[arm], strict=True))
            lines.append(f"{arm:12}{1e3 * median(seconds):16.1f}{cached / prompt:8.2f}")
        return "\n".join(lines)
