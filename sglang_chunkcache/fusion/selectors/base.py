"""Input and output of every selector: which tokens of the moved chunks are critical, that is,
recomputed.

Selectors are pure: the same arguments give the same tokens on every tensor-parallel rank. They know
no slots, no model and no other requests of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radix_ext import ChunkId, FusionRequest, Need
from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.fusion.store import ChunkScores
from sglang_chunkcache.wire.report import Fallback


@dataclass(frozen=True, eq=False)
class MovedChunk:
    """One moved chunk, whole.

    Raises:
        ValueError: the scores are those of another chunk or prefix.
    """

    chunk: ChunkId
    start: int
    """Its first token's position in the prompt."""
    num_tokens: int
    prefix_old: tuple[ChunkId, ...]
    """The chunks that its KV was computed after, in order."""
    prefix_new: tuple[ChunkId, ...]
    """The chunks before it in this prompt, in order."""
    scores: ChunkScores | None
    """None: its variant was never scored."""
    other_head: bool = False
    """Its KV was computed after another head than this prompt's."""
    outward: Tensor | None = None
    """[num_tokens] float32, CPU: mass of each token, in the calibrated heads, on the chunks before
    it when it was computed; on the text before them where there were none. None: not known."""

    def __post_init__(self) -> None:
        if self.scores is None:
            return
        if len(self.scores.context) != self.num_tokens:
            raise ValueError(
                f"scores must be of {self.num_tokens} tokens but are of {len(self.scores.context)}"
            )
        if len(self.scores.inter) != len(self.prefix_old):
            raise ValueError(
                f"scores must know {len(self.prefix_old)} prefix chunks but know"
                f" {len(self.scores.inter)}"
            )


@dataclass(frozen=True, eq=False)
class Evidence:
    """Measured on this request, float32, on the model's device. None: not asked for, or not
    available."""

    question: Tensor | None = None
    """[end] by prompt position: attention mass from the question in the layers that the request
    names, summed over these, its tokens and heads; 0 at positions without a moved token (FusionRAG
    3.2: the last layer)."""
    question_by_layer: Tensor | None = None
    """[num_layers, num_chunks]: mass from the question on each moved chunk (Cache-Craft algorithm
    1); for focus alone."""
    deviation: Tensor | None = None
    """[end] by prompt position: squared KV deviation at the request's depth (CacheBlend, FusionRAG
    eq. 7: the second layer); 0 at positions that are no candidates."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The critical tokens of all chunks.

    chunks    0 1 2 3 | 0 1 2   where they lie in the prompt plays no part
    tokens    0 1 2 3   4 5 6
    """

    tokens: Tensor
    """[k] int64, among all chunks' tokens, chunk after chunk, ascending and unique; any device. A
    number from sum(`lens`) on, wherever it stands, is no token: `k` is known without asking a
    device how many are chosen."""
    lens: tuple[int, ...]
    """Of the chunks, in tokens."""
    cfo: tuple[float | None, ...]
    """Of each chunk Cache-Craft's recompute share where it was computed, else None."""
    fallbacks: tuple[Fallback, ...] = ()
    """Why tokens were not chosen by the selector's own rule, each reason once."""

    @classmethod
    def of(
        cls,
        chunks: Sequence[MovedChunk],
        offsets: Sequence[Tensor],
        cfo: Sequence[float | None] | None = None,
        fallbacks: tuple[Fallback, ...] = (),
    ) -> Selection:
        """Chunk by chunk. offsets: each [num_chosen] int64 on the CPU, ascending, unique, from the
        chunk's first token."""
        lens = tuple(chunk.num_tokens for chunk in chunks)
        sizes = torch.tensor([len(each) for each in offsets], dtype=torch.int64)
        begins = _begins(lens).repeat_interleave(sizes)
        tokens = torch.cat([torch.empty(0, dtype=torch.int64), *offsets]) + begins
        return cls(tokens, lens, (None,) * len(lens) if cfo is None else tuple(cfo), fallbacks)

    @classmethod
    def leading(
        cls,
        chunks: Sequence[MovedChunk],
        counts: Sequence[int],
        fallbacks: tuple[Fallback, ...] = (),
    ) -> Selection:
        """So many first tokens of each chunk."""
        lens = tuple(chunk.num_tokens for chunk in chunks)
        begins = _begins(lens).tolist()
        spans = [(at, at + num) for at, num in zip(begins, counts, strict=True)]
        return cls(positions_in(spans), lens, (None,) * len(lens), fallbacks)

    @property
    def chosen(self) -> Tensor:
        """[num_chosen] int64, CPU: `tokens` that are some. Waits for their device."""
        tokens = self.tokens.cpu()
        return tokens[tokens < sum(self.lens)]

    @property
    def offsets(self) -> tuple[Tensor, ...]:
        """As `of` takes them. Waits as `chosen`."""
        if not self.lens:
            return ()
        tokens, begins = self.chosen, _begins(self.lens)
        parts = tokens.tensor_split(torch.searchsorted(tokens, begins[1:]))
        return tuple(part - begin for part, begin in zip(parts, begins, strict=True))

    def owners(self) -> Tensor:
        """[k] int64, on the device of the tokens: the index of each one's chunk; the number of
        chunks for what is no token."""
        ends = _begins(self.lens) + torch.tensor(self.lens, dtype=torch.int64)
        return torch.searchsorted(upload(ends, self.tokens.device), self.tokens, right=True)


def positions_of(chunks: Sequence[MovedChunk], device: torch.device | str = "cpu") -> Tensor:
    """[sum of the chunks' tokens] int64: the prompt position of each, chunk after chunk."""
    return positions_in([(each.start, each.start + each.num_tokens) for each in chunks], device)


def positions_in(spans: Sequence[tuple[int, int]], device: torch.device | str = "cpu") -> Tensor:
    """[sum of their lengths] int64: what lies in `[start, end)` of each, span after span."""
    bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
    lens = bounds[:, 1] - bounds[:, 0]
    index: NDArray[np.int64] = np.repeat(bounds[:, 0] - (lens.cumsum() - lens), lens)
    index += np.arange(len(index))
    return upload(torch.from_numpy(index), device)  # on a device it would take five launches


class Selector(ABC):
    """Chooses the critical tokens of one request's moved chunks."""

    name: ClassVar[str]
    """In requests, recipes and metrics.
    Of our own, as in `config.SELECTORS`, and the file's name."""
    needs: ClassVar[frozenset[Need]] = frozenset()

    def candidates(
        self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
    ) -> Tensor | None:
        """[sum of the chunks' tokens] bool, any device: whose deviation is measured, by evidence
        that has none yet; None: all."""
        return None

    def makes_variants(self, request: FusionRequest) -> bool:
        """Whether a chunk that it takes whole is a source from then on: a variant behind the chunks
        before it (Cache-Craft 3.3). Else no request changes what the next one is moved from."""
        return False

    @abstractmethod
    def select(
        self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
    ) -> Selection:
        """Choose for all chunks of the request together; `chunks` may be empty.

        Not asked for ratios 0 and 1, except with `request.alpha` or `tokens`. No more tokens than
        ceil(ratio * n) of each chunk, or ceil(ratio * all moved tokens), unless these decide: the
        plan counts on it.

        Raises:
            ValueError: evidence that does not cover all chunks.
        """


def _begins(lens: Sequence[int]) -> Tensor:
    """[chunks] int64, CPU: where each one's tokens begin among all."""
    return torch.tensor([0, *accumulate(lens)][: len(lens)], dtype=torch.int64)
