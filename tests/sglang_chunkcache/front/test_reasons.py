"""Why chunks were computed: each usual mistake has its reason, each chunk one,
and none tells of another tenant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from radix_ext import Span
from sglang_chunkcache.front.answer import explained
from sglang_chunkcache.front.metrics import Metrics
from sglang_chunkcache.front.misplaced import Misplaced, chunks_field
from sglang_chunkcache.front.request import Identity, Passage
from sglang_chunkcache.wire.report import Explanation
from tests.kit.front_bench import ME, A, Asked, B, Bench, C, D, user
from tests.kit.front_planning import Talk, system
from tests.reference.chains import chain_of

TEXT = "".join(Random(0).choices("abcdefgh", k=120))


def why(request: Asked) -> dict[str, list[str]]:
    """Reason -> labels of the chunks that were computed for it."""
    found: dict[str, list[str]] = {}
    for each in request.answer()["missed"]:
        found.setdefault(each["reason"], []).extend(each["chunks"])
    return found


def behind(bench: Bench, head: str, *chunks: Passage, **options: Any) -> Asked:
    """A request whose chunks stand behind a system prompt."""
    return bench.run([system(head), user("q")], *chunks, **options)


def place(request: Asked) -> tuple[str, str, int]:
    (missed,) = request.answer()["missed"]
    return missed["reason"], missed["field"], missed["token"]


# The usual mistakes: eight requests with the same four passages, each time with another one.
# Where only heads differ, the answer names the request's field and the text before the difference.

Send = Callable[[Bench, int], Asked]
ALL = (A, B, C, D)
MISTAKES: Mapping[str, tuple[Send, str | None, tuple[str, str] | None]] = {
    "none": (lambda bench, i: bench.run(f"q{i}", *ALL), None, None),
    "time in the system prompt": (
        lambda bench, i: behind(bench, f"Be brief. Now: 12:00:0{i}", *ALL),
        "other_head",
        ("messages.0", "\x02\x01sBe brief. Now: 12:00:0"),
    ),
    "time in a tool": (
        lambda bench, i: bench.run("q", *ALL, tools=[{"now": i}] * (i + 1)),
        "other_head",
        ("tools", "\x02["),
    ),
    "score in the chunk's text": (
        lambda bench, i: bench.run("q", *(Passage(p.label, f"[0.{i}] {p.text}") for p in ALL)),
        "new_chunk",
        None,
    ),
    "overlapping windows": (
        lambda bench, i: bench.run(
            "q", *(Passage(str(k), TEXT[9 * i + k :][:40]) for k in range(4))
        ),
        "new_chunk",
        None,
    ),
    "a salt for each request": (
        lambda bench, i: bench.run("q", *ALL, who=Identity(cache_salt=f"request {i}")),
        "new_tenant",
        None,
    ),
    "passages in the message's text": (
        lambda bench, i: bench.run(A.text + B.text + f"q{i}"),
        "no_chunks",
        None,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_has_its_reason(mistake: str) -> None:
    """From the second request on; where there is none, all is found."""
    bench = Bench()
    send, reason, where = MISTAKES[mistake]
    requests = [send(bench, i) for i in range(8)][1:]
    answers = [request.answer() for request in requests]
    assert {tuple(answer["fallbacks"]) for answer in answers} == {(reason,) if reason else ()}
    assert sum(answer["chunks_hit"] for answer in answers) == (28 if reason is None else 0)
    missed = [(each["reason"], each["chunks"]) for answer in answers for each in answer["missed"]]
    shares = bench.bookkeeper.stats()["reasons"]
    if reason in (None, "no_chunks"):
        assert missed == []
    else:
        assert missed == [(reason, answers[0]["order"])] * 7
        assert shares["chunks_by_reason"][reason] >= 28 / 32
        assert sum(shares["tokens_by_reason"].values()) == pytest.approx(1)
    if where:
        expected = ("other_head", where[0], len(where[1]))
        assert [place(request) for request in requests] == [expected] * 7
    if reason is None:
        assert shares["chunks_by_reason"] == {"new_chunk": 4 / 32, "found": 28 / 32}


SYSTEM = [system("s"), user("q")]
LONGER = [system("s"), user("a"), system("b"), user("q")]


@pytest.mark.parametrize(
    ("first", "second", "who", "field"),
    [
        ("q", SYSTEM, ME, "messages.0"),
        (SYSTEM, "q", ME, "messages.0"),
        (SYSTEM, LONGER, ME, "messages.1"),
        ("q", "q", Identity("me", lora="x"), "model"),
        ("q", "q", Identity("another key"), None),
    ],
)
def test_what_differs_is_named(first: Any, second: Any, who: Identity, field: str | None) -> None:
    """An adapter changes no token; an API key shares all."""
    bench = Bench()
    bench.run(first, A, B)
    answer = bench.run(second, A, B, who=who).answer()
    missed = [(each["reason"], each.get("field")) for each in answer["missed"]]
    assert missed == ([("other_head", field)] if field else [])
    assert (answer["chunks_hit"] == 2) == (field is None)


# Same text before it


@pytest.mark.parametrize(
    ("start", "reasons"), [(None, {"must_compute": ["b"]}), (4, {"must_compute": ["a", "b"]})]
)
def test_what_must_be_computed_is_told(start: int | None, reasons: dict[str, list[str]]) -> None:
    """A prompt that ends with a chunk, or whose logprobs are asked for."""
    bench = Bench()
    bench.reply(bench.parts(["x", [A, B]]))
    request = bench.parts(["x", [A, B]], logprob_start=start)
    assert request.planned_len == 2
    bench.reply(request, cached=0 if start else request.spans[0].end)
    assert why(request) == reasons


def test_plain_text_has_no_other_reason() -> None:
    bench = Bench()
    bench.run("1", A)
    request = bench.ask("2", B, A)
    meta = {"completion_tokens": 1, "cached_tokens": 0, "finish_reason": None}
    bench.observe(request, {"meta_info": meta, "output_ids": [65]})
    assert why(request) == {"plain_text": ["a", "b"]}
    assert request.answer()["fallbacks"] == ["plain_text"]


# Conversations


def second_turn(bench: Bench, *chunks: Passage, more: int = 0, **options: Any) -> Asked:
    """Of a conversation whose first turn had A; the rank finds that turn's chunks, and some tokens
    more."""
    talk = Talk(bench)
    talk.messages = [user("one"), {"role": "assistant", "content": "ok"}]
    request = talk.ask("two", *chunks, **options)
    return bench.reply(request, cached=request.area[-1].end + more)


def test_later_turns_follow_a_history() -> None:
    """A new chunk is new, one cached elsewhere is behind other text."""
    bench = Bench()
    bench.run("q", C)
    Talk(bench).turn("one", A)
    counted = bench.bookkeeper.metrics.totals()["chunks_by_reason"]
    second = second_turn(bench, C, B, more=5)
    of_new, of_head = sorted(second.answer()["missed"], key=lambda each: each["reason"])
    assert (of_new["reason"], of_new["chunks"], of_head["chunks"]) == ("new_chunk", ["b"], ["c"])
    assert (of_head["reason"], of_head["field"]) == ("other_head", "history")
    assert of_head["token"] == second.area[-1].end
    now = {**counted, "new_chunk": counted["new_chunk"] + 1, "other_head": 1}
    assert bench.bookkeeper.metrics.totals()["chunks_by_reason"] == now


def test_history_that_left_the_cache_is_told() -> None:
    """The turn is asked again, and finds only the first chunks."""
    bench = Bench()
    Talk(bench).turn("one", A)
    _, second = (second_turn(bench, B, C) for _ in range(2))
    assert why(second) == {"evicted": ["b", "c"]}
    assert why(second_turn(bench, C, B)) == {"other_order": ["c", "b"]}


def test_later_turn_on_another_rank_is_told() -> None:
    talk = Talk(Bench(num_ranks=2, routing="round_robin"))
    first = talk.turn("one", A)
    second = [*talk.messages, user("two")]
    assert [why(talk.bench.run(second, B, to="c")) for _ in range(2)] == [
        {"other_rank": [first.area[0].chunk[:8]], "new_chunk": ["b"]},
        {"other_rank": ["b"]},
    ]


# One reason each


class NaiveReasons:
    """Every answered request in a list, and the chains that the front knows of."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.answered: list[tuple[str, str, tuple[Any, ...]]] = []
        self.tenants: set[str] = set()

    def expect(
        self, tenant: str, namespace: str, ids: Sequence[Any], *, is_named: bool
    ) -> list[str]:
        return [
            self._reason(tenant, namespace, ids[: i + 1], is_named=is_named)
            for i in range(len(ids))
        ]

    def _reason(self, tenant: str, namespace: str, ids: Sequence[Any], *, is_named: bool) -> str:
        if chain_of(namespace, ids) in self.known:
            return "evicted"
        for other, text, order in reversed(self.answered):
            if (other, text) == (tenant, namespace) and ids[-1] in order:
                place = chain_of(namespace, order[: order.index(ids[-1]) + 1])
                return "other_order" if place in self.known else "evicted"
        if any(other == tenant and ids[-1] in order for other, _, order in self.answered):
            return "other_head"
        return "new_tenant" if is_named and tenant not in self.tenants else "new_chunk"


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
        missed = bench.reply(request, cached=found).answer()["missed"]
        reasons = {label: each["reason"] for each in missed for label in each["chunks"]}
        lost: list[Span] = [span for span in request.area if span.end > found]
        number = len(ids) - len(lost)
        assert reasons == dict(zip(request.order[number:], expected[number:], strict=True))
        num_tokens = sum(span.end - span.start for span in lost)
        assert sum(each["tokens"] for each in missed) == num_tokens
        naive.answered.append((who.tenant, request.namespace, tuple(ids)))
        naive.known = set(bench.ranks[0].held)
        naive.tenants.add(who.tenant)
        seen |= {*reasons.values()}
    assert seen >= {"evicted", "other_order", "other_head", "new_chunk", "new_tenant"}


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
    assert alone == seen(Identity("k", cache_salt="theirs"))
    assert alone == seen(Identity("other", extra_key="theirs"))
    assert alone != seen(mine)  # the control


