"""What is said of a request's joint encoding before it runs, against what becomes of it."""

from __future__ import annotations

import logging
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given
from hypothesis import strategies as st

from radix_ext import chunk_id
from radix_ext.sources import CopyFacts, DeviceCopy, HostCopy
from radix_ext.variants import Variant
from sglang_chunkcache.fusion.joint import slots
from sglang_chunkcache.fusion.joint.expected import KnownChunks
from sglang_chunkcache.fusion.joint.slots import SlotEncoder
from sglang_chunkcache.fusion.relocate import RotaryTable, copy_moved, read_blob
from sglang_chunkcache.fusion.store import HostBlob
from sglang_chunkcache.scheduler.node import ChunkIdentity, state
from sglang_chunkcache.wire.report import JointReport
from sglang_chunkcache.wire.spans import JointRequest
from tests.sglang_chunkcache.fusion.joint.test_slots import LAYERS, SIZE, VALUE_SIZE, Rank

ANGLES = torch.outer(torch.arange(200.0), torch.tensor([1.0, 0.1]))
TABLE = RotaryTable(ANGLES.cos(), ANGLES.sin(), is_neox=True)
assert TABLE.rotary_dim == SIZE


class Known(Rank):
    """Whose chunks are cached elsewhere, too."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.dtype = self.k_buffer[0].dtype
        self.found: dict[Any, list[Any]] = {}
        sources: Any = SimpleNamespace(candidates=lambda identity, head: self.found.get(identity, []))
        self.encoder = SlotEncoder(self, self, known=KnownChunks(self, TABLE, sources))

    def keep(self, req: Any, index: int, tier: str, at: int, *, prefix: tuple[Any, ...] = ()) -> None:
        """A chunk's KV as this request has it, somewhere else and at position `at`; in host memory un-rotated."""
        span = state(req).spans.spans[index]  # type: ignore[union-attr]
        own = torch.tensor(self.slots(req)[span.start : span.end])
        positions = torch.arange(span.start, span.end)
        pool: Any = self
        if tier == "host":
            source: Any = HostCopy(Variant(prefix, HostBlob(*read_blob(pool, TABLE, own, positions))))
        else:
            new = torch.tensor([self.free.pop() for _ in own])
            copy_moved(
                pool,
                TABLE,
                source_slots=own,
                source_positions=positions,
                target_slots=new,
                target_positions=positions - span.start + at,
            )
            source = DeviceCopy(SimpleNamespace(value=new), CopyFacts(at, prefix=prefix))
        identity = ChunkIdentity(span.chunk, req.extra_key, req.cache_salt)
        self.found.setdefault(identity, []).append(source)

    def explain(self, req: Any, matched: int, loaded: int = 0) -> JointReport | None:
        return self.encoder.explain(req, torch.tensor(self.slots(req)[:matched]), matched + loaded)


def outcome(report: JointReport | None) -> tuple[Any, ...]:
    assert report is not None
    return report.requests, report.units, report.blocks, report.exact, report.shared, report.thresholds


@given(
    seed=st.integers(0, 999),
    lens=st.lists(st.integers(2, 9), min_size=2, max_size=5, unique=True),
    matched=st.integers(0, 2),
    tiers=st.lists(st.sampled_from(("host", "device")), min_size=5, max_size=5),
)
def test_it_is_what_encoding_gives(seed: int, lens: list[int], matched: int, tiers: list[str]) -> None:
    """Where the sources' KV is what is computed. Nothing is written, and nothing counted."""
    rank = Known(seed, noise=0.05)  # similarities are over .9, or of other tokens and under .4
    cached = 1 + sum(lens[:matched]) if matched else 0
    req = rank.add(lens, JointRequest(threshold=0.5, block=2), cached=cached, extra_key="tenant")
    for index in range(matched, len(lens)):
        rank.keep(req, index, tiers[index], at=3 + 7 * index)
    before, counts = rank.numbers(), rank.encoder.stats()
    found = rank.explain(req, cached)
    assert rank.encoder.stats() == counts
    assert all(map(torch.equal, rank.numbers(), before))
    rank.encode(req)
    assert outcome(found) == outcome(state(req).joint)


def test_source_that_has_seen_most_of_the_chunks_before_is_compared() -> None:
    """And what host memory has of the exact prefix counts as exact, as it will be."""
    rank = Known(0, noise=0.0)
    req = rank.add([8, 6], JointRequest(threshold=0.9, block=2))
    first, second = state(req).spans.spans  # type: ignore[union-attr]
    other: Any = HostBlob(*(torch.randn(LAYERS, 6, 2, size) for size in (SIZE, VALUE_SIZE)))
    identity = ChunkIdentity(second.chunk, None, None)
    rank.found[identity] = [HostCopy(Variant((chunk_id(array("q", [1])),), other))]
    rank.keep(req, 0, "host", at=0)
    rank.keep(req, 1, "host", at=0, prefix=(first.chunk,))
    rank.found[identity].append(HostCopy(Variant((), other)))
    assert outcome(rank.explain(req, 1, loaded=8)) == (1, 2, 7, 4, (4, 4), (0.9, 0.9))


def test_what_is_nowhere_is_left_out() -> None:
    """Nobody knows it before it is computed, nor what else is in a batch."""
    rank = Known(0, noise=0.0)
    wish = JointRequest(threshold=0.9, block=4)
    req = rank.add([8, 9, 3], wish)
    assert outcome(rank.explain(req, 0)) == (1, 0, 0, 0, (0, 0), (None, None))
    rank.keep(req, 1, "device", at=0)
    rank.keep(req, 2, "device", at=0)
    assert outcome(rank.explain(req, 0)) == (1, 1, 2, 0, (2, 2), (None, None))
    state(req).spans = SimpleNamespace(joint=JointRequest(threshold=0.9, over="batch"))  # type: ignore[assignment]
    assert rank.explain(req, 0) is None


def test_what_fails_or_takes_too_long_is_not_explained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler goes on."""
    rank = Known(0, noise=0.0)
    req = rank.add([8, 8], JointRequest(threshold=0.9, block=4))
    monkeypatch.setattr(slots, "MAX_S", -1.0)
    with caplog.at_level(logging.ERROR):
        assert rank.explain(req, 17) is None
    assert "TimeoutError" in caplog.text
