"""Our server with a KV pool in which every free slot holds NaN: a request that reads such a slot
answers NaN.

    python -m tests.e2e.poisoned_server --model-path M [our flags] [any SGLang flag]

Slots are poisoned when the pool is made or cleared, and when they become free: at the end of a
group for frees that SGLang groups; in pages from 0.5.22 on, and behind the copies of page rests.
Slot 0 is poisoned too: it belongs to padding, and rows of the request table that were never written
point to it. On the CPU a forward pass is over when its call returns, so no forward still reads what
is freed; on a GPU, where the next batch is scheduled beside it, the poison is queued behind it.

Loads from host memory come beside forwards and passes, however short they are. What an exact
request loads is compared, bit by bit, with what was saved; a difference ends the scheduler. On the
CPU alone: comparing waits for the device.

With one copy of a chunk it is rows that are poisoned, with the last slot that means them, and
SGLang's checks of the pool check the map of slots, too. A row that is written has one slot.

SGLang's processes import the main module again, so that the patches below are in the scheduler as
well. With `SABOTAGE_VAR` naming a file, moving KV on the device does nothing while that file
exists: the promised slots stay as they were allocated; if it has text, filling them raises that as
an error, and so does computing them instead. Calibrating takes the time that it takes.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# first: defines the operators without which nothing of SGLang is imported
from sglang_chunkcache import launch_server

# isort: split
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import unwrap_write_loc
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_chunkcache.attention.slot_map import MappedPool, SlotMap, rows_of
from sglang_chunkcache.cpu.one_copy import OneCopyPool
from sglang_chunkcache.scheduler.one_copy import OneCopyRadixCache
from sglang_chunkcache.scheduler.page_rests import PageRests

SABOTAGE_VAR = "POISONED_SERVER_SABOTAGE"

_clear, _free = TokenToKVPoolAllocator.clear, TokenToKVPoolAllocator.free
_clear_pages = PagedTokenToKVPoolAllocator.clear
_release_pages = getattr(PagedTokenToKVPoolAllocator, "_release_page_ids", None)


_init_runner = ModelRunner.__init__
_runners: list[Any] = []
_pools: list[Any] = []
_drop, _in_slots = SlotMap._drop, OneCopyRadixCache.in_slots
_set_kv = OneCopyPool.set_kv_buffer
_init_rests, _copy_rests = PageRests.__init__, PageRests.copy
_rests: list[PageRests] = []
_released: list[torch.Tensor] = []
"""Slots that are free, and are poisoned once rests are copied."""


def _keep_runner(runner: Any, *args: Any, **kwargs: Any) -> None:
    _runners.append(runner)  # before it makes its pool
    _init_runner(runner, *args, **kwargs)


def poison(pool: Any, slots: torch.Tensor | slice) -> None:
    """NaN into keys and values of all layers."""
    with _behind_forwards(slots):
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[slots] = float("nan")


def _behind_forwards(slots: torch.Tensor | slice) -> Any:
    stream = getattr(_runners[-1], "forward_stream", None) if _runners else None
    if not isinstance(stream, torch.cuda.Stream):
        return nullcontext()
    stream.wait_stream(torch.cuda.current_stream())
    if isinstance(slots, torch.Tensor):
        slots.record_stream(stream)
    return torch.cuda.stream(stream)


def _poisoning_clear(allocator: Any) -> None:
    _clear(allocator)
    _pools.append(allocator._kvcache)
    poison(allocator._kvcache, slice(None))


def _poisoning_free(allocator: Any, free_index: torch.Tensor) -> None:
    _free(allocator, free_index)
    is_mapped = isinstance(allocator._kvcache, MappedPool)
    if allocator.free_group is None and free_index.numel() and not is_mapped:
        poison(allocator._kvcache, free_index)


def _poisoning_drop(slot_map: SlotMap, rows: torch.Tensor, *, holders: int) -> None:
    first = slot_map._num_unused
    _drop(slot_map, rows, holders=holders)
    poison(_pools[-1], slot_map._free[first : slot_map._num_unused])


def _checking_in_slots(cache: Any, stats: Any) -> Any:
    violations = cache._slot_map.violations()
    assert violations == [], violations
    return _in_slots(cache, stats)


def _checking_set_kv(pool: Any, layer: Any, loc_info: Any, *kv: Any, **how: Any) -> None:
    slots, *_ = unwrap_write_loc(loc_info)
    owners = pool.slot_map._owners[pool.slot_map.rows(slots)]
    assert owners.max() <= 1, "a row is written that others hold"
    _set_kv(pool, layer, loc_info, *kv, **how)


def _poisoning_clear_pages(allocator: Any) -> None:
    _clear_pages(allocator)
    poison(allocator._kvcache, slice(None))


def _poisoning_release(allocator: Any, *page_ids: torch.Tensor) -> None:
    assert _release_pages is not None
    _release_pages(allocator, *page_ids)
    in_page = torch.arange(allocator.page_size, device=allocator.device)
    for each in page_ids:
        slots = (each[:, None] * allocator.page_size + in_page).flatten()
        if any(rests._pending for rests in _rests):
            _released.append(slots)
        else:
            poison(allocator._kvcache, slots)


def _keep_rests(rests: PageRests, *args: Any) -> None:
    _init_rests(rests, *args)
    _rests.append(rests)


def _copying_rests(rests: PageRests) -> None:
    """What was freed since a source was found may be that source."""
    copied = [slots for *_, slots in rests._pending]
    _copy_rests(rests)
    if _released:
        freed = torch.cat(_released)
        _released.clear()
        poison(rests._pool, freed[~torch.isin(freed, torch.cat(copied))])


def install() -> None:
    """Patch SGLang's allocators in this process."""
    ModelRunner.__init__ = _keep_runner
    TokenToKVPoolAllocator.clear, TokenToKVPoolAllocator.free = _poisoning_clear, _poisoning_free
    SlotMap._drop = _poisoning_drop  # type: ignore[method-assign, assignment]
    OneCopyRadixCache.in_slots = _checking_in_slots  # type: ignore[method-assign, assignment]
    OneCopyPool.set_kv_buffer = _checking_set_kv  # type: ignore[method-assign, assignment]
    PagedTokenToKVPoolAllocator.clear = _poisoning_clear_pages
    if _release_pages is not None:
        PagedTokenToKVPoolAllocator._release_page_ids = _poisoning_release
        PageRests.__init__ = _keep_rests  # type: ignore[method-assign, assignment]
        PageRests.copy = _copying_rests  # type: ignore[method-assign, assignment]


