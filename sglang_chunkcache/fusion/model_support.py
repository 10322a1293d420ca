"""Why a server cannot move KV: asked once, when the cache is built, so that it is refused by name
at the start.

Moving needs plain keys, rotated by one table, in rows of their own. Recomputing needs attention
that is softmax(q k) v over all earlier tokens and nothing else, in a model that runs on one rank
without other passes. A model that is not known to be so is refused. What a class does inside its
`forward` is not seen here: the start-up gate (gate.py) computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from sglang_chunkcache import compat
from sglang_chunkcache.fusion.relocate import DTYPES, ROTARY_CLASSES
from sglang_chunkcache.scheduler.host_memory import POST_CAPTURE
from sglang_chunkcache.scheduler.layer_loads import LayerLoads

POOL_CLASSES = ("MHATokenToKVPool", "OneCopyPool")
"""SGLang's, and ours of it (cpu/one_copy.py)."""
ATTENTION_CLASS = "RadixAttention"


def unsupported(model_runner: Any, server_args: Any) -> list[str]:
    """Every reason, named by flag or property, why fused mode cannot be; empty if it can.

    Args:
        model_runner: SGLang's ModelRunner with model and pools made; only read.
        server_args: SGLang's ServerArgs as given; what SGLang resolves later is read from the
            runner.
    """
    return [
        *_flags(server_args),
        *_runner(model_runner),
        *_pool(model_runner.token_to_kv_pool),
        *_model(model_runner),
    ]


def _flags(args: Any) -> Iterator[str]:
    """What the server was started with."""
    checks = {
        "--enable-lora": args.enable_lora or args.lora_paths,
        "--speculative-algorithm": args.speculative_algorithm,
        "--enable-dp-attention": args.enable_dp_attention,
        "--disaggregation-mode": args.disaggregation_mode not in (None, "null"),
        "--dllm-algorithm": args.dllm_algorithm,
        "--enable-two-batch-overlap": args.enable_two_batch_overlap,
        "--enable-pdmux": args.enable_pdmux,
        "--enable-deterministic-inference": args.enable_deterministic_inference,
        "--rl-on-policy-target": args.rl_on_policy_target,
        # Not known to break; batches of prefill and decode in one have not been run.
        "--enable-mixed-chunk": args.enable_mixed_chunk,
        "--enable-hierarchical-cache": args.enable_hierarchical_cache,
        "--enable-lmcache": args.enable_lmcache,
        "--enable-flexkv": args.enable_flexkv,
        "--enable-hisparse": args.enable_hisparse,
        "--enable-unified-memory": args.enable_unified_memory,
        "--enable-streaming-session": args.enable_streaming_session,
        "--is-embedding": args.is_embedding,
        # A pass that an observer ends leaves a layer without its hook, and the next forward fails.
        "--cpu-offload-gb": args.cpu_offload_gb,
        "--offload-group-size": args.offload_group_size > 0,
        # Both are told of KV by SGLang's forwards alone: moved tokens would have another's experts,
        # and count as corrupt.
        "--enable-return-routed-experts": args.enable_return_routed_experts,
        "--kv-canary": args.kv_canary != "none",
        "--quantization-param-path (scales of quantised KV)": args.quantization_param_path,
    }
    yield from (name for name, refused in checks.items() if refused)


def _runner(runner: Any) -> Iterator[str]:
    """What SGLang has made of flags and model."""
    config = runner.model_config
    sizes = {
        "page size": runner.page_size,
        "tensor parallel size": compat.parallel(runner, "tp_size"),
        "pipeline parallel size": compat.parallel(runner, "pp_size"),
        "attention data parallel size": compat.parallel(runner, "attn_dp_size"),
        "attention context parallel size": compat.parallel(runner, "attn_cp_size"),
        "decode context parallel size": compat.parallel(runner, "attn_dcp_size"),
    }
    yield from (f"{name} {size}, not 1" for name, size in sizes.items() if size > 1)
    checks = {
        "speculative decoding": not runner.spec_algorithm.is_none(),
        "LoRA": runner.lora_manager is not None,
        "MLA": runner.use_mla_backend,
        "sliding-window layers (hybrid SWA)": runner.is_hybrid_swa,
        "attention in chunks (attention_chunk_size)": config.attention_chunk_size,
        "an encoder-decoder model": config.is_encoder_decoder,
        "a multimodal model": config.is_multimodal,
        "an embedding model": not config.is_generation,
        "n-gram embeddings (a token's keys depend on its neighbours)": config.use_ngram_embedding,
    }
    yield from (name for name, refused in checks.items() if refused)


