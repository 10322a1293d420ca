"""`MaskedAttention` equals loops in float64, over a pool and a layer that are nothing but
tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang")

import torch
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

from sglang_chunkcache.attention import masked
from sglang_chunkcache.attention.base import PassSequence, SparseRequest
from sglang_chunkcache.attention.masked import (
    MaskedAttention,
    Observer,
    SequenceAttention,
    StopPass,
)
from sglang_chunkcache.attention.masked_layout import plan
from tests.reference.attention import attend

HEAD_DIM = 16
SCALE = 0.3
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Pool:
    """One layer's K/V by slot, as far as the backend uses SGLang's pool."""

    def __init__(self, num_slots: int, num_kv_heads: int, dtype: torch.dtype) -> None:
        self.keys = torch.randn(num_slots, num_kv_heads, HEAD_DIM).to(dtype)
        self.values = torch.randn(num_slots, num_kv_heads, HEAD_DIM).to(dtype)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.values

    def set_kv_buffer(self, layer: Any, where: Any, keys: Tensor, values: Tensor) -> None:
        self.keys[where.loc] = keys
        self.values[where.loc] = values


class Recorder(Observer):
    """Keeps what each sequence attends with."""

    def __init__(self) -> None:
        self.seen: list[SequenceAttention] = []

    def on_attention(self, layer_id: int, sequence: int, attention: SequenceAttention) -> None:
        self.seen.append(attention)


def make_layer(num_heads: int, num_kv_heads: int, **changes: Any) -> Any:
    fields = {
        "layer_id": 0,
        "tp_q_head_num": num_heads,
        "tp_k_head_num": num_kv_heads,
        "tp_v_head_num": num_kv_heads,
        "qk_head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM,
        "scaling": SCALE,
        "is_cross_attention": False,
        "attn_type": AttentionType.DECODER,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
    }
    return SimpleNamespace(**{**fields, **changes})


def make_sequence(
    positions: Sequence[int],
    kv: dict[int, int],
    *,
    writes: bool = False,
    own: bool = True,
) -> PassSequence:
    """Tokens at `positions` over `kv`: position -> slot."""
    return PassSequence(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        request=SparseRequest(
            positions=torch.tensor(positions, dtype=torch.int64),
            kv_pages=torch.tensor(list(kv.values()), dtype=torch.int64),
            num_keys=len(kv),
            kv_positions=torch.tensor(list(kv), dtype=torch.int64),
        ),
        out_slots=torch.tensor([kv[p] for p in positions], dtype=torch.int64) if writes else None,
        own=own,
    )


def run(
    sequences: Sequence[PassSequence],
    pool: Pool,
    *,
    num_heads: int = 4,
    block_rows: int = 1024,
    observer: Observer | None = None,
    layer_changes: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer over random q, k, v; returns them and the output, per token and head."""
    dtype, num_kv_heads = pool.keys.dtype, pool.keys.shape[1]
    layer = make_layer(num_heads, num_kv_heads, **(layer_changes or {}))
    layout = plan(sequences, "cpu", block_rows=block_rows)
    total = len(layout.positions)
    queries = torch.randn(total, num_heads, HEAD_DIM).to(dtype)
    keys, values = (torch.randn(total, num_kv_heads, HEAD_DIM).to(dtype) for _ in range(2))
    runner = SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=pool)
    backend = MaskedAttention(runner, layout, observer)
    out = backend.forward_extend(
        queries.flatten(1), keys.flatten(1), values.flatten(1), layer, None, **kwargs
    )
    assert out.shape == (total, num_heads * HEAD_DIM)
    return queries, keys, values, out.view(total, num_heads, HEAD_DIM)


