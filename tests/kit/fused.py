"""A rank that moves chunks, what it tells of them, and the storage below its store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from radix_ext import ChunkId, chunk_id
from radix_ext.loading import WaitPolicy
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Variant
from sglang_chunkcache.fusion.tier import StorageTier
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.node import ChunkIdentity
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.storage.backend import Backend
from sglang_chunkcache.storage.entry import Layout
from sglang_chunkcache.storage.key import Names
from sglang_chunkcache.storage.loader import Loader
from sglang_chunkcache.storage.manifest import Manifest
from sglang_chunkcache.storage.naming import Naming
from sglang_chunkcache.storage.pointer import Pointers
from sglang_chunkcache.storage.ranks import Ranks
from sglang_chunkcache.storage.storage import Storage
from sglang_chunkcache.storage.worker import Worker
from sglang_chunkcache.wire.report import Explanation, Report
from sglang_chunkcache.wire.state import Asked, ExplainRequest
from tests.kit.requests import rag
from tests.polling import DEADLINE_S
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.memory_storage import MemoryStorage
from tests.reference.scheduler import FakeReq, answer_of, config, walk


def report(req: FakeReq) -> Report:
    """What the front is told of the request's KV."""
    found = answer_of(req).report
    assert found is not None
    return found


def sources(told: Report) -> list[tuple[Any, ...]]:
    """Per piece: span, where from, chunks before the source, of these before it now, CFO."""
    return [
        (each.span, each.where, each.num_before, each.overlap, each.cfo) for each in told.sources
    ]


def wheres(told: Report) -> list[str]:
    """By chunk of the promised region, where its KV came from."""
    return [each.where for each in told.sources if each.span is not None]


def identity(
    tokens: list[int], extra_key: str | None = None, cache_salt: str | None = None
) -> ChunkIdentity:
    return ChunkIdentity(chunk_id(tokens), extra_key, cache_salt)


class Rank(FusedScheduler):
    """A scheduler that has served some requests, with the steps that tests repeat."""

    def __init__(
        self, *served: FakeReq, capacity: int = 60, prefill_budget: int = 20, **knobs: Any
    ) -> None:
        others = ("is_chunked", "store_bytes", "storage", "host_slots")
        more = {key: knobs.pop(key) for key in others if key in knobs}
        settings = config(reuse="fused", **knobs)
        super().__init__(capacity, settings, prefill_budget=prefill_budget, **more)
        for req in served:
            self.serve(req)

    def serve(self, req: FakeReq, **how: Any) -> int:
        """And all is in order after it."""
        matched = super().serve(req, **how)
        self.check()
        return matched

    def ask(self, req: FakeReq) -> Report:
        self.serve(req, answer=[50])
        return report(req)

    def start(self, *reqs: FakeReq) -> list[int | None]:
        """Into one batch; what of each need not be prefilled."""
        found = [self.add(req, 100) for req in reqs]
        self.check(reqs)
        return found

    def finish(self, *reqs: FakeReq) -> None:
        """The batch, what is left to prefill, one token, done."""
        if self.batch:
            self.forward()
        self.check(reqs)
        for req in reqs:
            while not self.is_prefilled(req):
                self.stash(req)
                assert self.prefill(req, 100)
        for req in reqs:
            self.sample(req, 50)
        for req in reqs:
            self.release(req, is_insert=True)
        self.check()

    def together(self, *reqs: FakeReq) -> list[int | None]:
        """Started in one batch and finished; what of each need not be prefilled."""
        found = self.start(*reqs)
        self.finish(*reqs)
        return found

    def explain(self, req: FakeReq) -> Explanation:
        spans = self.cache._spans_of(req)
        ids = list(req.origin_input_ids)
        asked = ExplainRequest(ids, spans, req.extra_key, req.cache_salt)
        (told,) = rank_state(self.cache, 0, Asked((asked,))).explanations
        assert isinstance(told, Explanation)
        return told

    def node(self, *path: list[int], recipe: str | None = None) -> Any:
        """The node whose keys from the root down are these tokens; None if there is none."""
        for keys, node in walk(self.cache):
            taint = keys[-1].fused if isinstance(keys[-1], ChunkKey) else None
            found = [list(key.token_ids) for key in keys], taint and taint.recipe
            if found == (list(path), recipe):
                return node
        return None

    def store_chunks(
        self, *chunks: list[int], keep: Sequence[int] | None = None, **fields: Any
    ) -> None:
        """Serve the chunks in one prompt and have them, or those in `keep`, stored."""
        kept = range(len(chunks)) if keep is None else keep
        self.serve(rag(*chunks, keep=kept, **fields), answer=[50])
        self.idle()

    def stored(self, chunk: list[int], **tenant: Any) -> list[Variant]:
        """What the store in memory has of it."""
        return list(self.store.find(identity(chunk, **tenant)))

    def tokens(self, variant: Variant) -> list[int]:
        """What the store's pool has of it."""
        contents: Any = self.fusion_pass.host.pool.contents  # type: ignore[attr-defined]
        return [contents[slot].token for slot in variant.blob.slots.tolist()]

    def held(self, chunk: list[int], **tenant: Any) -> list[tuple[ChunkId, ...]]:
        return [variant.prefix for variant in self.stored(chunk, **tenant)]

    def forget(self) -> None:
        """Neither device nor memory has anything."""
        self.evict(1000)
        self.store.clear()


class Disk:
    """What outlives the servers on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.storage = folder, MemoryStorage()
        self.tiers: list[StorageTier] = []
        self.layout = Layout(1, 1, 1, 1, "float32")
        self.now = 0.0
        self.wait_policy = WaitPolicy(0.0)

    def server(self, *, storage_bytes: int = 100_000, overlapped: str = "", **knobs: Any) -> Rank:
        """A server that has just started: `stop` the one before.
        `beside`: its name, if it shares the storage with others."""
        window = knobs.get("window_requests", 1000)
        rank = Rank(
            storage=self.opened(storage_bytes, overlapped=overlapped, window=window), **knobs
        )
        assert rank.fuser.tier is not None
        self.tiers.append(rank.fuser.tier)
        return rank

    def restarted(self, *chunks: list[int], **knobs: Any) -> Rank:
        """The next server; before it stopped, the one before has stored these chunks, if any."""
        if chunks:
            self.server().store_chunks(*chunks)
        self.stop()
        return self.server(**knobs)

    def opened(
        self,
        storage_bytes: int,
        *,
        overlapped: str = "",
        window: int = 1000,
        ranks: Ranks | None = None,
    ) -> Storage:
        manifest, backend = Manifest(self.folder / overlapped), Backend(self.storage)
        names = Names(b"", ranks.shard if ranks else "")
        pointers = Pointers(backend, names) if overlapped else None
        worker = Worker(backend, manifest, secret=b"", pointers=pointers, clock=lambda: self.now)
        return Storage(
            VariantIndex(max_bytes=storage_bytes, max_chunks=1000, max_variants=5, window=window),
            Loader(worker, ranks=ranks),
            Naming(names, lambda *how: " ".join(map(str, how)), self.layout),
            ranks.common(manifest.rows())[0] if ranks else manifest.rows(),
            self.wait_policy,
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
