"""Two tenants on one server: what one of them sees of its own requests does not depend on the
other.

The front is real, and so is the rank's tree (`ChunkRadixCache` over counted slots); only the model
is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from random import Random
from statistics import mean
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

from sglang_chunkcache.front.request import Identity, Passage
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.wire.report import ANSWER_KEY
from tests.kit.front_bench import Bench, make_output, told, user
from tests.reference import scheduler

PASSAGES = [Passage(str(i), f"{i:02}" + "abcdefgh"[: 1 + i % 7]) for i in range(14)]
ROOM = 60_000
"""Slots for every chain that 1,000 rounds of two tenants make."""


class Server(Bench):
    """A front and one rank with `capacity` slots."""

    def __init__(self, capacity: int, **knobs: Any) -> None:
        super().__init__(context_len=scheduler.MAX_CONTEXT - 8, **knobs)
        self.rank = scheduler.Scheduler(capacity, self.config)

    def serve(
        self, who: Identity, messages: Any, *passages: Passage, **options: Any
    ) -> dict[str, Any]:
        """A whole request; what its client sees, and what the scheduler was told."""
        request = self.ask(messages, *passages, who=who, **options)
        salts = {"extra_key": who.extra_key, "cache_salt": who.cache_salt}
        req = scheduler.FakeReq(request.input_ids, request.custom_params, **salts)
        ids = [ord("k"), 3]
        cached = self.rank.serve(req, answer=ids)
        assert req.customized_info is not None
        self.observe(request, make_output(ids, cached, "stop", 0, req.customized_info[ANSWER_KEY]))
        self.end(request)
        self.bookkeeper.conversations.finish(request, request.closed_turn("k"))
        spans = told(request)
        return {**request.answer(), "promoted_len": spans.promoted_len, "keep": spans.keep}


class Slots(TokenToKVPoolAllocator):  # type: ignore[misc]
    extend = scheduler.CountingAllocator.extend


@pytest.fixture(autouse=True)
def fast_scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the count of who frees which slot, which takes time in proportion to the pool;
    other tests do that."""
    monkeypatch.setattr(scheduler, "CountingAllocator", Slots)
    with scheduler.without_server_args():
        monkeypatch.setattr(scheduler, "without_server_args", nullcontext)
        yield


class Client:
    """A tenant that asks, with passages, questions, orders and turns of a conversation of its own
    choice."""

    def __init__(self, server: Server, who: Identity, seed: int) -> None:
        self._server, self._who, self._random = server, who, Random(seed)
        self._talk: list[dict[str, str]] = []

    def ask(self) -> dict[str, Any]:
        """One request; what came of it."""
        draw = self._random
        passages = draw.sample(PASSAGES, draw.randint(1, 4))
        question = draw.choice("?!.")
        if draw.random() < 0.8:
            return self._server.serve(self._who, question, *passages)
        self._talk = [*self._talk, user(question)] if len(self._talk) < 6 else [user(question)]
        answer = self._server.serve(self._who, self._talk, *passages[:2], to="talk")
        self._talk = [*self._talk, {"role": "assistant", "content": "k"}]
        return answer


ME = Identity("key", cache_salt="mine")
STRANGER = Identity("key", cache_salt="theirs")


def answers_of(
    who: Identity, others: Sequence[Identity], *, rounds: int, **knobs: Any
) -> list[dict[str, Any]]:
    """What one tenant sees of its requests while others ask for the same texts."""
    server = Server(ROOM, **knobs)
    client, strangers = Client(server, who, 1), [Client(server, other, 2) for other in others]
    draw, answers = Random(3), []
    for _ in range(rounds):
        for stranger in strangers:
            if draw.random() < 0.5:
                stranger.ask()
        answers.append(client.ask())
    rank = rank_state(server.rank.cache, 0)
    assert rank.counts["evicted_chunks"] == 0
    assert server.bookkeeper.tree.holdings.digest(0) == (rank.events.num_nodes, rank.events.digest)
    return answers


@pytest.mark.parametrize("order", ["retriever", "frequency", "tree"])
@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_tenant_sees_nothing_of_another(order: str, rounds: int) -> None:
    """Order, fates and counts of all requests are the same with and without another tenant."""
    alone = answers_of(ME, [], rounds=rounds, order=order)
    among = answers_of(ME, [STRANGER], rounds=rounds, order=order)
    assert sum(answer["chunks_hit"] for answer in alone) > rounds / 5
    for number, (without, with_others) in enumerate(zip(alone, among, strict=True)):
        assert without == with_others, f"request {number}"


@pytest.mark.parametrize(
    ("knobs", "who", "other"),
    [
        ({"reuse": "fused"}, ME, STRANGER),
        ({"order": "frequency"}, Identity("key"), STRANGER),
        ({"order": "frequency"}, ME, Identity("key", extra_key="mine")),
        ({"order": "frequency"}, Identity("key", extra_key="a"), Identity("key", extra_key="b")),
        ({"order": "frequency"}, Identity("key"), Identity("key", extra_key="")),
    ],
    ids=["store", "no salt", "salt or key", "two keys", "empty key"],
)
def test_other_ways_to_meet(knobs: dict[str, Any], who: Identity, other: Identity) -> None:
    """What enters cache and store goes by counts as well."""
    assert answers_of(who, [], rounds=100, **knobs) == answers_of(who, [other], rounds=100, **knobs)


def test_requests_of_one_tenant_do_meet() -> None:
    """The control: as one tenant, the same traffic changes what is seen."""
    alone, among = (answers_of(ME, others, rounds=100, order="frequency") for others in ([], [ME]))
    assert alone != among


def rounds_in_a_pool(capacity: int, *, texts: str) -> list[tuple[int, int]]:
    """(requests of the stranger's, tokens that my 8 requests then find cached) by round;
    the stranger rests in half of them."""
    server, draw = Server(capacity), Random(0)
    mine = [Passage(str(i), f"mine-{i:04}abcdefgh") for i in range(8)]
    rounds = []
    for number in range(50):
        num_requests = draw.choice([0] * 8 + list(range(1, 9)))
        for i in range(num_requests):
            server.serve(STRANGER, "?", Passage("", f"{texts}-{10 * number + i:04}abcdefgh"))
        exact = sum(server.serve(ME, "?", passage)["fates"]["exact"] for passage in mine)
        rounds.append((num_requests, exact))
    return rounds[1:]


@pytest.mark.nightly
@pytest.mark.parametrize(("capacity", "expected"), [(200, 1.0), (260, 0.77), (500, 0.5)])
def test_a_full_pool_tells_that_others_are_active(capacity: int, expected: float) -> None:
    """What shared eviction reveals, as front/README.md says: whether others were active, and about
    how much; never the texts.

    My 8 requests take 187 slots, the stranger's up to 187 more. The figure is the area under the
    ROC curve.
    """
    rounds = rounds_in_a_pool(capacity, texts="them")
    # the stranger's texts are other ones, or like mine
    assert rounds == rounds_in_a_pool(capacity, texts="mine")
    quiet, busy = (
        [exact for number, exact in rounds if (number > 0) == is_busy] for is_busy in (False, True)
    )
    told = mean((x > y) + (x == y) / 2 for x in quiet for y in busy)
    print(f"{capacity} slots: {told:.2f}")
    assert told == pytest.approx(expected, abs=0.05)