def expect(
    sequence: PassSequence, pool: Pool, rows: slice, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """The reference's output and weights for one sequence; the pool as it is after the pass."""
    positions, slots = sequence.request.positions, sequence.request.kv_pages
    seen_keys, seen_values = pool.keys[slots], pool.values[slots]
    key_positions = sequence.request.key_positions()
    if sequence.out_slots is None and sequence.own:
        key_positions, order = torch.cat([key_positions, positions]).sort()
        seen_keys = torch.cat([seen_keys, keys[rows]])[order]
        seen_values = torch.cat([seen_values, values[rows]])[order]
    return attend(queries[rows], seen_keys, seen_values, positions, key_positions, SCALE)


def row_of(num_positions: int, *, first_slot: int = 1) -> dict[int, int]:
    """A row of the request table whose slots are not in order."""
    slots = torch.randperm(num_positions) + first_slot
    return {position: int(slot) for position, slot in enumerate(slots)}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


PAIRWISE = [
    (
        positions,
        num_kv_heads,
        (1, 3, 1024)[(i + j) % 3],
        (torch.float32, torch.bfloat16)[(i + j) % 2],
    )
    for i, positions in enumerate([[0], [29], [3, 4, 11, 28], list(range(30)), list(range(20, 30))])
    for j, num_kv_heads in enumerate([4, 2, 1])
]
"""Each value with each value of every other parameter."""


@pytest.mark.parametrize(("positions", "num_kv_heads", "block_rows", "dtype"), PAIRWISE)
def test_scattered_tokens_equal_the_reference(
    positions: list[int], num_kv_heads: int, block_rows: int, dtype: torch.dtype
) -> None:
    """Each token sees the keys at or before its position, however queries are blocked and heads are
    grouped."""
    pool = Pool(40, num_kv_heads, dtype)
    sequence = make_sequence(positions, row_of(30), writes=True)
    queries, keys, values, out = run([sequence], pool, block_rows=block_rows)
    assert torch.equal(pool.keys[sequence.out_slots], keys)
    assert torch.equal(pool.values[sequence.out_slots], values)
    expected, _ = expect(sequence, pool, slice(None), queries, keys, values)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("positions", [[10, 11, 12], [3, 5, 14], [0, 1, 2], [19]])
@pytest.mark.parametrize("block_rows", [1, 2, 1024])
def test_reading_only_leaves_the_pool_alone(positions: list[int], block_rows: int) -> None:
    """Fresh keys are sorted in by position, between those of the pool and after them."""
    pool = Pool(40, 2, torch.float32)
    before = pool.keys.clone(), pool.values.clone()
    kv = {p: s for p, s in row_of(20).items() if p not in positions and p not in (7, 8)}
    sequence = make_sequence(positions, kv)
    queries, keys, values, out = run([sequence], pool, block_rows=block_rows)
    expected, _ = expect(sequence, pool, slice(None), queries, keys, values)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(pool.keys, before[0])
    assert torch.equal(pool.values, before[1])


def test_reading_only_without_any_cached_key() -> None:
    """The first tokens of a prompt, nothing in the pool."""
    pool = Pool(4, 2, torch.float32)
    sequence = make_sequence([0, 1, 2], {})
    queries, keys, values, out = run([sequence], pool)
    expected, _ = expect(sequence, pool, slice(None), queries, keys, values)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_tokens_over_their_own_cached_kv() -> None:
    """`own=False`: the pool's K/V counts at the tokens' own positions too,
    the fresh one not at all."""
    pool = Pool(40, 2, torch.float32)
    sequence = make_sequence([8, 9, 10], row_of(20), own=False)
    queries, keys, values, out = run([sequence], pool)
    expected, _ = expect(sequence, pool, slice(None), queries, keys, values)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_one_sequence_reads_what_another_writes() -> None:
    """All writes come before any attention, also for a sequence before the writer."""
    pool = Pool(60, 2, torch.float32)
    shared = row_of(10)
    writer = make_sequence([4, 5, 6, 7], shared, writes=True)
    reader = make_sequence([10, 11], {**shared, 10: 50, 11: 51}, writes=True)
    looker = make_sequence([12], {**shared, 10: 50, 11: 51})
    for sequences in ([reader, looker, writer], [writer, reader, looker]):
        queries, keys, values, out = run(sequences, pool)
        at = 0
        for sequence in sequences:
            rows = slice(at, at + len(sequence.token_ids))
            if sequence.out_slots is not None:
                assert torch.equal(pool.keys[sequence.out_slots], keys[rows])
                assert torch.equal(pool.values[sequence.out_slots], values[rows])
            expected, _ = expect(sequence, pool, rows, queries, keys, values)
            torch.testing.assert_close(out[rows].double(), expected, rtol=0, atol=1e-5)
            at = rows.stop


def test_masks_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass too large to keep its masks computes the same."""
    monkeypatch.setattr(masked, "MASK_BYTES", 0)
    pool = Pool(40, 2, torch.float32)
    sequence = make_sequence([3, 9, 20], row_of(30), writes=True)
    queries, keys, values, out = run([sequence], pool)
    expected, _ = expect(sequence, pool, slice(None), queries, keys, values)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("weight_bytes", [1, 4 * 4 * 20 * 2, 1 << 20])
def test_observed_weights_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, weight_bytes: int
) -> None:
    """Piece by piece or at once: the same weights, each query's once,
    zero where it does not look."""
    monkeypatch.setattr(masked, "WEIGHT_BYTES", weight_bytes)
    pool, recorder = Pool(40, 2, torch.float32), Recorder()
    sequence = make_sequence([5, 10, 15, 20], {p: s for p, s in row_of(20).items() if p % 5})
    queries, keys, values, _ = run([sequence], pool, observer=recorder)
    _, expected = expect(sequence, pool, slice(None), queries, keys, values)
    pieces = list(recorder.seen[0].weights())
    assert [start for start, _, _ in pieces] == [0, *(end for _, end, _ in pieces[:-1])]
    assert len(pieces) == {1: 4, 4 * 4 * 20 * 2: 2, 1 << 20: 1}[weight_bytes]
    torch.testing.assert_close(
        torch.cat([w for _, _, w in pieces], 1).double(), expected, rtol=0, atol=1e-6
    )


def test_an_observer_may_stop_before_anything_is_written() -> None:
    """Fresh K/V is shown first, so a probe that only wants it leaves no trace."""

    class Stop(Observer):
        def on_kv(self, layer_id: int, keys: Tensor, values: Tensor) -> None:
            raise StopPass

    pool = Pool(40, 2, torch.float32)
    before = pool.keys.clone()
    with pytest.raises(StopPass):
        run([make_sequence([3], row_of(30), writes=True)], pool, observer=Stop())
    assert torch.equal(pool.keys, before)


def test_blocks_end_at_their_last_query() -> None:
    """A block reads no key after its last query, and has no mask where all its queries see the same
    keys."""
    layout = plan(
        [make_sequence([2, 3, 8], row_of(10), writes=True)], "cpu", block_rows=2
    ).sequences[0]
    assert layout.blocks == ((0, 2, 4, True), (2, 3, 9, False))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "not causal"),
        ({"sliding_window_size": 128}, "sliding window"),
        ({"logit_cap": 30.0}, "capped logits"),
    ],
)
def test_a_layer_that_is_more_is_refused(changes: dict[str, Any], reason: str) -> None:
    """Attention that this pass does not compute must not be answered with plain causal
    attention."""
    with pytest.raises(ValueError, match=reason):
        run(
            [make_sequence([3], row_of(30), writes=True)],
            Pool(40, 2, torch.float32),
            layer_changes=changes,
        )


def test_a_call_that_is_more_is_refused() -> None:
    """Sinks and the like, K/V of another layer, K/V that the model has written already."""
    sequence, pool = make_sequence([3], row_of(30), writes=True), Pool(40, 2, torch.float32)
    with pytest.raises(ValueError, match="sinks"):
        run([sequence], pool, sinks=torch.zeros(4))
    with pytest.raises(ValueError, match="writes itself"):
        run([sequence], pool, save_kv_cache=False)
    runner = SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=pool)
    with pytest.raises(ValueError, match="shared with another layer"):
        MaskedAttention(runner, plan([sequence], "cpu")).forward_extend(
            torch.zeros(1, 64), None, None, make_layer(4, 2), None
        )


@pytest.mark.parametrize("field", ["token_ids", "out_slots"])
def test_wrong_shape_or_dtype_is_named(field: str) -> None:
    """What is wrong with the request itself is test_base.py's."""
    good: dict[str, Any] = {
        "token_ids": torch.tensor([7, 8]),
        "request": SparseRequest(torch.tensor([1, 2]), torch.tensor([4, 5, 6]), 3),
        "out_slots": torch.tensor([5, 6]),
    }
    PassSequence(**good)
    with pytest.raises(ValueError, match=rf"{field}: expected .* int64, got .* torch.int32"):
        PassSequence(**{**good, field: good[field].int()})
    with pytest.raises(ValueError, match="expected"):
        PassSequence(**{**good, field: good[field][:1]})


def test_pages_of_more_than_a_slot_are_refused() -> None:
    """SGLang's pool is read by slot."""
    with pytest.raises(ValueError, match="kv_pages: expected 32 pages of 1"):
        PassSequence(torch.tensor([7]), SparseRequest(torch.tensor([3]), torch.tensor([4, 5]), 32))


def test_no_tokens_and_no_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        make_sequence([], row_of(3))
    with pytest.raises(ValueError, match="sequences: expected at least one"):
        plan([], "cpu")


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (
            lambda: make_sequence([3, 2], row_of(9), writes=True),
            "positions: expected strictly ascending",
        ),
        (lambda: make_sequence([-1, 2], {}), "positions: expected strictly ascending"),
        (lambda: make_sequence([5], {2: 1, 1: 2}), "kv_positions: expected strictly ascending"),
        (lambda: make_sequence([2], row_of(9)), "position 2 is in kv_positions"),
        (
            lambda: make_sequence([1], {3: 1, 4: 2}, own=False),
            "position 1 has nothing to attend to",
        ),
        (
            lambda: PassSequence(
                torch.tensor([1]),
                SparseRequest(torch.tensor([5]), torch.tensor([1]), 1),
                torch.tensor([2]),
            ),
            "position 5 is written but is not in kv_positions",
        ),
    ],
)
def test_impossible_positions_are_refused(sequence: Any, message: str) -> None:
    """Softmax over nothing, or over a token twice, would be a wrong answer without an error."""
    with pytest.raises(ValueError, match=message):
        sequence()
