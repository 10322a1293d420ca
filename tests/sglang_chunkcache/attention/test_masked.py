"""`MaskedAttention` equals loops in float64, over a pool and a layer that are nothing but
tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_chunkcache.attention import masked
from sglang_chunkcache.attention.base import PassSequence, SparseRequest
from sglang_chunkcache.attention.masked import (
    MaskedAttention,
    Observer,
    SequenceAttention,
    StopPass,
)
from sglang_chunkcache.attention.masked_layout import plan
from tests.kit.tensors import Pool, make_layer
from tests.reference.attention import attend

HEAD_DIM = 16
SCALE = 0.3
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_pool(
    num_slots: int = 40, num_kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> Pool:
    return Pool(torch.randn(1, 2, num_slots, num_kv_heads, HEAD_DIM).to(dtype))


class Recorder(Observer):
    """Keeps what each sequence attends with."""

    def __init__(self) -> None:
        self.seen: list[SequenceAttention] = []

    def on_attention(self, layer_id: int, sequence: int, attention: SequenceAttention) -> None:
        self.seen.append(attention)


def make_sequence(
    positions: Sequence[int], kv: dict[int, int], *, writes: bool = False, own: bool = True
) -> PassSequence:
    """Tokens at `positions` over `kv`: position -> slot."""
    tokens, slots = torch.tensor(positions, dtype=torch.int64), torch.tensor([*kv.values()])
    keys = torch.tensor([*kv], dtype=torch.int64)
    request = SparseRequest(tokens, slots.long(), keys)
    out_slots = torch.tensor([kv[p] for p in positions]).long() if writes else None
    return PassSequence(torch.zeros_like(tokens), request, out_slots, own=own)


def run(
    sequences: Sequence[PassSequence],
    pool: Pool,
    *,
    block_rows: int = 1024,
    observer: Observer | None = None,
    layer: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer over random q, k, v; returns them and the output, per token and head."""
    dtype, num_kv_heads = pool.keys.dtype, pool.keys.shape[1]
    layer = layer or make_layer(0, 4, num_kv_heads, HEAD_DIM)
    layout = plan(sequences, "cpu", block_rows=block_rows)
    total = len(layout.positions)
    queries = torch.randn(total, 4, HEAD_DIM).to(dtype)
    keys, values = (torch.randn(total, num_kv_heads, HEAD_DIM).to(dtype) for _ in range(2))
    runner = SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=pool)
    flat = (queries.flatten(1), keys.flatten(1), values.flatten(1))
    out = MaskedAttention(runner, layout, observer).forward_extend(*flat, layer, None, **kwargs)
    assert out.shape == (total, 4 * HEAD_DIM)
    return queries, keys, values, out.view(queries.shape)


