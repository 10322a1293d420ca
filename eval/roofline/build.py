"""How the passes of a moved request are built: what their time depends on beside bytes, operations
and rates. Three builds, each of the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from eval.machines import (
    GRAPH_LAYER_S,
    LAUNCH_S,
    LAYER_LAUNCHES,
    MASKED_SHARE,
    SCATTERED_SHARE,
)

Points = Sequence[tuple[int, float]]
"""(tokens, seconds), ascending."""


class Build(NamedTuple):
    """Launches are counts, of a layer where they are called so. Host times are seconds."""

    copy_launches: int
    """Of all moves within the device."""
    copy_chunk_launches: int
    """Further ones of each chunk."""
    question_layers: float
    """Share of the model's layers that the question's pass runs through."""
    question_launches: int
    """A layer."""
    question_reads: int
    """Times that a layer's KV is read or written for it: gathered, joined, attended to."""
    question_more: int
    """Launches outside the layers, and of the layer that is read."""
    piece_tokens: int | None
    """Of the promised region, of what is proposed where `is_planned`, whose deviation is measured
    at once. None: all."""
    piece_s: float
    """Host time of a piece that is not beside the device's work."""
    piece_launches: int
    """Of a piece, beside the device's work."""
    block_launches: int
    """Likewise of each further block of queries in a piece."""
    piece_reads: int
    """Times that KV before a piece's end is read or written for it, in the layers that attend."""
    masked_share: float
    """Of the peak, in the deviation's attention."""
    is_planned: bool
    """Pairs are those that the planners lay out, not those that are needed."""
    choose_s: Points
    """Host time of proposing, choosing and listing tokens."""
    scored_s: Points
    """Likewise where chunks are scored: nothing is proposed, nothing sorted by evidence."""
    recompute_launches: int
    """A layer; 0: a graph replays it."""
    recompute_layer_s: float
    """Host time of a layer that a graph replays."""
    recompute_s: float
    """Host time before the pass: its layout and plan, uploads."""
    recompute_share: float
    """Of the peak, in its attention."""
    has_extend: bool
    """A forward of SGLang's for the question; else its rows are in the recompute pass."""
    evidence_waits: int
    """Times that the host waits for the device, for evidence and its passes."""
    pass_waits: int
    """Likewise for the recompute pass: FlashInfer's plan, twice, and the copy of the one before."""
    load_s: float
    """Host time of a launch that brings KV from host memory."""
    load_launches: int
    """A layer, of all chunks."""
    chunk_launches: int
    """A layer and chunk."""


REVIEWED = Build(
    copy_launches=0,
    copy_chunk_launches=0,
    question_layers=1.0,
    question_launches=14,
    question_reads=3,
    question_more=0,
    piece_tokens=2048,
    piece_s=2e-3,
    piece_launches=0,
    block_launches=0,
    piece_reads=0,
    masked_share=MASKED_SHARE,
    is_planned=False,
    # half of what one of this machine's cores took
    choose_s=((2048, 1.3e-3), (8192, 4.5e-3), (32_768, 21e-3)),
    scored_s=((2048, 0.43e-3), (8192, 1.5e-3), (32_768, 7e-3)),
    recompute_launches=LAYER_LAUNCHES,
    recompute_layer_s=0.0,
    recompute_s=3e-3,
    recompute_share=SCATTERED_SHARE,
    has_extend=True,
    evidence_waits=6,
    pass_waits=3,
    load_s=70e-6,
    load_launches=0,
    chunk_launches=1,
)
"""As built when the first GPU run was reviewed (commit eea131b), without cuDNN's plans: counts and
host times are the review's estimates."""

PLAN_S = 1.5e-3
"""Of a sparse pass of 15% of 8,192 tokens: layout .27 ms, FlashInfer's plan 1.22 (2026-11-26T0408-
attention-h200)."""
RECOMPUTE_LAUNCHES = 23
"""Of the sparse pass, outside the layers: nearly all of them uploads before it, two for the
question in it."""

CHOICE_LAUNCHES = 17
"""Of proposing and choosing, on the device, at any length."""

BUILT = REVIEWED._replace(
    copy_launches=20,
    copy_chunk_launches=2,
    question_reads=5,
    question_more=34,
    piece_tokens=8192,  # SGLang's prefill budget on an H100
    piece_s=0.0,
    piece_launches=61,
    block_launches=5,
    piece_reads=7,
    is_planned=True,
    # The rest, lists of positions, took one of this machine's cores twice that: a server's is
    # faster. What is compared, and what is computed, is joined and read back.
    choose_s=tuple(
        (num_tokens, (CHOICE_LAUNCHES + 4) * LAUNCH_S + rest_s)
        for num_tokens, rest_s in ((2048, 0.04e-3), (8192, 0.07e-3), (32_768, 0.22e-3))
    ),
    scored_s=((2048, 0.2e-3), (8192, 0.53e-3), (32_768, 2.4e-3)),
    recompute_s=PLAN_S + RECOMPUTE_LAUNCHES * LAUNCH_S,
    has_extend=False,
    evidence_waits=2,
    load_s=LAUNCH_S,
    load_launches=2,
    chunk_launches=0,
)
"""As built now: launches and reads as tests/eval/test_roofline_counts.py counts them."""

GRAPH_LAUNCHES = 31
"""As `RECOMPUTE_LAUNCHES`, where a graph replays the pass: what it reads is copied, too."""
GRAPHS = BUILT._replace(
    question_launches=8,
    question_more=45,
    recompute_launches=4,
    recompute_layer_s=GRAPH_LAYER_S,
    recompute_s=PLAN_S + GRAPH_LAUNCHES * LAUNCH_S,
)
"""With passes in SGLang's prefill graphs (fusion/recompute.py, `REPLAYS`)."""

LIMIT = Build(
    copy_launches=0,
    copy_chunk_launches=0,
    question_layers=0.5,
    question_launches=0,
    question_reads=0,
    question_more=0,
    piece_tokens=None,
    piece_s=0.3e-3,
    piece_launches=0,
    block_launches=0,
    piece_reads=0,
    masked_share=SCATTERED_SHARE,
    is_planned=False,
    choose_s=((1, 0.3e-3), (1 << 30, 0.3e-3)),
    scored_s=((1, 0.3e-3), (1 << 30, 0.3e-3)),
    recompute_launches=0,
    recompute_layer_s=1.2 * GRAPH_LAYER_S,
    recompute_s=0.5e-3,
    recompute_share=0.50,
    has_extend=False,
    evidence_waits=0,
    pass_waits=0,
    load_s=0.0,
    load_launches=0,
    chunk_launches=0,
)
"""One pass over critical tokens, gaps and question in a captured graph; evidence by the same
kernels in a graph, the question's up to a layer half way; the choice on the device; loads in few
launches. Host times are the review's estimates."""
