"""What a rank tells the front: round trips, and the names of reasons."""

from __future__ import annotations

import pytest

from radix_ext import ChainId, ChunkId, Span
from sglang_chunkcache.wire.events import Acknowledgement, Batch, Evicted, Inserted, Part, Reading
from sglang_chunkcache.wire.message import decode, encode
from sglang_chunkcache.wire.report import Answer, Explanation, Fallback, Report, Source
from sglang_chunkcache.wire.spans import RequestSpans
from sglang_chunkcache.wire.state import Asked, Cleared, ExplainRequest, RankState

SOURCES = (Source(0, 3, None, "gap"), Source(3, 9, 0, "device", 2, 1, 0.25))
REPORT = Report(1, 2, 3, 2, 4, SOURCES, (0,), (Fallback.NO_ROOM,), {"lookup": 0.5})
TOLD = (Inserted(ChunkId("c"), 4, None, "n", True), Evicted(ChainId(2**63 - 1)))
EVENTS = Batch(2**48 - 1, 7, TOLD, 9, 1, 2**60 - 1)
SPANS = RequestSpans((Span(0, 2, ChunkId("c")),), "n", 0, Acknowledgement(1, 2))
KEPT = Explanation(0, 0, 0, is_kept=True)


@pytest.mark.parametrize(
    "message",
    [
        Answer(EVENTS),
        Answer(EVENTS, REPORT),
        Explanation(1, 2, 3, SOURCES, (Fallback.NO_SOURCE,)),
        ExplainRequest([1, 2], SPANS, None, "salt"),
        Asked(clear_store=True),
        Asked(read=(Reading(0, Acknowledgement(1, 2), 0), Reading(1, Acknowledgement(0, 0)))),
        RankState(1, EVENTS, {}, cleared=Cleared(1, 2, 3)),
        RankState(1, EVENTS, {"free": 1, "store": {"pending": 0}}, Part(0, TOLD, 9), (KEPT,)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_round_trip(message: Answer | Asked | Explanation | ExplainRequest | RankState) -> None:
    """Equal on the other side, records and enums included."""
    assert decode(encode(message), type(message)) == message


def test_unknown_reason_is_refused() -> None:
    """Front and rank know the same reasons."""
    with pytest.raises(ValueError, match="no_idea"):
        decode(encode(Answer(EVENTS, REPORT)).replace("no_room", "no_idea"), Answer)


def test_reason_is_its_name() -> None:
    """Clients and dashboards read the values, code the names."""
    assert [reason.value for reason in Fallback] == [reason.name.lower() for reason in Fallback]
