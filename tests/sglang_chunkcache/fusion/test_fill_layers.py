"""What comes from host memory comes beside the passes, layer by layer:
nobody reads, or writes, a layer before it is there."""

from __future__ import annotations

import logging
from threading import Event, Thread, current_thread, main_thread
from typing import Any

import pytest
import torch

from radix_ext.costs import Line, Phase, Work
from radix_ext.moved_plan import ReusePlan
from sglang_chunkcache.fusion.fill import FusionPass
from tests.kit.tensors import LENS, PoolHost, Scene, asked, make_pass, make_scene, scene
from tests.polling import DEADLINE_S

__all__ = ["make_scene", "scene"]
pytestmark = pytest.mark.engine


class Late:
    """Copies of layers beside the passes begin when a reader has asked for them,
    and fail where they are told."""

    def __init__(
        self, fused: FusionPass, monkeypatch: pytest.MonkeyPatch, *, num_ahead: int, fails: str = ""
    ) -> None:
        loads = fused.mover._loads
        self.overlapped: list[int] = []
        self._has_begun = False  # moves within the device ask before
        self._asked = [Event() for _ in range(loads.num_layers)]
        start, wait = loads.start, loads.wait_until

        def late(copy: Any, *args: Any, **options: Any) -> int:
            def copy_late(layers: range) -> None:
                is_beside = current_thread() is not main_thread()
                if is_beside:
                    assert self._asked[layers[0]].wait(DEADLINE_S)
                    self.overlapped += layers
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
        monkeypatch.setattr(fused.mover, "_num_ahead", lambda moves, work: num_ahead)


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("attention", ["masked", "sparse"])
@pytest.mark.parametrize("selector", ["first", "query", "deviation", "none"])
def test_beside_the_passes_as_before_them(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, selector: str, attention: str, num_ahead: int
) -> None:
    """Bit by bit, recomputed tokens included, which a late copy would overwrite."""
    fused = scene.sparse_pass() if attention == "sparse" else scene.with_config()
    reuse = asked(selector, 0.3 if selector != "none" else 0.0)
    expected = scene.kv(scene.run(reuse, fused).slots)
    assert bool(expected.isfinite().all())
    late = Late(fused, monkeypatch, num_ahead=num_ahead)
    again = scene.run(reuse, fused)
    assert late.overlapped == list(range(num_ahead, fused.mover._loads.num_layers))
    assert again.fallbacks == []
    assert torch.equal(scene.kv(again.slots), expected)


def test_what_nobody_reads_is_there_afterwards(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's forward, which comes next, waits for nothing of it."""
    fused = scene.with_config()
    late = Late(fused, monkeypatch, num_ahead=0)
    monkeypatch.setattr(fused, "_compute", lambda *_: None)
    move = scene.run(asked("none", 0.0), fused)
    assert late.overlapped == list(range(fused.mover._loads.num_layers))
    held = torch.cat([torch.arange(piece.start, piece.end) for piece in move.moved])
    assert bool(scene.kv(move.slots[held]).isfinite().all())


def test_layers_that_fail_beside_are_copied_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fused = scene.with_config()
    Late(fused, monkeypatch, num_ahead=0, fails="beside")
    move = scene.run(asked("first", 1.0), fused)
    assert move.fallbacks == []
    scene.assert_prefilled(move)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert fused.stats()["copied_again"] == 1


@pytest.mark.parametrize("fails", ["the copies", "the choice"])
def test_what_fails_is_computed(scene: Scene, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """And nothing is copied over it later: a pass that fails waits for its loads."""
    fused = scene.with_config()
    Late(fused, monkeypatch, num_ahead=0, fails="always" if fails == "the copies" else "")
    if fails == "the choice":
        monkeypatch.setattr(fused._chooser, "choose", lambda *_: 1 / 0)
    move = scene.run(asked("query", 0.3), fused)
    assert move.fallbacks == ["pass_failed"]
    scene.assert_prefilled(move)
    assert not fused.mover._loads.settle()


def test_a_load_that_cannot_begin_is_computed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = scene.with_config()
    monkeypatch.setattr(fused.mover, "_num_ahead", lambda moves, work: 1)
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", lambda thread: 1 / 0)
        move = scene.run(asked("first", 0.3), fused)
    assert move.fallbacks == ["pass_failed"]
    scene.assert_prefilled(move)
    assert not fused.mover._loads.finish()
    scene.run(asked("first", 0.3), fused)
    fused.pricing.poll()
    assert fused.pricing.model.num_observed[Phase.HOST] == 1


def test_while_exact_chains_come_all_is_copied_before(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = scene.with_config()
    monkeypatch.setattr(fused.mover, "_num_ahead", lambda moves, work: 1)
    loads, exact = fused.mover._loads, list[int]()
    assert loads.start(exact.extend, Phase.LOAD, Work(1, 1), num_ahead=1, clock=fused.pricing) == 1
    move = scene.run(asked("first", 1.0), fused)
    assert fused.stats()["layers_ahead"] == loads.num_layers
    assert move.fallbacks == []
    assert not loads.finish()
    assert exact == list(range(loads.num_layers))


AHEAD = [
    (0.1, 0.5, 1, 1),  # faster than the passes
    (0.1, 0.05, 1, 2),  # slower: the last of three layers must not wait
    (0.1, 0.0, 1, 3),  # no pass
    (1e-6, 0.5, 1, 3),  # nothing to gain
    (0.1, 0.5, 2, 3),  # torch's threads would be in each other's way
]


def test_layers_ahead(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """By equation 16, from what the plan's passes are estimated to take."""
    fused, move = scene.with_config(), scene.move(asked("first", 0.3))
    works = {Phase.RECOMPUTE: Work(1, LENS["B"], 1), Phase.EXTEND: Work(1, 8, 8)}
    move.plan = ReusePlan(move.plan.pieces, works=works)
    for each_s, compute_s, num_threads, expected in AHEAD:
        lines = {Phase.HOST: Line(fixed=each_s), Phase.RECOMPUTE: Line(fixed=compute_s)}
        fused.pricing.agreed = {**fused.pricing.agreed, **lines}
        monkeypatch.setattr(torch, "get_num_threads", lambda num=num_threads: num)
        assert fused.mover._num_ahead([move], Work(1, LENS["B"])) == expected


def test_what_fails_to_be_saved_gives_all_slots_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    host: Any = PoolHost(scene.runner)
    hosted = make_pass(scene.runner, scene.config, host)
    save, calls = host.pool.save, []

    def fail_the_second(*slots: torch.Tensor) -> Any:
        calls.append(slots)
        if len(calls) == 2:
            raise RuntimeError("broken")
        return save(*slots)

    monkeypatch.setattr(host.pool, "save", fail_the_second)
    with pytest.raises(RuntimeError, match="broken"):
        hosted.capture([scene.capture(name) for name in "BE"])
    assert host.pool.num_free == host.pool.num_slots
    host.pool.close()


def test_chunk_without_room_in_the_pool_is_not_captured(scene: Scene) -> None:
    host: Any = PoolHost(scene.runner)
    hosted = make_pass(scene.runner, scene.config, host)
    taken = host.room(host.pool.num_free)
    assert taken is not None
    (captured,) = hosted.capture([scene.capture("B")])
    assert captured.is_done()
    assert captured.read()[0] is None
    taken.give_back()
    host.pool.close()
