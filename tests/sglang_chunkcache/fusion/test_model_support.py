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
    sizes = ("page", "tp", "pp", "attn_dp", "attn_cp", "attn_dcp")
    flags = ("is_encoder_decoder", "is_multimodal", "use_ngram_embedding")
    config = dict.fromkeys(flags, False) | {"attention_chunk_size": None, "is_generation": True}
    runner = SimpleNamespace(
        **{f"{name}_size": 1 for name in sizes},
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


def test_kv_written_by_the_rotary_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's Qwen3-MoE does so on CUDA in bfloat16:
    its K/V would go past our passes into a slot that is never read."""
    from sglang.srt.models import qwen3_moe

    runner, args, name = make_runner(), make_args(), "Qwen3MoeForCausalLM"
    runner.model.__class__ = type(name, (Module,), {"__module__": qwen3_moe.__name__})
    assert unsupported(runner, args) == []
    monkeypatch.setattr(runner.token_to_kv_pool, "device", "cuda")
    assert unsupported(runner, args) == [f"K/V written by the rotary kernel ({name})"]
    runner.token_to_kv_pool.dtype = torch.float16
    assert unsupported(runner, args) == []


FLAGS: dict[str, list[object]] = {
    "--enable-lora": [("enable_lora", True), ("lora_paths", ["a"])],
    "--speculative-algorithm": [("speculative_algorithm", "EAGLE")],
    "--disaggregation-mode": [("disaggregation_mode", mode) for mode in ("prefill", "decode")],
    "--dllm-algorithm": [("dllm_algorithm", "x")],
    "--rl-on-policy-target": [("rl_on_policy_target", "fsdp")],
    "--quantization-param-path (scales of quantised KV)": [("quantization_param_path", "x")],
    **{
        "--" + name.replace("_", "-"): [(name, True)]
        for name in (
            "enable_dp_attention",
            "enable_two_batch_overlap",
            "enable_pdmux",
            "enable_deterministic_inference",
            "enable_mixed_chunk",
            "enable_hierarchical_cache",
            "enable_lmcache",
            "enable_flexkv",
            "enable_hisparse",
            "enable_unified_memory",
            "enable_streaming_session",
            "is_embedding",
        )
    },
}


@pytest.mark.parametrize(
    ("flag", "reason"), [(flag, reason) for reason in FLAGS for flag in FLAGS[reason]]
)
def test_flag(flag: tuple[str, object], reason: str) -> None:
    assert unsupported(make_runner(), make_args(**dict([flag]))) == [reason]


ATTN, POOL, CONFIG = "model.model.layers.{}.self_attn.attn.", "token_to_kv_pool.", "model_config."
ROTARY = "model.model.layers.{}.self_attn.rotary_emb"
NOT_OWN = "attention that is not a decoder's own (layer 1)"
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
REASONS: list[tuple[str, object, str]] = [
    ("page_size", 16, "page size 16, not 1"),
    ("tp_size", 2, "tensor parallel size 2, not 1"),
    ("pp_size", 2, "pipeline parallel size 2, not 1"),
    ("attn_dp_size", 2, "attention data parallel size 2, not 1"),
    ("attn_cp_size", 2, "attention context parallel size 2, not 1"),
    ("attn_dcp_size", 2, "decode context parallel size 2, not 1"),
    ("spec_algorithm", SpeculativeAlgorithm.EAGLE, "speculative decoding"),
    ("lora_manager", "a manager", "LoRA"),
    ("use_mla_backend", True, "MLA"),
    ("is_hybrid_swa", True, "sliding-window layers (hybrid SWA)"),
    (f"{CONFIG}attention_chunk_size", 8192, "attention in chunks (attention_chunk_size)"),
    (f"{CONFIG}is_encoder_decoder", True, "an encoder-decoder model"),
    (f"{CONFIG}is_multimodal", True, "a multimodal model"),
    (f"{CONFIG}is_generation", False, "an embedding model"),
    (
        f"{CONFIG}use_ngram_embedding",
        True,
        "n-gram embeddings (a token's keys depend on its neighbours)",
    ),
    # layers that share their KV have fewer pools
    (f"{POOL}layer_num", 1, "2 layers in the model, 1 in the KV pool"),
    (f"{POOL}quant_method", SimpleNamespace(name="fp4"), "quantised KV (fp4)"),
    (f"{POOL}kv_cache_layout", "hnd", "KV layout hnd, not nhd"),
    (f"{POOL}kv_cache_layout", "vectorized_5d", "KV layout vectorized_5d, not nhd"),
    (f"{POOL}layer_transfer_counter", "a counter", "KV loaded layer by layer by others"),
    # in any layer but the first, too; it is named
    (f"{ATTN}sliding_window_size", 4096, "sliding window 4096 (layer 1)"),
    (f"{ATTN}logit_cap", 50.0, "attention logit cap 50.0 (layer 1)"),
    (f"{ATTN}is_cross_attention", True, NOT_OWN),
    (f"{ATTN}attn_type", AttentionType.ENCODER_ONLY, NOT_OWN),
    (f"{ATTN}attn_type", AttentionType.DECODER_BIDIRECTIONAL, NOT_OWN),
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


@pytest.mark.parametrize(("path", "value", "reason"), REASONS, ids=str)
def test_reason(path: str, value: object, reason: str) -> None:
    """What SGLang resolved, whatever flag or config led to it."""
    assert reasons(**{path.format(1): value}) == [reason]


def test_nothing_is_against_a_plain_model() -> None:
    """Nor a scale of one, which checkpoints with quantised weights carry, whatever the KV's
    dtype."""
    assert reasons() == reasons(**{f"{ATTN.format(0)}k_scale_float": 1.0}) == []


def test_reason_of_all_layers_is_given_once() -> None:
    """With the first that has it."""
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


@pytest.mark.parametrize("name", ["sinks", "attention_sink_bias", "learnable_sink_param"])
def test_attention_sinks(name: str) -> None:
    """By the names GPT-OSS, MiMo and Hunyuan give them."""
    runner = make_runner()
    attention = runner.model.model.layers[1].self_attn
    attention.register_parameter(name, torch.nn.Parameter(torch.zeros(4)))
    assert unsupported(runner, make_args()) == [f"attention sinks ({name}) (layer 1)"]


@pytest.mark.parametrize("path", ["model", "model.layers", "model.layers.0.self_attn"])
def test_unknown_model(path: str) -> None:
    """Another structure is a reason, never an error."""
    assert reasons(**{f"model.{path}": None})


def test_all_reasons_are_told() -> None:
    """Not one at each start."""
    runner = make_runner(tp_size=2, **{"model_config.is_multimodal": True})
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
    model_path=sys.argv[1], device="cpu", attention_backend="torch_native",
    max_total_tokens=256, max_running_requests=2, context_length=512, mem_fraction_static=0.1,
    disable_cuda_graph=True, sampling_backend="pytorch", grammar_backend="none",
)
publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
runner = load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner
rotary_emb = runner.model.model.layers[0].self_attn.rotary_emb
print(json.dumps({
    "unsupported": unsupported(runner, args),
    "runner": [name for name in json.loads(sys.argv[2]) if not hasattr(runner, name)],
    "config": [name for name in json.loads(sys.argv[3]) if not hasattr(runner.model_config, name)],
    "num_positions": RotaryTable.of(rotary_emb).num_positions,
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
    from tests.reference.tiny_tokenizer import make_tokenizer

    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_config = getattr(transformers, f"{family}Config")
    config = make_config(**sizes, **heads, max_position_embeddings=256, dtype="bfloat16")
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path, safe_serialization=True)
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
