"""What travels between the front process and the scheduler, and back.

To the scheduler in `sampling_params.custom_params` (flat lists only: nested ones kill the server under
`SGLANG_USE_PICKLE_IPC=0`), back in `meta_info[ANSWER_KEY]` with the first token of the answer.

Trust: only requests that carry the server's secret mark are read at all, and the scheduler hashes a span's tokens itself.
So a client that writes these keys into `/generate` gets nothing, and no claim about a chunk is ever believed.
"""

from __future__ import annotations

import hmac
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from radix_ext import Span, check_spans, chunk_id, leading_area

ANSWER_KEY = "chunkcache"
"""Key of our entry in `meta_info`."""


class Acknowledgement(NamedTuple):
    """How far the front has read a rank's event log."""

    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class RequestSpans:
    """One request's chunks as the scheduler sees them."""

    spans: tuple[Span, ...]
    """Sorted, disjoint, in prompt tokens."""
    namespace: str
    """Under which root of the global tree the first chunk area stands."""
    promoted_len: int
    """Leading chunks of the first chunk area that are over the promotion threshold."""
    ack: Acknowledgement

    @property
    def area_len(self) -> int:
        """Chunks in the first chunk area."""
        return len(leading_area(self.spans))

    def promoted_end(self, end: int) -> int:
        """`end`, cut where the promoted run ends if that is inside the first chunk area (`admission=promoted`)."""
        return min(end, self.spans[self.promoted_len].start) if self.promoted_len < self.area_len else end


def namespace_of(head_ids: Sequence[int], *identity: str | None) -> str:
    """The namespace of prompts that put their first chunk behind `head_ids`; `identity` is extra_key, cache_salt, LoRA."""
    named = chunk_id(head_ids) if len(head_ids) else ""
    return blake2b(
        "\0".join((named, *(f"{len(x)}:{x}" if x else "" for x in identity))).encode(), digest_size=12
    ).hexdigest()


def pack(
    spans: Sequence[Span], *, namespace: str, promoted_len: int, ack: Acknowledgement, secret: str
) -> dict[str, str | int | list[int]]:
    """The `custom_params` of one request."""
    return {
        "chunkcache_mark": secret,
        "chunkcache_spans": [offset for span in spans for offset in (span.start, span.end)],
        "chunkcache_namespace": namespace,
        "chunkcache_promoted": promoted_len,
        "chunkcache_ack": list(ack),
    }


def unpack(params: object, token_ids: array[int], *, prompt_len: int, secret: str) -> RequestSpans | None:
    """The request's spans, or None for a request that is not the front's.

    Raises:
        ValueError: the mark is right but the rest is not; a bug of ours, which the caller counts and computes through.
    """
    # `params` may be anything a client put there: SGLang does not check it.
    mark = params.get("chunkcache_mark") if isinstance(params, Mapping) else None
    if not isinstance(params, Mapping) or not isinstance(mark, str) or not secret:
        return None
    if not hmac.compare_digest(mark.encode("utf-8", "surrogatepass"), secret.encode()):
        return None
    offsets = params["chunkcache_spans"]
    spans = tuple(
        Span(start, end, chunk_id(token_ids[start:end])) for start, end in zip(offsets[::2], offsets[1::2], strict=True)
    )
    check_spans(spans, prompt_len)
    return RequestSpans(
        spans,
        str(params["chunkcache_namespace"]),
        int(params["chunkcache_promoted"]),
        Acknowledgement(*(int(x) for x in params["chunkcache_ack"])),
    )
