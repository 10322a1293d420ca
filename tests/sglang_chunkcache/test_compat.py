"""What compat.py gives to SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_chunkcache import compat

pytestmark = pytest.mark.matrix


def test_a_declined_promise_is_nothing_on_the_device_of_the_tree() -> None:
    """0.5.21 joins it with the slots of the match: on a GPU, those of another device end it."""
    node = object()
    loaded = compat.loaded(SimpleNamespace(device="meta"), None, node)
    if compat.KNOWS_SLOTS:
        assert (loaded[0].device.type, loaded[0].shape, loaded[1]) == ("meta", (0,), node)
    else:
        assert loaded == (0, node)
