"""The one way to the engine: what is taken from outputs on their way,
and that every way out gives plan and load back."""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from radix_ext import ChunkId, FusionRequest
from sglang_chunkcache.errors import BusyError
from sglang_chunkcache.front import engine as engine_module
from sglang_chunkcache.front.audit import Check
from sglang_chunkcache.front.engine import MAX_PREFETCHES, Engine
from sglang_chunkcache.front.request import Identity
from sglang_chunkcache.scheduler.event_log import EventLog
from sglang_chunkcache.wire.events import Batch, Inserted
from sglang_chunkcache.wire.message import decode, encode
from sglang_chunkcache.wire.report import Answer, Explanation, Report
from sglang_chunkcache.wire.spans import unpack
from sglang_chunkcache.wire.state import STATE_KEY, RankState
from sglang_chunkcache.wire.state import Asked as AskedOfRanks
from tests.kit.front_bench import SECRET, A, Asked, Bench, make_output
from tests.kit.front_planning import state_of

NO_EVENTS = Batch(0, 0, (), 0, 0, 0)


class Manager:
    """SGLang's manager: some outputs, then perhaps an error, and attributes of its own."""

    incremental_streaming_output = True
    name = "manager"
    server_args = SimpleNamespace(load_balance_method="auto", disaggregation_mode="null")

    def __init__(self, *outputs: Any, error: BaseException | None = None) -> None:
        self.outputs, self.error, self.asked = outputs, error, list[Any]()

    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[Any]:
        self.asked.append(obj)
        for output in self.outputs:
            yield output
        if self.error is not None:
            raise self.error


def make_request(rag: Any = None, *, is_gone: bool = False) -> Any:
    async def is_disconnected() -> bool:
        return is_gone

    request: Any = SimpleNamespace(state=SimpleNamespace(), is_disconnected=is_disconnected)
    if rag is not None:
        request.state.chunkcache = rag
    return request


def make_obj(*, stream: bool = True) -> Any:
    return SimpleNamespace(stream=stream, sampling_params={"n": 1}, routed_dp_rank=5)


