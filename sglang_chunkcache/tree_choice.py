"""Whose tree has the KV: `chunk` is ours, a node a chunk; `stock` is the one that SGLang takes by
itself. Decided once, in the main process, when SGLang has worked out its settings and before it
starts other processes.

In a stock tree the front does all that needs no KV of its own: it orders, leaves out what was
shown, keeps conversations and routes. SGLang matches the tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang_chunkcache.config import ChunkCacheConfig, flag_name


def refusals(args: Any) -> list[str]:
    """SGLang's settings with which the front cannot work, whosever the tree is."""
    checks = {
        "--tokenizer-worker-num > 1": (args.tokenizer_worker_num or 1) > 1,
        "--skip-tokenizer-init": args.skip_tokenizer_init,
    }
    return [name for name, refused in checks.items() if refused]


def stock_only(args: Any, model: Any, config: ChunkCacheConfig) -> list[str]:
    """What only SGLang's own trees serve. `model`: SGLang's ModelConfig."""
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    from sglang_chunkcache import compat
    from sglang_chunkcache.plugin import BACKEND

    # with decode context parallelism a page of the tree is one of each of its ranks
    dcp_size = compat.dcp_size(args)
    page_size = (args.page_size or 1) * dcp_size
    dcp = f" --dcp-size {dcp_size}" if dcp_size > 1 else ""
    checks = {
        # moved KV has slots of its own, one by one
        f"--page-size {args.page_size}{dcp}": page_size > 1 and config.reuse == "fused",
        "sliding-window attention": model.is_hybrid_swa,
        "hybrid attention": uses_ssm_state(model),
        "--disable-radix-cache": args.disable_radix_cache,
        "--radix-cache-backend": args.radix_cache_backend not in (None, BACKEND),
        "--speculative-algorithm": bool(args.speculative_algorithm),
        # a page of ours may have tokens of several chunks, which an event could not tell
        "--kv-events-config in pages": bool(args.kv_events_config) and page_size > 1,
        # its prefills are no forwards of our hook, before which rests of pages are copied
        "--enable-pdmux in pages": args.enable_pdmux and page_size > 1,
        "--enable-hierarchical-cache": args.enable_hierarchical_cache,
        "--enable-lmcache": args.enable_lmcache,
        "--enable-flexkv": args.enable_flexkv,
        "--enable-unified-cache-external-linker": args.enable_unified_cache_external_linker,
        "--enable-session-radix-cache": args.enable_session_radix_cache,
        "--enable-streaming-session": args.enable_streaming_session,
        "--radix-eviction-policy tlru": args.radix_eviction_policy == "tlru",
        "--disaggregation-mode": args.disaggregation_mode not in (None, "null"),
    }
    return [name for name, holds in checks.items() if holds]


def decided(config: ChunkCacheConfig, found: list[str]) -> ChunkCacheConfig:
    """The configuration with its tree. `found`: what `stock_only` says.

    Raises:
        ValueError: the tree that was asked for cannot serve this, or flags that need ours.
    """
    named = ", ".join(found)
    if config.tree == "chunk" and found:
        raise ValueError(f"{flag_name('tree')} chunk does not serve {named}")
    if config.tree == "chunk" or (config.tree == "auto" and not found):
        return dataclasses.replace(config, tree="chunk")
    needs_ours = {
        "--reuse fused": config.reuse == "fused",
        flag_name("host_mib"): bool(config.host_mib),
        flag_name("storage_backend"): config.storage_backend is not None,
    }
    if needing := [flag for flag, is_given in needs_ours.items() if is_given]:
        is_asked = config.tree == "stock"
        why = "and the flag says stock" if is_asked else f"which does not serve {named}"
        raise ValueError(f"{', '.join(needing)} needs {flag_name('tree')} chunk, {why}")
    if "--disaggregation-mode" in found:
        # prefill and decode servers make the prompt each for itself, and must make the same
        config = dataclasses.replace(config, order="retriever", is_paired=True)
    return dataclasses.replace(config, tree="stock")
