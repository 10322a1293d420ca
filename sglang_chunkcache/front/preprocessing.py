"""`/chunkcache/preprocess`: a chunk's KV after its neighbours, into every rank's store (FusionRAG
3.1, eq. 10).

    prompt    head | n1 | n2 | n3 | chunk        only `chunk` is computed, after all of them

A neighbour's KV is plain: computed after the head alone. The first one may be the exact prefix, the
others are moved. One that a rank has no plain KV of is computed alone before, so the chunk's KV
does not depend on the order of the corpus. What the rank's storage has of it is loaded instead. A
rank that has the chunk itself already, in store or storage, computes nothing: work that was cut off
goes on where it was.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from fastapi import Request
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_chunkcache.errors import EngineRefusedError
from sglang_chunkcache.front.bodies import PreprocessIn
from sglang_chunkcache.front.intake import Intake
from sglang_chunkcache.front.parts import Parts
from sglang_chunkcache.front.request import Draft, Planned, RagRequest
from sglang_chunkcache.wire.report import Explanation, Fallback, Report

WAIT_S = 10.0
"""For what a rank's storage has to load or to write for one request, at most."""
POLL_S = 0.01


async def preprocess(
    parts: Parts, intake: Intake, body: PreprocessIn, raw_request: Request
) -> dict[str, Any]:
    """Compute the chunk on all ranks at once; what became of the prompts' tokens and of the
    neighbours, over all ranks.

    Neighbours are `moved` (plain KV was there, or came from the storage), `computed` (alone before,
    then moved) or `missing`: still not there, so computed in context. `kept`: every rank had the
    chunk, and nothing was computed.

    Raises:
        RequestError: names the field that is wrong.
    """
    start = time.perf_counter()
    planned = [
        await intake.preprocessing(body, raw_request, rank=rank)
        for rank in range(len(parts.bookkeeper.mirrors))
    ]
    # else `gather` would return with the first error while other ranks still compute
    done = await asyncio.gather(
        *(_on_rank(parts, each, raw_request) for each in planned), return_exceptions=True
    )
    fates: Counter[str] = Counter()
    neighbors = Counter(moved=0, computed=0, missing=0)
    for each in done:
        if isinstance(each, BaseException):
            raise each
        if each is not None:
            fates.update(each[0])
            neighbors.update(each[1])
    span = planned[0].spans[-1]
    return {
        "chunk_tokens": span.end - span.start,
        "kept": not any(done),
        "fates": fates,
        "neighbors": neighbors,
        "seconds": round(time.perf_counter() - start, 6),
    }


# Private, in order of use


async def _on_rank(
    parts: Parts, planned: Planned, raw_request: Request
) -> tuple[Mapping[str, int], Counter[str]] | None:
    """(tokens by fate, neighbours by fate). None: the rank has the chunk."""
    deadline = time.monotonic() + WAIT_S
    told = await _told(parts, planned, deadline)
    if told.is_kept:
        return None
    computed = set[int]()
    # Each neighbour is computed once at most: a pool too small for all of them may have evicted
    # it again, and would keep this going for ever.
    while (absent := _absent(planned, told, computed)) is not None:
        await _run(parts, parts.planner.plan(_alone(planned.draft, absent)), raw_request)
        computed.add(absent)
        told = await _told(parts, planned, deadline)
    rag, found = await _run(parts, planned, raw_request), set[int]()
    # a region whose pass has failed is computed in context, whatever was planned
    if rag.report and Fallback.PASS_FAILED not in rag.fallbacks:
        found = _found(planned, rag.report)
    neighbors = range(len(planned.spans) - 1)
    return rag.fates() or {}, Counter(_fate(index, found, computed) for index in neighbors)


async def _told(parts: Parts, planned: Planned, deadline: float) -> Explanation:
    """What the rank has, once its storage has done what can be waited for."""
    while True:
        told = await parts.engine.explain(planned)
        if not told.must_wait or time.monotonic() > deadline:
            return told
        await asyncio.sleep(POLL_S)


def _absent(planned: Planned, told: Explanation, computed: Collection[int]) -> int | None:
    """Index of the first neighbour that the rank has no plain KV of,
    and that was not computed alone. None: of all it has."""
    known = _found(planned, told).union(computed)
    return next((index for index in range(len(planned.spans) - 1) if index not in known), None)


def _found(planned: Planned, told: Explanation | Report) -> set[int]:
    """Indices of the neighbours whose plain KV is, or will be, in its place."""
    moved = {source.span for source in told.sources if source.where != "gap"}
    return {i for i, span in enumerate(planned.spans[:-1]) if i in moved or span.end <= told.exact}


def _alone(draft: Draft, index: int) -> Draft:
    """The prompt that computes one of the neighbours, as the prompt of a chunk without neighbours
    does."""
    fusion = draft.options.fusion
    assert fusion is not None
    options = replace(draft.options, fusion=replace(fusion, fresh=frozenset({0})))
    return replace(draft, chunks=(draft.chunks[index],), options=options)


async def _run(parts: Parts, planned: Planned, raw_request: Request) -> RagRequest:
    """The prompt and one token, on the rank that is planned."""
    rag, identity = RagRequest(planned), planned.draft.identity
    obj = GenerateReqInput(
        input_ids=planned.input_ids,
        # SGLang drops the rank's report of an answer without a token
        sampling_params={"max_new_tokens": 1, "temperature": 0},
        extra_key=identity.extra_key,
        cache_salt=identity.cache_salt,
    )
    try:
        async for _ in parts.engine.run(rag, obj, raw_request):
            pass
    except (ValueError, TypeError) as error:  # SGLang's parameters raise both
        raise EngineRefusedError(f"chunk: {error}") from None
    return rag


def _fate(index: int, found: Collection[int], computed: Collection[int]) -> str:
    if index in found and index not in computed:
        return "moved"
    # The first neighbour is computed in its place as it is alone: after the head.
    return "computed" if index in found or index == 0 else "missing"
