"""Passes over real SGLang models: recomputing everything is an ordinary prefill, recomputing some
equals the oracle.

A family of each kind by default, all of them nightly. Regions to be recomputed are filled with NaN
first, so that reading one stale key or value anywhere is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_context import has_forward_context
from torch import Tensor

from eval.bench.attention.reference import ReferenceAttention
from sglang_chunkcache.attention.base import PassSequence, SparseAttention, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS
from sglang_chunkcache.attention.masked import Observer
from sglang_chunkcache.fusion.recompute import PADDING_SLOT, PlanError, run_extend, run_pass
from tests import models
from tests.kit.tensors import (
    all_kv,
    flashinfer_of,
    make_tokens,
    put_kv,
    reference_of,
    spoil,
    untouched,
)
from tests.models import FAMILIES, kv_of, logits_of, make_row, prefill

TOLERANCES = {torch.float32: 3e-5, torch.float16: 24 * 2**-10, torch.bfloat16: 24 * 2**-7}
"""Largest difference of K, V (up to 5 in size) and logits, by dtype: sums in another order, three
layers deep. The coarse dtypes have steps of 4 times their eps there; 10.5 times eps is the largest
difference seen, in either, on a CPU with AVX-512."""

NUM_TOKENS = 200
REFERENCE = torch.arange(1, 1 + NUM_TOKENS)
TARGET = torch.arange(1000, 1000 + NUM_TOKENS).flip(0)

Model = tuple[str, str] | tuple[str, str, int]
"""Family, dtype, and the size of a head where it is not the family's own."""

MODELS: list[Model] = [
    *((family, "float32") for family in FAMILIES),
    ("llama", "bfloat16"),
    ("qwen3_yarn", "bfloat16"),
]
HALVES: list[Model] = [*((family, "float16", 64) for family in FAMILIES), ("llama", "bfloat16", 64)]
"""What FlashInfer takes."""
WRITING: Model = ("qwen3_moe", "float32")
"""As on CUDA: K/V is written by the rotary kernel."""
DEFAULT: list[Model] = [
    ("llama", "float32"),
    WRITING,
    ("qwen3_yarn", "float32"),
    ("stablelm", "float32"),
    ("llama", "bfloat16"),
    ("llama", "float16", 64),
]
"""One of each kind of rotation, norm and bias; the rest is swept nightly."""


def of(model: Model, *more: str) -> Any:
    marks = () if model in DEFAULT else pytest.mark.nightly
    return pytest.param(model, *more, marks=marks, id="-".join(map(str, (*model, *more))))


every_attention = pytest.mark.parametrize(
    ("runner", "sparse"),
    [
        *(of(model, name) for model in (*MODELS, WRITING) for name in ("masked", "reference")),
        *(of(model, name) for model in HALVES for name in KERNELS),
    ],
    indirect=True,
)
one_family = pytest.mark.parametrize("runner", [of(MODELS[0])], indirect=True)
"""For what does not depend on it."""


