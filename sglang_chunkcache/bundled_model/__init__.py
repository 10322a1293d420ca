"""The model that comes with the project: weights and tokenizer of a small Llama, trained to answer
about a generated world.

World, training and evaluation are in eval/world/. Importing this is light: no torch, no
transformers.
"""

from pathlib import Path


def model_dir() -> Path:
    """The folder that holds config, weights and tokenizer, as `--model-path` wants it."""
    return Path(__file__).resolve().parent
