"""Random lives of servers on one storage: what is moved was asked for; index, manifest and bytes
agree when nothing waits.

The pass in tests/reference/fused_scheduler.py refuses KV of other tokens than those of the place
that it is moved to.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

pytest.importorskip("sglang")

from sglang_chunkcache.wire.state import Asked
from tests.examples import examples
from tests.reference.scheduler import FakeReq
from tests.sglang_chunkcache.fusion.test_promise import (
    HEAD,
    OTHER_HEAD,
    A,
    B,
    C,
    D,
    asks,
    fused,
    rag,
)
from tests.sglang_chunkcache.fusion.test_tier import Disk

CHUNKS = st.permutations([A, B, C, D]).flatmap(
    lambda chunks: st.integers(1, 4).map(lambda num: chunks[:num])
)
HEADS = st.sampled_from([HEAD, OTHER_HEAD])
SALTS = st.sampled_from([None, "pepper"])
STORAGE_BYTES = 3000
"""Eight entries or so."""


class StorageLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.disk = Disk(Path(self.folder.name))
        self.weights = 0
        self._start()
        self.store([A, B, C, D], HEAD, None, scored=False)

    def _start(self) -> None:
        self.server = self.disk.server(storage_bytes=STORAGE_BYTES, store_bytes=200, capacity=120)
        self.server.weights = self.server.fuser._weights = self.weights
        self.disk.tier.storage.start(self.weights, ())

    @rule(chunks=CHUNKS, head=HEADS, salt=SALTS, scored=st.booleans())
    def store(
        self, chunks: list[list[int]], head: list[int], salt: str | None, scored: bool
    ) -> None:
        fusion = asks("h2o", 0.5, recipe="h") if scored else None
        req = rag(*chunks, head=head, keep=range(len(chunks)), cache_salt=salt, fusion=fusion)
        self.server.cache.arrived(req)
        self.server.serve(req, answer=[50])
        self.server.idle()

    @rule(chunks=CHUNKS, head=HEADS, salt=SALTS, waits=st.booleans())
    def move(self, chunks: list[list[int]], head: list[int], salt: str | None, waits: bool) -> None:
        req: FakeReq = fused(*chunks, head=head, cache_salt=salt)
        self.server.cache.arrived(req)
        if waits:
            self.disk.settle()
        self.server.serve(req, answer=[50])

    @rule(num_tokens=st.integers(1, 120))
    def evict(self, num_tokens: int) -> None:
        self.server.evict(num_tokens)

    @rule(weights=st.integers(0, 1))
    def flush(self, weights: int) -> None:
        self.weights = self.server.weights = weights
        self.server.flush()

    @rule()
    def update_without_a_flush(self) -> None:
        self.weights = self.server.weights = 1 - self.weights
        self.server.cache.doubt_weights()

    @rule()
    def clear(self) -> None:
        self.server.cache.rank_state(0, Asked(clear_store=True))

    @rule(at=st.integers(1, 40), head=HEADS)
    def damage(self, at: int, head: list[int]) -> None:
        """Every entry, mostly in its KV. Then chunks are asked for that are nowhere else."""
        self.fail(False)
        self.store([A, B, C, D], head, None, scored=False)
        self.disk.settle()
        for held in self.disk.storage.held.values():
            held[-at] ^= 64
        self.flush(self.weights)
        self.move([B, A, D, C], head, None, waits=True)

    @rule(fails=st.booleans())
    def fail(self, fails: bool) -> None:
        self.disk.settle()
        self.disk.storage.fails = fails
        self.disk.tier.storage.loader._paused_until = None

    @rule()
    def restart(self) -> None:
        self.disk.stop()
        self._start()
        self.disk.tier.load_most_used(5)

    @rule()
    def agrees(self) -> None:
        self.disk.settle()
        self.server.check()
        index = self.disk.tier.storage.index
        index.check_integrity()
        rows = {variant.blob.row.name: variant.blob.row.num_bytes for variant in index.variants()}
        assert {
            row.name: row.num_bytes for row in self.disk.tier.storage.loader._manifest.rows()
        } == rows
        mine = f"{self.disk.tier.storage._weights} unrotated"
        own = sum(
            each.blob.nbytes for each in index.variants() if each.blob.row.place.model == mine
        )
        stats = self.disk.tier.storage.stats()
        assert (stats["bytes"], stats["num_bytes"]) == (
            {"variants": own, "other": sum(rows.values()) - own},
            sum(rows.values()),
        )
        assert rows.keys() <= self.disk.storage.held.keys()
        assert all(
            len(self.disk.storage.held[name]) == num_bytes for name, num_bytes in rows.items()
        )
        assert sum(rows.values()) <= STORAGE_BYTES
        assert not self.disk.tier.storage._under_way

    def teardown(self) -> None:
        self.disk.storage.fails = False
        self.agrees()
        self.disk.tier.storage.close()
        self.folder.cleanup()


TestStorageLife = StorageLife.TestCase
TestStorageLife.settings = settings(
    max_examples=examples(50), stateful_step_count=30, deadline=None
)
