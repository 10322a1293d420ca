"""The audit in the front: what is asked of the engine, what the client sees of it,
when a check is sent, and what follows."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

pytest.importorskip("sglang")

from radix_ext import FusionRequest
from radix_ext.audit import AuditState
from sglang_chunkcache.front import audit as audit_module
from sglang_chunkcache.front.audit import MAX_POSITIONS, MAX_WAITING, Auditor, Check, Listener, Skip
from sglang_chunkcache.front.fusion_options import ReuseIn, fused_request
from sglang_chunkcache.front.request import Identity
from sglang_chunkcache.wire.report import Fallback, Report
from tests.kit.front_bench import ME, A, Asked, B, Bench
from tests.polling import DEADLINE_S

FUSION = FusionRequest("query", 0.15)
MOVED = Report(2, 5, 1, 0, 0, sources=(), focused=None, fallbacks=(), ms={})
UNMOVED = structs.replace(MOVED, relocated=0, recomputed=0)


def row(best: int, length: int = 5) -> list[tuple[float, int, None]]:
    """Nearly sure of one token, as SGLang lists it.
    A shorter list is the beginning of a longer one."""
    shares = [0.9, *(0.09 * 0.1**i for i in range(length))]
    return [(math.log(share), best + i, None) for i, share in enumerate(shares[:length])]


class Ranks:
    """The engine's side: what it is asked, and what it answers."""

    max_prompt_len = 1000
    preferred_sampling_params: Mapping[str, Any] | None = None

    def __init__(self) -> None:
        self.agrees, self.is_free = True, True
        self.checks = list[Check]()
        self.answer: Any = None
        """An output, or an error, instead of the prefill's."""

    async def has_room(self, rank: int, num_tokens: int) -> bool:
        return self.is_free

    async def prefill(self, check: Check, *, top: int) -> Mapping[str, Any]:
        self.checks.append(check)
        if isinstance(self.answer, Exception):
            raise self.answer
        ids = check.input_ids[len(check.planned.input_ids) :]
        rows = [row(token if self.agrees else token + 100, top) for token in ids]
        meta = {"finish_reason": {"type": "length"}, "input_top_logprobs": [None, *rows]}
        return self.answer or {"meta_info": meta}


class Bed:
    """A front whose auditor asks `Ranks`.
    Every request is drawn; `FUSION` is what the server does."""

    def __init__(self, *, share: float = 1.0, **knobs: Any) -> None:
        self.bench = Bench(reuse="fused", selector="query", audit_share=share, **knobs)
        self.ranks, self.now = Ranks(), 0.0
        ranks: Any = self.ranks
        self.auditor = Auditor(self.bench.bookkeeper, ranks, clock=lambda: self.now)

    def ask(self, *, fusion: FusionRequest = FUSION) -> Asked:
        return self.bench.ask("q", A, B, fusion=fusion)

    def serve(self, text: str = "ok", **fields: Any) -> Asked:
        """One request and its answer; then all checks that can be sent."""
        asked, listener = self.answered(text, **fields)
        if listener is not None:
            self.finish(asked, listener)
        return asked

    def answered(
        self,
        text: str = "ok",
        *,
        report: Report = MOVED,
        reason: str = "stop",
        fusion: FusionRequest = FUSION,
    ) -> tuple[Asked, Listener | None]:
        asked = self.ask(fusion=fusion)
        listener = self.auditor.listen(asked, make_obj())
        self.bench.reply(asked, text, report=report, reason=reason)
        if listener is not None:
            listener.rows = [[(one[0], one[1]) for one in row(token)] for token in asked.output_ids]
        return asked, listener

    def serve_badly(self, num_answers: int = 5, **fields: Any) -> list[Asked]:
        """Answers that disagree with the prefill's; five pause."""
        self.ranks.agrees = False
        return [self.serve(**fields) for _ in range(num_answers)]

    def finish(self, asked: Asked, listener: Listener) -> None:
        async def run() -> None:
            self.auditor.finish(asked, listener)
            if self.auditor._worker is not None and not self.auditor._worker.done():
                await asyncio.wait_for(self.auditor._worker, DEADLINE_S)

        asyncio.run(run())

    @property
    def skips(self) -> dict[str, int]:
        return self.bench.bookkeeper.metrics.totals()["audit_skips"]

    @property
    def figures(self) -> list[dict[str, Any]]:
        return list(self.auditor.stats()["figures"])


