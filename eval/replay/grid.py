"""The replays of a command: the product of its settings, without duplicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from eval.replay.eviction_queue import EvictionPolicy
from eval.replay.exact import AdmissionPolicy, DedupPolicy, ReplaySettings
from eval.replay.offloading import HostAdmission
from eval.replay.ordering import TailPolicy
from eval.replay.trace import TraceFacts
from radix_ext import OrderPolicy

Entry = Mapping[str, Any]
"""A sample, or an entry of the results, with a `cell`."""
SMALL_POOL, LARGE_POOL = 50_000, 1_000_000
"""Tokens of servers' KV pools, of the order of magnitude: no smaller cache is replayed unless it is
named."""
MAX_VISITS = 64
"""Bound of the search for an order, as the server's."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay's settings, named like the options, with their defaults.

    None: the setting does not apply; for `k`: all chunks of a request; for a `dedup` that is not
    given: off for the retriever's order, as in stock SGLang, else shown. `host` is in the unit of
    the capacity; 0: no tier in host memory.
    """

    order: OrderPolicy = "tree"
    tail: TailPolicy | None = "seen"
    capacity: int = 0
    capacity_tokens: int = 0
    eviction: EvictionPolicy | None = "lru"
    admission: AdmissionPolicy = "all"
    dedup: DedupPolicy | None = None
    window: int | None = 1000
    threshold: int | None = 2
    k: int | None = None
    host: int = 0
    host_admission: HostAdmission | None = "either"
    host_worth: float | None = 0.9
    page_size: int = 1
    padded: bool = False

    @property
    def label(self) -> dict[str, Any]:
        """The settings as JSON, for the sample."""
        return asdict(self)

    @property
    def key(self) -> str:
        """The key of the cell's sample in its run."""
        return "/".join(
            f"{name}={value}" for name, value in self.label.items() if value is not None
        )

    @property
    def settings(self) -> ReplaySettings:
        """The settings for `radix_ext`; those that do not apply get arbitrary values.

        Raises:
            radix_ext.CallerError: a value out of range.
        """
        return ReplaySettings(
            order=self.order,
            tail=self.tail or "rank",
            eviction=self.eviction or "lru",
            admission=self.admission,
            dedup=self.dedup or "off",
            capacity=self.capacity or None,
            capacity_tokens=self.capacity_tokens or None,
            window=self.window or 1,
            threshold=self.threshold or 1,
            max_visits=MAX_VISITS,
            host=self.host,
            host_admission=self.host_admission or "either",
            host_worth=1.0 if self.host_worth is None else self.host_worth,
            page_size=self.page_size,
            padded=self.padded,
            # what stands for SGLang's own tree: LRU, and the retriever's order where nothing leaves
            copies_rests=self.eviction == "reused"
            or (self.eviction is None and self.order != "retriever"),
        )


DEFAULTS = asdict(Cell())
AXES = tuple(DEFAULTS)


def grid(axes: Mapping[str, Sequence[Any] | None], *, has_conversations: bool) -> list[Cell]:
    """Every combination of the given values, in their order; other axes have their defaults."""
    values = [axes.get(name) or [DEFAULTS[name]] for name in AXES]
    return _distinct(
        [Cell(*combination) for combination in product(*values)],
        has_conversations=has_conversations,
    )


def comparison(capacities: Sequence[tuple[int, int]], *, has_conversations: bool) -> list[Cell]:
    """The default comparison: the stock prefix cache, CRAFT's order and ours, each with its own
    eviction.

    CRAFT's marks suggest the eviction `promoted`. Its admission is `all`, too: it then finds more
    at unlimited capacity, and no less at limited capacity. With conversations the stock prefix
    cache is also replayed with an application that drops chunks already shown. This needs nothing
    of ours, and ours is judged against it.

    Args:
        capacities: (capacity, capacity_tokens), 0 for no limit.
    """
    policies: list[tuple[OrderPolicy, EvictionPolicy, DedupPolicy | None]] = [
        ("retriever", "lru", "off"),
        ("retriever", "lru", "shown"),
        ("frequency", "promoted", None),
        ("tree", "reused", None),
    ]
    cells = [
        Cell(order, eviction=eviction, dedup=dedup, capacity=chunks, capacity_tokens=tokens)
        for chunks, tokens in capacities
        for order, eviction, dedup in policies
    ]
    return _distinct(cells, has_conversations=has_conversations)


