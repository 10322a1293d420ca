"""The rows behind promised regions as rows of the pass: the model runs once for a batch, not twice.

    pass      critical tokens and gaps of A, A's question | those of B, B's question
    forward   SGLang's: its inner model gives the questions' rows of the pass, of which it computes
              logits as ever

For batches of nothing else: each request is moved, its prompt ends in this forward, and none of its
chunks ends behind the promised region. In all others SGLang's own attention computes what follows
moved KV, as it computes what follows exact KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from radix_ext.moved_plan import MAX_TAIL_TOKENS
from sglang_chunkcache.fusion.choosing import ids_of
from sglang_chunkcache.fusion.move import Tail
from sglang_chunkcache.scheduler.node import state

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from radix_ext.moved_plan import ReusePlan


def tails_of(batch: ScheduleBatch, plans: Sequence[ReusePlan], max_tokens: int) -> list[Tail]:
    """Of the batch's requests, in its order, which is that of the plans. Empty: its forward has to
    compute them, or a pass with them would be larger than `max_tokens`."""
    if len(plans) != len(batch.reqs) or batch.forward_mode is not ForwardMode.EXTEND:
        return []
    num_tokens = sum(batch.extend_lens)
    num_others = sum(plan.recomputed_len + plan.gap_len for plan in plans)
    if not num_others:
        return []  # there is no pass to join
    if num_tokens > MAX_TAIL_TOKENS or num_tokens + num_others > max_tokens:
        return []
    tails = list[Tail]()
    slots = batch.out_cache_loc.split(batch.extend_lens)
    lens = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    for req, plan, (start, length), own in zip(batch.reqs, plans, lens, slots, strict=True):
        ids, spans = req.origin_input_ids[start:] + req.output_ids, state(req).spans
        ends = start == plan.end and length == len(ids)
        if not ends or spans is None or spans.spans[-1].end > start:
            return []
        tails.append(Tail(ids_of(ids), own))
    return tails


@contextmanager
def given(runner: Any, hidden: Tensor) -> Iterator[None]:
    """In the block the runner's inner model gives `hidden`, [n, hidden_size] of the batch's rows.
    A captured graph would not ask it."""
    inner, graphs = runner.model.model, runner.prefill_cuda_graph_runner
    compiled = vars(inner).get("forward")  # piecewise graphs have one of their own
    inner.forward = lambda *args, **kwargs: hidden  # hides the class's until it is deleted
    runner.prefill_cuda_graph_runner = None
    try:
        yield
    finally:
        del inner.forward
        if compiled is not None:
            inner.forward = compiled
        runner.prefill_cuda_graph_runner = graphs
