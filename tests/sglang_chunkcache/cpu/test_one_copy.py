"""SGLang's allocator over virtual slots: rows run out first, and what is evicted frees rows. And
decoding over rows that several sequences read at other positions."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from torch.nn.functional import scaled_dot_product_attention

from sglang_chunkcache.attention.slot_map import Groups, MappedSide, SlotMap
from sglang_chunkcache.cpu.one_copy import OneCopyAttention
from sglang_chunkcache.fusion.relocate import RotaryTable
from tests.reference.one_copy import CountingVirtual
from tests.reference.scheduler import Scheduler, config

ROWS, SLOTS = 20, 60


def make_scheduler() -> Scheduler:
    return Scheduler(ROWS, config(), allocator=CountingVirtual.of(ROWS, SLOTS))


def insert(scheduler: Scheduler, token: int, slots: torch.Tensor) -> None:
    ids = array("q", [token] * len(slots))
    scheduler.cache.insert(InsertParams(key=RadixKey(ids), value=slots))


def shared(scheduler: Scheduler, of: torch.Tensor) -> torch.Tensor:
    slots: torch.Tensor = scheduler.allocator.take(len(of))
    at, slot_map = torch.arange(len(of)), scheduler.allocator.slot_map
    slot_map.share(slots, slot_map.rows(of), old=at, new=at)
    return slots


def test_rows_run_out_before_slots() -> None:
    """SGLang is told none are free, and gets none."""
    allocator = make_scheduler().allocator
    slots = allocator.alloc(ROWS)
    assert (allocator.available_size(), allocator.num_free_slots) == (0, SLOTS - ROWS)
    assert allocator.alloc(1) is None
    allocator.free_group_begin()
    allocator.free(slots[:5])
    assert allocator.available_size() == 0
    allocator.free_group_end()
    assert allocator.available_size() == 5
    allocator.clear()
    assert allocator.available_size() == ROWS


def test_slots_can_run_out_first() -> None:
    scheduler = make_scheduler()
    own = scheduler.allocator.alloc(10)
    for _ in range(5):
        shared(scheduler, own)
    assert scheduler.allocator.slot_map.num_free == 10
    assert scheduler.allocator.available_size() == 0


def test_retraction_frees_rows_or_goes_on() -> None:
    """`check_decode_capacity` decides whether SGLang retracts. A request that gives back only what
    it shares makes no room; a request in use keeps the rows that the tree evicts."""
    scheduler = make_scheduler()
    allocator, cache = scheduler.allocator, scheduler.cache
    source, alone = allocator.alloc(12), allocator.alloc(4)
    running, retracted = shared(scheduler, source), shared(scheduler, source)
    insert(scheduler, 1, source)
    insert(scheduler, 2, alone)
    assert cache.evictable_size() == 4, "the source's rows are read by what runs"
    assert allocator.check_decode_capacity(num_tokens=8, tree_cache=cache)
    assert not allocator.check_decode_capacity(num_tokens=9, tree_cache=cache)
    allocator.free(retracted)
    assert not allocator.check_decode_capacity(num_tokens=9, tree_cache=cache)
    allocator.free(running)
    assert allocator.check_decode_capacity(num_tokens=ROWS, tree_cache=cache)
    assert (allocator.slot_map.num_used, allocator.slot_map.violations()) == (0, [])


def test_eviction_goes_on_until_rows_are_free() -> None:
    """Two nodes that share rows free them together."""
    scheduler = make_scheduler()
    own = scheduler.allocator.alloc(10)
    insert(scheduler, 2, shared(scheduler, own))
    insert(scheduler, 1, own)
    assert scheduler.cache.evictable_size() == 10
    assert scheduler.cache.evict(EvictParams(num_tokens=3)).num_tokens_evicted == 20
    assert scheduler.allocator.available_size() == ROWS


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_decoding_equals_turned_copies(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sequence that shares two chunks at other positions, some of their tokens recomputed; an
    exact one beside it is SGLang's bit for bit."""
    rng = torch.Generator().manual_seed(0)
    angles = torch.arange(64.0)[:, None] * 0.3 ** torch.arange(0, 4)
    slot_map = SlotMap(64, 128)
    slot_map.turn_by(RotaryTable(angles.cos(), angles.sin(), is_neox=True))
    keys, values = torch.randn(2, 65, 2, 8, generator=rng, dtype=dtype)
    source, own, moved = torch.arange(1, 31), torch.arange(31, 41), torch.arange(41, 61)
    slot_map.assign(torch.cat([source, own]))
    at = torch.arange(30)
    slot_map.share(moved[:10], slot_map.rows(source[20:]), old=at[20:], new=at[:10])
    slot_map.share(moved[10:], slot_map.rows(source[:10]), old=at[:10], new=at[10:20])
    slot_map.own(moved[[3, 12]], reserved=0)
    rows = torch.zeros(2, 40, dtype=torch.int32)
    rows[0, :30] = torch.cat([moved, own])
    rows[1, :30] = source
    queries, lens = torch.randn(2, 4, 8, generator=rng, dtype=dtype), torch.tensor([30, 30])
    apart = torch.arange(80).view(2, 40)

    def decode(kind: type, sides: list[Any], row_slots: torch.Tensor) -> torch.Tensor:
        backend: Any = object.__new__(kind)
        places = row_slots, torch.arange(2), lens
        how = {"scaling": 0.4, "enable_gqa": True}
        out = torch.empty_like(queries)
        return backend._run_sdpa_forward_decode(queries, out, *sides, *places, **how)  # type: ignore[no-any-return]

    sides = [MappedSide(slot_map, side, are_keys=side is keys) for side in (keys, values)]
    got = decode(OneCopyAttention, sides, rows)
    expected = decode(TorchNativeAttnBackend, [side[rows.flatten()] for side in sides], apart)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
    assert torch.equal(got[1], expected[1])
    monkeypatch.setattr(slot_map, "_turns", None)
    with pytest.raises(AssertionError, match="told before"):
        decode(OneCopyAttention, sides, rows.clone())


def test_large_products_are_not_rounded() -> None:
    """Keys of some models have a common part, which a query's product with a key is mostly of."""
    torch.manual_seed(0)
    bias = 8 * torch.randn(2, 64)
    keys, values = (torch.randn(401, 2, 64) + bias).bfloat16(), torch.randn(401, 2, 64).bfloat16()
    query = (torch.randn(4, 64) + bias.repeat_interleave(2, 0)).bfloat16()
    groups = Groups(torch.arange(1, 401), [150, 250], lambda keys: keys)
    got = groups.attend(query, keys, values, 0.125).float()
    seen, held = (side[1:].float().transpose(0, 1)[None] for side in (keys, values))
    expected = scaled_dot_product_attention(
        query.float()[None, :, None], seen, held, scale=0.125, enable_gqa=True
    )[0, :, 0]
    assert float((got - expected).norm() / expected.norm()) < 0.01
