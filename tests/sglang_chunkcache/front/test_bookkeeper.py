"""What requests add to the front's state, what answers teach,
and that all that was taken is given back."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front import bookkeeper
from sglang_chunkcache.front.request import Passage
from sglang_chunkcache.wire.events import Acknowledgement
from sglang_chunkcache.wire.message import decode
from sglang_chunkcache.wire.report import ANSWER_KEY, Fallback
from sglang_chunkcache.wire.spans import MARK_KEY
from tests.kit.front_bench import SECRET, A, Asked, B, Bench, make_output, told, user
from tests.kit.front_planning import Talk, assistant


@pytest.mark.parametrize(("found", "chunks_hit"), [(2, 1), (10_000, 2)])
def test_fates_sum_to_the_prompt(found: int, chunks_hit: int) -> None:
    """A retracted request's cached_tokens may count its own output."""
    bench = Bench()
    request = bench.ask("q", A, B)
    exact = request.spans[0].end + found
    answer = bench.reply(request, cached=exact).answer()
    assert sum(answer["fates"].values()) == len(request.input_ids)
    assert answer["fates"]["exact"] == min(exact, len(request.input_ids))
    assert (answer["chunks_hit"], answer["dp_rank"]) == (chunks_hit, 0)


def test_observe_incremental_output_adds_up() -> None:
    """SGLang sends either everything so far or only what is new;
    the other choices of n > 1 are not the conversation's."""
    bench = Bench()
    request = bench.ask("q", A)
    bench.observe(request, make_output([], 5, None, 0, None))
    assert request.known is None, "an output without tokens says nothing of the cache yet"
    for ids, index in (([65], 0), ([70], 1), ([66, 67], 0)):
        output = make_output(ids, 0, None, 0, None, index)
        bench.observe(request, output, index=index, incremental=True)
    assert request.output_ids == [65, 66, 67]


def test_custom_params_carry_mark_and_acknowledgement() -> None:
    """The scheduler believes only our mark; what was read is acknowledged with the next request.
    After counting, the leading run at the threshold is promoted."""
    bench = Bench(promotion_threshold=2)
    asked = [bench.reply(bench.ask("q", *chunks)) for chunks in ([A], [A, B], [A, B])]
    assert [told(each).promoted_len for each in asked] == [0, 1, 2]
    assert asked[0].custom_params[MARK_KEY] == SECRET
    log = bench.ranks[0].log
    assert told(bench.ask("q", A)).ack == Acknowledgement(log.epoch, log.seq)


def test_repeated_answer_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is not incremental carries the rank's events with every output;
    nothing of this reaches a client."""
    bench, reads = Bench(), list[str]()

    def counted(text: str, kind: Any) -> Any:
        reads.append(text)
        return decode(text, kind)

    monkeypatch.setattr(bookkeeper, "decode", counted)
    request = bench.ask("q", A)
    entry = bench.ranks[0].serve(request.custom_params, request.input_ids)
    for ids in ([65], [65, 66], [65, 66, 67]):
        output = make_output(ids, 0, None, 0, entry)
        bench.observe(request, output)
        assert ANSWER_KEY not in output["meta_info"]
    assert reads == entry[:1]
    assert len(bench.books.tree) == 1


def test_answer_that_cannot_be_read_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Front and rank of two versions: the mirror stays as it was,
    what SGLang found cached is exact."""
    bench = Bench()
    request = bench.ask("q", A)
    with caplog.at_level(logging.WARNING):
        bench.observe(request, make_output([65], 5, "stop", 0, ["[999, {}]"]))
    assert "the answer of rank 0 cannot be read" in caplog.text
    assert (request.answer()["fates"]["exact"], request.fallbacks) == (5, [Fallback.PLAIN_TEXT])
    assert bench.books.mirrors[0].acknowledgement.seq == 0


@pytest.mark.parametrize(
    "error", [ValueError, KeyError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt]
)
def test_any_way_out_gives_plan_and_load_back(error: type[BaseException]) -> None:
    """Leaving the block is enough, and it hides no error."""
    bench = Bench()

    def fail() -> None:
        with bench.books.begin(Asked(bench.plan("q", A))):
            assert not bench.is_idle()
            raise error

    with pytest.raises(error):
        fail()
    assert bench.is_idle()
    assert bench.books.metrics.totals()["requests"] == {"aborted": 1}


def test_refused_request_leaves_nothing() -> None:
    bench = Bench(context_len=200)
    with pytest.raises(RequestError):
        bench.ask("q", A, Passage("big", "x" * 300))
    assert bench.is_idle()
    assert (len(bench.books.tree), bench.books.tables.num_entries) == (0, 0)


def test_answer_is_booked_where_it_was_served() -> None:
    bench = Bench(num_ranks=2)
    request = bench.ask("q", A, B)
    other = 1 - request.rank
    bench.reply(request, by=other)
    assert request.answer()["dp_rank"] == other
    assert bench.is_idle()
    assert [bench.books.tree.digest(rank)[0] for rank in (other, request.rank)] == [2, 0]


@pytest.mark.parametrize(("reason", "content"), [("abort", ""), ("stop", None)])
def test_turn_without_a_whole_text_is_not_kept(reason: str, content: str | None) -> None:
    """An aborted answer, or one of tool calls, is not what the client will send back."""
    talk = Talk(Bench())
    talk.turn("one", A)
    talk.bench.reply(talk.ask("two"), reason=reason, content=content)
    talk.messages += [user("two"), assistant("ok")]
    assert talk.ask("three").num_turns == 1