def make_obj(params: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """What of SGLang's request is read and set."""
    defaults: dict[str, Any] = {"return_logprob": False, "top_logprobs_num": 0}
    defaults |= {"return_text_in_logprobs": True, "custom_logit_processor": None}
    return SimpleNamespace(sampling_params=dict(params or {}), **{**defaults, **fields})


# What the engine is asked, and what the client sees


def outputs(num_tokens: int, *, top: int, incremental: bool) -> list[dict[str, Any]]:
    """The `meta_info` of a stream's outputs for a request that returns logprobs,
    with so many best tokens a position."""
    rows = [row(token, top) for token in range(num_tokens)]
    tokens = [row(token)[0] for token in range(num_tokens)]
    found = []
    for n in range(1, num_tokens + 1):
        part = slice(n - 1, n) if incremental else slice(0, n)
        meta = {"id": "r", "output_token_logprobs": tokens[part], "output_token_logprobs_length": n}
        meta["input_token_logprobs"] = []
        if top:
            best = {"output_top_logprobs": rows[part], "input_top_logprobs": [None, row(7, top)]}
            meta |= best
        found.append(meta)
    return found


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("asked", [None, 0, 1, 3, 5, 9])
def test_client_sees_what_it_asked_for(asked: int | None, incremental: bool) -> None:
    """To the letter what it would have got without the audit,
    and the audit gets five tokens a position or more."""
    obj = make_obj(return_logprob=asked is not None, top_logprobs_num=asked)
    listener = Listener.on(obj, 1.0)
    assert (obj.return_logprob, obj.return_text_in_logprobs) == (True, asked is not None)
    assert obj.top_logprobs_num == max(5, asked or 0)
    alone = outputs(4, top=asked or 0, incremental=incremental)
    if asked is None:
        alone = [{"id": "r"}] * 4
    heard = outputs(4, top=obj.top_logprobs_num, incremental=incremental)
    for meta, wanted in zip(heard, alone, strict=True):
        listener.hear(meta, incremental=incremental)
        assert meta == wanted
    assert [best[0][1] for best in listener.rows] == [0, 1, 2, 3]
    assert {len(best) for best in listener.rows} == {obj.top_logprobs_num}


CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "a+"},
    {"json_schema": "{}"},
    {"ebnf": "x"},
    {"structural_tag": "{}"},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 0.5},
    {"logit_bias": {"3": 1.0}},
    {"min_new_tokens": 3},
]
NEUTRAL: dict[str, Any] = {"n": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 50, "logit_bias": {}}
NEUTRAL |= {"frequency_penalty": 0, "repetition_penalty": 1, "min_new_tokens": 0, "regex": None}


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        *((params, Skip.CONSTRAINED) for params in CONSTRAINTS),
        ({"n": 2}, Skip.SEVERAL),
        ({"beam_width": 4}, Skip.SEVERAL),
        ({"temperature": 1.2}, Skip.TEMPERATURE),
        ({"temperature": 0.5, "top_k": 1}, Skip.TEMPERATURE),
        (NEUTRAL, None),
    ],
    ids=str,
)
def test_probabilities_that_no_prefill_has_are_not_compared(params: Any, reason: Any) -> None:
    """The engine is asked for nothing more than the client wants; the reason is counted."""
    bed, obj = Bed(), make_obj(params)
    assert (bed.auditor.listen(bed.ask(), obj) is None) == (reason is not None)
    assert obj.return_logprob == (reason is None)
    assert bed.skips == ({reason.value: 1} if reason else {})


