"""What travels between the front process and the scheduler, and back.

To the scheduler in `sampling_params.custom_params` (flat lists only: nested ones kill the server under
`SGLANG_USE_PICKLE_IPC=0`), back in `meta_info[ANSWER_KEY]` with the first token of the answer.

Trust: only requests that carry the server's secret mark are read at all, and the scheduler hashes a span's tokens itself.
So a client that writes these keys into `/generate` gets nothing, and no claim about a chunk is ever believed.
"""

from __future__ import annotations

import hmac
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from radix_ext import Span, check_spans, chunk_id, leading_area

ANSWER_KEY = "chunkcache"
"""Key of our entry in `meta_info`."""


class Acknowledgement(NamedTuple):
    """How far the front has read a rank's event log."""

    epoch: int
    seq: int


@dataclass(frozen=True, slots=True)
class ReuseRequest:
    """What a request that opted into moved KV asks for."""

    selector: str
    ratio: float
    """Share of the moved tokens to recompute, 0 to 1."""
    recipe: str
    """Names how the fused KV comes about; requests share fused nodes where it agrees."""
    alpha: float | None = None
    """Cache-Craft's scale of eq. 12; None: solved for so that the mean CFO is `ratio`."""
    focus: bool = False
    """Whether chunks that the question does not attend to are spared recomputation (Cache-Craft, algorithm 1)."""
    without: frozenset[str] = frozenset()
    """Parts of `context` to leave out, for ablations: "beta", "cci"."""
    fresh: frozenset[int] = frozenset()
    """Spans that are computed even where a source exists."""

    @property
    def recomputes(self) -> bool:
        """Whether its selector takes tokens at all."""
        return self.selector not in ("none", "set")

    @property
    def is_choice(self) -> bool:
        """Whether there is something to choose: neither nothing nor everything is asked for."""
        return self.alpha is not None or 0 < self.ratio < 1


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
    keep: frozenset[int] = frozenset()
    """Spans that have earned a place in the chunk store."""
    is_preprocessing: bool = False
    """Sent ahead of requests to fill the store (FusionRAG 3.1)."""
    reuse: ReuseRequest | None = None
    """None: exact reuse only."""
    is_later_turn: bool = False
    """It stands behind its own conversation's history, whose chunks it finds without anybody having asked for them again."""

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
    spans: Sequence[Span],
    *,
    namespace: str,
    promoted_len: int,
    ack: Acknowledgement,
    secret: str,
    keep: Iterable[int] = (),
    is_preprocessing: bool = False,
    reuse: ReuseRequest | None = None,
    is_later_turn: bool = False,
) -> dict[str, Any]:
    """The `custom_params` of one request."""
    params: dict[str, Any] = {
        "chunkcache_mark": secret,
        "chunkcache_spans": [offset for span in spans for offset in (span.start, span.end)],
        "chunkcache_namespace": namespace,
        "chunkcache_promoted": promoted_len,
        "chunkcache_ack": list(ack),
        "chunkcache_keep": sorted(keep),
        "chunkcache_preprocess": is_preprocessing,
        "chunkcache_later_turn": is_later_turn,
    }
    if reuse is not None:
        params |= {
            "chunkcache_selector": reuse.selector,
            "chunkcache_ratio": reuse.ratio,
            "chunkcache_recipe": reuse.recipe,
            "chunkcache_alpha": [] if reuse.alpha is None else [reuse.alpha],
            "chunkcache_focus": reuse.focus,
            "chunkcache_without": sorted(reuse.without),
            "chunkcache_fresh": sorted(reuse.fresh),
        }
    return params


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
        frozenset(int(x) for x in params["chunkcache_keep"]),
        bool(params["chunkcache_preprocess"]),
        _unpack_reuse(params) if "chunkcache_selector" in params else None,
        bool(params["chunkcache_later_turn"]),
    )


def _unpack_reuse(params: Mapping[str, Any]) -> ReuseRequest:
    alpha = params["chunkcache_alpha"]
    return ReuseRequest(
        selector=str(params["chunkcache_selector"]),
        ratio=float(params["chunkcache_ratio"]),
        recipe=str(params["chunkcache_recipe"]),
        alpha=float(alpha[0]) if alpha else None,
        focus=bool(params["chunkcache_focus"]),
        without=frozenset(str(x) for x in params["chunkcache_without"]),
        fresh=frozenset(int(x) for x in params["chunkcache_fresh"]),
    )