def output(*ids: int, reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return make_output(list(ids), 0, reason, 0, None, index)


def run(manager: Manager, bench: Bench, request: Any, *, stream: bool = True) -> list[Any]:
    outputs = Engine(manager, bench.bookkeeper).generate_request(make_obj(stream=stream), request)

    async def collect() -> list[Any]:
        return [one async for one in outputs]

    return asyncio.run(collect())


def test_outputs_pass_and_are_observed() -> None:
    """Single outputs, which in a stream say which answer they are of, and lists of all n,
    which do not."""
    bench = Bench()
    assert Engine(Manager(), bench.bookkeeper).name == "manager"
    rag = Asked(bench.plan("q", A))
    whole = [{key: value for key, value in output(i).items() if key != "index"} for i in (66, 67)]
    sent = [output(65, index=1), whole, output(68, reason="stop")]
    assert run(Manager(*sent), bench, make_request(rag)) == sent
    assert (rag.output_ids, rag.finish_reason) == ([66, 68], "stop")
    assert bench.bookkeeper.metrics.totals()["requests"] == {"finished": 1}
    assert bench.is_idle()


def test_whole_answer_is_released_before_it_is_handed_out() -> None:
    """SGLang takes the first output and drops the generator."""
    bench = Bench()
    request = make_request(Asked(bench.plan("q", A)))
    engine = Engine(Manager(output(65)), bench.bookkeeper)

    async def first() -> None:
        await anext(engine.generate_request(make_obj(stream=False), request))
        assert bench.is_idle()

    asyncio.run(first())


def test_scheduler_is_told_and_the_rank_named() -> None:
    """But where a decode server looks for it by its room: SGLang routes it there."""
    for num_ranks, method, mode, rank in (
        (2, "auto", "null", 0),
        (1, "auto", "null", None),
        (2, "auto", "prefill", None),
        (2, "follow_bootstrap_room", "prefill", None),
        (2, "round_robin", "prefill", 0),
        (2, "auto", "decode", 0),
    ):
        bench, manager = Bench(num_ranks=num_ranks), Manager(output(65))
        manager.server_args = SimpleNamespace(load_balance_method=method, disaggregation_mode=mode)
        rag = Asked(bench.plan("q", A))
        run(manager, bench, make_request(rag))
        assert manager.asked[0].sampling_params == {"n": 1, "custom_params": rag.custom_params}
        assert manager.asked[0].routed_dp_rank == rank


class Ranks:
    """SGLang's communicator: one message at a time, which two ranks answer when they are told
    to."""

    def __init__(self) -> None:
        self.messages, self.gate = list[int](), asyncio.Event()
        self.error: Exception | None = None

    def auto_create_handle_loop(self) -> None: ...

    async def get_internal_state_communicator(self, message: Any) -> list[Any]:
        asked = decode(message.rid, AskedOfRanks).explain or ()
        self.messages.append(len(asked))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        states = []
        for rank in (1, 0):
            own = [each for each in asked if each.dp_rank == rank]
            told = tuple(Explanation(len(each.input_ids), 0, rank) for each in own)
            states.append(RankState(rank, NO_EVENTS, {}, explanations=told))
        return [SimpleNamespace(internal_state={STATE_KEY: encode(state)}) for state in states]


def test_what_is_asked_while_ranks_answer_is_asked_together() -> None:
    bench, ranks = Bench(num_ranks=2), Ranks()
    engine = Engine(ranks, bench.bookkeeper)
    plans = [replace(bench.plan("q" * number, A), rank=number % 2) for number in range(1, 6)]

    async def ask() -> list[Any]:
        asked = []
        for plan in plans:
            asked.append(asyncio.create_task(engine.explain(plan)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        asked[2].cancel()
        ranks.gate.set()
        return list(await asyncio.gather(*asked, return_exceptions=True))

    told = asyncio.run(ask())
    assert ranks.messages == [1, 4]
    assert isinstance(told.pop(2), asyncio.CancelledError)
    del plans[2]
    assert [(each.exact, each.end) for each in told] == [
        (len(plan.input_ids), plan.rank) for plan in plans
    ]


def test_ranks_that_fail_fail_all_who_have_asked() -> None:
    bench, ranks = Bench(), Ranks()
    engine, ranks.error = Engine(ranks, bench.bookkeeper), RuntimeError("lost")
    ranks.gate.set()
    plan = bench.plan("q", A)

    async def ask() -> list[Any]:
        asked = [engine.explain(plan) for _ in range(2)]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        ranks.error = None
        return [*failed, await engine.explain(plan)]

    *failed, told = asyncio.run(ask())
    assert [str(error) for error in failed] == ["lost", "lost"]
    assert told.exact == len(plan.input_ids)


def test_failed_prefetch_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for it, so asyncio would report each of them as an exception never retrieved."""
    bench, ranks = Bench(), Ranks()
    engine, ranks.error = Engine(ranks, bench.bookkeeper), RuntimeError("lost")
    ranks.gate.set()

    async def hint() -> None:
        for _ in range(2 * MAX_PREFETCHES):
            engine.prefetch(bench.plan("q", A))
            await asyncio.sleep(0.001)

    asyncio.run(hint())
    gc.collect()
    assert len(ranks.messages) == 2 * MAX_PREFETCHES
    (line,) = caplog.messages
    assert "lost" in line


def test_requests_of_others_pass_unobserved() -> None:
    bench = Bench()
    for request in (None, make_request()):
        assert run(Manager(1), bench, request) == [1]
    assert bench.bookkeeper.metrics.totals()["requests"] == {}


def test_stream_that_is_never_read_on_is_released() -> None:
    """A client gone between the engine's first output and HTTP 200: Starlette never iterates the
    body, so closing the engine's stream must be enough."""
    bench = Bench()
    request = make_request(Asked(bench.plan("q", A)))
    engine = Engine(Manager(output(65), output(66)), bench.bookkeeper)

    async def abandon() -> None:
        outputs: Any = engine.generate_request(make_obj(), request)
        await anext(outputs)
        assert not bench.is_idle()
        await outputs.aclose()
        assert bench.is_idle()

    asyncio.run(abandon())
    assert bench.bookkeeper.metrics.totals()["requests"] == {"aborted": 1}


@pytest.mark.parametrize(
    ("outputs", "error", "is_gone", "outcome"),
    [
        ([], ValueError("n must be positive"), False, "refused"),
        ([], TypeError("n must be a number"), False, "refused"),
        ([], ValueError("Request is disconnected"), True, "aborted"),
        ([output(65)], ValueError("too long"), False, "aborted"),
        ([], RuntimeError("our bug"), False, "aborted"),
        ([output(65)], asyncio.CancelledError(), False, "aborted"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_failed_request_is_counted_and_released(
    outputs: list[Any], error: BaseException, is_gone: bool, outcome: str, stream: bool
) -> None:
    """As what it was; the error is SGLang's to answer."""
    bench = Bench()
    request = make_request(Asked(bench.plan("q", A)), is_gone=is_gone)
    with pytest.raises(type(error)):
        run(Manager(*outputs, error=error), bench, request, stream=stream)
    assert bench.bookkeeper.metrics.totals()["requests"] == {outcome: 1}
    assert bench.is_idle()


# The audit


class AuditedManager(Manager):
    """One that lists best tokens, if asked, and answers for one rank."""

    max_req_input_len = 500
    gracefully_exit = False
    preferred_sampling_params = None
    model_config = SimpleNamespace(context_len=1000)

    def __init__(self, *outputs: Any, waiting: int = 0, told: int = 0, free: int = 1000) -> None:
        super().__init__(*outputs)
        self.num_asked, self.free = 0, free
        self.told = told
        self.load_snapshot_reader = SimpleNamespace(
            read=lambda rank: SimpleNamespace(num_waiting_reqs=waiting)
        )

    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[Any]:
        async for output in super().generate_request(obj, request):
            if obj.return_logprob:
                best = [[(-0.1, i, None), (-3.0, i + 1, None)] for i in output["output_ids"]]
                output["meta_info"] |= {"output_top_logprobs": best, "output_token_logprobs": []}
            yield output

    async def get_internal_state(self) -> list[Any]:
        self.num_asked += 1
        counts = {"free": self.free, "evictable": 0}
        state = RankState(0, NO_EVENTS, counts, num_waiting=self.told)
        return [{STATE_KEY: encode(state)}]


class TellingManager(Manager):
    """One rank whose log is told on demand, and two answers that do not say all of it."""

    def __init__(self, bench: Bench, *, num_events: int) -> None:
        self.log = bench.ranks[0].log = EventLog(1000, max_told=10)
        self.num_asked, self.is_deaf = 0, False
        for number in range(num_events):
            self.log.append(Inserted(ChunkId(str(number)), 4, None, "n", False))
        self.entry = encode(Answer(self.log.unread()))
        super().__init__()

    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[Any]:
        yield make_output([65], 0, None, 0, [self.entry])
        yield make_output([66], 0, "stop", 0, [self.entry])

    def auto_create_handle_loop(self) -> None: ...

    async def get_internal_state_communicator(self, message: Any) -> list[Any]:
        self.num_asked += 1
        (reading,) = decode(message.rid, AskedOfRanks).read
        state = state_of(self.log, None if self.is_deaf else reading)
        return [SimpleNamespace(internal_state={STATE_KEY: encode(state)})]


async def asked_and_read_on(engine: Engine, rag: Asked) -> None:
    """An answer, and what is asked of the rank after it."""
    async for _ in engine.generate_request(make_obj(), make_request(rag)):
        pass
    if engine._reading is not None:
        await engine._reading


@pytest.mark.parametrize("num_events", [10, 35])
def test_what_answers_do_not_bring_is_asked_for(num_events: int) -> None:
    bench = Bench()
    manager = TellingManager(bench, num_events=num_events)
    asyncio.run(asked_and_read_on(Engine(manager, bench.bookkeeper), Asked(bench.plan("q", A))))
    assert bench.bookkeeper.tree.holdings.digest(0) == (num_events, manager.log.digest)
    assert manager.num_asked == (num_events - 1) // 10  # the answer had ten


def test_a_rank_that_tells_nothing_is_not_asked_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """Orders get worse, and the log says so once. The request is answered."""
    bench = Bench()
    manager = TellingManager(bench, num_events=35)
    manager.is_deaf = True
    rag = Asked(bench.plan("q", A))
    asyncio.run(asked_and_read_on(Engine(manager, bench.bookkeeper), rag))
    assert rag.output_ids == [65, 66]
    assert manager.num_asked == 1
    assert ["does not keep up" in record.message for record in caplog.records] == [True]


def audited_obj(*, stream: bool) -> Any:
    obj = make_obj(stream=stream)
    wish = {"return_logprob": False, "top_logprobs_num": 0, "return_text_in_logprobs": True}
    vars(obj).update(wish, custom_logit_processor=None)
    return obj


def moved(rag: Asked, bench: Bench) -> Any:
    """The output of a request whose rank has moved 5 tokens."""
    report = Report(2, 5, 1, 0, 0, (), None, (), {})
    with bench.bookkeeper.begin(Asked(rag.planned)) as begun:
        entry = bench.ranks[0].serve(begun.custom_params, begun.planned.input_ids, report)
    return make_output([65, 66], 0, "stop", 0, entry)


@pytest.mark.parametrize("stream", [True, False])
def test_drawn_request_is_audited_and_the_client_sees_no_logprobs(stream: bool) -> None:
    """The check waits as soon as the answer is complete:
    a client may close the stream right then."""
    bench = Bench(reuse="fused", audit_share=1.0)
    rag = Asked(bench.plan("q", A, fusion=FusionRequest("first", 0.15)))
    manager = AuditedManager(moved(rag, bench), waiting=1)
    engine, obj = Engine(manager, bench.bookkeeper), audited_obj(stream=stream)

    async def ask() -> Any:
        outputs: Any = engine.generate_request(obj, make_request(rag))
        output = await anext(outputs)
        await outputs.aclose()
        assert engine.auditor._worker is not None
        engine.auditor._worker.cancel()
        return output

    output = asyncio.run(ask())
    assert (obj.return_logprob, obj.top_logprobs_num) == (True, 5)
    assert not [name for name in output["meta_info"] if "logprob" in name]
    assert rag.is_sampled
    (check,) = engine.auditor._waiting
    assert check.rows == [[(-0.1, 65), (-3.0, 66)], [(-0.1, 66), (-3.0, 67)]]


@pytest.mark.parametrize(
    ("waiting", "told", "free", "has_room", "num_asked"),
    [(0, 0, 200, True, 1), (1, 0, 200, False, 0), (0, 1, 200, False, 1), (0, 0, 199, False, 1)],
)
def test_room_for_a_check(
    waiting: int, told: int, free: int, has_room: bool, num_asked: int
) -> None:
    """The load report first, which costs nothing."""
    manager = AuditedManager(waiting=waiting, told=told, free=free)
    engine = Engine(manager, Bench().bookkeeper)
    assert asyncio.run(engine.has_room(0, 100)) is has_room
    assert manager.num_asked == num_asked
    manager.gracefully_exit = True
    assert asyncio.run(engine.has_room(0, 100)) is False


def test_check_is_an_exact_prefill_of_prompt_and_answer() -> None:
    """As the scheduler is told, with logprobs from the prompt's last token on,
    in the tenant's namespace."""
    bench, manager = Bench(), AuditedManager(output(65))
    planned = bench.plan("q", A, who=Identity(extra_key="x", cache_salt="salt"))
    ids = [*planned.input_ids, 70, 71]
    rows: list[Any] = [[(-0.1, 70)], [(-0.1, 71)]]
    check = Check(planned, ids, rows, 1.0, "query", 0.15, 0, 0, 0.0)
    asyncio.run(Engine(manager, bench.bookkeeper).prefill(check, top=20))
    (obj,) = manager.asked
    assert (obj.input_ids, obj.logprob_start_len) == (ids, len(planned.input_ids) - 1)
    assert (obj.extra_key, obj.cache_salt, obj.routed_dp_rank) == ("x", "salt", None)
    assert (obj.top_logprobs_num, obj.log_metrics) == (20, False)
    assert obj.sampling_params["max_new_tokens"] == 1
    spans = unpack(obj.sampling_params["custom_params"], array("q", ids), secret=SECRET)
    assert spans is not None
    assert (spans.is_audit, spans.fusion, spans.keep) == (True, None, frozenset())
    assert spans.spans == planned.spans


@pytest.mark.parametrize("question", ["states", "clear_store"])
def test_ranks_that_answer_no_more_are_not_waited_for(
    question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang waits without an end, and the server's end for the request. It bears no second
    question meanwhile, and no cancelling."""
    asked: list[asyncio.Future[Any]] = []

    class Ending:
        gracefully_exit = True

        def auto_create_handle_loop(self) -> None: ...

        async def get_internal_state(self, *_: Any) -> Any:
            asked.append(asyncio.get_running_loop().create_future())
            return await asked[-1]

        get_internal_state_communicator = get_internal_state

    async def look() -> None:
        engine = Engine(Ending(), Bench().bookkeeper)
        for _ in range(2):
            with pytest.raises(BusyError, match="does not answer"):
                await getattr(engine, question)()
        asked[0].set_result([])
        await asyncio.sleep(0)
        assert not asked[0].cancelled()

    monkeypatch.setattr(engine_module, "LAST_STATES_S", 0.0)
    asyncio.run(look())
    assert len(asked) == 1
