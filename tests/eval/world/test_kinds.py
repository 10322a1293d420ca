"""Kinds of question."""

import random

import pytest

from eval.world.kinds import KINDS, Asked
from eval.world.world import World

NUM_PASSAGES = 6
DISTANCES = {"linked": 1, "linked-2": 2, "linked-3": 3}


def drawn(kind: str, count: int = 30) -> list[Asked]:
    world, rng = World(5, links=True), random.Random(kind)
    return [KINDS[kind].draw(world, NUM_PASSAGES, rng) for _ in range(count)]


def named_before(asked: Asked, kind: str, place: int) -> int:
    """Where the last passage about an entity of this kind before `place` is."""
    texts = [passage.text for passage in asked.passages[:place]]
    return max(number for number, text in enumerate(texts) if text.startswith(f"The {kind} "))


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_have_the_size_asked_for_and_the_gold_passages(kind: str) -> None:
    for asked in drawn(kind):
        shown = [passage.id for passage in asked.passages]
        assert len(set(shown)) == NUM_PASSAGES
        assert set(asked.question.gold_passage_ids) <= set(shown)
        assert 2 <= asked.num_rivals <= NUM_PASSAGES
        if kind in ("own", "defined"):
            _, of, *_ = asked.question.answers[0].split()
            texts = [passage.text for passage in asked.passages]
            assert asked.num_rivals == sum(text.startswith(f"The {of} ") for text in texts)
        assert asked.question.answers[0].endswith(f" {asked.question.answers[1]}.")
    assert drawn(kind, 3) == drawn(kind, 3)
    least = KINDS[kind].min_passages
    assert len(KINDS[kind].draw(World(6, links=True), least, random.Random(0)).passages) >= 2


@pytest.mark.parametrize(("kind", "distance"), DISTANCES.items())
def test_the_passage_that_names_is_so_far_before_the_one_that_tells(
    kind: str, distance: int
) -> None:
    for asked in drawn(kind):
        _, entity, name, verb, value = asked.question.answers[0].rstrip(".").split()
        gold = asked.question.gold_passage_ids[1]
        telling = [passage.id for passage in asked.passages].index(gold)
        assert f" the {entity} {verb} {value}." in asked.passages[telling].text
        naming = named_before(asked, entity, telling)
        assert asked.passages[naming].title == name
        assert telling - naming == distance


def test_what_a_definition_tells_is_in_another_passage_than_what_is_asked_about() -> None:
    for asked in drawn("defined"):
        using, defining = (
            next(p for p in asked.passages if p.id == gold)
            for gold in asked.question.gold_passage_ids
        )
        assert using.title in asked.question.question
        assert defining.title not in asked.question.question
        assert defining.title in using.text
        assert asked.question.answers[1] in defining.text


def test_own_questions_name_the_passage_that_answers() -> None:
    for asked in drawn("own"):
        (gold,) = (p for p in asked.passages if p.id == asked.question.gold_passage_ids[0])
        assert gold.title in asked.question.question
        verb = asked.question.answers[0].split()[3]
        assert f"{gold.title} {verb} {asked.question.answers[1]}." in gold.text


def test_of_two_contradicting_passages_the_later_one_is_right() -> None:
    for asked in drawn("contradicted"):
        first, last = asked.question.gold_passage_ids
        places = {passage.id: number for number, passage in enumerate(asked.passages)}
        assert places[first] < places[last]
        before, after = (asked.passages[places[gold]] for gold in (first, last))
        assert before.title == after.title
        told, retold = before.text.split(), after.text.split()
        changed = [new for old, new in zip(told, retold, strict=True) if old != new]
        assert changed == [f"{asked.question.answers[1]}."]
