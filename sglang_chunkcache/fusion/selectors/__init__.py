"""Which tokens of moved chunks are recomputed: one file per selector, one interface (base.py); see README.md."""

from __future__ import annotations

from importlib import import_module

from sglang_chunkcache.config import SELECTORS
from sglang_chunkcache.fusion.selectors.base import Selector


def get(name: str) -> Selector:
    """The selector of that name; only its own file is loaded.

    Raises:
        ValueError: no such selector; names the existing ones.
    """
    if name not in SELECTORS:
        raise ValueError(f"selector must be one of {', '.join(SELECTORS)} but got {name!r}")
    selector: Selector = import_module(f"{__name__}.{name}").SELECTOR
    return selector
