"""The entry point that SGLang loads (group `sglang.srt.plugins`), in the main process and in every
scheduler.

SGLang logs a plugin's exception and continues without the plugin. Three checks stop the start in
that case: the launcher asks which hooks are in, it selects the cache by name, so that a scheduler
without it does not start, and a start-up check asks every rank for our stats.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

from sglang_chunkcache import config

logger = logging.getLogger(__name__)

BACKEND = "cp_tree"
"""Name of our cache for `--radix-cache-backend` (chunk-prefix tree)."""

PYTHON_TREE = "python_radix"
"""SGLang's own Python `RadixCache`, unchanged: the base class of our cache, for `--stock`.
SGLang's default is another."""


def register() -> None:
    """Register cache and hooks; in the main process of our launcher also the HTTP endpoints."""
    # Not at the top: launch_server reads `BACKEND` before SGLang may be imported.
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from sglang_chunkcache.cpu.platform import activate
    from sglang_chunkcache.hooks import register_hooks

    register_radix_cache_backend(BACKEND, create_cache)
    register_radix_cache_backend(PYTHON_TREE, create_python_tree)
    # With a GPU the name belongs to SGLang's own backend.
    if activate() is not None:
        register_attention_backend("torch_native")(create_cpu_attention)
    settings = config.from_env()
    front = None
    # Schedulers and the detokenizer are spawned, and serve no HTTP.
    if settings is not None and multiprocessing.parent_process() is None:
        from sglang_chunkcache.front.app import install

        front = install(settings)
    register_hooks(settings, front)


def create_cpu_attention(runner: Any) -> Any:
    """SGLang's CPU attention without its padding.
    Imported late: the registry calls this once the model is loaded."""
    from sglang_chunkcache.attention.slot_map import MappedPool
    from sglang_chunkcache.cpu.attention import create

    if isinstance(runner.token_to_kv_pool, MappedPool):
        from sglang_chunkcache.cpu.one_copy import OneCopyAttention

        return OneCopyAttention(runner)
    return create(runner)


def create_cache(ctx: Any) -> Any:
    """Build the cache of one scheduler from SGLang's `TreeCacheBuildContext`.

    Raises:
        RuntimeError: the server was not started by our launcher, or SGLang did not apply a hook.
            Stops the start.
        ValueError: the model or a flag is not supported; names it.
    """
    from sglang_chunkcache.attention.slot_map import MappedPool
    from sglang_chunkcache.build import create_tiers
    from sglang_chunkcache.hooks import missing_hooks
    from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache
    from sglang_chunkcache.scheduler.one_copy import OneCopyRadixCache
    from sglang_chunkcache.scheduler.paged_cache import PagedRadixCache

    settings = config.from_env()
    if settings is None:
        raise RuntimeError(
            f"--radix-cache-backend {BACKEND} needs `python -m sglang_chunkcache.launch_server`,"
            " which sets it"
        )
    # Each process patches SGLang for itself: the launcher's check says nothing of this one.
    if missing := missing_hooks(settings, is_main=False):
        raise RuntimeError(f"SGLang did not apply our hooks {missing}; the log above has the cause")
    # the launcher has asked SGLang's configuration of the model, this is the model itself
    allocator = type(ctx.params.token_to_kv_pool_allocator).__name__
    if "SWA" in allocator or "Hybrid" in type(ctx.params.req_to_token_pool).__name__:
        raise ValueError(
            f"{config.flag_name('tree')} stock serves this model (KV allocator {allocator})"
        )
    kind = ChunkRadixCache if ctx.params.page_size == 1 else PagedRadixCache
    if isinstance(ctx.params.token_to_kv_pool_allocator.get_kvcache(), MappedPool):
        kind = OneCopyRadixCache
    return kind(
        ctx.params,
        settings,
        lambda tree: create_tiers(tree, ctx, settings),
        _rank_of(ctx.server_args),
    )


def _rank_of(args: Any) -> Callable[[Any], float]:
    """A request's priority, the more the sooner, as SGLang's arguments say."""
    if not args.enable_priority_scheduling:
        return lambda req: 0
    sign = -1 if args.schedule_low_priority_values_first else 1
    return lambda req: sign * req.priority


def create_python_tree(ctx: Any) -> Any:
    """SGLang's `RadixCache` as it is, for comparison."""
    from sglang.srt.mem_cache.radix_cache import RadixCache

    return RadixCache(ctx.params)
