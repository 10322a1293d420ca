"""The storage below the store, in the scheduler's order of calls:
what is written, what comes back, and when nothing does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang")

from radix_ext import ChunkId, FusionRequest, chunk_id
from radix_ext.cfo import Scored
from radix_ext.loading import Patience
from radix_ext.variants import Variant, VariantIndex
from sglang_chunkcache.fusion import tier as module
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.fusion.store import ChunkScores, HostBlob
from sglang_chunkcache.fusion.tier import StorageTier
from sglang_chunkcache.rank_metrics import SHOWN_S, RankMetrics
from sglang_chunkcache.scheduler.node import ChunkIdentity, state
from sglang_chunkcache.storage.backend import Backend
from sglang_chunkcache.storage.entry import Layout
from sglang_chunkcache.storage.key import Names
from sglang_chunkcache.storage.loader import Loader
from sglang_chunkcache.storage.manifest import Manifest
from sglang_chunkcache.storage.pointer import Pointers
from sglang_chunkcache.storage.ranks import Ranks
from sglang_chunkcache.storage.storage import Known, Storage
from sglang_chunkcache.wire.state import Asked
from tests.polling import DEADLINE_S
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.memory_storage import MemoryStorage
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
    make_scheduler,
    rag,
    sources,
)

LAYOUT = Layout(1, 1, 1, 1, "float32")
WINDOW = 1000


class Disk:
    """What outlives the servers on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.storage = folder, MemoryStorage()
        self.tiers: list[StorageTier] = []
        self.layout = LAYOUT
        self.now = 0.0
        """The tiers' clock."""
        self.patience = Patience(0.0)
        self.shown: list[Mapping[str, Any]] = []
        """Figures for Prometheus."""

    def server(
        self, *, storage_bytes: int = 100_000, beside: str = "", **knobs: Any
    ) -> FusedScheduler:
        """A server that has just started: `stop` the one before.
        `beside`: its name, if it shares the storage with others."""
        window = knobs.get("window_requests", WINDOW)
        scheduler = make_scheduler(
            storage=self.opened(storage_bytes, beside=beside, window=window), **knobs
        )
        assert scheduler.fuser.tier is not None
        self.tiers.append(scheduler.fuser.tier)
        return scheduler

    def opened(
        self,
        storage_bytes: int,
        *,
        beside: str = "",
        window: int = WINDOW,
        ranks: Ranks | None = None,
    ) -> Storage:
        """As a start finds it."""
        manifest, backend = Manifest(self.folder / beside), Backend(self.storage)
        names = Names(b"", ranks.shard if ranks else "")
        pointers = Pointers(backend, names, secret=b"") if beside else None
        return Storage(
            VariantIndex(max_bytes=storage_bytes, max_chunks=1000, max_variants=5, window=window),
            Loader(
                backend,
                manifest,
                secret=b"",
                pointers=pointers,
                ranks=ranks,
                clock=lambda: self.now,
            ),
            names,
            window=window,
            layout=self.layout,
            model_of=lambda *how: " ".join(map(str, how)),
            rows=ranks.common(manifest.rows())[0] if ranks else manifest.rows(),
            ranks=ranks,
            patience=self.patience,
            metrics=Shown(self),
            clock=lambda: self.now,
        )

    @property
    def tier(self) -> StorageTier:
        return self.tiers[-1]

    def settle(self, tier: StorageTier | None = None) -> dict[str, Any]:
        """The thread has nothing left to do; what it counts. None: the last server's."""
        tier = tier or self.tier
        for _ in range(3):  # what is polled may ask for more
            assert tier.storage.loader.drain(DEADLINE_S)
            tier.storage.poll()
        return tier.storage.stats()

    def stop(self) -> None:
        self.settle()
        self.tier.storage.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.storage.gate.set()
    for each in made.tiers:
        each.storage.loader.close()


