"""Random lives of servers on one storage, alone and two at once: what is moved was asked for;
index, manifest and bytes agree when nothing waits.

The pass in tests/reference/fused_scheduler.py refuses KV of other tokens than those of the place
that it is moved to.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from sglang_chunkcache.fusion.tier import StorageTier
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.storage.others import LOOKED_UP_S
from sglang_chunkcache.wire.state import Asked
from tests.examples import examples
from tests.kit.fused import Disk, Rank
from tests.kit.integrity import check_store
from tests.kit.requests import HEAD, OTHER_HEAD, A, B, C, D, asks, fused, rag

CHUNKS = st.permutations([A, B, C, D]).flatmap(
    lambda chunks: st.integers(1, 4).map(lambda num: chunks[:num])
)
HEADS = st.sampled_from([HEAD, OTHER_HEAD])
SALTS = st.sampled_from([None, "pepper"])
SERVERS = st.integers(0, 1)


class Life(RuleBasedStateMachine):
    storage_bytes: ClassVar[int]
    host_slots: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.disk = Disk(Path(self.folder.name))
        self.servers: list[Rank] = []
        self.tiers: list[StorageTier] = []

    def _start(self, number: int = 0, overlapped: str = "") -> None:
        """In place of the one of this number."""
        server = self.disk.server(
            overlapped=overlapped,
            storage_bytes=self.storage_bytes,
            store_bytes=200,
            capacity=120,
            host_slots=self.host_slots,
        )
        self.servers[number : number + 1] = [server]
        self.tiers[number : number + 1] = [self.disk.tier]

    def _settle(self) -> None:
        for tier in self.tiers:
            self.disk.settle(tier)

    def _own(self, number: int) -> dict[str, int]:
        """What this server has written and still has, and its bytes; its books agree."""
        self.servers[number].check()
        storage = self.tiers[number].storage
        check_store(storage.index)
        own = {v.blob.row.name: v.blob.row.num_bytes for v in storage.index.held if v.blob.is_own}
        assert {row.name: row.num_bytes for row in storage.loader.worker.manifest.rows()} == own
        assert sum(own.values()) <= self.storage_bytes
        assert not storage.under_way
        return own

    def agree(self) -> None:
        """Index, manifest and storage do."""
        raise NotImplementedError

    def teardown(self) -> None:
        self.disk.storage.fails = False
        self.agree()
        for tier in self.tiers:
            tier.storage.close()
        self.folder.cleanup()


class StorageLife(Life):
    """Of one server after the other; storage and weights change."""

    storage_bytes = 3000  # eight entries or so

    def __init__(self) -> None:
        super().__init__()
        self.weights = 0
        self._begin()
        self.store([A, B, C, D], HEAD, None, scored=False)

    def _begin(self) -> None:
        self._start()
        (self.server,), (self.tier,) = self.servers, self.tiers
        self.server.weights = self.server.fuser._weights = self.named = self.weights
        self.tier.storage.start(self.named, ())

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
        req = fused(*chunks, head=head, cache_salt=salt)
        self.server.cache.arrived(req)
        if waits:
            self._settle()
        self.server.serve(req, answer=[50])

    @rule(num_tokens=st.integers(1, 120))
    def evict(self, num_tokens: int) -> None:
        self.server.evict(num_tokens)

    @rule(weights=st.integers(0, 1))
    def flush(self, weights: int) -> None:
        self.weights = self.server.weights = self.named = weights
        self.server.flush()

    @rule()
    def update_without_a_flush(self) -> None:
        self.weights = self.server.weights = 1 - self.weights
        self.server.cache.doubt_weights()

    @rule()
    def clear(self) -> None:
        rank_state(self.server.cache, 0, Asked(clear_store=True))

    @rule(at=st.integers(1, 40), head=HEADS)
    def damage(self, at: int, head: list[int]) -> None:
        """Every entry, mostly in its KV. Then chunks are asked for that are nowhere else."""
        self.fail(False)
        self.store([A, B, C, D], head, None, scored=False)
        self._settle()
        for held in self.disk.storage.held.values():
            held[-at] ^= 64
        self.flush(self.weights)
        self.move([B, A, D, C], head, None, waits=True)

    @rule(fails=st.booleans())
    def fail(self, fails: bool) -> None:
        self._settle()
        self.disk.storage.fails = fails
        self.tier.storage.loader.worker.breaker.paused_until = None

    @rule()
    def restart(self) -> None:
        self.disk.stop()
        self._begin()
        self.tier.load_most_used(5)

    @rule()
    def agree(self) -> None:
        self._settle()
        own, storage = self._own(0), self.tier.storage
        variants = list(storage.index.held)
        assert len(own) == len(variants)
        here = f"{self.named} positioned"  # until the next flush by the weights of the last one
        num_bytes = {
            kind: sum(
                v.blob.nbytes
                for v in variants
                if v.blob.row.place.model == here and v.is_exact == is_exact
            )
            for kind, is_exact in (("chains", True), ("variants", False))
        }
        stats, total = storage.stats(), sum(own.values())
        assert stats["bytes"] == {**num_bytes, "other": total - sum(num_bytes.values())}
        assert stats["num_bytes"] == total
        held = self.disk.storage.held
        assert {name: len(held[name]) for name in own} == own


class SharedLife(Life):
    """Of two servers, whose storage loses what it has."""

    storage_bytes = 1000  # three entries or so, of each server

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()
        """Entries that somebody else than their writer has deleted or damaged."""
        self.has_all_pointers = True
        for number in range(2):
            self._start(number, str(number))
        for chunk in (A, B, C):
            self.store(0, [chunk], None)
            self.move(1, [chunk], None, waits=True)

    @rule(at=SERVERS, chunks=CHUNKS, salt=SALTS)
    def store(self, at: int, chunks: list[list[int]], salt: str | None) -> None:
        self.servers[at].store_chunks(*chunks, cache_salt=salt)
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
        others = [v.blob for v in self.tiers[at].storage.index.held if not v.blob.is_own]
        self.lost |= {blob.row.name for blob in others}
        rank_state(self.servers[at].cache, 0, Asked(clear_store=True))
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
        self._start(at, str(at))

    @rule()
    def agree(self) -> None:
        self._settle()
        held, owned = self.disk.storage.held, [self._own(number) for number in range(2)]
        if not self.has_all_pointers:
            return  # one writes again what another has written, and either may delete it
        for own in owned:
            kept = {name: size for name, size in own.items() if name not in self.lost}
            assert {name: len(held[name]) for name in kept} == kept
        if not self.lost:
            entries = sorted(name for name in held if name.startswith("cc1-"))
            assert sorted([*owned[0], *owned[1]]) == entries, "each has one writer"
            assert len(held) == 2 * len(entries), "and one pointer"


class HostedLife(StorageLife):
    """Chains and variants in one pool, and both in the storage."""

    host_slots = 25


TestHostedLife = HostedLife.TestCase
TestHostedLife.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
TestStorageLife = StorageLife.TestCase
TestStorageLife.settings = settings(
    max_examples=examples(50), stateful_step_count=30, deadline=None
)
TestSharedLife = SharedLife.TestCase
TestSharedLife.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(5))
def test_long_life(seed: int) -> None:
    """Examples are mostly short, and budgets are exceeded late."""
    rng, life = random.Random(seed), SharedLife()
    for _ in range(40):
        chunks, at = rng.sample([A, B, C, D], rng.randint(1, 4)), rng.randint(0, 1)
        salt = rng.choice([None, "pepper"])
        if rng.random() < 2 / 3:
            life.store(at, chunks, salt)
        else:
            life.move(at, chunks, salt, waits=True, forgets=rng.random() < 0.5)
        life.agree()
    assert sum(tier.storage.others.num_found for tier in life.tiers) > 0
    life.teardown()
