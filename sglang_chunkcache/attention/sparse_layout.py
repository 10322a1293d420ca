"""Which kernel launches attend for scattered queries, with work close to what has to be done.

    queries, by what they see   1 2 3 4 5 6 7 8 | 9 14 15 31 | 40 47 52 60
                                a run           | scattered, in tiles of as many rows as a kernel
                                                | takes at a time
    launches                    causal          | limited: all keys up to the tile's last row's,
                                                | each row its first ones

An entry of a launch is some rows of one request over its first keys. Computed on the host,
over all requests at once, from what the queries see: reads no device tensor, knows no heads and no
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_chunkcache.attention.base import SparseRequest
from sglang_chunkcache.attention.upload import upload

Ints = NDArray[np.int64]
Kind = Literal["causal", "limited"]

MAX_INDICES = 1 << 24
"""Slot indices of a pass: 64 MiB of int32."""

WASTE = 0.02
"""Share of the needed pairs that growing tiles may add: fewer tiles repeat fewer indices."""


class Launch(NamedTuple):
    """One kernel launch over e entries, whose rows and slot indices are concatenated."""

    kind: Kind
    """The keys of its entry that a row sees: "causal", one more than the row before, the last row
    all; "limited", the first `limits[row]`."""
    rows: slice
    """Of the pass, in plan order."""
    qo_indptr: Tensor
    """[e + 1] int32, from 0."""
    request: Tensor
    """[e] int64: whose keys the entry reads."""
    kv_indptr: Tensor
    """[e + 1] int32, from 0."""
    limits: Tensor | None
    """[rows] int32, limited only: at least 1."""


@dataclass(frozen=True)
class SparseLayout:
    """A pass as launches. Each row is in "causal" or in "limited"."""

    order: Tensor | None
    """[n] int64: row i is the requests' token `order[i]`; None: they stay in order."""
    num_rows: int
    launches: tuple[Launch, ...]


class Pieces(NamedTuple):
    """[e] each: rows [start, start + size) belong to the request."""

    request: Ints
    start: Ints
    size: Ints

    def rows(self) -> Ints:
        """All of them, piece by piece."""
        ends = np.cumsum(self.size)
        shift: Ints = np.repeat(self.start - (ends - self.size), self.size)
        return shift + np.arange(len(shift))