def expect(
    sequence: PassSequence, pool: Pool, rows: Any, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """The reference's output and weights for one sequence; the pool as it is after the pass."""
    positions, slots = sequence.request.positions, sequence.request.kv_slots
    seen_keys, seen_values = pool.keys[slots], pool.values[slots]
    key_positions = sequence.request.key_positions()
    if sequence.out_slots is None and sequence.own:
        key_positions, order = torch.cat([key_positions, positions]).sort()
        seen_keys = torch.cat([seen_keys, keys[rows]])[order]
        seen_values = torch.cat([seen_values, values[rows]])[order]
    return attend(queries[rows], seen_keys, seen_values, positions, key_positions, SCALE)


def assert_runs(sequences: Sequence[PassSequence], pool: Pool, **options: Any) -> None:
    """What is written is, and attention over it is the reference's."""
    queries, keys, values, out = run(sequences, pool, **options)
    lens = [len(sequence.token_ids) for sequence in sequences]
    for sequence, rows in zip(sequences, torch.split(torch.arange(sum(lens)), lens), strict=True):
        if sequence.out_slots is not None:
            assert torch.equal(pool.keys[sequence.out_slots], keys[rows])
            assert torch.equal(pool.values[sequence.out_slots], values[rows])
        expected, _ = expect(sequence, pool, rows, queries, keys, values)
        atol = TOLERANCES[out.dtype]
        torch.testing.assert_close(out[rows].double(), expected, rtol=0, atol=atol)


def row_of(num_positions: int) -> dict[int, int]:
    """A row of the request table whose slots are not in order."""
    return dict(enumerate((torch.randperm(num_positions) + 1).tolist()))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


POSITIONS = [[0], [29], [3, 4, 11, 28], list(range(30)), list(range(20, 30))]
PAIRWISE = [
    (positions, heads, (1, 3, 1024)[(i + j) % 3], (torch.float32, torch.bfloat16)[(i + j) % 2])
    for i, positions in enumerate(POSITIONS)
    for j, heads in enumerate([4, 2, 1])
]
"""Each value with each value of every other parameter."""


@pytest.mark.parametrize(("positions", "num_kv_heads", "block_rows", "dtype"), PAIRWISE)
def test_scattered_tokens_equal_the_reference(
    positions: list[int], num_kv_heads: int, block_rows: int, dtype: torch.dtype
) -> None:
    """However queries are blocked and heads are grouped."""
    sequence = make_sequence(positions, row_of(30), writes=True)
    assert_runs([sequence], make_pool(40, num_kv_heads, dtype), block_rows=block_rows)


def test_masks_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "MASK_BYTES", 0)
    assert_runs([make_sequence([3, 9, 20], row_of(30), writes=True)], make_pool())


@pytest.mark.parametrize("positions", [[10, 11, 12], [3, 5, 14], [0, 1, 2], [19]])
@pytest.mark.parametrize("block_rows", [1, 2, 1024])
def test_reading_only_leaves_the_pool_alone(positions: list[int], block_rows: int) -> None:
    """Fresh keys are sorted in by position; `own=False`: they do not count, the pool's do."""
    pool, row = make_pool(), row_of(20)
    before = pool.buffers.clone()
    others = {p: slot for p, slot in row.items() if p not in (*positions, 7, 8)}
    for kv, own in ((others, True), ({}, True), (row, False)):
        assert_runs([make_sequence(positions, kv, own=own)], pool, block_rows=block_rows)
    assert torch.equal(pool.buffers, before)


def test_one_sequence_reads_what_another_writes() -> None:
    shared = row_of(10)
    writer = make_sequence([4, 5, 6, 7], shared, writes=True)
    reader = make_sequence([10, 11], {**shared, 10: 50, 11: 51}, writes=True)
    looker = make_sequence([12], {**shared, 10: 50, 11: 51})
    for sequences in ([reader, looker, writer], [writer, reader, looker]):
        assert_runs(sequences, make_pool(60))


