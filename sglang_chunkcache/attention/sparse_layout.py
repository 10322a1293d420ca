"""Which kernel launches attend for scattered queries, with work close to what has to be done.

    queries, by what they see   1 2 3 4 5 6 7 8 | 9 14 15 31 | 40 47 52 60
                                a run           | scattered, in tiles of as many rows as a kernel
                                                | takes at a time
    launches                    causal          | limited: all keys up to the tile's last row's,
                                                | each row its first ones
    or, in two parts            causal          | full: the keys before the tile, and limited: the
                                                | rest; to be merged

An entry of a launch is some rows of one request over a stretch of its pages. Computed on the host,
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
Kind = Literal["causal", "full", "limited"]

MAX_INDICES = 1 << 24
"""Page indices of a pass: 64 MiB of int32."""

WASTE = 0.02
"""Share of the needed pairs that tiles may add by growing;
larger tiles are fewer and repeat fewer page indices."""


class Launch(NamedTuple):
    """One kernel launch over e entries, whose rows and page indices are concatenated."""

    kind: Kind
    """The keys of its entry that a row sees.

    causal     one more than the row before, the last row all
    full       all
    limited    the first `limits[row]`
    """
    rows: slice
    """Of the pass, in plan order."""
    qo_indptr: Tensor
    """[e + 1] int32, from 0."""
    request: Tensor
    """[e] int64: whose pages the entry reads."""
    first_page: Tensor
    """[e] int64: from which of the request's pages on."""
    kv_indptr: Tensor
    """[e + 1] int32, in pages."""
    last_page_len: Tensor
    """[e] int32, keys of the entry in its last page."""
    limits: Tensor | None
    """[rows] int32, limited only: at least 1, counted from the entry's first key."""


@dataclass(frozen=True)
class SparseLayout:
    """A pass as launches. Each row is in "causal" or in "limited",
    those of `merged` also in "full"."""

    order: Tensor | None
    """[n] int64: row i is token `order[i]` of the requests' queries;
    None: they stay in their order."""
    num_rows: int
    launches: tuple[Launch, ...]
    merged: slice | None
    """Rows whose result of "full" is to be merged into that of "limited";
    None: no launch is "full"."""
    needed_pairs: int
    """Query-key pairs that count: the sum of what the queries see."""
    page_size: int

    def executed_pairs(self, tile_rows: int) -> int:
        """Pairs computed by kernels that take `tile_rows` rows of an entry at a time, padding rows
        included. They stop at an entry's last key; causal ones at the key that the tile's last row
        sees, or would see if it existed."""
        return sum(_executed_pairs(launch, self.page_size, tile_rows) for launch in self.launches)

    def num_indices(self) -> int:
        """Page indices of all launches."""
        return sum(int(launch.kv_indptr[-1]) for launch in self.launches)


class Pieces(NamedTuple):
    """[e] each: rows [start, start + size) belong to the request."""

    request: Ints
    start: Ints
    size: Ints

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> Pieces:
        return Pieces(*(field[index] for field in self))

    def rows(self) -> Ints:
        """All of them, piece by piece."""
        ends = np.cumsum(self.size)
        shift: Ints = np.repeat(self.start - (ends - self.size), self.size)
        return shift + np.arange(len(shift))


