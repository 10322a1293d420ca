"""The tokens the question attends to most in all layers together (ProphetKV): the baseline of `query`."""

from __future__ import annotations

from sglang_chunkcache.fusion.selectors.query import QueryGuided


class AllLayers(QueryGuided):
    """As `query`, by evidence that is summed over the layers."""

    name = "prophet"


SELECTOR = AllLayers()
