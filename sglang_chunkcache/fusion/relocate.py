"""Moves cached KV to other slots and other positions: values are copied as they are, keys are
rotated.

RoPE stores a key already rotated: `K = R(p) k` at position p (RoFormer, arXiv 2104.09864, eq. 14).
Each pair of a key's elements is one complex number and `R(p)` multiplies it by `z(p) = cos + i
sin`, so a key moves from p to q by

    turn = z(q) conj(z(p)) / |z(q) conj(z(p))|        K' = turn * K

The division removes YaRN's `mscale`, which SGLang multiplies into its table and which the key
already contains. Everything is computed in float32, the turn once a call for all layers, so a move
costs one rounding and a move by 0 none. Compared with a key that the model itself stores at q, the
result is off by at most 1 ulp of its pair's length in bfloat16 and float16 (test_relocate.py). This
file is in torch, one layer after the other: for pools on the CPU, and as the reference of
relocate_kernel.py, which moves all layers in one launch where the pool is on CUDA. Knows slots and
positions, no chunks, trees or requests.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_chunkcache.fusion.relocate_kernel import Blob

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of pools that KV can be moved in; quantised KV would have to be dequantised first."""

ROTARY_CLASSES = frozenset(
    {
        "RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
        "DynamicNTKScalingRotaryEmbedding",
        "DynamicNTKAlphaRotaryEmbedding",
    }
)
"""SGLang's classes in which row p of one fixed table rotates position p, and only the first
`rotary_dim` elements of a head. Others choose the table by length (Phi3 LongRoPE), take positions
modulo (dual chunk) or of several axes (mrope), or rotate other elements (Gemma4, FoPE)."""


class _Turn(NamedTuple):
    """cos and sin of the angle each pair turns by: [num_tokens, 1, rotary_dim / 2] float32."""

    cos: Tensor
    sin: Tensor
    stays: Tensor | None
    """Like `cos`, bool: does not turn.
    None: every pair turns; only known on the CPU, where reading it costs no wait."""


def rotary_of(runner: Any) -> Any:
    """SGLang's rotary module, the same for all layers: `unsupported` refuses other models."""
    return runner.model.model.layers[0].self_attn.rotary_emb


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """SGLang's cos and sin of one model, in float32.
    All methods queue on the current stream and never synchronise."""

    cos: Tensor
    """[num_positions, rotary_dim / 2] float32, times `mscale`; only read."""
    sin: Tensor
    """Like `cos`."""
    is_neox: bool
    """Whether element i is paired with i + rotary_dim / 2, rather than 2i with 2i + 1."""

    @classmethod
    def of(cls, rotary_emb: Any) -> RotaryTable:
        """The table of SGLang's rotary module, as long as the module's own: the context length at
        least.

        Raises:
            ValueError: the module's class is not one of `ROTARY_CLASSES`; names it.
        """
        name = type(rotary_emb).__name__
        if name not in ROTARY_CLASSES:
            raise ValueError(
                f"rotary embedding {name} is not supported, only"
                f" {', '.join(sorted(ROTARY_CLASSES))}"
            )
        cos, sin = _float32_table(rotary_emb).chunk(2, dim=-1)
        return cls(cos, sin, bool(rotary_emb.is_neox_style))

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a head that turn; the rest stay."""
        return 2 * self.cos.shape[1]

    @property
    def num_positions(self) -> int:
        """Positions must be below; on a GPU, where a check would synchronise,
        the caller guarantees it."""
        return self.cos.shape[0]

    def _turn(self, old: Tensor, new: Tensor) -> _Turn:
        """From `old` to `new`."""
        old_cos, old_sin, new_cos, new_sin = *self._at(old), *self._at(new)
        # NOTE: not as complex numbers: their product may be fused, and a turn from p to p would not
        # be exactly 1 + 0i.
        cos = new_cos * old_cos + new_sin * old_sin
        sin = new_sin * old_cos - new_cos * old_sin
        norm = torch.hypot(cos, sin)
        cos, sin = (cos / norm).unsqueeze(1), (sin / norm).unsqueeze(1)
        stays = (cos == 1) & (sin == 0)
        return _Turn(cos, sin, None if cos.device.type == "cpu" and not stays.any() else stays)

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]

    def _apply_(self, keys: Tensor, turn: _Turn) -> Tensor:
        """Turn `keys` in place."""
        first, second = self._pairs(keys)
        # In float32, by promotion.
        turned = first * turn.cos - second * turn.sin, second * turn.cos + first * turn.sin
        for old, new in zip((first, second), turned, strict=True):
            # What does not turn keeps every bit: infinity times 0 would not be 0.
            old.copy_(
                new if turn.stays is None else torch.where(turn.stays, old, new.to(old.dtype))
            )
        return keys

    def _pairs(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and the second element of every pair."""
        half = self.rotary_dim // 2
        if self.is_neox:
            return keys[..., :half], keys[..., half : self.rotary_dim]
        return keys[..., 0 : self.rotary_dim : 2], keys[..., 1 : self.rotary_dim : 2]

    def _check_positions(self, name: str, positions: Tensor, num_tokens: int) -> None:
        _check_index(name, positions, num_tokens, self.cos.device)
        if positions.device.type == "cpu" and num_tokens:
            low, high = int(positions.min()), int(positions.max())
            if low < 0 or high >= self.num_positions:
                raise ValueError(
                    f"{name}: expected positions in [0, {self.num_positions}), got {low} to {high}"
                )


