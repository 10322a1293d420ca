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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang_chunkcache.attention.slot_map import rows_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

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
    """SGLang's cos and sin of one model, in float32. No method synchronises."""

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
        """Positions must be below. On a GPU, where checks would synchronise, callers see to it."""
        return self.cos.shape[0]

    def turning(self, old: Tensor, new: Tensor) -> Callable[[Tensor], Tensor]:
        """Turns keys, [num_tokens, num_kv_heads, head_dim], in place, from the positions `old` to
        `new`, [num_tokens] int64. Gives the bits that `copy_moved` writes."""
        return partial(self._apply_, turn=self._turn(old, new))

    def _turn(self, old: Tensor, new: Tensor) -> _Turn:
        """From `old` to `new`."""
        old_cos, old_sin, new_cos, new_sin = (
            side[at] for at in (old, new) for side in (self.cos, self.sin)
        )
        # NOTE: not as complex numbers: their product may be fused, and a turn from p to p would not
        # be exactly 1 + 0i.
        cos = new_cos * old_cos + new_sin * old_sin
        sin = new_sin * old_cos - new_cos * old_sin
        norm = torch.hypot(cos, sin)
        cos, sin = (cos / norm).unsqueeze(1), (sin / norm).unsqueeze(1)
        stays = (cos == 1) & (sin == 0)
        return _Turn(cos, sin, None if cos.device.type == "cpu" and not stays.any() else stays)

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
    _check_places(
        pool,
        table,
        {"source_slots": source_slots, "target_slots": target_slots},
        {"source_positions": source_positions, "target_positions": target_positions},
    )
    # On a GPU reading the comparison would synchronise: there the caller guarantees it.
    if source_slots.device.type == "cpu":
        _check_apart(source_slots, target_slots)
    turn, rows = table._turn(source_positions, target_positions), rows_of(pool)
    source, target = rows(source_slots), rows(target_slots)
    if _takes_kernel(pool, use_kernel):
        _launch(pool.k_buffer, pool.v_buffer, table, turn, source, target)
        return
    for keys, values in zip(pool.k_buffer, pool.v_buffer, strict=True):
        keys[target] = table._apply_(keys[source], turn)
        values[target] = values[source]


class KeyTurn:
    """Turns keys of a pool in place, layer by layer. Queued on the current stream.

    Args:
        source_positions: [num_tokens] int64, where the model stored these keys; on the pool's
            device.
        slots: [num_tokens] int64, on the pool's device, each slot once.
        positions: Like `source_positions`, of the slots.
        pool, table, use_kernel: as in `copy_moved`.
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
        _check_places(
            pool,
            table,
            {"slots": slots},
            {"positions": positions, "source_positions": source_positions},
        )
        self._pool, self._table, self._rows = pool, table, rows_of(pool)(slots)
        self._turn, self._use_kernel = table._turn(source_positions, positions), use_kernel

    def __call__(self, layers: range) -> None:
        """The slots hold KV of these layers as the model stored it."""
        buffers = self._pool.k_buffer[layers.start : layers.stop]
        if _takes_kernel(self._pool, self._use_kernel):
            _launch(buffers, (), self._table, self._turn, self._rows, self._rows)
            return
        for keys in buffers:
            keys[self._rows] = self._table._apply_(keys[self._rows], self._turn)


def _takes_kernel(pool: MHATokenToKVPool, use_kernel: bool | None) -> bool:
    return pool.k_buffer[0].is_cuda if use_kernel is None else use_kernel


def _launch(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    table: RotaryTable,
    turn: _Turn,
    source: Tensor,
    target: Tensor,
) -> None:
    # only here: without CUDA nothing needs Triton
    from sglang_chunkcache.fusion.relocate_kernel import relocate

    turned = {"cos": turn.cos, "sin": turn.sin, "is_neox": table.is_neox}
    relocate(keys, values, **turned, source=source, target=target)


def _check_apart(source_slots: Tensor, target_slots: Tensor) -> None:
    # A token may keep its slot.
    elsewhere = source_slots[source_slots != target_slots]
    common = elsewhere[torch.isin(elsewhere, target_slots)]
    if len(common):
        raise ValueError(
            f"target_slots: expected no source of another token, got {common.tolist()[:8]}"
        )


def _float32_table(rotary_emb: Any) -> Tensor:
    """[num_positions, rotary_dim] float32: the model's table, as before it was rounded."""
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


def _check_places(
    pool: MHATokenToKVPool,
    table: RotaryTable,
    slots: Mapping[str, Tensor],
    positions: Mapping[str, Tensor],
) -> None:
    """Check the arguments of a move, by name; tokens are as many as the first slots."""
    buffer = pool.k_buffer[0]
    _check("pool", buffer, dtypes=DTYPES)
    if buffer.ndim != 3 or buffer.shape[-1] < table.rotary_dim:
        raise ValueError(
            f"pool: expected keys [slots, num_kv_heads, head_dim >= {table.rotary_dim}], got"
            f" {list(buffer.shape)}"
        )
    _check("table", table.cos, device=buffer.device)
    num_tokens = next(iter(slots.values())).numel()
    for name, index in {**slots, **positions}.items():
        _check(name, index, shape=(num_tokens,), dtypes=(torch.int64,), device=buffer.device)
    if buffer.device.type != "cpu" or not num_tokens:
        return
    for name, index in positions.items():
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= table.num_positions:
            raise ValueError(
                f"{name}: expected positions in [0, {table.num_positions}), got {low} to {high}"
            )


def _check(
    name: str,
    tensor: Tensor,
    *,
    shape: tuple[int, ...] | None = None,
    dtypes: Sequence[torch.dtype] = (),
    device: torch.device | None = None,
) -> None:
    if shape is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected on {device}, got {tensor.device}")