@pytest.fixture(params=[of(model) for model in MODELS])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A ModelRunner of each family and dtype."""
    family, dtype, *head_dim = request.param
    if request.param == WRITING:
        models.let_rotary_write(monkeypatch)
    runner = models.runner(family, dtype, head_dim=head_dim[0] if head_dim else None)
    yield runner
    models.assert_given_back(runner)


@pytest.fixture
def sparse(request: pytest.FixtureRequest, runner: Any) -> SparseAttention | None:
    """What the pass attends with; FlashInfer is the torch model of it."""
    return make_attention(runner, request.param)


def make_attention(runner: Any, name: str) -> SparseAttention | None:
    if name == "masked":
        return None
    return reference_of(runner) if name == "reference" else flashinfer_of(runner, name)


@pytest.fixture
def prompt() -> Tensor:
    return make_tokens(0, NUM_TOKENS)


def pass_over(runner: Any, sequences: Sequence[PassSequence], **options: Any) -> Tensor:
    """Hidden states of a pass that comes to its end."""
    hidden = run_pass(runner, sequences, **options)
    assert hidden is not None
    return hidden


def assert_same_kv(runner: Any, slots: Tensor, others: Tensor) -> None:
    for ours, theirs in zip(kv_of(runner, slots), kv_of(runner, others), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCES[runner.dtype])


def assert_same_answer(runner: Any, hidden: Tensor, logits: Tensor) -> None:
    """Logits within tolerance, and the same greedy token unless SGLang's own two best are closer
    than that."""
    ours = logits_of(runner, hidden)
    torch.testing.assert_close(ours, logits, rtol=0, atol=TOLERANCES[runner.dtype])
    assert int(ours.argmax()) == int(logits.argmax()) or not is_decided(runner, logits)


def is_decided(runner: Any, logits: Tensor) -> bool:
    best, second = logits.topk(2).values.tolist()
    return bool(best - second > TOLERANCES[runner.dtype])


def sequence_of(tokens: Tensor, positions: Tensor, slots: Tensor) -> PassSequence:
    """Tokens of a prompt at `positions`, over all of its row `slots`."""
    request = SparseRequest(positions, slots)
    return PassSequence(tokens[positions], request, slots[positions])


def sequences_of(tokens: Tensor, slots: Tensor, start: int, run_len: int) -> list[PassSequence]:
    """Every token from `start` on, in sequences of `run_len` that all look at the whole row."""
    runs = torch.split(torch.arange(start, len(tokens)), run_len)
    return [sequence_of(tokens, run, slots[: len(tokens)]) for run in runs]


@every_attention
@pytest.mark.parametrize(("start", "run_len"), [(0, NUM_TOKENS), (37, 3)])
def test_recomputing_everything_equals_prefill(
    runner: Any, sparse: SparseAttention | None, prompt: Tensor, start: int, run_len: int
) -> None:
    """All of a spoiled region in one pass, as one sequence or 55."""
    logits = prefill(runner, prompt.tolist(), REFERENCE)
    assert is_decided(runner, logits)
    slots = torch.cat([REFERENCE[:start], TARGET[start:]])  # after an exact prefix
    spoil(runner, TARGET)
    hidden = pass_over(runner, sequences_of(prompt, slots, start, run_len), sparse=sparse)
    assert_same_kv(runner, slots, REFERENCE)
    assert_same_answer(runner, hidden[-1], logits)


def extend_all(runner: Any, row: int, prompt: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Runs of tokens, one after the other."""
    ids = prompt.tolist()
    return torch.cat([run_extend(runner, row, ids, *run) for run in runs])


@pytest.mark.parametrize("run_len", [NUM_TOKENS, 3, 1])
def test_extends_equal_prefill(runner: Any, prompt: Tensor, run_len: int) -> None:
    logits = prefill(runner, prompt.tolist(), REFERENCE)
    spoil(runner, TARGET)
    runs = [(at, min(at + run_len, NUM_TOKENS)) for at in range(0, NUM_TOKENS, run_len)]
    row = make_row(runner, TARGET)
    hidden = extend_all(runner, row, prompt, runs)
    assert_same_kv(runner, TARGET, REFERENCE)
    assert_same_answer(runner, hidden[-1], logits)


def runs_of(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending positions as half-open intervals."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        start = runs.pop()[0] if runs and runs[-1][1] == position else position
        runs.append((start, position + 1))
    return runs


CHOSEN = (
    [120],
    [i for i in range(NUM_TOKENS) if i * i % 7 == 2],
    [i for i in range(NUM_TOKENS) if i > 40 and i % 31 < 9],
    [0, 2, *range(4, 197), 199],  # a run that is long enough for a causal entry of each kernel
)
"""Scattered, in clusters, nearly all: a request each."""


@every_attention
def test_some_tokens_equal_extends(
    runner: Any, sparse: SparseAttention | None, prompt: Tensor
) -> None:
    """Over foreign K/V, three requests share their first slots; nothing else is touched."""
    prefill(runner, make_tokens(1, NUM_TOKENS).tolist(), REFERENCE)
    foreign = kv_of(runner, REFERENCE)
    rows = [torch.arange(start, start + NUM_TOKENS).flip(0) for start in (300, 550, 800, 1050)]
    for row in rows[:3]:
        row[:2] = REFERENCE[:2]
    for row in rows:
        put_kv(runner, row, foreign)
    before = all_kv(runner)
    sequences = [
        sequence_of(prompt, torch.tensor(positions), row)
        for positions, row in zip(CHOSEN, rows, strict=True)
    ]
    hidden = pass_over(runner, sequences, sparse=sparse)
    parts = torch.split(hidden, [len(positions) for positions in CHOSEN])
    after = all_kv(runner)
    written = torch.zeros(before[0].shape[1], dtype=torch.bool)
    for positions, row, part in zip(CHOSEN, rows, parts, strict=True):
        written[row[positions]] = True
        put_kv(runner, REFERENCE, foreign)
        index, runs = make_row(runner, REFERENCE), runs_of(positions)
        expected = extend_all(runner, index, prompt, runs)
        torch.testing.assert_close(part, expected, rtol=0, atol=TOLERANCES[runner.dtype])
        assert_same_kv(runner, row, REFERENCE)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, ~written], new[:, ~written])
        assert not torch.equal(old, new)


