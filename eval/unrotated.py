"""Moved keys that are not turned to their new position (Cache-Craft table 3), an experiment on a
server: `--chunkcache-selectors eval.unrotated`, which has the selectors of `eval.selectors`, too.

    ratio 0    neither position nor context is mended: the table's first row
    else       the context is, as by `context`: recomputed keys are at the new position, all others
               where they were computed

Only requests with `"selector": "unrotated"` are served so. Loading this module changes what the
server's `Mover` takes for the sources' positions in their moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

from eval import selectors
from radix_ext.moved_plan import Piece
from radix_ext.sources import DeviceCopy, HostCopy
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.moving import Mover
from sglang_chunkcache.fusion.selectors.context import ContextGuided


class Unrotated(ContextGuided):
    """As `context`, of moves whose keys stay as they are."""

    name = "unrotated"


def _in_place(piece: Piece) -> Piece:
    """The piece as if its source had been computed where it is moved to: no key is turned."""
    source = piece.source
    if isinstance(source, DeviceCopy):
        return replace(
            piece, source=replace(source, facts=replace(source.facts, start=piece.start))
        )
    if isinstance(source, HostCopy):
        variant = copy(source.facts)
        variant.start = piece.start
        return replace(piece, source=replace(source, facts=variant))
    return piece


def _moving(move_all: Callable[[Mover, Sequence[Move]], None]) -> Callable[..., None]:
    def move(mover: Mover, moves: Sequence[Move]) -> None:
        asked = [each for each in moves if each.fusion.selector == Unrotated.name]
        plans = [each.plan for each in asked]
        for each in asked:
            each.plan = replace(each.plan, pieces=tuple(map(_in_place, each.plan.pieces)))
        try:
            move_all(mover, moves)
        finally:
            # what the answer tells of the sources is as it was
            for each, plan in zip(asked, plans, strict=True):
                each.plan = plan

    return move


Mover.move = _moving(Mover.move)  # type: ignore[method-assign]
SELECTORS = (*selectors.SELECTORS, Unrotated())
