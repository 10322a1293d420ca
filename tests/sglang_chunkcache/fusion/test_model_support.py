"""Every reason why KV cannot be moved, one by one, and a real engine's model, which has none.

Server arguments, pool, attention and rotary modules are SGLang's own; the runner around them is a
fake whose attributes are compared with a real one's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_chunkcache.fusion.model_support import unsupported

NUM_LAYERS, HEAD_DIM = 2, 16


class Module(torch.nn.Module):
    """Attributes by keyword."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def make_model() -> Module:
    """As deep as is looked into, of SGLang's own parts."""
    rotary = get_rope(HEAD_DIM, HEAD_DIM, 64, 10000, dtype=torch.bfloat16)
    layers = [
        Module(
            self_attn=Module(
                rotary_emb=rotary, attn=RadixAttention(4, HEAD_DIM, 0.25, 2, layer_id=i)
            )
        )
        for i in range(NUM_LAYERS)
    ]
    return Module(model=Module(layers=torch.nn.ModuleList(layers)))


def make_pool(dtype: torch.dtype = torch.bfloat16) -> Any:
    return MHATokenToKVPool(7, 1, dtype, 2, HEAD_DIM, NUM_LAYERS, "cpu", False)


def make_runner() -> SimpleNamespace:
    """With nothing against it."""
    return SimpleNamespace(
        page_size=1,
        tp_size=1,
        pp_size=1,
        attn_dp_size=1,
        attn_cp_size=1,
        attn_dcp_size=1,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        lora_manager=None,
        use_mla_backend=False,
        is_hybrid_swa=False,
        model_config=SimpleNamespace(
            attention_chunk_size=None,
            is_encoder_decoder=False,
            is_multimodal=False,
            is_generation=True,
            use_ngram_embedding=False,
        ),
        token_to_kv_pool=make_pool(),
        model=make_model(),
    )


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


def test_nothing_against_a_plain_model() -> None:
    assert unsupported(make_runner(), make_args()) == []


