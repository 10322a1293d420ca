"""Why chunks were computed: each usual mistake has its reason, each chunk one,
and none tells of another tenant."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from radix_ext import FusionRequest, Span, extend_chain, root_chain
from sglang_chunkcache.front import hint_log, reasons
from sglang_chunkcache.front.answer import explained
from sglang_chunkcache.front.metrics import Metrics
from sglang_chunkcache.front.misplaced import Misplaced, chunks_field
from sglang_chunkcache.front.request import Identity, Passage
from sglang_chunkcache.wire.report import Explanation
from tests.sglang_chunkcache.front.front_bench import ME, A, Asked, B, Bench, C, D, user

TEXT = "".join(Random(0).choices("abcdefgh", k=120))


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def why(request: Asked) -> dict[str, list[str]]:
    """Reason -> labels of the chunks that were computed for it."""
    found: dict[str, list[str]] = {}
    for each in request.answer()["missed"]:
        found.setdefault(each["reason"], []).extend(each["chunks"])
    return found


# The usual mistakes: eight requests with the same four passages, each time with another one

Send = Callable[[Bench, int], Asked]
MISTAKES: Mapping[str, tuple[Send, str | None]] = {
    "none": (lambda bench, i: bench.run(f"q{i}", A, B, C, D), None),
    "time in the system prompt": (
        lambda bench, i: bench.run([system(f"Be brief. Now: 12:00:0{i}"), user("q")], A, B, C, D),
        "other_head",
    ),
    "user's name in the system prompt": (
        lambda bench, i: bench.run([system(f"You talk to user{i}"), user("q")], A, B, C, D),
        "other_head",
    ),
    "time in a tool": (
        lambda bench, i: bench.run("q", A, B, C, D, tools=[{"now": i}] * (i + 1)),
        "other_head",
    ),
    "score in the chunk's text": (
        lambda bench, i: bench.run(
            "q", *(Passage(p.label, f"[score 0.{i}] {p.text}") for p in (A, B, C, D))
        ),
        "new_chunk",
    ),
    "overlapping windows": (
        lambda bench, i: bench.run(
            "q", *(Passage(str(k), TEXT[9 * i + k :][:40]) for k in (0, 10, 20, 30))
        ),
        "new_chunk",
    ),
    "a salt for each request": (
        lambda bench, i: bench.run("q", A, B, C, D, who=Identity(cache_salt=f"request {i}")),
        "new_tenant",
    ),
    "passages in the message's text": (
        lambda bench, i: bench.run(A.text + B.text + f"q{i}"),
        "no_chunks",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_has_its_reason(mistake: str) -> None:
    """From the second request on; where there is none, all is found."""
    bench = Bench()
    send, reason = MISTAKES[mistake]
    answers = [send(bench, i).answer() for i in range(8)][1:]
    assert {tuple(answer["fallbacks"]) for answer in answers} == {(reason,) if reason else ()}
    of_chunks = reason and reason != "no_chunks"
    assert {tuple(each["reason"] for each in answer["missed"]) for answer in answers} == {
        (reason,) if of_chunks else ()
    }
    assert sum(answer["chunks_hit"] for answer in answers) == (28 if reason is None else 0)
    if of_chunks:
        assert [each["chunks"] for answer in answers for each in answer["missed"]] == [
            answers[0]["order"]
        ] * 7
    shares = bench.books.stats()["reasons"]
    if reason is None:
        assert shares["chunks_by_reason"] == {"new_chunk": 4 / 32, "found": 28 / 32}
    elif of_chunks:
        assert shares["chunks_by_reason"][reason] >= 28 / 32
        assert sum(shares["tokens_by_reason"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("mistake", "field", "common"),
    [
        ("time in the system prompt", "messages.0", "\x02\x01sBe brief. Now: 12:00:0"),
        ("user's name in the system prompt", "messages.0", "\x02\x01sYou talk to user"),
        ("time in a tool", "tools", "\x02["),
    ],
)
def test_where_the_heads_part_is_told(mistake: str, field: str, common: str) -> None:
    """The field of the request, and the first token of the prompt,
    that differ from what the chunks are cached behind."""
    bench = Bench()
    send, _ = MISTAKES[mistake]
    missed = [send(bench, i).answer()["missed"] for i in range(3)][1:]
    assert [(m["field"], m["token"]) for (m,) in missed] == [(field, len(common))] * 2


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        ({}, {"messages": [system("s"), user("q")]}, "messages.0"),
        ({"messages": [system("s"), user("q")]}, {}, "messages.0"),
        (
            {"messages": [system("s"), user("q")]},
            {"messages": [system("s"), user("a"), system("b"), user("q")]},
            "messages.1",
        ),
        ({}, {"who": Identity("me", lora="x")}, "model"),
        ({}, {"who": Identity("another key")}, None),
    ],
    ids=["added", "left out", "a message more", "adapter", "the same"],
)
def test_what_differs_is_named(
    first: dict[str, Any], second: dict[str, Any], field: str | None
) -> None:
    """Also a part that only one of the two has.
    An adapter changes no token; an API key shares all."""
    bench = Bench()
    run(bench, first)
    answer = run(bench, second).answer()
    assert [(m["reason"], m.get("field")) for m in answer["missed"]] == (
        [("other_head", field)] if field else []
    )
    assert (answer["chunks_hit"] == 2) == (field is None)


def run(bench: Bench, options: Mapping[str, Any]) -> Asked:
    return bench.run(options.get("messages", "q"), A, B, who=options.get("who", ME))


def test_parts_are_named_by_their_place() -> None:
    """Frontend programs send parts."""
    bench = Bench()
    for text in ("one", "only"):
        request = bench.parts([text, [A], "?"])
        bench.reply(request)
    (missed,) = request.answer()["missed"]
    assert (missed["reason"], missed["field"], missed["token"]) == (
        "other_head",
        "parts.0",
        len("\x02on"),
    )


# Same text before it


def test_other_order_is_told() -> None:
    """Cached behind the same head; but in the retriever's order,
    or behind a chunk that this request does not have."""
    bench = Bench(order="retriever")
    bench.run("1", A, B)
    assert why(bench.run("2", C, A)) == {"new_chunk": ["c"], "other_order": ["a"]}
    other = Bench()
    other.run("1", A, B, C)
    assert why(other.run("2", B, C)) == {"other_order": ["b", "c"]}


def test_evicted_is_told() -> None:
    """Also where the front did not know yet:
    it planned on the chunks, and the rank had them no more."""
    bench = Bench()
    bench.run("1", A, B)
    bench.ranks[0].evict_all()
    early = bench.run("2", A, B)
    assert (early.planned_len, why(early)) == (2, {"evicted": ["a", "b"]})
    bench.ranks[0].evict_all()
    bench.run("3", D)
    late = bench.run("4", A, B)
    assert (late.planned_len, why(late)) == (0, {"evicted": ["a", "b"]})
    bench.books.mirrors[0].restart(bench.ranks[0].log.epoch + 1)  # a flush
    bench.ranks[0].held.clear()
    assert why(bench.run("5", A)) == {"evicted": ["a"]}


def test_chunk_that_was_evicted_behind_another_head_is_of_another_head() -> None:
    """A larger cache would not have helped."""
    bench = Bench()
    bench.run([system("1"), user("q")], A)
    bench.ranks[0].evict_all()
    bench.run("q", D)
    assert why(bench.run([system("2"), user("q")], A)) == {"other_head": ["a"]}


def test_head_that_is_known_counts_before_a_later_one() -> None:
    """Two applications: the chunk was last seen behind the other one's head,
    and is in its place all the same."""
    bench = Bench(order="retriever")
    for head in "12":
        bench.run([system(head), user("q")], A, B)
    assert why(bench.run([system("1"), user("q")], B)) == {"other_order": ["b"]}


def test_other_rank_is_told() -> None:
    """By turns, the second request goes where nothing is."""
    bench = Bench(num_ranks=2, routing="round_robin")
    bench.run("1", A)
    assert why(bench.run("2", A)) == {"other_rank": ["a"]}
    assert why(bench.run("3", A)) == {}


@pytest.mark.parametrize(
    ("start", "reasons"), [(None, {"must_compute": ["b"]}), (4, {"must_compute": ["a", "b"]})]
)
def test_what_must_be_computed_is_told(start: int | None, reasons: dict[str, list[str]]) -> None:
    """A prompt that ends with a chunk, or whose logprobs are asked for:
    the rank has the chunk and computes it."""
    bench = Bench()
    bench.reply(bench.parts(["x", [A, B]]))
    request = bench.parts(["x", [A, B]], logprob_start=start)
    assert request.planned_len == 2
    bench.reply(request, cached=0 if start else request.spans[0].end)
    assert why(request) == reasons


def test_request_under_way_has_taught_nothing_yet() -> None:
    """Two at once: the chunk of both is new. After the answers it is not."""
    bench = Bench()
    first, second = bench.ask("1", A), bench.ask("2", A)
    for request in (first, second):
        bench.reply(request)
        assert why(request) == {"new_chunk": ["a"]}
    assert why(bench.run([system("s"), user("q")], A)) == {"other_head": ["a"]}


def test_plain_text_has_no_other_reason() -> None:
    """The rank could not read where chunks are: that is why, whatever is cached."""
    bench = Bench()
    bench.run("1", A)
    request = bench.ask("2", B, A)
    output = {
        "meta_info": {"completion_tokens": 1, "cached_tokens": 0, "finish_reason": None},
        "output_ids": [65],
    }
    bench.observe(request, output)
    assert why(request) == {"plain_text": ["a", "b"]}
    assert request.answer()["fallbacks"] == ["plain_text"]


def test_moved_kv_has_its_own_reasons() -> None:
    """A request that asks for it is not told twice."""
    bench = Bench(reuse="fused")
    request = bench.ask("1", A, fusion=FusionRequest("first", 0.1))
    bench.reply(request)
    assert request.answer()["missed"] is None
    assert request.answer()["fallbacks"] == ["no_report"]


# Conversations


def test_later_turns_follow_a_history() -> None:
    """A new chunk is new, one that is cached elsewhere is behind other text: it goes on after the
    first area. History found counts nothing."""
    bench = Bench()
    bench.run("q", C)
    messages = [user("one")]
    bench.turn(messages, A)
    counted = bench.books.metrics.totals()["chunks_by_reason"]
    second = bench.ask([*messages, user("two")], C, B, to="c")
    bench.reply(second, cached=second.area[-1].end + 5)
    (of_new, of_head) = sorted(second.answer()["missed"], key=lambda each: each["reason"])
    assert (of_new["reason"], of_new["chunks"], of_head["chunks"]) == ("new_chunk", ["b"], ["c"])
    assert (of_head["reason"], of_head["field"], of_head["token"]) == (
        "other_head",
        "history",
        second.area[-1].end,
    )
    assert bench.books.metrics.totals()["chunks_by_reason"] == {
        **counted,
        "new_chunk": counted["new_chunk"] + 1,
        "other_head": 1,
    }


def test_history_that_left_the_cache_is_told() -> None:
    """The turn is asked again, and finds only the first chunks:
    the chunk of the second turn was evicted, in this order."""
    bench = Bench()
    messages = [user("one")]
    bench.turn(messages, A)
    for _ in range(2):
        second = bench.ask([*messages, user("two")], B, C, to="c")
        bench.reply(second, cached=second.area[-1].end)
    assert why(second) == {"evicted": ["b", "c"]}
    other = bench.ask([*messages, user("two")], C, B, to="c")
    bench.reply(other, cached=other.area[-1].end)
    assert why(other) == {"other_order": ["c", "b"]}


def test_later_turn_on_another_rank_is_told() -> None:
    """By turns, a retry of the second turn goes where its chunk is not."""
    bench = Bench(num_ranks=2, routing="round_robin")
    messages = [user("one")]
    first = bench.turn(messages, A)
    reasons = [why(bench.run([*messages, user("two")], B, to="c")) for _ in range(2)]
    assert reasons == [
        {"other_rank": [first.area[0].chunk[:8]], "new_chunk": ["b"]},
        {"other_rank": ["b"]},
    ]


def test_places_of_several_answers_are_noted_too() -> None:
    """SGLang does not report what a request with `n` > 1 has found: all its chunks are noted."""
    bench = Bench()
    messages = [user("one")]
    bench.turn(messages, A)
    request = bench.reply(bench.ask([*messages, user("two")], B, to="c", num_answers=2))
    assert request.answer()["missed"] is None
    again = bench.ask([*messages, user("two")], B, to="c")
    bench.reply(again, cached=again.area[-1].end)
    assert why(again) == {"evicted": ["b"]}


def test_chunk_of_a_later_turn_is_known_in_a_first_one() -> None:
    """Behind the head alone it is not cached: the other text goes on where this one ends."""
    bench = Bench()
    messages = [user("one")]
    bench.turn(messages, A)
    bench.turn([*messages, user("two")], B)
    (missed,) = bench.run("q", B).answer()["missed"]
    assert (missed["reason"], missed["field"], missed["token"]) == (
        "other_head",
        "history",
        len("\x02\x01u"),
    )


# One reason each


class NaiveReasons:
    """Every answered request in a list, and the chains that the front knows of."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.answered: list[tuple[str, str, tuple[str, ...]]] = []
        self.tenants: set[str] = set()

    def expect(
        self, tenant: str, namespace: str, ids: Sequence[str], *, is_named: bool
    ) -> list[str]:
        return [
            self._reason(tenant, namespace, ids[: i + 1], is_named=is_named)
            for i in range(len(ids))
        ]

    def _reason(self, tenant: str, namespace: str, ids: Sequence[str], *, is_named: bool) -> str:
        if chain(namespace, ids) in self.known:
            return "evicted"
        for other, text, order in reversed(self.answered):
            if (other, text) == (tenant, namespace) and ids[-1] in order:
                place = chain(namespace, order[: order.index(ids[-1]) + 1])
                return "other_order" if place in self.known else "evicted"
        if any(other == tenant and ids[-1] in order for other, _, order in self.answered):
            return "other_head"
        return "new_tenant" if is_named and tenant not in self.tenants else "new_chunk"


