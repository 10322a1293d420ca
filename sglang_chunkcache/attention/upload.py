"""Small host tensors to the device without waiting for what is queued there."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on `device`, as it is if it lies there. From the CPU to CUDA by way of pinned memory: a copy from pageable
    memory waits until the stream has done all before it."""
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
