"""The arms that are compared. An arm is a server's flags, the route of its requests, and the fields
added to their bodies.

    ARM    launcher flags                     route                      client
    ours   --schedule-policy lpm              /rag/v1/chat/completions   chunks in a field of their
                                                                         own
    stock  --stock --schedule-policy lpm ...  /v1/chat/completions       chunks in the user message
    URL    a running server                   either, chat by default    a known name keeps its
                                                                         arm's body and adapter

Knows neither models nor load. `skip_reason` decides which arms can run on a machine; the others are
skipped by name.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from eval.errors import CommandError
from eval.serve.contextpilot_adapter import ContextPilotReorderer, contextpilot_missing

Route = Literal["rag", "chat"]
EVERY_SERVER = ("--enable-cache-report", "--sleep-on-idle")
"""Report cached tokens in every answer's usage;
an idle server uses no core while another is measured."""
LPM, FCFS = ("--schedule-policy", "lpm"), ("--schedule-policy", "fcfs")
STOCK_LPM, STOCK_FCFS = ("--stock", *LPM), ("--stock", *FCFS)
RUNNING = re.compile(r"([\w.+-]+)=(https?://[^/,][^,]*?)(?:/v1)?/?(?:,(chat|rag))?")
"""NAME=URL[,ROUTE]. Addresses for OpenAI clients end in /v1; the routes here begin with it."""


@dataclass(frozen=True)
class Arm:
    """One way to serve. `flags` are those of `python -m sglang_chunkcache.launch_server`,
    `--stock` first for stock SGLang."""

    name: str
    summary: str
    flags: tuple[str, ...] = ()
    route: Route = "rag"
    body: Mapping[str, Any] = field(default_factory=dict)
    """Added to every request."""
    adapter: str | None = None
    """Name of the adapter that reorders the chunks in the client."""
    preprocesses: bool = False
    """Its server computes a cell's chunks before the first request (preprocessed.py)."""
    url: str | None = None
    """Address of a running server; `flags` are then documentation only."""

    @property
    def is_ours(self) -> bool:
        """Whether its server takes our flags."""
        return self.url is None and "--stock" not in self.flags

    @property
    def is_fused(self) -> bool:
        """Whether its requests opt into moved KV, so that a ratio applies."""
        return "reuse" in self.body


OWN_SELECTORS = ("--chunkcache-selectors", "eval.selectors")
"""What the papers compare with: requests may name these selectors, too."""
SCORED = (*OWN_SELECTORS, "--chunkcache-selector", "h2o")
"""A server scores what it stores as its own selector reads it, which here is all."""
UNAUDITED = ("--chunkcache-audit-share", "0")
"""A selector that answers badly is what some measurements are about: it must not be paused."""


def _fused(name: str, summary: str, *flags: str, **body: Any) -> Arm:
    """A server with `--reuse fused`. What `flags` and `body` leave out is the server's default."""
    return Arm(
        name, summary, (*LPM, "--reuse", "fused", *flags), body={"reuse": {"mode": "fused"}, **body}
    )


def _paper(name: str, summary: str, *flags: str, order: str = "retriever", **reuse: Any) -> Arm:
    """What can be moved is moved, as in the papers, whatever it costs and whatever becomes of the
    answers."""
    always = "--chunkcache-move", "always"
    return _fused(
        name, summary, *always, *UNAUDITED, *flags, order=order, reuse={"mode": "fused", **reuse}
    )


CRAFT = (
    *FCFS,
    *("--chunkcache-order", "frequency"),
    *("--chunkcache-eviction", "promoted"),
    *("--chunkcache-promotion-threshold", "2"),
    *("--chunkcache-window-requests", "1000"),
    *("--chunkcache-dedup", "paper"),
    *("--chunkcache-routing", "round_robin"),
)
"""CRAFT sections 4 and 5. Values equal to our defaults are listed too,
since the paper's do not change with ours."""
HOST_MIB = "--chunkcache-host-mib"
"""Exact chains in host memory; of two the later counts."""
NO_PASS_LIMIT = ("--chunkcache-max-pass-tokens", "10000000")
"""More tokens than any context: KV deviation is measured over the whole moved region,
which the default budget would cut."""
CACHEBLEND: dict[str, Any] = {"selector": "deviation", "ratio": 0.15}
FUSIONRAG: dict[str, Any] = {"selector": "query", "ratio": 0.15}
CACHE_CRAFT: dict[str, Any] = {"selector": "context", "ratio": 0.15}
PREFILL_H2O: dict[str, Any] = {"selector": "h2o", "ratio": 0.15}
RANDOM_RECOMP: dict[str, Any] = {"selector": "random", "ratio": 0.15}

