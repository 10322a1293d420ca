"""What the brief log leaves out: the listed lines and nothing else. Each in a process of its own,
since it changes the logging.

launch/test.sh tests/sglang_chunkcache/test_quiet.py
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys, warnings
import torch
from tqdm import tqdm
from sglang_chunkcache import quiet
from sglang_chunkcache.config import ChunkCacheConfig

torch.cuda.is_available = lambda: sys.argv[2] == "gpu"
quiet.hide(ChunkCacheConfig(log=sys.argv[1]))
logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)  # as SGLang does, later
registry = logging.getLogger("sglang.srt.models.registry")
beginning = "Ignore import error when loading sglang.srt.models."
registry.warning(beginning + "inkling: No module named 'cutlass'")
registry.warning(beginning + "llama: other model")
registry.error(beginning + "inkling: an error")
logging.getLogger("sglang.kernels.jit.utils.arch").warning("Cannot detect CUDA architecture.")
scheduler = logging.getLogger("sglang.srt.managers.scheduler")
scheduler.info("max_total_num_tokens=%d", 9)
scheduler.info("Decode batch")
scheduler.warning("max_total_num_tokens= is small")
warnings.warn("Only CUDA, HIP and XPU support AWQ currently.", UserWarning)
warnings.warn("something else", UserWarning)
access = logging.getLogger("uvicorn.access")
access.info("GET /model_info")
quiet.started()
access.info("GET /later")
list(tqdm([1], desc="Loading shards", disable=False))
"""
SHOWN = ["other model", "an error", "Decode batch", "is small", "something else", "GET /later"]
HIDDEN = ["cutlass", "max_total_num_tokens=9", "AWQ", "GET /model_info", "Loading shards"]
OF_NO_GPU = "Cannot detect CUDA architecture"


def run(*argv: str, program: str = PROGRAM) -> str:
    command = [sys.executable, "-W", "default", "-c", program, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(("log", "device"), [("brief", "cpu"), ("brief", "gpu"), ("all", "cpu")])
def test_brief_leaves_out_what_is_listed(log: str, device: str) -> None:
    """By logger, beginning and level; that there is no GPU is news on a machine with one."""
    printed, is_all = run(log, device), log == "all"
    assert [text for text in SHOWN if text not in printed] == []
    assert [text for text in HIDDEN if text in printed] == (HIDDEN if is_all else [])
    assert (OF_NO_GPU in printed) == (device == "gpu" or is_all)


def test_the_interpreters_end_is_mute_and_a_traceback_is_not() -> None:
    """Exit handlers that came later, and an exception, still speak."""
    program = (
        "import atexit, os, sys\n"
        "from sglang_chunkcache import quiet\n"
        "from sglang_chunkcache.config import ChunkCacheConfig\n"
        "atexit.register(os.write, 2, b'leaked')\n"  # stands for what comes after all exit handlers
        "quiet.hide(ChunkCacheConfig())\n"
        "atexit.register(os.write, 2, b'a handler')\n"
        "try:\n    raise SystemExit(0)\n"
        "finally:\n    print('an error', file=sys.stderr)"
    )
    printed = run(program=program)
    found = [text in printed for text in ("an error", "a handler", "leaked")]
    assert found == [True, True, False]
