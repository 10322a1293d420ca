"""Passes over real SGLang models: recomputing everything is an ordinary prefill, recomputing some equals the oracle.

One runner a family, each about a second. Regions to be recomputed are filled with NaN first, so that reading one stale key or
value anywhere is seen.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch
from sglang.srt.model_executor.forward_context import has_forward_context
from torch import Tensor

from sglang_chunkcache.attention.masked import Observer, StopPass
from sglang_chunkcache.recompute import PassSequence, run_pass, run_virtual
from tests.runners import FAMILIES, MAX_REQUESTS, kv_of, logits_of, make_row, make_runner, prefill, write_model

TOLERANCES = {"float32": 3e-5, "bfloat16": 8e-2}
"""Largest difference of K, V (up to 5 in size) and logits, by dtype: sums in another order, three layers deep. bfloat16 has
steps of 0.03 there."""

NUM_TOKENS = 200
REFERENCE = torch.arange(1, 1 + NUM_TOKENS)
TARGET = torch.arange(1000, 1000 + NUM_TOKENS).flip(0)


@pytest.fixture(
    scope="module",
    params=[*((family, "float32") for family in FAMILIES), ("llama", "bfloat16"), ("qwen3_yarn", "bfloat16")],
    ids="-".join,
)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A ModelRunner of each family and dtype; `tolerance` is what its results may differ by."""
    family, dtype = request.param
    path = tmp_path_factory.mktemp(family)
    write_model(path, family, dtype=getattr(torch, dtype))
    runner = make_runner(path, dtype=dtype)
    runner.tolerance = TOLERANCES[dtype]
    return runner


@pytest.fixture
def prompt() -> Tensor:
    return make_tokens(0)


