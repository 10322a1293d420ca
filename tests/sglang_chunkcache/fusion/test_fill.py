"""Filling promised slots on real SGLang models: everything recomputed is a prefill, and what is not
chosen stays as moved.

tests/kit/tensors.py draws the scene. Promised slots hold NaN before, so a test sees code that reads
one too early or forgets to write one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from radix_ext import FusionRequest
from radix_ext.cfo import KvFacts, Scored
from radix_ext.fusion_request import Focus, question_tokens
from radix_ext.moved_plan import Candidate
from radix_ext.sources import DeviceCopy, HostCopy
from radix_ext.variants import Variant
from sglang_chunkcache import config
from sglang_chunkcache.attention import choice as attention_choice
from sglang_chunkcache.fusion import choosing, moving, selectors
from sglang_chunkcache.fusion import fill as fusion_pass
from sglang_chunkcache.fusion.measure import question_evidence
from sglang_chunkcache.fusion.recompute import run_extend
from sglang_chunkcache.fusion.relocate import copy_moved
from sglang_chunkcache.fusion.selectors import focus
from sglang_chunkcache.scheduler import codec_pool
from sglang_chunkcache.scheduler.node import facts
from tests import models
from tests.kit.tensors import (
    END,
    HERE,
    LENS,
    MODELS,
    QUESTION_LEN,
    SOURCE,
    SPANS,
    TARGET,
    THERE,
    TOKENS,
    TOLERANCES,
    PoolHost,
    Scene,
    asked,
    held_kv,
    make_pass,
    make_scene,
    put_kv,
    scene,
    spoil,
)

__all__ = ["make_scene", "scene"]
pytestmark = [pytest.mark.engine, pytest.mark.matrix]

MOVED_LEN = sum(LENS[name] for name in "ABCE")
SELECTORS = ("first", "random", "h2o", "deviation", "query", "prophet", "context")


def every_model(*selectors: str) -> pytest.MarkDecorator:
    """Every selector on one model, and one selector on one model of each kind;
    all on all nightly."""
    kinds = ("stablelm", "float32"), ("qwen3_yarn", "float32"), ("llama", "bfloat16")

    def case(model: tuple[str, str], selector: str) -> Any:
        is_daily = model == MODELS[0] or (model in kinds and selector == selectors[0])
        marks = () if is_daily else pytest.mark.nightly
        return pytest.param(model, selector, marks=marks, id="-".join((*model, selector)))

    cases = [case(model, selector) for model in MODELS for selector in selectors]
    return pytest.mark.parametrize(("scene", "selector"), cases, indirect=["scene"])


def positions_of(names: Sequence[str]) -> Tensor:
    return torch.cat([torch.arange(*HERE[name]) for name in names])


# Everything, nothing


@every_model("query", "first", "random", "h2o", "deviation", "context")
def test_everything_recomputed_is_a_prefill(scene: Scene, selector: str) -> None:
    move = scene.run(asked(selector, 1.0))
    scene.assert_prefilled(move)
    assert (move.recomputed_len, move.fallbacks) == (MOVED_LEN, [])


@every_model("none", "first")
def test_nothing_recomputed_is_moved_alone(scene: Scene, selector: str) -> None:
    """Layer 0 sees no context, so it is as prefilled; above, chunks bring what they saw."""
    move = scene.run(asked(selector, 0.0))
    got = scene.kv(move.slots)
    scene.assert_close(got[:, 0], scene.full[:, 0])
    for name in "ABCE":
        assert torch.equal(got[1][:, slice(*HERE[name])], scene.kv(SOURCE[slice(*THERE[name])])[1])
    assert float((got - scene.full).abs().max()) > 10 * TOLERANCES[scene.runner.dtype]
    assert move.recomputed_len == 0
    assert scene.answer().isfinite().all()


# Some


@pytest.mark.parametrize("selector", SELECTORS)
def test_only_what_is_chosen_changes(scene: Scene, selector: str) -> None:
    before = scene.kv(scene.run(asked("none", 0.0)).slots)
    move = scene.run(asked(selector, 0.3))
    changed = (scene.kv(move.slots) != before).flatten(3).any(-1).any(0).any(0)
    num_chosen = int(changed[positions_of("ABCE")].sum())
    assert num_chosen == move.recomputed_len
    assert math.ceil(0.3 * MOVED_LEN) <= num_chosen <= math.ceil(0.3 * MOVED_LEN) + 3
    assert not changed[: LENS["head"]].any()


@pytest.mark.parametrize(
    ("reuse", "expected"),
    [
        (asked("set", 0.9999), "ABCE"),  # none was computed behind what is before it here
        (asked("context", 0.3, alpha=1000.0), "BE"),  # the others are not scored
        (asked("context", 0.3, alpha=1000.0, focus="spare"), ""),
        (asked("context", 0.3, alpha=0.0), ""),
        (asked("first", 1.0), ""),
    ],
)
def test_chunks_recomputed_whole_are_sources_where_the_selector_makes_variants(
    scene: Scene, reuse: FusionRequest, expected: str
) -> None:
    assert scene.run(reuse).whole == {HERE[name][0] for name in expected}


@pytest.mark.parametrize("selector", SELECTORS)
def test_all_attentions_agree(scene: Scene, selector: str) -> None:
    masked = scene.run(asked(selector, 0.3))
    got, answer = scene.kv(masked.slots), scene.answer()
    again = scene.run(asked(selector, 0.3), scene.sparse_pass())
    scene.assert_close(scene.kv(again.slots), got)
    scene.assert_close(scene.answer(), answer)
    assert (again.recomputed_len, again.fallbacks) == (masked.recomputed_len, masked.fallbacks)


@every_model("first")
def test_everything_recomputed_sparsely_is_a_prefill(scene: Scene, selector: str) -> None:
    sparse = scene.sparse_pass()
    move = scene.run(asked(selector, 1.0), sparse)
    scene.assert_prefilled(move)
    assert move.fallbacks == []
    assert sparse.sparse.num_runs == sparse.pool.layer_num  # type: ignore[union-attr]


def test_requests_of_a_batch_do_not_mix(scene: Scene) -> None:
    policies = [asked("query", 0.25), asked("deviation", 0.5), asked("none", 0.0)]
    alone = [scene.kv(scene.run(reuse).slots) for reuse in policies]
    moves = [
        scene.move(reuse, target=TARGET + 300 * i, row=2 + i) for i, reuse in enumerate(policies)
    ]
    scene.fusion_pass.run(moves)
    for move, expected in zip(moves, alone, strict=True):
        scene.assert_close(scene.kv(move.slots), expected)


def test_focus_spares_the_other_chunks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    is_focused = torch.tensor([False, True, False, True])
    monkeypatch.setattr(focus, "focused_chunks", lambda by_layer, window: is_focused)
    move = scene.run(asked("first", 0.5, focus="spare"))
    assert move.focused == [SPANS.index("B"), SPANS.index("E")]
    chosen = {}
    for name in "ABCE":
        there, here = SOURCE[slice(*THERE[name])], move.slots[slice(*HERE[name])]
        differ = scene.kv(there)[1] != scene.kv(here)[1]
        chosen[name] = int(differ.flatten(2).any(-1).any(0).sum())
    assert chosen == {"A": 0, "B": LENS["B"] // 2, "C": 0, "E": LENS["E"] // 2}
    assert move.recomputed_len == sum(chosen.values())


def test_focus_is_asked_for(scene: Scene) -> None:
    assert scene.run(asked("first", 0.5)).focused is None
    focused = scene.run(asked("first", 0.5, focus="spare")).focused
    assert focused
    assert set(focused) <= {SPANS.index(name) for name in "ABCE"}


# What the selectors are told


def test_without_a_question_the_fallback_is_named(scene: Scene) -> None:
    move = scene.run(asked("query", 0.3), question=False)
    assert "no_question" in move.fallbacks
    assert scene.kv(move.slots).isfinite().all()


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Questions that are asked."""
    found: list[Any] = []

    def spy(runner: Any, requests: Sequence[Any]) -> Any:
        found.extend(requests)
        return question_evidence(runner, requests)

    monkeypatch.setattr(choosing, "question_evidence", spy)
    return found


