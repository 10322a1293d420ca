"""Host time of choosing tokens, taken here: the code that serves a request, on made evidence."""

from __future__ import annotations

import time

import torch

from eval.roofline.model import CHUNK_TOKENS, Prompt
from radix_ext import ChunkId, FusionRequest
from sglang_chunkcache.attention.base import PassSequence
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, positions_of
from sglang_chunkcache.fusion.selectors.critical import SELECTOR

REPEATS = 3


def choice_s(prompt: Prompt) -> float:
    """CPU seconds, the least of some: proposed, chosen, listed, laid into a pass."""
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
        positions = positions_of(chunks)[selection.tokens].sort().values
        PassSequence.of_row(ids, ids, positions)

    times, num_threads = [], torch.get_num_threads()
    # One: others would spin on cores that a busy machine does not give them.
    torch.set_num_threads(1)
    try:
        for _ in range(REPEATS):
            # other work of the machine does not count
            started = time.thread_time()
            choose()
            times.append(time.thread_time() - started)
    finally:
        torch.set_num_threads(num_threads)
    return min(times)
