"""SGLang's scheduler reduced to what a prefix cache sees: the same calls in the same order, on its
real pools.

A request goes match -> load back -> lock -> prefill pieces -> decode -> release; the last step is
SGLang's own `release_kv_cache`. Slots are counted, so a double free or a leak shows at once.

A batch is first put together (`add`, `extend`), which gives out promises but no slots of its own.
`forward` allocates and computes. There SGLang dies if slots are short, so here it is an assertion.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from msgspec import structs
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    zero_match_result,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

from radix_ext import ChunkId, Span, chunk_id
from sglang_chunkcache.compat import PAGES_WITHOUT_TRITON
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.cpu.allocator import PagedAllocator
from sglang_chunkcache.cpu.one_copy import VirtualAllocator
from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache
from sglang_chunkcache.scheduler.host_chains import HostChains
from sglang_chunkcache.scheduler.host_pool import NoSlots
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.one_copy import OneCopyRadixCache
from sglang_chunkcache.scheduler.paged_cache import PagedRadixCache
from sglang_chunkcache.scheduler.tiers import Tiers
from sglang_chunkcache.storage.opening import create_index
from sglang_chunkcache.wire.events import NOTHING_READ, Acknowledgement
from sglang_chunkcache.wire.message import decode
from sglang_chunkcache.wire.report import ANSWER_KEY, Answer
from sglang_chunkcache.wire.spans import RequestSpans, pack
from tests.kit import releases
from tests.kit.cache_integrity import check_integrity
from tests.reference.memory_host import FixedCosts, MemoryHost
from tests.reference.one_copy import check_rows

SECRET = "s3cret"
MAX_CONTEXT = 2048
MAX_REQS = 16


class CountingAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]
    """SGLang's slot allocator that refuses a slot which is free already."""

    contents: dict[int, Any]
    """What a slot holds, for a scheduler that keeps it; a freed slot holds nothing."""

    def clear(self) -> None:
        super().clear()
        self.contents = {}

    def free(self, free_index: torch.Tensor) -> None:
        slots = Counter(free_index.tolist())
        twice = {slot for slot, num in slots.items() if num > 1}
        twice |= slots.keys() & set(self.free_pages.tolist())
        assert not twice, f"slots freed twice: {sorted(twice)}"
        for slot in slots:
            self.contents.pop(slot, None)
        super().free(free_index.to(torch.int64))

    def extend(self, start: int, end: int, last_slot: int) -> torch.Tensor | None:
        """Slots for a request's tokens `[start, end)`."""
        slots: torch.Tensor | None = self.alloc(end - start)
        return slots


class MLATokenToKVPool:
    """By its name SGLang's. What it copies may be freed, but not written to since."""

    def __init__(self, pages: CountingPages) -> None:
        self._pages, self.page_size = pages, pages.page_size

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        held = self._pages.freed | self._pages.contents
        for target, slot in zip(tgt_loc.tolist(), src_loc.tolist(), strict=True):
            self._pages.contents[target] = held.get(slot)


