"""Every reason why KV cannot be moved, one by one, and a real engine's model, which has none.

Server arguments, pool, attention and rotary modules are SGLang's own; the runner around them is a
fake whose attributes are compared with a real one's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_chunkcache.fusion.model_support import unsupported

pytestmark = pytest.mark.matrix

NUM_LAYERS, HEAD_DIM = 2, 16
SIZES = ("page", "tp", "pp", "attn_dp", "attn_cp", "attn_dcp")


class Module(torch.nn.Module):
    """Attributes by keyword."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def make_rotary(base: int = 10000, **options: Any) -> Any:
    return get_rope(HEAD_DIM, HEAD_DIM, 64, base, dtype=torch.bfloat16, **options)


def make_model() -> Module:
    """As deep as is looked into, of SGLang's own parts."""
    rotary = make_rotary()
    parts = [RadixAttention(4, HEAD_DIM, 0.25, 2, layer_id=i) for i in range(NUM_LAYERS)]
    layers = [Module(self_attn=Module(rotary_emb=rotary, attn=attn)) for attn in parts]
    return Module(model=Module(layers=torch.nn.ModuleList(layers)))


def make_pool(dtype: torch.dtype = torch.bfloat16) -> Any:
    return MHATokenToKVPool(7, 1, dtype, 2, HEAD_DIM, NUM_LAYERS, "cpu", False)


def make_runner(pool: Any = None, **changes: Any) -> Any:
    """With nothing against it but `changes`: attributes that exist, by dotted path with layer
    numbers."""
    flags = ("is_encoder_decoder", "is_multimodal", "use_ngram_embedding")
    config = dict.fromkeys(flags, False) | {"attention_chunk_size": None, "is_generation": True}
    runner = SimpleNamespace(
        **{f"{name}_size": 1 for name in SIZES},
        spec_algorithm=SpeculativeAlgorithm.NONE,
        lora_manager=None,
        use_mla_backend=False,
        is_hybrid_swa=False,
        model_config=SimpleNamespace(**config),
        token_to_kv_pool=pool or make_pool(),
        model=make_model(),
    )
    for path, value in changes.items():
        put(runner, path, value)
    return runner


def reasons(*args: Any, **changes: Any) -> list[str]:
    return unsupported(make_runner(*args, **changes), make_args())


def make_args(**changed: Any) -> Any:
    """SGLang's own, with its defaults."""
    args = ServerArgs(model_path="none")
    for name, value in changed.items():
        assert hasattr(args, name)
        setattr(args, name, value)
    return args


def put(root: Any, path: str, value: Any) -> None:
    """Set an attribute that exists, by dotted path with layer numbers."""
    *owners, name = path.split(".")
    for owner in owners:
        root = root[int(owner)] if owner.isdigit() else getattr(root, owner)
    assert hasattr(root, name), path
    if isinstance(root, torch.nn.Module):
        root._modules.pop(name, None)  # or a value that is no module would be refused
    setattr(root, name, value)


FLAGS: list[tuple[str, object, str]] = [
    ("lora_paths", ["a"], "--enable-lora"),
    ("cpu_offload_gb", 1, "--cpu-offload-gb"),
    ("offload_group_size", 1, "--offload-group-size"),
    ("kv_canary", "log", "--kv-canary"),
    ("disaggregation_mode", "prefill", "--disaggregation-mode"),
    ("quantization_param_path", "x", "--quantization-param-path (scales of quantised KV)"),
    *(
        (name, "x", "--" + name.replace("_", "-"))
        for name in (
            *("enable_lora", "speculative_algorithm", "dllm_algorithm", "rl_on_policy_target"),
            *("enable_dp_attention", "enable_two_batch_overlap", "enable_pdmux", "is_embedding"),
            *("enable_deterministic_inference", "enable_mixed_chunk", "enable_hierarchical_cache"),
            *("enable_lmcache", "enable_flexkv", "enable_hisparse", "enable_unified_memory"),
            *("enable_streaming_session", "enable_return_routed_experts"),
        )
    ),
]


def test_flags() -> None:
    for name, value, reason in FLAGS:
        assert unsupported(make_runner(), make_args(**{name: value})) == [reason]