def chain(namespace: str, ids: Sequence[str]) -> int:
    end = root_chain(namespace)
    for chunk in ids:
        end = extend_chain(end, chunk)  # type: ignore[arg-type]
    return end


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("order", ["tree", "retriever"])
def test_every_missed_chunk_has_the_one_reason_that_a_list_of_requests_gives(
    seed: int, order: str
) -> None:
    """Tenants, heads, orders and evictions at random."""
    bench, naive, draw = Bench(order=order), NaiveReasons(), Random(seed)
    passages = [Passage(str(n), f"passage {n}") for n in range(7)]
    seen = set[str]()
    for _ in range(120):
        if draw.random() < 0.1:
            bench.ranks[0].evict_all()
        who = draw.choice([Identity("k"), *(Identity("k", cache_salt=salt) for salt in "xyz")])
        messages = [system(draw.choice("123")), user("q")]
        request = bench.ask(messages, *draw.sample(passages, draw.randint(1, 4)), who=who)
        ids = [span.chunk for span in request.area]
        expected = naive.expect(who.tenant, request.namespace, ids, is_named=who.is_named)
        found = bench.ranks[0].found(request.custom_params, request.input_ids)
        bench.reply(request, cached=found)
        reasons = {
            label: each["reason"] for each in request.answer()["missed"] for label in each["chunks"]
        }
        number = sum(span.end <= found for span in request.area)
        assert reasons == dict(zip(request.order[number:], expected[number:], strict=True))
        assert sum(each["tokens"] for each in request.answer()["missed"]) == length(
            request.area[number:]
        )
        naive.answered.append((who.tenant, request.namespace, tuple(ids)))
        naive.known = set(bench.ranks[0].held)
        naive.tenants.add(who.tenant)
        seen |= {*reasons.values()}
    assert seen >= {"evicted", "other_order", "other_head", "new_chunk", "new_tenant"}


