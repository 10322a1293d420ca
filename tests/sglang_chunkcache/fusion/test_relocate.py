"""Moved keys against RoPE's definition, against SGLang's own modules, and in a real KV pool.

An ulp is taken at the length of the rotated pair: a number near 0 inherits the rounding of its
large partner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers import rotary_embedding
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from sglang_chunkcache.fusion.relocate import (
    ROTARY_CLASSES,
    RotaryTable,
    copy_moved,
    read_blob,
    write_blob,
)
from tests.reference import rope

MAX_POSITIONS = 2048
BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
DTYPES = list(BITS)


@dataclass(frozen=True)
class Case:
    """A model family's RoPE, as its config has it and by definition."""

    frequencies: list[float]
    base: float
    head_dim: int = 32
    rotary_dim: int = 32
    neox: bool = True
    scaling: dict[str, Any] | None = None
    mscale: float = 1.0
    num_heads: int = field(default=2)

    def module(self, dtype: torch.dtype, max_positions: int = MAX_POSITIONS) -> Any:
        """SGLang's, as its models make it."""
        args = self.head_dim, self.rotary_dim, max_positions, self.base, self.neox, self.scaling
        return rotary_embedding.get_rope(*args, dtype=dtype)

    def raw(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """Un-rotated keys of very different magnitudes."""
        generator = torch.Generator().manual_seed(num_tokens)
        size = (num_tokens, self.num_heads, self.head_dim)
        return (
            torch.randn(size, generator=generator)
            * torch.randn(size[:1], generator=generator).exp()[:, None, None]
        ).to(dtype)

    def ulp(self, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """The spacing of `dtype` at each pair's length."""
        norms = rope.pair_norms(keys, self.rotary_dim, neox=self.neox)
        return torch.exp2(norms.clamp_min(1e-30).log2().floor() - BITS[dtype])


def yarn_case(factor: float) -> Case:
    length = round(MAX_POSITIONS / factor)
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    frequencies = rope.yarn(32, 1e6, factor=factor, trained_len=length)
    return Case(frequencies, 1e6, scaling=scaling, mscale=rope.yarn_mscale(factor))


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
CASES = {
    "llama": Case(rope.plain(32, 10000.0), 10000.0),
    "llama3": Case(
        rope.llama3(32, 5e5, factor=8.0, low=1.0, high=4.0, trained_len=256),
        5e5,
        scaling={"rope_type": "llama3", **LLAMA3},
    ),
    "qwen2": Case(rope.plain(64, 1e6), 1e6, 64, 64),
    "qwen3": Case(
        rope.plain(128, 1e6), 1e6, 128, 128, scaling={"rope_type": "default", "rope_theta": 1e6}
    ),
    "mistral": Case(rope.plain(128, 1e6), 1e6, 128, 128),
    "yarn": yarn_case(4.0),
    "linear": Case(
        rope.linear(32, 10000.0, factor=2.0),
        10000.0,
        scaling={"rope_type": "linear", "factor": 2.0},
    ),
    "dynamic": Case(
        rope.dynamic_ntk(32, 10000.0, factor=2.0),
        10000.0,
        scaling={"rope_type": "dynamic", "factor": 2.0},
    ),
    "alpha": Case(
        rope.plain(32, 10000.0 * 4.0 ** (32 / 30)),
        10000.0,
        scaling={"rope_type": "dynamic", "factor": 1.0, "alpha": 4.0},
    ),
    "partial": Case(rope.plain(16, 10000.0), 10000.0, 64, 16),
    "interleaved": Case(rope.plain(32, 10000.0), 10000.0, neox=False),
    "interleaved partial": Case(rope.plain(32, 10000.0), 10000.0, 64, 32, neox=False),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def table_of(case: Case, dtype: torch.dtype = torch.float32) -> RotaryTable:
    return RotaryTable.of(case.module(dtype))


def random_positions(num_tokens: int, seed: int, end: int = MAX_POSITIONS) -> Tensor:
    return torch.randint(0, end, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def stored_by_sglang(case: Case, raw: Tensor, positions: Tensor, *, float32: bool) -> Tensor:
    """Keys as SGLang's module writes them; `float32` as on CUDA:
    float32 table and arithmetic, one rounding."""
    module = case.module(torch.float32 if float32 else raw.dtype)
    flat = raw.reshape(len(raw), -1)
    flat = flat.float() if float32 else flat
    stored: Tensor = module.forward_native(positions, flat, flat)[1].view(raw.shape).to(raw.dtype)
    return stored


def pool_of(keys: Tensor) -> Any:
    """A pool of one layer: `keys` in its first slots, as many free ones after them."""
    buffer = torch.cat([keys, torch.zeros_like(keys)])
    return SimpleNamespace(k_buffer=[buffer], v_buffer=[buffer.clone()], dtype=keys.dtype)


def moved(table: RotaryTable, keys: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Keys stored at positions `old` as `copy_moved` stores them at `new`."""
    pool, slots = pool_of(keys), torch.arange(len(keys))
    copy_moved(
        pool,
        table,
        source_slots=slots,
        source_positions=old,
        target_slots=slots + len(keys),
        target_positions=new,
    )
    kept, result = pool.k_buffer[0][: len(keys)], pool.k_buffer[0][len(keys) :]
    assert torch.equal(kept.view(torch.uint8), keys.view(torch.uint8)), (
        "the source stays readable for others"
    )
    return result  # type: ignore[no-any-return]


def to_origin(table: RotaryTable, keys: Tensor, positions: Tensor) -> Tensor:
    """Keys stored at `positions`, un-rotated by `read_blob`."""
    blob, _ = read_blob(pool_of(keys), table, torch.arange(len(keys)), positions)
    return blob[0]


def from_origin(table: RotaryTable, keys: Tensor, positions: Tensor) -> Tensor:
    """Un-rotated keys as `write_blob` stores them at `positions`."""
    pool, slots = pool_of(keys), torch.arange(len(keys)) + len(keys)
    write_blob(pool, table, keys[None], keys[None], target_slots=slots, target_positions=positions)
    return pool.k_buffer[0][slots]  # type: ignore[no-any-return]


# Against the definition


@every_case
def test_move_equals_the_definition(case: Case) -> None:
    """A key stored at p and moved is the key stored at q;
    SGLang's angles are float32, which at position p is p * 2^-24."""
    old, new = (
        torch.tensor([0, 7, 1500, 40, MAX_POSITIONS - 1]),
        torch.tensor([3, 0, 12, 2000, MAX_POSITIONS - 2]),
    )
    raw = case.raw(len(old), torch.float32)
    stored, wanted = (
        rope.rotate(raw, positions.tolist(), case.frequencies, neox=case.neox, scale=case.mscale)
        for positions in (old, new)
    )
    got = moved(table_of(case), stored.float(), old, new).double()
    assert (
        (got - wanted).abs() <= 3e-4 * rope.pair_norms(wanted, case.rotary_dim, neox=case.neox)
    ).all()
    assert torch.equal(got[..., case.rotary_dim :], raw.double()[..., case.rotary_dim :])


@every_case
def test_origin_equals_the_definition(case: Case) -> None:
    """Un-rotated is what the model projects, times the `mscale` that stays in a stored key;
    and back."""
    positions = torch.tensor([0, 7, 1500, MAX_POSITIONS - 1])
    raw = case.raw(len(positions), torch.float32)
    stored = rope.rotate(
        raw, positions.tolist(), case.frequencies, neox=case.neox, scale=case.mscale
    ).float()
    origin = rope.rotate(raw, [0] * len(raw), case.frequencies, neox=case.neox, scale=case.mscale)
    table, norms = table_of(case), rope.pair_norms(stored, case.rotary_dim, neox=case.neox)
    assert ((to_origin(table, stored, positions).double() - origin).abs() <= 3e-4 * norms).all()
    assert (
        (from_origin(table, origin.float(), positions).double() - stored).abs() <= 3e-4 * norms
    ).all()


# Against itself


@every_case
@every_dtype
def test_move_by_zero_changes_no_bit(case: Case, dtype: torch.dtype) -> None:
    """A chunk that keeps its place is exact, however often it is copied."""
    keys, positions = case.raw(200, dtype), random_positions(200, 1)
    assert torch.equal(moved(table_of(case, dtype), keys, positions, positions), keys)


@every_dtype
def test_what_does_not_turn_keeps_every_bit(dtype: torch.dtype) -> None:
    """Infinities, NaNs with their payload and negative zeros:
    those of a move by 0, and the elements after `rotary_dim`."""
    case, positions = CASES["partial"], torch.tensor([5, 900, 41])
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 1e-41], dtype=dtype)
    keys = odd.repeat(3 * case.num_heads * case.head_dim // len(odd) + 1)[
        : 3 * case.num_heads * case.head_dim
    ]
    keys = keys.view(3, case.num_heads, case.head_dim)
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    keys.view(bits)[keys.isnan()] += 1  # another payload than arithmetic gives
    table = table_of(case)
    assert torch.equal(moved(table, keys, positions, positions).view(bits), keys.view(bits))
    rest = moved(table, keys, positions, positions + 1)[..., case.rotary_dim :]
    assert torch.equal(rest.view(bits), keys[..., case.rotary_dim :].view(bits))


@every_case
@every_dtype
def test_move_twice_equals_move_once(case: Case, dtype: torch.dtype) -> None:
    """By a then b is by a+b, but for the rounding between:
    one ulp, four in float32, where products round as well."""
    keys, table = case.raw(200, dtype), table_of(case, dtype)
    p, q, r = (random_positions(200, seed) for seed in (1, 2, 3))
    once, twice = moved(table, keys, p, r), moved(table, moved(table, keys, p, q), q, r)
    limit = 4 if dtype == torch.float32 else 1
    assert ((once.double() - twice.double()).abs() <= limit * case.ulp(once, dtype)).all()


# Against SGLang


@every_case
@every_dtype
def test_moved_key_equals_the_first_layers(case: Case, dtype: torch.dtype) -> None:
    """A first-layer key depends on its token and position alone, so the moved one is the one SGLang
    would store at q.

    Rounded once each: 1 ulp, 2 by way of a blob, which rounds once more. SGLang's path without CUDA
    also rounds table, products and sum to the dtype, which makes 3 of its own, and float32 products
    round visibly: 4 and 5.
    """
    num_tokens = 500
    p, q, raw = (
        random_positions(num_tokens, 1),
        random_positions(num_tokens, 2),
        case.raw(num_tokens, dtype),
    )
    table = table_of(case, dtype)
    for float32, move_ulps, blob_ulps in ((True, 1, 2), (False, 3, 3)):
        if dtype == torch.float32:
            move_ulps, blob_ulps = 4, 5
        stored, wanted = (stored_by_sglang(case, raw, at, float32=float32) for at in (p, q))
        ulp = case.ulp(wanted, dtype)
        got, by_blob = (
            moved(table, stored, p, q),
            from_origin(table, to_origin(table, stored, p), q),
        )
        assert ((got.double() - wanted.double()).abs() <= move_ulps * ulp).all()
        assert ((by_blob.double() - wanted.double()).abs() <= blob_ulps * ulp).all()


@pytest.mark.parametrize("name", ["llama", "yarn", "linear", "dynamic", "llama3"])
def test_table_grows_as_sglangs_does(name: str) -> None:
    """SGLang lengthens a table to the context length, some classes by another formula:
    ours has the same rows."""
    case = CASES[name]
    own, exact = (
        type(case.module(d))(**arguments(case, d)) for d in (torch.bfloat16, torch.float32)
    )
    for module in (own, exact):
        module._ensure_cos_sin_cache_length(3 * MAX_POSITIONS)
    before = own.cos_sin_cache
    table = RotaryTable.of(own)
    assert table.num_positions == len(exact.cos_sin_cache) > 3 * MAX_POSITIONS
    assert torch.equal(torch.cat((table.cos, table.sin), dim=1), exact.cos_sin_cache)
    assert own.cos_sin_cache is before


def arguments(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """To make a module of the case's class that no other test shares."""
    scaling, common = (
        case.scaling or {},
        (case.head_dim, case.rotary_dim, MAX_POSITIONS, case.base, case.neox),
    )
    names = ("head_size", "rotary_dim", "max_position_embeddings", "base", "is_neox_style")
    result: dict[str, Any] = {**dict(zip(names, common, strict=True)), "dtype": dtype}
    kind = scaling.get("rope_type")
    if kind == "linear":
        return result | {"scaling_factors": scaling["factor"]}
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        return result | {
            "scaling_factor": scaling["factor"],
            "low_freq_factor": low,
            "high_freq_factor": high,
            "orig_max_position": scaling["original_max_position_embeddings"],
        }
    if kind == "yarn":
        result["max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return result | ({"scaling_factor": scaling["factor"]} if kind else {})


def test_float32_table_is_sglangs_own() -> None:
    """On CUDA no second table is made."""
    module = CASES["llama"].module(torch.float32)
    assert RotaryTable.of(module).cos.data_ptr() == module.cos_sin_cache.data_ptr()


def test_rounded_table_is_made_again() -> None:
    """SGLang's table without CUDA has 8 bits: too few to undo a rotation with."""
    table, exact = table_of(CASES["llama"], torch.bfloat16), table_of(CASES["llama"])
    assert torch.equal(table.cos, exact.cos)
    assert (table.rotary_dim, table.is_neox) == (32, True)
    assert not table_of(CASES["interleaved"]).is_neox


def sglang_classes() -> set[str]:
    """Every rotary class SGLang makes from a config."""
    return {name for name in vars(factory) if name.endswith("Embedding")}


def test_supported_classes_exist() -> None:
    """By SGLang's names; what is left is not none."""
    assert sglang_classes() > ROTARY_CLASSES


@pytest.mark.parametrize("name", sorted(sglang_classes() - ROTARY_CLASSES))
def test_other_class_is_refused(name: str) -> None:
    """By name, so that the log says why; a subclass of a supported one is another class."""
    cls = getattr(factory, name)
    with pytest.raises(ValueError, match=f"rotary embedding {name} is not supported"):
        RotaryTable.of(cls.__new__(cls))


# In a pool

NUM_LAYERS, NUM_SLOTS = 3, 24


def make_pool(
    case: Case,
    dtype: torch.dtype,
    *,
    v_head_dim: int | None = None,
    start_layer: int = 0,
    device: str = "cpu",
) -> Any:
    """SGLang's pool with random KV."""
    pool = MHATokenToKVPool(
        size=NUM_SLOTS - 1,
        page_size=1,
        dtype=dtype,
        head_num=case.num_heads,
        head_dim=case.head_dim,
        layer_num=NUM_LAYERS,
        device=device,
        enable_memory_saver=False,
        v_head_dim=v_head_dim,
        start_layer=start_layer,
        end_layer=start_layer + NUM_LAYERS - 1,
    )
    generator = torch.Generator().manual_seed(0)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return pool


def contents(pool: Any) -> tuple[Tensor, Tensor]:
    """[num_layers, slots, ...] keys and values, by SGLang's own way in."""
    layers = range(pool.start_layer, pool.start_layer + NUM_LAYERS)
    return torch.stack([pool.get_key_buffer(i) for i in layers]), torch.stack(
        [pool.get_value_buffer(i) for i in layers]
    )


SLOTS = {
    "apart": ([1, 2, 3, 4], [10, 13, 12, 11]),
    "in place": ([1, 2, 3, 4], [1, 2, 7, 4]),
    "one source, two targets": ([1, 1], [5, 6]),
    "none": ([], []),
}


@pytest.mark.parametrize(("source", "target"), SLOTS.values(), ids=SLOTS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_copy_moved(source: list[int], target: list[int], dtype: torch.dtype) -> None:
    """All layers, also where a token stays in its slot. Values bit by bit, keys as in one layer.
    No other slot is touched."""
    case = CASES["partial"]
    pool, table = make_pool(case, dtype, v_head_dim=12, start_layer=5), table_of(case)
    old_keys, old_values = contents(pool)
    p, q = random_positions(len(source), 1), random_positions(len(source), 2)
    slots = torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64)
    copy_moved(
        pool,
        table,
        source_slots=slots[0],
        source_positions=p,
        target_slots=slots[1],
        target_positions=q,
    )
    keys, values = contents(pool)
    for layer in range(NUM_LAYERS):
        assert torch.equal(keys[layer, target], moved(table, old_keys[layer, source], p, q))
        assert torch.equal(values[layer, target], old_values[layer, source])
    others = [slot for slot in range(NUM_SLOTS) if slot not in target]
    assert torch.equal(keys[:, others], old_keys[:, others])
    assert torch.equal(values[:, others], old_values[:, others])


OVERLAPS = {
    "one on": ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6]),
    "one back": ([2, 3, 4, 5, 6], [1, 2, 3, 4, 5]),
    "exchanged": ([1, 2, 3, 4], [3, 4, 1, 2]),
    "onto one that stays": ([1, 2, 2], [1, 2, 3]),
}


@pytest.mark.parametrize(("source", "target"), OVERLAPS.values(), ids=OVERLAPS.keys())
def test_target_that_is_anothers_source_is_refused(source: list[int], target: list[int]) -> None:
    """On CUDA programs run in any order: one would read what another has written."""
    pool, table = make_pool(CASES["llama"], torch.float32), table_of(CASES["llama"])
    before, positions = contents(pool), torch.arange(len(source))
    with pytest.raises(
        ValueError, match=r"target_slots: expected no source of another token, got \[\d"
    ):
        copy_moved(
            pool,
            table,
            source_slots=torch.tensor(source),
            source_positions=positions,
            target_slots=torch.tensor(target),
            target_positions=positions,
        )
    assert all(torch.equal(a, b) for a, b in zip(before, contents(pool), strict=True))


@pytest.mark.parametrize("name", ["llama", "yarn", "interleaved partial"])
@every_dtype
def test_blob_round_trip(name: str, dtype: torch.dtype) -> None:
    """Out of some slots and into others at the same positions.

    Values are equal bit by bit, keys but for two roundings: 1 ulp, 4 in float32.
    """
    case = CASES[name]
    pool, table = make_pool(case, dtype), table_of(case)
    old_keys, old_values = contents(pool)
    source, target = torch.tensor([3, 1, 9]), torch.tensor([14, 12, 20])
    positions = torch.tensor([900, 901, 902])
    keys, values = read_blob(pool, table, source, positions)
    assert torch.equal(
        keys, torch.stack([to_origin(table, k[source], positions) for k in old_keys])
    )
    assert torch.equal(values, old_values[:, source])
    write_blob(pool, table, keys, values, target_slots=target, target_positions=positions)
    new_keys, new_values = contents(pool)
    wanted = old_keys[:, source].flatten(0, 1)
    assert torch.equal(new_values[:, target], values)
    limit = (4 if dtype == torch.float32 else 1) * case.ulp(wanted, dtype)
    assert ((new_keys[:, target].flatten(0, 1).double() - wanted.double()).abs() <= limit).all()
    others = [slot for slot in range(NUM_SLOTS) if slot not in target.tolist()]
    assert torch.equal(new_keys[:, others], old_keys[:, others])
    assert torch.equal(new_values[:, others], old_values[:, others])


def test_blob_at_other_positions() -> None:
    """What is read at p and written at q is what a move gives, one rounding apart."""
    case, dtype = CASES["yarn"], torch.bfloat16
    pool, table = make_pool(case, dtype), table_of(case)
    slots, p, q = torch.tensor([1, 2, 3]), torch.tensor([5, 6, 7]), torch.tensor([1800, 1801, 1802])
    blob = read_blob(pool, table, slots, p)
    write_blob(pool, table, *blob, target_slots=slots + 8, target_positions=q)
    copy_moved(
        pool,
        table,
        source_slots=slots,
        source_positions=p,
        target_slots=slots + 16,
        target_positions=q,
    )
    keys, _ = contents(pool)
    copied = keys[:, slots + 16].flatten(0, 1)
    assert (
        (keys[:, slots + 8].flatten(0, 1).double() - copied.double()).abs()
        <= case.ulp(copied, dtype)
    ).all()


def test_blob_is_its_own() -> None:
    """Neither side changes the other later: a blob outlives its slots,
    and is written many times."""
    case = CASES["llama"]
    pool, table = make_pool(case, torch.float32), table_of(case)
    slots, positions = torch.tensor([1, 2]), torch.tensor([5, 6])
    keys, values = read_blob(pool, table, slots, positions)
    before = keys.clone(), values.clone()
    write_blob(pool, table, keys, values, target_slots=slots, target_positions=positions + 9)
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_case
def test_gpu_equals_cpu_without_synchronising(case: Case) -> None:
    """The same numbers, but for the last bit of each of a blob's two roundings;
    the blob comes from pinned memory."""
    pools = {
        "cpu": make_pool(case, torch.bfloat16),
        "cuda": make_pool(case, torch.bfloat16, device="cuda"),
    }
    results = []
    for device, pool in pools.items():
        table = table_of(case)
        table = RotaryTable(table.cos.to(device), table.sin.to(device), table.is_neox)
        slots, p, q = (
            x.to(device) for x in (torch.arange(1, 6), torch.arange(5) + 7, torch.arange(5) + 1900)
        )
        blob = [x.cpu().pin_memory() for x in read_blob(pool, table, slots, p)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            copy_moved(
                pool,
                table,
                source_slots=slots,
                source_positions=p,
                target_slots=slots + 5,
                target_positions=q,
            )
            write_blob(pool, table, blob[0], blob[1], target_slots=slots + 10, target_positions=q)
            read_blob(pool, table, slots, p)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([x.cpu() for x in contents(pool)])
    (cpu_keys, cpu_values), (keys, values) = results
    assert torch.equal(values, cpu_values)
    flat = cpu_keys.flatten(0, 1)
    assert (
        (keys.flatten(0, 1).double() - flat.double()).abs() <= 2 * case.ulp(flat, torch.bfloat16)
    ).all()


# Wrong arguments


def good() -> dict[str, Any]:
    """Arguments of every function below, all right."""
    case = CASES["partial"]
    four = torch.arange(1, 5)
    pool = make_pool(case, torch.bfloat16)
    blob = torch.zeros(NUM_LAYERS, 4, case.num_heads, case.head_dim, dtype=torch.bfloat16)
    return {
        "pool": pool,
        "table": table_of(case),
        "keys": blob,
        "values": blob,
        "slots": four,
        "positions": four,
    }


def do_copy(g: dict[str, Any], **wrong: Tensor) -> None:
    four = torch.arange(1, 5)
    names = ("source_slots", "source_positions", "target_slots", "target_positions")
    arguments: dict[str, Any] = {**dict.fromkeys(names, four), **wrong}
    copy_moved(g["pool"], g["table"], **arguments)


def do_read(g: dict[str, Any]) -> None:
    read_blob(g["pool"], g["table"], g["slots"], g["positions"])


def do_write(g: dict[str, Any]) -> None:
    write_blob(
        g["pool"],
        g["table"],
        g["keys"],
        g["values"],
        target_slots=g["slots"],
        target_positions=g["positions"],
    )


POOLED = (do_copy, do_read, do_write)


@pytest.mark.parametrize("function", POOLED)
def test_right_arguments(function: Callable[..., None]) -> None:
    """What the tests below spoil one by one."""
    function(good())


@pytest.mark.parametrize("function", [do_read, do_write])
@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.arange(3), r"expected shape \[4\], got \[3\]"),
        (torch.arange(4)[None], r"expected shape \[4\], got \[1, 4\]"),
        (torch.arange(4, dtype=torch.int32), "expected torch.int64, got torch.int32"),
        (torch.arange(4, device="meta"), "expected on cpu, got meta"),
        (
            torch.arange(4) + MAX_POSITIONS - 3,
            rf"expected positions in \[0, {MAX_POSITIONS}\), got 2045 to 2048",
        ),
        (torch.arange(4) - 1, r"expected positions in \[0, 2048\), got -1 to 2"),
    ],
)
def test_wrong_positions(function: Callable[..., None], positions: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=rf"positions: {message}"):
        function(good() | {"positions": positions})


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (torch.zeros(2, 4, 2, 64), r"expected shape \[3, 4, 2, 64\], got \[2, 4, 2, 64\]"),
        (torch.zeros(3, 5, 2, 64), r"got \[3, 5, 2, 64\]"),
        (torch.zeros(3, 4, 2, 32), r"got \[3, 4, 2, 32\]"),
        (torch.zeros(3, 4, 2, 64), "expected torch.bfloat16, got torch.float32"),
    ],
)
def test_wrong_blob(name: str, blob: Tensor, message: str) -> None:
    """The pool's dtype too: a silent cast would be a rounding without a trace."""
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        do_write(good() | {name: blob})


