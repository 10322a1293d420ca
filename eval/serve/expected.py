"""What a replay expects an arm to find cached in a cell: the server's own parts, without the server.

Only for arms whose server runs our cache with exact reuse. Requests are replayed one after the other in the order in which
they stand, while a server has several in flight; and the pool, which also holds questions and answers, is taken for one of
so many chunks. Both say how close a replay comes to a server, which is why the figure stands beside the measured one.
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
    """Chunks found cached as a prefix over chunks, of the first turns behind `warm_up` requests; None where replay knows nothing.

    Args:
        flags: with which the arm's server was started, all of them; none: not known.
        capacity: chunks that the pool holds; None for no limit.
    """
    if not arm.is_ours or arm.is_fused or not flags:
        return None
    # A server's tree has no chain behind two system prompts, so behind each a chunk is another one. Its counts, unlike the
    # server's, are then by system prompt too.
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
    """Of each request whether it stands alone or opens its conversation here.

    A later turn's chunks stand behind a history, where no other request finds them; the server counts the first turn's then.
    """
    begun: set[str] = set()
    firsts = []
    for request in requests:
        firsts.append(request.conversation not in begun)
        if request.conversation is not None:
            begun.add(request.conversation)
    return firsts


def replay_settings(flags: Sequence[str], *, capacity: int | None) -> ReplaySettings:
    """The launcher's flags, `--flag value` or `--flag=value`, as a replay's settings. Of a flag given twice the last counts."""
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
        dedup="off" if value("dedup") == "off" else "shown",  # a replay's turns never leave the prompt
        capacity=capacity,
        capacity_tokens=None,
        window=int(value("window_requests")),
        threshold=int(value("promotion_threshold")),
        max_visits=int(value("max_search_visits")),
    )


def _chunk(system: int, chunk: TextChunk) -> Chunk:
    """Words stand for tokens: an order that weighs chains needs their proportion only."""
    return Chunk(ChunkId(f"{system}\0{chunk.id}"), max(1, len(chunk.text.split())))