def length(spans: Sequence[Span]) -> int:
    return sum(span.end - span.start for span in spans)


# Tenants


@pytest.mark.parametrize(
    "mine", [Identity("k"), Identity("k", cache_salt="mine"), Identity("k", extra_key="")], ids=str
)
def test_anothers_texts_change_no_byte(mine: Identity) -> None:
    """Answer and explanation are the same whether another tenant has the texts cached,
    in whatever place, or does not exist."""

    def seen(other: Identity | None) -> list[bytes]:
        bench, shown = Bench(), list[bytes]()
        for chunks in ([A, B], [B, A], [C], [A, B, C]):
            for messages in ([user("q")], [system("s"), user("q")]):
                if other is not None:
                    for _ in range(2):
                        bench.run(messages, *chunks, who=other)
                plan = bench.plan(messages, *chunks, who=mine)
                shown.append(orjson.dumps(explained(plan, Explanation(0, 0, 0))))
                shown.append(orjson.dumps(bench.run(messages, *chunks, who=mine).answer()))
        return shown

    alone = seen(None)
    assert (
        alone
        == seen(Identity("k", cache_salt="theirs"))
        == seen(Identity("other", extra_key="theirs"))
    )
    assert alone != seen(mine)  # the control


def test_explain_tells_the_same_reasons() -> None:
    """By what the rank has: on the device, in host memory, in the storage."""
    bench = Bench()
    bench.run([system("1"), user("q")], A, B)
    plan = bench.plan([system("2"), user("q")], A, C)
    shown = explained(plan, Explanation(0, 0, 0))
    assert shown["fallbacks"] == ("other_head", "new_chunk")
    assert [(m["reason"], m["chunks"]) for m in shown["missed"]] == [
        ("other_head", ["a"]),
        ("new_chunk", ["c"]),
    ]
    end = plan.spans[0].end
    assert [
        m["chunks"]
        for m in explained(plan, Explanation(end - 3, 0, 0, loaded=2, stored=1))["missed"]
    ] == [["c"]]
    assert bench.books.metrics.totals()["fallbacks"] == {"new_chunk": 1}


