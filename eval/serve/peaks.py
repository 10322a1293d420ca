"""What a server has in use at most while a block is measured: requests at once, and tokens and rows
of its KV pool. Asked of all arms alike, again and again, so times of such a run have that in them.

    held by requests   tokens: what SGLang counts; rows: fewer where one copy of a chunk serves
                       several of them
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from statistics import fmean
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from eval.errors import CommandError
from eval.http import get

FLAGS = ("--enable-metrics", "--decode-log-interval", "1")
"""Of every server: it counts, with each token."""
GAUGES = {"running": "sglang:num_running_reqs", "tokens": "sglang:num_used_tokens"}
RETRACTED = "sglang:num_retracted_requests_total"
POLL_S = 0.05


@contextmanager
def peaks(url: str) -> Iterator[dict[str, float]]:
    """Once it is left: the most of `running`, `tokens` and, with one copy of a chunk, `rows`, and
    how many were `retracted`.

    Raises CommandError on entering if the server counts nothing.
    """
    most: dict[str, float] = {}
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(POLL_S):
            with suppress(CommandError):  # a server that is gone is told by its requests
                for name, value in _in_use(url).items():
                    most[name] = max(most.get(name, 0), value)

    before = _counted(url).get(RETRACTED, 0)
    polling = threading.Thread(target=poll)
    polling.start()
    try:
        yield most
    finally:
        stop.set()
        polling.join()
    most["retracted"] = _counted(url).get(RETRACTED, 0) - before


def over_blocks(found: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Means of the blocks' peaks, and all that were retracted; None without any."""
    if not found:
        return None
    names = [name for name in ("running", "tokens", "rows") if name in found[0]]
    mean = {name: fmean(each.get(name, 0) for each in found) for name in names}
    return {**mean, "retracted": sum(each["retracted"] for each in found)}


# Private, in order of use


def _in_use(url: str) -> dict[str, float]:
    counted = _counted(url)
    held: dict[str, Any] = {name: counted.get(gauge) for name, gauge in GAUGES.items()}
    with suppress(CommandError):  # stock has none
        for rank in get(url + "/chunkcache/stats", timeout_s=5)["ranks"][:1]:
            held["rows"] = rank.get("moves", {}).get("one_copy", {}).get("held")
    return {name: value for name, value in held.items() if value is not None}


def _counted(url: str) -> dict[str, float]:
    text = get(url + "/metrics", timeout_s=5).get("text", "")
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}