def test_what_others_add_is_not_compared_either() -> None:
    """A processor of the client's own; a parameter of the server's."""
    bed, own = Bed(), make_obj(custom_logit_processor="x")
    assert bed.auditor.listen(bed.ask(), own) is None
    bed.ranks.preferred_sampling_params = {"presence_penalty": 1.5}
    assert bed.auditor.listen(bed.ask(), make_obj()) is None
    assert bed.skips == {Skip.CONSTRAINED.value: 2}


@pytest.mark.parametrize(("given", "told"), [(None, 1.0), (0, 1.0), (1e-7, 1.0), (0.6, 0.6)])
def test_temperature_of_the_answers_logprobs(given: float | None, told: float) -> None:
    """SGLang takes the best token below 1e-6, and tells its logprobs at 1."""
    bed = Bed()
    params = {} if given is None else {"temperature": given}
    listener = bed.auditor.listen(bed.ask(), make_obj(params))
    assert listener is not None
    assert listener.temperature == told


def test_undrawn_and_exact_requests_are_left_alone() -> None:
    bed, obj = Bed(share=0.01), make_obj()
    assert [bed.auditor.listen(bed.ask(), obj) for _ in range(5)] == [None] * 5
    exact = Bed()
    assert exact.auditor.listen(exact.bench.ask("q", A), obj) is None
    assert (obj.return_logprob, bed.skips, exact.skips) == (False, {}, {})


# From an answer to a comparison


def test_answer_is_compared() -> None:
    """The check has prompt and answer, and where the answer begins."""
    bed = Bed()
    asked = bed.serve("ok")
    (check,) = bed.ranks.checks
    assert check.input_ids == [*asked.input_ids, *asked.output_ids]
    assert check.planned is asked.planned
    (figures,) = bed.figures
    assert figures.pop("agreement") == 1
    assert (figures.pop("kl"), figures.pop("max_kl")) == pytest.approx((0, 0), abs=1e-5)
    counts = {"samples": 1, "below_target": 0}
    assert figures == {"selector": "query", "ratio": 0.15, "tenant": ME.tenant, **counts}
    assert bed.auditor.stats()["terms"]["server"]["samples"] == 1
    reuse = asked.answer()["reuse"]
    assert reuse["sampled"] is True
    assert not {"agreement", "kl"} & reuse.keys()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"report": UNMOVED}, Skip.UNMOVED),
        ({"reason": "abort"}, Skip.INCOMPLETE),
        ({"text": "", "reason": "length"}, Skip.INCOMPLETE),
    ],
)
def test_what_is_not_checked(fields: dict[str, Any], reason: Skip) -> None:
    """Nothing moved, or no whole answer."""
    bed = Bed()
    assert bed.serve(**fields).answer()["reuse"]["sampled"] is False
    assert (bed.ranks.checks, bed.skips) == ([], {reason.value: 1})


@pytest.mark.parametrize(
    ("length", "room", "checked"),
    [(3, 0, None), (3, 1, 1), (3, 99, 3), (MAX_POSITIONS + 50, 999, MAX_POSITIONS)],
)
def test_check_is_cut(length: int, room: int, checked: int | None) -> None:
    """Of prompt and answer as much as a prompt may have, and rows of logits take memory."""
    bed = Bed()
    bed.ranks.max_prompt_len = len(bed.bench.plan("q", A, B).input_ids) + room
    bed.serve("x" * length, reason="length")
    assert [len(check.rows) for check in bed.ranks.checks] == ([checked] if checked else [])
    assert bed.skips == ({} if checked else {Skip.TOO_LONG.value: 1})


# When a check is sent


def waiting(bed: Bed, num_checks: int) -> None:
    """Requests whose checks are held back: no worker runs outside of a loop."""

    async def queue() -> None:
        for _ in range(num_checks):
            asked, listener = bed.answered()
            assert listener is not None
            bed.auditor.finish(asked, listener)
        assert bed.auditor._worker is not None
        bed.auditor._worker.cancel()

    asyncio.run(queue())


def run_worker(bed: Bed, seconds: float = DEADLINE_S) -> None:
    asyncio.run(asyncio.wait_for(bed.auditor._work(), seconds))