def test_forget_is_a_restart() -> None:
    """The cache stays; what was asked for is forgotten."""
    bench = Bench()
    bench.run("q", A)
    bench.books.forget()
    assert why(bench.run([system("s"), user("q")], A)) == {"new_chunk": ["a"]}


# What operators are told


def test_heads_that_never_recur_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Chunks recur, heads never do: one line in ten minutes, with the place.
    One head that recurs ends it."""
    bench = Bench()
    send, _ = MISTAKES["time in the system prompt"]
    with caplog.at_level(logging.WARNING):
        for i in range(reasons.HEADS_IN_A_ROW):
            send(bench, i)
        assert caplog.records == []
        for i in range(10):
            send(bench, 100 + i)
    (record,) = caplog.records
    assert "each behind another text" in record.getMessage()
    assert "messages.0, at token" in record.getMessage()
    (row,) = bench.books.reasons.hints()["heads"]
    assert (row["requests"], row["field"]) == (reasons.HEADS_IN_A_ROW + 9, "messages.0")
    bench.now += hint_log.EVERY_S
    send(bench, 200)
    assert len(caplog.records) == 2
    send(bench, 200)
    assert bench.books.reasons.hints()["heads"] == []


def test_new_chunks_behind_new_heads_are_no_hint(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing recurs, so no head is to blame."""
    bench = Bench()
    for i in range(40):
        bench.run([system(str(i)), user("q")], Passage("p", f"new {i}"))
    assert bench.books.reasons.hints()["heads"] == []
    assert caplog.records == []


