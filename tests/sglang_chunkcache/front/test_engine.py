"""The one way to the engine: what is taken from outputs on their way, and that every way out gives plan and load back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_chunkcache.front.engine import Engine, hand_over, handed_over
from tests.sglang_chunkcache.front.front_bench import A, Asked, Bench, make_output


class Manager:
    """SGLang's manager: some outputs, then perhaps an error, and attributes of its own."""

    incremental_streaming_output = True
    name = "manager"

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
        hand_over(request, rag)
    return request


def make_obj(*, stream: bool = True) -> Any:
    return SimpleNamespace(stream=stream, sampling_params={"n": 1}, routed_dp_rank=5)


def output(*ids: int, reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return make_output(list(ids), 0, reason, 0, None, index)


def run(manager: Manager, bench: Bench, request: Any, *, stream: bool = True) -> list[Any]:
    async def collect() -> list[Any]:
        return [one async for one in Engine(manager, bench.books).generate_request(make_obj(stream=stream), request)]

    return asyncio.run(collect())


def test_outputs_pass_and_are_observed() -> None:
    """Single outputs, which in a stream say which answer they are of, and lists of all n, which do not."""
    bench = Bench()
    rag = Asked(bench.plan("q", A))
    whole = [{key: value for key, value in output(i).items() if key != "index"} for i in (66, 67)]
    sent = [output(65, index=1), whole, output(68, reason="stop")]
    assert run(Manager(*sent), bench, make_request(rag)) == sent
    assert (rag.output_ids, rag.finish_reason) == ([66, 68], "stop")
    assert bench.books.metrics.totals()["requests"] == {"finished": 1}
    assert bench.is_idle()


def test_whole_answers_are_not_incremental() -> None:
    """Only streams are."""
    bench = Bench()
    rag = Asked(bench.plan("q", A))
    run(Manager(output(65), output(65, 66)), bench, make_request(rag), stream=False)
    assert rag.output_ids == [65, 66]


def test_whole_answer_is_released_before_it_is_handed_out() -> None:
    """SGLang takes the first output and drops the generator; a client that has its answer finds no load of its own."""
    bench = Bench()
    request = make_request(Asked(bench.plan("q", A)))

    async def first() -> None:
        await anext(Engine(Manager(output(65)), bench.books).generate_request(make_obj(stream=False), request))
        assert bench.is_idle()

    asyncio.run(first())


def test_scheduler_is_told_and_the_rank_named() -> None:
    """With the parameters that the client sent. One rank alone needs no name, whatever rank the client named."""
    for num_ranks, rank in ((2, 0), (1, None)):
        bench, manager = Bench(num_ranks=num_ranks), Manager(output(65))
        rag = Asked(bench.plan("q", A))
        run(manager, bench, make_request(rag))
        assert manager.asked[0].sampling_params == {"n": 1, "custom_params": rag.custom_params}
        assert manager.asked[0].routed_dp_rank == rank


def test_requests_of_others_pass_unobserved() -> None:
    """Health checks come without a request or a plan."""
    bench = Bench()
    for request in (None, make_request()):
        assert handed_over(request) is None
        assert run(Manager(1), bench, request) == [1]
    assert bench.books.metrics.totals()["requests"] == {}


def test_manager_shows_through() -> None:
    """SGLang's serving classes read attributes of it."""
    assert Engine(Manager(), Bench().books).name == "manager"


def test_nothing_is_taken_before_the_engine_is_asked() -> None:
    """A generator that is not iterated has no end that could give anything back."""
    bench = Bench()
    Engine(Manager(), bench.books).generate_request(make_obj(), make_request(Asked(bench.plan("q", A))))
    assert bench.is_idle()


def test_stream_that_is_never_read_on_is_released() -> None:
    """A client gone between the engine's first output and HTTP 200: Starlette never iterates the body, so the body's own
    end never comes; closing the engine's stream must be enough, or load and plan count for ever."""
    bench = Bench()

    async def abandon() -> None:
        request = make_request(Asked(bench.plan("q", A)))
        outputs: Any = Engine(Manager(output(65), output(66)), bench.books).generate_request(make_obj(), request)
        await anext(outputs)
        assert not bench.is_idle()
        await outputs.aclose()
        assert bench.is_idle()

    asyncio.run(abandon())
    assert bench.books.metrics.totals()["requests"] == {"aborted": 1}


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
    ids=["parameter", "type", "client gone", "after a token", "bug", "cancelled"],
)
@pytest.mark.parametrize("stream", [True, False])
def test_failed_request_is_counted_and_released(
    outputs: list[Any], error: BaseException, is_gone: bool, outcome: str, stream: bool
) -> None:
    """As what it was; the error is SGLang's to answer."""
    bench = Bench()
    with pytest.raises(type(error)):
        run(
            Manager(*outputs, error=error),
            bench,
            make_request(Asked(bench.plan("q", A)), is_gone=is_gone),
            stream=stream,
        )
    assert bench.books.metrics.totals()["requests"] == {outcome: 1}
    assert bench.is_idle()