def test_explain_tells_the_same_reasons() -> None:
    bench = Bench()
    behind(bench, "1", A, B)
    plan = bench.plan([system("2"), user("q")], A, C)
    end = plan.spans[0].end
    nothing = explained(plan, Explanation(0, 0, 0))
    first = explained(plan, Explanation(end - 3, 0, 0, loaded=2, stored=1))
    assert nothing["fallbacks"] == ("other_head", "new_chunk")
    assert [(each["reason"], each["chunks"]) for each in nothing["missed"]] == [
        ("other_head", ["a"]),
        ("new_chunk", ["c"]),
    ]
    assert [each["chunks"] for each in first["missed"]] == [["c"]]
    assert bench.bookkeeper.metrics.totals()["fallbacks"] == {"new_chunk": 1}


# `/v1`


def sent(body: Any, path: str = "/v1/chat/completions") -> SimpleNamespace:
    """A request as FastAPI leaves it."""
    return SimpleNamespace(scope={"path": path}, _json=body)


CHUNKS = [{"text": "x"}]
MESSAGES = [{"role": "user", "content": "q", "chunks": CHUNKS}]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (sent({"messages": [], "chunks": CHUNKS}), "chunks"),
        (sent({"messages": [{"role": "user", "chunks": None}], "chunks": None}), None),
        (sent({"messages": MESSAGES}), "messages.chunks"),
        (sent({"messages": [{"role": "user", "content": '"chunks"'}, "odd"]}), None),
        (sent({"messages": MESSAGES, "chunks": CHUNKS}, "/rag/v1/chat/completions"), None),
        (sent({"chunks": CHUNKS}, "/generate"), None),
        (sent([1]), None),
        (None, None),
    ],
)
def test_chunks_on_v1_are_found(request_: Any, field: str | None) -> None:
    """At the top or in a message, and nowhere else."""
    assert chunks_field(request_) == field