def test_salts_that_never_recur_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all tenants, and in no answer. Requests without a salt do not count."""
    monkeypatch.setattr(reasons, "SALTS", 20)
    monkeypatch.setattr(reasons, "NEW_SALTS", 19)
    bench = Bench()
    for i in range(19):
        bench.run("q", A, who=Identity(cache_salt=str(i)))
        bench.run("q", A)
    assert caplog.records == []
    bench.run("q", A, who=Identity(cache_salt="0"))
    (record,) = caplog.records
    assert (
        "of the last 20 requests with a cache_salt or extra_key, 19 had one that had not come since"
        " the start" in record.getMessage()
    )
    assert bench.books.reasons.hints()["salts"] == {"requests": 20, "new": 19, "never_recur": True}
    for _ in range(2):
        bench.run("q", A, who=Identity(cache_salt="0"))
    assert bench.books.reasons.hints()["salts"] == {"requests": 20, "new": 17, "never_recur": False}


# `/v1`


def sent(path: str, body: Any) -> SimpleNamespace:
    """A request as FastAPI leaves it."""
    return SimpleNamespace(scope={"path": path}, _json=body)


MESSAGES = [{"role": "user", "content": "q", "chunks": [{"text": "x"}]}]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (sent("/v1/chat/completions", {"messages": [], "chunks": [{"text": "x"}]}), "chunks"),
        (
            sent(
                "/v1/chat/completions", {"messages": [{"role": "user", "chunks": []}], "chunks": []}
            ),
            None,
        ),
        (
            sent(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "chunks": None}], "chunks": None},
            ),
            None,
        ),
        (sent("/v1/chat/completions", {"messages": MESSAGES}), "messages.chunks"),
        (sent("/v1/completions", {"prompt": "q", "chunks": [{"text": "x"}]}), "chunks"),
        (
            sent(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": '"chunks"'}, "odd"]},
            ),
            None,
        ),
        (
            sent(
                "/rag/v1/chat/completions", {"messages": MESSAGES, "chunks": MESSAGES[0]["chunks"]}
            ),
            None,
        ),
        (sent("/generate", {"chunks": [{"text": "x"}]}), None),
        (sent("/v1/chat/completions", [1]), None),
        (SimpleNamespace(scope={"path": "/v1/chat/completions"}), None),
        (None, None),
    ],
)
def test_chunks_on_v1_are_found(request_: Any, field: str | None) -> None:
    """At the top or in a message, and nowhere else; none are none;
    a request that is not HTTP has none."""
    assert chunks_field(request_) == field


def test_chunks_on_v1_are_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody reads them, so the answer has no context."""
    metrics, now = Metrics(prometheus=False), [0.0]
    misplaced = Misplaced(lambda: metrics, clock=lambda: now[0])
    own = {"chunks": MESSAGES[0]["chunks"]}
    bodies: list[dict[str, Any]] = [own, own, {"messages": MESSAGES}, {"messages": []}]
    for body in bodies:
        misplaced.look(sent("/v1/chat/completions", body))
    assert metrics.totals()["misplaced"] == {"chunks": 2, "messages.chunks": 1}
    assert ["/v1/chat/completions got `chunks`" in caplog.text, len(caplog.records)] == [True, 2]
    now[0] += hint_log.EVERY_S
    misplaced.look(sent("/v1/chat/completions", own))
    assert len(caplog.records) == 3


