"""SGLang's own runner of prefill graphs on a CPU, which captures none: in place of a captured graph
the model's body runs over the buffers that a graph reads, padded as SGLang pads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.runner import prefill_cuda_graph_runner
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
    BreakableCudaGraphBackend,
)
from sglang.srt.runtime_context import get_exec
from torch import Tensor

BUCKETS = [16, 64, 128]


class EagerGraph(BreakableCudaGraphBackend):  # type: ignore[misc]
    """Replays by computing, and lists the sizes that it was asked for."""

    def __init__(self, runner: Any) -> None:
        self._model = runner.model.model
        self._forward = self._model.forward
        self.sizes = list[int]()
        self._given: dict[int, Tensor] = {}
        """Rows -> what a replay writes, again and again."""

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Tensor:
        batch = static_forward_batch
        self.sizes.append(shape_key.size)
        assert len(batch.input_ids) == shape_key.size
        with torch.no_grad():
            found = self._forward(batch.input_ids, batch.positions, batch)
        return self._given.setdefault(len(found), torch.empty_like(found)).copy_(found)


@contextmanager
def eager_graphs(runner: Any) -> Iterator[EagerGraph]:
    """The runner has prefill graphs of `BUCKETS` rows."""
    if not hasattr(RadixAttention, "_eager_attention"):
        pytest.skip("before 0.5.23 attention between a graph's segments is of CUDA alone")
    module, graph = prefill_cuda_graph_runner, EagerGraph(runner)
    config = get_exec().graph.cuda_graph_config.prefill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "backend", Backend.BREAKABLE)
        patch.setattr(config, "bs", BUCKETS)
        patch.setattr(module, "resolve_prefill_backend", lambda runner: graph)
        patch.setattr(module.PrefillCudaGraphRunner, "capture", lambda self: None)
        patch.setattr(runner, "prefill_cuda_graph_runner", runner.prefill_cuda_graph_runner)
        runner.init_prefill_cuda_graph()
        yield graph
