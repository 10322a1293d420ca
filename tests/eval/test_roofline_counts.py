"""The launches that the model of time counts are those of the passes' own code, on a tiny model."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from eval.machines import LAYER_LAUNCHES
from eval.roofline.build import (
    BUILT,
    CHOICE_LAUNCHES,
    GRAPH_LAUNCHES,
    GRAPHS,
    RECOMPUTE_LAUNCHES,
)
from radix_ext import ChunkId, FusionRequest
from radix_ext.sources import DeviceCopy
from sglang_chunkcache.attention import masked_layout
from sglang_chunkcache.attention.base import PassSequence
from sglang_chunkcache.fusion import fill, recompute, relocate, relocate_kernel
from sglang_chunkcache.fusion.measure import (
    DeviationProbe,
    QuestionProbe,
    deviation_evidence,
    question_evidence,
)
from sglang_chunkcache.fusion.move import Tail
from sglang_chunkcache.fusion.moving import Mover
from sglang_chunkcache.fusion.recompute import run_pass
from sglang_chunkcache.fusion.relocate import KeyTurn, RotaryTable, rotary_of
from sglang_chunkcache.fusion.selectors import critical
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk
from sglang_chunkcache.scheduler.node import joined
from sglang_chunkcache.scheduler.pricing import Pricing
from tests import models
from tests.eval.launches import OUTSIDE, Launches, count
from tests.kit.prefill_graphs import BUCKETS, eager_graphs
from tests.kit.tensors import flashinfer_of
from tests.reference import flashinfer

NUM_TOKENS, NUM_LAYERS = 512, 3
IDS = torch.arange(NUM_TOKENS) % models.VOCAB
CHUNKS = ((0, NUM_TOKENS // 2), (NUM_TOKENS // 2, NUM_TOKENS))


READ_LAYER = 1
"""Of the question's pass, which ends with it; layer 0 makes the masks."""


@dataclass(frozen=True)
class Bench:
    """A prompt in the pool of a tiny model."""

    runner: Any
    slots: torch.Tensor
    patch: pytest.MonkeyPatch

    def count(self, run: Callable[[Launches], object]) -> Launches:
        return count(
            run, runner=self.runner, slots=self.slots, patch=self.patch, flashinfer=flashinfer
        )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    runner = models.runner("llama", "bfloat16", head_dim=64)
    allocator = runner.token_to_kv_pool_allocator
    slots = allocator.alloc(NUM_TOKENS)
    models.prefill(runner, IDS.tolist(), slots)
    yield Bench(runner, slots, monkeypatch)
    allocator.free(slots)


def test_sparse_pass(bench: Bench) -> None:
    sparse = flashinfer_of(bench.runner, "fa3")
    end = NUM_TOKENS - 16
    tail = Tail(IDS[end:], bench.slots[end:])
    move: Any = SimpleNamespace(
        token_ids=array("q", IDS[:end].tolist()),
        slots=bench.slots[:end],
        plan=SimpleNamespace(end=end),
        tail=tail,
    )
    positions = fill._with_tail(move, torch.arange(1, end, 7))

    def run(_: Launches) -> None:
        scattered = fill._sequence(move, positions)
        hidden = run_pass(bench.runner, [scattered], sparse=sparse)
        assert hidden is not None
        joined([hidden[len(hidden) - len(tail.slots) :]])

    launches = bench.count(run)
    for layer in range(NUM_LAYERS):
        assert launches.total(layer) == LAYER_LAUNCHES == BUILT.recompute_launches
    assert launches.total(OUTSIDE) == RECOMPUTE_LAUNCHES


def test_passes_in_graphs(bench: Bench) -> None:
    """Between a graph's segments: K/V written, attention, its copy to where the next segment reads
    it, padding emptied. The question writes none, and gathers what it sees."""
    bench.patch.setattr(recompute, "REPLAYS", True)
    eager = RadixAttention._eager_attention

    def replayed(run: Callable[[], object]) -> Launches:
        with eager_graphs(bench.runner) as graph, bench.patch.context() as patch:
            segments = graph.replay

            def counted(launches: Launches) -> None:
                def replay(*args: Any, **kwargs: Any) -> Any:
                    launches._inside = 1
                    try:
                        return segments(*args, **kwargs)
                    finally:
                        launches._inside = 0

                def between(self: RadixAttention, *args: Any, **kwargs: Any) -> None:
                    launches._layer, launches._inside = self.layer_id, 0
                    eager.__get__(self)(*args, **kwargs)
                    launches._layer, launches._inside = OUTSIDE, 1

                patch.setattr(graph, "replay", replay)
                patch.setattr(RadixAttention, "_eager_attention", between)
                run()

            return bench.count(counted)

    sparse = flashinfer_of(bench.runner, "fa3")
    rows = PassSequence.of_row(IDS, bench.slots, torch.arange(1, 2 * BUCKETS[0], 2))
    found = replayed(lambda: run_pass(bench.runner, [rows], sparse=sparse))
    behind = torch.arange(NUM_TOKENS, NUM_TOKENS + BUCKETS[0])
    probe = QuestionProbe(
        IDS[: BUCKETS[0]], behind, bench.slots, torch.arange(NUM_TOKENS), CHUNKS, NUM_TOKENS
    )
    asked = replayed(lambda: question_evidence(bench.runner, [probe]))
    for layer in range(1, NUM_LAYERS - 1):  # without the mask, and without what is read
        assert found.total(layer) == GRAPHS.recompute_launches
        assert asked.total(layer) == GRAPHS.question_launches
    assert found.total(OUTSIDE) == GRAPH_LAUNCHES - 2  # the question's, as in test_sparse_pass
    assert asked.total() - NUM_LAYERS * GRAPHS.question_launches == GRAPHS.question_more


