"""What phases take, on a rank without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_chunkcache.scheduler.pricing import Pricing


class Group:
    """Ranks whose rank 0 has sent `figures`."""

    def __init__(self, world_size: int = 1, figures: Any = None) -> None:
        self.world_size, self.figures, self.sent = world_size, figures, list[Any]()

    def broadcast_object(self, figures: Any, src: int) -> Any:
        assert src == 0
        self.sent.append(figures)
        return self.figures


def make_pricing(group: Group | None = None, device: str = "cpu") -> Pricing:
    return Pricing(SimpleNamespace(device=device, tp_group=group or Group()))
