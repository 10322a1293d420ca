"""Moved keys against RoPE's definition, against SGLang's own modules, and in a real KV pool."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from sglang_chunkcache.fusion.relocate import (
    ROTARY_CLASSES,
    KeyTurn,
    RotaryTable,
    copy_moved,
)
from tests.kit.tensors import CASES, DTYPES, MAX_POSITIONS, Case, move, random_positions

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def stored_by_sglang(case: Case, raw: Tensor, positions: Tensor, *, float32: bool) -> Tensor:
    """Keys as SGLang's module writes them; `float32` as on CUDA:
    float32 table and arithmetic, one rounding."""
    flat = raw.reshape(len(raw), -1).to(torch.float32 if float32 else raw.dtype)
    stored: Tensor = case.module(flat.dtype).forward_native(positions, flat, flat)[1]
    return stored.view(raw.shape).to(raw.dtype)


def pool_of(keys: Tensor) -> Any:
    """A pool of one layer: `keys` in its first slots, as many free ones after them."""
    buffer = torch.cat([keys, torch.zeros_like(keys)])
    return SimpleNamespace(k_buffer=[buffer], v_buffer=[buffer.clone()], dtype=keys.dtype)


def moved(table: RotaryTable, keys: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Keys stored at positions `old` as `copy_moved` stores them at `new`."""
    pool, slots = pool_of(keys), torch.arange(len(keys))
    move(pool, table, (slots, old), (slots + len(keys), new))
    kept, result = pool.k_buffer[0].chunk(2)
    assert same_bits(kept, keys), "the source stays readable for others"
    return result  # type: ignore[no-any-return]


def turned(table: RotaryTable, keys: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Keys stored at positions `old` as `KeyTurn` leaves them, for `new`."""
    pool, slots = pool_of(keys), torch.arange(len(keys))
    KeyTurn(pool, table, old, slots, new)(range(1))
    result, others = pool.k_buffer[0].chunk(2)
    assert not others.any()
    assert same_bits(pool.v_buffer[0][: len(keys)], keys)
    return result  # type: ignore[no-any-return]


def assert_within(got: Tensor, wanted: Tensor, limit: Tensor) -> None:
    assert ((got.double() - wanted.double()).abs() <= limit).all()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# Against the definition


@every_case
def test_keys_equal_the_definition(case: Case) -> None:
    """SGLang's angles are float32, p * 2^-24 at p. `mscale` stays in an un-rotated key."""
    old, new = [0, 7, 1500, 40, MAX_POSITIONS - 1], [3, 0, 12, 2000, MAX_POSITIONS - 2]
    raw, table = case.raw(len(old), torch.float32), case.table()
    stored, wanted, origin = (case.rotated(raw, at).float() for at in (old, new, [0] * len(old)))
    p, q = torch.tensor(old), torch.tensor(new)
    got, limit = moved(table, stored, p, q), 3e-4 * case.norms(wanted)
    assert_within(got, wanted, limit)
    assert torch.equal(got[..., case.rotary_dim :], raw[..., case.rotary_dim :])
    zero = torch.zeros_like(p)
    assert_within(turned(table, stored, p, zero), origin, limit)
    assert_within(turned(table, origin, zero, p), stored, limit)


# Against itself


@every_case
@every_dtype
def test_move_by_zero_changes_no_bit(case: Case, dtype: torch.dtype) -> None:
    keys, positions = case.raw(200, dtype), random_positions(200, 1)
    assert torch.equal(moved(case.table(dtype), keys, positions, positions), keys)


@every_dtype
def test_what_does_not_turn_keeps_every_bit(dtype: torch.dtype) -> None:
    """NaNs with their payload, infinities, zeros: past `rotary_dim`, and all of a move by 0."""
    case, table, positions = CASES["partial"], CASES["partial"].table(), torch.tensor([5, 900, 41])
    size = 3, case.num_heads, case.head_dim
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 1e-41], dtype=dtype)
    keys = odd.repeat(torch.Size(size).numel())[: torch.Size(size).numel()].view(size)
    keys.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])[keys.isnan()] += 1  # a payload
    assert same_bits(moved(table, keys, positions, positions), keys)
    turned = moved(table, keys, positions, positions + 1)
    assert same_bits(turned[..., case.rotary_dim :], keys[..., case.rotary_dim :])


@every_case
@every_dtype
def test_move_twice_equals_move_once(case: Case, dtype: torch.dtype) -> None:
    """But for the rounding between: one ulp, four in float32, where products round as well."""
    keys, table = case.raw(200, dtype), case.table(dtype)
    p, q, r = (random_positions(200, seed) for seed in (1, 2, 3))
    once, twice = moved(table, keys, p, r), moved(table, moved(table, keys, p, q), q, r)
    assert_within(once, twice, (4 if dtype == torch.float32 else 1) * case.ulp(once, dtype))


# Against SGLang


