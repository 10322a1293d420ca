"""Kinds of question about a world with links, by what an answer needs besides the passage that
tells it.

    own           nothing: the passage names whom it speaks of
    linked        the passage right before, which names whom a sentence speaks of
    linked-2, -3  the same two or three passages before; those between are about others
    defined       another passage: the question describes an entity by a fact, and its own passage
                  tells what is asked
    order         all passages: which one comes first, or last
    contradicted  two passages about one entity, which differ in what is asked: the later one is
                  right

The bundled model was trained on all but the last one, which it guesses
(sglang_chunkcache/bundled_model/README.md).
"""

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from eval.world.world import NAMES, Passage, Question, World, linked_questions, order_questions


class Asked(NamedTuple):
    """A question and its passages in the order in which the model must read them."""

    question: Question
    passages: list[Passage]
    num_rivals: int
    """Passages that the question's wording fits, the right one among them:
    one of so many guesses is right."""


class Kind(NamedTuple):
    """`draw`: a question with this many passages of a world with links, at least `min_passages`."""

    draw: Callable[[World, int, random.Random], Asked]
    min_passages: int


def _own(world: World, num_passages: int, rng: random.Random) -> Asked:
    passages = world.linked_context(num_passages, rng)
    shown = {passage.id for passage in passages}
    asked = rng.choice(
        [q for q in world.questions if q.hop == 1 and shown.issuperset(q.gold_passage_ids)]
    )
    return Asked(asked, passages, _num_told(asked, passages))


def _linked(world: World, num_passages: int, rng: random.Random) -> Asked:
    """With a rival, if there are passages enough:
    what only one passage tells is found without knowing of whom."""
    passages = world.linked_context(num_passages, rng)
    linked = linked_questions(passages)
    asked = rng.choice(
        # Two or three passages have one linked fact alone, and so no rival.
        [question for question in linked if _num_rivals(question, linked) > 1] or linked
    )
    return Asked(asked, passages, _num_rivals(asked, linked))


def _linked_at(world: World, num_passages: int, rng: random.Random, *, distance: int) -> Asked:
    """Passages in any order, as in training, drawn until one tells of another that far before it,
    and has a rival."""
    while True:
        passages = rng.sample(world.passages, num_passages)
        place = {passage.id: number for number, passage in enumerate(passages)}
        linked = linked_questions(passages)
        for asked in rng.sample(linked, len(linked)):
            named, telling = (place[passage_id] for passage_id in asked.gold_passage_ids)
            if telling - named == distance and (num_rivals := _num_rivals(asked, linked)) > 1:
                return Asked(asked, passages, num_rivals)


def _num_rivals(asked: Question, linked: list[Question]) -> int:
    """Linked questions about the same kind of entity, itself included;
    each kind has one relation."""
    # An answer begins "The company" like a passage, so its second word is the kind.
    kinds = [question.answers[0].split()[1] for question in linked]
    return kinds.count(asked.answers[0].split()[1])


def _defined(world: World, num_passages: int, rng: random.Random) -> Asked:
    asked = rng.choice([question for question in world.questions if question.hop == 2])
    passages = world.context(asked, num_passages, rng)
    return Asked(asked, passages, _num_told(asked, passages))


def _num_told(asked: Question, passages: list[Passage]) -> int:
    """Passages about the kind of entity whose fact is asked for;
    each tells all facts of its kind."""
    kinds = [passage.text.split()[1] for passage in passages]
    return kinds.count(asked.answers[0].split()[1])


def _order(world: World, num_passages: int, rng: random.Random) -> Asked:
    passages = world.linked_context(num_passages, rng)
    # "after": beyond the bundled model
    return Asked(rng.choice(order_questions(passages)[:2]), passages, num_passages)


def _contradicted(world: World, num_passages: int, rng: random.Random) -> Asked:
    """A passage's own question, with another value in a second passage about the same entity,
    in place of a later one."""
    passages = world.linked_context(num_passages, rng)
    earlier, later = sorted(rng.sample(range(num_passages), 2))
    told = passages[earlier]
    asked = rng.choice(
        [question for question in world.questions if question.gold_passage_ids == (told.id,)]
    )
    sentence, value = asked.answers
    names = next(names for names in NAMES.values() if value in names)
    # None that the passage tells already: the later value must be new.
    other = rng.choice([name for name in names if f" {name}" not in told.text])
    fact = " ".join(sentence.split()[2:])  # "Lumex serves Marton."
    new = told._replace(
        id=f"{told.id}-later",
        text=told.text.replace(fact, fact.replace(f" {value}.", f" {other}.")),
    )
    passages[later] = new
    answers = sentence.replace(f" {value}.", f" {other}."), other
    return Asked(asked._replace(answers=answers, gold_passage_ids=(told.id, new.id)), passages, 2)


KINDS: Mapping[str, Kind] = {
    "own": Kind(_own, 2),
    "linked": Kind(_linked, 2),
    "linked-2": Kind(partial(_linked_at, distance=2), 5),
    "linked-3": Kind(partial(_linked_at, distance=3), 6),
    "defined": Kind(_defined, 2),
    "order": Kind(_order, 2),
    "contradicted": Kind(_contradicted, 2),
}
