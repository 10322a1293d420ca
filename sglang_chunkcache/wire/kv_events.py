"""SGLang's KV events, as its publisher encodes them: what a rank's own tree has stored and removed.

Read from outside, so what is unknown in them is left alone: releases add fields. What must be there
is typed, and anything else is refused.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Token: TypeAlias = int | tuple[int, int]
"""Speculative decoding may store pairs."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Pages that follow each other are in `medium` from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[Token]
    block_size: int
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """They are not in `medium` any more."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Nothing is anywhere."""


class KvBatch(msgspec.Struct, array_like=True, gc=False):
    """What a rank publishes at once."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(KvBatch)


def decode_batch(payload: bytes) -> KvBatch:
    """Raises ValueError where it is none, or its parts do not fit together."""
    try:
        batch = _decoder.decode(payload)
    except RecursionError as error:  # also in what is left alone
        raise ValueError(str(error)) from None
    for event in batch.events:
        if isinstance(event, BlockStored) and (
            event.block_size < 1
            or len(event.token_ids) != event.block_size * len(event.block_hashes)
        ):
            raise ValueError(
                f"{len(event.block_hashes)} blocks of {event.block_size} tokens"
                f" have {len(event.token_ids)}"
            )
    return batch