@pytest.mark.parametrize("function", [do_read, do_write])
@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.arange(4)[None], r"expected shape \[4\], got \[1, 4\]"),
        (torch.arange(4, dtype=torch.int32), "expected torch.int64, got torch.int32"),
        (torch.arange(4, device="meta"), "expected on cpu, got meta"),
    ],
)
def test_wrong_slots(function: Callable[..., None], slots: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"slots: {message}"):
        function(good() | {"slots": slots})


@pytest.mark.parametrize(
    "name", ["source_slots", "source_positions", "target_slots", "target_positions"]
)
def test_wrong_move_writes_nothing(name: str) -> None:
    """Of three tokens for four, or not int64; each argument is named."""
    given = good()
    before = contents(given["pool"])
    number = "3" if name != "source_slots" else "4"
    with pytest.raises(ValueError, match=rf": expected shape .* got \[{number}\]"):
        do_copy(given, **{name: torch.arange(3)})
    with pytest.raises(ValueError, match=f"{name}: expected torch.int64, got torch.float32"):
        do_copy(given, **{name: torch.zeros(4)})
    assert all(torch.equal(a, b) for a, b in zip(before, contents(given["pool"]), strict=True))


@pytest.mark.parametrize("function", POOLED)
def test_wrong_pool(function: Callable[..., None]) -> None:
    """Quantised, or of heads smaller than what rotates."""
    for dtype, case, message in (
        (
            torch.float8_e4m3fn,
            CASES["partial"],
            "pool: expected torch.bfloat16 or .* got torch.uint8",
        ),
        (
            torch.bfloat16,
            Case([], 1.0, head_dim=8),
            r"pool: expected .* head_dim >= 16\], got \[24, 2, 8\]",
        ),
    ):
        pool = MHATokenToKVPool(NUM_SLOTS - 1, 1, dtype, 2, case.head_dim, NUM_LAYERS, "cpu", False)
        with pytest.raises(ValueError, match=message):
            function(good() | {"pool": pool})


@pytest.mark.parametrize("function", POOLED)
def test_table_on_another_device(function: Callable[..., None]) -> None:
    given = good()
    elsewhere = RotaryTable(given["table"].cos.to("meta"), given["table"].sin.to("meta"), True)
    with pytest.raises(ValueError, match="table: expected on cpu, got meta"):
        function(given | {"table": elsewhere})