@every_attention
@pytest.mark.parametrize("reader_first", [True, False])
def test_one_request_builds_on_anothers_region(
    runner: Any, sparse: SparseAttention | None, prompt: Tensor, reader_first: bool
) -> None:
    """B's prefix is a region of A's that the same pass recomputes."""
    other = torch.cat([prompt[:60], make_tokens(2, 30)])
    logits = prefill(runner, other.tolist(), REFERENCE[:90])
    spoil(runner, TARGET)
    ours = sequence_of(other, torch.arange(60), TARGET[:60])
    theirs = sequence_of(other, torch.arange(60, 90), TARGET[:90])
    sequences = [theirs, ours] if reader_first else [ours, theirs]
    hidden = pass_over(runner, sequences, sparse=sparse)
    assert_same_kv(runner, TARGET[:90], REFERENCE[:90])
    assert_same_answer(runner, hidden[29 if reader_first else -1], logits)


PRESENT = torch.tensor([p for p in range(100) if not 20 <= p < 50])


@one_family
def test_gaps_are_left_out_by_sparse_attention(runner: Any, prompt: Tensor) -> None:
    """Of tokens that are written, too: by number of keys, not by position."""
    chosen = torch.tensor([3, 50, 51, 70, 99])
    request = SparseRequest(chosen, REFERENCE[PRESENT], PRESENT)
    written = []
    for name in ("masked", "reference"):
        prefill(runner, make_tokens(1, NUM_TOKENS).tolist(), REFERENCE)
        spoil(runner, REFERENCE[20:50])
        sequence = PassSequence(prompt[chosen], request, REFERENCE[chosen])
        hidden = pass_over(runner, [sequence], sparse=make_attention(runner, name))
        written.append((hidden, *kv_of(runner, REFERENCE[chosen])))
    for masked, sparse in zip(*written, strict=True):
        assert masked.isfinite().all()
        torch.testing.assert_close(sparse, masked, rtol=0, atol=TOLERANCES[runner.dtype])


def reader(prompt: Tensor) -> PassSequence:
    """A question over a cached prompt."""
    request = SparseRequest(torch.arange(150, NUM_TOKENS), REFERENCE[:150])
    return PassSequence(prompt[150:], request)


def test_reading_only_equals_prefill_and_writes_nothing(runner: Any, prompt: Tensor) -> None:
    logits = prefill(runner, prompt.tolist(), REFERENCE)
    spoil(runner, REFERENCE[150:])
    with untouched(runner):
        hidden = pass_over(runner, [reader(prompt)] * 2)
    assert_same_answer(runner, hidden[-1], logits)
    assert_same_answer(runner, hidden[49], logits)


@pytest.mark.parametrize("runner", [of(WRITING)], indirect=True)
def test_a_rotary_kernel_writes_what_is_read_only_to_padding(runner: Any, prompt: Tensor) -> None:
    """In a pass beside one that writes."""
    logits = prefill(runner, prompt.tolist(), REFERENCE)
    before = all_kv(runner)
    hidden = pass_over(runner, [reader(prompt), *sequences_of(prompt, TARGET, 0, NUM_TOKENS)])
    assert_same_answer(runner, hidden[49], logits)
    assert_same_kv(runner, TARGET, REFERENCE)
    untaken = torch.ones(before[0].shape[1], dtype=torch.bool)
    untaken[TARGET] = untaken[PADDING_SLOT] = False
    for old, new in zip(before, all_kv(runner), strict=True):
        assert torch.equal(old[:, untaken], new[:, untaken])


class Planless(ReferenceAttention):
    """Never has a plan."""

    def plan(self, requests: Any) -> None:
        raise RuntimeError("no workspace")


@one_family
def test_a_pass_without_a_plan_writes_nothing(runner: Any, prompt: Tensor) -> None:
    planless = reference_of(runner, Planless)
    with untouched(runner), pytest.raises(PlanError, match="RuntimeError: no workspace"):
        run_pass(runner, sequences_of(prompt, TARGET, 0, 50), sparse=planless)
    assert not has_forward_context()


@one_family
def test_sparse_attention_is_for_passes_that_only_write(runner: Any, prompt: Tensor) -> None:
    """Observers need the mask's weights; what is only read is not in the pool."""
    planless, writing = reference_of(runner, Planless), sequences_of(prompt, TARGET, 0, NUM_TOKENS)
    prefill(runner, prompt.tolist(), REFERENCE)
    run_pass(runner, [*writing, reader(prompt)], sparse=planless)
    run_pass(runner, writing, sparse=planless, observer=Observer())
    assert_same_kv(runner, TARGET, REFERENCE)