def plan_sparse(
    requests: Sequence[SparseRequest],
    *,
    page_size: int = 1,
    tile_rows: int = 128,
    two_part: bool = False,
    max_indices: int = MAX_INDICES,
) -> SparseLayout:
    """Lay out a pass: the runs' rows first, then the tiles; in two parts, those tiles first that
    are in "limited" only.

    Args:
        tile_rows: Rows that the kernels take at a time, and the least that a run needs for an entry
            of its own.
        two_part: Keys that are visible to a whole tile go to a launch without limits.
        max_indices: Tiles grow until the launches have no more page indices than that, at most to
            all of a request's rows. Where runs take more than half of it, tiles still get half:
            grown tiles would walk keys without need.
    Raises:
        ValueError: a request's pages are not what its keys fill; a query sees no key.
    """
    for request in requests:
        request.check_pages(page_size)
    counts = np.array([request.positions.numel() for request in requests], dtype=np.int64)
    visible = np.concatenate(
        # np.concatenate refuses an empty list, which no requests would be.
        [np.empty(0, np.int64), *(request.visible().numpy() for request in requests)]
    )
    runs = _find_runs(visible, counts, tile_rows)
    run_rows = runs.rows()
    rows = np.delete(np.arange(len(visible)), run_rows)
    # A causal entry reads what its last row sees.
    run_indices = int(_ceil_div(visible[runs.start + runs.size - 1], page_size).sum())
    scattered = counts - _sum_by_request(runs.size, runs.request, len(counts))
    budget = max(max_indices - run_indices, max_indices // 2)
    tiles = _cut_tiles(visible[rows], scattered, tile_rows, page_size, budget)
    cuts = np.zeros_like(tiles.start)
    if two_part:
        # Pages before the one with the first row's last key: every row of the tile sees them whole.
        cuts = (visible[rows[tiles.start]] - 1) // page_size
        # Stable: among themselves tiles keep their order, in which positions ascend.
        by_part = np.argsort(cuts > 0, kind="stable")
        tiles, cuts = tiles.take(by_part), cuts[by_part]
        rows = rows[tiles.rows()]
    order = np.concatenate([run_rows, rows])
    launches = _launches(runs, tiles, cuts, visible[order], page_size)
    return SparseLayout(
        # None spares every layer a copy of queries and output.
        order=None if bool((np.diff(order) == 1).all()) else torch.from_numpy(order),
        num_rows=len(order),
        launches=launches,
        merged=next((launch.rows for launch in launches if launch.kind == "full"), None),
        needed_pairs=int(visible.sum()),
        page_size=page_size,
    )


def page_indices(launch: Launch, pages: Tensor, page_starts: Tensor) -> Tensor:
    """Pages that the launch reads, entry by entry; queued on the current stream, no
    synchronisation.

    Args:
        pages: [sum of the requests' pages] int64 or int32, any device: all `kv_pages`,
            concatenated.
        page_starts: [requests] int64, CPU: where each request's pages begin there.
    Returns:
        [kv_indptr[-1]] int32, on the device of `pages`.
    """
    total = int(launch.kv_indptr[-1])
    shift = page_starts[launch.request] + launch.first_page - launch.kv_indptr[:-1]
    # One upload for both, each of which is a copy of its own.
    entries = upload(torch.stack([shift.int(), launch.kv_indptr.diff()]), pages.device)
    # Without the size, repeat_interleave waits for the device to know it.
    index = entries[0].repeat_interleave(entries[1], output_size=total)
    index += torch.arange(total, dtype=torch.int32, device=pages.device)
    return pages.int().index_select(0, index)


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


def _cut_tiles(
    visible: Ints, counts: Ints, tile_rows: int, page_size: int, max_indices: int
) -> Pieces:
    """Tiles of scattered rows, doubled while that costs little or the page indices are too many."""
    tiles, needed = _tiles_of(tile_rows, counts), int(visible.sum())
    while tile_rows < counts.max(initial=0):
        # A tile reads what its last row sees, once for all its rows.
        num_indices = int(_ceil_div(visible[tiles.start + tiles.size - 1], page_size).sum())
        tile_rows *= 2
        larger = _tiles_of(tile_rows, counts)
        wasted = int((larger.size * visible[larger.start + larger.size - 1]).sum()) - needed
        # Too many indices outweigh waste: their memory is limited, time is not.
        if wasted > WASTE * needed and num_indices <= max_indices:
            break
        tiles = larger
    return tiles


def _tiles_of(tile_rows: int, counts: Ints) -> Pieces:
    """Each request's rows in tiles, the first of which takes the remainder:
    its rows see the fewest keys."""
    num_tiles, ends = _ceil_div(counts, tile_rows), np.cumsum(counts)
    request = np.repeat(np.arange(len(counts)), num_tiles)
    tiles_after = np.repeat(np.cumsum(num_tiles), num_tiles) - np.arange(len(request)) - 1
    end = ends[request] - tiles_after * tile_rows
    start = np.maximum(end - tile_rows, (ends - counts)[request])
    return Pieces(request, start, end - start)


def _launches(
    runs: Pieces, tiles: Pieces, cuts: Ints, visible: Ints, page_size: int
) -> tuple[Launch, ...]:
    """The launches that have entries.

    Args:
        cuts: pages of each tile that are "full".
        visible: [n] in plan order.
    """
    whole = tiles.take(cuts > 0)
    last_seen = visible[np.cumsum(np.concatenate([runs.size, tiles.size])) - 1]
    run_keys, tile_keys = last_seen[: len(runs.size)], last_seen[len(runs.size) :]
    cut_keys, num_run_rows = cuts * page_size, int(runs.size.sum())
    # Counted from the entry's first key, which is behind the pages that "full" has read.
    limits = visible[num_run_rows:] - np.repeat(cut_keys, tiles.size)
    first_whole = len(visible) - int(whole.size.sum())
    launches = (
        _launch("causal", 0, runs, np.zeros_like(run_keys), run_keys, page_size),
        _launch(
            "full", first_whole, whole, np.zeros_like(whole.size), cut_keys[cuts > 0], page_size
        ),
        _launch("limited", num_run_rows, tiles, cuts, tile_keys - cut_keys, page_size, limits),
    )
    return tuple(launch for launch in launches if len(launch.request))


def _launch(
    kind: Kind,
    first_row: int,
    pieces: Pieces,
    first_page: Ints,
    num_keys: Ints,
    page_size: int,
    limits: Ints | None = None,
) -> Launch:
    num_pages = _ceil_div(num_keys, page_size)
    return Launch(
        kind=kind,
        rows=slice(first_row, first_row + int(pieces.size.sum())),
        qo_indptr=_indptr(pieces.size),
        request=torch.from_numpy(pieces.request),
        first_page=torch.from_numpy(first_page),
        kv_indptr=_indptr(num_pages),
        last_page_len=torch.from_numpy(num_keys - (num_pages - 1) * page_size).int(),
        limits=None if limits is None else torch.from_numpy(limits).int(),
    )


def _executed_pairs(launch: Launch, page_size: int, tile_rows: int) -> int:
    num_rows = launch.qo_indptr.diff().numpy().astype(np.int64)
    num_keys = (
        launch.kv_indptr.diff().numpy().astype(np.int64) - 1
    ) * page_size + launch.last_page_len.numpy()
    tiles = _tiles_of(tile_rows, num_rows)
    walked = num_keys[tiles.request]
    # a kernel cuts from the entry's first row on: the remainder is in the last tile
    if launch.kind == "causal":
        number = np.arange(len(walked)) - np.searchsorted(tiles.request, tiles.request)
        walked = np.minimum(walked, walked - num_rows[tiles.request] + (number + 1) * tile_rows)
    return tile_rows * int(walked.sum())


def _ceil_div(dividend: Ints, divisor: int) -> Ints:
    return -(-dividend // divisor)


def _sum_by_request(
    values: Ints | NDArray[np.bool_], request: NDArray[np.intp], num_requests: int
) -> Ints:
    return np.bincount(request, weights=values, minlength=num_requests).astype(np.int64)


def _indptr(sizes: Ints) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