# Several ranks, caches that were emptied


@pytest.mark.parametrize("at", [0, 1])
def test_a_place_in_a_flushed_cache_is_gone(at: int) -> None:
    """Whichever rank had it: nobody has it now. Chunks of the first turn, and of a later one."""
    bench = Bench(num_ranks=2)
    messages = [user("one")]
    bench.turn(messages, A)
    messages.append(user("two"))
    bench.turn(messages, B)
    messages.append(user("three"))
    for rank, mirror in zip(bench.ranks, bench.books.mirrors, strict=True):
        rank.log.restart()
        rank.held.clear()
        mirror.apply(rank.log.unread())
    request = bench.reply(bench.ask(messages, C, to="c", rank=at))
    assert {reason: len(chunks) for reason, chunks in why(request).items()} == {
        "evicted": 2,
        "new_chunk": 1,
    }


def test_another_order_on_another_rank_is_another_order() -> None:
    """The rank that has the chunk would not have found it here either."""
    bench = Bench(num_ranks=2, order="retriever")
    bench.reply(bench.ask("q", A, B, rank=0))
    assert why(bench.reply(bench.ask("q", C, B, rank=1))) == {
        "new_chunk": ["c"],
        "other_order": ["b"],
    }
    assert why(bench.reply(bench.ask("q", A, D, rank=1))) == {
        "other_rank": ["a"],
        "new_chunk": ["d"],
    }


def test_heads_that_recur_are_no_hint(caplog: pytest.LogCaptureFixture) -> None:
    """A pool that is too small for them: they were cached, and have left."""
    bench = Bench()
    with caplog.at_level(logging.WARNING):
        for number in range(120):
            bench.run([system(f"prompt {number % 30}"), user("q")], A, B)
            if number >= 30:
                bench.ranks[0].evict_all()
                bench.books.mirrors[0].apply(bench.ranks[0].log.unread())
    assert bench.books.reasons.hints()["heads"] == []


def test_tenants_beyond_the_table_are_not_new() -> None:
    """It forgets some, who come back."""
    bench = Bench(max_tenants=5)
    for number in range(reasons.SALTS + 100):
        bench.reply(bench.ask("q", A, who=Identity("me", cache_salt=str(number % 20))))
    assert not bench.books.reasons.hints()["salts"]["never_recur"]
