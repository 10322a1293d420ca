"""Passes in SGLang's prefill graphs give what they give without, and padding reaches no slot.

    launch/test.sh -m gpu tests/sglang_chunkcache/fusion/test_pass_graphs.py

On a GPU the graphs are captured ones. Without, the model runs over what they would read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_chunkcache.attention.base import PassSequence, SparseRequest
from sglang_chunkcache.attention.masked import Observer, SequenceAttention, StopPass
from sglang_chunkcache.fusion import recompute
from sglang_chunkcache.fusion.recompute import PADDING_SLOT, run_extend, run_pass
from tests import models
from tests.kit.prefill_graphs import BUCKETS, eager_graphs
from tests.kit.tensors import all_kv, make_tokens, put_kv, reference_of, untouched
from tests.models import NUM_LAYERS, make_row

PROMPT = 200
CHOSEN = torch.tensor([i for i in range(PROMPT) if i * i % 7 == 2])  # 57, padded to 64
TOKENS = make_tokens(0, PROMPT)
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 24 * 2**-7}
"""As of test_recompute.py."""

on_gpu = pytest.param(
    "gpu",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    ],
)


@pytest.fixture(params=["llama", "qwen3_moe", on_gpu])
def runner(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Any]:
    """With graphs, and any KV. The rotary kernel of Qwen3-MoE writes K/V at all rows of a graph."""
    assert not recompute.REPLAYS, "off until its test has passed on a GPU"
    monkeypatch.setattr(recompute, "REPLAYS", True)
    if request.param == "gpu":
        models.write_model(tmp_path, "llama", dtype=torch.bfloat16, head_dim=64)
        yield models.make_runner(
            tmp_path,
            dtype="bfloat16",
            device="cuda",
            attention_backend="triton",
            cuda_graph_backend_prefill="breakable",
        )
        return
    if request.param == "qwen3_moe":
        models.let_rotary_write(monkeypatch)
    runner = models.runner(request.param, "float32")
    fill(runner)
    with eager_graphs(runner):
        yield runner
    models.assert_given_back(runner)


def fill(runner: Any) -> None:
    pool = runner.token_to_kv_pool
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()


@pytest.fixture
def replays(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the graphs that are replayed."""
    sizes, backend = list[int](), runner.prefill_cuda_graph_runner.backend
    replay = backend.replay

    def spy(key: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(key.size)
        return replay(key, *args, **kwargs)

    monkeypatch.setattr(backend, "replay", spy)
    return sizes


def row(runner: Any) -> Tensor:
    return torch.arange(1, 1 + PROMPT, device=runner.device)


def sequences(runner: Any, *positions: Tensor) -> list[PassSequence]:
    return [PassSequence.of_row(TOKENS, row(runner), each) for each in positions]


@pytest.mark.parametrize("is_sparse", [False, True])
def test_graph_equals_no_graph(
    runner: Any, replays: list[int], monkeypatch: pytest.MonkeyPatch, *, is_sparse: bool
) -> None:
    """And writes where that writes, and at padding's slot."""
    before, found = all_kv(runner), list[tuple[Tensor, ...]]()
    everywhere = torch.arange(before[0].shape[1], device=runner.device)
    work = sequences(runner, CHOSEN[:30], CHOSEN[30:])
    for is_replayed in (False, True):
        put_kv(runner, everywhere, before)
        monkeypatch.setattr(recompute, "REPLAYS", is_replayed)
        hidden = run_pass(runner, work, sparse=reference_of(runner) if is_sparse else None)
        assert hidden is not None
        found.append((hidden, *all_kv(runner)))
    assert [size > len(CHOSEN) for size in replays] == [True]
    written = torch.zeros(len(everywhere), dtype=torch.bool)
    written[row(runner)[CHOSEN]] = True
    untaken = ~written
    untaken[PADDING_SLOT] = False
    (plain, *plain_kv), (replayed, *replayed_kv) = found
    close = partial(torch.testing.assert_close, rtol=0, atol=TOLERANCES[runner.dtype])
    close(replayed, plain)
    for old, one, other in zip(before, plain_kv, replayed_kv, strict=True):
        close(other[:, written], one[:, written])
        assert torch.equal(other[:, untaken], old[:, untaken])


def test_what_a_graph_gave_outlives_its_next_replay(runner: Any, replays: list[int]) -> None:
    first = run_pass(runner, sequences(runner, CHOSEN))
    assert first is not None
    before = first.clone()
    assert run_pass(runner, sequences(runner, CHOSEN - 1)) is not None
    assert len(replays) == 2
    assert torch.equal(first, before)


class Reader(Observer):
    """Ends the pass before its last layer."""

    def __init__(self) -> None:
        self.keys, self.layers = list[Tensor](), list[int]()

    def on_kv(self, layer_id: int, keys: Tensor, values: Tensor) -> None:
        self.keys += [keys.clone()]

    def on_attention(self, layer_id: int, sequence: int, attention: SequenceAttention) -> None:
        self.layers += [layer_id]
        if layer_id == NUM_LAYERS - 2:
            raise StopPass


def test_evidence_is_read_in_a_graph(
    runner: Any,
    replays: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It shows an observer what the pass has, padding left out, and may end it."""
    caplog.set_level(logging.WARNING)
    at, readers = torch.arange(159, PROMPT), [Reader(), Reader()]
    question = PassSequence(TOKENS[at], SparseRequest(at, row(runner)[:159]))
    for reader, is_replayed in zip(readers, (False, True), strict=True):
        monkeypatch.setattr(recompute, "REPLAYS", is_replayed)
        slots = slice(PADDING_SLOT + 1, None)
        before = [each[:, slots] for each in all_kv(runner)]
        assert run_pass(runner, [question], observer=reader) is None
        for old, new in zip(before, all_kv(runner), strict=True):
            assert torch.equal(old, new[:, slots])
    assert [size > len(at) for size in replays] == [True]
    assert caplog.messages == []
    plain, replayed = readers
    assert plain.layers == replayed.layers == [*range(NUM_LAYERS - 1)]
    for one, other in zip(plain.keys, replayed.keys, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=TOLERANCES[runner.dtype])


@pytest.mark.parametrize("runner", ["llama"], indirect=True)
def test_what_no_graph_takes_runs_without(runner: Any, replays: list[int]) -> None:
    """Fewer rows than half of the smallest graph, more than the largest, in more sequences than
    requests may run; SGLang's own extend, whose attention a graph would take from the runner."""
    few, many = torch.arange(BUCKETS[0] // 2 - 1), torch.arange(190)
    for work in ([few], [many], torch.split(many[: 2 * BUCKETS[1]], 2)):
        assert run_pass(runner, sequences(runner, *work)) is not None
    run_extend(runner, make_row(runner, row(runner)), TOKENS.tolist())
    assert replays == []


class Broken(Observer):
    def on_kv(self, layer_id: int, keys: Tensor, values: Tensor) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("runner", ["llama"], indirect=True)
def test_a_failing_pass_leaves_the_runner_as_it_was(runner: Any, replays: Sequence[int]) -> None:
    backend = runner.attn_backend
    with untouched(runner), pytest.raises(ZeroDivisionError):
        run_pass(runner, sequences(runner, CHOSEN), observer=Broken())
    assert runner.attn_backend is backend
    assert replays == [64]
