"""Selectors of the module that `--chunkcache-selectors` names: loaded by the launcher, the front
and every scheduler process.

Knows neither torch nor the selectors' interface (fusion/selectors/base.py), which the module
imports itself: the front reads no more of a selector than its name and its needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from radix_ext import Need
from sglang_chunkcache.config import SELECTORS, ChunkCacheConfig, flag_name

NAME = re.compile(r"[a-z][a-z0-9_-]*")
"""Names are parts of recipes and labels of metrics."""


@cache
def own_selectors(module: str | None) -> Mapping[str, Any]:
    """Name -> selector, of the module's `SELECTORS`; none without a module.

    Raises:
        ValueError: a module that cannot be imported or has no selectors, or a name that is no name
            or is taken.
    """
    if module is None:
        # Read-only: all callers of a process get one object from the cache.
        return MappingProxyType({})
    flag = f"{flag_name('selectors')} {module}"
    try:
        given = import_module(module)
    except Exception as error:  # whatever is wrong with it, it is the user's to mend
        told = " ".join(str(error).split())  # one line
        raise ValueError(f"{flag}: cannot be imported: {type(error).__name__}: {told}") from None
    selectors = vars(given).get("SELECTORS")
    if not isinstance(selectors, list | tuple) or not selectors:
        raise ValueError(f"{flag}: needs SELECTORS, a tuple of its selectors")
    own: dict[str, Any] = {}
    for selector in selectors:
        try:
            name, needs = selector.name, selector.needs
            # Methods are only looked up: that one is missing would else show in a forward.
            _ = selector.select, selector.makes_variants
        except AttributeError as error:
            raise ValueError(f"{flag}: {selector!r} is no selector: {error}") from None
        if not isinstance(name, str) or not NAME.fullmatch(name):
            allowed = "which has a to z, 0 to 9, _ and -"
            raise ValueError(f"{flag}: {name!r} is no name of a selector, {allowed}")
        if not isinstance(needs, frozenset) or not needs <= frozenset(Need):
            raise ValueError(f"{flag}: the needs of {name} must be a frozenset of radix_ext.Need")
        # Recipes and metrics know a selector by its name alone.
        if name in SELECTORS or name in own:
            raise ValueError(f"{flag}: the name {name} is taken")
        own[name] = selector
    return MappingProxyType(own)


def own_needs(name: str, module: str | None) -> frozenset[Need]:
    """What a selector that is none of ours reads; nothing for one of ours.
    Raises ValueError: no such selector."""
    own = own_selectors(module)
    if name in own:
        needs: frozenset[Need] = own[name].needs
        return needs
    if name not in SELECTORS:
        raise ValueError(f"must be one of {', '.join((*SELECTORS, *own))}, got {name!r}")
    return frozenset()


def check_selectors(config: ChunkCacheConfig) -> None:
    """Raise ValueError where the module does not suit, or the server's own selector is none of ours
    and none of its."""
    own_selectors(config.selectors)
    try:
        own_needs(config.selector, config.selectors)
    except ValueError as error:
        raise ValueError(f"{flag_name('selector')} {config.selector}: {error}") from None
