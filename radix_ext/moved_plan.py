"""Which chunk of a prompt is moved from which source: the plan of a promise. Pure: no tensors, no
tree, nothing allocated.

    prompt   head | A | B | C | D | question   A is the exact prefix
    pieces            gap  C   -               B cached nowhere, C found: [B, C] is promised, D and
                                               the rest prefilled

Pieces follow each other without holes. A gap is computed in the recompute pass, so that a hit after
it still counts. It is only promised where a hit follows. Chunks are moved whole or not at all.
Every hit is a place to end: the plan ends where the estimated time to the first token is least, and
moves nothing where computing everything takes as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from itertools import product
from operator import add
from typing import NamedTuple

from radix_ext.cfo import KvFacts, cfo, fix_overhead
from radix_ext.chunk import ChunkId, Span
from radix_ext.costs import NOMINAL, Costs, Phase, Work, extend_work, seconds, through
from radix_ext.fusion_request import FusionRequest, asked_layers, proposed_share, question_tokens


class NotMoved(StrEnum):
    """Why chunks are computed that a plan could have moved."""

    NO_SOURCE = "no_source"
    GAP_TOO_LONG = "gap_too_long"
    PASS_BUDGET = "pass_budget"
    MEASURING_BUDGET = "measuring_budget"
    NOT_WORTH_IT = "not_worth_it"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One place where a chunk's KV is stored."""

    facts: KvFacts
    where = ""  # the tier
    has_rows = False  # on the device, too


@dataclass(frozen=True, slots=True)
class Piece:
    """`[start, end)` of the prompt; `source` None is a gap."""

    start: int
    end: int
    span: int | None  # index of the span it is; None for text between chunks
    source: Candidate | None
    chunk: ChunkId | None = None
    prefix: tuple[ChunkId, ...] = ()  # the chunks before it in this prompt
    overlap: int = 0  # of these, chunks that were before the source as well
    cfo: float | None = None
    """Cache-Craft's fix overhead with alpha 1, estimated by `fix_overhead` where the source is not
    scored. None: a gap."""
    other_head: bool = False  # the source's KV was computed after another head