def _pool(pool: Any) -> Iterator[str]:
    # By its exact name: SGLang's subclasses keep KV in other layouts or dtypes (NPU, FP4, MXFP8).
    if type(pool).__name__ not in POOL_CLASSES:
        yield f"KV pool {type(pool).__name__}, not {POOL_CLASSES[0]}"
        return
    if pool.dtype not in DTYPES:
        yield f"--kv-cache-dtype {pool.dtype}"
    if pool.is_quantized_kv_cache:
        yield f"quantised KV ({pool.quant_method.name})"
    if pool.post_capture_active:
        yield f"{POST_CAPTURE} (our passes need the memory that it gives to the KV pool)"
    if pool.kv_cache_layout != "nhd":
        yield f"KV layout {pool.kv_cache_layout}, not nhd"
    # A pool has one counter: `LayerLoads` would take another's place.
    if not isinstance(pool.layer_transfer_counter, LayerLoads | None):
        yield "KV loaded layer by layer by others"


def _model(runner: Any) -> Iterator[str]:
    model, pool = runner.model, runner.token_to_kv_pool
    layers = list(dict(model.named_modules()).get("model.layers", nn.ModuleList()))
    if not layers:
        yield f"{type(model).__name__} has no model.layers"
        return
    if type(pool).__name__ in POOL_CLASSES and len(layers) != pool.layer_num:
        yield f"{len(layers)} layers in the model, {pool.layer_num} in the KV pool"
    first_at: dict[str, int] = {}
    parts = [dict(layer.named_modules()) for layer in layers]
    for index, modules in enumerate(parts):
        first_rotary = parts[0].get("self_attn.rotary_emb")
        for reason in (*_rotary(modules, first_rotary), *_attention(modules, index)):
            first_at.setdefault(reason, index)  # once, not in each of the layers
    yield from (f"{reason} (layer {index})" for reason, index in first_at.items())


def _rotary(modules: Mapping[str, nn.Module], first: nn.Module | None) -> Iterator[str]:
    rotary: Any = modules.get("self_attn.rotary_emb")
    radix: Any = modules.get("self_attn.attn")
    if rotary is None:
        yield "no self_attn.rotary_emb"
    elif type(rotary).__name__ not in ROTARY_CLASSES:
        yield f"rotary embedding {type(rotary).__name__}"
    # SGLang's `get_rope` gives layers with equal parameters one module.
    elif rotary is not first and first is not None:
        yield "another rotary embedding than layer 0"
    elif type(radix).__name__ == ATTENTION_CLASS and rotary.head_size != radix.head_dim:
        yield f"rotary head size {rotary.head_size}, attention {radix.head_dim}"


def _attention(modules: Mapping[str, nn.Module], index: int) -> Iterator[str]:
    """What our masked attention would leave out."""
    radix: Any = modules.get("self_attn.attn")
    if type(radix).__name__ != ATTENTION_CLASS:
        yield f"self_attn.attn is {type(radix).__name__}, not {ATTENTION_CLASS}"
        return
    if radix.layer_id != index:
        yield "layers are not numbered from 0"
    if radix.sliding_window_size > -1:
        yield f"sliding window {radix.sliding_window_size}"
    if radix.logit_cap:
        yield f"attention logit cap {radix.logit_cap}"
    if radix.is_cross_attention or radix.attn_type.value != "decoder":
        yield "attention that is not a decoder's own"
    if radix.use_irope:
        yield "iRoPE (attention in chunks)"
    if radix.pos_encoding_mode != "NONE":
        yield f"positions inside attention ({radix.pos_encoding_mode})"
    if radix.xai_temperature_len > 0:
        yield f"attention temperature by length ({radix.xai_temperature_len})"
    if any(scale not in (None, 1.0) for scale in (radix.k_scale_float, radix.v_scale_float)):
        yield f"scaled KV (k {radix.k_scale_float}, v {radix.v_scale_float})"
    # Sinks are arguments of the layer's `forward`; only a parameter's name tells of them here.
    if sinks := [name for name, _ in modules["self_attn"].named_parameters() if "sink" in name]:
        yield f"attention sinks ({sinks[0]})"