@pytest.mark.parametrize("weight_bytes", [1, 4 * 4 * 20 * 2, 1 << 20])
def test_observed_weights_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, weight_bytes: int
) -> None:
    """Piece by piece or at once; each query's once, zero where it does not look."""
    monkeypatch.setattr(masked, "WEIGHT_BYTES", weight_bytes)
    pool, recorder = make_pool(), Recorder()
    sequence = make_sequence([5, 10, 15, 20], {p: s for p, s in row_of(20).items() if p % 5})
    queries, keys, values, _ = run([sequence], pool, observer=recorder)
    _, expected = expect(sequence, pool, slice(None), queries, keys, values)
    pieces = list(recorder.seen[0].weights())
    assert [start for start, _, _ in pieces] == [0, *(end for _, end, _ in pieces[:-1])]
    assert len(pieces) == {1: 4, 4 * 4 * 20 * 2: 2, 1 << 20: 1}[weight_bytes]
    found = torch.cat([weights for _, _, weights in pieces], 1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How many numbers the largest result has."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not func.is_view:
            self.size = max(self.size, found.numel())
        return found


def test_weights_copy_keys_once_for_all_query_heads_of_a_kv_head() -> None:
    num_keys, num_kv_heads, group = 500, 2, 4
    keys = torch.randn(num_keys, num_kv_heads, HEAD_DIM, dtype=torch.bfloat16)
    queries = torch.randn(2, num_kv_heads * group, HEAD_DIM, dtype=torch.bfloat16)
    positions = torch.tensor([num_keys - 2, num_keys - 1])
    attention = SequenceAttention(queries, keys, positions, torch.arange(num_keys), SCALE)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        list(attention.weights())
    assert largest.size == keys.numel()


def test_an_observer_may_stop_before_anything_is_written() -> None:
    """Fresh K/V is shown first, so a probe that only wants it leaves no trace."""

    class Stop(Observer):
        def on_kv(self, layer_id: int, keys: Tensor, values: Tensor) -> None:
            raise StopPass

    pool = make_pool()
    before = pool.keys.clone()
    with pytest.raises(StopPass):
        run([make_sequence([3], row_of(30), writes=True)], pool, observer=Stop())
    assert torch.equal(pool.keys, before)


def test_blocks_end_at_their_last_query() -> None:
    """A block has no mask where all its queries see the same keys."""
    sequence = make_sequence([2, 3, 8], row_of(10), writes=True)
    (layout,) = plan([sequence], "cpu", block_rows=2).sequences
    assert layout.blocks == ((0, 2, 4, True), (2, 3, 9, False))


@pytest.mark.parametrize("writes", [True, False])
def test_layout_neither_lists_nor_sorts_tokens(
    writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host would do so before each pass, with all keys of the prompt."""
    kv = row_of(10) if writes else dict.fromkeys((0, 1, 4, 9), 7)
    sequence = make_sequence([2, 3, 8], kv, writes=writes)
    for name in ("tolist", "sort"):
        monkeypatch.setattr(Tensor, name, None)
    (layout,) = plan([sequence], "cpu", block_rows=2).sequences
    if writes:
        assert layout.key_order is None
    else:
        assert layout.key_order is not None
        assert [int(at) for at in layout.key_order] == [0, 1, 4, 5, 2, 6, 3]
        assert [int(at) for at in layout.key_positions] == [0, 1, 2, 3, 4, 8, 9]
        assert layout.blocks == ((0, 2, 4, True), (2, 3, 6, False))


def test_what_is_more_is_refused() -> None:
    """What this pass does not compute must not be answered with plain causal attention."""
    sequence, pool = make_sequence([3], row_of(30), writes=True), make_pool()
    with pytest.raises(ValueError, match="sinks"):
        run([sequence], pool, layer=make_layer(0, 4, 2, 16), sinks=torch.zeros(4))
    runner = SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=pool)
    backend = MaskedAttention(runner, plan([sequence], "cpu"))
    with pytest.raises(ValueError, match="shared with another layer"):
        backend.forward_extend(torch.zeros(1, 64), None, None, make_layer(0, 4, 2, 16), None)


TWO = torch.tensor([7, 8])
REQUEST = SparseRequest(torch.tensor([1, 2]), torch.tensor([4, 5, 6]))
FIVE = SparseRequest(torch.tensor([5]), TWO[:1])
IMPOSSIBLE: list[tuple[Callable[[], object], str]] = [
    (lambda: PassSequence(TWO.int(), REQUEST), "token_ids: expected .* int64, got .*int32"),
    (lambda: PassSequence(TWO, REQUEST, TWO.int()), "out_slots: .* int64, got .*int32"),
    (lambda: PassSequence(TWO[:1], REQUEST), "token_ids: expected"),
    (lambda: PassSequence(TWO, REQUEST, TWO[:1]), "out_slots: expected"),
    (lambda: make_sequence([], row_of(3)), "at least one token"),
    # softmax over nothing, or over a token twice, would be a wrong answer without an error
    (lambda: make_sequence([2], row_of(9)), "position 2 is in kv_positions"),
    (
        lambda: plan([make_sequence([1], {3: 1, 4: 2}, own=False)], "cpu"),
        "1 has nothing to attend to",
    ),
    (lambda: PassSequence(TWO[:1], FIVE, TWO[:1]), "position 5 is written but is not in"),
]


def test_impossible_sequences_are_refused() -> None:
    for make, message in IMPOSSIBLE:
        with pytest.raises(ValueError, match=message):
            make()
