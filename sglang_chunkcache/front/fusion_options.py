"""From a client's options for moved KV to what the scheduler is told: defaults and the recipe.

    recipe   query/0.15/alpha=-/focus=off/question=9f86d081884c7d65
             the policy                           only where the choice of tokens depends on it
    recipe   none/0.0/.../fresh=3/question=5f2ae1c07b9d4e83       of a prompt that preprocesses

Fused KV is shared between requests by its recipe alone, so the recipe names all that the KV depends
on besides its chunks and what precedes them; in a conversation the first fused turn's question
counts for all later turns. Knows no token's KV and no source: the scheduler decides what is moved.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from radix_ext import FusionRequest, Need
from radix_ext.fusion_request import NEEDS, QUESTION, Focus
from sglang_chunkcache.config import MAX_ALPHA, MAX_FIRST_TOKENS, MAX_LAYERS, ChunkCacheConfig
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.own_selectors import own_needs

DEFAULT_QUALITY = 0.99
"""Of ratio "auto"."""


# strict: true would be 1, and "0.5" a number
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
NumLayers = Annotated[int, Field(ge=1, le=MAX_LAYERS, strict=True)]


class ReuseIn(BaseModel, extra="forbid", allow_inf_nan=False):
    """What a request may ask of moved KV; what is left out is the server's default."""

    mode: Literal["exact", "fused"]
    selector: str | None = None
    ratio: Share | Literal["auto"] | None = None
    quality: Share | None = None
    alpha: float | None = Field(default=None, ge=0, le=MAX_ALPHA, strict=True)
    tokens: int | None = Field(default=None, ge=0, le=MAX_FIRST_TOKENS, strict=True)
    focus: Focus | None = None
    depth: NumLayers | Literal["calibrated"] | None = None
    layers: NumLayers | Literal["last", "calibrated"] | None = None
    move: Literal["pays", "always"] | None = None


def check_fused(config: ChunkCacheConfig, field: str) -> None:
    """Raise RequestError, naming `field` and the flag, where the server does not move KV."""
    if config.is_stock:
        raise RequestError(f"{field}: this server's tree is SGLang's, in which no KV is moved")
    if config.reuse != "fused":
        raise RequestError(
            f"{field}: this server reuses exact prefixes only; start it with --reuse fused"
        )


def needs_of(config: ChunkCacheConfig, selector: str | None) -> frozenset[Need]:
    """What that selector reads, by default the server's own.
    Raises RequestError: the server has no such selector."""
    name = config.selector if selector is None else selector
    try:
        return NEEDS.get(name) or own_needs(name, config.selectors)
    except ValueError as error:
        raise RequestError(f"reuse.selector: {error}") from None


def fused_request(config: ChunkCacheConfig, asked: ReuseIn) -> FusionRequest:
    """The client's options with the server's defaults filled in; the recipe comes with the prompt.

    Alpha and focus are Cache-Craft's (eq. 12, algorithm 1), so by default `context` alone has them.
    Without `depth` and `layers` the papers' layers count, for `critical` and for ratio "auto" the
    calibrated ones.

    Raises:
        RequestError: a server that was started without `--reuse fused`, an option that the selector
            does not have, options that exclude each other, or a wish to move where it pays on a
            server that moves always.
    """
    check_fused(config, "reuse")
    if asked.move == "pays" and config.move == "always":
        raise RequestError(
            "reuse.move: this server has not measured what pays; start it with --chunkcache-move"
            " pays"
        )
    needs = needs_of(config, asked.selector)
    selector = config.selector if asked.selector is None else asked.selector
    if asked.alpha is not None and selector != "context":
        raise RequestError(f"reuse.alpha: selector {selector} has none, only context")
    if asked.tokens is not None and selector != "first":
        raise RequestError(f"reuse.tokens: selector {selector} has none, only first")
    if asked.depth is not None and Need.DEVIATION not in needs:
        raise RequestError(
            f"reuse.depth: selector {selector} compares no KV, only deviation and critical do"
        )
    if asked.layers is not None and (Need.QUESTION not in needs or Need.ALL_LAYERS in needs):
        raise RequestError(
            f"reuse.layers: selector {selector} has no choice of them, only query and critical"
        )
    is_auto = asked.ratio == "auto"
    if asked.quality is not None and not is_auto:
        raise RequestError('reuse.quality: goes with "ratio": "auto"')
    if is_auto and selector not in ("deviation", "critical"):
        raise RequestError(
            f"reuse.ratio: selector {selector} does not measure what KV lacks, only deviation and"
            " critical do"
        )
    if is_auto and asked.depth not in (None, "calibrated"):
        raise RequestError("reuse.ratio: auto goes with the calibrated depth")
    is_critical = selector == "critical"
    depth = asked.depth or ("calibrated" if is_auto or is_critical else 2)
    layers = asked.layers or ("calibrated" if is_critical else "last")
    return FusionRequest(
        selector=selector,
        ratio=asked.ratio if isinstance(asked.ratio, float) else config.recompute_ratio,
        quality=(DEFAULT_QUALITY if asked.quality is None else asked.quality) if is_auto else None,
        alpha=asked.alpha,
        tokens=asked.tokens,
        focus=asked.focus or ("spare" if selector == "context" else "off"),
        depth=_number(depth),
        layer=_number(layers),
        own_needs=frozenset() if selector in NEEDS else needs,
        always=(asked.move or config.move) == "always",
    )


def _number(named: int | str) -> int | None:
    return named if isinstance(named, int) else {"last": 0, "calibrated": None}[named]


def recipe_of(fusion: FusionRequest, question: Sequence[int], earlier: str = "") -> str:
    """The recipe of one prompt.

    Args:
        question: token ids after the first chunk area.
        earlier: recipe of the conversation's last fused turn, "" for none. It is kept while the
            policy stays the same: the history's fused KV is cached under it, and a later question
            does not change what was chosen for an earlier one.
    """
    policy = "/".join(
        (
            fusion.selector,
            repr(fusion.ratio),
            f"alpha={'-' if fusion.alpha is None else repr(fusion.alpha)}",
            f"focus={fusion.focus}",
            *([f"tokens={fusion.tokens}"] if fusion.tokens is not None else []),
            *([f"quality={fusion.quality}"] if fusion.quality is not None else []),
            *([f"depth={fusion.depth}"] if fusion.depth != 2 else []),
            *([f"layer={fusion.layer}"] if fusion.layer != 0 else []),
            *([f"fresh={'+'.join(map(str, sorted(fusion.fresh)))}"] if fusion.fresh else []),
        )
    )
    if fusion.plain:
        # What a neighbour without plain KV becomes is not known beforehand, so nothing else may
        # find what this prompt leaves.
        return f"{policy}{QUESTION}{secrets.token_hex(8)}"
    # With QUESTION behind it, since one policy may begin like another.
    if earlier == policy or earlier.startswith(policy + QUESTION):
        return earlier
    if not fusion.asks_the_question:
        return policy
    return f"{policy}{QUESTION}{blake2b(array('i', question), digest_size=8).hexdigest()}"