def plan_sparse(
    requests: Sequence[SparseRequest],
    *,
    tile_rows: int = 128,
    max_indices: int = MAX_INDICES,
) -> SparseLayout:
    """Lay out a pass: the runs' rows first, then the tiles.

    Args:
        tile_rows: Rows that the kernels take at a time, and the least that a run needs for an entry
            of its own.
        max_indices: Tiles grow until the launches have no more slot indices than that, at most to
            all of a request's rows. Where runs take more than half of it, tiles still get half:
            grown tiles would walk keys without need.
    Raises:
        ValueError: a query sees no key.
    """
    counts = np.array([request.positions.numel() for request in requests], dtype=np.int64)
    visible = np.concatenate(
        # np.concatenate refuses an empty list, which no requests would be.
        [np.empty(0, np.int64), *(request.visible().numpy() for request in requests)]
    )
    runs = _find_runs(visible, counts, tile_rows)
    run_rows = runs.rows()
    rows = np.delete(np.arange(len(visible)), run_rows)
    # A causal entry reads what its last row sees.
    run_indices = int(visible[runs.start + runs.size - 1].sum())
    scattered = counts - _sum_by_request(runs.size, runs.request, len(counts))
    budget = max(max_indices - run_indices, max_indices // 2)
    tiles = _cut_tiles(visible[rows], scattered, tile_rows, budget)
    order = np.concatenate([run_rows, rows])
    return SparseLayout(
        # None spares every layer a copy of queries and output.
        order=None if bool((np.diff(order) == 1).all()) else torch.from_numpy(order),
        num_rows=len(order),
        launches=_launches(runs, tiles, visible[order]),
    )


def slot_indices(launch: Launch, slots: Tensor, starts: Tensor) -> Tensor:
    """Slots that the launch reads, entry by entry; queued on the current stream, no
    synchronisation.

    Args:
        slots: [sum of the requests' keys] int64 or int32, any device: all `kv_slots`, concatenated.
        starts: [requests] int64, CPU: where each request's slots begin there.
    Returns:
        [kv_indptr[-1]] int32, on the device of `slots`.
    """
    total = int(launch.kv_indptr[-1])
    shift = starts[launch.request] - launch.kv_indptr[:-1]
    # One upload for both, each of which is a copy of its own.
    entries = upload(torch.stack([shift.int(), launch.kv_indptr.diff()]), slots.device)
    # Without the size, repeat_interleave waits for the device to know it.
    index = entries[0].repeat_interleave(entries[1], output_size=total)
    index += torch.arange(total, dtype=torch.int32, device=slots.device)
    return slots.int().index_select(0, index)


def block_keys(launch: Launch, tile_rows: int) -> Ints:
    """[blocks]: keys that each block walks of a kernel that takes `tile_rows` rows of an entry at a
    time. It stops at the entry's last key; in a causal entry at the key that its own last row sees,
    or would see if it existed."""
    num_rows, num_keys = (
        indptr.diff().numpy().astype(np.int64) for indptr in (launch.qo_indptr, launch.kv_indptr)
    )
    blocks = tiles_of(tile_rows, num_rows)
    walked: Ints = num_keys[blocks.request]
    # a kernel cuts from the entry's first row on: the remainder is in the last block
    if launch.kind == "causal":
        number = np.arange(len(walked)) - np.searchsorted(blocks.request, blocks.request)
        walked = np.minimum(walked, walked - num_rows[blocks.request] + (number + 1) * tile_rows)
    return walked


def _find_runs(visible: Ints, counts: Ints, tile_rows: int) -> Pieces:
    """Stretches of at least `tile_rows` rows, each of which sees one key more than the one before
    it.

    Rows beyond whole tiles join the scattered ones, from the run's start, where that saves tiles of
    the request.
    """
    ends = np.cumsum(counts)
    begins = np.diff(visible, prepend=-1) != 1
    # Two requests' rows may continue each other's numbers by chance.
    begins[(ends - counts)[counts > 0]] = True
    start = np.flatnonzero(begins)
    size = np.diff(start, append=len(visible))
    start, size = start[size >= tile_rows], size[size >= tile_rows]
    # "right": a request without rows ends where the one before it does.
    request = np.searchsorted(ends, start, side="right")
    beyond = size % tile_rows
    alone = _sum_by_request(beyond > 0, request, len(counts))
    scattered = counts - _sum_by_request(size, request, len(counts))
    joining = scattered + _sum_by_request(beyond, request, len(counts))
    # A run with a remainder costs a tile of its own, which scattered rows may have room for.
    saves = _ceil_div(joining, tile_rows) < _ceil_div(scattered, tile_rows) + alone
    beyond *= saves[request]
    return Pieces(request, start + beyond, size - beyond)


def _cut_tiles(visible: Ints, counts: Ints, tile_rows: int, max_indices: int) -> Pieces:
    """Tiles of scattered rows, doubled while that costs little or the slot indices are too many."""
    tiles, needed = tiles_of(tile_rows, counts), int(visible.sum())
    while tile_rows < counts.max(initial=0):
        # A tile reads what its last row sees, once for all its rows.
        num_indices = int(visible[tiles.start + tiles.size - 1].sum())
        tile_rows *= 2
        larger = tiles_of(tile_rows, counts)
        wasted = int((larger.size * visible[larger.start + larger.size - 1]).sum()) - needed
        # Too many indices outweigh waste: their memory is limited, time is not.
        if wasted > WASTE * needed and num_indices <= max_indices:
            break
        tiles = larger
    return tiles


def tiles_of(tile_rows: int, counts: Ints) -> Pieces:
    """Each request's rows in tiles; the remainder is the first, whose rows see fewest keys."""
    num_tiles, ends = _ceil_div(counts, tile_rows), np.cumsum(counts)
    request = np.repeat(np.arange(len(counts)), num_tiles)
    tiles_after = np.repeat(np.cumsum(num_tiles), num_tiles) - np.arange(len(request)) - 1
    end = ends[request] - tiles_after * tile_rows
    start = np.maximum(end - tile_rows, (ends - counts)[request])
    return Pieces(request, start, end - start)


def _launches(runs: Pieces, tiles: Pieces, visible: Ints) -> tuple[Launch, ...]:
    """The launches that have entries. visible: [n] in plan order."""
    last_seen = visible[np.cumsum(np.concatenate([runs.size, tiles.size])) - 1]
    run_keys, tile_keys = np.split(last_seen, [len(runs.size)])
    num_run_rows = int(runs.size.sum())
    limits = torch.from_numpy(visible[num_run_rows:]).int()
    launches = (
        _launch("causal", slice(0, num_run_rows), runs, run_keys, None),
        _launch("limited", slice(num_run_rows, len(visible)), tiles, tile_keys, limits),
    )
    return tuple(launch for launch in launches if len(launch.request))


def _launch(
    kind: Kind, rows: slice, pieces: Pieces, num_keys: Ints, limits: Tensor | None
) -> Launch:
    return Launch(
        kind=kind,
        rows=rows,
        qo_indptr=_indptr(pieces.size),
        request=torch.from_numpy(pieces.request),
        kv_indptr=_indptr(num_keys),
        limits=limits,
    )


def _ceil_div(dividend: Ints, divisor: int) -> Ints:
    return -(-dividend // divisor)


def _sum_by_request(
    values: Ints | NDArray[np.bool_], request: NDArray[np.intp], num_requests: int
) -> Ints:
    return np.bincount(request, weights=values, minlength=num_requests).astype(np.int64)


def _indptr(sizes: Ints) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
