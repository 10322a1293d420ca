"""`python -m eval bench NAME [options]`:
each bench answers one question about the implementation of this plugin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from retrieval.command_line import program

BENCHES = {
    "tree": ("eval.bench.tree", "time and memory of an order decision"),
    "reuse": (
        "eval.bench.reuse",
        "time to first token against recompute ratio: from which on does moving KV not pay?",
    ),
    "storage": (
        "eval.bench.storage",
        "time to first token with a storage that is healthy, slowed, hanging or refusing",
    ),
    "tiers": (
        "eval.bench.tiers",
        "time to first token with loads from host memory, disk and network against computing",
    ),
    "ahead": (
        "eval.bench.ahead",
        "time to first token with loads that begin before their request or run beside its forward",
    ),
    "chunks": (
        "eval.bench.chunks",
        "time to first token of the same text as few chunks and as many",
    ),
    "preprocess": (
        "eval.bench.preprocess",
        "chunks a second into the store, by requests in flight",
    ),
    "together": (
        "eval.bench.together",
        "what fused requests compute that come at once, with room for all and without",
    ),
    "waiting": ("eval.bench.waiting", "a scheduling round while many requests wait"),
    "relocate": ("eval.bench.relocate", "rate of moving KV against the device's copy rate"),
    "attention": (
        "eval.bench.attention.command",
        "attention of scattered tokens against dense and masked ones; GPU",
    ),
    "one-copy": ("eval.bench.one_copy", "requests that fit where a chunk has one copy in the pool"),
    "ann": ("eval.bench.ann", "recall and speed of approximate indexes against exact search"),
    "bundled-model": (
        "eval.world.evaluate",
        "answers of the bundled model in worlds that training never saw",
    ),
}
"""Bench -> its module, with `main(argv) -> int`, and its question."""


def main(argv: Sequence[str]) -> int:
    """Run one bench, or list them."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {program('python -m eval bench')} NAME [options]\n\nbenches:")
        print("\n".join(f"  {name:<14} {question}" for name, (_, question) in BENCHES.items()))
        return 0
    name, *options = argv
    if name not in BENCHES:
        print(
            f"eval bench: unknown bench {name!r}; choose from {', '.join(BENCHES)}", file=sys.stderr
        )
        return 2
    return int(import_module(BENCHES[name][0]).main(options))
