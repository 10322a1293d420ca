"""What a server has in use at most while a block is measured: requests at once, and tokens and rows
of its KV pool, of requests alone. Asked again and again: times are told by a run without it.

    tokens   in SGLang's pool; with one copy of a chunk in virtual slots
    rows     fewer than tokens where one copy of a chunk serves several of them
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families

from eval.errors import CommandError
from eval.http import get

FLAGS = ("--enable-metrics", "--decode-log-interval", "1")
"""Of every server: it counts, with each token."""
GAUGES = {"running": "sglang:num_running_reqs", "tokens": "sglang:num_used_tokens"}
RETRACTED = "sglang:num_retracted_requests_total"
POLL_S = 0.05
MAX_SHARE = 0.05
"""Of the time that asking may take. Twenty times a second it slowed servers by a sixth, and those
whose rows were asked for, which answer between two forwards, by less."""


@contextmanager
def peaks(url: str) -> Iterator[dict[str, float]]:
    """Once it is left: the most of `running`, `tokens` and, with one copy of a chunk, `rows`, and
    how many were `retracted`; what the server has not told is not there.

    Raises CommandError on entering if the server counts nothing.
    """
    most: dict[str, float] = {}
    stop = threading.Event()
    before = _counted(url).get(RETRACTED, 0)
    look = partial(_in_use, url, has_rows=bool(_one_copy(url)))

    def poll() -> None:
        took = 0.0
        while not stop.wait(max(POLL_S, took / MAX_SHARE)):
            begun = time.perf_counter()
            with suppress(CommandError):  # a server that is gone is told by its requests
                for name, value in look().items():
                    most[name] = max(most.get(name, 0), value)
            took = time.perf_counter() - begun

    polling = threading.Thread(target=poll)
    polling.start()
    try:
        yield most
    finally:
        stop.set()
        polling.join()
    with suppress(CommandError):
        most["retracted"] = _counted(url).get(RETRACTED, 0) - before


def over_blocks(found: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Means of the blocks' peaks, and all that were retracted; None without any."""
    if not found:
        return None
    told = {
        name: [each[name] for each in found if name in each]
        for name in ("running", "tokens", "rows", "retracted")
    }
    return {
        name: sum(values) if name == "retracted" else fmean(values)
        for name, values in told.items()
        if values
    }


# Private, in order of use


def _in_use(url: str, *, has_rows: bool) -> dict[str, float]:
    counted = _counted(url)
    held = {name: counted[gauge] for name, gauge in GAUGES.items() if gauge in counted}
    # SGLang's gauge counts rows there
    rows = _one_copy(url) if has_rows else {}
    return {**held, **({"tokens": rows["held_slots"], "rows": rows["held_rows"]} if rows else {})}


def _one_copy(url: str) -> dict[str, float]:
    """Of the first rank; {} where no chunk has one copy."""
    with suppress(CommandError):  # stock has no such route
        for rank in get(url + "/chunkcache/stats", timeout_s=5)["ranks"][:1]:
            return dict(rank.get("moves", {}).get("one_copy", {}))
    return {}


def _counted(url: str) -> dict[str, float]:
    """Of all ranks; priorities have counts of their own beside the sum."""
    text = get(url + "/metrics", timeout_s=30).get("text", "")
    found = defaultdict[str, float](float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.labels.get("priority"):
                found[sample.name] += sample.value
    return dict(found)