def copy_moved(
    pool: MHATokenToKVPool,
    table: RotaryTable,
    *,
    source_slots: Tensor,
    source_positions: Tensor,
    target_slots: Tensor,
    target_positions: Tensor,
    use_kernel: bool | None = None,
) -> None:
    """Copy the KV of tokens to other slots of the same pool, in every layer, keys turned to their
    new positions.

    Queued on the current stream, no sync.

    Args:
        pool: Written at `target_slots`; bfloat16, float16 or float32, one row a slot.
        table: The model's, on the pool's device.
        source_slots: [num_tokens] int64, on the pool's device.
        source_positions: [num_tokens] int64, where the model stored these keys; on the pool's
            device.
        target_slots: Like `source_slots`, each slot once and none the source of another token:
            tokens move at the same time.
        target_positions: Like `source_positions`.
        use_kernel: None: where the pool is on CUDA.
    Raises:
        ValueError: shape, dtype or device differs from the above, or, on the CPU, where a check
            costs no synchronisation, a position is not in the table or a target is another token's
            source; names argument, expected and got. Nothing is written then.
    """
    num_tokens = _check_pool(
        pool, table, "source_slots", source_slots, "source_positions", source_positions
    )
    _check_pool(
        pool, table, "target_slots", target_slots, "target_positions", target_positions, num_tokens
    )
    # On a GPU reading the comparison would synchronise: there the caller guarantees it.
    if source_slots.device.type == "cpu":
        _check_apart(source_slots, target_slots)
    turn = table._turn(source_positions, target_positions)
    if _takes_kernel(pool, use_kernel):
        _launch(pool.k_buffer, pool.v_buffer, table, turn, source_slots, target_slots)
        return
    for keys, values in zip(pool.k_buffer, pool.v_buffer, strict=True):
        moved_keys, moved_values = table._apply_(keys[source_slots], turn), values[source_slots]
        keys[target_slots] = moved_keys
        values[target_slots] = moved_values


def write_blob(
    pool: MHATokenToKVPool,
    table: RotaryTable,
    keys: Tensor,
    values: Tensor,
    *,
    source_positions: Tensor,
    target_slots: Tensor,
    target_positions: Tensor,
    use_kernel: bool | None = None,
) -> None:
    """Write stored KV into slots of the pool, keys turned to their new positions:
    all layers of `BlobTarget.write`."""
    BlobTarget(
        pool, table, source_positions, target_slots, target_positions, use_kernel=use_kernel
    ).write(keys, values, range(len(pool.k_buffer)))


