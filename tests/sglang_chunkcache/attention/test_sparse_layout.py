"""A sparse layout, carried out entry by entry and row by row, is the attention asked for,
and hardly more work than needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eval.bench.attention.cells import executed_pairs, num_indices, pairs_of
from sglang_chunkcache.attention.base import SparseRequest
from sglang_chunkcache.attention.sparse_layout import (
    Launch,
    SparseLayout,
    plan_sparse,
    slot_indices,
)
from tests.examples import examples
from tests.sglang_chunkcache.attention.strategies import Case, cases
from tests.sglang_chunkcache.attention.tolerances import assert_near

PLANS = st.fixed_dictionaries(
    {
        "tile_rows": st.sampled_from([1, 2, 3, 4, 8, 32]),
        "max_indices": st.sampled_from([0, 20, 100, 1 << 24]),
    }
)


class Entry(NamedTuple):
    """One entry of a launch: its rows of the pass, what each sees of its keys,
    and where those are."""

    rows: range
    num_keys: int
    seen: list[int]
    slots: list[int]
    request: int


def all_slots(requests: Sequence[SparseRequest]) -> tuple[Tensor, Tensor]:
    slots = [request.kv_slots.long() for request in requests]
    starts = [sum(map(len, slots[:i])) for i in range(len(slots))]
    return torch.cat([torch.empty(0, dtype=torch.int64), *slots]), torch.tensor(
        starts, dtype=torch.int64
    )


def entries(launch: Launch, requests: Sequence[SparseRequest]) -> Iterator[Entry]:
    """What a kernel makes of a launch's fields, and nothing else."""
    indices = slot_indices(launch, *all_slots(requests)).tolist()
    qo, kv = launch.qo_indptr.tolist(), launch.kv_indptr.tolist()
    for e, request in enumerate(launch.request.tolist()):
        rows = range(launch.rows.start + qo[e], launch.rows.start + qo[e + 1])
        slots = indices[kv[e] : kv[e + 1]]
        if launch.limits is not None:
            seen = launch.limits[qo[e] : qo[e + 1]].tolist()
        else:
            seen = [len(slots) - (rows.stop - 1 - row) for row in rows]
        yield Entry(rows, len(slots), seen, slots, request)


def execute(layout: SparseLayout, case: Case) -> Tensor:
    """[n, num_qo_heads, head_dim] float64, in the requests' order."""
    order = torch.arange(layout.num_rows) if layout.order is None else layout.order
    queries = case.queries[order].double()
    out = torch.full_like(queries, torch.nan)
    for launch in layout.launches:
        for entry in entries(launch, case.requests):
            keys, values = (
                cache[entry.slots].double().repeat_interleave(case.shape.group_size, 1)
                for cache in (case.keys, case.values)
            )
            rows = slice(entry.rows.start, entry.rows.stop)
            logits = torch.einsum("nhd,mhd->nhm", queries[rows], keys) * case.scale
            hidden = torch.arange(entry.num_keys) >= torch.tensor(entry.seen)[:, None]
            logits.masked_fill_(hidden[:, None], -torch.inf)
            out[rows] = torch.einsum("nhm,mhd->nhd", logits.softmax(-1), values)
    back = torch.empty_like(out)
    back[order] = out
    return back


def make_request(positions: Sequence[int], num_keys: int) -> SparseRequest:
    return SparseRequest(torch.tensor(positions, dtype=torch.int64), torch.arange(num_keys))


def gapped(positions: list[int], kv_positions: list[int]) -> SparseRequest:
    keys = torch.tensor(kv_positions)
    return SparseRequest(torch.tensor(positions), torch.arange(len(keys)), keys)


def make_large(
    kind: str, num_requests: int, num_queries: int, num_keys: int, *, seed: int = 0
) -> list[SparseRequest]:
    """Random positions, or random runs of 1 to 400."""
    generator, requests = np.random.default_rng(seed), []
    for _ in range(num_requests):
        chosen = generator.permutation(num_keys)
        if kind == "clustered":
            starts = chosen[:num_queries]
            ends = np.minimum(starts + generator.integers(1, 401, num_queries), num_keys)
            runs = [np.arange(*run) for run in zip(starts, ends, strict=True)]
            chosen = np.unique(np.concatenate(runs))[::-1]
        requests.append(make_request(np.sort(chosen[:num_queries]).tolist(), num_keys))
    return requests


def plan_one(positions: Sequence[int], num_keys: int, **options: Any) -> SparseLayout:
    return plan_sparse([make_request(positions, num_keys)], **options)


def sizes(launch: Launch) -> list[int]:
    return launch.qo_indptr.diff().tolist()


@settings(max_examples=examples(200))
@given(cases(head_dims=(8,), group_sizes=(1, 3)), PLANS)
def test_layout_carried_out_equals_the_reference(case: Case, plan: dict[str, Any]) -> None:
    """Whatever is tiled and reordered: each query sees exactly its keys, none twice."""
    layout = plan_sparse(case.requests, **plan)
    assert_near(execute(layout, case), case.attend()[0], torch.float32)