def test_kv_written_by_the_rotary_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's Qwen3-MoE does so on CUDA in bfloat16:
    its K/V would go past our passes into a slot that is never read."""
    from sglang.srt.models import qwen3_moe

    runner = make_runner()
    runner.model.__class__ = type(
        "Qwen3MoeForCausalLM", (Module,), {"__module__": qwen3_moe.__name__}
    )
    assert unsupported(runner, make_args()) == []
    monkeypatch.setattr(runner.token_to_kv_pool, "device", "cuda")
    assert unsupported(runner, make_args()) == [
        "K/V written by the rotary kernel (Qwen3MoeForCausalLM)"
    ]
    runner.token_to_kv_pool.dtype = torch.float16
    assert unsupported(runner, make_args()) == []


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("enable_lora", True, "--enable-lora"),
        ("lora_paths", ["a"], "--enable-lora"),
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm"),
        ("enable_dp_attention", True, "--enable-dp-attention"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode"),
        ("disaggregation_mode", "decode", "--disaggregation-mode"),
        ("dllm_algorithm", "x", "--dllm-algorithm"),
        ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("enable_deterministic_inference", True, "--enable-deterministic-inference"),
        ("rl_on_policy_target", "fsdp", "--rl-on-policy-target"),
        ("enable_mixed_chunk", True, "--enable-mixed-chunk"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
        ("enable_lmcache", True, "--enable-lmcache"),
        ("enable_flexkv", True, "--enable-flexkv"),
        ("enable_hisparse", True, "--enable-hisparse"),
        ("enable_unified_memory", True, "--enable-unified-memory"),
        ("enable_streaming_session", True, "--enable-streaming-session"),
        ("is_embedding", True, "--is-embedding"),
        ("quantization_param_path", "x", "--quantization-param-path (scales of quantised KV)"),
    ],
)
def test_flag(name: str, value: object, reason: str) -> None:
    assert unsupported(make_runner(), make_args(**{name: value})) == [reason]


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("page_size", 16, "page size 16, not 1"),
        ("tp_size", 2, "tensor parallel size 2, not 1"),
        ("pp_size", 2, "pipeline parallel size 2, not 1"),
        ("attn_dp_size", 2, "attention data parallel size 2, not 1"),
        ("attn_cp_size", 2, "attention context parallel size 2, not 1"),
        ("attn_dcp_size", 2, "decode context parallel size 2, not 1"),
        ("spec_algorithm", SpeculativeAlgorithm.EAGLE, "speculative decoding"),
        ("lora_manager", object(), "LoRA"),
        ("use_mla_backend", True, "MLA"),
        ("is_hybrid_swa", True, "sliding-window layers (hybrid SWA)"),
        ("model_config.attention_chunk_size", 8192, "attention in chunks (attention_chunk_size)"),
        ("model_config.is_encoder_decoder", True, "an encoder-decoder model"),
        ("model_config.is_multimodal", True, "a multimodal model"),
        ("model_config.is_generation", False, "an embedding model"),
        (
            "model_config.use_ngram_embedding",
            True,
            "n-gram embeddings (a token's keys depend on its neighbours)",
        ),
    ],
)
def test_runner(path: str, value: object, reason: str) -> None:
    """What SGLang resolved, whatever flag or config led to it."""
    runner = make_runner()
    put(runner, path, value)
    assert unsupported(runner, make_args()) == [reason]


class PageMajor(MHATokenToKVPool):  # type: ignore[misc]
    """A subclass may lay its rows out otherwise."""


def test_pool_class() -> None:
    """Exactly the one class: MLA, SWA, hybrid and FP4 pools have their own."""
    runner = make_runner()
    runner.token_to_kv_pool = PageMajor(7, 1, torch.bfloat16, 2, HEAD_DIM, NUM_LAYERS, "cpu", False)
    assert unsupported(runner, make_args()) == ["KV pool PageMajor, not MHATokenToKVPool"]
    runner.token_to_kv_pool = SimpleNamespace()
    assert unsupported(runner, make_args())[0] == "KV pool SimpleNamespace, not MHATokenToKVPool"


def test_pool_dtype() -> None:
    runner = make_runner()
    runner.token_to_kv_pool = make_pool(torch.float8_e4m3fn)
    assert unsupported(runner, make_args()) == ["--kv-cache-dtype torch.float8_e4m3fn"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("quant_method", SimpleNamespace(name="fp4"), "quantised KV (fp4)"),
        ("kv_cache_layout", "hnd", "KV layout hnd, not nhd"),
        ("kv_cache_layout", "vectorized_5d", "KV layout vectorized_5d, not nhd"),
        ("layer_transfer_counter", object(), "KV loaded layer by layer by others"),
    ],
)
def test_pool(name: str, value: object, reason: str) -> None:
    runner = make_runner()
    put(runner.token_to_kv_pool, name, value)
    assert unsupported(runner, make_args()) == [reason]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("sliding_window_size", 4096, "sliding window 4096"),
        ("logit_cap", 50.0, "attention logit cap 50.0"),
        ("is_cross_attention", True, "attention that is not a decoder's own"),
        ("attn_type", AttentionType.ENCODER_ONLY, "attention that is not a decoder's own"),
        ("attn_type", AttentionType.DECODER_BIDIRECTIONAL, "attention that is not a decoder's own"),
        ("use_irope", True, "iRoPE (attention in chunks)"),
        ("pos_encoding_mode", "ALIBI", "positions inside attention (ALIBI)"),
        ("xai_temperature_len", 1024, "attention temperature by length (1024)"),
        ("k_scale_float", 0.5, "scaled KV (k 0.5, v None)"),
        ("v_scale_float", 0.5, "scaled KV (k None, v 0.5)"),
        ("layer_id", 7, "layers are not numbered from 0"),
        ("head_dim", 32, "rotary head size 16, attention 32"),
    ],
)
def test_attention(name: str, value: object, reason: str) -> None:
    """In any layer but the first, too; it is named."""
    runner = make_runner()
    put(runner.model, f"model.layers.1.self_attn.attn.{name}", value)
    assert unsupported(runner, make_args()) == [f"{reason} (layer 1)"]


def test_scale_of_one_is_none() -> None:
    """Checkpoints with quantised weights carry it, whatever the KV's dtype."""
    runner = make_runner()
    put(runner.model, "model.layers.0.self_attn.attn.k_scale_float", 1.0)
    assert unsupported(runner, make_args()) == []


def test_reason_is_given_once() -> None:
    """Of all layers that have it, the first."""
    runner = make_runner()
    for layer in range(NUM_LAYERS):
        put(runner.model, f"model.layers.{layer}.self_attn.attn.logit_cap", 30.0)
    assert unsupported(runner, make_args()) == ["attention logit cap 30.0 (layer 0)"]


@pytest.mark.parametrize("name", ["sinks", "attention_sink_bias", "learnable_sink_param"])
def test_attention_sinks(name: str) -> None:
    """By the names GPT-OSS, MiMo and Hunyuan give them."""
    runner = make_runner()
    attention = runner.model.model.layers[1].self_attn
    attention.register_parameter(name, torch.nn.Parameter(torch.zeros(4)))
    assert unsupported(runner, make_args()) == [f"attention sinks ({name}) (layer 1)"]


