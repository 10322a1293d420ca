"""A server without a GPU whose memory is never pinned: SGLang's adapters ask for it.

python -m tests.e2e.unpinned_server FLAGS
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import torch

from sglang_chunkcache import launch_server


def install() -> None:
    """In this process."""

    def unpinned(create: Any) -> Any:
        @wraps(create)
        def created(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return create(*args, **kwargs)

        return created

    torch.tensor, torch.empty, torch.zeros = map(unpinned, (torch.tensor, torch.empty, torch.zeros))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


if __name__ in ("__main__", "__mp_main__"):
    install()
if __name__ == "__main__":
    launch_server.main(sys.argv[1:])
