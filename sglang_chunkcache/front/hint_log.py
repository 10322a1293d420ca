"""Warnings that would come with every request: each kind at most once in ten minutes."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

EVERY_S = 600.0


class HintLog:
    """Args: clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Log the message, unless one of its kind was within the last `EVERY_S`."""
        now = self._clock()
        # A clock that starts at 0 must not keep the first one back.
        if now - self._last.get(kind, -EVERY_S) >= EVERY_S:
            self._last[kind] = now
            logger.warning(message, *args)
