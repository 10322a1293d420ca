"""Fused reuse for one rank, from its configuration and the loaded model."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from radix_ext.moved_plan import Limits
from sglang_chunkcache.attention.slot_map import MappedPool
from sglang_chunkcache.config import ChunkCacheConfig, flag_name
from sglang_chunkcache.fusion.calibration_trial import Calibrator
from sglang_chunkcache.fusion.fill import FusionPass
from sglang_chunkcache.fusion.gate import GateFigures, gated_attention
from sglang_chunkcache.fusion.keeping import GAUGES
from sglang_chunkcache.fusion.model_support import unsupported
from sglang_chunkcache.fusion.price_trial import measure_costs
from sglang_chunkcache.fusion.promise import Fuser
from sglang_chunkcache.fusion.relocate import RotaryTable, rotary_of
from sglang_chunkcache.fusion.sharing import Sharing
from sglang_chunkcache.fusion.tier import StorageTier
from sglang_chunkcache.fusion.trial_rows import Means
from sglang_chunkcache.rank_metrics import NO_METRICS, RankMetrics
from sglang_chunkcache.scheduler.host_chains import HostChains
from sglang_chunkcache.scheduler.host_memory import HostMemory
from sglang_chunkcache.scheduler.host_nodes import HostCounts, HostNodes
from sglang_chunkcache.start_steps import step
from sglang_chunkcache.storage.codec import CODECS, Quantized
from sglang_chunkcache.storage.fingerprint import fingerprint
from sglang_chunkcache.storage.opening import create_index
from sglang_chunkcache.storage.storage import Storage

logger = logging.getLogger(__name__)


def create_fuser(
    ctx: Any,
    config: ChunkCacheConfig,
    memory: HostMemory,
    host_chains: HostChains,
    storage: Storage | None,
) -> Fuser:
    """Fused reuse, checked on the model it will serve. `ctx` is SGLang's TreeCacheBuildContext.

    Raises:
        ValueError: the model or a flag does not suit it, or the gate found it wrong; names what,
            with the figures.
    """
    runner, args, pricing = ctx.tp_worker.model_runner, ctx.server_args, host_chains.pricing
    if reasons := unsupported(runner, args):
        raise ValueError(f"--reuse fused is not supported with {', '.join(reasons)}")
    pool, codec = runner.token_to_kv_pool, CODECS[config.store_codec]
    if config.one_copy == "on" and not isinstance(pool, MappedPool):
        raise ValueError(
            f"{flag_name('one_copy')} on is served without a GPU only, from SGLang 0.5.22 on"
        )
    # Here, since a head that fills no whole bytes would otherwise fail with each capture.
    codec.check_heads(pool.k_buffer[0], pool.v_buffer[0])
    # One table for all layers: `unsupported` has refused models with several.
    table = RotaryTable.of(rotary_of(runner))
    # cuDNN compiles a plan for each shape it meets, in 40 ms, and keeps it. A masked pass has
    # another shape in nearly every request.
    torch.backends.cuda.enable_cudnn_sdp(False)
    means = Means(runner, table, ctx.params, None, config.question_window, pricing)
    step("kernels, start-up gate")
    sparse, attention, figures = gated_attention(means, config.recompute_attention)
    means = replace(means, sparse=sparse)
    logger.info("chunk cache: attention of the recompute pass: %s", attention)
    _judge(figures, attention["kind"], config.gate)
    # Without chunked prefill (-1) a batch is bounded by `max_prefill_tokens` alone.
    chunked = args.chunked_prefill_size if (args.chunked_prefill_size or 0) > 0 else None
    prefill_budget = chunked or args.max_prefill_tokens
    # The memory that SGLang leaves free is for the activations of one budget.
    config = replace(config, max_pass_tokens=config.max_pass_tokens or prefill_budget)
    limits = Limits(
        max_pass_tokens=config.max_pass_tokens,
        max_gap_tokens=config.max_gap_tokens,
        prefill_tokens=chunked,
        question_window=config.question_window,
        num_layers=pool.layer_num,
    )
    nodes = _nodes(config, memory, host_chains)
    has_chains = nodes is host_chains.nodes
    logger.info(
        "chunk cache: chunks that are moved in host memory: %.0f MiB, %s",
        nodes.index.held.max_bytes / (1 << 20),
        "exact chains included" if has_chains else f"in codec {codec.name}",
    )
    if config.move == "pays":
        step("measuring costs")
        started = time.perf_counter()
        longest = measure_costs(means, nodes, max_tokens=prefill_budget)
        if longest:
            pricing.start()
        else:
            logger.warning(
                "--reuse fused moves whatever it costs: the KV pool is too small to measure on"
            )
        logger.info(
            "chunk cache: costs measured in %.1f s on prompts of up to %d tokens",
            time.perf_counter() - started,
            longest,
        )
    # at ratio 0 there would be nothing to try choices with
    calibrator = Calibrator(means, config.recompute_ratio or 0.15)
    sharing = Sharing.of(pool, table, partial(host_chains.tree.make_room, 0))
    fusion_pass = FusionPass(runner, table, config, nodes, (sparse, attention), pricing, sharing)
    tier = None
    if storage is not None:
        tier = StorageTier(storage, nodes, max_gap_tokens=config.max_gap_tokens)
    # Weights may be away when the tree is reset, and cannot be read then.
    weights = (lambda: None) if args.enable_memory_saver else partial(fingerprint, runner.model)
    is_shown = args.enable_metrics
    fuser = Fuser(
        host_chains.tree,
        fusion_pass,
        limits,
        fingerprint=weights,
        calibrator=calibrator,
        tier=tier,
        in_host_memory=host_chains.write_back.takes if has_chains else None,
        gate=figures.as_dict(),
        metrics=RankMetrics("chunkcache:store_", GAUGES, {}) if is_shown else NO_METRICS,
    )
    # `Fuser` has told the storage which weights these are: before that it names no entry.
    if tier is not None:
        step("loading chunks from the storage")
        started = time.perf_counter()
        # what is in no chain leaves half of the pool to what is
        share = 0.5 if has_chains and memory.keeps_chains else 1.0
        num_loaded = tier.load_most_used(share=share)
        logger.info(
            "chunk cache: %d chunks loaded from the storage into the store in %.1f s",
            num_loaded,
            time.perf_counter() - started,
        )
    return fuser


def _nodes(config: ChunkCacheConfig, memory: HostMemory, host_chains: HostChains) -> HostNodes:
    """What has the KV of chunks that are moved: exact chains' pool, or a codec's own."""
    codec = CODECS[config.store_codec]
    if not isinstance(codec, Quantized):
        return host_chains.nodes
    pool = memory.create_store(codec)
    index = create_index(config, max(1, pool.num_bytes))
    return HostNodes(host_chains.tree, pool, index, HostCounts())


def _judge(figures: GateFigures, attention: str, policy: str) -> None:
    logger.info("chunk cache: start-up gate: %s", figures)
    if not figures.passed and policy == "refuse":
        raise ValueError(
            f"--reuse fused with {attention} attention: this model's answers would be wrong,"
            f" measured {figures}"
        )
    if not figures.conclusive:
        logger.warning(
            "--reuse fused: the gate cannot judge recomputation on this model (dummy weights?): %s",
            figures,
        )
