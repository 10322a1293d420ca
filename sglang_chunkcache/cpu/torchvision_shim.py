"""Lets a published torchvision be imported with torch's CPU build.

The wheel registers CUDA kernels for two operators and fails where their schemas do not exist. It
must run in every process before SGLang or transformers is imported, so it imports only torch.
"""

from __future__ import annotations

import importlib.util
from typing import Any

_library: Any = None


def define_torchvision_ops() -> None:
    """Define the two operators. Safe to call twice; does nothing with a CUDA build of torch."""
    global _library
    import torch  # here: the launcher shows its help without

    # torch refuses a schema's second definition.
    if (
        _library is not None
        or torch.version.cuda
        or importlib.util.find_spec("torchvision") is None
    ):
        return
    _library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]  # kept: the definitions die with it
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