ARMS = {
    arm.name: arm
    for arm in (
        Arm(
            # without a tree SGLang serves by `fcfs` in any case (`_validate_and_adjust_policy`)
            "no-cache",
            "stock SGLang without prefix caching",
            (*STOCK_FCFS, "--disable-radix-cache"),
            "chat",
        ),
        Arm("stock-fcfs", "stock SGLang, radix cache, first come first served", STOCK_FCFS, "chat"),
        Arm("stock-lpm", "stock SGLang, radix cache, longest prefix first", STOCK_LPM, "chat"),
        Arm(
            "stock-python-tree",
            "the Python radix tree, from which ours derives",
            (*STOCK_LPM, "--radix-cache-backend", "python_radix"),
            "chat",
        ),
        Arm(
            "stock-hicache",
            "HiCache, a tier in host memory",
            (*STOCK_LPM, "--enable-hierarchical-cache"),
            "chat",
        ),
        Arm(
            "lmcache",
            "stock SGLang with LMCache's prefix tier",
            (*STOCK_LPM, "--enable-lmcache"),
            "chat",
        ),
        Arm(
            "contextpilot",
            "ContextPilot reorders in the client",
            STOCK_LPM,
            "chat",
            adapter="contextpilot",
        ),
        Arm(
            "craft",
            "CRAFT: frequency order, promoted eviction; all chunks are admitted, which finds more",
            CRAFT,
        ),
        Arm("ours", "our defaults, longest prefix first", LPM),
        Arm("ours-fcfs", "our defaults, first come first served", FCFS),
        Arm("ours-device", "ours with no exact chain in host memory", (*LPM, HOST_MIB, "0")),
        Arm(
            "ours-host",
            "ours with 1024 MiB of exact chains in host memory, or with --host-mib",
            (*LPM, HOST_MIB, "1024"),
        ),
        _fused(
            "fused",
            "ours with --reuse fused and its defaults; requests say that they want it, and no more",
        ),
        _fused(
            "fused-scored",
            "the same with everything scored",
            *SCORED,
            *("--chunkcache-calibrate", "on"),
            # SCORED makes `h2o` the server's own selector, so the request names the default
            reuse={"mode": "fused", "selector": "critical"},
        ),
        _fused(
            "fused-unstored",
            "the same with nothing stored",
            # more accesses than any run has
            "--chunkcache-store-threshold",
            "1000000",
        ),
        _fused(
            "fused-unaudited", "the same with no answer compared with an exact prefill", *UNAUDITED
        ),
        _fused("fused-one-copy", "ours with one copy of a chunk", "--chunkcache-one-copy", "on"),
        _paper("cacheblend", "CacheBlend: 15% by KV deviation", *NO_PASS_LIMIT, **CACHEBLEND),
        _paper(
            "craft+cacheblend",
            "continuing its fused chains (fig. 16)",
            *NO_PASS_LIMIT,
            # `frequency` finds less in fused chains: .295 instead of .377 (eval/LOG.md, 2026-11-22)
            order="tree",
            **CACHEBLEND,
        ),
        replace(
            _paper("fusionrag", "FusionRAG: 15% by the question, preprocessed", **FUSIONRAG),
            preprocesses=True,
        ),
        _paper(
            "cache-craft",
            "Cache-Craft by alpha: 2 (fig. 26); no focus",
            selector="context",
            # from 2 on a chunk behind strangers is recomputed whole, since CCI is at least a half:
            # it becomes another variant (3.3), which at 1 hardly any does
            alpha=2.0,
            focus="off",
        ),
        _paper("cache-craft-ratio", "at 15%: alpha is solved for", focus="off", **CACHE_CRAFT),
        _paper("cache-craft-focus", "with focus, so less: see recomputed_share", **CACHE_CRAFT),
        _paper(
            "set-cache",
            "SET-CACHE: chunks behind the same set of chunks, all else recomputed",
            *OWN_SELECTORS,
            *NO_PASS_LIMIT,
            # not 1, where no selector is asked
            selector="set",
            ratio=0.9999,
        ),
        _paper("prefill-h2o", "PREFILL-H2O: the 15% attended to most", *SCORED, **PREFILL_H2O),
        _paper("random-recomp", "RANDOM-RECOMP: any 15%", *OWN_SELECTORS, **RANDOM_RECOMP),
        # a share of each chunk would be no constant: EPIC's point is that few are enough
        _paper("epic", "EPIC: the first 32 tokens of each", selector="first", tokens=32),
        _paper("full-reuse", "moved chunks, nothing recomputed", selector="none", ratio=0.0),
    )
}
"""Name -> arm, stock SGLang first. Arms of ours run the shipped defaults; the name says what
differs. Percentages are shares of moved tokens that are recomputed."""


