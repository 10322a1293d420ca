"""Host time of choosing tokens, taken here: the code that serves a request, on made evidence."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from eval.roofline.model import CHUNK_TOKENS, Prompt
from radix_ext import ChunkId, FusionRequest
from sglang_chunkcache.attention.base import PassSequence
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, positions_of
from sglang_chunkcache.fusion.selectors.critical import SELECTOR

REPEATS = 5


class ChoiceTime(NamedTuple):
    """CPU seconds."""

    total: float
    python: float
    """With every call of torch replaced by what it gave before."""


class _Calls(TorchFunctionMode):
    """Of torch: the first run's results are what later runs get, who compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._given: list[Any] = []
        self._at: int | None = None

    def replay(self) -> None:
        self._at = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._at is None:
            self._given.append(func(*args, **(kwargs or {})))
            return self._given[-1]
        self._at += 1
        return self._given[self._at - 1]


def choice_s(prompt: Prompt) -> ChoiceTime:
    """The least of some runs: proposed, chosen, listed, laid into a pass."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = prompt.num_tokens

    def made(size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator)

    chunks = []
    for start in range(0, num_tokens, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, num_tokens - start)
        name = ChunkId(str(start))
        chunks.append(MovedChunk(name, start, size, (), (), None, outward=made(size)))
    request = FusionRequest("critical", prompt.ratio)
    asked = Evidence(made(num_tokens))
    evidence = Evidence(made(num_tokens), deviation=made(num_tokens))
    ids = torch.arange(num_tokens)

    def choose() -> None:
        named = SELECTOR.candidates(chunks, request, asked)
        assert len(positions_of(chunks)[named])
        selection = SELECTOR.select(chunks, request, evidence)
        positions = positions_of(chunks)[selection.chosen].sort().values
        PassSequence.of_row(ids, ids, positions)

    def timed() -> float:
        # other work of the machine does not count
        started = time.thread_time()
        choose()
        return time.thread_time() - started

    num_threads = torch.get_num_threads()
    # One: others would spin on cores that a busy machine does not give them.
    torch.set_num_threads(1)
    try:
        total = min(timed() for _ in range(REPEATS))
        with _Calls() as calls:
            choose()
            python = []
            for _ in range(REPEATS):
                calls.replay()
                python.append(timed())
    finally:
        torch.set_num_threads(num_threads)
    return ChoiceTime(total, min(python))
