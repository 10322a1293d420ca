"""What comes from host memory comes beside the passes, layer by layer:
nobody reads, or writes, a layer before it is there."""

from __future__ import annotations

import logging
from threading import Event, Thread, current_thread, main_thread
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch

from radix_ext.costs import Line, Phase, Work
from radix_ext.moved_plan import ReusePlan
from radix_ext.sources import HostCopy
from radix_ext.variants import Variant
from sglang_chunkcache.fusion.fill import FusionPass
from sglang_chunkcache.fusion.store import HostBlob
from sglang_chunkcache.scheduler.layer_loads import LayerLoads
from tests.polling import DEADLINE_S
from tests.sglang_chunkcache.fusion.test_fill import (
    END,
    LENS,
    REFERENCE,
    Scene,
    asked,
    make_scene,
    replace_config,
    scene,
    sparse_pass,
)

__all__ = ["make_scene", "scene"]
pytestmark = pytest.mark.engine


class Late:
    """Copies of layers beside the passes begin when a reader has asked for them,
    and fail where they are told."""

    def __init__(
        self, fused: FusionPass, monkeypatch: pytest.MonkeyPatch, *, num_ahead: int, fails: str = ""
    ) -> None:
        loads = fused.loads
        self.beside: list[int] = []
        self._has_begun = False  # moves within the device ask before
        self._asked = [Event() for _ in range(loads.num_layers)]
        start, wait = loads.start, loads.wait_until

        def late(copy: Any, *args: Any, **options: Any) -> int:
            def copy_late(layers: range) -> None:
                is_beside = current_thread() is not main_thread()
                if is_beside:
                    assert self._asked[layers[0]].wait(DEADLINE_S)
                    self.beside += layers
                if fails == "always" or (fails == "beside" and is_beside):
                    raise RuntimeError("broken")
                copy(layers)

            self._has_begun = True
            return start(copy_late, *args, **options)

        def ask(layer: int) -> None:
            for each in self._asked[: layer + 1] if self._has_begun else ():
                each.set()
            wait(layer)

        monkeypatch.setattr(loads, "start", late)
        monkeypatch.setattr(loads, "wait_until", ask)
        monkeypatch.setattr(fused, "_num_ahead", lambda moves, work: num_ahead)


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("attention", ["masked", "sparse"])
@pytest.mark.parametrize("selector", ["first", "query", "deviation", "none"])
def test_beside_the_passes_as_before_them(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, selector: str, attention: str, num_ahead: int
) -> None:
    """Bit by bit, recomputed tokens included, which a late copy would overwrite."""
    fused = sparse_pass(scene) if attention == "sparse" else replace_config(scene)
    reuse = asked(selector, 0.3 if selector != "none" else 0.0)
    move = scene.move(reuse)
    fused.run([move])
    expected = scene.kv(move.slots)
    assert bool(expected.isfinite().all())
    late = Late(fused, monkeypatch, num_ahead=num_ahead)
    again = scene.move(reuse)
    fused.run([again])
    assert late.beside == list(range(num_ahead, fused.loads.num_layers))
    assert again.fallbacks == []
    assert torch.equal(scene.kv(again.slots), expected)