class Shown(RankMetrics):
    """Figures for Prometheus, as they are told."""

    def __init__(self, disk: Disk) -> None:
        super().__init__("", {}, {}, clock=lambda: disk.now)
        self._disk = disk

    def _show(self, stats: Mapping[str, Any]) -> None:
        self._disk.shown.append(stats)


def identity(
    tokens: list[int], extra_key: str | None = None, cache_salt: str | None = None
) -> ChunkIdentity:
    return ChunkIdentity(chunk_id(tokens), extra_key, cache_salt)


def store(scheduler: FusedScheduler, *chunks: list[int], **fields: Any) -> None:
    """Serve the chunks in one prompt and have them stored."""
    scheduler.serve(rag(*chunks, keep=range(len(chunks)), **fields), answer=[50])
    scheduler.idle()


def held(scheduler: FusedScheduler, chunk: list[int], **tenant: Any) -> list[tuple[ChunkId, ...]]:
    """What the store in memory has of it: the chunks before it."""
    return [variant.prefix for variant in scheduler.store.find(identity(chunk, **tenant))]


def wheres(req: FakeReq) -> list[str]:
    """By chunk of the promised region, where its KV came from."""
    return [each[1] for each in sources(req) if each[0] is not None]


def test_stored_chunks_survive_the_server(disk: Disk) -> None:
    """KV, what it was computed after and f_r: the next server moves them with its first request."""
    first = disk.server()
    store(first, A, B)
    counts = disk.settle()
    assert (counts["written"], counts["num_entries"], counts["queue"]) == (2, 2, 0)
    for_reuse = fused(B)
    first.serve(for_reuse)
    assert wheres(for_reuse) == ["device"]
    reuse = first.store.find(identity(B))[0].reuse
    disk.stop()
    second = disk.server()
    assert disk.tier.load_most_used() == 2
    (found,) = second.store.find(identity(B))
    assert (found.prefix, found.head, found.reuse, found.num_uses) == (
        (chunk_id(A),),
        str(HEAD),
        reuse,
        1,
    )
    assert found.blob.read()[0].flatten().tolist() == B
    req = fused(D, B)
    second.serve(req, answer=[50])
    assert wheres(req) == ["gap", "host"]


def test_entries_of_a_codec_that_was_removed_are_others(disk: Disk) -> None:
    """Variants of codec joint were in int4, under the codec's own name:
    no server finds them, and they leave by their age."""
    disk.layout = Layout(2, 1, 4, 4, "float32")
    earlier = disk.server(store_codec="int4")
    disk.tier._how = ("unrotated", "joint")
    disk.tier.storage.keeps("variants", disk.tier._how, disk.tier._layout)
    store(earlier, A, B)
    written = disk.settle()["bytes"]["variants"]
    disk.stop()
    later = disk.server(store_codec="int4")
    assert disk.tier.load_most_used() == 0
    told = disk.settle()
    assert (told["bytes"], told["num_entries"], told["problems"]) == (
        {"variants": 0, "other": written},
        2,
        {},
    )
    store(later, C, D)
    told = disk.settle()["bytes"]
    assert told["other"] == written
    assert told["variants"] > 0
    disk.stop()
    disk.server(store_codec="int4")
    assert disk.tier.load_most_used() == 2