def test_question(bench: Bench) -> None:
    """Layers read, gather and join all KV: 2 copies of K and V, 2 bytes of them each, and SDPA."""
    behind = torch.arange(NUM_TOKENS, NUM_TOKENS + 16)
    at = range(READ_LAYER, READ_LAYER + 1)
    probe = QuestionProbe(
        IDS[:16], behind, bench.slots, torch.arange(NUM_TOKENS), CHUNKS, NUM_TOKENS, at
    )
    launches = bench.count(lambda _: question_evidence(bench.runner, [probe]))
    last = replace(probe, layers=range(NUM_LAYERS - 1, NUM_LAYERS))
    deeper = bench.count(lambda _: question_evidence(bench.runner, [last]))
    assert deeper.total() - launches.total() == BUILT.question_launches
    names = deeper.by_layer[READ_LAYER]
    # read and written by each; attention reads once more
    assert names["index"] + names["cat"] + 1 == BUILT.question_reads
    assert deeper.total() - NUM_LAYERS * BUILT.question_launches == BUILT.question_more


def test_piece_of_deviation(bench: Bench) -> None:
    compared = torch.arange(0, NUM_TOKENS, 3)
    probe = DeviationProbe(IDS, bench.slots, CHUNKS, 2, compared)
    one = bench.count(lambda _: deviation_evidence(bench.runner, [probe]))
    max_rows = NUM_TOKENS // 4
    two = bench.count(lambda _: deviation_evidence(bench.runner, [probe], max_rows=max_rows))
    assert one.total() == BUILT.piece_launches
    in_blocks = partial(masked_layout.plan, block_rows=len(compared) // 3)
    with bench.patch.context() as patch:
        patch.setattr(recompute, "plan", in_blocks)
        blocks = bench.count(lambda _: deviation_evidence(bench.runner, [probe]))
    assert blocks.total() - one.total() == 2 * BUILT.block_launches
    assert two.total() - one.total() == BUILT.piece_launches - 3  # slots and zeros of both
    names = one.by_layer[0]
    assert names["index"] + names["cat"] + 1 == BUILT.piece_reads


@pytest.mark.parametrize("num_chunks", [1, 100])
def test_choice(bench: Bench, num_chunks: int) -> None:
    """Of chunks that have been measured; at any length."""
    chunks = [
        MovedChunk(ChunkId(str(at)), 9 * at, 9, (), (), None, outward=torch.rand(9))
        for at in range(num_chunks)
    ]
    question, deviation = torch.rand(2, 9 * num_chunks)
    seen = Evidence(question, deviation=deviation)
    request = FusionRequest("critical", 0.15)

    def run(launches: Launches) -> None:
        launches.tag([question, deviation])
        critical.SELECTOR.candidates(chunks, request, seen)
        critical.SELECTOR.select(chunks, request, seen)

    assert bench.count(run).total() == CHOICE_LAUNCHES


def test_copy_within_the_device(bench: Bench) -> None:
    """Two lists of positions a chunk, one move for all."""
    mover = make_mover(bench)
    target = bench.slots.flip(0)

    def launches_of(num_chunks: int) -> int:
        size = NUM_TOKENS // 8
        pieces = [
            SimpleNamespace(start=at, end=at + size, other_head=False, source=source_at(at, size))
            for at in range(0, num_chunks * size, size)
        ]
        move: Any = SimpleNamespace(moved=pieces, slots=target)
        found = bench.count(lambda launches: on_kernel(bench, lambda: mover.move([move]), launches))
        # Read on the CPU alone: whether all keys turn.
        return found.total() - found.by_layer[OUTSIDE]["any"]

    def source_at(start: int, size: int) -> DeviceCopy:
        facts: Any = SimpleNamespace(start=start + 1)
        return DeviceCopy(facts, SimpleNamespace(value=bench.slots[start:][:size]))

    one, two = launches_of(1), launches_of(2)
    assert two - one == BUILT.copy_chunk_launches
    assert one == BUILT.copy_launches + BUILT.copy_chunk_launches


def test_load_of_a_layer(bench: Bench) -> None:
    """SGLang's kernel for all chunks, and one that turns their keys in place."""
    positions = torch.arange(NUM_TOKENS)
    pool, table = bench.runner.token_to_kv_pool, RotaryTable.of(rotary_of(bench.runner))
    turn = KeyTurn(pool, table, positions, bench.slots, positions + 1)
    found = []

    def load(launches: Launches) -> None:
        for layer in range(2):
            launches.add("load_to_device_per_layer")
            on_kernel(bench, partial(turn, range(layer, layer + 1)), launches)
            found.append(launches.total())

    bench.count(load)
    assert found[1] - found[0] == BUILT.load_launches


def make_mover(bench: Bench) -> Mover:
    runner = bench.runner
    table = RotaryTable.of(rotary_of(runner))
    host: Any = None  # nothing is loaded
    return Mover(runner.token_to_kv_pool, table, Pricing(runner), host, Counter())


def on_kernel(bench: Bench, run: Callable[[], object], launches: Launches) -> None:
    """The Triton kernel, which does not run here, is one launch."""
    with bench.patch.context() as patch:
        patch.setattr(relocate, "_takes_kernel", lambda *_: True)
        # On CUDA what they read would be waited for.
        patch.setattr(relocate, "_check_apart", lambda *_: None)
        patch.setattr(relocate, "_check_places", lambda *_: None)
        patch.setattr(relocate_kernel, "relocate", lambda *_, **__: launches.add("relocate"))
        run()