def derived_capacities(facts: TraceFacts) -> list[tuple[int, int]]:
    """No limit, a quarter and an eighth of the trace's distinct chunks; in tokens if the trace has
    lengths.

    Unrealistic sizes are replaced, or left out: tokens that no pool is as small as, sizes that
    cannot hold the trace's largest request, and those that hold all requests.
    """
    if facts.has_lengths:
        sizes = [(0, max(SMALL_POOL, facts.distinct_tokens // part)) for part in (4, 8)]
        low, high = facts.largest_tokens, facts.num_tokens - 1
    else:
        sizes = [(facts.distinct_chunks // part, 0) for part in (4, 8)]
        low, high = facts.largest_chunks, facts.distinct_chunks
    return [(0, 0), *(size for size in dict.fromkeys(sizes) if low <= max(size) <= high)]


def room_text(facts: TraceFacts) -> str:
    """For people: what the capacities that were derived from tokens are beside a server's."""
    fits = ", enough for all of these requests: no smaller cache is replayed"
    return (
        f"A server's KV pool has room for {SMALL_POOL:,} to {LARGE_POOL:,} tokens"
        f"{fits if facts.num_tokens <= SMALL_POOL else ''}. --capacity-tokens N replays yours."
    )


def baseline_of(cell: Mapping[str, Any], cells: Sequence[Entry]) -> Entry | None:
    """The entry to compare the cell with, if it was replayed.

    For the retriever's order: the same cell without deduplication, if it has one. For another
    order: the retriever's order with the same capacity and k; of several the one with the same
    deduplication, then the one of stock SGLang.
    """
    if cell["order"] == "retriever":
        return next(
            (other for other in cells if {**cell, "dedup": "off"} == other["cell"] != cell), None
        )
    same = _like(
        cell, cells, "retriever", "capacity", "capacity_tokens", "k", "page_size", "padded"
    )
    return min(
        same,
        key=lambda other: (other["cell"]["dedup"] != cell["dedup"], not is_stock(other["cell"])),
        default=None,
    )


def without_host(cell: Mapping[str, Any], cells: Sequence[Entry]) -> Entry | None:
    """For a cell with a host tier the one without that is otherwise the same,
    if it was replayed."""
    # the rule alone may count
    names = [name for name in cell if name != "threshold" and not name.startswith("host")]
    return (
        next(iter(_like({**cell, "host": 0}, cells, cell["order"], *names, "host")), None)
        if cell["host"]
        else None
    )


def craft_of(cell: Mapping[str, Any], cells: Sequence[Entry]) -> Entry | None:
    """For `tree` the replay in CRAFT's order with the same capacity, k and deduplication,
    if it is the only one."""
    same = _like(
        cell,
        cells,
        "frequency",
        "capacity",
        "capacity_tokens",
        "k",
        "dedup",
        "host",
        "host_admission",
        "page_size",
        "padded",
    )
    return same[0] if cell["order"] == "tree" and len(same) == 1 else None


def _like(cell: Mapping[str, Any], cells: Sequence[Entry], order: str, *names: str) -> list[Entry]:
    wanted = {"order": order, **{name: cell[name] for name in names}}
    return [other for other in cells if wanted.items() <= other["cell"].items()]


def is_stock(cell: Mapping[str, Any]) -> bool:
    """Whether the cell is stock SGLang's policy, with or without deduplication by the
    application."""
    stock = {
        "order": ("retriever",),
        "eviction": (None, "lru"),
        "admission": ("all",),
        "host": (0,),
    }
    return all(cell[name] in values for name, values in stock.items())


def policy_name(cell: Mapping[str, Any]) -> str:
    """The order, the deduplication if it is not the order's default, and a host tier:
    "tree", "retriever shown", "tree host"."""
    default = _default_dedup(cell["order"])
    dedup = () if cell["dedup"] in (None, default) else (cell["dedup"],)
    return " ".join((cell["order"], *dedup, *(["host"] if cell["host"] else [])))


def _distinct(cells: Sequence[Cell], *, has_conversations: bool) -> list[Cell]:
    return list(dict.fromkeys(_canonical(cell, has_conversations) for cell in cells))


def _canonical(cell: Cell, has_conversations: bool) -> Cell:
    """The cell with settings that have no effect set to None."""
    tail = cell.tail if cell.order == "tree" else None
    is_limited = bool(cell.capacity or cell.capacity_tokens)
    eviction, host = (cell.eviction, cell.host) if is_limited else (None, 0)
    host_admission = cell.host_admission if host else None
    by_marks = "promoted" in (cell.admission, eviction) or host_admission in ("promoted", "either")
    by_counts = by_marks or cell.order == "frequency" or tail in ("seen", "frequency")
    dedup = cell.dedup or _default_dedup(cell.order)
    return replace(
        cell,
        padded=cell.padded and cell.page_size > 1,
        tail=tail,
        eviction=eviction,
        dedup=dedup if has_conversations else None,
        window=cell.window if by_counts else None,
        threshold=cell.threshold if by_marks else None,
        host=host,
        host_admission=host_admission,
        host_worth=cell.host_worth if host and cell.order == "tree" else None,
    )


def _default_dedup(order: OrderPolicy) -> DedupPolicy:
    return "off" if order == "retriever" else "shown"