def make_tokens(seed: int, num_tokens: int = NUM_TOKENS) -> Tensor:
    return torch.randint(0, 128, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def spoil(runner: Any, slots: Tensor) -> None:
    for layer in range(runner.token_to_kv_pool.layer_num):
        runner.token_to_kv_pool.get_key_buffer(layer)[slots] = float("nan")
        runner.token_to_kv_pool.get_value_buffer(layer)[slots] = float("nan")


def assert_same_kv(runner: Any, slots: Tensor, others: Tensor) -> None:
    for ours, theirs in zip(kv_of(runner, slots), kv_of(runner, others), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=runner.tolerance)


def assert_same_answer(runner: Any, hidden: Tensor, logits: Tensor) -> None:
    """Logits within tolerance, and the same greedy token unless SGLang's own two best are closer than that."""
    ours = logits_of(runner, hidden)
    torch.testing.assert_close(ours, logits, rtol=0, atol=runner.tolerance)
    assert int(ours.argmax()) == int(logits.argmax()) or not is_decided(runner, logits)


def is_decided(runner: Any, logits: Tensor) -> bool:
    best, second = logits.topk(2).values.tolist()
    return bool(best - second > runner.tolerance)


def sequences_of(tokens: Tensor, slots: Tensor, start: int, run_len: int) -> list[PassSequence]:
    """Every token from `start` on, in sequences of `run_len` that all look at the whole row."""
    positions = torch.arange(len(tokens))
    return [
        PassSequence(
            tokens[at : at + run_len], positions[at : at + run_len], slots, positions, slots[at : at + run_len]
        )
        for at in range(start, len(tokens), run_len)
    ]


@pytest.mark.parametrize("start", [0, 37])
@pytest.mark.parametrize("run_len", [NUM_TOKENS, 3, 1])
def test_recomputing_everything_equals_prefill(runner: Any, prompt: Tensor, start: int, run_len: int) -> None:
    """All of a spoiled region in one pass, as one sequence, 67 or 200: K/V of all layers and the next token of a prefill."""
    logits = prefill(runner, prompt.tolist(), REFERENCE)
    assert is_decided(runner, logits)
    slots = torch.cat([REFERENCE[:start], TARGET[start:]])  # behind an exact prefix
    spoil(runner, TARGET)
    hidden = run_pass(runner, sequences_of(prompt, slots, start, run_len))
    assert hidden is not None
    assert_same_kv(runner, slots, REFERENCE)
    assert_same_answer(runner, hidden[-1], logits)


@pytest.mark.parametrize("run_len", [NUM_TOKENS, 3, 1])
def test_virtual_sequences_equal_prefill(runner: Any, prompt: Tensor, run_len: int) -> None:
    """The oracle itself, with more runs than a pass takes."""
    logits = prefill(runner, prompt.tolist(), REFERENCE)
    spoil(runner, TARGET)
    runs = [(at, min(at + run_len, NUM_TOKENS)) for at in range(0, NUM_TOKENS, run_len)]
    assert run_len == NUM_TOKENS or len(runs) > MAX_REQUESTS
    row = make_row(runner, TARGET)
    hidden = run_virtual(runner, req_pool_index=row, runs=runs, token_ids=prompt.tolist())
    assert_same_kv(runner, TARGET, REFERENCE)
    assert_same_answer(runner, hidden[-1], logits)


def test_some_tokens_equal_virtual_sequences(runner: Any, prompt: Tensor) -> None:
    """A third of the tokens over foreign K/V: the same new K/V and hidden states as the oracle, nothing else touched."""
    prefill(runner, make_tokens(1).tolist(), REFERENCE)
    keys, values = kv_of(runner, REFERENCE)
    for layer in range(len(keys)):
        runner.token_to_kv_pool.get_key_buffer(layer)[TARGET] = keys[layer]
        runner.token_to_kv_pool.get_value_buffer(layer)[TARGET] = values[layer]
    chosen = torch.rand(NUM_TOKENS, generator=torch.Generator().manual_seed(3)) < 0.3
    positions = chosen.nonzero().flatten()
    pool = runner.token_to_kv_pool
    everything = torch.arange(pool.get_key_buffer(0).shape[0])
    before = kv_of(runner, everything)

    sequence = PassSequence(prompt[positions], positions, TARGET, torch.arange(NUM_TOKENS), TARGET[positions])
    hidden = run_pass(runner, [sequence])
    runs = [(int(p), int(p) + 1) for p in positions]
    expected = run_virtual(
        runner, req_pool_index=make_row(runner, REFERENCE), runs=runs, token_ids=prompt.tolist(), max_sequences=5
    )
    assert hidden is not None
    torch.testing.assert_close(hidden, expected, rtol=0, atol=runner.tolerance)
    assert_same_kv(runner, TARGET, REFERENCE)
    untouched = torch.ones(len(everything), dtype=torch.bool)
    untouched[TARGET[positions]] = False
    untouched[REFERENCE[positions]] = False
    for old, new in zip(before, kv_of(runner, everything), strict=True):
        assert torch.equal(old[:, untouched], new[:, untouched])
        assert not torch.equal(old, new)


@pytest.mark.parametrize("reader_first", [True, False])
def test_one_request_builds_on_anothers_region(runner: Any, prompt: Tensor, reader_first: bool) -> None:
    """B's prefix is a region of A's that the same pass recomputes: B equals a prefill of its own prompt."""
    shared, tail = 60, make_tokens(2, 30)
    other = torch.cat([prompt[:shared], tail])
    logits = prefill(runner, other.tolist(), REFERENCE[: len(other)])
    spoil(runner, TARGET)
    positions = torch.arange(len(other))
    ours = PassSequence(
        prompt[:shared], positions[:shared], TARGET[:shared], positions[:shared], out_slots=TARGET[:shared]
    )
    slots = TARGET[: len(other)]
    theirs = PassSequence(tail, positions[shared:], slots, positions, out_slots=slots[shared:])
    hidden = run_pass(runner, [theirs, ours] if reader_first else [ours, theirs])
    assert hidden is not None
    assert_same_kv(runner, slots, REFERENCE[: len(other)])
    assert_same_answer(runner, hidden[len(tail) - 1 if reader_first else -1], logits)


def test_gaps_are_left_out(runner: Any, prompt: Tensor) -> None:
    """Positions that are missing are not seen: filled with NaN or with anything, the same comes out."""
    prefill(runner, prompt.tolist(), REFERENCE)
    there = torch.tensor([p for p in range(100) if not 20 <= p < 50])
    question = torch.arange(100, 110)
    sequence = PassSequence(prompt[question], question, REFERENCE[there], there)
    before = run_pass(runner, [sequence])
    spoil(runner, REFERENCE[20:50])
    after = run_pass(runner, [sequence])
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


def test_reading_only_equals_prefill_and_writes_nothing(runner: Any, prompt: Tensor) -> None:
    """A question over a cached prompt: the next token of a prefill, and not a byte of the pool changed."""
    logits = prefill(runner, prompt.tolist(), REFERENCE)
    spoil(runner, REFERENCE[150:])
    everything = torch.arange(runner.token_to_kv_pool.get_key_buffer(0).shape[0])
    before = kv_of(runner, everything)
    positions = torch.arange(NUM_TOKENS)
    hidden = run_pass(
        runner, [PassSequence(prompt[150:], positions[150:], REFERENCE[:150], positions[:150]) for _ in range(2)]
    )
    assert hidden is not None
    assert_same_answer(runner, hidden[-1], logits)
    assert_same_answer(runner, hidden[49], logits)
    for old, new in zip(before, kv_of(runner, everything), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


class StopAt(Observer):
    """Ends the pass at a layer and counts what it has seen."""

    def __init__(self, layer_id: int) -> None:
        self.layer_id = layer_id
        self.seen: list[int] = []

    def on_kv(self, layer_id: int, keys: Tensor, values: Tensor) -> None:
        self.seen.append(layer_id)
        if layer_id == self.layer_id:
            raise StopPass


def test_an_observer_may_end_the_pass(runner: Any, prompt: Tensor) -> None:
    """Later layers are not run, and SGLang's forward context is as before."""
    prefill(runner, prompt.tolist(), REFERENCE)
    spoil(runner, TARGET)
    observer = StopAt(1)
    assert run_pass(runner, sequences_of(prompt, TARGET, 0, NUM_TOKENS), observer=observer) is None
    assert observer.seen == [0, 1]
    assert not has_forward_context()
    keys, _ = kv_of(runner, TARGET)
    assert torch.equal(keys[0], kv_of(runner, REFERENCE)[0][0])
    assert bool(keys[1:].isnan().all())


def test_sequences_out_of_order_are_refused(runner: Any, prompt: Tensor) -> None:
    positions = torch.tensor([4, 3])
    with pytest.raises(ValueError, match="ascending"):
        run_pass(runner, [PassSequence(prompt[:2], positions, REFERENCE[:9], torch.arange(9), REFERENCE[positions])])


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "at least one"),
        ([(3, 3)], r"run \[3, 3\)"),
        ([(-1, 3)], r"run \[-1, 3\)"),
        ([(0, 201)], r"run \[0, 201\)"),
        ([(5, 9), (2, 3)], "run at 2 starts before"),
        ([(2, 5), (4, 9)], "run at 4 starts before"),
    ],
)
def test_impossible_runs_are_refused(runner: Any, prompt: Tensor, runs: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_virtual(runner, req_pool_index=1, runs=runs, token_ids=prompt.tolist())
