"""Schedulers with exact chains in host memory and in a storage, whose slots hold what their KV
depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from radix_ext import ChainId, ChunkPrefixTree, Tier, chunk_id
from radix_ext.costs import Line, Phase
from radix_ext.variants import Variant
from sglang_chunkcache.front.rank_mirror import RankMirror
from sglang_chunkcache.scheduler.host_chains import HostChains
from sglang_chunkcache.scheduler.node import facts, state
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.scheduler.stored_chains import StoredChains
from sglang_chunkcache.scheduler.tiers import Tiers
from sglang_chunkcache.storage.ranks import Ranks
from sglang_chunkcache.storage.storage import Storage
from sglang_chunkcache.wire.spans import unpack
from sglang_chunkcache.wire.state import Asked, ExplainRequest
from tests.kit.fused import Disk
from tests.kit.integrity import check_tree
from tests.polling import DEADLINE_S
from tests.reference.chains import chain_of
from tests.reference.scheduler import SECRET, FakeReq, Scheduler, config, marked, walk

HEAD, A, B, C = (90, 91), (1, 2, 3, 4), (1, 2, 5), (7, 8)
CAPACITY = 40


class HostScheduler(Scheduler):
    """Each slot holds all tokens up to its own, with the tenant's: what its KV depends on."""

    def __init__(
        self,
        capacity: int = CAPACITY,
        host_slots: int = 1000,
        create_tiers: Callable[[HostChains], Tiers] = Tiers,
        page_size: int = 1,
        **knobs: Any,
    ) -> None:
        super().__init__(
            capacity,
            config(**knobs),
            host_slots=host_slots,
            create_tiers=create_tiers,
            page_size=page_size,
        )
        self.tree = ChunkPrefixTree(max_nodes=10_000)
        self.mirror = RankMirror(self.tree, 0)

    def check(self, reqs: Sequence[FakeReq] = ()) -> None:
        super().check(reqs)
        rank = rank_state(self.cache, 0)  # which takes in what has come
        self.mirror.apply(self.cache.log.unread())
        assert self.tree.holdings.digest(0) == (rank.events.num_nodes, rank.events.digest)
        check_tree(self.tree)
        chains = (facts(node).chain for _, node in walk(self.cache))
        on_device = {chain for chain in chains if chain is not None}
        for chain in on_device | self.on_host():
            node = self.tree.nodes.find(chain)
            assert node is not None
            assert node.tier(0) == (Tier.DEVICE if chain in on_device else Tier.HOST)

    def on_host(self) -> set[ChainId]:
        nodes = self.cache.tiers.host.nodes._nodes.values()
        return {host.chain for host in nodes if host.chain is not None}

    def idle(self) -> None:
        """Forwards of others, until nothing waits to be saved."""
        while self.cache.tiers.host.stats()["waiting"]:
            self.forward()

    def flush(self) -> None:
        self.cache.reset()
        self.allocator.clear()

    def price(self, load: Line, extend: Line) -> None:
        self.cache.tiers.host.pricing.agreed = {Phase.LOAD: load, Phase.EXTEND: extend}

    def _compute(self, batch: Sequence[tuple[FakeReq, int, int]]) -> None:
        for req, start, end in batch:
            held = [self.allocator.contents.get(slot) for slot in self.slots(req, 0, start)]
            assert held == [content(req, n) for n in range(1, start + 1)]
            for position, slot in enumerate(self.slots(req, start, end), start):
                self.allocator.contents[slot] = content(req, position + 1)


def content(req: FakeReq, end: int) -> tuple[Any, ...]:
    return (req.extra_key, req.cache_salt, tuple(req.all_ids[:end]))


def rag(
    *chunks: tuple[int, ...],
    head: tuple[int, ...] = HEAD,
    tail: tuple[int, ...] = (30,),
    **params: Any,
) -> FakeReq:
    keys = {key: params.pop(key) for key in ("extra_key", "cache_salt") if key in params}
    ids, spans = list(head), []
    for chunk in chunks:
        spans.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    return FakeReq([*ids, *tail], marked(spans, namespace=f"{head}{keys}", **params), **keys)


