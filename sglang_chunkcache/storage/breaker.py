"""A circuit breaker: after failures in a row nobody is asked for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_chunkcache.storage.entry import RefusedEntryError

logger = logging.getLogger(__name__)

PAUSE_AFTER = 4
"""Failures in a row."""
PAUSE_S = 30.0
"""A backend that restarts takes about as long."""


class PausedError(Exception):
    """Nobody was asked."""


class UnmadeError(Exception):
    """What was to be written could not be made: no failure of the backend's."""


class Breaker:
    """Before a storage's backend. Written by one thread, read by others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_a_row = self.num_pauses = 0
        self.paused_until: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether attempts fail at once."""
        until = self.paused_until
        return until is not None and self._clock() < until

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around what asks the backend. Raises PausedError at once while it `is_open`. An
        UnmadeError counts neither as a failure nor as a success."""
        if self.is_open:
            raise PausedError
        try:
            yield
        except RefusedEntryError:  # the backend is well
            self._succeeded()
            raise
        except UnmadeError:
            raise
        except Exception:
            self._failed()
            raise
        self._succeeded()

    def _succeeded(self) -> None:
        self._in_a_row = 0
        if self.paused_until is not None:
            self.paused_until = None
            logger.warning("chunk cache: the storage answers again")

    def _failed(self) -> None:
        self._in_a_row += 1
        if self._in_a_row < PAUSE_AFTER:
            return
        if self.paused_until is None:
            logger.warning(
                "chunk cache: the storage pauses after %d failures, and is tried again every %g s",
                self._in_a_row,
                PAUSE_S,
            )
            self.num_pauses += 1
        self.paused_until = self._clock() + PAUSE_S
