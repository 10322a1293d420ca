"""A request's chunks on their way to the scheduler, in `sampling_params.custom_params`.

Trust: a request is read only if it carries the server's secret mark, and the scheduler hashes a
span's tokens itself. So a client that writes these keys into `/generate` gains nothing, and no
claim about a chunk is ever believed.
"""

from __future__ import annotations

import hmac
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Annotated

from msgspec import Meta, structs

from radix_ext import FusionRequest, Span, check_spans, chunk_id, leading_area
from sglang_chunkcache.wire.events import Acknowledgement
from sglang_chunkcache.wire.message import Record, decode, encode

KEY_PREFIX = "chunkcache_"
"""Of our keys in `custom_params`. The front drops a client's keys that begin so."""

MARK_KEY, SPANS_KEY = "chunkcache_mark", "chunkcache_spans"


class RequestSpans(Record, frozen=True):
    """One request's chunks, and what the scheduler must know about it."""

    spans: tuple[Span, ...]
    """Sorted, disjoint, in prompt tokens."""
    namespace: str
    """The root of the global tree under which the first chunk area is cached."""
    promoted_len: Annotated[int, Meta(ge=0)]
    """Leading chunks of the first chunk area that are over the promotion threshold."""
    ack: Acknowledgement
    keep: frozenset[int] = frozenset()
    """Indices of spans that have earned a place in the chunk store."""
    is_preprocessing: bool = False
    """Sent ahead of requests to fill the store (FusionRAG 3.1)."""
    fusion: FusionRequest | None = None
    """None: exact reuse only."""
    is_later_turn: bool = False
    """A follow-up turn: chunks of its own history are cache hits by construction and must not count
    as reuse."""
    is_audit: bool = False
    """Checks an earlier answer: it matches what is exact, and leaves nothing in the tree."""
    grows: bool = False
    """A promoted chunk after the exact prefix may be computed although it could be moved
    (radix_ext/exact_growth.py)."""

    @property
    def area_len(self) -> int:
        """Chunks in the first chunk area."""
        return len(leading_area(self.spans))


def namespace_of(head_ids: Sequence[int], *identity: str | None) -> str:
    """The namespace of prompts whose first chunk follows `head_ids`.

    `identity` is extra_key, cache_salt, LoRA; None: not given. SGLang keeps an empty extra_key
    apart from none.
    """
    # with lengths: text moved from one field to the next makes another namespace
    named = (f"{len(x)}:{x}" if x is not None else "" for x in identity)
    text = "\0".join((chunk_id(head_ids) if len(head_ids) else "", *named))
    return blake2b(text.encode(), digest_size=12).hexdigest()


def pack(request: RequestSpans, *, secret: str) -> dict[str, str]:
    """The `custom_params` of one request."""
    return {MARK_KEY: secret, SPANS_KEY: encode(request)}


def unpack(params: object, token_ids: array[int], *, secret: str) -> RequestSpans | None:
    """The request's spans, or None for a request that is not the front's.

    Args:
        token_ids: the prompt's.
    Raises:
        ValueError: the mark is right but the rest is not. A bug of ours, which the caller counts
            and computes through.
    """
    # `params` may be anything a client put there: SGLang does not check it.
    mark = params.get(MARK_KEY) if isinstance(params, Mapping) else None
    # without a secret an empty mark would be right
    if not isinstance(params, Mapping) or not isinstance(mark, str) or not secret:
        return None
    # In constant time, so that tries do not tell the mark. A client's string may hold lone
    # surrogates, which `encode` alone would raise for.
    if not hmac.compare_digest(mark.encode("utf-8", "surrogatepass"), secret.encode()):
        return None
    text = params.get(SPANS_KEY)
    return checked(decode(text if isinstance(text, str) else "", RequestSpans), token_ids)


def checked(request: RequestSpans, token_ids: array[int]) -> RequestSpans:
    """The request, if its spans are this prompt's. Raises ValueError otherwise."""
    check_spans(request.spans, len(token_ids))
    spans = tuple(
        Span(start, end, chunk_id(token_ids[start:end])) for start, end, _ in request.spans
    )
    if spans != request.spans:
        raise ValueError("a span's tokens are not those of the chunk it names")
    return structs.replace(request, spans=spans)  # with the one string that equal ids share
