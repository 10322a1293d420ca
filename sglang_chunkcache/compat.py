"""What SGLang's releases name differently. The rest of the package speaks the newest release's
language; here older ones are translated into it. No other file knows releases apart, and this one
asks for features, never for a version.

    0.5.21                                   from 0.5.22 on
    cache_unfinished_req, insert_req         checkpoint
    MatchResult.device_indices: slots        device_prefix_len, path_device_indices(node)
    init_load_back gives slots               their number; prefix_device_indices(req) has them
    what it gave is the tree's               or the request's: load_back_is_cache_owned
    to_finish                                discard_output_reason
    InsertParams.chunked: nothing is a hit   inserted_len: what is inserted already is none
    model runner: tp_group, tp_size ...      get_parallel(): the same names
    KV events say no adapter                 in the format `dynamo`
    their publisher binds by its address     or by `bind`
    batches told again come without a topic  with it, as all others

    until 0.5.22                             from 0.5.23 on
    MHATokenToKVPoolHost of a device pool    of the pool's description of itself
    get_mha_kv_pool_cls() of a platform      get_kv_pool_cls(kind): cpu/platform.py answers both

From 0.5.22 on slots in pages need no Triton: until then cpu/allocator.py has them. Of the new life
cycle `finish_external_linker_loads` is SGLang's own: it is called for a linker, and one of these
comes with SGLang's tree.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.disaggregation.kv_events import KVEventsConfig
from sglang.srt.mem_cache.allocator import paged
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchResult
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
    BreakableCudaGraphBackend,
)
from sglang.srt.runtime_context import get_parallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req

PAGES_WITHOUT_TRITON = hasattr(paged, "alloc_decode_naive")
"""Whether SGLang's allocator of pages runs on a CPU. And then a platform's is asked for pages
only, before for all slots."""
KNOWS_SLOTS = "device_indices" in MatchResult._fields
"""Whether a match names its slots, and a request keeps them."""
COUNTS_BY_PIECE = hasattr(InsertParams, "chunked")
"""Whether a request's nodes count a hit or none, not those alone that it had not inserted yet."""
EVENT_FORMAT = {"format": "dynamo"} if "format" in KVEventsConfig.model_fields else {}
"""Of KV events that say adapters, and whose hashes tell an `extra_key`."""
END_OF_REPLAY = b"\xff" * 8
"""Where a batch's number would be."""


class Tree21(RadixCache):  # type: ignore[misc]
    """0.5.21's, called by the names of later releases."""

    _as_called: Callable[[], None]

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        self._as_called = partial(super().cache_unfinished_req, req, chunked=chunked)
        up_to = len(req.get_fill_ids())
        self.checkpoint(req, up_to=up_to)
        if len(req.prefix_indices) < up_to:  # the tree took nothing: the next piece goes on here
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to]
            req.prefix_indices = row.to(dtype=torch.int64, copy=True)

    def insert_req(self, req: Req, *, up_to: int) -> None:
        self._as_called = partial(super().insert_req, req, up_to=up_to)
        self.checkpoint(req, up_to=up_to)

    def checkpoint(self, req: Req, *, up_to: int) -> None:
        """Insert the request's KV up to here; as often as it is called, and once at its end."""
        self._as_called()

    def path_device_indices(self, node: TreeNode) -> torch.Tensor:
        values = []
        while node is not self.root_node:
            values.append(node.value)
            node = node.parent
        empty = torch.empty((0,), dtype=torch.int64, device=self.device)
        return torch.cat(values[::-1]) if values else empty


Tree: type[Any] = RadixCache if hasattr(RadixCache, "checkpoint") else Tree21


def add_segment(
    tree: Any, node: TreeNode, key: Any, values: torch.Tensor, priority: int, *, is_hit: bool
) -> tuple[int, TreeNode]:
    """SGLang's `_insert_helper`, with a hit for every node or for none."""
    counted: bool | int = not is_hit if COUNTS_BY_PIECE else (0 if is_hit else len(key))
    return tree._insert_helper(node, key, values, priority, counted)  # type: ignore[no-any-return]


def num_matched(result: MatchResult) -> int:
    """Tokens that are in the tree."""
    return len(result.device_indices) if KNOWS_SLOTS else int(result.device_prefix_len)


def rematched(
    tree: Any, result: MatchResult, node: TreeNode, num_tokens: int, *, host_hit_length: int = 0
) -> MatchResult:
    """The match, ending at this node after so many tokens."""
    found: dict[str, Any] = {}
    if not KNOWS_SLOTS:
        found["device_prefix_len"] = num_tokens
    elif node is not result.last_device_node:
        found["device_indices"] = tree.path_device_indices(node)
    return result._replace(
        **found,
        last_device_node=node,
        last_host_node=node,
        best_match_node=node,
        host_hit_length=host_hit_length,
    )


