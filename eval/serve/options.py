"""What commands that start servers share: the flags after `--`, and a model for the servers."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eval.random_model import SHAPES, write_random_model
from eval.task import Request

DEFAULT_PARAMS = 10
"""Size of the random model, with which two arms and 60 requests take two minutes on two cores."""


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the flags after `--`."""
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


@contextmanager
def model_flags(
    args: argparse.Namespace, requests: Sequence[Request], flags: Sequence[str]
) -> Iterator[list[str]]:
    """The flags that all servers share.
    A random model, its tokenizer trained on the requests' texts, is deleted on exit."""
    with tempfile.TemporaryDirectory(prefix="eval-model-") as folder:
        path, pool = args.model_path, args.max_total_tokens
        if path == "random":
            # each text once, however many requests retrieve it
            chunks = {chunk.id: chunk.text for request in requests for chunk in request.chunks}
            texts = [*chunks.values(), *(request.question for request in requests)]
            path = write_random_model(
                Path(folder) / f"random-{args.params}m", SHAPES[args.params], texts
            )
            # else SGLang takes what memory is free, which KV of so small a model never fills
            pool = pool or 40_000
        size = ["--max-total-tokens", str(pool)] if pool else []
        yield ["--model-path", str(path), *size, *flags]