@every_case
@every_dtype
def test_moved_key_equals_the_first_layers(case: Case, dtype: torch.dtype) -> None:
    """A first-layer key depends on its token and position alone, so the moved one is the one SGLang
    would store at q.

    Rounded once: 1 ulp. SGLang's path without CUDA also rounds table, products and sum to the
    dtype, which makes 3 of its own, and float32 products round visibly: 4.
    """
    p, q = (random_positions(500, seed) for seed in (1, 2))
    raw, table = case.raw(500, dtype), case.table(dtype)
    for float32, ulps in ((True, 1), (False, 3)):
        move_ulps = 4 if dtype == torch.float32 else ulps
        stored, wanted = (stored_by_sglang(case, raw, at, float32=float32) for at in (p, q))
        ulp = case.ulp(wanted, dtype)
        assert_within(moved(table, stored, p, q), wanted, move_ulps * ulp)


@pytest.mark.parametrize("name", ["llama", "yarn", "linear", "dynamic", "llama3"])
def test_table_grows_as_sglangs_does(name: str) -> None:
    """SGLang lengthens a table to the context length, some classes by another formula."""
    # copies, for no other test
    own, exact = (deepcopy(CASES[name].module(d)) for d in (torch.bfloat16, torch.float32))
    for module in (own, exact):
        module._ensure_cos_sin_cache_length(3 * MAX_POSITIONS)
    before = own.cos_sin_cache
    table = RotaryTable.of(own)
    assert table.num_positions == len(exact.cos_sin_cache) > 3 * MAX_POSITIONS
    assert torch.equal(torch.cat((table.cos, table.sin), dim=1), exact.cos_sin_cache)
    assert own.cos_sin_cache is before


def sglang_classes() -> set[str]:
    """Every rotary class SGLang makes from a config."""
    return {name for name in vars(factory) if name.endswith("Embedding")}


def test_supported_classes_exist() -> None:
    assert sglang_classes() > ROTARY_CLASSES


@pytest.mark.parametrize("name", sorted(sglang_classes() - ROTARY_CLASSES))
def test_other_class_is_refused(name: str) -> None:
    """By name, so that the log says why; a subclass of a supported one is another class."""
    cls = getattr(factory, name)
    with pytest.raises(ValueError, match=f"rotary embedding {name} is not supported"):
        RotaryTable.of(cls.__new__(cls))


# In a pool

NUM_LAYERS, NUM_SLOTS = 3, 24


def make_pool(case: Case, dtype: torch.dtype, device: str = "cpu", **options: Any) -> Any:
    """SGLang's pool with random KV."""
    sizes = NUM_SLOTS - 1, 1, dtype, case.num_heads, case.head_dim, NUM_LAYERS
    pool = MHATokenToKVPool(*sizes, device, False, **options)
    generator = torch.Generator().manual_seed(0)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return pool


def contents(pool: Any) -> tuple[Tensor, Tensor]:
    """[num_layers, slots, ...] keys and values, by SGLang's own way in."""
    layers = range(pool.start_layer, pool.start_layer + NUM_LAYERS)
    keys, values = map(pool.get_key_buffer, layers), map(pool.get_value_buffer, layers)
    return torch.stack([*keys]), torch.stack([*values])


def assert_only_changed(pool: Any, before: tuple[Tensor, Tensor], slots: list[int]) -> None:
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    for new, old in zip(contents(pool), before, strict=True):
        assert torch.equal(new[:, others], old[:, others])


SLOTS = {
    "apart": ([1, 2, 3, 4], [10, 13, 12, 11]),
    "in place": ([1, 2, 3, 4], [1, 2, 7, 4]),
    "one source, two targets": ([1, 1], [5, 6]),
    "none": ([], []),
}


@pytest.mark.parametrize(("source", "target"), SLOTS.values(), ids=SLOTS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_copy_moved(source: list[int], target: list[int], dtype: torch.dtype) -> None:
    """Values bit by bit, keys as in one layer. No other slot is touched."""
    case = CASES["partial"]
    pool, table = make_pool(case, dtype, v_head_dim=12, start_layer=5, end_layer=7), case.table()
    before = contents(pool)
    p, q = (random_positions(len(source), seed) for seed in (1, 2))
    slots = [torch.tensor(each, dtype=torch.int64) for each in (source, target)]
    move(pool, table, (slots[0], p), (slots[1], q))
    keys, values = contents(pool)
    for layer in range(NUM_LAYERS):
        assert torch.equal(keys[layer, target], moved(table, before[0][layer, source], p, q))
        assert torch.equal(values[layer, target], before[1][layer, source])
    assert_only_changed(pool, before, target)


OVERLAPS = {
    "one on": ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6]),
    "one back": ([2, 3, 4, 5, 6], [1, 2, 3, 4, 5]),
    "exchanged": ([1, 2, 3, 4], [3, 4, 1, 2]),
    "onto one that stays": ([1, 2, 2], [1, 2, 3]),
}