def test_check_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """While something waits at the rank nothing is sent; then the oldest first, one at a time."""
    monkeypatch.setattr(audit_module, "POLL_S", 0.001)
    bed = Bed()
    waiting(bed, 2)
    bed.ranks.is_free = False
    with pytest.raises(asyncio.TimeoutError):
        run_worker(bed, 0.05)
    assert (bed.ranks.checks, bed.auditor.stats()["waiting"]) == ([], 2)
    bed.ranks.is_free = True
    run_worker(bed)
    assert (len(bed.ranks.checks), bed.auditor.stats()["waiting"]) == (2, 0)


def test_busy_rank_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of a rank with room goes first."""
    monkeypatch.setattr(audit_module, "POLL_S", 0.001)
    bed = Bed(share=1.0, num_ranks=2)
    waiting(bed, 2)
    busy, free = bed.auditor._waiting
    bed.auditor._waiting[1] = free = dataclasses.replace(free, rank=1, epoch=bed.auditor._epoch(1))

    async def has_room(rank: int, num_tokens: int) -> bool:
        return rank == 1

    bed.ranks.has_room = has_room  # type: ignore[method-assign]

    with pytest.raises(asyncio.TimeoutError):  # it waits for the busy one
        run_worker(bed, 0.05)
    assert bed.ranks.checks == [free]
    assert list(bed.auditor._waiting) == [busy]


def test_check_is_dropped_after_a_minute_or_a_flush() -> None:
    """The weights may be others then. One that is younger is sent."""
    bed = Bed()
    waiting(bed, 2)
    bed.now = 30.0
    waiting(bed, 1)
    mirror = bed.bench.bookkeeper.mirrors[0]
    mirror.restart(mirror.acknowledgement.epoch + 1)
    waiting(bed, 1)
    bed.now = 60.5
    run_worker(bed)
    assert bed.skips == {Skip.LATE.value: 2, Skip.FLUSHED.value: 1}
    assert len(bed.ranks.checks) == 1


def test_waiting_checks_are_bounded() -> None:
    bed = Bed()
    waiting(bed, MAX_WAITING + 3)
    assert (bed.auditor.stats()["waiting"], bed.skips) == (MAX_WAITING, {Skip.FULL.value: 3})


ABORTED = {"meta_info": {"finish_reason": {"type": "abort"}}}
WITHOUT_ROWS = {"finish_reason": {"type": "length"}, "input_top_logprobs": [None]}


@pytest.mark.parametrize(
    "answer",
    [ValueError("too long"), ABORTED, {"meta_info": WITHOUT_ROWS}],
    ids=["refused", "aborted", "without rows"],
)
def test_failed_check_is_counted_and_the_next_one_sent(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It harms nobody; the log has the first."""
    bed = Bed()
    bed.ranks.answer = answer
    with caplog.at_level(logging.WARNING):
        bed.serve()
        bed.serve()
    assert bed.skips == {Skip.FAILED.value: 2}
    assert caplog.text.count("an audit failed") == 1
    bed.ranks.answer = None
    bed.serve()
    assert bed.figures[0]["samples"] == 1


def test_tallies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send any ratio and any tenant: the rest is counted together."""
    monkeypatch.setattr(audit_module, "MAX_TALLIES", 3)
    bed = Bed()
    odd = [FusionRequest("critical", 0.15, quality=0.9), FusionRequest("none", 0.15)]
    for fusion in [*odd, *(FusionRequest("query", 0.15 + number / 100) for number in range(8))]:
        bed.serve(fusion=fusion)
    *first, rest = [(one["tenant"], one["ratio"], one["samples"]) for one in bed.figures]
    assert first == [(ME.tenant, ratio, 1) for ratio in ("auto", None, 0.15)]
    assert rest == ("others", None, 7)


def test_figures_are_of_what_chose_and_the_state_of_what_was_asked_for() -> None:
    """Where the question's selector does not pay."""
    bed = Bed()
    bed.serve_badly(report=structs.replace(MOVED, selector="first"))
    (figures,) = bed.figures
    assert [figures[name] for name in ("selector", "samples", "below_target")] == ["first", 5, 5]
    terms = bed.auditor.stats()["terms"]
    assert (terms["server"]["selector"], terms["server"]["state"]) == (FUSION.selector, "paused")
    assert terms["own"] == []


