"""Lines that a start prints and nobody needs: `--chunkcache-log brief`, the default, leaves them
out, in every process. So are bars where stderr is no terminal, SGLang's among them.

Only what is listed here, by its source and its beginning: all else of SGLang, its errors and its
other warnings, is shown as ever. `all` shows everything, and so does a `--log-level` of the user's.
`--stock` hides nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import warnings
from typing import Any

from sglang_chunkcache.config import ChunkCacheConfig

PROGRESS = {
    "sglang.srt.entrypoints.engine": "server_args=|Engine startup timings",
    "sglang.srt.parser.template_manager": "Using default HuggingFace chat template",
    "sglang.srt.distributed.bootstrap": "Init parallel (begin|ends)|Memory baseline taken",
    "sglang.srt.utils.numa_utils": "init_threads_binding",
    "sglang.srt.model_executor.model_runner": "Load weight (begin|end)",
    "sglang.srt.mem_cache.memory_pool": "KV Cache is allocated",
    "sglang.srt.mem_cache.host_memory": "HiCache memory headroom",
    "sglang.srt.mem_cache.pool_host.base": (
        "Allocating chunk cache hierarchical|HiCache chunk cache host pool"
    ),
    "sglang.srt.mem_cache.kv_cache_configurator": "Memory pool end",
    "sglang.srt.model_executor.model_runner_components.cuda_graph_setup": (
        "Disable prefill CUDA graph because"
    ),
    "sglang.srt.managers.scheduler": "max_total_num_tokens=",
    "sglang.srt.mem_cache.registry": "Tree cache initialized",
    "sglang.srt.entrypoints.http_server": "The server is fired up",
    "uvicorn.error": (
        "Started server process|Waiting for application startup|Application startup complete"
    ),
}
"""What the start is doing, at INFO: by its source, how it begins.
A step that fails has lines of its own; `/server_info` has the settings."""

OF_NO_GPU = {
    "sglang.srt.arg_groups.attention_hook": "Cuda graph is disabled because of using torch native",
    "sglang.srt.distributed.bootstrap": (
        "init_cpu_threads_env and shared memory based AllReduce is disabled"
    ),
    "sglang.kernels.jit.utils.arch": "Cannot detect CUDA architecture",
}
"""Warnings that say there is no GPU, or that its CPU kernels are not installed.
Hidden only where torch finds no GPU."""

OF_OTHER_MODELS = {
    "sglang.srt.models.registry": (
        r"Ignore import error when loading sglang\.srt\.models\.(bailing_moe_linear|"
        r"bailing_moe_nextn|falcon_mamba|inkling|mamba|midashenglm):"
    ),
    "sglang.srt.entrypoints.openai.serving_rerank": "Using fallback token IDs for yes/no",
}
"""Warnings of model classes whose optional packages (vllm, cutlass, torchaudio) are missing, and of
the reranking endpoint, which needs a reranker. SGLang names the architecture of the served model if
it has no class for it."""

WARNINGS = (
    r"Only CUDA, HIP and XPU support AWQ",  # a quantisation, imported whatever the model
    r"Only CUDA, MUSA and NPU support GGUF",  # likewise
    # kernels of linear attention, imported whatever the model
    r"Triton is not supported on current platform",
    r"ORJSONResponse is deprecated",  # FastAPI to its developers
)
"""Beginnings of Python warnings."""

_is_starting = True


def hide(config: ChunkCacheConfig | None) -> None:
    """Leave out what is listed, in this process from now on.
    Nothing happens for `all`, or without a configuration."""
    if config is None or config.log == "all":
        return
    import torch

    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    of_device = {} if torch.cuda.is_available() else OF_NO_GPU
    listed = {logging.INFO: PROGRESS, logging.WARNING: OF_OTHER_MODELS | of_device}

    def is_shown(record: logging.LogRecord) -> bool:
        beginnings = listed.get(record.levelno, {}).get(record.name)
        return beginnings is None or re.match(beginnings, record.getMessage()) is None

    for name in {*PROGRESS, *OF_OTHER_MODELS, *OF_NO_GPU}:
        # a filter stays when SGLang sets up logging
        logging.getLogger(name).addFilter(is_shown)
    logging.getLogger("uvicorn.access").addFilter(lambda _: not _is_starting)
    if not sys.stderr.isatty():
        _disable_bars()
    atexit.register(_mute_interpreters_end)


def started() -> None:
    """The server answers: from now on every request has its line."""
    global _is_starting
    _is_starting = False


def _disable_bars() -> None:
    """SGLang says itself that its bars are to be drawn: tqdm's own variable would not be read."""
    from tqdm import tqdm

    begin = tqdm.__init__

    def begin_disabled(bar: Any, *args: Any, **rest: Any) -> None:
        begin(bar, *args, **{**rest, "disable": True})

    tqdm.__init__ = begin_disabled  # type: ignore[assignment, method-assign]


def _mute_interpreters_end() -> None:
    """Bindings of the kernel compilers report objects that outlive the interpreter, in some thirty
    lines of C++.

    Registered early, so it runs after the exit handlers of SGLang: no code of its is left that
    could report an error.
    """
    # By the descriptor: C++ writes there whatever sys.stderr is.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