def test_coded_chunks_survive_a_server_of_their_codec_alone(disk: Disk) -> None:
    """As they were coded, in as many bytes.
    Under another codec's names there is nothing, and what is there stays."""
    sizes = {}
    for codec in ("none", "int8"):
        store(disk.server(store_codec=codec), A, B)
        sizes[codec] = disk.settle()["num_bytes"]
        stats = disk.tier.storage.stats()
        mine = sizes[codec] - (sizes["none"] if codec == "int8" else 0)
        assert stats["bytes"] == {"variants": mine, "other": sizes[codec] - mine}
        assert stats["saved_bytes"] == {
            "variants": 2 * (4 - 5) * (len(A) + len(B)) if codec == "int8" else 0
        }
        disk.stop()
    assert len(disk.storage.held) == 4
    # Heads are one number here: 8 bits and a scale of 32 in place of 32, for keys and values each.
    assert sizes["int8"] - 2 * sizes["none"] == 2 * (5 - 4) * (len(A) + len(B)) + 2 * len(
        ',"codec":"int8"'
    )
    for codec in ("none", "int8"):
        scheduler = disk.server(store_codec=codec)
        assert disk.tier.load_most_used() == 2
        (found,) = scheduler.store.find(identity(B))
        assert found.blob.codec.name == codec
        assert [round(each) for each in found.blob.read()[0].flatten().tolist()] == B
        req = fused(D, B)
        scheduler.serve(req, answer=[50])
        assert wheres(req) == ["gap", "host"]
        disk.stop()
    assert len(disk.storage.held) == 4, "what the storage had was written again"


def test_arriving_request_has_its_chunks_loaded(disk: Disk) -> None:
    """While it waits. What is on the device or in the store is not."""
    store(disk.server(), A, B, C)
    disk.stop()
    scheduler = disk.server()
    scheduler.serve(rag(A), answer=[50])
    req = fused(B, A, C)
    scheduler.cache.arrived(req)
    scheduler.cache.arrived(req)
    assert disk.settle()["loaded"] == 2
    assert [len(held(scheduler, chunk)) for chunk in (A, B, C)] == [0, 1, 1]
    scheduler.serve(req, answer=[50])
    assert wheres(req) == ["host", "device", "host"]
    assert disk.settle()["late"] == 0


def test_what_comes_too_late_serves_the_next_request(disk: Disk) -> None:
    """The request is computed as if there were no storage."""
    store(disk.server(), A)
    disk.stop()
    scheduler = disk.server()
    disk.storage.gate.clear()
    req = fused(A)
    scheduler.cache.arrived(req)
    scheduler.serve(req, answer=[50])
    assert sources(req) == []
    assert disk.tier.storage.stats()["late"] == 1
    disk.storage.gate.set()
    disk.settle()
    scheduler.evict(100)
    again = fused(A)
    scheduler.serve(again, answer=[50])
    assert wheres(again) == ["host"]
    assert disk.tier.storage.stats()["late"] == 1


def test_request_that_never_arrived_is_asked_for_at_its_admission(disk: Disk) -> None:
    """At the latest. Explaining one loads nothing, nor does exact reuse."""
    store(disk.server(), A)
    disk.stop()
    scheduler = disk.server()
    explained = fused(A)
    state(explained).is_asked_only = True
    scheduler.match(explained)
    scheduler.serve(rag(B, A), answer=[50])
    scheduler.evict(100)
    assert disk.settle()["loaded"] == 0
    scheduler.match(fused(A))
    assert disk.settle()["loaded"] == 1


def test_variant_is_written_once(disk: Disk) -> None:
    """Not again by the server that loads it, nor by one that computes it."""
    store(disk.server(), A, B)
    disk.stop()
    scheduler = disk.server()
    disk.tier.load_most_used()
    store(scheduler, A, B)
    scheduler.store.clear()
    scheduler.evict(100)
    store(scheduler, A, B)
    assert disk.settle()["written"] == 0
    assert len(disk.storage.held) == 2


