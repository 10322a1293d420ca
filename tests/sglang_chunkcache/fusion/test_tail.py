"""What follows promised regions, computed in their pass: by the slow reference, SGLang's extend of
it after the pass."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from radix_ext import ChunkId, Span
from sglang_chunkcache.fusion.fill import FusionPass
from sglang_chunkcache.fusion.move import Move, Tail
from sglang_chunkcache.fusion.recompute import run_extend
from sglang_chunkcache.fusion.tail import given, tails_of
from sglang_chunkcache.scheduler.node import state
from tests import models
from tests.kit.tensors import (
    END,
    LENS,
    MODELS,
    QUESTION_LEN,
    REFERENCE,
    SOURCE,
    TARGET,
    TOKENS,
    Scene,
    Shuffling,
    asked,
    heads_of,
    make_pass,
    make_scene,
    scene,
    spoil,
    tokens_of,
)

__all__ = ["make_scene", "scene"]
pytestmark = [pytest.mark.engine, pytest.mark.matrix]

NIGHTLY = pytest.mark.nightly
WHOLE = tokens_of((*LENS, "question"))


def with_tail(scene: Scene, ratio: float, place: int = 0) -> Move:
    """A promised region, the `place`-th of its pass, and the question behind it, whose slots hold
    NaN."""
    target, row = TARGET + 300 * place, 2 + place
    move = scene.move(asked("query", ratio), target=target, row=row)
    slots = target[END : END + QUESTION_LEN]
    spoil(scene.runner, slots)
    move.tail = Tail(torch.tensor(TOKENS["question"]), slots)
    return move


def own(scene: Scene, move: Move) -> Tensor:
    """KV of region and question."""
    assert move.tail is not None
    return scene.kv(torch.cat([move.slots, move.tail.slots]))


def extended(scene: Scene, ratio: float) -> tuple[Tensor, Tensor]:
    """As `own`, and the question's hidden states, by SGLang's extend after the pass."""
    move = with_tail(scene, ratio)
    tail, move.tail = move.tail, None
    assert scene.fusion_pass.run([move]) is None
    hidden = run_extend(scene.runner, 2, WHOLE, END)
    move.tail = tail
    return hidden, own(scene, move)


def passes(scene: Scene) -> list[FusionPass]:
    """By mask, by kernel, and by one that takes rows in another order."""
    shape, scale = heads_of(scene.runner)
    attention = Shuffling(shape, scale=scale), {"kind": "sparse", "reason": "a test"}
    shuffling = make_pass(scene.runner, scene.config, scene.host, attention)
    return [scene.with_config(), scene.sparse_pass(), shuffling]


@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("kind", range(3))
def test_question_in_the_pass_equals_its_extend(scene: Scene, kind: int, ratio: float) -> None:
    """Of two requests of a batch, of which one recomputes a third."""
    expected, expected_kv = extended(scene, ratio)
    other, other_kv = extended(scene, 0.0)
    by = passes(scene)[kind]
    moves = [with_tail(scene, ratio), with_tail(scene, 0.0, 1)]
    hidden = by.run(moves)
    assert hidden is not None
    scene.assert_close(hidden, torch.cat([expected, other]))
    scene.assert_close(own(scene, moves[0]), expected_kv)
    scene.assert_close(own(scene, moves[1]), other_kv)
    assert by.num_tokens["tail"] == 2 * QUESTION_LEN
    assert [move.fallbacks for move in moves] == [[], []]
    if ratio == 1.0:
        scene.assert_close(models.logits_of(scene.runner, hidden[:QUESTION_LEN])[-1], scene.logits)


def test_pass_that_fails_leaves_the_question_to_the_forward(scene: Scene) -> None:
    move = with_tail(scene, 0.3)
    assert scene.sparse_pass("run").run([move]) is None
    assert move.fallbacks == ["pass_failed"]
    scene.assert_prefilled(move, row=2)


@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(each, id="-".join(each), marks=[] if each == MODELS[0] else [NIGHTLY])
        for each in MODELS
    ],
    indirect=True,
)
def test_forward_takes_what_it_is_given(scene: Scene) -> None:
    """Its logits are of that, and the next forward's are its own again, whatever happens."""
    runner, graphs, compiled = scene.runner, object(), mock.Mock()
    ids, slots = TOKENS["A"], SOURCE[: LENS["A"]]
    ordinary = models.prefill(runner, ids, slots)
    before = runner.prefill_cuda_graph_runner
    hidden = torch.randn(len(ids), runner.model_config.hidden_size, dtype=runner.dtype)
    with given(runner, hidden):
        got = models.prefill(runner, ids, slots)
        assert runner.prefill_cuda_graph_runner is None
    scene.assert_close(got, models.logits_of(runner, hidden)[-1])
    runner.prefill_cuda_graph_runner = graphs
    try:
        runner.model.model.forward = compiled
        with pytest.raises(OSError, match="planted"), given(runner, hidden):
            raise OSError("planted")
        assert runner.prefill_cuda_graph_runner is graphs
        assert runner.model.model.forward is compiled
    finally:
        del runner.model.model.forward
        runner.prefill_cuda_graph_runner = before
    assert torch.equal(models.prefill(runner, ids, slots), ordinary)
    models.prefill(runner, WHOLE, REFERENCE[: len(WHOLE)])