def _install_sabotage(switch: Path) -> None:
    from sglang_chunkcache.fusion import moving
    from sglang_chunkcache.fusion.fill import FusionPass
    from sglang_chunkcache.fusion.relocate import copy_moved

    def copy_unless_sabotaged(*args: Any, **kwargs: Any) -> None:
        if not switch.exists():
            copy_moved(*args, **kwargs)

    assert vars(moving)["copy_moved"] is copy_moved
    vars(moving)["copy_moved"] = copy_unless_sabotaged
    run = FusionPass.run

    def run_unless_sabotaged(fusion_pass: Any, moves: Any) -> Any:
        if switch.exists() and (error := switch.read_text()):
            raise RuntimeError(error)
        return run(fusion_pass, moves)

    setattr(FusionPass, "run", run_unless_sabotaged)  # noqa: B010 (mypy takes no assignment)


def _compare_loads() -> None:
    """KV that exact requests load is what its host slots were given, when its forward is over."""
    from sglang_chunkcache.scheduler.host_pool import HostPool

    save, write, load, finish = HostPool.save, HostPool.write, HostPool.load, HostPool.finish
    saved: dict[int, bytes] = {}
    loaded: list[tuple[torch.Tensor, list[bytes]]] = []

    def note(slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        saved.update(zip(slots.tolist(), _bits(keys, values), strict=True))

    def noting_save(pool: Any, device_slots: torch.Tensor, slots: torch.Tensor) -> Any:
        if type(pool) is HostPool:
            note(slots, *_sides(pool._device_pool, device_slots))
        return save(pool, device_slots, slots)

    def noting_write(pool: Any, slots: torch.Tensor, *kv: torch.Tensor) -> None:
        if type(pool) is HostPool:
            note(slots, *kv)
        write(pool, slots, *kv)

    def noting_load(pool: Any, slots: torch.Tensor, device_slots: torch.Tensor, **how: Any) -> None:
        loaded.append((device_slots, [saved[slot] for slot in slots.tolist()]))
        load(pool, slots, device_slots, **how)

    def comparing_finish(pool: Any) -> bool:
        has_failed = finish(pool)
        for device_slots, given in loaded:
            assert _bits(*_sides(pool._device_pool, device_slots)) == given, "other bits are loaded"
        loaded.clear()
        return has_failed

    instead = (noting_save, noting_write, noting_load, comparing_finish)
    for name, each in zip(("save", "write", "load", "finish"), instead, strict=True):
        setattr(HostPool, name, each)


def _sides(pool: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [num_layers, num_tokens, num_kv_heads, head_dim] each."""
    rows = rows_of(pool)(slots)
    keys, values = (
        torch.stack([layer[rows] for layer in side]) for side in (pool.k_buffer, pool.v_buffer)
    )
    return keys, values


def _bits(keys: torch.Tensor, values: torch.Tensor) -> list[bytes]:
    """A digest of each token's."""
    both = torch.stack((keys, values)).movedim(2, 0).contiguous().flatten(1).view(torch.uint8)
    return [hashlib.blake2b(each.tobytes(), digest_size=16).digest() for each in both.numpy()]


def _calibrate_on_all_prompts() -> None:
    """However slow the machine is."""
    from sglang_chunkcache.fusion import calibration_trial

    vars(calibration_trial)["MAX_SECONDS"] = float("inf")


def _hide_all_loads() -> None:
    from sglang_chunkcache.scheduler import layer_loads

    vars(layer_loads)["WORTH_HIDING_S"] = 0.0


if __name__ in ("__main__", "__mp_main__"):
    install()
    _hide_all_loads()
    if not torch.cuda.is_available():
        _compare_loads()
    if os.environ.get(SABOTAGE_VAR):
        _install_sabotage(Path(os.environ[SABOTAGE_VAR]))
        _calibrate_on_all_prompts()
if __name__ == "__main__":
    launch_server.main(sys.argv[1:])
