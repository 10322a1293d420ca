"""`/chunkcache/preprocess`: a chunk's KV after its neighbours, into every rank's store (FusionRAG 3.1, eq. 10).

    prompt    head | n1 | n2 | n3 | chunk        only `chunk` is computed, after all of them

A neighbour's KV is plain: computed after the head alone. The first one may be the exact prefix, the others are moved. One that
a rank has no plain KV of is computed alone before, so the chunk's KV does not depend on the order of the corpus.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
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


async def preprocess(parts: Parts, intake: Intake, body: PreprocessIn, raw_request: Request) -> dict[str, Any]:
    """Compute the chunk on each rank; what became of the prompts' tokens and of the neighbours, over all ranks.

    Neighbours are `moved` (plain KV was there), `computed` (alone before, then moved) or `missing`: still not there, so computed
    in context.

    Raises:
        RequestError: names the field that is wrong.
    """
    fates: Counter[str] = Counter()
    neighbors = Counter(moved=0, computed=0, missing=0)
    start = time.perf_counter()
    for rank in range(len(parts.books.mirrors)):
        planned = await intake.preprocessing(body, raw_request, rank=rank)
        computed = await _compute_absent(parts, planned, raw_request)
        rag = await _run(parts, planned, raw_request)
        fates.update(rag.fates() or {})
        found = _found(planned, rag.report) if rag.report and Fallback.PASS_FAILED not in rag.fallbacks else ()
        neighbors.update(_fate(index, found, computed) for index in range(len(planned.spans) - 1))
    span = planned.spans[-1]
    return {
        "chunk_tokens": span.end - span.start,
        "fates": fates,
        "neighbors": neighbors,
        "seconds": round(time.perf_counter() - start, 6),
    }


# Private, in order of use


async def _compute_absent(parts: Parts, planned: Planned, raw_request: Request) -> set[int]:
    """Compute the neighbours alone that the rank has no plain KV of; their indices."""
    computed: set[int] = set()
    while len(computed) < len(planned.spans) - 1:
        found = _found(planned, await parts.engine.explain(planned))
        absent = next((i for i in range(len(planned.spans) - 1) if i not in found and i not in computed), None)
        if absent is None:
            break
        await _run(parts, parts.planner.plan(_alone(planned.draft, absent)), raw_request)
        computed.add(absent)
    return computed


def _found(planned: Planned, told: Explanation | Report) -> set[int]:
    """Indices of the neighbours whose plain KV is, or will be, in its place."""
    moved = {source.span for source in told.sources if source.where != "gap"}
    return {i for i, span in enumerate(planned.spans[:-1]) if i in moved or span.end <= told.exact}


def _alone(draft: Draft, index: int) -> Draft:
    """The prompt that computes one of the neighbours, as the prompt of a chunk without neighbours does."""
    fusion = draft.options.fusion
    assert fusion is not None
    options = replace(draft.options, fusion=replace(fusion, fresh=frozenset({0})))
    return replace(draft, chunks=(draft.chunks[index],), options=options)


async def _run(parts: Parts, planned: Planned, raw_request: Request) -> RagRequest:
    """The prompt and one token, on the rank that is planned."""
    rag, identity = RagRequest(planned), planned.draft.identity
    obj = GenerateReqInput(
        input_ids=planned.input_ids,
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