def test_what_is_measured_later_takes_the_entrys_place(disk: Disk) -> None:
    """And comes back with it; the old bytes leave."""
    scheduler = disk.server()
    store(scheduler, A, B)
    disk.settle()
    names = set(disk.storage.held)
    store(scheduler, A, B, fusion=asks("h2o", 0.5))
    assert disk.settle()["written"] == 4
    assert len(disk.storage.held) == 2
    assert not names & set(disk.storage.held)
    before = scheduler.store.find(identity(B))[0].scores
    disk.stop()
    scheduler = disk.server()
    disk.tier.load_most_used()
    found = scheduler.store.find(identity(B))[0]
    assert found.scored is Scored.ALL
    assert found.scores is not None
    assert before is not None
    assert (found.scores.inter, found.scores.prefix_lens) == (before.inter, before.prefix_lens)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((False, 0, False), (False, 0, False), False),
        ((False, 0, False), (False, 1, False), True),
        ((False, 1, False), (False, 1, True), True),
        ((False, 2, False), (False, 0, True), False),
        ((False, 0, True), (False, 2, False), False),
        ((False, 2, True), (True, 0, False), True),
        ((True, 0, False), (False, 2, True), False),
    ],
)
def test_entry_is_replaced_by_what_loses_nothing(
    old: tuple[bool, int, bool], new: tuple[bool, int, bool], expected: bool
) -> None:
    """Or by what was computed ahead of requests."""
    assert Known(*new).replaces(Known(*old)) is expected


def test_scores_of_other_heads_are_left_out(disk: Disk) -> None:
    """They say nothing of these. Measured anew they are written anew."""
    scheduler = disk.server()
    store(scheduler, A, fusion=asks("h2o", 0.5))
    disk.stop()
    scheduler = disk.server()
    scheduler.fusion_pass.calibration = Calibration(heads=((0, 1),))
    disk.tier.storage.heads = ((0, 1),)
    disk.tier.load_most_used()
    assert scheduler.store.find(identity(A))[0].scored is Scored.ALL, (
        "measured without heads, it holds with any"
    )
    scored = ChunkScores((), (), 1.0, torch.zeros(len(A)), torch.zeros(len(A)))
    outward = torch.arange(4.0)
    blob = HostBlob(torch.ones(1, 4, 1, 1), torch.ones(1, 4, 1, 1))
    scheduler.store.put(identity(D), Variant((), blob, scored, head="h", outward=outward))
    disk.stop()
    for heads, is_known in ((((0, 1),), True), (((1, 1),), False)):
        scheduler = disk.server()
        disk.tier.storage.start(0, heads)
        disk.tier.load_most_used()
        (found,) = scheduler.store.find(identity(D))
        assert (found.scored is Scored.ALL, found.outward is not None) == (is_known, is_known)
        if is_known:
            assert torch.equal(found.outward, outward)
        disk.stop()


def test_scores_that_do_not_fit_their_variant_are_left_out(disk: Disk) -> None:
    """Whoever may write an entry must not be able to end the server."""
    scheduler = disk.server()
    blob = HostBlob(torch.ones(1, 4, 1, 1), torch.ones(1, 4, 1, 1))
    scores = ChunkScores((1.0,), (3,), 1.0, torch.zeros(4))
    scheduler.store.put(identity(D), Variant((), blob, scores, head="h"))
    disk.stop()
    scheduler = disk.server()
    assert disk.tier.load_most_used() == 1
    assert scheduler.store.find(identity(D))[0].scores is None


def test_tenants_have_entries_of_their_own(disk: Disk) -> None:
    """Found with the tenant's request, never at the start and never by others;
    nothing tells the salt."""
    scheduler = disk.server()
    for salt in ("pepper", "paprika"):
        store(scheduler, A, cache_salt=salt, extra_key="key")
    assert disk.settle()["num_entries"] == 2
    disk.stop()
    files = b"".join(path.read_bytes() for path in disk.folder.iterdir())
    assert b"pepper" not in files + str(disk.storage.held.keys()).encode()
    scheduler = disk.server()
    assert disk.tier.load_most_used() == 0
    for tenant, num in (
        ({"cache_salt": "salt", "extra_key": "key"}, 0),
        ({}, 0),
        ({"cache_salt": "pepper", "extra_key": "key"}, 1),
    ):
        scheduler.cache.arrived(fused(A, **tenant))
        disk.settle()
        assert len(held(scheduler, A, **tenant)) == num
    assert disk.settle()["loaded"] == 1


