"""Fixtures of all tests: real data by environment variable, a tiny random model, numeric tolerances.

Without torch or SGLang the tests that need them are skipped; the rest stays green.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is not None:
    from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

    define_torchvision_ops()  # before anything of SGLang or transformers is imported

DATA_VAR = "CHUNKCACHE_DATA"

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Largest absolute difference of two log probabilities that still counts as equal, by the model's dtype: different
cached lengths change the order of summation, and bfloat16 keeps 8 bits."""


@pytest.fixture(scope="session")
def tolerances() -> dict[str, float]:
    """dtype -> largest absolute difference of log probabilities."""
    return TOLERANCES


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory with the real data sets. For tests marked `data`."""
    path = os.environ.get(DATA_VAR)
    if not path or not Path(path).is_dir():
        pytest.skip(f"{DATA_VAR} names no directory")
    return Path(path)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Llama in bfloat16 with a byte-level BPE tokenizer and a ChatML-like template, as files."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.reference.tiny_tokenizer import make_tokenizer

    path = tmp_path_factory.mktemp("tiny_model")
    tokenizer = make_tokenizer(vocab_size=2048)
    tokenizer.save_pretrained(path)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path, safe_serialization=True)
    return path
