"""Copies of small host tensors to the device that do not wait for its queue."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on `device`; itself where it is there already. From the CPU to CUDA through pinned
    memory: a copy from pageable memory waits until the stream has finished all earlier work."""
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