def test_other_weights_find_nothing(disk: Disk) -> None:
    """And keep what they left: their own come back with them.
    An update that was under way leaves nothing in the store."""
    scheduler = disk.server()
    store(scheduler, A)
    disk.settle()
    disk.storage.gate.clear()
    scheduler.evict(100)
    scheduler.store.clear()
    scheduler.cache.arrived(fused(A))
    scheduler.weights = 1
    scheduler.flush()
    disk.storage.gate.set()
    assert disk.settle()["loaded"] == 1
    assert held(scheduler, A) == []
    scheduler.cache.arrived(fused(A))
    assert disk.settle()["loaded"] == 1
    store(scheduler, A)
    assert disk.settle()["num_entries"] == 2
    scheduler.weights = 0
    scheduler.flush()
    scheduler.cache.arrived(fused(A))
    assert disk.settle()["loaded"] == 2
    assert len(held(scheduler, A)) == 1


def test_flush_leaves_the_storage_alone(disk: Disk) -> None:
    """With these weights it comes back; `clear_store` empties it."""
    scheduler = disk.server()
    store(scheduler, A, B)
    disk.settle()
    scheduler.flush()
    assert held(scheduler, A) == []
    scheduler.cache.arrived(fused(A))
    disk.settle()
    assert len(held(scheduler, A)) == 1
    scheduler.cache.rank_state(0, Asked(clear_store=True))
    assert disk.settle()["num_entries"] == 0
    assert disk.storage.held == {}
    disk.stop()
    assert disk.server().cache.stats()["storage"]["num_entries"] == 0


def test_what_is_being_written_is_cleared_too(disk: Disk) -> None:
    """It would come back after `clear_store` has said that nothing is left."""
    scheduler = disk.server()
    disk.storage.gate.clear()
    store(scheduler, A, B)
    scheduler.cache.rank_state(0, Asked(clear_store=True))
    disk.storage.gate.set()
    counts = disk.settle()
    assert (counts["written"], counts["num_entries"], disk.storage.held) == (2, 0, {})
    disk.stop()
    assert Manifest(disk.folder).rows() == []


def test_update_without_a_flush_stops_the_storage(disk: Disk) -> None:
    """KV of two weights is mixed then, and no name says so. A flush starts it again."""
    scheduler = disk.server()
    store(scheduler, A)
    disk.settle()
    scheduler.cache.doubt_weights()
    scheduler.weights = 1
    store(scheduler, B)
    scheduler.evict(100)
    scheduler.store.clear()
    scheduler.cache.arrived(fused(A))
    counts = disk.settle()
    assert (counts["off"], counts["written"], counts["loaded"]) == (True, 1, 0)
    blob = HostBlob(torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1, 1))
    scheduler.store.put(identity(C), Variant((), blob, preprocessed=True, head="h"))
    scheduler.weights = 0
    scheduler.flush()
    assert held(scheduler, C) == [], "these are the old weights, but it was computed with others"
    store(scheduler, B)
    counts = disk.settle()
    assert (counts["off"], counts["written"]) == (False, 2)


def test_damaged_entry_is_computed_and_written_anew(disk: Disk) -> None:
    """Counted by its reason. Nothing of it reaches the store."""
    scheduler = disk.server()
    store(scheduler, A, B)
    disk.settle()
    (name,) = [v.blob.row.name for v in disk.tier.storage.index.variants() if v.prefix]
    good = disk.storage.held[name].clone()
    disk.storage.held[name][-1] ^= 1
    disk.stop()
    scheduler = disk.server()
    req = fused(B, A)
    scheduler.cache.arrived(req)
    counts = disk.settle()
    assert (counts["loaded"], counts["problems"], counts["num_entries"]) == (1, {"damaged": 1}, 1)
    assert held(scheduler, B) == []
    scheduler.serve(req, answer=[50])
    assert wheres(req) == ["gap", "host"]
    scheduler.evict(100)
    store(scheduler, A, B)
    assert disk.settle()["num_entries"] == 2
    assert torch.equal(disk.storage.held[name], good)


