"""A real SGLang ModelRunner in this process, on the CPU, for a tiny random model of a given family.

No scheduler and no server: the passes need a model, a KV pool and an attention backend. `runner`
loads a model once a process, and every test that asks for it gets the same one, so a test gives
back the slots it has allocated. SGLang's settings, which are the process's, are those of the last
one built.
"""

from __future__ import annotations

import gc
import itertools
import json
import socket
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

FAMILIES = ("llama", "llama3", "qwen2", "qwen3", "qwen3_yarn", "mistral", "stablelm")
"""Llama, Llama with Llama-3's RoPE scaling, Qwen2 (biases), Qwen3 (normed heads, residual stream of
its own), Qwen3 with YaRN, Mistral (heads wider than hidden / heads), StableLM (a quarter of each
head is rotated)."""

NUM_LAYERS = 3
VOCAB = 128
POOL_SLOTS = 2048
MAX_REQUESTS = 16
LLAMA3_CONTEXT = {"original_max_position_embeddings": 256}

_started = False


@cache
def runner(
    family: str,
    dtype: str = "float32",
    *,
    head_dim: int | None = None,
    num_layers: int = NUM_LAYERS,
) -> Any:
    """The process's only ModelRunner over this model."""
    with tempfile.TemporaryDirectory() as path:
        kind = getattr(torch, dtype)
        write_model(Path(path), family, dtype=kind, num_layers=num_layers, head_dim=head_dim)
        return make_runner(Path(path), dtype=dtype)


def assert_given_back(runner: Any) -> None:
    """No slot and no row is allocated."""
    assert runner.token_to_kv_pool_allocator.available_size() == POOL_SLOTS
    assert runner.req_to_token_pool.available_size() == MAX_REQUESTS


def write_model(
    path: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    num_layers: int = NUM_LAYERS,
    head_dim: int | None = None,
    vocab_size: int = VOCAB,
) -> None:
    """A random model as files. Weights are large enough that attention is far from uniform. Further
    families, for servers: `gemma3` (every other layer sees 64 tokens), `mellum` (so, too, with a KV
    pool of its own for those layers), `qwen3_moe`, `deepseek_v2` (MLA), `lfm2`
    (every other layer is a convolution).

    Args:
        head_dim: None: 16, or 32 where heads are wider than hidden / heads.
    """
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 4 * (head_dim or 16),
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15 * (16 / (head_dim or 16)) ** 0.5,
        "tie_word_embeddings": False,
    }
    scaled = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wide, few = {"head_dim": head_dim or 32}, {"num_experts_per_tok": 2}
    mla: dict[str, Any] = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        **{f"{name}_head_dim": 16 for name in ("qk_nope", "qk_rope", "v")},
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": num_layers + 1,
        "rope_parameters": scaled | {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
        **few,
    }
    types = [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)]
    windows = {"sliding_window": 64, "layer_types": types, "head_dim": 16}
    convolved = [layer.replace("sliding_attention", "conv") for layer in types]
    experts = {"num_experts": 4, "moe_intermediate_size": 32, **few}
    makers: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {}),
        "llama3": ("Llama", {"rope_parameters": scaled | llama3 | LLAMA3_CONTEXT}),
        "qwen2": ("Qwen2", {}),
        "qwen3": ("Qwen3", wide),
        "qwen3_yarn": ("Qwen3", {**wide, "rope_parameters": scaled | {"rope_type": "yarn"}}),
        "mistral": ("Mistral", {**wide, "sliding_window": None}),
        "stablelm": ("StableLm", {"num_key_value_heads": 4, "partial_rotary_factor": 0.25}),
        "gemma3": ("Gemma3Text", windows),
        "mellum": ("Mellum", {**windows, **experts}),
        "deepseek_v2": ("DeepseekV2", mla),
        "qwen3_moe": ("Qwen3Moe", {**experts, **wide}),
        "lfm2": ("Lfm2", {"layer_types": convolved, "block_auto_adjust_ff_dim": False}),
    }
    name, extra = makers[family]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **extra}, dtype=dtype)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(path, safe_serialization=True)


