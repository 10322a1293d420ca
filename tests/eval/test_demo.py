"""The demo's traffic and its prediction for a plain prefix cache; no server."""

from __future__ import annotations

from collections import Counter

import pytest

from eval.demo import HEADS, NUM_CHUNKS, NUM_TURNS, plain_computed, tell, traffic


def test_every_question_has_its_passage_among_the_chunks() -> None:
    phases = traffic(100, 3)
    for asked in phases["single questions"] + phases["conversations"]:
        assert len({chunk.id for chunk in asked.chunks}) == NUM_CHUNKS
        value = asked.answers[-1]
        assert any(f" {value}" in chunk.text for chunk in asked.chunks)


def test_traffic_is_skewed_and_its_orders_differ() -> None:
    asked = traffic(200, 0)["single questions"]
    sets = Counter(frozenset(chunk.id for chunk in request.chunks) for request in asked)
    orders = Counter(tuple(chunk.id for chunk in request.chunks) for request in asked)
    assert sets.most_common(1)[0][1] > 3 * len(asked) / len(sets)
    assert len(orders) > 1.2 * len(sets)


def test_conversations_ask_about_every_chunk_and_the_server_retrieves_the_last() -> None:
    phases = traffic(20, 3, 5)
    turns = phases["conversations"]
    assert set(Counter(turn.conversation for turn in turns).values()) == {NUM_TURNS}
    assert len({turn.id for turn in turns}) == 3 * NUM_TURNS
    assert {chunk.id for turn in turns[:NUM_TURNS] for chunk in turn.chunks} == {
        chunk.id for chunk in turns[0].chunks
    }
    assert [request.chunks for request in phases["server retrieves"]] == [()] * 5


def test_plain_cache_computes_what_no_earlier_prompt_begins_with() -> None:
    """The last token is always computed, as in the engine; answers are cached as well."""
    seen: list[list[int]] = []
    assert plain_computed(seen, [1, 2, 3], [4]) == 3
    assert plain_computed(seen, [1, 2, 9], []) == 1
    assert plain_computed(seen, [1, 2, 3], []) == 1
    assert plain_computed(seen, [1, 2, 3, 4, 5, 6], []) == 2
    assert plain_computed(seen, [7], []) == 1


@pytest.mark.parametrize(
    ("hits", "right", "failed"),
    [(3, 1, ""), (0, 1, "no chunk was found"), (3, 0, "0 of 2 answers")],
)
def test_nothing_reused_or_wrong_answers_fail(
    hits: int, right: int, failed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = dict.fromkeys(HEADS, 5) | {"chunks_hit": hits, "right": right, "shown": "Which?"}
    row["first_text_ms"] = 1.0
    phases = {"single questions": [row, row], "conversations": []}
    assert tell(phases, any_answer=False) == bool(failed)
    out = capsys.readouterr().out
    assert failed in out
    assert "conversations" not in out
    assert sum("10" in line for line in out.splitlines()) >= 2
