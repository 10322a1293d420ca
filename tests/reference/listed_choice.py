"""Choices, chunk by chunk, token by token and layer by layer, in lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radix_ext import FusionRequest
from radix_ext.fusion_request import MIN_AUTO, proposed_share
from sglang_chunkcache.fusion import selectors
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk
from sglang_chunkcache.fusion.selectors.top_k import num_critical


def highest(scores: Tensor, k: int) -> Tensor:
    """[k] int64, ascending; NaN counts as the highest."""
    return scores.cpu().sort(descending=True, stable=True).indices[:k].sort().values


def jointly_highest(
    scores: Tensor, chunks: Sequence[MovedChunk], ratio: float, *, above: float | None = None
) -> tuple[Tensor, ...]:
    """Offsets per chunk."""
    if not chunks:
        return ()
    moved = torch.cat([scores[chunk.start : chunk.start + chunk.num_tokens] for chunk in chunks])
    lens = [chunk.num_tokens for chunk in chunks]
    k = num_critical(ratio, len(moved))
    if above is not None:
        k = min(k, max(num_critical(MIN_AUTO, len(moved)), int((~(moved <= above)).sum())))
    chosen = torch.zeros(len(moved), dtype=torch.bool)
    chosen[highest(moved, k)] = True
    return tuple(part.nonzero()[:, 0] for part in torch.split(chosen, lens))


def candidates(
    chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
) -> tuple[Tensor, ...]:
    """What `critical` compares: offsets per chunk."""
    by_context, by_question = proposed_share(request)
    proposed = [torch.zeros(chunk.num_tokens, dtype=torch.bool) for chunk in chunks]
    for marks, chosen in zip(proposed, _outward(chunks, by_context), strict=True):
        marks[chosen] = True
    if evidence.question is not None:
        asked = jointly_highest(evidence.question, chunks, by_question)
        for marks, chosen in zip(proposed, asked, strict=True):
            marks[chosen] = True
    return tuple(marks.nonzero()[:, 0] for marks in proposed)


def _outward(chunks: Sequence[MovedChunk], share: float) -> tuple[Tensor, ...]:
    outward = [chunk.outward for chunk in chunks]
    known = [each for each in outward if each is not None]
    chosen = torch.zeros(sum(map(len, known)), dtype=torch.bool)
    if known:
        chosen[highest(torch.cat(known), num_critical(share, len(chosen)))] = True
    parts = iter(torch.split(chosen, [len(each) for each in known]))
    return tuple(
        torch.arange(chunk.num_tokens) if each is None else next(parts).nonzero()[:, 0]
        for chunk, each in zip(chunks, outward, strict=True)
    )


def focused_chunks(by_layer: Tensor, window: int) -> set[int]:
    """As `focus.focused_chunks`."""
    everything = set(range(by_layer.shape[1]))
    highs = [_high_chunks(sums) for sums in by_layer.double().cumsum(0)]
    for last in range(window, len(highs) + 1):
        if all(high == highs[last - 1] for high in highs[last - window : last]):
            return highs[last - 1]
    return everything


def _high_chunks(sums: Tensor) -> set[int]:
    values, order = sums.sort(descending=True, stable=True)
    gaps = values[:-1] - values[1:]
    total = gaps.sum()
    if len(sums) < 3 or not total > 0:
        return set(range(len(sums)))
    growth = torch.special.entr(gaps / total)[1:]
    split = int((growth == growth.max()).nonzero()[0]) + 1
    return set(order[:split].tolist())


def choose(
    chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
) -> tuple[Tensor, ...]:
    """What our selectors and eval's choose: offsets per chunk."""
    lens = [chunk.num_tokens for chunk in chunks]
    first = tuple(torch.arange(num_critical(request.ratio, n)) for n in lens)
    nothing = tuple(torch.arange(0) for _ in lens)
    everything_or_nothing = not request.is_choice and request.recomputes
    if request.selector == "none":
        return nothing
    if request.selector == "first" or everything_or_nothing:
        fixed = request.tokens
        return first if fixed is None else tuple(torch.arange(min(fixed, n)) for n in lens)
    if request.selector == "set":
        is_same = [{*c.prefix_old} == {*c.prefix_new} and not c.other_head for c in chunks]
        return tuple(map(lambda same, *pair: pair[same], is_same, first, nothing))
    joint = {"query": evidence.question, "prophet": evidence.question}
    joint |= dict.fromkeys(("deviation", "critical"), evidence.deviation)
    if request.selector in joint:
        scores = joint[request.selector]
        if scores is None:
            return first
        return jointly_highest(scores, chunks, request.ratio, above=request.above)
    # chunk by chunk already
    return (
        selectors.get(request.selector, "eval.selectors").select(chunks, request, evidence).offsets
    )


def positions_of(chunks: Sequence[MovedChunk], offsets: Sequence[Tensor]) -> list[int]:
    """Of the tokens chosen in each chunk."""
    return [
        chunk.start + int(at)
        for chunk, chosen in zip(chunks, offsets, strict=True)
        for at in chosen
    ]
