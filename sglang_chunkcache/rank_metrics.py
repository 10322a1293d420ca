"""A tier's figures for Prometheus, told by its rank's own process. SGLang's `/metrics` sums up what
ranks tell.

`prometheus_client` is imported with the first figures, for the reason that front/metrics.py gives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

SHOWN_S = 1.0
"""Between two figures for Prometheus, which reads them less often."""


class RankMetrics:
    """Of one tier of one rank.

    Args:
        prefix: of the names.
        gauges: name -> (of the stats, how ranks are joined, help). Where the stats say None nothing
            is told. Where they have figures by kind, `kind` is the last label.
        counters: name -> (of the stats, help). Where the stats have counts by reason, `reason` is
            the last label.
        labels: of all of them.
        clock: seconds.
    """

    def __init__(
        self,
        prefix: str,
        gauges: Mapping[str, tuple[str, str, str]],
        counters: Mapping[str, tuple[str, str]],
        labels: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix, self._labels = prefix, labels or {}
        self._gauges, self._counters = gauges, counters
        self._exported: dict[str, Any] = {}
        self._told: dict[tuple[str, ...], int] = {}
        self._clock, self._shown_at, self._is_off = clock, 0.0, False

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._shown_at

    def show(self, stats: Mapping[str, Any]) -> None:
        """What the tier's stats say now. Never raises."""
        # Also once they are off: callers gather the stats whenever figures are due.
        self._shown_at = self._clock() + SHOWN_S
        if self._is_off:
            return
        try:
            self._show(stats)
        except Exception:
            # For good: the same error every second would fill the log.
            self._is_off = True
            logger.exception("chunk cache: %s* are shown no more", self._prefix)

    def _show(self, stats: Mapping[str, Any]) -> None:
        # Not in __init__: which label the stats bring is only known with the first ones.
        if not self._exported:
            self._create(stats)
        for name, (key, _, _) in self._gauges.items():
            if isinstance(stats[key], Mapping):
                for kind, number in stats[key].items():
                    self._of(name, kind).set(number)
            elif stats[key] is not None:
                self._of(name).set(stats[key])
        for name, (key, _) in self._counters.items():
            if isinstance(stats[key], Mapping):
                for reason, number in stats[key].items():
                    self._raise(number, name, reason)
            else:
                self._raise(stats[key], name)

    def _create(self, stats: Mapping[str, Any]) -> None:
        from prometheus_client import Counter, Gauge

        def labels(key: str, last: str) -> list[str]:
            return [*self._labels, *([last] if isinstance(stats[key], Mapping) else [])]

        made, prefix = self._exported, self._prefix
        for name, (key, mode, text) in self._gauges.items():
            made[name] = Gauge(prefix + name, text, labels(key, "kind"), multiprocess_mode=mode)
        for name, (key, text) in self._counters.items():
            made[name] = Counter(prefix + name, text, labels(key, "reason"))

    def _raise(self, number: int, name: str, *reason: str) -> None:
        """A counter to its number."""
        # A Counter takes what is added, and the stats have totals.
        before = self._told.get((name, *reason), 0)
        self._of(name, *reason).inc(number - before)
        self._told[name, *reason] = number

    def _of(self, name: str, *last: str) -> Any:
        exported, labels = self._exported[name], (*self._labels.values(), *last)
        # prometheus_client refuses `labels()` where a metric was made without any.
        return exported.labels(*labels) if labels else exported


class NoMetrics(RankMetrics):
    """Shown to nobody: never due, so that nobody gathers them."""

    is_due = False

    def __init__(self) -> None: ...
    def show(self, stats: Mapping[str, Any]) -> None: ...


NO_METRICS = NoMetrics()