def test_the_end_of_a_long_question_stands_for_it(scene: Scene, probes: list[Any]) -> None:
    moves = scene.move(asked("query", 0.3)), scene.move(asked("h2o", 0.3), row=2)
    scene.with_config(question_window=3).run(list(moves))
    (probe,) = probes
    assert probe.token_ids.tolist() == TOKENS["question"][-3:]
    assert probe.positions.tolist() == [END + 5, END + 6, END + 7]
    gaps = set(positions_of(["text", "D"]).tolist())
    assert probe.kv_positions.tolist() == [p for p in range(END) if p not in gaps]
    assert probe.chunks == tuple(HERE[name] for name in "ABCE")
    assert not probe.in_all_layers
    wide = scene.with_config(question_window=QUESTION_LEN + 1)
    scene.run(asked("first", 0.3, focus="spare"), wide)
    assert probes[-1].token_ids.tolist() == TOKENS["question"]
    assert probes[-1].positions[0] == END
    assert probes[-1].in_all_layers


@pytest.mark.parametrize("selector", [*config.SELECTORS, "prophet"])
@pytest.mark.parametrize("focus", ["off", "spare"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_the_question_pass_is_as_long_as_is_told(
    scene: Scene, probes: list[Any], selector: str, focus: Focus, ratio: float
) -> None:
    """What a cost model counts is what runs."""
    reuse = asked(selector, ratio, focus=focus)
    for window in (3, QUESTION_LEN, 100):
        probes.clear()
        scene.run(reuse, scene.with_config(question_window=window))
        num_tokens = sum(len(probe.token_ids) for probe in probes)
        assert num_tokens == question_tokens(reuse, QUESTION_LEN, window=window)
        assert num_tokens in (0, min(window, QUESTION_LEN))


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_nothing_is_measured_where_nothing_is_chosen(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    measured = mock.Mock(return_value=[])
    for name in ("question_evidence", "deviation_evidence"):
        monkeypatch.setattr(choosing, name, measured)
    moves = [scene.move(asked(name, ratio), row=1 + i) for i, name in enumerate(SELECTORS[3:5])]
    scene.fusion_pass.run(moves)
    assert measured.call_count == 2
    assert all(call.args[1] == [] for call in measured.call_args_list)


# What goes wrong


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (moving, "copy_moved"),
        (moving, "KeyTurn"),
        (choosing, "question_evidence"),
        (fusion_pass, "run_pass"),
        (selectors, "get"),
    ],
)
def test_a_failing_pass_computes_everything(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """Wherever it fails, the batch is prefilled as usual, and each answer says so."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(owner, name, fail)
    other = scene.move(asked("none", 0.0), target=TARGET + 300, row=2)
    moves = [scene.move(asked("query", 0.3)), other]
    scene.fusion_pass.run(moves)
    for row, move in enumerate(moves, 1):
        scene.assert_prefilled(move, row)
        assert (move.fallbacks, move.recomputed_len) == (["pass_failed"], MOVED_LEN)
        assert set(move.ms) == {"relocate", "select", "recompute"}
        assert move.filling is None, "of two together"


def test_a_pass_without_a_plan_is_masked(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is written yet: the same tokens by the mask, counted each time and logged once."""
    expected = scene.kv(scene.run(asked("first", 0.3)).slots)
    failing = scene.sparse_pass("plan")
    for _ in range(2):
        move = scene.run(asked("first", 0.3), failing)
        scene.assert_close(scene.kv(move.slots), expected)
        assert move.fallbacks == []
    told = attention_choice.described("sparse", "a test", "reference")
    told |= {"passes": {}, "fallbacks": 2}
    assert failing.stats()["attention"] == told
    assert caplog.text.count("no plan for sparse attention") == 1


@pytest.mark.parametrize("kind", ["masked", "sparse"])
def test_whichever_layer_fails_the_pool_is_as_after_a_prefill(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Some layers hold new K/V, so all of the region is computed again: bit for bit what SGLang
    computes there, and nothing anywhere else."""
    pool = scene.runner.token_to_kv_pool
    buffers = (*pool.k_buffer, *pool.v_buffer)
    for broken in range(pool.layer_num):
        move = scene.move(asked("first", 0.3))
        start, region = move.plan.start, move.slots[move.plan.start :]
        before = [each.clone() for each in buffers]
        failing = scene.sparse_pass() if kind == "sparse" else scene.fusion_pass
        with monkeypatch.context() as patch:
            patch.setattr(pool, "set_kv_buffer", failing_once(pool.set_kv_buffer, broken))
            failing.run([move])
        assert move.fallbacks == ["pass_failed"]
        after = [each.clone() for each in buffers]
        spoil(scene.runner, region)
        run_extend(scene.runner, move.row_index(), move.token_ids, start, move.plan.end)
        for mine, expected, old in zip(after, buffers, before, strict=True):
            same: Any = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(mine, expected, **same)
            mine[region] = old[region] = 0
            torch.testing.assert_close(mine, old, **same)


def failing_once(write: Callable[..., None], broken: int) -> Callable[..., None]:
    layers = iter([broken])

    def fail_or_write(layer: Any, *args: Any, **kwargs: Any) -> None:
        if layer.layer_id == broken and next(layers, None) is not None:
            raise RuntimeError("launch failed")
        write(layer, *args, **kwargs)

    return fail_or_write


def test_an_unknown_tier_computes_everything(scene: Scene) -> None:
    """A source that no tier can read is an error of ours, not a wrong answer."""
    move = scene.move(asked("none", 0.0))
    odd = Candidate(KvFacts(()))
    pieces = tuple(replace(p, source=odd) if p.chunk == "A" else p for p in move.plan.pieces)
    move.plan = replace(move.plan, pieces=pieces)
    scene.fusion_pass.run([move])
    assert move.fallbacks == ["pass_failed"]
    scene.assert_close(scene.answer(), scene.logits)


# For the store, and for the stats


def test_captures_are_scored_as_asked(scene: Scene) -> None:
    counting, capture = scene.with_config(), scene.capture("E")
    plain, masses, everything = (replace(capture, scored=scored) for scored in Scored)
    (each,) = counting.capture([plain])
    assert each.is_done()
    blob, scores = each.read()
    assert blob is not None
    assert (scores, blob.num_tokens, counting.stats()["tokens"]) == (None, LENS["E"], {})
    assert torch.equal(held_kv(blob)[1], scene.kv(SOURCE[slice(*THERE["E"])])[1])
    for asked_for in (masses, everything):
        again, scores = counting.capture([asked_for])[0].read()
        assert again is not None
        assert torch.equal(held_kv(again)[0], held_kv(blob)[0])
        assert scores is not None
        assert scores.prefix_lens == (LENS["C"], LENS["A"])
        assert scores.scored is asked_for.scored


def test_from_host_memory_as_from_the_device(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit."""
    stored = scene.kv(scene.run(asked("none", 0.0)).slots)
    for name in "BE":
        there = SOURCE[slice(*THERE[name])]
        node = SimpleNamespace(value=there)
        known = scene.sources[name].facts
        facts(node).start, facts(node).prefix = known.start, known.prefix
        monkeypatch.setitem(scene.sources, name, DeviceCopy(facts(node), node))
        for held, cached in zip(held_kv(known.blob), scene.kv(there), strict=True):
            assert torch.equal(held, cached)
    assert torch.equal(scene.kv(scene.run(asked("none", 0.0)).slots), stored)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_a_codec_keeps_is_what_is_moved(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Values bit by bit, in pieces. The server tells how far that may be off."""
    monkeypatch.setattr(codec_pool, "ROW_SLOTS", LENS["E"] - 1)
    host: Any = PoolHost(scene.runner, name)
    coding = make_pass(scene.runner, scene.config, host)
    for chunk, captured in zip("BE", coding.capture([*map(scene.capture, "BE")]), strict=True):
        known, (blob, _) = scene.sources[chunk].facts, captured.read()
        assert blob is not None
        stored = HostCopy(Variant(known.prefix, blob, start=known.start))
        monkeypatch.setitem(scene.sources, chunk, stored)
        plain, told = known.blob, coding.stats()["codec"]
        assert blob.nbytes == host.pool.token_bytes * LENS[chunk] < 0.8 * plain.nbytes
        assert blob.nbytes + blob.saved_bytes == plain.nbytes
        assert told["name"] == name
        for mine, exact in zip(held_kv(blob), held_kv(plain), strict=True):
            largest = exact.double().abs().amax(-1, keepdim=True)
            off = (mine.double() - exact.double()).abs() / largest
            assert 0 < float(off.max()) <= told["max_error"] * (1 + 1e-5)
    scene.run(asked("none", 0.0), coding)
    for chunk in "BE":
        moved = scene.kv(TARGET[slice(*HERE[chunk])])[1]
        assert torch.equal(moved, held_kv(scene.sources[chunk].facts.blob)[1])
    assert blob is not None
    entry: Any = SimpleNamespace(kv=[each.flip(1) for each in blob.reader()()])
    blob.writer()(entry)
    assert all(map(torch.equal, blob.reader()(), entry.kv))


def test_a_codec_keeps_nothing_that_is_not_finite(scene: Scene) -> None:
    host: Any = PoolHost(scene.runner, "int8")
    coding = make_pass(scene.runner, scene.config, host)
    scene.runner.token_to_kv_pool.v_buffer[-1][SOURCE[THERE["E"][1] - 1]] = math.inf
    (captured,) = coding.capture([replace(scene.capture("E"), scored=Scored.NOTHING)])
    with pytest.raises(ValueError, match="not finite"):
        captured.read()


def test_what_was_scored_is_not_scored_again(scene: Scene) -> None:
    """A node keeps what was measured; what is missing is measured with the rest."""
    counting = scene.with_config()

    def scores_of(capture: Any) -> Any:
        return counting.capture([capture])[0].read()[1]

    masses = replace(scene.capture("B"), scored=Scored.MASSES)
    scores = scores_of(masses)
    known = replace(masses, scores=scores)
    assert scores_of(known) is scores_of(replace(known, scored=Scored.NOTHING)) is scores
    assert counting.stats()["tokens"]["scored"] == LENS["B"]
    assert scores_of(replace(known, scored=Scored.ALL)).scored is Scored.ALL
    assert counting.stats()["tokens"]["scored"] == 2 * LENS["B"]


def test_a_copy_is_not_what_the_pool_holds_later(scene: Scene) -> None:
    """The node may be evicted before the copy has arrived, and its slots are given to others."""
    slots = SOURCE[slice(*THERE["E"])]
    before = models.kv_of(scene.runner, slots)
    (each,) = scene.fusion_pass.capture([scene.capture("E")])
    spoil(scene.runner, slots)
    blob, _ = each.read()
    assert blob is not None
    assert torch.equal(held_kv(blob)[1], before[1])
    put_kv(scene.runner, slots, before)


def test_moves_within_the_device_wait_for_all_that_is_being_loaded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source may have come back for a request of the same batch."""
    pool, moves = scene.runner.token_to_kv_pool, copy_moved
    loaded: list[int] = []

    def checked(*args: Any, **kwargs: Any) -> None:
        assert pool.layer_num - 1 in loaded
        moves(*args, **kwargs)

    monkeypatch.setattr(pool, "layer_transfer_counter", SimpleNamespace(wait_until=loaded.append))
    monkeypatch.setattr(moving, "copy_moved", checked)
    scene.fusion_pass.mover.move([scene.move(asked("none", 0.0))])
    assert loaded


def test_stats_count_tokens_and_seconds(scene: Scene) -> None:
    counting = scene.with_config()
    move = scene.run(asked("first", 0.5), counting)
    stats = counting.stats()
    assert stats["tokens"] == {
        "moved_device": LENS["A"] + LENS["C"],
        "moved_host": LENS["B"] + LENS["E"],
        "moved_other_head": 0,
        "recomputed": move.recomputed_len,
        "gap": LENS["text"] + LENS["D"],
    }
    assert all(
        1000 * stats["seconds"][phase] == pytest.approx(ms, abs=0.01)
        for phase, ms in move.ms.items()
    )
    assert move.filling is not None
    assert move.filling.seconds is not None
    assert 1000 * move.filling.seconds >= sum(move.ms.values()) > 0
