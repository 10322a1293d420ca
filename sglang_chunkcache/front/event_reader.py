"""Listens to the ranks' KV events, in the front's event loop. What was missed is asked for again;
what cannot be had drops the mirror.

A publisher's sockets are another program's: of what comes from them nothing is believed but its
form, here and in event_mirror.py.
"""

from __future__ import annotations

import asyncio
import logging

import zmq
import zmq.asyncio

from sglang_chunkcache import compat
from sglang_chunkcache.front.event_mirror import EventMirror
from sglang_chunkcache.kv_events import Source

logger = logging.getLogger(__name__)

REPLAY_S = 5.0
"""The publisher looks for such questions every 0.1 s, or after each batch."""
MAX_UNREAD = 100_000
"""Batches, as many as the publisher keeps: what is more is a gap."""


async def follow(mirror: EventMirror, source: Source) -> None:
    """One rank, for as long as the server runs; from when it has been heard on."""
    socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    socket.set_hwm(MAX_UNREAD)
    socket.subscribe(source.topic.encode())
    socket.connect(source.endpoint)
    try:
        while True:
            await _take(mirror, source, await socket.recv_multipart())
    except Exception:
        logger.exception("chunk cache: KV events of rank %d are not read any more", mirror.rank)
        mirror.drop("malformed")
    finally:
        socket.close(linger=0)


async def _take(mirror: EventMirror, source: Source, frames: list[bytes]) -> None:
    if len(frames) != 3 or frames[0] != source.topic.encode() or len(frames[1]) != 8:
        mirror.drop("foreign")
        return
    seq = int.from_bytes(frames[1], "big")
    if seq > mirror.next_seq and source.replay and not mirror.is_lost:
        for missed, payload in await replayed(source.replay, mirror.next_seq, seq):
            mirror.take(missed, payload)
            await asyncio.sleep(0)  # others are to be served meanwhile
    mirror.take(seq, frames[2])


async def replayed(endpoint: str, start: int, end: int) -> list[tuple[int, bytes]]:
    """The batches from `start` to before `end`, as far as the publisher has them."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    found = list[tuple[int, bytes]]()
    try:
        await socket.send_multipart((b"", start.to_bytes(8, "big")))
        async with asyncio.timeout(REPLAY_S):
            while batch := compat.replayed_batch(await socket.recv_multipart()):
                if start <= batch[0] < end:
                    found.append(batch)
    except TimeoutError:
        pass  # what is missing is a gap
    finally:
        socket.close(linger=0)
    return found