def loaded(tree: Any, slots: torch.Tensor | None, node: TreeNode) -> tuple[Any, TreeNode]:
    """What `init_load_back` gives. `slots`: None for none."""
    if not KNOWS_SLOTS:
        return 0 if slots is None else len(slots), node
    if slots is None:  # SGLang joins them with those of the device
        slots = torch.empty((0,), dtype=torch.int64, device=tree.device)
    return slots, node


def keep_own(req: Req, num_matched: int) -> None:
    """What `init_load_back` gave is the request's own, where SGLang cannot ask whose it is."""
    if KNOWS_SLOTS:
        req.kv.cache_protected_len = num_matched


def drop_output(req: Req, message: str) -> None:
    """The request's client gets this error instead of what the next forward gives."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE)
    name = "discard_output_reason" if hasattr(req, "discard_output_reason") else "to_finish"
    setattr(req, name, reason)


def parallel(runner: Any, name: str) -> Any:
    """How this process shares the model with others: `tp_group`, `tp_size` and the like."""
    return getattr(runner if hasattr(runner, name) else get_parallel(), name)


def create_host_pool(device_pool: Any, num_bytes: int, *, pin_memory: bool, label: str) -> Any:
    """HiCache's host pool, a token a page."""
    of, more = device_pool, {}
    if hasattr(device_pool, "get_device_pool_infos"):
        of = device_pool.get_device_pool_infos()[0].buffer_info
        more = {name: getattr(device_pool, name) for name in ("start_layer", "end_layer")}
        more["device_capacity_tokens"] = device_pool.size
    how = {"pin_memory": pin_memory, "pool_label": label, **more}
    return MHATokenToKVPoolHost(of, 0.0, num_bytes / 1e9, 1, "layer_first", **how)


def bind_slots(runner: Any, batch: Any) -> None:
    """From 0.5.23 on a batch says how the runner's pool names its slots: some attention backends of
    SGLang's, and its graphs, ask it."""
    bind = getattr(runner.kv_index_translator, "bind_own_plan", None)
    if bind is not None:
        bind(batch)


def replayed(runner: Any, backend: Any, batch: Any) -> torch.Tensor | None:
    """What the runner's inner model gives for the batch under this attention backend, [n,
    hidden_size], from the graph that SGLang has captured for prefills of so many rows: between its
    segments attention is called as ever. Further rows are padding, which no backend sees, and whose
    slot is 0. None: no such graph was captured.

    SGLang's own `execute` is more: it tells the scheduler that a forward has read its tables."""
    graphs = runner.prefill_cuda_graph_runner
    if not isinstance(getattr(graphs, "backend", None), BreakableCudaGraphBackend):
        return None
    # more sequences than requests may run have no room in what a graph reads
    if batch.batch_size > graphs.max_bs or not graphs.can_run_graph(batch):
        return None
    num_tokens, before, raised = len(batch.input_ids), runner.attn_backend, None
    runner.attn_backend = backend  # which the replay asks for it
    try:
        with ExitStack() as contexts:
            if hasattr(graphs, "model_context"):  # from 0.5.23 on, whose batch comes with more
                contexts.enter_context(graphs.model_context())
            contexts.enter_context(graphs.backend.replay_session())
            bind_slots(runner, batch)
            loaded = graphs.load_batch(batch)
            padded = loaded[0] if isinstance(loaded, tuple) else loaded
            rows = len(padded.input_ids)
            contexts.enter_context(
                graphs._prefill_forward_context(padded, num_tokens=rows, raw_num_tokens=num_tokens)
            )
            try:
                hidden = graphs.backend.replay(graphs._shape_key(rows, batch), padded)
            except Exception as error:  # a context would tell users to switch graphs off
                raised = error
    finally:
        runner.attn_backend = before
    if raised is not None:
        raise raised
    # a copy: the next replay writes the same rows
    return hidden[:num_tokens].clone()  # type: ignore[no-any-return]


def tells_adapter(config: KVEventsConfig) -> bool:
    """Whether KV events by this configuration say the adapter's name."""
    return bool(config.model_dump().get("format") == "dynamo")


def says_bound(config: KVEventsConfig) -> bool | None:
    """Whether the publisher is told to bind its address. None: the address decides."""
    is_bound: bool | None = config.model_dump().get("bind")
    return is_bound


def replayed_batch(frames: list[bytes]) -> tuple[int, bytes] | None:
    """A KV event batch that was asked for again: its number and itself. None: it was the last."""
    if len(frames) < 2 or frames[-2] == END_OF_REPLAY:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]


def dcp_size(args: Any) -> int:
    """Ranks of decode context parallelism, each with a part of a page. 1 where there is none."""
    return int(getattr(args, "dcp_size", None) or 1)