@pytest.mark.parametrize(("source", "target"), OVERLAPS.values(), ids=OVERLAPS.keys())
def test_target_that_is_anothers_source_is_refused(source: list[int], target: list[int]) -> None:
    """On CUDA programs run in any order: one would read what another has written."""
    pool, table = make_pool(CASES["llama"], torch.float32), CASES["llama"].table()
    before, at = contents(pool), torch.arange(len(source))
    message = r"target_slots: expected no source of another token, got \[\d"
    with pytest.raises(ValueError, match=message):
        move(pool, table, (torch.tensor(source), at), (torch.tensor(target), at))
    assert_only_changed(pool, before, [])


@pytest.mark.parametrize("name", ["llama", "yarn", "interleaved partial"])
@every_dtype
def test_turned_in_place_as_moved(name: str, dtype: torch.dtype) -> None:
    """Bit by bit, layer by layer, and nothing else changes."""
    case = CASES[name]
    pool, table = make_pool(case, dtype), case.table()
    source, target = torch.tensor([3, 1, 9]), torch.tensor([14, 12, 20])
    p, q = torch.tensor([900, 901, 902]), torch.tensor([11, 1900, 902])
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[target] = buffer[source]
    before = contents(pool)
    turn = KeyTurn(pool, table, p, target, q)
    for layer in range(NUM_LAYERS):
        turn(range(layer, layer + 1))
    written = contents(pool)
    assert_only_changed(pool, before, target.tolist())
    move(pool, table, (source, p), (target, q))
    assert all(map(torch.equal, written, contents(pool)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_case
def test_gpu_equals_cpu_without_synchronising(case: Case) -> None:
    """But for the last bit of a rounding."""
    results = []
    for device in ("cpu", "cuda"):
        pool, table = make_pool(case, torch.bfloat16, device), case.table()
        table = RotaryTable(table.cos.to(device), table.sin.to(device), table.is_neox)
        slots = torch.arange(1, 6, device=device)
        p, q = slots + 6, slots + 1899
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            move(pool, table, (slots, p), (slots + 5, q))
            KeyTurn(pool, table, p, slots + 10, q)(range(NUM_LAYERS))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([x.cpu() for x in contents(pool)])
    (cpu_keys, cpu_values), (keys, values) = results
    assert torch.equal(values, cpu_values)
    flat = cpu_keys.flatten(0, 1)
    assert_within(keys.flatten(0, 1), flat, 2 * case.ulp(flat, torch.bfloat16))


# Wrong arguments

FOUR = torch.arange(1, 5)
INDEX = [
    (FOUR[None], r"expected shape \[4\], got \[1, 4\]"),
    (FOUR.int(), "expected torch.int64, got torch.int32"),
    (FOUR.to("meta"), "expected on cpu, got meta"),
]
POSITIONS = [
    *INDEX,
    (torch.arange(3), r"expected shape \[4\], got \[3\]"),
    (FOUR + 2044, r"expected positions in \[0, 2048\), got 2045 to 2048"),
    (FOUR - 2, r"expected positions in \[0, 2048\), got -1 to 2"),
]
SHORT = [(torch.arange(3), ""), (torch.zeros(4), "expected torch.int64, got torch.float32")]
NAMES = ("source_slots", "source_positions", "target_slots", "target_positions")
WRONG: dict[str, dict[str, Any]] = {
    "turn": {"slots": INDEX, "positions": POSITIONS, "source_positions": POSITIONS},
    "move": dict.fromkeys(NAMES, SHORT),
}
META = torch.zeros(9, 8, device="meta")


def call(kind: str, **given: Any) -> None:
    """With all arguments right but those that are given."""
    case = CASES["partial"]
    good = {"pool": make_pool(case, torch.bfloat16), "table": case.table()}
    given = good | {"slots": FOUR, "positions": FOUR} | given
    pool, table, slots, positions = (given[x] for x in ("pool", "table", "slots", "positions"))
    if kind == "move":
        copy_moved(pool, table, **{name: given.get(name, FOUR) for name in NAMES})
    else:
        KeyTurn(pool, table, given.get("source_positions", FOUR), slots, positions)


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_write_nothing(kind: str) -> None:
    pool = make_pool(CASES["partial"], torch.bfloat16)
    before = contents(pool)
    for name, values in WRONG[kind].items():
        for value, message in values:
            with pytest.raises(ValueError, match=f"{name if message else ''}: {message}"):
                call(kind, pool=pool, **{name: value})
    assert_only_changed(pool, before, [])


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_pool_or_table(kind: str) -> None:
    case, small = CASES["partial"], Case([], 1.0, head_dim=8)
    for wrong, message in (
        ({"pool": make_pool(case, torch.float8_e4m3fn)}, "pool: .*bfloat16 or .* got torch.uint8"),
        ({"pool": make_pool(small, torch.bfloat16)}, r"pool: .* >= 16\], got \[24, 2, 8\]"),
        ({"table": RotaryTable(META, META, True)}, "table: expected on cpu, got meta"),
    ):
        with pytest.raises(ValueError, match=message):
            call(kind, **wrong)