@settings(max_examples=examples(200))
@given(cases(head_dims=(1,), group_sizes=(1,)), PLANS)
def test_layout_is_well_formed(case: Case, plan: dict[str, Any]) -> None:
    """What kernels rely on and the result alone does not show."""
    layout = plan_sparse(case.requests, **plan)
    visible = torch.cat([request.visible() for request in case.requests])
    owner = torch.cat(
        [torch.full_like(request.positions, i) for i, request in enumerate(case.requests)]
    )
    order = torch.arange(len(visible)) if layout.order is None else layout.order
    assert layout.num_rows == len(visible)
    assert sorted(order.tolist()) == list(range(len(visible)))
    assert (layout.order is None) == (order.tolist() == list(range(len(visible))))
    once = [row for launch in layout.launches for row in range(len(visible))[launch.rows]]
    assert once == list(range(len(visible)))
    for launch in layout.launches:
        assert launch.qo_indptr[0] == launch.kv_indptr[0] == 0
        assert launch.qo_indptr.dtype == launch.kv_indptr.dtype == torch.int32
        assert launch.request.dtype == torch.int64
        assert (launch.limits is not None) == (launch.kind == "limited")
        assert launch.limits is None or launch.limits.dtype == torch.int32
        covered = []
        for entry in entries(launch, case.requests):
            rows = order[entry.rows.start : entry.rows.stop]
            covered += list(entry.rows)
            assert len(rows) >= 1
            assert owner[rows].tolist() == [entry.request] * len(rows)
            assert min(entry.seen) >= 1
            assert entry.seen == visible[rows].tolist()
            assert entry.seen[-1] == entry.num_keys
        assert covered == list(range(len(visible)))[launch.rows]


@given(
    cases(head_dims=(1,), group_sizes=(1,)),
    PLANS,
    st.sampled_from([1, 3, 8, 64]),
)
def test_executed_pairs_equal_a_slow_count(
    case: Case, plan: dict[str, Any], tile_rows: int
) -> None:
    """A causal tile stops at what its last row would see."""
    layout = plan_sparse(case.requests, **plan)
    pairs = 0
    for launch in layout.launches:
        for entry in entries(launch, case.requests):
            for start in range(0, len(entry.rows), tile_rows):
                for key in range(entry.num_keys):
                    before = entry.num_keys - len(entry.rows) + start + tile_rows
                    pairs += tile_rows if launch.kind != "causal" or key < before else 0
    assert executed_pairs(layout, tile_rows) == pairs


@settings(max_examples=examples(60))
@given(
    st.sampled_from(["scattered", "clustered"]),
    st.integers(1, 3),
    st.integers(1, 2000),
    st.sampled_from([16, 32, 128]),
    st.integers(0, 99),
)
def test_work_is_bounded(
    kind: str, num_requests: int, num_queries: int, tile_rows: int, seed: int
) -> None:
    """At most 1.05 of what is needed, and per request two tiles over all its keys (the last one of
    a tiling is not paid for by needed pairs, and grown tiles pad by less than one) and 5 x
    tile_rows^2 pairs (runs of fewer than 9.5 tile_rows keys, of which a request has ten at most).
    """
    requests = make_large(kind, num_requests, num_queries, 8000, seed=seed)
    layout = plan_sparse(requests, tile_rows=tile_rows)
    last = sum(int(request.visible()[-1]) for request in requests)
    spare = 2 * tile_rows * last + 5 * tile_rows**2 * len(requests)
    executed, needed = executed_pairs(layout, tile_rows), pairs_of(requests)
    assert needed <= executed <= 1.05 * needed + spare


@pytest.mark.parametrize("kind", ["scattered", "clustered"])
def test_work_at_15_percent_of_32k_is_within_5_percent(kind: str) -> None:
    requests = make_large(kind, 2, 4915, 32768)
    layout = plan_sparse(requests)
    assert executed_pairs(layout, 128) <= 1.05 * pairs_of(requests)


TWO_RUNS = [*range(2, 7), 10, *range(20, 25)]


@pytest.mark.parametrize(
    ("requests", "tile_rows", "expected"),
    [
        # one run of 5 takes two tiles either way, but a launch less
        ([make_request(range(2, 7), 40)], 4, [("causal", [5])]),
        # tiles never span requests, so the remainders of two requests do not share one
        ([make_request(range(5), 8)] * 2, 4, [("causal", [5, 5])]),
        # runs fill a tile at least
        ([make_request([1, 2, 3], 8)], 3, [("causal", [3])]),
        ([make_request([1, 2, 3], 8)], 4, [("limited", [3])]),
        # the next request's first query may see one key more than this one's last
        ([make_request([0, 1], 4), make_request([2, 3], 4)], 2, [("causal", [2, 2])]),
        # what counts is the number of keys seen, not the positions: gaps that match are a run
        ([gapped([2, 5, 6, 9], [0, 2, 5, 6, 9])], 4, [("causal", [4])]),
        # a query in a gap, a key between queries, queries after the keys: a row that sees as many
        # keys as the one before it, or two more
        ([gapped([3, 4, 5, 6], [0, 1, 2, 3, 5, 6, 7, 8])], 4, [("limited", [4])]),
        ([make_request([3, 4, 6, 7], 8)], 4, [("limited", [4])]),
        ([make_request([6, 7, 8, 9], 8)], 4, [("limited", [4])]),
        # two runs of 5 and a lone row fill three tiles, not two each and one more
        ([make_request(TWO_RUNS, 40)], 4, [("causal", [4, 4]), ("limited", [3])]),
    ],
)
def test_runs(
    requests: list[SparseRequest], tile_rows: int, expected: list[tuple[str, list[int]]]
) -> None:
    """Causal entries are aligned at the end: each row sees one key more than the one before it."""
    launches = plan_sparse(requests, tile_rows=tile_rows).launches
    assert [(launch.kind, sizes(launch)) for launch in launches] == expected


