"""The kernel equals torch, bit by bit: in Triton's interpreter, and on CUDA where there is one.
Also what it compiles to.

The device rounds to the nearest, as the interpreter is made to (tests/kit/triton_interpreter.py):
the compiled code below is asked about that.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from sglang_chunkcache.fusion import relocate_kernel
from sglang_chunkcache.fusion.relocate import KeyTurn, RotaryTable
from tests.examples import examples
from tests.kit.tensors import CASES, DTYPES, move, random_positions
from tests.kit.triton_interpreter import interpreted

KINDS = ("move", "turn")
BITS = {2: torch.int16, 4: torch.int32}
NUM_SLOTS = 40
# numpy's, about infinities, which are meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Rig(NamedTuple):
    """Where a kernel runs."""

    kernel: ModuleType
    device: str


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """relocate.py finds the interpreted module, or the compiled one."""
    if request.param == "cuda":
        yield Rig(relocate_kernel, "cuda")
        return
    with pytest.MonkeyPatch.context() as patch, interpreted() as module:
        patch.setitem(sys.modules, module.__name__, module)
        yield Rig(module, "cpu")


class Shape(NamedTuple):
    """Of a pool. Of the case's pairs the last `dropped` are left out,
    and `unturned` numbers do not turn."""

    case: str
    dtype: torch.dtype
    num_layers: int = 2
    num_heads: int = 2
    unturned: int = 0
    v_head_dim: int = 32
    dropped: int = 0

    @property
    def head_dim(self) -> int:
        return CASES[self.case].rotary_dim - 2 * self.dropped + self.unturned

    def table(self, device: str) -> RotaryTable:
        whole = CASES[self.case].table()
        num_pairs = whole.cos.shape[1] - self.dropped
        return RotaryTable(
            whole.cos[:, :num_pairs].to(device), whole.sin[:, :num_pairs].to(device), whole.is_neox
        )


def make_pool(shape: Shape, device: str) -> Any:
    """Random KV of all magnitudes; subnormals and infinities in it."""
    generator = torch.Generator().manual_seed(0)

    def buffer(head_dim: int) -> Tensor:
        numbers = torch.randn(NUM_SLOTS, shape.num_heads, head_dim, generator=generator)
        numbers *= (8 * torch.randn(NUM_SLOTS, 1, 1, generator=generator)).exp()
        flat = numbers.view(-1)
        flat[::41], flat[7::53], flat[5::59] = 1e-39, -0.0, float("inf")
        return numbers.to(shape.dtype).to(device)

    sides = [
        [buffer(dim) for _ in range(shape.num_layers)] for dim in (shape.head_dim, shape.v_head_dim)
    ]
    return SimpleNamespace(k_buffer=sides[0], v_buffer=sides[1], dtype=shape.dtype)


def do(kind: str, shape: Shape, device: str, num_tokens: int, *, use_kernel: bool) -> list[Tensor]:
    """The pool's buffers, after a move of random tokens, or a turn in the upper layers."""
    pool, table = make_pool(shape, device), shape.table(device)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(num_tokens))
    source, target = (slots[at : at + num_tokens].to(device) for at in (0, NUM_SLOTS - num_tokens))
    old, new = (random_positions(num_tokens, seed).to(device) for seed in (1, 2))
    old[::3] = new[::3]  # some stay where they are
    if kind == "move":
        move(pool, table, (source, old), (target, new), use_kernel=use_kernel)
    else:
        turn = KeyTurn(pool, table, old, target, new, use_kernel=use_kernel)
        turn(range(shape.num_layers // 2, shape.num_layers))
    return [*pool.k_buffer, *pool.v_buffer]


def assert_same(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Bit by bit; NaNs that arithmetic made may differ in their payload."""
    for a, b in zip(got, wanted, strict=True):
        bits = BITS[a.element_size()]
        assert bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


shapes = st.builds(
    Shape,
    case=st.sampled_from(sorted(CASES)),
    dtype=st.sampled_from(DTYPES),
    num_layers=st.integers(1, 3),
    num_heads=st.integers(1, 5),
    unturned=st.sampled_from([0, 0, 1, 8, 48]),
    v_head_dim=st.sampled_from([1, 7, 24, 64]),
    dropped=st.sampled_from([0, 0, 1, 3]),
)


@given(st.sampled_from(KINDS), shapes, st.sampled_from([1, 2, 4]), st.integers(0, 9))
@example("move", Shape("llama", torch.bfloat16), 4, 4)
@example("move", Shape("interleaved partial", torch.float16, num_heads=3, unturned=7), 2, 5)
@example("move", Shape("qwen2", torch.bfloat16, num_heads=3, v_head_dim=24, dropped=12), 2, 3)
@example("move", Shape("interleaved", torch.bfloat16, num_heads=3, unturned=1, dropped=6), 2, 3)
@example("turn", Shape("partial", torch.bfloat16, 3, 5, unturned=48, v_head_dim=7), 4, 9)
@example("turn", Shape("interleaved", torch.float32, num_heads=1), 1, 1)
@settings(max_examples=examples(60))
def test_equals_torch(rig: Rig, kind: str, shape: Shape, block: int, num_tokens: int) -> None:
    """Over odd sizes, block edges and scattered slots; what is no target keeps every bit."""
    row = shape.num_heads * max(shape.head_dim, shape.v_head_dim) * shape.dtype.itemsize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.kernel, "TILE_BYTES", block * row)
        got = do(kind, shape, rig.device, num_tokens, use_kernel=True)
    wanted = do(kind, shape, rig.device, num_tokens, use_kernel=False)
    assert_same(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["partial", "interleaved partial"])
def test_what_does_not_turn_keeps_every_bit(rig: Rig, name: str, dtype: torch.dtype) -> None:
    """NaNs with their payload, infinities, zeros: past `rotary_dim`, and all of a move by 0."""
    shape = Shape(name, dtype, unturned=48)
    pool, table = make_pool(shape, rig.device), shape.table(rig.device)
    bits = BITS[dtype.itemsize]
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.view(torch.uint8).random_()
    slots = torch.arange(5, device=rig.device)
    for on, moved_by, first in ((10, 0, 0), (20, 3, table.rotary_dim)):
        target = slots + on, slots + 700 + moved_by
        move(pool, table, (slots, slots + 700), target, use_kernel=True)
        for buffer in (*(keys[..., first:] for keys in pool.k_buffer), *pool.v_buffer):
            assert torch.equal(buffer[slots + on].view(bits), buffer[slots].view(bits))


def test_in_place(rig: Rig) -> None:
    shape = Shape("qwen3", torch.bfloat16)
    pools, at = [make_pool(shape, rig.device) for _ in range(2)], torch.arange(5, device=rig.device)
    for pool, use_kernel in zip(pools, (True, False), strict=True):
        move(pool, shape.table(rig.device), (at, at), (at, at + 77), use_kernel=use_kernel)
    assert_same(pools[0].k_buffer, pools[1].k_buffer)


def test_buffers_that_were_made_anew(rig: Rig) -> None:
    """A pool that wakes may have other memory, and the old one's is somebody else's."""
    shape, slots = Shape("llama", torch.bfloat16), torch.tensor([1, 2], device=rig.device)
    pool, table = make_pool(shape, rig.device), shape.table(rig.device)
    places = (slots, slots + 4), (slots + 10, slots + 4)
    move(pool, table, *places, use_kernel=True)
    old_values = pool.v_buffer  # kept alive
    pool.v_buffer = [buffer + 1 for buffer in old_values]
    move(pool, table, *places, use_kernel=True)
    for buffer in pool.v_buffer:
        assert torch.equal(buffer[slots + 10], buffer[slots])


@pytest.mark.parametrize("wrong", ["keys", "values", "cos"])
def test_what_is_not_contiguous_is_refused(wrong: str) -> None:
    """The kernel reckons addresses, and would read other numbers."""

    def zeros(name: str, *size: int) -> Tensor:
        return torch.zeros(*size, 1 + (name == wrong))[..., 0]

    keys, values = ([zeros(side, 4, 2, 32)] * 2 for side in ("keys", "values"))
    cos, sin = zeros("cos", 3, 1, 16), zeros("", 3, 1, 16)
    name = {"cos": "cos, sin"}.get(wrong, wrong)
    more: Any = {"is_neox": True, "source": torch.arange(3), "target": torch.arange(3)}
    with pytest.raises(ValueError, match=f"{name}: expected contiguous"):
        relocate_kernel.launch_arguments(keys, values, cos, sin, **more)


# What it compiles to, for an H100, without one

POINTERS = dict(zip((torch.int64, *DTYPES), ("*i64", "*bf16", "*fp16", "*fp32"), strict=True))


def ptx_of(
    dtype: torch.dtype, *, num_heads: int, head_dim: int, num_pairs: int, is_neox: bool
) -> str:
    """The kernel as a launch on an H100 would have it compiled."""
    keys, values = ([torch.zeros(8, num_heads, head_dim, dtype=dtype)] * 2 for _ in range(2))
    turn, slots = torch.zeros(4, 1, num_pairs), torch.arange(4)
    arguments, _ = relocate_kernel.launch_arguments(
        keys, values, turn, turn, is_neox=is_neox, source=slots, target=slots
    )
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(relocate_kernel._relocate.params):
        value = arguments[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        else:
            signature[parameter.name] = "i32"
    kernel = ASTSource(relocate_kernel._relocate, signature, constants, attributes)
    hopper = GPUTarget("cuda", 90, 32)
    compiled = compile_kernel(kernel, target=hopper, options=relocate_kernel.OPTIONS)
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])


@pytest.mark.nvcc
@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "is_neox"), [*product(DTYPES, [True, False])], ids=str)
def test_compiled_moves_sixteen_bytes_at_a_time(dtype: torch.dtype, is_neox: bool) -> None:
    """No narrower access but to addresses and slots, no number stored twice."""
    ptx = ptx_of(dtype, num_heads=8, head_dim=128, num_pairs=64, is_neox=is_neox)
    accesses = Counter(re.findall(r"(?:ld|st)\.global[\w.]*", ptx))
    assert set(accesses) == {"ld.global.v4.b32", "st.global.v4.b32", "ld.global.b64"}
    a_thread = relocate_kernel.TILE_BYTES // (32 * relocate_kernel.OPTIONS["num_warps"])
    assert 16 * accesses["st.global.v4.b32"] == 2 * a_thread  # keys' branch and values'


@pytest.mark.nvcc
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_rounds_as_torch_does(dtype: torch.dtype) -> None:
    """Products and sums each on their own, to the nearest; subnormals kept."""
    ptx = ptx_of(dtype, num_heads=2, head_dim=64, num_pairs=32, is_neox=True)
    operations = Counter(re.findall(r"\b(?:mul|add|sub|fma|cvt)\S*f(?:32|16)\S*", ptx))
    short = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: ""}[dtype]
    down = {f"cvt.rn.{short}.f32", f"cvt.rn.{short}x2.f32"} if short else set()
    exact = {"mul.rn.f32", "add.rn.f32", "sub.rn.f32"}
    assert exact <= set(operations)
    assert set(operations) - {f"cvt.f32.{short}"} <= exact | down
    assert not short or set(operations) & down