class BlobTarget:
    """Slots that stored KV is written into. Queued on the current stream.

    Args:
        pool: Written at `slots`; as in `copy_moved`.
        table: The model's, on the pool's device.
        source_positions: [num_tokens] int64, where the model stored these keys; on the pool's
            device.
        slots: [num_tokens] int64, on the pool's device, each slot once.
        positions: [num_tokens] int64, on the pool's device.
        use_kernel: As in `copy_moved`.
    Raises:
        ValueError: as `copy_moved`.
    """

    def __init__(
        self,
        pool: MHATokenToKVPool,
        table: RotaryTable,
        source_positions: Tensor,
        slots: Tensor,
        positions: Tensor,
        *,
        use_kernel: bool | None = None,
    ) -> None:
        self._num_tokens = _check_pool(
            pool, table, "target_slots", slots, "target_positions", positions
        )
        _check_index("source_positions", source_positions, self._num_tokens, slots.device)
        table._check_positions("source_positions", source_positions, self._num_tokens)
        self._pool, self._table, self._slots = pool, table, slots
        self._turn, self._takes_kernel = (
            table._turn(source_positions, positions),
            _takes_kernel(pool, use_kernel),
        )

    @property
    def device(self) -> torch.device:
        """The pool's."""
        return self._slots.device

    def turn(self, layers: range) -> None:
        """The slots hold KV of these layers as the model stored it: turn its keys in place."""
        keys, values = (
            buffers[layers.start : layers.stop]
            for buffers in (self._pool.k_buffer, self._pool.v_buffer)
        )
        if self._takes_kernel:
            _launch(keys, values, self._table, self._turn, self._slots, self._slots)
            return
        for each in keys:
            each[self._slots] = self._table._apply_(each[self._slots], self._turn)

    def write(self, keys: Tensor, values: Tensor, layers: range) -> None:
        """KV of these layers, keys turned to their new positions.

        KV on another device is first copied to the pool's, keys and values with one copy each. From
        pinned memory, as the store has it on CUDA, the copy is queued like the rest. From pageable
        memory, as a storage gives it, CUDA makes the host wait: for the stream's earlier work, then
        until it has been read.

        Args:
            keys: [num_layers, num_tokens, num_kv_heads, head_dim], of these layers, the pool's
                dtype, as `read_blob` gives them; on any device, only read.
            values: [num_layers, num_tokens, num_kv_heads, v_head_dim], otherwise like `keys`.
            layers: of the pool.
        Raises:
            ValueError: as `copy_moved`.
        """
        key_buffers, value_buffers = (
            buffers[layers.start : layers.stop]
            for buffers in (self._pool.k_buffer, self._pool.v_buffer)
        )
        for name, blob, buffers in (("keys", keys, key_buffers), ("values", values, value_buffers)):
            _check_shape(name, blob, (len(buffers), self._num_tokens, *buffers[0].shape[1:]))
            _check_dtype(name, blob, self._pool.dtype)
        keys, values = (
            blob.to(self.device, non_blocking=True).contiguous() for blob in (keys, values)
        )
        if self._takes_kernel:
            _launch(
                key_buffers, value_buffers, self._table, self._turn, (keys, values), self._slots
            )
            return
        for layer, (key_buffer, value_buffer) in enumerate(
            zip(key_buffers, value_buffers, strict=True)
        ):
            # A copy: the keys may be the store's, and `_apply_` writes in place.
            key_buffer[self._slots] = self._table._apply_(keys[layer].clone(), self._turn)
            value_buffer[self._slots] = values[layer]