def add_arm_options(parser: ArgumentParser, *, default: Sequence[str]) -> None:
    """Add `--arms` and the options of adapters."""
    known = "\n".join(f"{name}: {arm.summary};" for name, arm in ARMS.items())
    arms = (
        f"what is compared (default: {' '.join(default)}). {known} or NAME=URL[,chat|rag] for a"
        " server that already runs"
    )
    python = "a Python in which contextpilot is installed, if it is not in this one"
    add = parser.add_argument
    add("--arms", nargs="+", default=list(default), metavar="ARM", help=arms.replace("%", "%%"))
    add("--contextpilot-python", type=Path, metavar="PATH", help=python)


def parse_arms(texts: Sequence[str]) -> list[Arm]:
    """The arms of `--arms`. Raises CommandError as `parse_arm`, and for a name given twice."""
    arms = [parse_arm(text) for text in texts]
    names = [arm.name for arm in arms]
    # an arm's name is in its samples' keys, and `Run.add` refuses a key that is there already
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CommandError(
            f"--arms: {', '.join(twice)} given twice; a second server needs another name: NAME=URL"
        )
    return arms


def parse_arm(text: str) -> Arm:
    """A name of ARMS, or NAME=URL[,chat|rag]. Raises CommandError for anything else."""
    if text in ARMS:
        return ARMS[text]
    if (found := RUNNING.fullmatch(text)) is None:
        choices = f"choose from {', '.join(ARMS)}, or NAME=http://HOST:PORT[,chat|rag]"
        raise CommandError(f"--arms: no arm {text!r}; {choices}")
    name, url, route = found.groups()
    # `chat`, which every OpenAI-compatible server has
    known = ARMS.get(name, Arm(name, "a running server", route="chat"))
    return replace(known, url=url, route=cast(Route, route or known.route))


def request_body(arm: Arm, extra: Mapping[str, Any], reuse: Mapping[str, Any]) -> dict[str, Any]:
    """The fields added to each request: the arm's body and `extra`;
    `reuse` changes that of arms that move KV only; a ratio in it takes the place of what else
    says how much they recompute."""
    body = {**arm.body, **extra}
    if not arm.is_fused:
        return body
    out = ("alpha", "tokens") if "ratio" in reuse else ()
    # merged, not replaced: a swept ratio leaves the arm's selector
    kept = {name: value for name, value in body["reuse"].items() if name not in out}
    return body | {"reuse": {**kept, **reuse}}


def skip_reason(arm: Arm, *, contextpilot_python: Path | None = None) -> str | None:
    """Why this arm cannot run here, or None. Looks for packages and a GPU; starts no server."""
    # before the url: the client reorders, whoever serves
    if arm.adapter == "contextpilot":
        return contextpilot_missing(contextpilot_python)
    if arm.url is not None or arm.name not in ("stock-hicache", "lmcache"):
        return None
    if shutil.which("nvidia-smi") is None:
        return f"{arm.name} needs CUDA, and there is no nvidia-smi here"
    if arm.name == "lmcache" and importlib.util.find_spec("lmcache") is None:
        return "lmcache is not installed: pip install lmcache into SGLang's environment"
    if arm.name == "lmcache" and not {"LMCACHE_MP_HOST", "LMCACHE_CONFIG_FILE"} & os.environ.keys():
        return (
            "lmcache needs a running `lmcache server`, and its address in LMCACHE_MP_HOST and"
            " LMCACHE_MP_PORT (5555)"
        )
    return None


def create_reorderer(
    arm: Arm, *, contextpilot_python: Path | None = None
) -> ContextPilotReorderer | None:
    """A fresh reorderer for one pass over the requests of an arm that `skip_reason` admits;
    None for an arm without adapter."""
    return ContextPilotReorderer(contextpilot_python) if arm.adapter else None
