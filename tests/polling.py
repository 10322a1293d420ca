"""Waiting for what another thread or process does:
for the thing itself, up to a deadline that only a failure reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

DEADLINE_S = 300.0
"""Many times what anything waited for takes on an idle machine."""


def until(
    look: Callable[[], Found | None], *, deadline_s: float = DEADLINE_S, every_s: float = 0.05
) -> Found:
    """What `look` returns as soon as that is true.
    Raises AssertionError at the deadline, with what it returned last."""
    end = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < end, f"after {deadline_s:g} s still {found!r}"
        time.sleep(every_s)
    return found
