"""What a request asks of moved KV, and what follows from it without a plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from radix_ext.cfo import Scored

Focus = Literal["off", "spare"]
AskedRatio = float | Literal["auto"] | None


class Need(StrEnum):
    """Evidence that a selector reads, measured on the request, or when a chunk is stored."""

    QUESTION = "question"  # what the question attends to, in one layer
    ALL_LAYERS = "all_layers"  # With QUESTION: in all layers together
    DEVIATION = "deviation"  # how far moved KV is from computed KV, in one layer
    MASSES = "masses"  # of stored chunks: what each attended to
    RECEIVED = "received"  # of stored chunks: also what each token received


NEEDS: Mapping[str, frozenset[Need]] = {
    "query": frozenset({Need.QUESTION}),
    "deviation": frozenset({Need.DEVIATION}),
    "critical": frozenset({Need.QUESTION, Need.DEVIATION}),
    "context": frozenset({Need.MASSES}),
}
"""Of our selectors, those that read any."""


@dataclass(frozen=True, slots=True)
class FusionRequest:
    """What a request that opted into moved KV asks for, defaults filled in. Crosses the process
    border as it is.

    Raises:
        ValueError: a ratio outside 0 to 1.
    """

    selector: str  # what chooses the tokens to recompute
    ratio: float  # share of the moved tokens to recompute
    recipe: str = ""  # names how the fused KV is made. Requests share fused nodes where it agrees
    alpha: float | None = None
    """Cache-Craft's scale of eq. 12. None: solved for so that the mean CFO is `ratio`."""
    focus: Focus = "off"
    """What becomes of the tokens chosen in chunks that the question does not attend to
    (Cache-Craft, algorithm 1): "spare" leaves them as moved."""
    fresh: frozenset[int] = frozenset()
    """Indices of spans that are computed even where a source exists."""
    always: bool = False
    """Whether what can be moved is moved, also where computing it is faster.
    No part of the recipe."""
    plain: bool = False
    """Whether only KV that was computed alone counts as a source:
    the neighbours of a chunk to preprocess (FusionRAG eq. 10)."""
    depth: int | None = 2
    """The layer, counted from 1, whose KV `deviation` and `critical` compare; beyond the model's
    layers the last. None: the calibrated one."""
    layer: int | None = 0
    """The layer, counted from 1, whose attention `query` and `critical` read; 0: the last.
    None: the calibrated one."""
    quality: float | None = None
    """Twice as many tokens as restore this share of the most that recomputing up to 30% restored
    when the model was calibrated. None: `ratio` of them."""
    above: float | None = None
    """With `quality`, from the calibration: tokens whose KV deviates more than this are recomputed,
    `ratio` of them at most."""
    own_needs: frozenset[Need] = frozenset()  # what a selector that is none of ours reads
    tokens: int | None = None  # `first` takes so many of each chunk, whatever the ratio
    expected: float | None = None
    """With `above`: the share of tokens that deviated more, when that was measured."""

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be from 0 to 1 but got {self.ratio}")

    @property
    def recomputes(self) -> bool:
        """Whether its selector takes tokens at all."""
        return self.selector != "none"

    @property
    def needs(self) -> frozenset[Need]:
        return NEEDS.get(self.selector, self.own_needs)

    @property
    def scored(self) -> Scored:
        """How much of the chunks that it stores is to be measured."""
        if Need.RECEIVED in self.needs:
            return Scored.ALL
        return Scored.MASSES if Need.MASSES in self.needs else Scored.NOTHING

    @property
    def asked_ratio(self) -> AskedRatio:
        """As a client names it. None: its selector recomputes nothing, whatever the ratio."""
        return (self.ratio if self.quality is None else "auto") if self.recomputes else None

    @property
    def is_choice(self) -> bool:
        """Whether there is something to choose: neither nothing nor everything is asked for."""
        # these decide without the ratio
        return self.alpha is not None or self.tokens is not None or 0 < self.ratio < 1

    @property
    def expected_ratio(self) -> float:
        """The share of the moved tokens that will be recomputed, estimated."""
        return self.ratio if self.expected is None else min(self.ratio, self.expected)

    @property
    def asks_the_question(self) -> bool:
        """Whether the choice depends on the question. Only the same one finds its fused KV."""
        return Need.QUESTION in self.needs or self.focus != "off"

    @property
    def compares_kv(self) -> bool:
        """Whether the choice depends on how far moved KV is from computed KV."""
        return Need.DEVIATION in self.needs

    @property
    def cheaper(self) -> FusionRequest | None:
        """The same with a choice that takes less: by the question alone in place of `critical`,
        else each chunk's first tokens. None: it needs no measuring itself, or it has a quality to
        keep that nothing else is known to keep.

        Its recipe is another one, so that what it makes is told apart.
        """
        is_measured = self.asks_the_question or self.compares_kv
        if not (self.is_choice and is_measured) or self.quality is not None:
            return None
        # `context` measures stored chunks, not the request: without focus it needs no question.
        selector = {"context": "context", "critical": "query"}.get(self.selector, "first")
        recipe = f"{self.recipe}/by={selector}"
        # The new selector is one of ours, whose needs `NEEDS` has.
        return replace(self, selector=selector, own_needs=frozenset(), focus="off", recipe=recipe)


QUESTION = "/question="
"""In a recipe: what follows names the question, or the one prompt,
that the fused KV was made for."""


def question_tokens(fusion: FusionRequest, question_len: int, *, window: int) -> int:
    """Tokens that the question pass runs for such a request: the last `window` of the
    `question_len` after its chunks.

    0 where its choice does not depend on the question.
    """
    return min(question_len, window) if fusion.is_choice and fusion.asks_the_question else 0


def asked_layers(fusion: FusionRequest, num_layers: int) -> int:
    """Layers that the question runs through: up to the last one that is read."""
    if fusion.focus != "off" or Need.ALL_LAYERS in fusion.needs:
        return num_layers
    return min(fusion.layer or num_layers, num_layers)


MIN_AUTO, MAX_AUTO = 0.01, 0.4
"""Bounds of the share that a `quality` makes recompute. `critical` compares no more."""
BY_CONTEXT, BY_QUESTION = 0.3, 0.1
"""Shares of the moved tokens that `critical` compares:
proposed by what they attend to, and by what the question attends to."""


def proposed_share(fusion: FusionRequest) -> tuple[float, float]:
    """`BY_CONTEXT` and `BY_QUESTION`, more where the ratio needs more to choose from."""
    scale = 1.0 if fusion.above is not None else max(1.0, 2 * fusion.ratio / BY_CONTEXT)
    return min(1.0, scale * BY_CONTEXT), min(1.0, scale * BY_QUESTION)