# Which batches

IDS = list(range(30))


def tails(*changes: dict[str, Any], **of_batch: Any) -> list[Tail]:
    """Of a batch of prompts whose chunks, promised, end at 20. Changes, by request: `end` of the
    region and of its chunks, `length` of the extend, tokens that are recomputed."""
    reqs: list[Any] = []
    plans: list[Any] = []
    lens = []
    for each in changes:
        change = {"end": 20, "chunks_end": 20, "recomputed": 3, "answer": 0, **each}
        req = SimpleNamespace(
            origin_input_ids=array("q", IDS), output_ids=array("q", [7] * change["answer"])
        )
        state(req).spans = cast(
            "Any", SimpleNamespace(spans=[Span(5, change["chunks_end"], ChunkId("a"))])
        )
        end, recomputed = change["end"], change["recomputed"]
        plan = {"recomputed_len": recomputed, "gap_len": 4 * bool(recomputed)}
        plans.append(SimpleNamespace(end=end, **plan))
        reqs.append(req)
        lens.append(change.get("length", len(IDS) + change["answer"] - end))
    batch: Any = SimpleNamespace(
        reqs=reqs,
        forward_mode=of_batch.get("mode", ForwardMode.EXTEND),
        prefix_lens=[
            each.get("start", plan.end) for each, plan in zip(changes, plans, strict=True)
        ],
        extend_lens=lens,
        out_cache_loc=torch.arange(100, 100 + sum(lens)),
    )
    return tails_of(batch, plans[: of_batch.get("num_moved")], of_batch.get("max_tokens", 100))


def test_a_batch_of_moved_requests_has_tails() -> None:
    """One that comes again after a retraction computes its answer, too."""
    first, second = tails({}, {"end": 15, "chunks_end": 15, "answer": 2, "recomputed": 0})
    assert first.token_ids.tolist() == IDS[20:]
    assert first.slots.tolist() == list(range(100, 110))
    assert second.token_ids.tolist() == [*IDS[15:], 7, 7]
    assert second.slots.tolist() == list(range(110, 127))
    assert len(tails({}, {}, max_tokens=34)) == 2


@pytest.mark.parametrize(
    ("changes", "of_batch"),
    [
        pytest.param([{}, {}], {"mode": ForwardMode.MIXED}, id="others decode"),
        pytest.param([{}, {}], {"num_moved": 1}, id="one computes its prompt"),
        pytest.param([{"length": 4}], {}, id="the prompt goes on"),
        pytest.param([{}, {"chunks_end": 25}], {}, id="a chunk is computed"),
        pytest.param([{"start": 18, "length": 12}], {}, id="the region was cut"),
        pytest.param([{"recomputed": 0}], {}, id="no pass"),
        pytest.param([{}, {}], {"max_tokens": 33}, id="too large"),
        pytest.param([{}, {"answer": 1010}], {"max_tokens": 9999}, id="long tails"),
    ],
)
def test_other_batches_have_none(changes: list[dict[str, Any]], of_batch: dict[str, Any]) -> None:
    assert tails(*changes, **of_batch) == []
