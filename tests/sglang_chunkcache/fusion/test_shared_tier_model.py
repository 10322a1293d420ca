"""Random lives of two servers on one storage: what is moved was asked for, and each agrees with its
manifest and the storage.

The pass in tests/reference/fused_scheduler.py refuses KV of other tokens than those of the place
that it is moved to.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

pytest.importorskip("sglang")

from sglang_chunkcache.fusion.tier import StorageTier
from sglang_chunkcache.storage.storage import LOOKED_UP_S
from sglang_chunkcache.wire.state import Asked
from tests.examples import examples
from tests.reference.fused_scheduler import FusedScheduler
from tests.sglang_chunkcache.fusion.test_promise import A, B, C, D, fused, rag
from tests.sglang_chunkcache.fusion.test_tier import Disk

CHUNKS = st.permutations([A, B, C, D]).flatmap(
    lambda chunks: st.integers(1, 4).map(lambda num: chunks[:num])
)
SERVERS = st.integers(0, 1)
SALTS = st.sampled_from([None, "pepper"])
STORAGE_BYTES = 1000
"""Three entries or so, of each server."""


class SharedLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.disk = Disk(Path(self.folder.name))
        self.servers: list[FusedScheduler] = []
        self.tiers: list[StorageTier] = []
        self.lost: set[str] = set()
        """Entries that somebody else than their writer has deleted or damaged."""
        self.has_all_pointers = True
        for number in range(2):
            self._start(number)
        for chunk in (A, B, C):
            self.store(0, [chunk], None)
            self.move(1, [chunk], None, waits=True)

    def _start(self, number: int) -> None:
        server = self.disk.server(
            beside=str(number), storage_bytes=STORAGE_BYTES, store_bytes=200, capacity=120
        )
        self.servers[number : number + 1] = [server]
        self.tiers[number : number + 1] = [self.disk.tier]

    def _settle(self) -> None:
        for tier in self.tiers:
            self.disk.settle(tier)

    @rule(at=SERVERS, chunks=CHUNKS, salt=SALTS)
    def store(self, at: int, chunks: list[list[int]], salt: str | None) -> None:
        self.servers[at].serve(rag(*chunks, keep=range(len(chunks)), cache_salt=salt), answer=[50])
        self.servers[at].idle()
        self._settle()  # two that write the same at once are both its writers

    @rule(at=SERVERS, chunks=CHUNKS, salt=SALTS, waits=st.booleans(), forgets=st.booleans())
    def move(
        self, at: int, chunks: list[list[int]], salt: str | None, waits: bool, forgets: bool = False
    ) -> None:
        """`forgets`: device and memory, before."""
        if forgets:
            self.servers[at].flush()
        req = fused(*chunks, cache_salt=salt)
        self.disk.now += LOOKED_UP_S
        self.servers[at].cache.arrived(req)
        if waits:
            self._settle()
        self.servers[at].serve(req, answer=[50])
        self._settle()

    @rule(at=SERVERS)
    def clear(self, at: int) -> None:
        self._settle()
        self.lost |= {
            v.blob.row.name for v in self.tiers[at].storage.index.variants() if not v.blob.is_own
        }
        self.servers[at].cache.rank_state(0, Asked(clear_store=True))
        self._settle()

    @rule(which=st.integers(0, 30), is_damaged=st.booleans())
    def lose(self, which: int, is_damaged: bool) -> None:
        """An entry or a pointer, by a storage that evicts or damages."""
        for name in sorted(self.disk.storage.held)[which : which + 1]:
            if name.startswith("ccp1-"):
                self.has_all_pointers = False
            else:
                self.lost.add(name)
            if is_damaged:
                self.disk.storage.held[name][-1] ^= 64
            else:
                del self.disk.storage.held[name]

    @rule(at=SERVERS)
    def restart(self, at: int) -> None:
        self._settle()
        self.tiers[at].storage.close()
        self._start(at)

    @rule()
    def agree(self) -> None:
        self._settle()
        held = self.disk.storage.held
        for server, tier in zip(self.servers, self.tiers, strict=True):
            server.check()
            tier.storage.index.check_integrity()
            rows = {
                v.blob.row.name: v.blob.row.num_bytes
                for v in tier.storage.index.variants()
                if v.blob.is_own
            }
            assert {row.name: row.num_bytes for row in tier.storage.loader._manifest.rows()} == rows
            assert sum(rows.values()) <= STORAGE_BYTES
            assert not tier.storage._under_way
            # else one writes again what another has written, and either may delete it
            if self.has_all_pointers:
                assert all(
                    len(held[name]) == size for name, size in rows.items() if name not in self.lost
                )
        owned = [
            v.blob.row.name
            for tier in self.tiers
            for v in tier.storage.index.variants()
            if v.blob.is_own
        ]
        if self.has_all_pointers and not self.lost:
            assert sorted(owned) == sorted(name for name in held if name.startswith("cc1-")), (
                "each has one writer"
            )
            assert len(held) == 2 * len(owned), "and one pointer"

    def teardown(self) -> None:
        self.agree()
        for tier in self.tiers:
            tier.storage.close()
        self.folder.cleanup()


TestSharedLife = SharedLife.TestCase
TestSharedLife.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(5))
def test_long_life(seed: int) -> None:
    """Examples are mostly short, and budgets are exceeded late.
    Nothing is lost here, so every entry must be there."""
    rng, life = random.Random(seed), SharedLife()
    for _ in range(40):
        chunks, at, salt = (
            rng.sample([A, B, C, D], rng.randint(1, 4)),
            rng.randint(0, 1),
            rng.choice([None, "pepper"]),
        )
        what = rng.choice(["store", "store", "move"])
        if what == "store":
            life.store(at, chunks, salt)
        else:
            life.move(at, chunks, salt, waits=True, forgets=rng.random() < 0.5)
        life.agree()
    assert sum(tier.storage.num_found for tier in life.tiers) > 0
    life.teardown()
