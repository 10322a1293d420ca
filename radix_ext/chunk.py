"""Identity: chunks by the hash of their token ids, chains by the hash of the path that leads to
them.

Front and scheduler processes compute both on their own and must agree, so no id depends on the
process or on Python's hash seed. This module knows no texts, labels or positions.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, NewType

from radix_ext.errors import ChunkError, SpanError

ChunkId = NewType("ChunkId", str)
"""32 hex digits: blake2b-128 of the chunk's token ids, each as 4 bytes.
In the global tree also `fused_chunk`."""

ChainId = NewType("ChainId", int)
"""60-bit id of the path from a namespace's root to one node. Front and scheduler must agree on it;
it need not be secret. A collision (2**30 chains for an even chance) makes a mirror wrong, which
costs speed and never correctness."""

_FUSED = "fused:"

_MASK_60 = (1 << 60) - 1  # up to here an integer takes 32 bytes, above 48


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage as the trees see it. `num_tokens` >= 1, its separator included."""

    id: ChunkId
    num_tokens: int


class Span(NamedTuple):
    """One chunk's tokens `[start, end)` in one prompt, its separator included."""

    start: int
    end: int
    chunk: ChunkId


def chunk_id(token_ids: Sequence[int]) -> ChunkId:
    """Hash token ids (any integer sequence; `array('i')` is fastest). Equal ids give one shared
    string object.

    Raises:
        ChunkError: no tokens, or something that is no 32-bit integer.
    """
    if not len(token_ids):  # `not token_ids` is an error for numpy arrays
        raise ChunkError("a chunk must have at least 1 token but got 0")
    try:
        ids = (
            token_ids
            if isinstance(token_ids, array) and token_ids.typecode == "i"
            else array("i", token_ids)
        )
    except (TypeError, OverflowError) as error:
        raise ChunkError(f"token ids must be 32-bit integers: {error}") from None
    # Tree, spans and places name a chunk many times over; interned, they share one string.
    return ChunkId(sys.intern(blake2b(ids, digest_size=16).hexdigest()))


def fused_chunk(recipe: str, chunk: ChunkId) -> ChunkId:
    """A chunk in the global tree whose KV `recipe` has made. No chunk has that for an id."""
    return ChunkId(f"{_FUSED}{_named(recipe)}:{chunk}")


def is_fused_chunk(chunk: ChunkId) -> bool:
    return chunk.startswith(_FUSED)


def text_before(head: str, spans: Sequence[Span], token_ids: Sequence[int]) -> tuple[str, ...]:
    """Per span a name of the text before it that is in no span: `head`, until text follows a chunk.

    Args:
        head: names the tokens before the first span.
    """
    # From the first span on: what is before it has the name `head` already.
    names, end = [], spans[0].start if spans else 0
    for span in spans:
        if span.start > end:
            head = blake2b(
                f"{head}\0{chunk_id(token_ids[end : span.start])}".encode(), digest_size=12
            ).hexdigest()
        names.append(head)
        end = span.end
    return tuple(names)


def root_chain(namespace: str) -> ChainId:
    """Chain id of the empty path in one namespace."""
    return _chain(
        blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=8, person=b"root")
    )


def extend_chain(chain: ChainId, chunk: ChunkId) -> ChainId:
    """Chain id of the path that goes on from `chain` with one more chunk."""
    # `person` keeps the hashes of roots and of longer chains apart, whatever their bytes are.
    data = chain.to_bytes(8, "little") + chunk.encode("utf-8", "surrogatepass")
    return _chain(blake2b(data, digest_size=8, person=b"chain"))


def leading_area(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The first chunk area: the spans from the first on that follow each other without a gap."""
    length = 1 if spans else 0
    while length < len(spans) and spans[length].start == spans[length - 1].end:
        length += 1
    return tuple(spans[:length])


def check_spans(spans: Sequence[Span], num_tokens: int) -> None:
    """Check that spans are non-empty, in order, disjoint and inside a prompt of `num_tokens`.

    Raises:
        SpanError: names the first span that is not.
    """
    previous_end = 0
    for index, span in enumerate(spans):
        if span.start < previous_end:
            raise SpanError(
                f"span {index} must start at {previous_end} or later but got {span.start}"
            )
        if span.end <= span.start:
            raise SpanError(f"span {index} must end after {span.start} but got {span.end}")
        if span.end > num_tokens:
            raise SpanError(f"span {index} must end by {num_tokens} but got {span.end}")
        previous_end = span.end


# A request names each of its chunks under one recipe.
@lru_cache(maxsize=64)
def _named(recipe: str) -> str:
    return blake2b(recipe.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _chain(digest: blake2b) -> ChainId:
    return ChainId(int.from_bytes(digest.digest(), "little") & _MASK_60)