def test_chunks_on_v1_are_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(prometheus=False)
    misplaced = Misplaced(lambda: metrics)
    own = {"chunks": CHUNKS}
    bodies: list[Any] = [own, own, {"messages": MESSAGES}, {"messages": []}]
    for body in bodies:
        misplaced.look(sent(body))
    assert metrics.totals()["misplaced"] == {"chunks": 2, "messages.chunks": 1}
    (record,) = caplog.records
    assert "/v1/chat/completions got `chunks`" in record.getMessage()


# Several ranks, caches that were emptied


@pytest.mark.parametrize("at", [0, 1])
def test_a_place_in_a_flushed_cache_is_gone(at: int) -> None:
    """Whichever rank had it: nobody has it now. Chunks of the first turn, and of a later one."""
    bench = Bench(num_ranks=2)
    talk = Talk(bench)
    talk.turn("one", A)
    talk.turn("two", B)
    for rank, mirror in zip(bench.ranks, bench.bookkeeper.mirrors, strict=True):
        rank.log.restart()
        rank.held.clear()
        mirror.apply(rank.log.unread())
    found = why(talk.turn("three", C, rank=at))
    assert (len(found.pop("evicted")), found) == (2, {"new_chunk": ["c"]})


def test_another_order_on_another_rank_is_another_order() -> None:
    """The rank that has the chunk would not have found it here either."""
    bench = Bench(num_ranks=2, order="retriever")
    bench.reply(bench.ask("q", A, B, rank=0))
    other, same = (bench.reply(bench.ask("q", *each, rank=1)) for each in ((C, B), (A, D)))
    assert why(other) == {"new_chunk": ["c"], "other_order": ["b"]}
    assert why(same) == {"other_rank": ["a"], "new_chunk": ["d"]}
