"""Training sequences: fact lists and conversations as token ids, with the tokens of each answer and
the looks that links need.

Each piece is tokenised apart, as the server does.
"""

import random
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from eval.world.tokenizer import SYSTEM_PROMPTS, turn_pieces
from eval.world.world import ENTITY_KINDS, Turn, sample_conversation, sample_fact_list

SYSTEM_SHARE = 0.3  # of the conversations: begin with a system prompt
NUM_FACTS = 12
Place = tuple[int, int]
"""(query, key), positions in a row."""


@dataclass
class Row:
    """One training sequence, and where its answers are."""

    ids: list[int] = field(default_factory=list)
    answers: list[slice] = field(default_factory=list)
    resolve: list[Place] = field(default_factory=list)
    """Value told without a name -> name of the one it is about."""
    look_up: list[Place] = field(default_factory=list)
    """Verb of a linked answer -> value."""


class Rows:
    """Draws rows and finds the places in their tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._core = tokenizer._tokenizer
        self._begin, self._end = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._the = self._encode(" the")[0]
        self._kinds = {self._encode(f" {kind}")[0]: kind for kind in ENTITY_KINDS}

    def fact_list(self, rng: random.Random) -> Row:
        """Facts told twice; what counts is the value when it comes again."""
        row = Row([self._begin])
        for number, sentence in enumerate(sample_fact_list(rng, NUM_FACTS)):
            row.ids += self._encode(f" {sentence}")
            if number >= NUM_FACTS:
                # the value comes before the full stop
                row.answers.append(slice(len(row.ids) - 2, len(row.ids) - 1))
        return row

    def conversation(
        self, rng: random.Random, num_passages: int, num_turns: int, *, share_linked: float = 0.0
    ) -> Row:
        """A whole conversation."""
        system = _sample_system_prompt(rng) if rng.random() < SYSTEM_SHARE else None
        row = Row()
        last: dict[str, int] = {}  # kind -> where the last passage of that kind has its name
        told: dict[Place, int] = {}  # (name, verb) -> index of the value
        for turn in sample_conversation(rng, num_passages, num_turns, share_linked=share_linked):
            self._add_turn(row, turn, system, last, told)
        return row

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return ids

    def _add_turn(
        self, row: Row, turn: Turn, system: str | None, last: dict[str, int], told: dict[Place, int]
    ) -> None:
        ids, question = row.ids, turn.question
        texts = [passage.text for passage in turn.passages]
        head, passages, tail = turn_pieces(texts, question.question, opens=not ids, system=system)
        ids += self._encode(head)
        for passage in passages:
            piece = self._encode(passage)
            # Where "the company visited Kelton" begins.
            for at in range(3, len(piece) - 3):
                kind = self._kinds.get(piece[at + 1])
                if piece[at] == self._the and kind in last:
                    value = len(ids) + at + 3
                    row.resolve.append((value, last[kind]))
                    told[ids[last[kind]], piece[at + 2]] = value
            last[self._kinds[piece[1]]] = len(ids) + 2
            ids += piece
        ids += self._encode(tail)
        answer = self._encode(question.answers[0])
        if question.hop == -1:
            _, _, name, verb, *_ = answer
            row.look_up.append((len(ids) + 3, told[name, verb]))
        row.answers.append(slice(len(ids), len(ids) + len(answer) + 1))
        ids += [*answer, self._end]


def _sample_system_prompt(rng: random.Random) -> str:
    """One of the usual ones or their words in disorder."""
    if rng.random() < 0.5:
        return rng.choice(SYSTEM_PROMPTS)
    words = " ".join(SYSTEM_PROMPTS).split()
    return " ".join(rng.choice(words) for _ in range(rng.randint(2, 20)))