def test_what_nobody_reads_is_there_afterwards(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's forward, which comes next, waits for nothing of it."""
    fused = replace_config(scene)
    late = Late(fused, monkeypatch, num_ahead=0)
    move = scene.move(asked("none", 0.0))
    monkeypatch.setattr(fused, "_compute", lambda *_: None)
    fused.run([move])
    assert late.beside == list(range(fused.loads.num_layers))
    held = torch.cat([torch.arange(piece.start, piece.end) for piece in move.moved])
    assert bool(scene.kv(move.slots[held]).isfinite().all())


def test_layers_that_fail_beside_are_copied_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fused = replace_config(scene)
    Late(fused, monkeypatch, num_ahead=0, fails="beside")
    move = scene.move(asked("first", 1.0))
    fused.run([move])
    assert move.fallbacks == []
    scene.assert_close(scene.answer(), scene.logits)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert fused.stats()["copied_again"] == 1


def test_layers_that_fail_twice_are_computed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is copied over them later."""
    fused = replace_config(scene)
    Late(fused, monkeypatch, num_ahead=0, fails="always")
    move = scene.move(asked("query", 0.3))
    fused.run([move])
    assert move.fallbacks == ["pass_failed"]
    scene.assert_close(scene.kv(move.slots), scene.kv(REFERENCE[:END]))
    scene.assert_close(scene.answer(), scene.logits)
    assert not fused.loads.settle()


def test_a_pass_that_fails_waits_for_its_loads(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would come into slots that are computed meanwhile."""
    fused = replace_config(scene)
    Late(fused, monkeypatch, num_ahead=0)

    def fail(*args: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(fused, "_choose", fail)
    move = scene.move(asked("first", 0.3))
    fused.run([move])
    assert move.fallbacks == ["pass_failed"]
    scene.assert_close(scene.kv(move.slots), scene.kv(REFERENCE[:END]))


def test_a_load_that_cannot_begin_is_computed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prices go on, and so does the next forward."""
    fused = replace_config(scene)
    monkeypatch.setattr(fused, "_num_ahead", lambda moves, work: 1)
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", lambda thread: 1 / 0)
        move = scene.move(asked("first", 0.3))
        fused.run([move])
    assert move.fallbacks == ["pass_failed"]
    scene.assert_close(scene.kv(move.slots), scene.kv(REFERENCE[:END]))
    assert not fused.loads.finish()
    fused.run([scene.move(asked("first", 0.3))])
    fused.pricing.poll()
    assert fused.pricing.model.num_observed[Phase.HOST] == 1


def test_while_exact_chains_come_all_is_copied_before(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass at a time goes on beside."""
    fused = replace_config(scene)
    monkeypatch.setattr(fused, "_num_ahead", lambda moves, work: 1)
    loads, exact = fused.loads, list[int]()
    assert loads.start(exact.extend, Phase.LOAD, Work(1, 1), num_ahead=1, clock=fused.pricing) == 1
    move = scene.move(asked("first", 1.0))
    fused.run([move])
    assert fused.stats()["layers_ahead"] == loads.num_layers
    assert move.fallbacks == []
    assert not loads.finish()
    assert exact == list(range(loads.num_layers))


def test_chunks_of_other_lengths_are_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a place of its own."""
    fused, of = replace_config(scene), scene.sources
    longer = HostCopy(
        Variant(
            of["B"].prefix,
            HostBlob(*(torch.ones(3, 21, *each.shape[2:]) for each in of["B"].variant.blob.parts)),
        )
    )
    monkeypatch.setitem(of, "B", longer)
    move = scene.move(asked("none", 0.0))
    fused.run([move])
    assert move.fallbacks == ["pass_failed"]


@pytest.mark.parametrize(
    ("each_s", "compute_s", "num_threads", "expected"),
    [
        (0.1, 0.5, 1, 1),  # faster than the passes
        (0.1, 0.05, 1, 2),  # slower: the last of three layers must not wait
        (0.1, 0.0, 1, 3),  # no pass
        (1e-6, 0.5, 1, 3),  # nothing to gain
        (0.1, 0.5, 2, 3),  # torch's threads would be in each other's way
    ],
)
def test_layers_ahead(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    each_s: float,
    compute_s: float,
    num_threads: int,
    expected: int,
) -> None:
    """By equation 16, from what the plan's passes are estimated to take."""
    fused = replace_config(scene)
    fused.pricing.agreed = {
        **fused.pricing.agreed,
        Phase.HOST: Line(fixed=each_s),
        Phase.RECOMPUTE: Line(fixed=compute_s),
    }
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    move = scene.move(asked("first", 0.3))
    move.plan = ReusePlan(
        move.plan.pieces,
        works={Phase.RECOMPUTE: Work(1, LENS["B"], 1), Phase.EXTEND: Work(1, 8, 8)},
    )
    assert fused._num_ahead([move], Work(1, LENS["B"])) == expected


def test_a_pool_has_one_counter(scene: Scene) -> None:
    pool = scene.runner.token_to_kv_pool
    assert LayerLoads.of(pool) is LayerLoads.of(pool) is pool.layer_transfer_counter