def later(before: FakeReq, *chunks: tuple[int, ...], tail: tuple[int, ...]) -> FakeReq:
    """The next turn of its conversation, with its answer. `tail`: its question."""
    known = unpack(before.sampling_params.custom_params, before.origin_input_ids, secret=SECRET)
    assert known is not None
    ids, spans = list(before.all_ids), [(start, end) for start, end, _ in known.spans]
    for chunk in chunks:
        spans.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    request = marked(spans, namespace=known.namespace, is_later_turn=True)
    keys = {"extra_key": before.extra_key, "cache_salt": before.cache_salt}
    return FakeReq([*ids, *tail], request, **keys)


def chain(*chunks: tuple[int, ...], head: tuple[int, ...] = HEAD) -> ChainId:
    return chain_of(f"{head}{{}}", [chunk_id(chunk) for chunk in chunks])


def known(
    scheduler: HostScheduler, *chunks: tuple[int, ...], head: tuple[int, ...] = HEAD
) -> None:
    """Their chain was found cached once, and nothing waits."""
    for _ in range(2):
        scheduler.serve(rag(*chunks, head=head))
    scheduler.idle()


def offloaded(scheduler: HostScheduler, *chunks: tuple[int, ...]) -> None:
    """Their chain is in host memory alone."""
    known(scheduler, *chunks)
    scheduler.evict(CAPACITY)


class ChainDisk(Disk):
    """What outlives these servers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.weights = 0
        self.opened_ones: list[Storage] = []


class Server(HostScheduler):
    """With exact chains in a storage."""

    def __init__(
        self,
        disk: ChainDisk,
        *,
        overlapped: str = "",
        storage_bytes: int = 100_000,
        ranks: Ranks | None = None,
        how: str = "exact",
        **knobs: Any,
    ) -> None:
        self.disk, self.weights = disk, disk.weights
        storage = disk.opened(storage_bytes, overlapped=overlapped, ranks=ranks)
        self.storage = storage

        def create_tiers(host: HostChains) -> Tiers:
            stored = StoredChains(host, storage, how=(how,), fingerprint=lambda: self.weights)
            return Tiers(host, storage=storage, stored=stored)

        super().__init__(create_tiers=create_tiers, **knobs)
        disk.opened_ones.append(storage)

    def ask(self, req: FakeReq, *, settles: bool = True) -> int:
        """It waits until its loads have come, or as long as it may, and is served.
        Returns what it found."""
        self.cache.arrived(req)
        if settles:
            self.settle()
        while self.disk.wait_policy.share and self.is_put_off(req):
            self.disk.now += 1.0
        found = self.serve(req)
        self.idle()
        return found

    def is_put_off(self, req: FakeReq) -> bool:
        """Whether it waits for the storage."""
        self.match(req)
        return state(req).is_put_off

    def check(self, reqs: Sequence[FakeReq] = ()) -> None:
        super().check(reqs)
        assert self.cache.tiers.host.counts.failed == 0, "slots that hold nothing were read"

    def settle(self) -> dict[str, Any]:
        for _ in range(3):  # what is polled may ask for more
            assert self.storage.loader.drain(DEADLINE_S)
            self.storage.poll(is_round=True)
        return self.storage.stats()

    def stop(self) -> None:
        self.settle()
        self.storage.close()


def depth(variant: Variant) -> int:
    """How many chunks a chain has up to the end of this entry."""
    place = variant.blob.row.place
    return 0 if place.exact.startswith(place.chunk) else len(place.prefix) + 1


def unsent(req: FakeReq, rank: int = 0) -> ExplainRequest:
    spans = unpack(req.sampling_params.custom_params, req.origin_input_ids, secret=SECRET)
    assert spans is not None
    return ExplainRequest(list(req.origin_input_ids), spans, req.extra_key, req.cache_salt, rank)


def prefetch(server: Server, req: FakeReq, *, rank: int = 0) -> None:
    rank_state(server.cache, 0, Asked(prefetch=unsent(req, rank)))
