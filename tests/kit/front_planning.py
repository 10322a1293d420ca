"""Conversations with a front without an engine, and a mirror that hears of a rank's log."""

from __future__ import annotations

from typing import Any

from radix_ext import ChainId, ChunkId, ChunkPrefixTree
from sglang_chunkcache.front.rank_mirror import RankMirror
from sglang_chunkcache.front.request import Passage
from sglang_chunkcache.scheduler.event_log import EventLog
from sglang_chunkcache.wire.events import Inserted, Reading
from sglang_chunkcache.wire.state import RankState
from tests.kit.front_bench import Asked, Bench, user
from tests.reference.chains import chain_of

# Conversations


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


CALL, RESULT = assistant("", tool_calls=[{"id": "1"}]), {"role": "tool", "content": "42"}
"""A step of a tool loop."""


class Talk:
    """A conversation; `messages` are what its client keeps."""

    def __init__(self, bench: Bench, *messages: dict[str, Any], to: str = "c") -> None:
        self.bench, self.messages, self.to = bench, list(messages), to

    def ask(self, text: str, *passages: Passage, **options: Any) -> Asked:
        """The next question; nothing is answered."""
        return self.bench.ask([*self.messages, user(text)], *passages, to=self.to, **options)

    def turn(self, text: str, *passages: Passage, answer: str = "ok", **options: Any) -> Asked:
        request = self.bench.reply(self.ask(text, *passages, **options), answer)
        self.messages += [user(text), assistant(answer)]
        return request


# A rank's log and its mirror


def make_mirror(max_nodes: int = 1000) -> tuple[ChunkPrefixTree, RankMirror]:
    tree = ChunkPrefixTree(max_nodes=max_nodes)
    return tree, RankMirror(tree, 0)


def chain(*names: str) -> ChainId:
    return chain_of("n", [ChunkId(name) for name in names])


def inserted(*names: str, promoted: bool = False) -> Inserted:
    return Inserted(ChunkId(names[-1]), 4, chain(*names[:-1]) if names[1:] else None, "n", promoted)


def held(tree: ChunkPrefixTree, *names: str) -> bool:
    return len(tree.match("n", [ChunkId(name) for name in names], rank=0)) == len(names)


def read(log: EventLog, mirror: RankMirror) -> None:
    """An answer to a request that has arrived just now."""
    log.acknowledge(mirror.acknowledgement)
    mirror.apply(log.unread())


def state_of(log: EventLog, reading: Reading | None = None) -> RankState:
    """As `ChunkRadixCache.rank_state`."""
    if reading is not None:
        log.acknowledge(reading.ack)
    events = log.unread()
    is_all = events.start + len(events.events) == events.seq
    if not is_all or reading is None or reading.part is None:
        return RankState(0, events, {}, None)
    return RankState(0, events, {}, log.part(reading.part))


def keep_up(log: EventLog, mirror: RankMirror) -> int:
    """As `Engine.keep_up`; how often the rank was asked."""
    num_asked = 0
    while mirror.is_behind:
        before = mirror.reading
        mirror.hear(state_of(log, before))
        assert mirror.reading != before
        num_asked += 1
    return num_asked
