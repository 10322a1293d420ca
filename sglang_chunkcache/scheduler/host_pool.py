"""KV in host memory: HiCache's host pool without HiCache. Copies keep the forward stream's order.

A slot that is copied from, or to, was given out before and may be given out again once the forward
is queued: what reads or writes it later does so on the same stream, which has waited by then for
copies beside it (layer_loads.py). So a copy needs no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from radix_ext.costs import Phase, Work
from sglang_chunkcache import compat
from sglang_chunkcache.attention.slot_map import rows_of
from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.scheduler.layer_loads import LayerLoads
from sglang_chunkcache.scheduler.pricing import Pricing
from sglang_chunkcache.storage.codec import NONE, Codec


class HostPool:
    """Slots of `token_bytes` each. On CUDA memory is pinned and SGLang's kernels copy, else torch.

    Args:
        device_pool: SGLang's, one that `HostMemory` takes.
        is_layered: prefills ask the getters for each layer, so loads may go on beside them.
        loads_into: the pool whose getters wait for loads from now on. None: `device_pool`.

    Raises:
        ValueError: so much host memory is not there.
    """

    codec: Codec = NONE
    saved_token_bytes = 0
    """How many fewer a token takes than in the device pool's dtype."""

    def __init__(
        self, device_pool: Any, num_bytes: int, *, is_layered: bool = True, loads_into: Any = None
    ) -> None:
        self._device_pool, self._loads_into = device_pool, loads_into or device_pool
        self._is_cuda = torch.device(device_pool.device).type == "cuda"
        self._pool = compat.create_host_pool(
            device_pool, num_bytes, pin_memory=self._is_cuda, label="chunk cache"
        )
        self.token_bytes: int = self._pool.size_per_token
        self.num_slots: int = self._pool.size
        self._bytes: list[Any] = [
            each.view(torch.uint8).numpy() for each in (self._pool.k_buffer, self._pool.v_buffer)
        ]
        self._stream: Any = None  # the forward stream, known with the first forward
        self.num_layers: int = self._pool.layer_num
        self.is_layered = is_layered
        self.loads = LayerLoads.of(self._loads_into)

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.num_slots * self.token_bytes

    @property
    def num_free(self) -> int:
        return int(self._pool.available_size())

    def alloc(self, num_tokens: int) -> Tensor | None:
        """[num_tokens] int64, CPU. None: so many are not free."""
        return self._pool.alloc(num_tokens)  # type: ignore[no-any-return]

    def free(self, slots: Tensor) -> None:
        self._pool.free(slots)

    def fence(self) -> Callable[[], None]:
        """Waits, on any thread, until the copies that are queued by now are done."""
        if self._stream is None:
            return lambda: None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return lambda: event.synchronize()

    def read(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Keys and values, [num_layers, num_tokens, num_kv_heads, head_dim] each, copied; on any
        thread, behind a `fence`. By numpy, on one core, as all that runs beside a forward: torch
        would take all cores from it."""
        taken = (each.take(slots.numpy(), axis=1) for each in self._bytes)
        # in pages a chunk may have no slot, and numpy gives such an array no strides
        keys, values = (
            torch.from_numpy(each) if each.size else torch.empty(each.shape, dtype=torch.uint8)
            for each in taken
        )
        return keys.view(self._pool.dtype), values.view(self._pool.dtype)

    def write(self, slots: Tensor, *kv: Tensor) -> None:
        """What `read` gives. Nothing else may read or write these slots until it returns."""
        for each, given in zip(self._bytes, kv, strict=True):
            each[:, slots.numpy()] = given.view(torch.uint8).numpy()

    def close(self) -> None:
        """Else memory that is still pinned may hold up the process's end for tens of seconds."""
        self._pool.destroy()

    def follow(self) -> None:
        """The current stream is that of forwards."""
        if self._is_cuda:
            self._stream = torch.cuda.current_stream()

    def save(self, device_slots: Tensor, slots: Tensor) -> list[Tensor]:
        """Copy KV from the device, [num_tokens] int64 each, behind a forward, on its stream.
        Returns [] bool each, on the device: whether the codec can keep it."""
        pool, device_slots = self._pool, rows_of(self._device_pool)(device_slots)
        if self._is_cuda:
            device_slots.record_stream(self._stream)  # made on another one
            slots = upload(slots, device_slots.device)
            pool.backup_from_device_all_layer(self._device_pool, slots, device_slots, "kernel")
            return []
        for layer in range(pool.layer_num):
            pool.k_buffer[layer, slots] = self._device_pool.k_buffer[layer][device_slots]
            pool.v_buffer[layer, slots] = self._device_pool.v_buffer[layer][device_slots]
        return []

    def prepare(self, slots: Tensor) -> Tensor:
        """`slots` as `load` takes them. Waits for nothing."""
        return upload(slots, self._device_pool.device)

    def load(self, slots: Tensor, device_slots: Tensor, *, num_ahead: int, clock: Pricing) -> None:
        """Copy KV to the device, [num_tokens] int64 each, on the forward stream before a forward:
        `num_ahead` layers at once, the rest beside it until `finish`. Whoever reads a layer by the
        device pool's getters waits for it."""
        rows = rows_of(self._loads_into)(device_slots)
        copy, work = partial(self.copy, slots, rows), Work(1, len(slots))
        self.loads.start(copy, Phase.LOAD, work, num_ahead=num_ahead, clock=clock)

    def copy(self, slots: Tensor, rows: Tensor, layers: range) -> None:
        """Copy these layers to the device pool's rows, on the current stream. `slots` as of
        `prepare`."""
        for layer in layers:
            if self._is_cuda:
                self._pool.load_to_device_per_layer(
                    self._device_pool, slots, rows, layer, "kernel"
                )
                continue
            sides = (self._device_pool.k_buffer[layer], self._device_pool.v_buffer[layer])
            for held, side in zip(self._bytes, sides, strict=True):
                taken = held[layer].take(slots.numpy(), axis=0)
                side.view(torch.uint8).numpy()[rows.numpy()] = taken

    def finish(self) -> bool:
        """As `LayerLoads.finish`, once the forward is queued on the current stream."""
        self.follow()
        return self.loads.finish()


class NoSlots(HostPool):
    """No host memory: nothing fits, so nothing is ever copied."""

    num_slots = num_layers = num_free = 0
    token_bytes, is_layered = 1, False

    def __init__(self, codec: Codec = NONE) -> None:
        self.codec = codec

    def alloc(self, num_tokens: int) -> None: ...
    def follow(self) -> None: ...
    def close(self) -> None: ...
    def finish(self) -> bool:
        return False
