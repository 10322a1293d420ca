"""The hit share that a replay expects of an arm in a cell, computed by the server's own parts without a server.

Only for arms whose server runs our cache with exact reuse. Two simplifications: requests are replayed one after the other in
their order, while a server has several in flight; and the pool is taken to hold a number of chunks, while it also holds questions
and answers. The figure is reported with the measured one to show how close a replay comes to a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, pairwise
from typing import TYPE_CHECKING

from radix_ext import Chunk, ChunkId, ReplaySettings, replay_trace
from sglang_chunkcache import ChunkCacheConfig

if TYPE_CHECKING:
    from eval.serve.arms import Arm
    from eval.serve.plan import Cell
    from eval.task import Request, TextChunk


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
    counts = list(compress(replayed[warm_up:], first_turns(cell.requests)[warm_up:]))
    num_chunks = sum(count.num_chunks for count in counts)
    return sum(count.num_hits for count in counts) / num_chunks if num_chunks else None


def first_turns(requests: Sequence[Request]) -> list[bool]:
    """For each request whether it is a single request or the first turn of its conversation here.

    A later turn's chunks come after a history, where no other request matches them; the server then counts the first turn's.
    """
    begun: set[str] = set()
    firsts = []
    for request in requests:
        firsts.append(request.conversation not in begun)
        if request.conversation is not None:
            begun.add(request.conversation)
    return firsts


def replay_settings(flags: Sequence[str], *, capacity: int | None) -> ReplaySettings:
    """The launcher's flags, `--flag value` or `--flag=value`, as a replay's settings. The last of a repeated flag counts."""
    default = ChunkCacheConfig()
    given = {}
    for flag, following in pairwise([*flags, ""]):
        name, equals, text = flag.partition("=")
        given[name] = text if equals else following

    def value(name: str) -> str:
        return given.get("--chunkcache-" + name.replace("_", "-"), str(getattr(default, name)))

    return ReplaySettings(
        order=value("order"),  # type: ignore[arg-type]
        tail=value("tail"),  # type: ignore[arg-type]
        eviction=value("eviction"),  # type: ignore[arg-type]
        admission=value("admission"),  # type: ignore[arg-type]
        dedup="off" if value("dedup") == "off" else "shown",  # in a replay turns never leave the prompt
        capacity=capacity,
        capacity_tokens=None,
        window=int(value("window_requests")),
        threshold=int(value("promotion_threshold")),
        max_visits=int(value("max_search_visits")),
    )


def _chunk(system: int, chunk: TextChunk) -> Chunk:
    """Words are used as tokens: an order that weighs chains only needs their proportion."""
    return Chunk(ChunkId(f"{system}\0{chunk.id}"), max(1, len(chunk.text.split())))