ATTN, POOL, CONFIG = "model.model.layers.{}.self_attn.attn.", "token_to_kv_pool.", "model_config."
ROTARY = "model.model.layers.{}.self_attn.rotary_emb"
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
REASONS: list[tuple[str, object, str]] = [
    *((f"{name}_size", 16, "size 16, not 1") for name in SIZES),
    ("spec_algorithm", SpeculativeAlgorithm.EAGLE, "speculative decoding"),
    ("lora_manager", "a manager", "LoRA"),
    ("use_mla_backend", True, "MLA"),
    ("is_hybrid_swa", True, "hybrid SWA"),
    (f"{CONFIG}attention_chunk_size", 8192, "attention in chunks"),
    (f"{CONFIG}is_encoder_decoder", True, "an encoder-decoder model"),
    (f"{CONFIG}is_multimodal", True, "a multimodal model"),
    (f"{CONFIG}is_generation", False, "an embedding model"),
    (f"{CONFIG}use_ngram_embedding", True, "n-gram embeddings"),
    # layers that share their KV have fewer pools
    (f"{POOL}layer_num", 1, "2 layers in the model, 1 in the KV pool"),
    (f"{POOL}quant_method", SimpleNamespace(name="fp4"), "quantised KV (fp4)"),
    (f"{POOL}post_capture_active", True, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    (f"{POOL}kv_cache_layout", "hnd", "KV layout hnd, not nhd"),
    (f"{POOL}kv_cache_layout", "vectorized_5d", "KV layout vectorized_5d, not nhd"),
    (f"{POOL}layer_transfer_counter", "a counter", "KV loaded layer by layer by others"),
    # in any layer but the first, too; it is named
    (f"{ATTN}sliding_window_size", 4096, "sliding window 4096 (layer 1)"),
    (f"{ATTN}logit_cap", 50.0, "logit cap 50.0 (layer 1)"),
    (f"{ATTN}is_cross_attention", True, "not a decoder's own (layer 1)"),
    (f"{ATTN}attn_type", AttentionType.ENCODER_ONLY, "not a decoder's own (layer 1)"),
    (f"{ATTN}use_irope", True, "iRoPE (attention in chunks) (layer 1)"),
    (f"{ATTN}pos_encoding_mode", "ALIBI", "positions inside attention (ALIBI) (layer 1)"),
    (f"{ATTN}xai_temperature_len", 1024, "attention temperature by length (1024) (layer 1)"),
    (f"{ATTN}k_scale_float", 0.5, "scaled KV (k 0.5, v None) (layer 1)"),
    (f"{ATTN}v_scale_float", 0.5, "scaled KV (k None, v 0.5) (layer 1)"),
    (f"{ATTN}layer_id", 7, "layers are not numbered from 0 (layer 1)"),
    (f"{ATTN}head_dim", 32, "rotary head size 16, attention 32 (layer 1)"),
    (ATTN[:-1], Module(), "self_attn.attn is Module, not RadixAttention (layer 1)"),
    # ALiBi, absolute positions, and layers without any (NoPE)
    (ROTARY, None, "no self_attn.rotary_emb (layer 1)"),
    # Gemma 3 and others have one for local and one for global layers
    (ROTARY, make_rotary(1000000), "another rotary embedding than layer 0 (layer 1)"),
]


def test_reasons() -> None:
    for path, value, reason in REASONS:
        (found,) = reasons(**{path.format(1): value})
        assert reason in found


def test_nothing_is_against_a_plain_model() -> None:
    """Nor a scale of one, which checkpoints with quantised weights carry."""
    assert reasons() == reasons(**{f"{ATTN.format(0)}k_scale_float": 1.0}) == []


def test_reason_of_all_layers_is_given_once() -> None:
    capped = {f"{ATTN.format(layer)}logit_cap": 30.0 for layer in range(NUM_LAYERS)}
    assert reasons(**capped) == ["attention logit cap 30.0 (layer 0)"]
    mrope = make_rotary(rope_scaling=MROPE)
    other = {ROTARY.format(layer): mrope for layer in range(NUM_LAYERS)}
    assert reasons(**other) == ["rotary embedding MRotaryEmbedding (layer 0)"]


def test_pool() -> None:
    """Exactly the one class: MLA, SWA, hybrid and FP4 pools have their own."""
    page_major = PageMajor(7, 1, torch.bfloat16, 2, HEAD_DIM, NUM_LAYERS, "cpu", False)
    assert reasons(page_major) == ["KV pool PageMajor, not MHATokenToKVPool"]
    assert reasons(SimpleNamespace())[0] == "KV pool SimpleNamespace, not MHATokenToKVPool"
    assert reasons(make_pool(torch.float8_e4m3fn)) == ["--kv-cache-dtype torch.float8_e4m3fn"]


class PageMajor(MHATokenToKVPool):  # type: ignore[misc]
    """A subclass may lay its rows out otherwise."""


@pytest.mark.parametrize("name", ["sinks", "attention_sink_bias"])
def test_attention_sinks(name: str) -> None:
    """By the names GPT-OSS and MiMo give them. All reasons are told, not one at each start."""
    runner = make_runner(tp_size=2)
    attention = runner.model.model.layers[1].self_attn
    attention.register_parameter(name, torch.nn.Parameter(torch.zeros(4)))
    found = unsupported(runner, make_args(enable_lora=True))
    assert len(found) == 3
    assert found[-1] == f"attention sinks ({name}) (layer 1)"


@pytest.mark.parametrize("path", ["model", "model.layers", "model.layers.0.self_attn"])
def test_unknown_model(path: str) -> None:
    assert reasons(**{f"model.{path}": None})


@pytest.mark.engine
def test_runner_of_a_real_model() -> None:
    from tests import models

    real, fake = models.runner("llama"), make_runner()
    assert unsupported(real, real.server_args) == []
    homes = (real, get_parallel())
    assert [name for name in vars(fake) if not any(hasattr(home, name) for home in homes)] == []
    assert [name for name in vars(fake.model_config) if not hasattr(real.model_config, name)] == []