class Estimate(NamedTuple):
    """Seconds to the first token, once the request runs."""

    planned: float
    """By the plan; by the best one, where it moves nothing because that takes too long."""
    computed: float  # if what follows the cached prefix is computed


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """What one request has moved. Empty `pieces`: nothing, for the reasons in `fallbacks`."""

    pieces: tuple[Piece, ...]
    fallbacks: tuple[str, ...] = ()  # of `NotMoved`, or a caller's own
    recomputed_len: int = 0  # moved tokens that the selector will take, estimated
    measured_len: int = 0  # what measuring the region costs, in tokens that run through all layers
    fusion: FusionRequest | None = None  # what is asked for, or `FusionRequest.cheaper`
    works: Mapping[Phase, Work] = field(default_factory=dict)  # what the phases do
    estimate: Estimate | None = None  # None: not asked for

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def fused_from(self) -> int:
        """Where KV stops being exact: the first moved chunk."""
        return next(piece.start for piece in self.pieces if piece.source is not None)

    @property
    def moved_len(self) -> int:
        return sum(piece.end - piece.start for piece in self.pieces if piece.source is not None)

    @property
    def num_pass_tokens(self) -> int:
        """Tokens that go through the model before the extend, as far as the plan can tell."""
        return self.gap_len + self.recomputed_len + self.measured_len

    @property
    def gap_len(self) -> int:
        return self.end - self.start - self.moved_len


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one plan, in tokens."""

    max_pass_tokens: int
    max_gap_tokens: int
    prefill_tokens: int | None = None  # of one call of SGLang's prefill; None: as many as there are
    question_window: int = 32  # last tokens of the question that are run for what it attends to
    num_layers: int = 32  # of the model


MAX_TAIL_TOKENS = 1024
"""That follow moved KV and are computed in its pass.
More take as long in one run of the model as in two."""
MIN_GAIN = 0.05
"""Of the time to the first token: estimates are off by about as much,
and moved KV is never better than computed KV."""


def make_plan(
    spans: Sequence[Span],
    *,
    start: int,
    limit: int,
    candidates: Callable[[ChunkId, str], Sequence[Candidate]],
    fusion: FusionRequest,
    limits: Limits,
    heads: Sequence[str] | None = None,
    exact: Collection[int] = frozenset(),
    num_tokens: int | None = None,
    costs: Costs | None = None,
    may_be_cheaper: bool = True,
) -> ReusePlan:
    """Plan the region after the cached prefix `[0, start)`, no further than `limit`.

    Args:
        candidates: asked once per chunk, with its head; an empty answer makes the chunk a gap.
        heads: `text_before` of the prompt.
        exact: indices of spans that are computed although a source exists, which stand right after
            the prefix. They count against no gap limit.
        num_tokens: of the prompt. None: `limit`.
        costs: None: what can be moved is moved, as `always` asks and as a `plain` request does,
            which moves chunks for what their KV is.
        may_be_cheaper: whether `fusion.cheaper` may take its place; not behind fused KV of the
            recipe itself.
    """
    if fusion.plain or fusion.always:
        costs = None
    walk = _Walk(spans, start, limit, num_tokens or limit, limits, exact, costs)
    # Where the prefix and the exact gaps have all chunks none lacks a source.
    is_left = any(walk.may_move(index) for index in range(len(spans)))
    choose = cache(partial(walk.choose, cache(candidates), fusion, heads or ("",) * len(spans)))
    walk.chosen = choose(is_soonest=False)
    if not walk.chosen:
        return ReusePlan((), (NotMoved.NO_SOURCE,) if is_left else ())
    if costs is None:
        cuts, fallbacks = walk.cuts(fusion)
        # No cost says that an earlier end is better.
        return walk.plan(cuts[-1], fallbacks) if cuts else ReusePlan((), fallbacks)
    extend = extend_work(start, walk.num_tokens, piece=limits.prefill_tokens)
    computed = costs[Phase.EXTEND].seconds(extend)
    estimate, is_dear = Estimate(computed, computed), False
    choices = filter(None, (fusion, fusion.cheaper if may_be_cheaper else None))
    # Second only: what was asked for, from what has seen most, is kept wherever it pays.
    for choice, is_soonest in product(choices, (False, True)):
        walk.chosen = choose(is_soonest=is_soonest)
        if is_soonest and walk.chosen == choose(is_soonest=False):
            continue
        cuts, fallbacks = walk.cuts(choice)
        if not cuts:
            continue
        best = min(cuts, key=lambda cut: seconds(costs, cut.works))
        estimate = Estimate(seconds(costs, best.works), computed)
        if estimate.planned <= (1 - MIN_GAIN) * computed:
            if best is not cuts[-1] or walk.num_refused:
                fallbacks = (*fallbacks, NotMoved.NOT_WORTH_IT)
            return walk.plan(best, fallbacks, estimate)
        is_dear = True
    # Where each chunk was refused by itself there is no cut, and the price is the reason all the
    # same.
    if is_dear or walk.num_refused:
        fallbacks = (*fallbacks, NotMoved.NOT_WORTH_IT)
    return ReusePlan((), fallbacks, estimate=estimate)


def seconds_saved(plan: ReusePlan, instead_of: ReusePlan) -> float | None:
    """Of the time to the first token, by one plan instead of another one for the same prompt, with
    the same prefix cached. None: not estimated."""
    if plan.estimate is None:
        return None if plan.pieces else 0.0
    computed = plan.estimate.computed

    def of(each: ReusePlan) -> float:
        return each.estimate.planned if each.pieces and each.estimate else computed

    return max(0.0, of(instead_of) - of(plan))


class _Cut(NamedTuple):
    """A plan that ends with a hit."""

    num_pieces: int
    fusion: FusionRequest
    recomputed_len: int
    measured_len: int
    works: Mapping[Phase, Work]


@dataclass
class _Walk:
    """One prompt, walked chunk by chunk. `costs` None: what can be moved is moved."""

    spans: Sequence[Span]
    start: int
    limit: int
    num_tokens: int
    limits: Limits
    exact: Collection[int]
    costs: Costs | None
    chosen: dict[int, Piece] = field(default_factory=dict)
    """By the index of its span, where it could be moved from."""
    pieces: list[Piece] = field(default_factory=list)
    num_refused: int = 0  # chunks whose move takes longer than their computation

    def may_move(self, index: int) -> bool:
        span = self.spans[index]
        return self.start <= span.start and span.end <= self.limit and index not in self.exact

    def choose(
        self,
        candidates: Callable[[ChunkId, str], Sequence[Candidate]],
        fusion: FusionRequest,
        heads: Sequence[str],
        *,
        is_soonest: bool,
    ) -> dict[int, Piece]:
        """Each chunk's best source: one computed after another head only if there is no other.
        `is_soonest`: the one that is moved soonest, whatever it has seen."""
        chosen = dict[int, Piece]()
        ids = tuple(span.chunk for span in self.spans)
        for index, (span, head) in enumerate(zip(self.spans, heads, strict=True)):
            if index in fusion.fresh or not self.may_move(index):
                continue
            options = candidates(span.chunk, head)
            behind = [option for option in options if option.facts.head == head]
            if fusion.plain:
                options = behind = [option for option in behind if option.facts.is_alone]
            if not options:
                continue
            before, other_head = ids[:index], not behind
            known = frozenset(before)
            best = self._best(
                behind or options, span, before, known, fusion, other_head, is_soonest
            )
            facts = best.facts
            overhead = fix_overhead(facts.prefix, facts.scores, before, other_head=other_head)
            chosen[index] = Piece(
                span.start,
                span.end,
                index,
                best,
                span.chunk,
                before,
                overlap=len(known.intersection(facts.prefix)),
                cfo=cfo(1.0, overhead, span.end - span.start),
                other_head=other_head,
            )
        return chosen

    def cuts(self, fusion: FusionRequest) -> tuple[list[_Cut], tuple[str, ...]]:
        """(a cut at each hit, why there is none further on)."""
        found: list[_Cut] = []
        waiting: list[Piece] = []  # gaps, until a hit after them makes them worth it
        self.pieces, self.num_refused = [], 0
        position, moved_len, exact_len, by_chunk, compared = self.start, 0, 0, 0, 0
        moves = {Phase.DEVICE: Work(), Phase.HOST: Work()}
        for index, span in enumerate(self.spans):
            if span.start < self.start or span.end > self.limit:
                continue
            # Text between chunks is computed as gaps are: behind a hole no later hit could stand.
            if position < span.start:
                waiting.append(Piece(position, span.start, None, None))
            position, num_tokens = span.end, span.end - span.start
            piece = self.chosen.get(index)
            if piece is not None and not self._pays(piece, fusion):
                self.num_refused += 1
                piece = None
            if piece is None:
                waiting.append(Piece(span.start, span.end, index, None))
                exact_len += num_tokens if index in self.exact else 0
                continue
            assert piece.source is not None
            tier, move = _move_of(piece.source, num_tokens)
            moves[tier] = Work(*map(add, moves[tier], move))
            # However many chunks come from the device, one launch moves them.
            moves[Phase.DEVICE] = moves[Phase.DEVICE]._replace(calls=moves[Phase.DEVICE].tokens > 0)
            moved_len += num_tokens
            by_chunk += _num_by_chunk(piece, fusion)
            compared += _num_compared(piece, fusion)
            # All up to this hit that is not moved, exact gaps included.
            gap_len = span.end - self.start - moved_len
            # Budgets hold for what may be recomputed, estimates go by what is expected to be.
            recomputed = expected = by_chunk
            if not _goes_by_chunk(fusion):
                recomputed, expected = (
                    math.ceil(share * moved_len) if fusion.recomputes else 0
                    for share in (fusion.ratio, fusion.expected_ratio)
                )
            # Where tokens are compared the gaps run along, since later tokens attend to them.
            measured, works = self._works(
                span.end, expected + gap_len, compared and compared + gap_len, fusion
            )
            # Neither sum shrinks from here on, so no later hit fits either.
            if gap_len - exact_len > self.limits.max_gap_tokens:
                return found, (NotMoved.GAP_TOO_LONG,)
            if gap_len + recomputed + measured > self.limits.max_pass_tokens:
                alone = gap_len + recomputed > self.limits.max_pass_tokens
                return found, (NotMoved.PASS_BUDGET if alone else NotMoved.MEASURING_BUDGET,)
            self.pieces += [*waiting, piece]
            waiting = []
            found.append(_Cut(len(self.pieces), fusion, recomputed, measured, {**moves, **works}))
        return found, ()

    def plan(
        self, cut: _Cut, fallbacks: tuple[str, ...], estimate: Estimate | None = None
    ) -> ReusePlan:
        """The plan of the last walk that ends there."""
        return ReusePlan(
            tuple(self.pieces[: cut.num_pieces]),  # a copy for each cut is quadratic
            fallbacks,
            cut.recomputed_len,
            cut.measured_len,
            cut.fusion,
            cut.works,
            estimate,
        )

    def _best(
        self,
        options: Sequence[Candidate],
        span: Span,
        before: tuple[ChunkId, ...],
        known: frozenset[ChunkId],
        fusion: FusionRequest,
        other_head: bool,
        is_soonest: bool,
    ) -> Candidate:
        """The source to move. Cache-Craft takes the lowest CFO (3.3). Otherwise, of those that pay,
        what saves most: the computation of the chunk's share that has seen what it sees here,
        counted in chunks, or none of it if `is_soonest`, less the move. Among equals those that
        have seen more come first, then preprocessed ones, as FusionRAG wants them used."""
        num_tokens = span.end - span.start
        computed = self._computed(num_tokens, span.end)
        saved = computed * (1 - fusion.expected_ratio if fusion.recomputes else 1)

        def score(option: Candidate) -> tuple[bool, float, float, bool, int]:
            facts = option.facts
            seen = len(known.intersection(facts.prefix)) / max(1, len(known))
            move = self._moved(option, num_tokens)
            pays = self.costs is None or move < saved
            worth = -move if is_soonest else computed * seen - move
            # Of equals the one that has seen least of what is not here.
            return pays, worth, seen, facts.preprocessed, -len(facts.prefix)

        def overhead(option: Candidate) -> float:
            facts = option.facts
            return fix_overhead(facts.prefix, facts.scores, before, other_head=other_head)

        # Among equals the first is taken: one that need not be rotated.
        options = sorted(options, key=lambda option: option.facts.start != span.start)
        return (
            min(options, key=overhead) if fusion.selector == "context" else max(options, key=score)
        )

    def _works(
        self, end: int, num_computed: int, num_compared: int, fusion: FusionRequest
    ) -> tuple[int, dict[Phase, Work]]:
        """(what measuring costs, in tokens through all layers; all phases but the moves)."""
        question_len = max(0, self.num_tokens - self.spans[-1].end)
        asked = question_tokens(fusion, question_len, window=self.limits.question_window)
        layers = self.limits.num_layers
        recompute = through(1, num_computed, end)
        extend = extend_work(end, self.num_tokens, piece=self.limits.prefill_tokens)
        fits = extend.tokens <= MAX_TAIL_TOKENS
        if num_computed and fits and self.spans[-1].end <= end:
            # Alone it needs no forward for that; with others their forward is there either way.
            recompute, extend = Work(*map(add, recompute, extend._replace(calls=0))), Work()
        works = {
            Phase.QUESTION: through(asked_layers(fusion, layers) / layers, asked, end),
            Phase.DEVIATION: through(
                min(fusion.depth or layers, layers) / layers, num_compared, end
            ),
            Phase.RECOMPUTE: recompute,
            Phase.EXTEND: extend,
        }
        return math.ceil(works[Phase.QUESTION].tokens + works[Phase.DEVIATION].tokens), works

    def _pays(self, piece: Piece, fusion: FusionRequest) -> bool:
        """Whether moving and recomputing the chunk is faster than computing it in the pass."""
        if self.costs is None:
            return True
        assert piece.source is not None
        num_tokens = piece.end - piece.start
        computed = self._computed(num_tokens, piece.end)
        share = (
            _num_by_chunk(piece, fusion) / num_tokens
            if _goes_by_chunk(fusion)
            else fusion.expected_ratio
        )
        moved = self._moved(piece.source, num_tokens)
        return moved + (share if fusion.recomputes else 0) * computed < computed

    def _computed(self, num_tokens: int, end: int) -> float:
        """Seconds for a chunk in a pass of all chunks, so without a call of its own."""
        work = Work(0, num_tokens, num_tokens * end)
        return (self.costs or NOMINAL)[Phase.RECOMPUTE].seconds(work)

    def _moved(self, source: Candidate, num_tokens: int) -> float:
        tier, work = _move_of(source, num_tokens)
        return (self.costs or NOMINAL)[tier].seconds(work)


def _move_of(source: Candidate, num_tokens: int) -> tuple[Phase, Work]:
    """All moves on the device are one call, whose own time counts for nothing here."""
    is_here = source.where == Phase.DEVICE or source.has_rows
    return Phase.DEVICE if is_here else Phase.HOST, Work(not is_here, num_tokens)


def _num_compared(piece: Piece, fusion: FusionRequest) -> int:
    """Tokens of a moved chunk that are compared with computed KV, estimated."""
    if not (fusion.is_choice and fusion.compares_kv):
        return 0
    assert piece.source is not None
    is_proposed = fusion.selector == "critical" and piece.source.facts.outward is not None
    # The two proposals may overlap, so that their sum is the most.
    share = min(1.0, sum(proposed_share(fusion))) if is_proposed else 1.0
    return math.ceil(share * (piece.end - piece.start))


def _goes_by_chunk(fusion: FusionRequest) -> bool:
    return fusion.tokens is not None or (fusion.selector == "context" and fusion.alpha is not None)


def _num_by_chunk(piece: Piece, fusion: FusionRequest) -> int:
    """Tokens of a moved chunk that `context` takes at the request's alpha, by the ratio where its
    source is not scored; those that `first` takes where their number is fixed."""
    if fusion.tokens is not None:
        return min(fusion.tokens, piece.end - piece.start)
    assert piece.source is not None
    is_scored = piece.source.facts.scores is not None
    share = min(1.0, (fusion.alpha or 0.0) * (piece.cfo or 0.0)) if is_scored else fusion.ratio
    return math.ceil(share * (piece.end - piece.start))
