"""The chunks that an arm's server found cached, and those that a replay of the same requests expects, without a server.

A replay is computed by the server's own parts, for arms whose server runs our cache with exact reuse. Two simplifications:
requests are replayed one after the other in their order, while a server has several in flight; and the pool is taken to hold a
number of chunks, while it also holds questions and answers. Both figures together show how close a replay comes to a server.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import compress
from typing import TYPE_CHECKING, Any

from eval.serve.server_pool import key_of
from eval.serve.workload import predecessors
from radix_ext import Chunk, ChunkId, ReplaySettings, replay_trace
from sglang_chunkcache import ChunkCacheConfig

if TYPE_CHECKING:
    from eval.serve.arms import Arm
    from eval.serve.plan import Cell
    from eval.task import Request, TextChunk

Sample = Mapping[str, Any]


def hit_shares(
    samples: Sequence[Sample], arm: Arm, cell: Cell, servers: Mapping[str, Mapping[str, Any]]
) -> dict[str, float | None]:
    """`hit_share`, `expected_hit_share` and `pool_chunks` of the arm's answered requests in the cell; None if unknown.

    Args:
        samples: of answered requests, in the order of sending.
        servers: the servers' descriptions of themselves, with `flags` and `max_total_num_tokens`.
    """
    by_id = {request.id: request for request in cell.requests}
    sent = replace(cell, requests=[by_id[sample["request"]] for sample in samples])
    firsts = compress(zip(samples, sent.requests, strict=True), _first_turns(sent.requests))
    server = servers.get(str(key_of(arm, cell)), {})
    pool_chunks = _pool_chunks(samples, server)
    expected = expected_hit_share(
        arm,
        sent,
        flags=server.get("flags", ()),
        warm_up=sum(sample["warm_up"] for sample in samples),
        capacity=pool_chunks,
    )
    measured = _hit_share([(sample, request) for sample, request in firsts if not sample["warm_up"]])
    return {"hit_share": measured, "expected_hit_share": expected, "pool_chunks": pool_chunks}


def expected_hit_share(
    arm: Arm, cell: Cell, *, flags: Sequence[str], warm_up: int, capacity: int | None
) -> float | None:
    """Chunks found cached as a prefix over chunks, of the first turns after `warm_up` requests; None if it is unknown.

    Args:
        flags: all flags of the arm's server; empty: unknown.
        capacity: of the pool, in chunks; None for no limit.
    """
    if not arm.is_ours or arm.is_fused or not flags:
        return None
    # In a server's tree chains after different system prompts are different, so a chunk gets a different id after each. Unlike
    # the server's, access counts are then by system prompt too.
    systems = {system: n for n, system in enumerate(dict.fromkeys(request.system for request in cell.requests))}
    requests = [
        list(dict.fromkeys(_chunk(systems[request.system], chunk) for chunk in request.chunks))
        for request in cell.requests
    ]
    conversations = [request.conversation for request in cell.requests]
    settings = replay_settings(flags, capacity=capacity)
    replayed = replay_trace(requests, settings, conversations=conversations).requests
    counts = list(compress(replayed[warm_up:], _first_turns(cell.requests)[warm_up:]))
    num_chunks = sum(count.num_chunks for count in counts)
    return sum(count.num_hits for count in counts) / num_chunks if num_chunks else None


def replay_settings(flags: Sequence[str], *, capacity: int | None) -> ReplaySettings:
    """The launcher's flags as a replay's settings."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for field in fields(ChunkCacheConfig):
        parser.add_argument("--chunkcache-" + field.name.replace("_", "-"), dest=field.name, default=field.default)
    settings = parser.parse_known_args(flags)[0]
    return ReplaySettings(
        order=settings.order,
        tail=settings.tail,
        eviction=settings.eviction,
        admission=settings.admission,
        dedup="off" if settings.dedup == "off" else "shown",  # in a replay turns never leave the prompt
        capacity=capacity,
        capacity_tokens=None,
        window=int(settings.window_requests),
        threshold=int(settings.promotion_threshold),
        max_visits=int(settings.max_search_visits),
    )


def _first_turns(requests: Sequence[Request]) -> list[bool]:
    """A later turn's chunks come after a history, where no request matches them; the server then counts the first turn's."""
    return [before < 0 for before in predecessors(requests)]


def _chunk(system: int, chunk: TextChunk) -> Chunk:
    """Words are used as tokens: an order that weighs chains only needs their proportion."""
    return Chunk(ChunkId(f"{system}\0{chunk.id}"), max(1, len(chunk.text.split())))


def _hit_share(taken: Sequence[tuple[Sample, Request]]) -> float | None:
    """Chunks that the server found cached over distinct chunks; None if the server does not report them."""
    told = [(s, request) for s, request in taken if (s.get("chunkcache") or {}).get("chunks_hit") is not None]
    num_chunks = sum(len({chunk.id for chunk in request.chunks}) for _, request in told)
    return sum(sample["chunkcache"]["chunks_hit"] for sample, _ in told) / num_chunks if num_chunks else None


def _pool_chunks(samples: Sequence[Sample], server: Mapping[str, Any]) -> int | None:
    """Capacity of the server's pool in chunks, each with its share of its request's other tokens; None if unknown."""
    pool, counted = server.get("max_total_num_tokens"), [s for s in samples if s["prompt_tokens"] and s["num_chunks"]]
    tokens = sum(sample["prompt_tokens"] + (sample["completion_tokens"] or 0) for sample in counted)
    return max(1, int(pool * sum(sample["num_chunks"] for sample in counted) / tokens)) if pool and tokens else None
