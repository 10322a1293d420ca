"""A line of JSON per RAG request at its end, with `--log-level debug`, and the facts in it: numbers
and names of ours. Nothing of a client's but the request's id: no text, label, key or salt.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import orjson

from sglang_chunkcache.front.request import RagRequest

logger = logging.getLogger(__name__)
EVENT = "chunkcache.request"


def is_logged() -> bool:
    return logger.isEnabledFor(logging.DEBUG)


def log_request(rag: RagRequest, obj: Any) -> None:
    """Of a request that is over. `obj`: what SGLang was given."""
    timeline = rag.planned.draft.options.timeline
    ms = {step: ended - begun for step, begun, ended in timeline.steps()}
    if rag.first_token_s is not None:
        ms["first_token"] = rag.first_token_s
    ms["total"] = time.perf_counter() - timeline.came
    rounded = {name: round(1000 * seconds, 3) for name, seconds in ms.items()}
    _tell({"rid": obj.rid, **facts(rag), "ms": rounded})


def log_refusal(outcome: str, status: int) -> None:
    """Of a request that was refused before it ran. The answer says why, in the client's words."""
    if is_logged():
        _tell({"outcome": outcome, "status": status})


def facts(rag: RagRequest) -> dict[str, Any]:
    """What became of a request. `order` has the chunks' places among those of the request that were
    not left out; fates are missing where the rank has not told them."""
    planned, draft = rag.planned, rag.planned.draft
    places = {item.chunk.id: place for place, item in enumerate(draft.chunks)}
    return {
        "outcome": rag.outcome,
        "tenant": draft.identity.tenant,
        "rank": planned.rank if rag.served_by is None else rag.served_by,
        "turns": draft.num_turns + draft.num_rendered,
        "chunks": len(planned.spans),
        "chunks_hit": rag.hit_len if rag.known else None,
        "order": [places[span.chunk] for span in planned.spans if span.chunk in places],
        "prompt_tokens": len(planned.input_ids),
        "output_tokens": len(rag.output_ids),
        **(rag.fates() or {}),
        "cached": rag.num_cached,
        "loaded": rag.decoded.loaded if rag.decoded else 0,
        "fallbacks": [reason.value for reason in rag.fallbacks],
    }


def _tell(told: dict[str, Any]) -> None:
    logger.debug("%s", orjson.dumps({"event": EVENT, **told}).decode())
