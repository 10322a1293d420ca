"""What compiles kernels on a CUDA machine, which no package of ours brings."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def add_own_tools() -> None:
    """SGLang brings `ninja` into the interpreter's folder, which is on PATH only in an activated
    environment. Last there: what the machine has goes first."""
    folder, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if Path(folder, "ninja").exists() and folder not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([path, folder])


def missing_compilers() -> list[str]:
    """By name, of what FlashInfer calls to compile a kernel, where it looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.environ.get("FLASHINFER_NVCC") or (f"{home}/bin/nvcc" if home else "nvcc")
    found = {
        "nvcc": shutil.which(nvcc) or (not home and Path("/usr/local/cuda/bin/nvcc").exists()),
        "ninja": shutil.which("ninja"),
        "a C++ compiler": shutil.which((os.environ.get("CXX", "").split() or ["c++"])[0]),
    }
    return [name for name, where in found.items() if not where]