def test_entry_that_is_gone_is_forgotten(disk: Disk) -> None:
    """Someone has emptied the storage."""
    store(disk.server(), A)
    disk.stop()
    disk.storage.held.clear()
    disk.server()
    assert disk.tier.load_most_used() == 0
    counts = disk.settle()
    assert (counts["problems"], counts["num_entries"]) == ({"gone": 1}, 0)
    disk.stop()
    assert Manifest(disk.folder).rows() == []


def test_storage_that_fails_harms_no_request(disk: Disk) -> None:
    """It is counted, then it pauses; when it answers again, what is used is written."""
    scheduler = disk.server()
    disk.storage.fails = True
    for chunk in (A, B, C, D, [5, 5], [5, 6]):
        store(scheduler, chunk)
        disk.settle()
    counts = disk.settle()
    assert (counts["paused"], counts["num_entries"]) == (True, 0)
    assert counts["problems"] == {"failed": 4}, "while it pauses nothing is given to it"
    disk.storage.fails = False
    disk.tier.storage.loader._paused_until = 0.0  # it is over
    scheduler.evict(100)
    req = fused(B)
    scheduler.serve(req, answer=[50])
    assert wheres(req) == ["host"]
    assert disk.settle()["num_entries"] == 1


def test_least_reused_leaves_for_what_comes(disk: Disk) -> None:
    """The budget is in bytes. Row and bytes leave."""
    scheduler = disk.server()
    store(scheduler, A)
    size = disk.settle()["num_bytes"]
    disk.stop()
    scheduler = disk.server(storage_bytes=2 * size + size // 2)
    disk.tier.load_most_used()
    scheduler.serve(fused(B, A), answer=[50])
    for chunk in (D, [5, 5, 5, 5]):
        store(scheduler, chunk)
        disk.settle()
    counts = disk.settle()
    assert (counts["num_entries"], counts["num_evicted"]) == (2, 1)
    assert counts["num_bytes"] <= counts["max_bytes"]
    kept = {v.blob.row.place.chunk for v in disk.tier.storage.index.variants()}
    assert kept == {chunk_id(A), chunk_id([5, 5, 5, 5])}
    assert len(disk.storage.held) == 2
    disk.stop()
    disk.server(storage_bytes=size + size // 2)  # a lower limit
    counts = disk.settle()
    assert counts["num_entries"] == len(disk.storage.held) == 1
    assert {v.blob.row.place.chunk for v in disk.tier.storage.index.variants()} == {chunk_id(A)}


def test_f_r_halves_on_the_storage_too(disk: Disk) -> None:
    """With every window, also of what nobody uses any more."""
    scheduler = disk.server(window_requests=2)
    store(scheduler, A)
    disk.settle()
    scheduler.serve(fused(B, A), answer=[50])
    disk.settle()
    (stored,) = disk.tier.storage.index.variants()
    reuse = stored.reuse
    assert reuse > 0
    for _ in range(2):
        scheduler.serve(rag(D), answer=[50])
    disk.stop()
    assert stored.reuse == reuse / 2
    (row,) = Manifest(disk.folder).rows()
    assert (row.reuse, row.num_uses) == (reuse / 2, 1)


def test_end_of_the_scheduler_keeps_what_waits(disk: Disk) -> None:
    """Uses included. SGLang tells the cache."""
    scheduler = disk.server()
    store(scheduler, A, B)
    disk.settle()
    disk.tier.storage.loader.drain(DEADLINE_S)
    scheduler.serve(fused(B, A), answer=[50])
    store(scheduler, C)
    scheduler.cache.release_host_resources()
    manifest = Manifest(disk.folder)
    assert len(manifest.rows()) == 3
    assert sum(row.num_uses for row in manifest.rows()) == 2
    manifest.close()


def test_start_takes_no_longer_than_it_may(disk: Disk) -> None:
    """A storage that hangs is waited for, but not for ever."""
    store(disk.server(), A)
    disk.stop()
    disk.storage.gate.clear()
    disk.server()
    assert disk.tier.load_most_used(0.2) == 0


def test_start_loads_what_was_used_most(disk: Disk) -> None:
    """As much as the store holds, and of these weights alone."""
    scheduler = disk.server()
    for chunk in (A, B, C):
        store(scheduler, chunk)
        disk.settle()
    scheduler.serve(fused(B, A), answer=[50])
    disk.stop()
    scheduler = disk.server(store_bytes=len(A) * LAYOUT.token_bytes)
    assert disk.tier.load_most_used() == 1
    assert len(held(scheduler, A)) == 1
    disk.stop()
    scheduler = disk.server()
    disk.tier.storage.start(9, ())
    assert disk.tier.load_most_used() == 0


def test_more_than_the_queue_holds_is_loaded_at_the_start(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start polls while it waits."""
    scheduler = disk.server(capacity=400)
    chunks = [[i, i + 1] for i in range(100, 110)]
    store(scheduler, *chunks)
    disk.stop()
    monkeypatch.setattr("sglang_chunkcache.storage.loader.MAX_WAITING", 3)
    disk.server()
    assert disk.tier.load_most_used() == len(chunks)


def test_other_head_is_loaded_where_nothing_else_is(disk: Disk) -> None:
    """As it is moved only then."""
    store(disk.server(), A, head=OTHER_HEAD)
    disk.stop()
    scheduler = disk.server()
    scheduler.serve(rag(A, head=[80, 81]), answer=[50])
    scheduler.cache.arrived(fused(A))
    assert disk.settle()["loaded"] == 0
    scheduler.evict(100)
    scheduler.cache.arrived(fused(A))
    assert disk.settle()["loaded"] == 1


def test_plain_request_loads_plain_kv(disk: Disk) -> None:
    """Preprocessing is built on what has seen no other chunk."""
    scheduler = disk.server()
    store(scheduler, A, B)
    disk.stop()
    scheduler = disk.server()
    scheduler.cache.arrived(fused(B, A, fusion=FusionRequest("none", 0.0, "r", plain=True)))
    disk.settle()
    assert (held(scheduler, A), held(scheduler, B)) == ([()], [])


def test_at_most_a_few_variants_are_loaded(disk: Disk) -> None:
    """Of one chunk for one request, those that resemble it."""
    scheduler = disk.server(capacity=200)
    for before in ([A], [B], [A, B], []):
        store(scheduler, *before, C)
        scheduler.evict(1000)
        disk.settle()
    disk.stop()
    scheduler = disk.server()
    scheduler.cache.arrived(fused(A, C))
    disk.settle()
    assert sorted(held(scheduler, C), key=len) == [(chunk_id(A),), (chunk_id(A), chunk_id(B))]
    assert module.MAX_LOADED_VARIANTS == 2


def test_a_failure_while_loading_is_asked_for_leaves_the_request_alone(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler must not die of it."""
    store(disk.server(), A)
    disk.stop()
    scheduler = disk.server()

    fail = mock.Mock(side_effect=RuntimeError("a bug"))
    monkeypatch.setattr(disk.tier, "_load", fail)
    req: FakeReq = fused(A)
    scheduler.cache.arrived(req)
    assert fail.called
    scheduler.serve(req, answer=[50])
    assert sources(req) == []


def test_figures_are_shown_now_and_then_and_when_they_are_asked_for(disk: Disk) -> None:
    """A forward must not write them each time."""
    disk.server()
    for seconds, expected in ((0.0, 1), (0.5 * SHOWN_S, 0), (SHOWN_S, 1)):
        disk.now += seconds
        disk.shown.clear()
        disk.tier.storage.poll()
        disk.tier.storage.poll()
        assert len(disk.shown) == expected
    disk.shown.clear()
    assert disk.tier.storage.stats() == disk.shown[0]
