"""A task's conversations in a replay."""

from __future__ import annotations

import random

from eval.replay.task_trace import interleaved
from eval.replay.trace import TraceRequest
from radix_ext import Chunk, ChunkId


def test_conversations_take_turns() -> None:
    """Each its own in order, as many at once as there may be."""
    talks = [(name, turn) for name in "abcd" for turn in range(3)]
    requests = [TraceRequest((Chunk(ChunkId(str(t)), 1),), False, None, name) for name, t in talks]
    mixed = interleaved(requests, 2, random.Random(0))
    told = [(str(each.conversation), int(each.chunks[0].id)) for each in mixed]
    assert sorted(told) == talks
    assert [turn for name, turn in told if name == "a"] == [0, 1, 2]
    assert told != talks
    ends = {name: index for index, (name, turn) in enumerate(told) if turn == 2}
    for index in range(len(told)):
        begun = {name for name, _ in told[: index + 1]}
        assert len([name for name in begun if ends[name] >= index]) <= 2
