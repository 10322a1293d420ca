"""Writes a random Llama and a byte-level BPE tokenizer trained on given texts,
to measure speed and accounting, never quality."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eval.data.random_text import WORDS
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token"
    " + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes; head size is hidden / heads."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = 8192
    max_positions: int = 32_768


SHAPES = {
    1: Shape(128, 352, 2, 4, 2),
    10: Shape(384, 1024, 6, 6, 2),
    100: Shape(768, 2048, 14, 12, 4),
}
"""Keys: approximate millions of parameters, without the embedding."""


def write_random_model(out: Path, shape: Shape, texts: Iterable[str], *, seed: int = 0) -> Path:
    """Write model, tokenizer and chat template; returns `out`."""
    # Before transformers, which imports torchvision: without the operators its wheel fails.
    define_torchvision_ops()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from eval.world.tokenizer import train_tokenizer

    special = ["<|bos|>", "<|eos|>", "<|pad|>"]
    names = dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    tokenizer = train_tokenizer(texts, shape.vocab, special, chat_template=CHAT_TEMPLATE, **names)
    tokenizer.save_pretrained(out)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_positions,
        # `train_tokenizer` gives the special tokens the first ids, in their order.
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    return out


def write_words_model(out: Path, shape: Shape) -> str:
    """One whose tokenizer knows `random_text`'s words; returns `out`."""
    return str(write_random_model(out, shape, [" ".join(WORDS)] * 50))