def make_runner(path: Path, *, dtype: str = "float32", device: str = "cpu", **flags: str) -> Any:
    """SGLang's ModelRunner over the model at `path`, with `torch_native` attention, `POOL_SLOTS`
    slots and without graphs, where the server's flags do not say otherwise. One device a
    process."""
    global _started
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.eplb.expert_location import set_global_expert_location_metadata
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import prepare_server_args

    from sglang_chunkcache.launch_server import CPU_FLAGS

    more = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    all_flags = {
        **CPU_FLAGS,
        "--device": device,
        "--model-path": str(path),
        "--dtype": dtype,
        "--max-total-tokens": str(POOL_SLOTS),
        "--max-running-requests": str(MAX_REQUESTS),
        "--context-length": "2048",
        "--disable-overlap-schedule": None,
        **more,
    }
    server_args = prepare_server_args(
        [part for flag in all_flags.items() for part in flag if part is not None]
    )
    publish(
        server_args,
        role="scheduler",
        ranks=SpawnRanks(world_rank=spawn_world_rank(server_args, tp_rank=0, pp_rank=0), gpu_id=0),
    )
    model_config = ModelConfig.from_server_args(server_args)
    port = _free_port()
    if not _started:
        bootstrap.init_parallel_runtime(server_args=server_args, device=device, dist_port=port)
        _started = True
    bootstrap.init_layer_runtime(model_config=model_config)
    set_global_expert_location_metadata(None, allow_overwrite=True)  # of the model before
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=0.5,
        gpu_id=0,
        nccl_port=port,
        server_args=server_args,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    gc.collect()
    return runner


def let_rotary_write(patch: pytest.MonkeyPatch) -> None:
    """SGLang's Qwen3-MoE takes the branch of CUDA in bfloat16: rotating writes K/V at the batch's
    slots (`apply_rope_inplace_with_kvcache`, csrc/elementwise/rope.cuh), attention does not."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.models import qwen3_moe

    rotate = RotaryEmbedding.forward

    def rotate_and_write(
        self: Any, *args: Any, fused_set_kv_buffer_arg: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = rotate(self, *args, **kwargs)
        if (to := fused_set_kv_buffer_arg) is not None:
            to.k_buffer[to.cache_loc] = key.flatten(1)
            to.v_buffer[to.cache_loc] = to.value.flatten(1)
        return query, key

    patch.setattr(RotaryEmbedding, "forward", rotate_and_write)
    patch.setattr(qwen3_moe, "enable_fused_set_kv_buffer", lambda batch: True)


def make_row(runner: Any, slots: Sequence[int] | torch.Tensor, *, index: int = 1) -> int:
    """Points a request's row at `slots`, from position 0; returns the row's index."""
    slots = torch.as_tensor(slots, dtype=torch.int32)
    runner.req_to_token_pool.req_to_token[index, : len(slots)] = slots
    return index


def kv_of(runner: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of the pool's keys and values at `slots`, [num_layers, n, num_kv_heads,
    head_dim] each."""
    pool = runner.token_to_kv_pool
    layers = range(pool.layer_num)
    keys = torch.stack([pool.get_key_buffer(layer)[slots] for layer in layers])
    return keys, torch.stack([pool.get_value_buffer(layer)[slots] for layer in layers])


def prefill(runner: Any, token_ids: Sequence[int], slots: torch.Tensor) -> torch.Tensor:
    """SGLang's own prefill of a whole prompt into `slots`;
    returns the last token's logits, [vocabulary] float32."""
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    num_tokens, row = len(token_ids), make_row(runner, slots)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.tensor(token_ids),
        positions=torch.arange(num_tokens),
        out_cache_loc=slots,
        req_pool_indices=torch.tensor([row]),
        seq_lens=torch.tensor([num_tokens]),
        seq_lens_cpu=torch.tensor([num_tokens]),
        orig_seq_lens=torch.tensor([num_tokens]),
        seq_lens_sum=num_tokens,
        extend_num_tokens=num_tokens,
        extend_seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        extend_seq_lens_cpu=[num_tokens],
        extend_prefix_lens=torch.tensor([0], dtype=torch.int32),
        extend_prefix_lens_cpu=[0],
        extend_start_loc=torch.tensor([0], dtype=torch.int32),
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    with torch.no_grad():
        return runner.forward(batch).logits_output.next_token_logits[0].float()  # type: ignore[no-any-return]


def logits_of(runner: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Float32 logits of final hidden states."""
    return hidden.float() @ runner.model.lm_head.weight.float().T  # type: ignore[no-any-return]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def write_adapter(path: Path, model: Path, *, rank: int = 4) -> None:
    """A random LoRA adapter of a `llama` model's queries and values, as files."""
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    widths = {name: head_dim * num_heads for name, num_heads in heads.items()}
    torch.manual_seed(0)
    weights = {}
    for layer, (name, width) in itertools.product(range(num_layers), widths.items()):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
        weights[f"{prefix}A.weight"] = torch.randn(rank, hidden) / hidden**0.5
        weights[f"{prefix}B.weight"] = torch.randn(width, rank)
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*widths]}
    (path / "adapter_config.json").write_text(json.dumps({**adapter, "bias": "none"}))