def test_tiles_grow_while_that_wastes_at_most_2_percent() -> None:
    """Slot indices are repeated by every tile."""
    for positions, tile_rows, expected in (
        (range(10_000, 10_064, 2), 4, [32]),  # neighbours at the end of long keys
        (range(0, 10_000, 200), 4, [2, *[4] * 12]),
        (range(0, 8000, 2), 16, [32, *[64] * 62]),  # 64 rows waste 1.6%, 128 would 3.2%
    ):
        layout = plan_one(positions, positions.stop, tile_rows=tile_rows)
        assert sizes(layout.launches[0]) == expected


@pytest.mark.parametrize(
    ("max_indices", "size"), [(528, 2), (527, 4), (280, 4), (279, 8), (63, 32), (0, 32)]
)
@pytest.mark.parametrize("run", [0, 4])
def test_tiles_grow_until_slot_indices_fit(max_indices: int, size: int, run: int) -> None:
    """More pairs are the lesser evil, but no more than it takes. Runs have some too."""
    requests = [make_request(range(0, 64, 2), 64), make_request(range(run), 64)]
    layout = plan_sparse(requests, tile_rows=2, max_indices=max_indices + run)
    assert sizes(layout.launches[-1])[-1] == size


@given(cases(head_dims=(1,), group_sizes=(1,)), st.integers(0, 400))
def test_slot_indices_stay_within_their_maximum(case: Case, max_indices: int) -> None:
    """Unless one tile a request is still too much, or the runs take more than half."""
    layout = plan_sparse(case.requests, tile_rows=2, max_indices=max_indices)
    found, launches = num_indices(layout), layout.launches
    runs = sum(int(each.kv_indptr[-1]) for each in launches if each.kind == "causal")
    least = num_indices(plan_sparse(case.requests, tile_rows=2, max_indices=0))
    assert found <= max(max_indices, runs + max_indices // 2, least)
    assert found <= max(max_indices, least) or runs > max_indices // 2


@given(
    cases(head_dims=(1,), group_sizes=(1,)),
    PLANS,
    st.sampled_from([torch.int32, torch.int64]),
)
def test_slot_indices_equal_a_slow_loop(
    case: Case, plan: dict[str, Any], dtype: torch.dtype
) -> None:
    slots, starts = all_slots(case.requests)
    for launch in plan_sparse(case.requests, **plan).launches:
        expected, counts = [], launch.kv_indptr.diff()
        for request, count in zip(launch.request, counts, strict=True):
            expected += case.requests[request].kv_slots[:count].tolist()
        got = slot_indices(launch, slots.to(dtype), starts)
        assert got.dtype == torch.int32
        assert got.tolist() == expected


def test_planning_and_indices_look_at_no_device_tensor() -> None:
    """Each look would wait for the device. Tensors on `meta` have nothing to look at."""
    requests = [
        SparseRequest(torch.tensor([1, 2, 3, 30, 50]), torch.arange(60, device="meta"))
        for _ in range(3)
    ]
    layout = plan_sparse(requests, tile_rows=2)
    slots = torch.cat([request.kv_slots for request in requests])
    assert [launch.kind for launch in layout.launches] == ["causal", "limited"]
    for launch in layout.launches:
        indices = slot_indices(launch, slots, torch.tensor([0, 60, 120]))
        assert indices.is_meta
        assert indices.shape == (int(launch.kv_indptr[-1]),)


@pytest.mark.parametrize("with_gaps", [False, True])
def test_planning_has_no_loop_over_queries_or_keys(with_gaps: bool) -> None:
    """It runs on the scheduler's thread. Lines of Python are counted, whatever the machine."""

    def num_lines(num_queries: int, num_keys: int) -> int:
        requests = make_large("scattered", 8, num_queries, num_keys)
        if with_gaps:
            keys = torch.arange(num_keys) + torch.arange(num_keys) // 100
            requests = [SparseRequest(each.positions, keys, keys) for each in requests]
        # the least: collecting garbage runs lines of others
        return min(lines_run(lambda: plan_sparse(requests)) for _ in range(3))

    assert num_lines(5000, 32768) == num_lines(500, 4096) < 1000


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs, those of what it calls counted in."""
    count, tracer = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(tracer)
    return count
