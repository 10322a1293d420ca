"""The demo's traffic and its prediction for a plain prefix cache; no server."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from eval.demo import NUM_CHUNKS, NUM_TURNS, PlainCache, Told, phase, traffic, write_corpus
from eval.serve.client import Answer
from eval.task import Request
from eval.world.world import World


def test_traffic_is_the_same_for_the_same_seed() -> None:
    """Two servers are compared on the same requests."""
    assert list(traffic(7, 60, 20, 2)) == list(traffic(7, 60, 20, 2))
    assert list(traffic(7, 60, 20, 2)) != list(traffic(8, 60, 20, 2))


def test_every_question_has_its_passage_among_the_chunks() -> None:
    """A question without its passage would count as a wrong answer of a right server."""
    for asked in traffic(7, 60, 100, 3):
        chunks = asked.chunks
        assert len({chunk.id for chunk in chunks}) == NUM_CHUNKS
        assert any(asked.answers[0] in _told(chunk.text) for chunk in chunks)


def test_traffic_is_skewed_and_its_orders_differ() -> None:
    """Otherwise there is nothing to reuse, or nothing to reorder."""
    asked = list(traffic(7, 60, 200, 0))
    sets = Counter(frozenset(chunk.id for chunk in request.chunks) for request in asked)
    orders = Counter(tuple(chunk.id for chunk in request.chunks) for request in asked)
    assert sets.most_common(1)[0][1] > 3 * len(asked) / len(sets)
    assert len(orders) > 2 * len(sets)


def test_conversations_have_ids_of_their_own_and_repeat_chunks() -> None:
    turns = [asked for asked in traffic(7, 60, 0, 3) if phase(asked) == "conversations"]
    by_id = Counter(turn.conversation for turn in turns)
    assert set(by_id.values()) == {NUM_TURNS}
    assert len(by_id) == 3
    shown = [chunk.id for turn in turns[:NUM_TURNS] for chunk in turn.chunks]
    assert len(set(shown)) < len(shown)


def test_plain_cache_computes_what_no_earlier_prompt_begins_with() -> None:
    """The last token is always computed, as in the engine; answers are cached as well."""
    cache = PlainCache()
    assert cache.computed([1, 2, 3], [4]) == 3
    assert cache.computed([1, 2, 9], []) == 1
    assert cache.computed([1, 2, 3], []) == 1
    assert cache.computed([1, 2, 3, 4, 5, 6], []) == 2
    assert cache.computed([7], []) == 1


def test_answer_is_right_whatever_its_white_space() -> None:
    asked = Request("demo:0", "Which?", answers=("The city X grows peas.", "peas"))
    rights = [
        Told(asked, Answer({}, text), 1, 1).right for text in (" The city X\ngrows peas. ", "peas", "Peas", "peas!")
    ]
    assert rights == [True, True, False, False]


def _told(text: str) -> set[str]:
    """The facts of a passage in the words of an answer: the first sentence names the kind, the others leave it out."""
    kind = text.split()[1]
    sentences = [sentence.strip() for sentence in text.removesuffix(".").split(". ")]
    facts = {f"The {kind} {' '.join(sentence.split()[-3:])}." for sentence in sentences}
    return facts


def test_the_server_retrieves_from_the_same_passages(tmp_path: Path) -> None:
    """What is indexed is what the questions are about, under the ids that the answers give back."""
    asked = [asked for asked in traffic(7, 60, 0, 0, 5) if phase(asked) == "server retrieves"]
    assert len(asked) == 5
    assert all(not request.chunks for request in asked)
    write_corpus(tmp_path / "corpus.jsonl", World(7, 60))
    rows = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["id"]: row["text"] for row in rows} == {passage.id: passage.text for passage in World(7, 60).passages}
