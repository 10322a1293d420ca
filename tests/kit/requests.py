"""Chunks of a few tokens, and requests with them whose KV may be moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from radix_ext import FusionRequest
from sglang_chunkcache.own_selectors import own_needs
from sglang_chunkcache.wire.spans import namespace_of
from tests.reference.scheduler import FakeReq, marked

HEAD, A, B, C, D, QUESTION = [90, 91], [1, 2, 3, 4], [1, 2, 5], [7, 8], [6, 6, 6, 6], [30, 31, 32]
OTHER_HEAD, E = [95, 96, 97], [60, 61, 62, 63, 64, 65, 66, 67]
_numbers = count()


def asks(
    selector: str = "none", ratio: float = 0.0, recipe: str = "r", *, fresh: Sequence[int] = ()
) -> FusionRequest:
    needs = own_needs(selector, "eval.selectors")
    return FusionRequest(selector, ratio, recipe, fresh=frozenset(fresh), own_needs=needs)


def rag(
    *chunks: Sequence[int],
    head: Sequence[int] = HEAD,
    tail: Sequence[int] = QUESTION,
    cache_salt: str | None = None,
    extra_key: str | None = None,
    **fields: Any,
) -> FakeReq:
    """A request of the front: head, chunks, question. `fields`: of `marked`."""
    ids, spans = list(head), []
    for chunk in chunks:
        spans.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    tenant = namespace_of((), extra_key, cache_salt) if extra_key or cache_salt else ""
    request = marked(spans, namespace=f"{head}{tenant}", **fields)
    return FakeReq([*ids, *tail], request, cache_salt=cache_salt, extra_key=extra_key)


def fused(*chunks: Sequence[int], **fields: Any) -> FakeReq:
    """One that lets KV be moved."""
    return rag(*chunks, **{"fusion": asks(), **fields})


def ahead(*chunks: list[int], **fields: Any) -> FakeReq:
    """The last chunk behind its neighbours, computed ahead of requests."""
    fresh, recipe = [len(chunks) - 1], f"prompt {next(_numbers)}"
    fusion = replace(asks(recipe=recipe, fresh=fresh), plain=True)
    return rag(*chunks, fusion=fusion, keep=fresh, is_preprocessing=True, **fields)