def test_no_rotary_embedding() -> None:
    """ALiBi, absolute positions, and layers without any (NoPE)."""
    runner = make_runner()
    put(runner.model, "model.layers.1.self_attn.rotary_emb", None)
    assert unsupported(runner, make_args()) == ["no self_attn.rotary_emb (layer 1)"]


def test_other_rotary_class() -> None:
    runner = make_runner()
    scaling = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    mrope = get_rope(HEAD_DIM, HEAD_DIM, 64, 10000, rope_scaling=scaling, dtype=torch.bfloat16)
    for layer in range(NUM_LAYERS):
        put(runner.model, f"model.layers.{layer}.self_attn.rotary_emb", mrope)
    assert unsupported(runner, make_args()) == ["rotary embedding MRotaryEmbedding (layer 0)"]


def test_rotary_embeddings_that_differ() -> None:
    """Gemma 3 and others have one for local and one for global layers."""
    runner = make_runner()
    other = get_rope(HEAD_DIM, HEAD_DIM, 64, 1000000, dtype=torch.bfloat16)
    put(runner.model, "model.layers.1.self_attn.rotary_emb", other)
    assert unsupported(runner, make_args()) == ["another rotary embedding than layer 0 (layer 1)"]


def test_unknown_attention() -> None:
    runner = make_runner()
    put(runner.model, "model.layers.0.self_attn.attn", Module())
    assert unsupported(runner, make_args()) == [
        "self_attn.attn is Module, not RadixAttention (layer 0)"
    ]


@pytest.mark.parametrize("path", ["model", "model.layers", "model.layers.0.self_attn"])
def test_unknown_model(path: str) -> None:
    """Another structure is a reason, never an error."""
    runner = make_runner()
    put(runner.model, path, None)
    assert unsupported(runner, make_args())


def test_layer_count() -> None:
    """Layers that share their KV have fewer pools."""
    runner = make_runner()
    put(runner.token_to_kv_pool, "layer_num", 1)
    assert unsupported(runner, make_args()) == ["2 layers in the model, 1 in the KV pool"]


def test_all_reasons_are_told() -> None:
    """Not one at each start."""
    runner = make_runner()
    put(runner, "tp_size", 2)
    put(runner, "model_config.is_multimodal", True)
    assert len(unsupported(runner, make_args(enable_lora=True))) == 3


REAL = """
import json, sys
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

define_torchvision_ops()
from sglang.benchmark.one_batch import load_model
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import PortArgs, ServerArgs

from sglang_chunkcache.fusion.model_support import unsupported
from sglang_chunkcache.fusion.relocate import RotaryTable

args = ServerArgs(
    model_path=sys.argv[1], device="cpu", attention_backend="torch_native", max_total_tokens=256, max_running_requests=2,
    context_length=512, mem_fraction_static=0.1, disable_cuda_graph=True, sampling_backend="pytorch", grammar_backend="none",
)
publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
runner = load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner
print(json.dumps({
    "unsupported": unsupported(runner, args),
    "runner": [name for name in json.loads(sys.argv[2]) if not hasattr(runner, name)],
    "config": [name for name in json.loads(sys.argv[3]) if not hasattr(runner.model_config, name)],
    "num_positions": RotaryTable.of(runner.model.model.layers[0].self_attn.rotary_emb).num_positions,
}))
"""


@pytest.mark.engine
def test_runner_of_a_real_model() -> None:
    """The model and pool that SGLang makes have nothing against them,
    and all attributes that are read here."""
    from tests import models

    real, fake = models.runner("llama"), make_runner()
    assert unsupported(real, real.server_args) == []
    assert [name for name in vars(fake) if not hasattr(real, name)] == []
    assert [name for name in vars(fake.model_config) if not hasattr(real.model_config, name)] == []


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_real_model(family: str, tmp_path: Path) -> None:
    """The same from SGLang's own loader, with a context longer than the model's.

    In a process of its own, for SGLang's configuration is global.
    """
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        dtype="bfloat16",
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path, safe_serialization=True)
    from tests.reference.tiny_tokenizer import make_tokenizer

    make_tokenizer(vocab_size=256 + 64).save_pretrained(tmp_path)
    runner = make_runner()
    names = [json.dumps(sorted(vars(x))) for x in (runner, runner.model_config)]
    ran = subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path), *names],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
        cwd=Path(__file__).parents[3],
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer = json.loads(ran.stdout.splitlines()[-1])
    assert answer["unsupported"] == answer["runner"] == answer["config"] == []
    assert answer["num_positions"] >= 512
