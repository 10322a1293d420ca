"""Which tokens of moved chunks are recomputed: one file per selector, one interface (base.py);
see README.md."""

from __future__ import annotations

from importlib import import_module

from sglang_chunkcache.config import SELECTORS
from sglang_chunkcache.fusion.selectors.base import Selector
from sglang_chunkcache.own_selectors import own_selectors


def get(name: str, module: str | None = None) -> Selector:
    """The selector of that name; of ours only its own file is loaded.

    Args:
        module: `--chunkcache-selectors`.
    Raises:
        ValueError: no such selector; names the existing ones.
    """
    own = own_selectors(module)
    if name in own:
        selector: Selector = own[name]
        return selector
    if name not in SELECTORS:
        raise ValueError(
            f"selector must be one of {', '.join((*SELECTORS, *own))} but got {name!r}"
        )
    selector = import_module(f"{__name__}.{name}").SELECTOR
    return selector
