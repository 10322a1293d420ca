"""Flags of a server as our launcher reads them."""

from __future__ import annotations

import argparse

from sglang_chunkcache import config


def parse_launcher(flags: list[str]) -> tuple[config.ChunkCacheConfig, list[str]]:
    """What our launcher makes of its flags, and what is left for SGLang."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--stock", action="store_true")
    config.add_flags(parser)
    args, rest = parser.parse_known_args(flags)
    return config.from_flags(args), rest
