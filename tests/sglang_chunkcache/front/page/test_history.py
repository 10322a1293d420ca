"""What the live page keeps of requests."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_chunkcache.front.fusion_options import ReuseIn, fused_request
from sglang_chunkcache.front.page.explanations import explanations
from sglang_chunkcache.front.page.history import BUCKET_S, MAX_LABEL, NUM_BUCKETS, NUM_RECENT
from sglang_chunkcache.front.request import Passage
from sglang_chunkcache.wire.report import Fallback, Report, Source
from tests.kit.front_bench import A, B, Bench, C, make_output
from tests.kit.front_planning import Talk


def test_buckets_are_what_answers_said() -> None:
    """Requests count where they end; the oldest bucket leaves after an hour of others."""
    bench = Bench()
    fates: dict[str, int] = {}
    for _ in range(3):
        for fate, amount in bench.run("q", A, B).answer()["fates"].items():
            fates[fate] = fates.get(fate, 0) + amount
    bench.now += BUCKET_S
    bench.run("q", C)
    first, second = bench.bookkeeper.history.buckets()
    assert (first["requests"], first["fates"], second["requests"]) == (3, fates, 1)
    assert (first["retrieved"], first["hit"]) == (6, 4)
    assert second["t"] - first["t"] == BUCKET_S
    for _ in range(NUM_BUCKETS):
        bench.now += BUCKET_S
        bench.run("q", C)
    assert [each["requests"] for each in bench.bookkeeper.history.buckets()] == [1] * NUM_BUCKETS
    bench.now += 10 * BUCKET_S
    assert len(bench.bookkeeper.history.buckets()) == NUM_BUCKETS - 10


def test_first_token_is_timed_where_there_is_one_of_its_own() -> None:
    """Of an answer that comes whole the first token's time is not known."""
    bench = Bench()
    request = bench.ask("q", A)
    request.streams = True
    bench.observe(request, make_output([65], 0, None, 0, None))
    request.answered_at = request.options.timeline.came + 0.25
    bench.reply(request)
    bench.run("q", A)
    (bucket,) = bench.bookkeeper.history.buckets()
    assert bucket["ttft_ms"] == {"exact": (250.0, 1)}
    whole, streamed = bench.bookkeeper.history.recent()
    assert (whole["ttft_ms"], streamed["ttft_ms"]) == (None, 250.0)
    assert streamed["ms"] > 0


def test_a_step_that_is_over_keeps_its_median() -> None:
    bench = Bench()
    for seconds in (0.1, 0.3, 0.2):
        request = bench.ask("q", A)
        request.streams = True
        bench.observe(request, make_output([65], 0, None, 0, None))
        request.answered_at = request.options.timeline.came + seconds
        bench.reply(request)
    before = bench.bookkeeper.history.buckets()[0]["ttft_ms"]
    assert before["exact"] == (pytest.approx(200.0), 3)
    bench.now += BUCKET_S
    bench.run("q", A)
    assert bench.bookkeeper.history.buckets()[0]["ttft_ms"] == before


def test_fates_that_are_not_told_are_no_exact_ones() -> None:
    bench = Bench()
    request = bench.ask("q", A, num_answers=2)
    request.streams = True
    bench.observe(request, make_output([65], 0, None, 0, None))
    bench.reply(request)
    (bucket,) = bench.bookkeeper.history.buckets()
    assert (bucket["requests"], bucket["ttft_ms"], bucket["fates"]) == (1, {}, {})
    assert shown(bench, 1)["prompt"][0]["from"] == "unknown"


def test_chunks_of_earlier_turns_have_the_labels_that_they_had() -> None:
    """As long as one of the last requests has them."""
    bench = Bench()
    bench.run("q", A, to="c")
    talk = Talk(bench, to="t")
    talk.turn("one", A)
    talk.turn("two", B)
    assert [each["label"] for each in shown(bench, 3)["prompt"]] == ["a", "b"]


def shown(bench: Bench, number: int) -> dict[str, Any]:
    found = bench.bookkeeper.history.request(number)
    assert found is not None
    return found


def test_a_plan_says_which_chunk_came_from_where() -> None:
    """In retriever order and in prompt order. No text of a chunk, and labels are cut."""
    bench = Bench(reuse="fused")
    label = "<script>" * MAX_LABEL
    long = Passage(label, "long")
    asked = bench.ask("q", A, B, long, fusion=fused_request(bench.config, ReuseIn(mode="fused")))
    spans = dict(zip(asked.labels, asked.spans, strict=True))
    moved = spans["a"]
    sources = (Source(moved.start, moved.end, asked.labels.index("a"), "host"),)
    report = Report(0, moved.end - moved.start, 0, 0, 0, sources, None, (), {})
    bench.reply(asked, report=report)
    found = shown(bench, 1)
    places = {each["label"]: each["from"] for each in found["prompt"]}
    assert places == {"a": "moved host", "b": "computed", label[:MAX_LABEL]: "computed"}
    assert [each["label"] for each in found["retrieved"]] == ["a", "b", label[:MAX_LABEL]]
    assert [each["label"][:9] for each in found["prompt"]] == [each[:9] for each in asked.order]
    assert "long" not in str(found)


def test_what_was_found_in_place_is_exact() -> None:
    bench = Bench()
    bench.run("q", A, B)
    bench.run("p", A, B)
    assert [each["from"] for each in shown(bench, 1)["prompt"]] == ["computed"] * 2
    assert [each["from"] for each in shown(bench, 2)["prompt"]] == ["exact"] * 2


def test_only_the_last_requests_are_kept() -> None:
    """And none that nobody has asked: preprocessing."""
    bench = Bench()
    for _ in range(NUM_RECENT + 1):
        bench.run("q", A)
    recent = bench.bookkeeper.history.recent()
    assert [each["number"] for each in recent] == [*range(NUM_RECENT + 1, 1, -1)]
    assert bench.bookkeeper.history.request(1) is None
    assert not {"prompt", "retrieved"} & {*recent[0]}


@pytest.mark.parametrize("reason", Fallback)
def test_every_fallback_is_explained(reason: Fallback) -> None:
    meaning, advice = explanations()[reason]
    assert meaning
    assert advice
    assert "`" not in meaning + advice