class CountingPages(PagedTokenToKVPoolAllocator if PAGES_WITHOUT_TRITON else PagedAllocator):  # type: ignore[misc]
    """The same of pages."""

    contents: dict[int, Any]

    def clear(self) -> None:
        super().clear()
        self.contents, self.freed = {}, dict[int, Any]()

    def free(self, free_index: torch.Tensor) -> None:
        pages = {slot // self.page_size for slot in free_index.tolist()}
        twice = pages & set(self.free_pages.tolist())
        assert not twice, f"pages freed twice: {sorted(twice)}"
        for slot in [each for each in self.contents if each // self.page_size in pages]:
            self.freed[slot] = self.contents.pop(slot)
        super().free(free_index.to(torch.int64))

    def get_kvcache(self) -> MLATokenToKVPool:
        return MLATokenToKVPool(self)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        assert start_pos % self.page_size == 0
        pages = (free_index // self.page_size).tolist()
        assert pages[:: self.page_size] == list(dict.fromkeys(pages)), "SGLang would free others"
        self.free(free_index)

    def extend(self, start: int, end: int, last_slot: int) -> torch.Tensor | None:
        ends = [torch.tensor([end])] * 2
        starts = [torch.tensor([start])] * 2
        slots: torch.Tensor | None = self.alloc_extend(
            *starts, *ends, torch.tensor([last_slot]), end - start
        )
        return slots


class FakeReq:
    """What the cache reads and writes of a `Req`."""

    def __init__(
        self,
        token_ids: Sequence[int],
        custom_params: Any = None,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.rid, self.origin_input_ids = str(id(self)), array("q", token_ids)
        self.output_ids = array("q")
        self.extra_key, self.cache_salt = extra_key, cache_salt
        if isinstance(custom_params, RequestSpans):
            custom_params = packed(custom_params, self.origin_input_ids)
        self.sampling_params = SimpleNamespace(custom_params=custom_params, max_new_tokens=16)
        self.kv, self.time_stats = ReqKvInfo(), SchedulerReqTimeStats()
        self.priority = 0
        self.last_node: Any = None
        self.best_match_node: Any = None
        self.host_hit_length = 0
        releases.drop_prefix(self)
        self.lock: Any = None
        setattr(self, releases.DROPPED, None)
        self.skip_radix_cache_insert = False
        self.customized_info: dict[str, list[Any]] | None = None
        self.filled = 0

    @property
    def all_ids(self) -> array[int]:
        return self.origin_input_ids + self.output_ids

    def _compute_max_prefix_len(self, input_len: int) -> int:
        return max(0, input_len - 1)

    full_untruncated_fill_ids = all_ids

    @property
    def extend_end(self) -> int:
        return self.filled

    def refresh_fill_ids(self) -> None: ...
    def finished(self) -> bool:
        return False

    def get_fill_ids(self) -> array[int]:
        return self.all_ids[: self.filled]

    def owned_kv_len(self) -> int:
        return int(self.kv.kv_committed_len)


def marked(
    spans: Sequence[tuple[int, int]],
    *,
    namespace: str = "n",
    promoted_len: int = 0,
    ack: Acknowledgement = NOTHING_READ,
    keep: Iterable[int] = (),
    **fields: Any,
) -> RequestSpans:
    """A request of the front, the chunks' ids to be filled in with its tokens."""
    nameless = tuple(Span(start, end, ChunkId("")) for start, end in spans)
    return RequestSpans(nameless, namespace, promoted_len, ack, frozenset(keep), **fields)


def packed(request: RequestSpans, token_ids: Sequence[int]) -> dict[str, str]:
    """The `custom_params` of the request with these tokens."""
    spans = (Span(start, end, chunk_id(token_ids[start:end])) for start, end, _ in request.spans)
    return pack(structs.replace(request, spans=tuple(spans)), secret=SECRET)


def answer_of(req: FakeReq) -> Answer:
    """What travels with the request's first token."""
    assert req.customized_info is not None
    (text,) = req.customized_info[ANSWER_KEY]
    return decode(text, Answer)


class Round:
    """As `PrefillAdder`: what the line reads of it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self.preempt_list = scheduler, list[Any]()

    @property
    def can_run_list(self) -> list[Any]:
        return [req for req, _ in self._scheduler.batch]

    @property
    def running_batch(self) -> Any:
        return SimpleNamespace(reqs=self._scheduler.running)

    @property
    def memory_budget(self) -> Any:
        return SimpleNamespace(current_offset=self._scheduler._num_planned())

    @property
    def rem_chunk_tokens(self) -> int | None:
        budget = self._scheduler.prefill_budget
        if budget is None or not self._scheduler.is_chunked:
            return None
        return budget - self._scheduler._num_planned()


class Scheduler:
    """One rank: pools, cache and the life of requests."""

    def __init__(
        self,
        capacity: int,
        config: ChunkCacheConfig | None,
        *,
        force_miss: bool = False,
        prefill_budget: int | None = None,
        is_chunked: bool = True,
        page_size: int = 1,
        rows: Any = None,
        host_slots: int = 0,
        host_pool: Any = None,
        allocator: Any = None,
        create_tiers: Callable[[HostChains], Tiers] = Tiers,
    ) -> None:
        """`config` None: SGLang's own RadixCache.

        Args:
            rows: SGLang's `ReqToTokenPool`. None: one of its own.
            allocator: SGLang's, with `extend`. None: one of its own, which counts.
            prefill_budget: tokens that one batch extends by, None for any number.
            host_slots: of a pool in host memory; 0: none, unless `host_pool` is one.
            is_chunked: whether prompts are cut to the budget; else a batch's first may exceed it.
        """
        self.capacity, self.force_miss = capacity, force_miss
        self.prefill_budget, self.is_chunked = prefill_budget, is_chunked
        self.batch: list[tuple[FakeReq, int]] = []  # what the next `forward` computes: up to where
        self.running: list[FakeReq] = []
        self.page_size = page_size
        if allocator is None:
            how: Any = (torch.float32, "cpu", None, False)
            allocator = (
                CountingAllocator(capacity, *how)
                if page_size == 1
                else CountingPages(capacity, page_size, *how)
            )
        self.allocator: Any = allocator
        has_rows = isinstance(allocator, VirtualAllocator)
        self.num_slots = allocator.slot_map.num_slots if has_rows else capacity
        self.rows = rows or ReqToTokenPool(MAX_REQS, MAX_CONTEXT, "cpu", False)
        params = CacheInitParams(False, self.rows, self.allocator, page_size)
        self.cache: Any
        if config is None:
            self.cache = RadixCache(params)
            return
        held: Any = host_slots and MemoryHost(lambda: self.allocator.contents, host_slots)
        pool = host_pool or held or NoSlots()
        index = create_index(config, max(1, pool.num_slots * pool.token_bytes))
        kind: type[ChunkRadixCache] = PagedRadixCache if page_size > 1 else ChunkRadixCache
        self.cache = (OneCopyRadixCache if has_rows else kind)(
            params,
            config,
            lambda tree: create_tiers(
                HostChains(tree, pool, FixedCosts(), index, has_captured=config.reuse == "fused")
            ),
        )

    def queue(self, req: FakeReq) -> None:
        """As `SchedulePolicy` finds a waiting request's place."""
        releases.match_in_queue(self.cache, req)
        if self.force_miss:
            releases.drop_prefix(req)
            req.host_hit_length = 0

    def match(self, req: FakeReq) -> int:
        """As `Req.init_next_round_input`; returns the matched length."""
        ids = req.all_ids
        key = RadixKey(ids, req.extra_key, limit=max(0, len(ids) - 1), cache_salt=req.cache_salt)
        result = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        if self.force_miss:
            result = zero_match_result(self.cache, result)
        releases.take(req, result)
        req.last_node = result.last_device_node
        req.best_match_node, req.host_hit_length = result.best_match_node, result.host_hit_length
        req.kv.cache_protected_len = releases.found(req)
        return releases.found(req)

    def admit(self, req: FakeReq, num_tokens: int) -> int | None:
        """A batch of its own: `add` and compute the first piece."""
        matched = self.add(req, num_tokens)
        if matched is not None:
            self.forward()
        return matched

    def add(self, req: FakeReq, num_tokens: int, adder: Round | None = None) -> int | None:
        """Ask for it in a round, by default one of its own unless there is a batch: match, then
        as our hook.

        Returns:
            Tokens that need not be prefilled; None: not with this batch.
        """
        self.match(req)
        if not isinstance(self.cache, ChunkRadixCache):
            return self._add(req, num_tokens)
        if adder is not None or not self.batch:
            self._round = adder or Round(self)
        found: list[int | None] = [None]

        def add() -> bool:
            found[0] = self._add(req, num_tokens)
            return True

        self.cache.line.add(self._round, req, add, lambda: self.match(req))
        return found[0]

    def _add(self, req: FakeReq, num_tokens: int) -> int | None:
        """As `PrefillAdder.add_one_req`: take what is promised, lock, into the batch with a first
        piece."""
        node = req.last_node
        self.cache.inc_lock_ref(node)
        try:
            end = self._load_back(req, num_tokens)
            if end is None:
                req.kv.cache_protected_len = 0
                return None
            releases.lock(self.cache, req)
        finally:
            self.cache.dec_lock_ref(node)
        matched = releases.found(req)
        req.filled = req.kv.kv_committed_len = req.kv.kv_allocated_len = matched
        self.batch.append((req, end))
        return matched

    def extend(self, req: FakeReq, end: int) -> bool:
        """The next piece of a request under way, up to `end` or the budget, into the batch.
        False if slots are short."""
        if self.prefill_budget is not None:
            end = min(end, req.filled + self.prefill_budget - self._num_planned())
        if end <= req.filled or self._num_free() < self._need(req.filled, end):
            return False
        self.batch.append((req, end))
        return True

    def forward(self) -> None:
        """Allocate for the batch and compute it.
        Others decode next, after which nothing is put off that is to be copied."""
        batch, self.batch = self.batch, []
        for req, end in batch:
            if req.kv.req_pool_idx is None:
                (req.kv.req_pool_idx,) = self.rows.alloc_rows(1)
                row = (req.kv.req_pool_idx, slice(0, req.filled))
                self.rows.write(row, releases.prefix_slots(self.cache, req).to(torch.int32))
            self._allocate(req, end)
        if batch:
            with self._around(ForwardMode.EXTEND, batch):
                self._compute([(req, req.filled, end) for req, end in batch])
        with self._around(ForwardMode.DECODE):
            """Of others."""
        for req, end in batch:
            req.filled = req.kv.kv_committed_len = end
            if req not in self.running:
                self.running.append(req)

    def stash(self, req: FakeReq) -> None:
        """Between two pieces: what is computed goes into the tree, whole chunks only."""
        releases.checkpoint(self.cache, req, is_middle=True)

    def prefill(self, req: FakeReq, num_tokens: int) -> bool:
        """The next piece, at most `num_tokens`, after a `stash`. False if slots are short."""
        if not self.extend(req, min(len(req.all_ids), req.filled + num_tokens)):
            return False
        self.forward()
        return True

    def is_prefilled(self, req: FakeReq) -> bool:
        return req.filled == len(req.all_ids)

    def sample(self, req: FakeReq, token: int) -> None:
        """The prompt is computed: its first token is out and the prompt goes into the tree."""
        req.output_ids.append(token)
        releases.checkpoint(self.cache, req, is_middle=False)

    def decode(self, req: FakeReq, token: int) -> bool:
        """One more token."""
        if not self.extend(req, len(req.all_ids)):
            return False
        self.forward()
        req.output_ids.append(token)
        return True

    def release(self, req: FakeReq, *, is_insert: bool) -> None:
        """The request ends, is aborted or retracted: SGLang's own `release_kv_cache`."""
        with without_server_args():
            releases.release(self.cache, req, is_insert=is_insert)
        self.running = [each for each in self.running if each is not req]
        req.last_node = None
        req.filled = req.kv.kv_committed_len = req.kv.cache_protected_len = 0

    def serve(self, req: FakeReq, *, piece: int = 10**6, answer: Sequence[int] = ()) -> int:
        """A whole request at once; returns its matched length."""
        matched = self.admit(req, piece)
        assert matched is not None, "slots are short"
        while not self.is_prefilled(req):
            self.stash(req)
            assert self.prefill(req, piece), "slots are short"
        if answer:
            self.sample(req, answer[0])
            for token in answer[1:]:
                assert self.decode(req, token), "slots are short"
        self.release(req, is_insert=True)
        return matched

    def evict(self, num_tokens: int) -> int:
        return int(self.cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted)

    def slots(self, req: FakeReq, start: int, end: int) -> list[int]:
        """Slots of the request's row."""
        if start >= end:
            return []  # a request that is only added has no row yet
        return [int(slot) for slot in self.rows.req_to_token[req.kv.req_pool_idx, start:end]]

    def free_slots(self) -> list[int]:
        """Or pages."""
        return [int(slot) for slot in self.allocator.free_pages]

    def tree_slots(self) -> list[int]:
        return [int(slot) for _, node in walk(self.cache) for slot in node.value]

    def check(self, reqs: Sequence[FakeReq] = ()) -> None:
        """Every page has one owner, and the books agree. Without pages each slot is one."""
        page, tree = self.page_size, self.tree_slots()
        own = [each for req in reqs for each in {slot // page for slot in self._own(req)}]
        assert tree == [slot - slot % page + n % page for n, slot in enumerate(tree)], "cut pages"
        owners = sorted([*own, *self.free_slots(), *(slot // page for slot in tree[::page])])
        assert owners == list(range(1, self.num_slots // page + 1)), f"the requests have {own}"
        booked = self.cache.evictable_size_ + self.cache.protected_size()
        assert page * len(self.free_slots()) + booked + page * len(own) == self.num_slots
        if isinstance(self.cache, OneCopyRadixCache):
            check_rows(self.allocator, [node for _, node in walk(self.cache)], own)
        if isinstance(self.cache, ChunkRadixCache):
            check_integrity(self.cache)

    def _own(self, req: FakeReq) -> list[int]:
        if req.kv.req_pool_idx is None:  # only added: it has no more than what was promised
            promised = state(req).promised
            return [] if promised is None else promised.tolist()
        return self.slots(req, req.kv.cache_protected_len, req.kv.kv_allocated_len)

    def _load_back(self, req: FakeReq, num_tokens: int) -> int | None:
        """Where the first piece ends, after what is promised."""
        end = self._piece_end(req, req.host_hit_length, num_tokens)
        if end is None or not (promised := req.host_hit_length):
            return end
        loaded = self.cache.init_load_back(
            InitLoadBackParams(req.best_match_node, promised, req=req)
        )
        if loaded is None:
            assert state(req).is_put_off, "SGLang would end admission for all"
            return None
        num_loaded = releases.take_loaded(self.cache, req, loaded)
        assert num_loaded in (0, promised), "SGLang dies of a promise kept in part"
        if not num_loaded:
            end = self._piece_end(req, 0, num_tokens)
        return end

    def _piece_end(self, req: FakeReq, promised: int, num_tokens: int) -> int | None:
        """None where the budget or the free slots do not allow for it."""
        start = releases.found(req) + promised
        end = min(len(req.all_ids), start + num_tokens) if self.is_chunked else len(req.all_ids)
        if self.prefill_budget is not None:
            left = self.prefill_budget - self._num_planned()
            if self.is_chunked:
                end = min(end, start + left)
            if left <= 0 or (not self.is_chunked and self.batch and end - start >= left):
                return None
        return end if promised + self._need(start, end) <= self._num_free() else None

    def _num_free(self) -> int:
        """Slots that can be had besides those promised to the batch."""
        idle = int(self.allocator.available_size() + self.cache.evictable_size())
        return idle - self._num_planned()

    def _num_planned(self) -> int:
        return sum(self._need(req.filled, end) for req, end in self.batch)

    def _need(self, start: int, end: int) -> int:
        """Slots for tokens `[start, end)` of a request that has its page at `start`."""
        return (-(-end // self.page_size) - -(-start // self.page_size)) * self.page_size

    def _allocate(self, req: FakeReq, end: int) -> None:
        start = req.kv.kv_allocated_len
        need = self._need(start, end)
        if self.allocator.available_size() < need:
            self.evict(need - self.allocator.available_size())
        last_slot = (self.slots(req, start - 1, start) if start else [-1])[0]
        slots = self.allocator.extend(start, end, last_slot)
        assert slots is not None, f"SGLang dies: no slots for {need} admitted tokens"
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), slots.to(torch.int32))
        req.kv.kv_allocated_len = end

    def _around(
        self, mode: ForwardMode, batch: Sequence[tuple[FakeReq, int]] = ()
    ) -> AbstractContextManager[None]:
        """As our hook, around a forward of SGLang's batch."""
        told = SimpleNamespace(
            forward_mode=mode,
            reqs=[req for req, _ in batch],
            prefix_lens=[req.filled for req, _ in batch],
            extend_lens=[end - req.filled for req, end in batch],
            out_cache_loc=torch.tensor(
                [slot for req, end in batch for slot in self.slots(req, req.filled, end)],
                dtype=torch.int64,
                device=self.rows.req_to_token.device,
            ),
        )
        if not isinstance(self.cache, ChunkRadixCache):
            return nullcontext()
        return self.cache.around_forward(told)

    def _compute(self, batch: Sequence[tuple[FakeReq, int, int]]) -> None:
        """What the model does with (request, start, end); nothing here."""


def walk(cache: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(keys from the root down to it, node) for every node."""
    stack: list[tuple[tuple[Any, ...], Any]] = [((), cache.root_node)]
    while stack:
        path, node = stack.pop()
        path = (*path, node.key)
        stack.extend((path, child) for child in node.children.values())
        if node is not cache.root_node:
            yield path[1:], node


_RELEASES = threading.Lock()


@contextmanager
def without_server_args() -> Iterator[None]:
    """`release_kv_cache` asks two settings of a server that does not run here.
    One thread at a time."""
    common = "sglang.srt.mem_cache.common"
    settings = SimpleNamespace(speculative_algorithm=None, strip_thinking_cache=False)
    with (
        _RELEASES,
        mock.patch(f"{common}.get_spec", return_value=settings),
        mock.patch(f"{common}.get_serving", return_value=settings),
    ):
        yield


SCORED: dict[str, Any] = {"selectors": "eval.selectors", "selector": "h2o"}
"""A server that scores all that it stores."""


def config(**knobs: Any) -> ChunkCacheConfig:
    """A configuration with the test's secret."""
    return ChunkCacheConfig(**{"secret": SECRET, **knobs})
