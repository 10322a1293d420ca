"""The scheduler with moved KV, and a pool that remembers what each slot holds instead of numbers.

    KV(token, position, context)    context: the exact tokens before it, as one number;
                                    None: moved, recomputed or computed after such

Whatever reads a slot says which token it expects there at which position. A freed slot holds
nothing, so reading it, or one that was promised and never filled, is an assertion.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast

import torch

from radix_ext.cfo import Scored
from radix_ext.costs import Work
from radix_ext.moved_plan import Limits, Piece
from radix_ext.sources import DeviceCopy, HostCopy
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.fusion import selectors
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.fusion.fill import Capture, Captured
from sglang_chunkcache.fusion.keeping import KINDS, kind_of
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.outward import OutwardWatch
from sglang_chunkcache.fusion.promise import Fuser
from sglang_chunkcache.fusion.sharing import Sharing
from sglang_chunkcache.fusion.store import ChunkScores
from sglang_chunkcache.fusion.tier import StorageTier
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.chunk_tree import ChunkTree
from sglang_chunkcache.scheduler.host_chains import HostChains
from sglang_chunkcache.scheduler.host_nodes import HostCounts, HostNodes
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.one_copy import OneCopyRadixCache
from sglang_chunkcache.scheduler.pricing import Pricing, Timer
from sglang_chunkcache.scheduler.stored_chains import StoredChains
from sglang_chunkcache.scheduler.tiers import Tiers
from sglang_chunkcache.storage.codec import CODECS, Sizes
from sglang_chunkcache.storage.opening import create_index
from sglang_chunkcache.storage.storage import Storage
from sglang_chunkcache.wire.report import Fallback
from tests.kit.integrity import check_store
from tests.reference.memory_host import HEAD_DIMS, MemoryHost
from tests.reference.one_copy import CountingVirtual
from tests.reference.scheduler import FakeReq, Scheduler, walk

ROOMY = Limits(max_pass_tokens=1000, max_gap_tokens=1000)
NO_TABLE: Any = None
"""In place of a rotary table: contents are not turned, they say where they are read."""
FILLING_S = 3600.0
"""What the pass says that filling a move takes."""


class KV(NamedTuple):
    """What one slot holds."""

    token: int
    position: int
    context: int | None


class Contents:
    """Slot -> KV."""

    _contexts: ClassVar[dict[tuple[int, int], int]] = {}
    """Of all servers: they read what others have stored."""

    def __init__(self, slots: MutableMapping[int, KV]) -> None:
        self.slots = slots

    def context(self, before: int | None, token: int) -> int | None:
        """The context of `token` after `before`; 0 is the empty one."""
        if before is None:
            return None
        return self._contexts.setdefault((before, token), len(self._contexts) + 1)

    def read(self, slot: int, token: int, position: int) -> KV:
        kv = self.slots.get(slot)
        assert kv is not None, f"slot {slot} holds nothing and is read for {token} at {position}"
        assert kv[:2] == (token, position), f"slot {slot} holds {kv}, not {token} at {position}"
        return kv

    def exact_len(self, slots: Sequence[int], token_ids: Sequence[int]) -> int:
        """How far this prefix is what an ordinary prefill would compute. Reads all of it."""
        context: int | None = 0
        length = 0
        for position, (slot, token) in enumerate(zip(slots, token_ids, strict=True)):
            context = self.context(context, token)
            if self.read(slot, token, position).context != context:
                context = None
            length += context is not None
        return length

    def compute(
        self, slots: Sequence[int], token_ids: Sequence[int], positions: Iterable[int]
    ) -> None:
        """Run the tokens at `positions` through the model: each reads all before it."""
        computed = set(positions)
        context: int | None = 0
        for position in range(max(computed, default=-1) + 1):
            slot, token = slots[position], token_ids[position]
            context = self.context(context, token)
            if position in computed:
                self.slots[slot] = KV(token, position, context)
            elif self.read(slot, token, position).context != context:
                context = None


class FakePass:
    """`FusionPass` on contents, in its order: move everything, look at everything, compute
    everything.

    Recomputes the first ceil(ratio * n) of the moved tokens, whatever the selector.
    """

    def __init__(
        self,
        contents: Contents,
        rows: Any,
        config: ChunkCacheConfig,
        host: HostNodes,
        sharing: Sharing | None,
    ) -> None:
        self.host, self.sharing = host, sharing
        self.contents, self.rows, self.config = contents, rows, config
        self.pricing = Pricing(
            SimpleNamespace(device="cpu", tp_group=SimpleNamespace(world_size=1))
        )
        self.calibration = Calibration()
        self.outward = OutwardWatch(cast("Any", self))
        self.num_captured = self.num_scored = 0
        self.fails: str | None = None
        """The next run does, "early" or once everything is moved, and computes all it has room for;
        the others are lost."""

    def calibrated(self, by: Calibration) -> None:
        self.calibration = by

    def run(self, moves: Sequence[Move]) -> None:
        fails, self.fails = self.fails, None
        gaps = [
            positions(piece for piece in move.plan.pieces if piece.source is None) for move in moves
        ]
        if fails != "early":
            self._move_all(moves)
            for move, uncached in zip(moves, gaps, strict=True):  # probes read all that is no gap
                for position in set(range(move.plan.end)).difference(uncached):
                    slot, token = int(move.slots[position]), move.token_ids[position]
                    self.contents.read(slot, token, position)
        if fails is not None:
            self._compute_all(moves)
            return
        watch = Timer(None, Work(1), [cast(Any, SimpleNamespace(seconds=FILLING_S))])
        for move, uncached in zip(moves, gaps, strict=True):
            moved = positions(move.moved)
            ratio = 0.0 if move.fusion.selector == "none" else move.fusion.ratio
            critical = moved[: math.ceil(ratio * len(moved))]
            move.recomputed_len = len(critical)
            if selectors.get(move.fusion.selector, "eval.selectors").makes_variants(move.fusion):
                move.whole = frozenset(
                    piece.start for piece in move.moved if {*positions([piece])} <= {*critical}
                )
            computed = sorted([*uncached, *critical])
            if self.sharing is not None:
                where = torch.tensor(computed, dtype=torch.int64)
                computed = self.sharing.own(move, where).tolist()
            self._compute(move, computed)
            move.filling = watch if len(moves) == 1 else None
        if self.sharing is not None:
            self.sharing.came(moves)

    def capture(self, captures: Sequence[Capture]) -> list[Captured]:
        captured = list[Captured]()
        with ExitStack() as taken:
            for capture in captures:
                scores = self._scores_of(capture)
                self.contents.exact_len(capture.slots.tolist(), capture.token_ids)
                slots = capture.slots[capture.start :]
                saved = Captured(self.host.room(len(slots)), scores)
                taken.callback(saved.arrived, is_stored=False)
                if saved.slots is not None:
                    saved.slots.hold()
                    self.host.pool.save(slots, saved.slots.slots)
                captured.append(saved)
            taken.pop_all()  # nothing has failed
        self.num_captured += len(captures)
        return captured

    def _scores_of(self, capture: Capture) -> ChunkScores | None:
        if not capture.is_to_be_scored:
            return capture.scores
        lens = tuple(e - s for s, e in capture.prefix)
        zeros = torch.zeros(len(capture.token_ids) - capture.start)
        received = zeros if capture.scored is Scored.ALL else None
        self.num_scored += 1
        return ChunkScores((1.0,) * len(lens), lens, 1.0, zeros, received)

    def stats(self) -> dict[str, Any]:
        return {"captured": self.num_captured}

    def _compute_all(self, moves: Sequence[Move]) -> None:
        for move in moves:
            region = torch.arange(move.plan.start, move.plan.end)
            move.recomputed_len = move.plan.moved_len
            try:
                if self.sharing is not None:
                    self.sharing.own(move, region, all_of_them=True)
            except IndexError:
                move.is_lost = True
                continue
            self._compute(move, region.tolist())
            move.fallbacks.append(Fallback.PASS_FAILED)

    def _move_all(self, moves: Sequence[Move]) -> None:
        for move in moves:
            row = self.rows.req_to_token[move.row_index(), : move.plan.end]
            assert row.tolist() == move.slots.tolist(), "the request's row is not what was promised"
            assert len(move.token_ids) == move.plan.end
            for piece in move.moved:
                self._move(move, piece)
        for load in () if self.sharing is None else self.sharing.loads(moves):
            held = [self.host.pool.contents[slot] for slot in load.slots.tolist()]  # type: ignore[attr-defined]
            self.contents.slots.load(load.rows, held)  # type: ignore[attr-defined]

    def _compute(self, move: Move, positions: Sequence[int]) -> None:
        self.contents.compute(move.slots.tolist(), move.token_ids, positions)

    def _move(self, move: Move, piece: Piece) -> None:
        positions = range(piece.start, piece.end)
        tokens = list(move.token_ids[piece.start : piece.end])
        source = piece.source
        if isinstance(source, DeviceCopy):
            slots = source.node.value.tolist()
            for offset, (slot, token) in enumerate(zip(slots, tokens, strict=True)):
                self.contents.read(slot, token, source.facts.start + offset)
        elif isinstance(source, HostCopy):
            blob = source.facts.blob
            assert blob.is_held, "its slots may be given to others"
            held = [self.host.pool.contents[slot] for slot in blob.slots.tolist()]  # type: ignore[attr-defined]
            first = source.facts.start
            wanted = list(zip(tokens, range(first, first + len(tokens)), strict=True))
            assert [kv[:2] for kv in held] == wanted
        if self.sharing is not None:
            return  # `run` reads them at their new positions
        for position, token in zip(positions, tokens, strict=True):
            slot = int(move.slots[position])
            assert slot not in self.contents.slots, f"slot {slot} is filled twice"
            self.contents.slots[slot] = KV(token, position, None)


def positions(pieces: Iterable[Piece]) -> list[int]:
    return [position for piece in pieces for position in range(piece.start, piece.end)]


class FusedScheduler(Scheduler):
    """`Scheduler` with a fuser; `prefill_budget` is also what a promise leaves free for extends.
    `storage` makes what is below the store."""

    def __init__(
        self,
        capacity: int,
        config: ChunkCacheConfig,
        *,
        limits: Limits = ROOMY,
        prefill_budget: int = 64,
        is_chunked: bool = True,
        store_bytes: int = 10_000,
        storage: Storage | None = None,
        host_slots: int = 0,
    ) -> None:
        how: dict[str, Any] = {"is_chunked": is_chunked}
        self.weights = 0
        """Their fingerprint."""

        def create_tiers(host: HostChains) -> Tiers:
            self.contents = Contents(self.allocator.contents)
            is_shared = host_slots > 0 and config.store_codec == "none"
            nodes = host.nodes if is_shared else self._own_nodes(host.tree, config, store_bytes)
            self.store = nodes.index
            sharing = None
            if has_rows:
                make_room = partial(host.tree.make_room, 0)
                sharing = Sharing(self.allocator.slot_map, NO_TABLE, make_room)
            self.fusion_pass = FakePass(self.contents, self.rows, config, nodes, sharing)
            self.fuser = Fuser(
                host.tree,
                self.fusion_pass,  # type: ignore[arg-type]
                limits,
                fingerprint=lambda: self.weights,
                tier=StorageTier(storage, nodes) if storage else None,
                in_host_memory=host.write_back.takes if is_shared else None,
            )
            stored = None
            if storage is not None and is_shared:
                stored = StoredChains(host, storage, how=("exact",), fingerprint=None)
            return Tiers(host, storage=storage, stored=stored, fuser=self.fuser)

        has_rows = config.one_copy == "on"
        if has_rows:
            how["allocator"] = CountingVirtual.of(capacity, config.virtual_slots * capacity)
        how |= {"host_slots": host_slots, "create_tiers": create_tiers}
        super().__init__(capacity, config, prefill_budget=prefill_budget, **how)
        self.evicted_before_load_back = 0
        """Tokens that leave between a match and the promise:
        SGLang has no reason to, but its calls allow for it."""

    def _own_nodes(self, tree: ChunkTree, config: ChunkCacheConfig, num_bytes: int) -> HostNodes:
        """Captured chunks, in a pool that has no exact chains."""
        codec, dim = CODECS[config.store_codec], HEAD_DIMS[config.store_codec]
        token_bytes = codec.nbytes(Sizes(1, 1, 1, dim, dim, torch.float32))
        pool: Any = MemoryHost(
            lambda: self.contents.slots,
            num_bytes // token_bytes,
            codec=codec,
            token_bytes=token_bytes,
        )
        return HostNodes(tree, pool, create_index(config, num_bytes), HostCounts())

    @property
    def num_pending(self) -> int:
        """Chunks that wait for the store."""
        return int(self.fuser.stats()["store"]["pending"])

    def idle(self) -> None:
        """Forwards of other requests: everything that waits is captured."""
        while self.num_pending:
            self.forward()

    def flush(self) -> None:
        """As SGLang does when nothing runs."""
        self.cache.reset()
        self.allocator.clear()
        self.contents.slots = self.allocator.contents

    def evict(self, num_tokens: int) -> int:
        """What SGLang is told could be evicted is free afterwards,
        or it dies of the next allocation."""
        free, evictable = self.allocator.available_size(), self.cache.evictable_size()
        num_evicted = super().evict(num_tokens)
        num_freed = self.allocator.available_size() - free
        assert num_freed >= min(num_tokens, evictable)
        assert isinstance(self.cache, OneCopyRadixCache) or num_freed == num_evicted
        return num_evicted

    def check(self, reqs: Sequence[FakeReq] = ()) -> None:
        """Also: locks are what holders explain, and every slot holds what its node's key says,
        or will with the next forward."""
        super().check(reqs)
        assert not any(state(req).is_failed for req in reqs), "a pass has failed; the log says why"
        check_store(self.store)
        stats = self.fuser.stats()["store"]
        for kind in KINDS:
            blobs = [each.blob for each in self.store.held if kind_of(each) == kind]
            assert stats["bytes"][kind] == sum(blob.nbytes for blob in blobs)
            assert stats["saved_bytes"][kind] == sum(blob.saved_bytes for blob in blobs)
        measured = sum(each.nbytes - each.blob.nbytes for each in self.store.held)
        assert sum(stats["bytes"].values()) + measured == stats["num_bytes"]
        self._check_locks(reqs)
        loads = self._loads()
        assert not loads.keys() & self.contents.slots.keys(), "a slot that is loaded holds KV"
        stack: list[tuple[Any, int, int | None, str | None]] = [(self.cache.root_node, 0, 0, None)]
        while stack:
            node, position, context, recipe = stack.pop()
            taint = node.key.fused if isinstance(node.key, ChunkKey) else None
            own = taint and taint.recipe
            assert recipe in (None, own), "exact or foreign below fused KV"
            for slot, token in zip(map(int, node.value), node.key.token_ids, strict=True):
                context = self.contents.context(context, token)
                holder = Contents(loads) if slot in loads else self.contents
                kv = holder.read(slot, token, position)
                assert taint is not None or kv.context == context, f"{kv} under an exact key"
                position += 1
            for child in node.children.values():
                stack.append((child, position, context, own))
        for req in reqs:
            if req.kv.req_pool_idx is not None:
                self.contents.exact_len(self.slots(req, 0, req.filled), req.all_ids[: req.filled])

    def _loads(self) -> dict[int, KV]:
        """What comes from host memory with the next forward."""
        host, found = self.cache.tiers.host, {}
        for node, part in host.load_back._loads.items() if host is not None else ():
            for slot, source in zip(node.value.tolist(), part.tolist(), strict=True):
                found[slot] = host.pool.contents[source]
        return found

    def _load_back(self, req: FakeReq, num_tokens: int) -> int | None:
        self.evict(self.evicted_before_load_back)
        return super()._load_back(req, num_tokens)

    def _check_locks(self, reqs: Sequence[FakeReq]) -> None:
        holders = [req.last_node for req in reqs]
        pieces = [
            piece for pending in self.fuser.promises._pending for piece in pending.move.plan.pieces
        ]
        holders += [piece.source.node for piece in pieces if isinstance(piece.source, DeviceCopy)]
        expected: Counter[Any] = Counter()
        for node in holders:
            while node is not self.cache.root_node:
                expected[node] += 1
                node = node.parent
        for keys, node in walk(self.cache):
            assert node.lock_ref == expected[node], f"{node.lock_ref} locks of {keys}"

    def _compute(self, batch: Sequence[tuple[FakeReq, int, int]]) -> None:
        for req, start, end in batch:
            if state(req).is_failed:  # its output is dropped
                continue
            slots, ids = self.slots(req, 0, end), array("q", req.all_ids[:end])
            spans = state(req).spans
            exact_len = self.contents.exact_len(slots[:start], ids[:start])
            if spans is None or spans.fusion is None:
                assert exact_len == start, "an exact request reads approximate KV"
            self.contents.compute(slots, ids, range(start, end))
