"""Moved keys that are not turned, on a real SGLang model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_chunkcache.own_selectors import own_selectors
from tests.kit.tensors import HERE, SOURCE, THERE, Scene, asked, make_pass, make_scene, scene
from tests.sglang_chunkcache.conftest import host_memory

__all__ = ["host_memory", "make_scene", "scene"]
pytestmark = pytest.mark.engine


def test_keys_are_where_they_were_computed(scene: Scene) -> None:
    """From the device and from the store; other requests' are turned, before and after."""
    assert {*own_selectors("eval.selectors")} < {*own_selectors("eval.unrotated")}
    config = replace(scene.config, selectors="eval.unrotated")
    by = make_pass(scene.runner, config, scene.host)
    sources = {name: scene.kv(SOURCE[slice(*THERE[name])]) for name in "ABCE"}
    turned = scene.kv(scene.run(asked("none", 0.0), by).slots)
    move = scene.run(replace(asked("context", 0.0), selector="unrotated"), by)
    kept = scene.kv(move.slots)
    for name, source in sources.items():
        here = slice(*HERE[name])
        scene.assert_close(kept[:, :, here], source)
        assert torch.equal(kept[1][:, here], turned[1][:, here])
        assert not torch.allclose(kept[0][:, here], turned[0][:, here], atol=0.01)
    assert [piece.source.facts.start for piece in move.moved if piece.source] == [
        THERE[name][0] for name in "ABCE"
    ]
    scene.assert_close(scene.kv(scene.run(asked("none", 0.0), by).slots), turned)