# What follows


def test_broken_terms_of_the_server_are_paused_loudly(caplog: pytest.LogCaptureFixture) -> None:
    bed = Bed()
    with caplog.at_level(logging.WARNING):
        shown = [asked.answer() for asked in bed.serve_badly(6)]
    assert [one["reuse"] and one["reuse"]["ratio"] for one in shown] == [0.15] * 5 + [None]
    assert [one["fallbacks"] for one in shown] == [[]] * 5 + [["audit_paused", "evicted"]]
    (pause,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    wanted = "selector query at ratio 0.15 (the server's terms) is paused (was asked): of 5 audited"
    assert wanted in pause.getMessage()
    assert bed.bench.bookkeeper.metrics.totals()["fallbacks"] == {"audit_paused": 1, "evicted": 1}
    (figures,) = bed.figures
    assert [figures[name] for name in ("ratio", "samples", "below_target")] == [0.15, 5, 5]


def test_broken_terms_of_a_tenants_own_are_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Who tries ratio 0 is served exactly, and told so; the others are not."""
    bed, tried = Bed(), FusionRequest("query", 0.0)
    with caplog.at_level(logging.WARNING):
        bed.serve_badly(fusion=tried)
    (pause,) = caplog.records
    assert pause.levelno == logging.WARNING
    wanted = f"selector query at ratio 0.0 (terms of tenant {ME.tenant}) is paused"
    assert wanted in pause.getMessage()
    assert bed.serve(fusion=tried).answer()["fallbacks"] == ["audit_paused", "evicted"]
    assert bed.serve().answer()["fallbacks"] == []
    other = Identity("me", cache_salt="other")
    assert bed.bench.plan("q", A, B, fusion=tried, who=other).fallbacks == ()


def test_explained_plan_takes_nothing() -> None:
    """It says what the next request will get. Other selectors go on."""
    bed = Bed(audit_pause=3)
    bed.serve_badly()
    for _ in range(10):
        assert bed.bench.plan("q", A, B, fusion=FUSION).fallbacks == (Fallback.AUDIT_PAUSED,)
    assert bed.bench.bookkeeper.audit is not None
    assert bed.bench.bookkeeper.audit.state is AuditState.PAUSED
    assert bed.serve(fusion=FusionRequest("first", 0.15)).planned.fusion is not None


@pytest.mark.parametrize("named", [{}, {"selector": "critical", "ratio": 0.15, "move": "always"}])
def test_terms_of_requests_as_clients_write_them(named: Any) -> None:
    """Who names the server's selector and ratio asks for what the server does."""
    bench = Bench(reuse="fused", audit_share=1.0)

    def tenant(**wish: Any) -> str | None:
        reuse = ReuseIn(mode="fused", **wish)
        terms = bench.plan("q", A, B, fusion=fused_request(bench.config, reuse)).terms
        assert terms is not None
        return terms.whose.tenant

    assert tenant(**named) is None
    for other in ({"ratio": 0.0}, {"selector": "query"}, {"depth": 3}):
        assert tenant(**{**named, **other}) is not None


@pytest.mark.parametrize("knobs", [{"reuse": "fused", "audit_share": 0.0}, {"reuse": "exact"}])
def test_switched_off(knobs: dict[str, Any]) -> None:
    """No share, or nothing that moves: no terms, no state."""
    bench = Bench(**knobs)
    assert bench.bookkeeper.audit is None
    fusion = FUSION if knobs["reuse"] == "fused" else None
    assert bench.plan("q", A, fusion=fusion).terms is None
    stats = Auditor(bench.bookkeeper, Ranks()).stats()
    assert (stats["share"], stats["target"], stats["waiting"]) == (0.0, None, 0)
    assert (stats["terms"], stats["figures"]) == ({}, [])
