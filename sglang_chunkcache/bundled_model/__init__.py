"""The model that comes with the project: a generated world, a tokenizer and a small Llama trained to answer about it.

Importing this is light: no torch, no transformers.
"""

from pathlib import Path


def model_dir() -> Path:
    """The folder that holds config, weights and tokenizer, as `--model-path` wants it."""
    return Path(__file__).resolve().parent
