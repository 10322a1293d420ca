"""Which variants of a chunk are loaded from a slower tier for a request: those that its plan will choose among."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from radix_ext.chunk import ChunkId
from radix_ext.variants import Variant


def worth_loading(
    variants: Iterable[Variant], before: Collection[ChunkId], head: str, *, max_variants: int, alone: bool = False
) -> list[Variant]:
    """Of one chunk's variants those to load, best first: preprocessed ones, then what has seen most of the chunks before it.

    Where one was computed behind this head, others are left out. Among equals the shorter prefix comes first, then the latest
    one.

    Args:
        before: the chunks before it in the request.
        head: names the text before it there that is no chunk.
        alone: only what was computed behind this head and no chunk, and was not preprocessed.
    """
    known = frozenset(before)
    found = list(variants)
    behind = [variant for variant in found if variant.head == head]
    if alone:
        found = [variant for variant in behind if not (variant.prefix or variant.preprocessed)]
    elif behind:
        found = behind

    def merit(variant: Variant) -> tuple[bool, int, int, int]:
        seen = len(known.intersection(variant.prefix))
        return variant.preprocessed, seen, -len(variant.prefix), variant.last_used

    return sorted(found, key=merit, reverse=True)[:max_variants]
