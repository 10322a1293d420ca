"""SGLang's tokenizer manager as the front uses it: the one way to the engine, for requests and for
the ranks' state.

Every RAG request runs in `Engine.run`. It begins there and ends there, however it ends: answered,
refused by SGLang, failed, or abandoned by its client, in which case Python closes the generator.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import Request
from sglang.srt.managers.io_struct import GenerateReqInput, GetInternalStateReq
from sglang.srt.observability.trace import get_global_tracing_enabled

from sglang_chunkcache.errors import BusyError, ChunkCacheError, RequestError
from sglang_chunkcache.front.audit import Auditor, Check
from sglang_chunkcache.front.bookkeeper import Bookkeeper
from sglang_chunkcache.front.request import Planned, RagRequest
from sglang_chunkcache.front.request_log import is_logged, log_request
from sglang_chunkcache.front.tracing import traced
from sglang_chunkcache.wire.message import decode, encode
from sglang_chunkcache.wire.report import Explanation
from sglang_chunkcache.wire.spans import RequestSpans
from sglang_chunkcache.wire.state import (
    STATE_KEY,
    Asked,
    CalibrationPrompt,
    Cleared,
    ExplainRequest,
    RankState,
)

logger = logging.getLogger(__name__)

STATES_S, LAST_STATES_S = 60.0, 2.0
"""How long the ranks' states are waited for, which come between two forwards;
and once the server is about to end."""
MAX_PREFETCHES = 16
"""Requests that ranks are told to load for at once.
More are let be: SGLang sends one message at a time, operators' as well."""