def read_blob(
    pool: MHATokenToKVPool,
    table: RotaryTable,
    slots: Tensor,
    positions: Tensor,
    *,
    target_positions: Tensor | None = None,
    use_kernel: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The KV of tokens, bit by bit, or with keys turned to other positions. Queued on the current
    stream, no sync.

    Args:
        pool: Only read; as in `copy_moved`.
        table: The model's, on the pool's device.
        slots: [num_tokens] int64, on the pool's device.
        positions: [num_tokens] int64, where the model stored these keys; on the pool's device.
        target_positions: Like `positions`; all 0: un-rotated. None: keys stay as they are.
        use_kernel: As in `copy_moved`.
    Returns:
        Keys [num_layers, num_tokens, num_kv_heads, head_dim] and values [.., v_head_dim]: in the
        pool's dtype, own memory.
    Raises:
        ValueError: as `copy_moved`.
    """
    _check_pool(pool, table, "slots", slots, "positions", positions)
    # A turn by 0 is exactly 1, so keys that stay keep every bit.
    turn = table._turn(positions, positions if target_positions is None else target_positions)
    keys, values = (
        torch.empty(
            (len(buffers), len(slots), *buffers[0].shape[1:]), dtype=pool.dtype, device=slots.device
        )
        for buffers in (pool.k_buffer, pool.v_buffer)
    )
    if _takes_kernel(pool, use_kernel):
        _launch(pool.k_buffer, pool.v_buffer, table, turn, slots, (keys, values))
        return keys, values
    for layer, (key_buffer, value_buffer) in enumerate(
        zip(pool.k_buffer, pool.v_buffer, strict=True)
    ):
        keys[layer] = table._apply_(key_buffer[slots], turn)
        values[layer] = value_buffer[slots]
    return keys, values


def _takes_kernel(pool: MHATokenToKVPool, use_kernel: bool | None) -> bool:
    return pool.k_buffer[0].is_cuda if use_kernel is None else use_kernel


def _launch(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    table: RotaryTable,
    turn: _Turn,
    source: Tensor | Blob,
    target: Tensor | Blob,
) -> None:
    # only here: without CUDA nothing needs Triton
    from sglang_chunkcache.fusion.relocate_kernel import relocate

    relocate(keys, values, turn.cos, turn.sin, is_neox=table.is_neox, source=source, target=target)


def _check_apart(source_slots: Tensor, target_slots: Tensor) -> None:
    # A token may keep its slot.
    elsewhere = source_slots[source_slots != target_slots]
    common = elsewhere[torch.isin(elsewhere, target_slots)]
    if len(common):
        raise ValueError(
            f"target_slots: expected no source of another token, got {common.tolist()[:8]}"
        )


def _float32_table(rotary_emb: Any) -> Tensor:
    """[num_positions, rotary_dim] float32: the table that the model rotates by, or the same before
    it was rounded."""
    own: Tensor = rotary_emb.cos_sin_cache
    # On CUDA SGLang's table is float32 and is used as it is: computed again, angles at far
    # positions could differ by a CPU's `pow`.
    if own.dtype == torch.float32:
        return own
    # Elsewhere it has the model's dtype, which is too coarse for moves.
    table = rotary_emb._compute_cos_sin_cache().to(own.device, torch.float32)
    if len(table) < len(own):
        # SGLang has grown its table to the context length, each class by its own rule: let a copy
        # grow likewise.
        grown = copy.copy(rotary_emb)
        grown._buffers = {**rotary_emb._buffers, "cos_sin_cache": table}  # the model keeps its own
        grown._ensure_cos_sin_cache_length(len(own) - 1)
        table = grown.cos_sin_cache
    result: Tensor = table[: len(own)]  # growth is in steps of SGLANG_ROPE_CACHE_ALIGN
    return result


def _check_pool(
    pool: MHATokenToKVPool,
    table: RotaryTable,
    slots_name: str,
    slots: Tensor,
    positions_name: str,
    positions: Tensor,
    num_tokens: int | None = None,
) -> int:
    """Check the arguments of a move; returns the number of tokens, by default that of the slots."""
    buffer = pool.k_buffer[0]
    _check_dtype("pool", buffer, *DTYPES)
    if buffer.ndim != 3 or buffer.shape[-1] < table.rotary_dim:
        raise ValueError(
            f"pool: expected keys [slots, num_kv_heads, head_dim >= {table.rotary_dim}], got"
            f" {list(buffer.shape)}"
        )
    _check_device("table", table.cos, buffer.device)
    num_tokens = slots.numel() if num_tokens is None else num_tokens
    _check_index(slots_name, slots, num_tokens, buffer.device)
    table._check_positions(positions_name, positions, num_tokens)
    return num_tokens


def _check_index(name: str, index: Tensor, num_tokens: int, device: torch.device) -> None:
    _check_shape(name, index, (num_tokens,))
    _check_dtype(name, index, torch.int64)
    _check_device(name, index, device)


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name}: expected shape {list(expected)}, got {list(tensor.shape)}")


def _check_dtype(name: str, tensor: Tensor, *expected: torch.dtype) -> None:
    if tensor.dtype not in expected:
        raise ValueError(f"{name}: expected {' or '.join(map(str, expected))}, got {tensor.dtype}")


def _check_device(name: str, tensor: Tensor, expected: torch.device) -> None:
    if tensor.device != expected:
        raise ValueError(f"{name}: expected on {expected}, got {tensor.device}")