class Engine:
    """The manager; it looks like SGLang's to SGLang's serving classes."""

    def __init__(self, manager: Any, bookkeeper: Bookkeeper) -> None:
        self._manager, self._bookkeeper = manager, bookkeeper
        self._unexplained: list[tuple[ExplainRequest, asyncio.Future[Explanation]]] = []
        self._explaining: asyncio.Task[None] | None = None
        self.auditor = Auditor(bookkeeper, self)
        self._prefetching: set[asyncio.Future[None]] = set()
        self._reading: asyncio.Future[None] | None = None
        self._warned = set[str]()
        self._late: asyncio.Future[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def generate_request(self, obj: Any, request: Request | None = None) -> AsyncIterator[Any]:
        """As SGLang's; a request that `RagServingChat` hands over with the HTTP request runs as
        ours."""
        rag = None if request is None else getattr(request.state, "chunkcache", None)
        if rag is None:
            return self._manager.generate_request(obj, request)  # type: ignore[no-any-return]
        return self.run(rag, obj, request)

    async def run(self, rag: RagRequest, obj: Any, raw_request: Any) -> AsyncIterator[Any]:
        """SGLang's outputs for a planned request, with what is ours taken out of them. Outputs of a
        request that does not stream are handed out when it is over, since SGLang reads only the
        first."""
        incremental = bool(obj.stream and self._manager.incremental_streaming_output)
        rag.streams, whole = bool(obj.stream), []
        with self._bookkeeper.begin(rag), ExitStack() as over:
            if get_global_tracing_enabled():
                over.enter_context(traced(rag, obj, raw_request))
            if is_logged():
                over.callback(log_request, rag, obj)
            listener = self.auditor.listen(rag, obj)
            if listener is not None:
                # A request that is given up is over, too.
                over.callback(self.auditor.finish, rag, listener)
            # the scheduler is told what it must know, and SGLang which rank it is
            params = rag.params_with(obj.sampling_params.get("custom_params"))
            obj.sampling_params = {**obj.sampling_params, "custom_params": params}
            obj.routed_dp_rank = self._routed(rag.planned.rank)
            try:
                async for output in self._manager.generate_request(obj, raw_request):
                    for i, one in enumerate(output if isinstance(output, list) else [output]):
                        if listener is not None:
                            listener.hear(one["meta_info"], incremental=incremental)
                        self._bookkeeper.observe(
                            rag, one, index=one.get("index", i), incremental=incremental
                        )
                    self.keep_up()
                    # At once: a client may close the stream with the last output in hand.
                    if listener is not None and rag.finish_reason:
                        self.auditor.finish(rag, listener)
                    if obj.stream:
                        yield output
                    else:
                        whole.append(output)
            except (ValueError, TypeError):  # SGLang's parameters raise both
                # SGLang raises ValueError as well where the client has gone.
                rag.is_refused = not rag.is_answered and not await raw_request.is_disconnected()
                raise
        for output in whole:
            yield output

    async def states(self) -> list[RankState] | None:
        """What every rank says of itself, by rank. None: one runs without the chunk cache.

        Raises:
            BusyError: they do not answer.
        """
        found = await self._answered(self._manager.get_internal_state, STATES_S)
        if any(STATE_KEY not in state for state in found):
            return None
        return _decoded(state[STATE_KEY] for state in found)

    def keep_up(self) -> None:
        """Have the ranks tell what their mirrors lack and no answer brings, if there is anything.
        Waits for nothing."""
        is_reading = self._reading is not None and not self._reading.done()
        if not is_reading and any(mirror.is_behind for mirror in self._bookkeeper.mirrors):
            self._reading = asyncio.ensure_future(self._read_on())

    @property
    def max_prompt_len(self) -> int:
        """Tokens that a prompt may have."""
        # one less: SGLang refuses a prompt that is as long as either limit
        return int(min(self._manager.model_config.context_len, self._manager.max_req_input_len)) - 1

    async def has_room(self, rank: int, num_tokens: int) -> bool:
        """Whether nothing waits at the rank, and its pool can do without that many slots.
        Its mirror knows its epoch then.

        SGLang's load report costs nothing, but is as old as the rank's last batch. So the rank is
        asked where that says so: its answer comes after all that was sent before. Twice the slots
        must be free or evictable: running answers grow into them, and a request that does not fit
        holds up those that come after it.
        """
        load = self._manager.load_snapshot_reader.read(rank)
        if self._manager.gracefully_exit or load is None or load.num_waiting_reqs:
            return False
        states = await self.states() or []
        state = next((state for state in states if state.dp_rank == rank), None)
        if state is None:
            return False
        # which restarts the mirror of a cache that was emptied
        self._bookkeeper.mirrors[rank].hear(state)
        self.keep_up()
        if state.num_waiting:
            return False
        return bool(state.counts["free"] + state.counts["evictable"] >= 2 * num_tokens)

    async def prefill(self, check: Check, *, top: int) -> Mapping[str, Any]:
        """SGLang's output for an audit: exact, with logprobs from the prompt's last token on,
        inserted nowhere."""
        planned, identity = check.planned, check.planned.draft.identity
        spans = RequestSpans(
            planned.spans,
            planned.namespace,
            0,
            self._bookkeeper.mirrors[check.rank].acknowledgement,
            is_audit=True,
        )
        obj = GenerateReqInput(
            input_ids=check.input_ids,
            sampling_params={
                "temperature": 0,
                "max_new_tokens": 1,
                "custom_params": self._bookkeeper.packed(spans),
            },
            return_logprob=True,
            # SGLang matches no cached token from here on, so all of the answer is computed.
            logprob_start_len=len(planned.input_ids) - 1,
            top_logprobs_num=top,
            extra_key=identity.extra_key,
            cache_salt=identity.cache_salt,
            routed_dp_rank=self._routed(check.rank),
            # else its latency would count as a request's
            log_metrics=False,
        )
        async for output in self._manager.generate_request(obj, None):
            found: Mapping[str, Any] = output
        return found

    async def explain(self, planned: Planned) -> Explanation:
        """What its rank would do with the request. What is asked while ranks answer is asked
        together: SGLang sends them one message at a time, and they read it between two forwards.

        Raises:
            ChunkCacheError: the rank does not explain.
        """
        asked = self._unsent(planned)
        explained: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._unexplained.append((asked, explained))
        if self._explaining is None or self._explaining.done():
            self._explaining = asyncio.create_task(self._explain_all())
        return await explained

    def prefetch(self, planned: Planned) -> None:
        """Have its rank load what the request would need of the storage. Waits for nothing."""
        if len(self._prefetching) >= MAX_PREFETCHES:
            return
        task = asyncio.ensure_future(self._prefetch(self._unsent(planned)))
        self._prefetching.add(task)
        task.add_done_callback(self._prefetching.discard)

    async def clear_store(self) -> dict[int, Cleared]:
        """Empty every rank's store; what was in it, by rank.

        Raises:
            ChunkCacheError: a rank has not done it.
        """
        states = await self._ask(Asked(clear_store=True))
        cleared = {state.dp_rank: state.cleared for state in states if state.cleared}
        if len(cleared) != len(self._bookkeeper.mirrors):
            raise ChunkCacheError("a rank has not emptied its store")
        return cleared

    async def calibrate(self, prompts: list[CalibrationPrompt]) -> list[dict[str, Any]]:
        """What every rank has found, by rank.

        Raises:
            RequestError: one refuses.
            BusyError: too many requests run at one.
            ChunkCacheError: one has failed.
        """
        states = await self._ask(Asked(calibrate=prompts))
        for state in states:
            if state.refusal:
                status, why = state.refusal
                if status == RequestError.status:
                    raise RequestError(f"examples: {why}")
                kind = BusyError if status == BusyError.status else ChunkCacheError
                raise kind(f"calibrate: {why}")
        return [{"dp_rank": state.dp_rank, **state.counts["calibration"]} for state in states]

    # Private, in order of use

    async def _read_on(self) -> None:
        """Until the mirrors are even with the ranks.
        Given up where that fails: the next answer has it tried again."""
        mirrors, before = self._bookkeeper.mirrors, None
        try:
            while any(mirror.is_behind for mirror in mirrors):
                read = tuple(mirror.reading for mirror in mirrors)
                # else a rank that tells nothing more would be asked without end
                if read == before:
                    raise ChunkCacheError(f"a rank does not tell what comes next: {read}")
                for state in await self._ask(Asked(read=read)):
                    mirrors[state.dp_rank].hear(state)
                before = read
        except Exception as error:  # orders get worse, answers do not
            self._warn_once(
                "chunk cache: the front does not keep up with what the ranks have cached: %s", error
            )

    async def _prefetch(self, asked: ExplainRequest) -> None:
        try:
            await self._send(Asked(prefetch=asked))  # nobody waits for it
        except Exception as error:  # the request itself loads what it needs
            self._warn_once("chunk cache: a prefetch failed (further ones may): %s", error)

    def _warn_once(self, message: str, error: Exception) -> None:
        if message not in self._warned:
            logger.warning(message, error)
        self._warned.add(message)

    async def _explain_all(self) -> None:
        while self._unexplained:
            # What is asked during the await is in the new list, for the next round.
            waiting, self._unexplained = self._unexplained, []
            answers: dict[int, Iterator[Explanation]] = {}
            failure: BaseException | None = None
            try:
                states = await self._ask(Asked(explain=tuple(asked for asked, _ in waiting)))
                # A rank explains in the order in which it is asked, so each has one iterator.
                answers = {state.dp_rank: iter(state.explanations) for state in states}
            # also when cancelled: those who wait would wait for ever
            except BaseException as error:
                failure = error
            for asked, explained in waiting:
                answer = next(answers.get(asked.dp_rank, iter(())), None)
                if explained.done():  # its client has gone
                    continue
                if answer is not None:
                    explained.set_result(answer)
                else:
                    silence = ChunkCacheError(f"rank {asked.dp_rank} does not explain")
                    explained.set_exception(failure or silence)
            if failure is not None and not isinstance(failure, Exception):
                raise failure

    def _unsent(self, planned: Planned) -> ExplainRequest:
        identity, extra_key = planned.draft.identity, planned.draft.identity.extra_key
        if identity.lora is not None:  # as SGLang names an adapter's KV
            if identity.lora not in self._manager.lora_ref_cache:
                raise RequestError(f"lora_path: no adapter is named {identity.lora!r}")
            extra_key = (extra_key or "") + self._manager.lora_ref_cache[identity.lora].lora_id
        spans = self._bookkeeper.spans_of(planned, is_counted=False)
        return ExplainRequest(
            planned.input_ids, spans, extra_key, identity.cache_salt, planned.rank
        )

    async def _ask(self, asked: Asked) -> list[RankState]:
        """The answers of all ranks that run with the chunk cache, by rank."""
        answers = await self._answered(partial(self._send, asked), math.inf)
        states = [answer.internal_state.get(STATE_KEY) for answer in answers]
        return _decoded(state for state in states if state)

    async def _send(self, asked: Asked) -> list[Any]:
        self._manager.auto_create_handle_loop()
        # SGLang's one way to a scheduler outside of serving; `rid` is the only field of this
        # request that carries text.
        question = GetInternalStateReq(rid=encode(asked))
        return await self._manager.get_internal_state_communicator(question)  # type: ignore[no-any-return]

    async def _answered(self, ask: Callable[[], Awaitable[Any]], limit_s: float) -> Any:
        """What the ranks answer. SGLang's own waiting has no end, and would hold up the server's.

        Raises:
            BusyError: they do not answer.
        """
        if self._late is not None and not self._late.done():
            raise BusyError("a rank does not answer")
        asked, begun = asyncio.ensure_future(ask()), time.monotonic()
        # never cancelled: SGLang's communicator does not bear that
        while not (await asyncio.wait({asked}, timeout=0.5))[0]:
            if self._manager.gracefully_exit:
                limit_s = LAST_STATES_S
            if time.monotonic() - begun > limit_s:
                self._late = asked
                raise BusyError("a rank does not answer")
        return asked.result()

    def _routed(self, rank: int) -> int | None:
        """The rank as SGLang is told of it. None: there is one, or a decode server looks for the
        request at the rank that its room names, which SGLang knows."""
        if len(self._bookkeeper.mirrors) == 1:
            return None
        args = self._manager.server_args
        is_found = args.load_balance_method not in ("auto", "follow_bootstrap_room")
        return rank if is_found or args.disaggregation_mode != "prefill" else None


def _decoded(states: Iterable[str]) -> list[RankState]:
    return sorted((decode(state, RankState) for state in states), key=lambda state: state.dp_rank)
