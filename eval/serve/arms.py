"""What is compared: each arm is a server's flags, the route its requests take, and what is added to them.

    ARM    launcher flags                     route                          client side
    ours   --schedule-policy lpm              /rag/v1/chat/completions       chunks beside the messages
    stock  --stock --schedule-policy lpm ...  /v1/chat/completions           chunks in the user message
    URL    a server that is already there     either, chat unless said       a known name keeps its arm's body and adapter

Knows neither models nor load. Which arms can run where is `skip_reason`'s to say: an arm that cannot is skipped by name.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args
from urllib.parse import urlsplit

from eval.errors import CommandError
from eval.serve.contextpilot_adapter import ContextPilotReorderer, contextpilot_missing

if TYPE_CHECKING:
    from eval.task import Request, TextChunk

Route = Literal["rag", "chat"]
EVERY_SERVER = ("--enable-cache-report", "--sleep-on-idle")
"""Cached tokens in every answer's usage; and a server that waits while another is measured takes no core from it."""


@dataclass(frozen=True)
class Arm:
    """One way to serve. `flags` are those of `python -m sglang_chunkcache.launch_server`, `--stock` first for stock SGLang."""

    name: str
    summary: str
    flags: tuple[str, ...] = ()
    route: Route = "rag"
    body: Mapping[str, Any] = field(default_factory=dict)
    """Added to every request."""
    adapter: str | None = None
    """Who reorders the chunks on the client's side."""
    url: str | None = None
    """A server that is already there; `flags` are then only said, not used."""

    @property
    def is_ours(self) -> bool:
        """Whether its server takes our flags."""
        return self.url is None and "--stock" not in self.flags

    @property
    def is_fused(self) -> bool:
        """Whether its requests opt into moved KV, so that a ratio means something."""
        return "reuse" in self.body


class Reorderer(Protocol):
    """Orders a request's chunks before they are sent. One of these serves all requests of one arm, in their order."""

    def order(self, request: Request) -> Sequence[TextChunk]:
        """The request's chunks, each as often as it is there. Blocks for milliseconds."""

    def counts(self) -> dict[str, int]:
        """What happened so far, for the record."""

    def close(self) -> None:
        """End what it started."""


def _ours(name: str, summary: str, *flags: str, policy: str = "lpm") -> Arm:
    return Arm(name, summary, ("--schedule-policy", policy, *flags))


def _stock(name: str, summary: str, *flags: str, adapter: str | None = None) -> Arm:
    return Arm(name, summary, ("--stock", *flags), route="chat", adapter=adapter)


def _fused(name: str, summary: str, selector: str, ratio: float, *, order: str = "retriever") -> Arm:
    # Only `context` and `h2o` read the scores that a chunk gets on its way into the store, and they cost a prefill.
    scoring = () if selector in ("context", "h2o") else ("--chunkcache-scoring", "off")
    body = {"reuse": {"mode": "fused", "selector": selector, "ratio": ratio}, "order": order}
    return Arm(name, summary, ("--schedule-policy", "lpm", "--reuse", "fused", *scoring), body=body)


CRAFT = (
    *("--chunkcache-order", "frequency"),
    *("--chunkcache-admission", "promoted"),
    *("--chunkcache-eviction", "promoted"),
    *("--chunkcache-promotion-threshold", "2"),
    *("--chunkcache-window-requests", "1000"),
    *("--chunkcache-dedup", "paper"),
    *("--chunkcache-routing", "round_robin"),
)
"""CRAFT sections 4 and 5. The numbers stand here although they are our defaults too: the paper's do not change with ours."""

ARMS = {
    arm.name: arm
    for arm in (
        _stock("no-cache", "stock SGLang without prefix caching", "--disable-radix-cache"),
        _stock("stock-fcfs", "stock SGLang, radix cache, first come first served", "--schedule-policy", "fcfs"),
        _stock("stock-lpm", "stock SGLang, radix cache, longest prefix first", "--schedule-policy", "lpm"),
        _ours("craft", "CRAFT to the letter: frequency order, promoted admission and eviction", *CRAFT, policy="fcfs"),
        _ours("ours", "our defaults, longest prefix first"),
        _ours("ours-fcfs", "our defaults, first come first served", policy="fcfs"),
        _fused("fused", "ours, and moved chunks with 15% recomputed by the question", "query", 0.15, order="tree"),
        _fused("cacheblend", "CacheBlend: moved chunks, 15% recomputed by KV deviation", "deviation", 0.15),
        _fused(
            "craft+cacheblend", "CacheBlend behind CRAFT's order (CRAFT fig. 16)", "deviation", 0.15, order="frequency"
        ),
        _fused("cache-craft", "Cache-Craft: moved chunks, 15% recomputed by context scores", "context", 0.15),
        _fused("epic", "EPIC: moved chunks, the first 15% of each recomputed", "first", 0.15),
        _fused("full-reuse", "moved chunks, nothing recomputed", "none", 0.0),
        _stock(
            "contextpilot",
            "ContextPilot reorders on the client's side, stock SGLang serves",
            *("--schedule-policy", "lpm"),
            adapter="contextpilot",
        ),
        _stock("lmcache", "stock SGLang with LMCache's prefix tier", "--schedule-policy", "lpm", "--enable-lmcache"),
    )
}
"""Name -> arm, stock SGLang first."""


def add_arm_options(parser: ArgumentParser, *, default: Sequence[str]) -> None:
    """`--arms` and what adapters need."""
    known = "\n".join(f"{name}: {arm.summary};" for name, arm in ARMS.items())
    parser.add_argument(
        "--arms",
        nargs="+",
        default=list(default),
        metavar="ARM",
        help=f"what is compared (default: {' '.join(default)}). {known} or NAME=URL[,chat|rag] for a server that is "
        "already there".replace("%", "%%"),
    )
    parser.add_argument(
        "--contextpilot-python",
        type=Path,
        metavar="PATH",
        help="a Python in which contextpilot is installed, where this one has it not",
    )


def parse_arms(texts: Sequence[str]) -> list[Arm]:
    """The arms of `--arms`. Raises CommandError as `parse_arm`, and for a name given twice."""
    arms = [parse_arm(text) for text in texts]
    names = [arm.name for arm in arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CommandError(f"--arms: {', '.join(twice)} given twice; a second server needs a name of its own: NAME=URL")
    return arms


def parse_arm(text: str) -> Arm:
    """A name of ARMS, or NAME=URL[,chat|rag]. Raises CommandError for anything else."""
    name, equals, rest = text.partition("=")
    if not equals:
        if name not in ARMS:
            raise CommandError(f"--arms: no arm {name!r}; there is {', '.join(ARMS)}, or NAME=URL[,chat|rag]")
        return ARMS[name]
    if not re.fullmatch(r"[\w.+-]+", name):
        raise CommandError(f"--arms: {text!r}: a name has letters, digits, and . + - _ only")
    url, comma, route = rest.rpartition(",") if "," in rest else (rest, "", "")
    if comma and route not in get_args(Route):
        raise CommandError(f"--arms: {text!r}: expected chat or rag behind the comma, got {route!r}")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise CommandError(f"--arms: {text!r}: expected NAME=http://HOST:PORT[,chat|rag]")
    known = ARMS.get(name, Arm(name, "a server that is already there", route="chat"))
    # Clients of OpenAI's API are given the address with /v1; the routes here begin with it.
    url = url.rstrip("/").removesuffix("/v1")
    return replace(known, url=url, route=cast(Route, route) if comma else known.route)


def server_flags(arm: Arm, common: Sequence[str]) -> list[str]:
    """The launcher's flags: the arm's, then `common` (which wins), and what every measured server has."""
    return [*arm.flags, *(flag for flag in EVERY_SERVER if flag not in common), *common]


def request_body(arm: Arm, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What is added to each request: the arm's body, and of `extra` what the arm knows.

    `extra["reuse"]` overrides single fields, and only of arms that move KV: a swept ratio says nothing to the others.
    """
    body = dict(arm.body)
    for key, value in (extra or {}).items():
        if key != "reuse":
            body[key] = value
        elif arm.is_fused:
            body["reuse"] = {**body["reuse"], **value}
    return body


def skip_reason(arm: Arm, *, contextpilot_python: Path | None = None) -> str | None:
    """Why this arm cannot run here, or None. Looks for packages and a GPU; starts no server."""
    if arm.adapter == "contextpilot":
        return contextpilot_missing(contextpilot_python)
    if arm.name == "lmcache" and arm.url is None:
        return _lmcache_missing()
    return None


def create_reorderer(arm: Arm, *, contextpilot_python: Path | None = None) -> Reorderer | None:
    """A fresh reorderer for one pass over the requests; None for an arm without adapter.

    Raises:
        CommandError: `skip_reason`'s.
    """
    if arm.adapter is None:
        return None
    if reason := skip_reason(arm, contextpilot_python=contextpilot_python):
        raise CommandError(reason)
    return ContextPilotReorderer(contextpilot_python)


def _lmcache_missing() -> str | None:
    """LMCache's kernels are CUDA's, SGLang's process imports it, and what it stores lives in a process that people start."""
    if importlib.util.find_spec("lmcache") is None:
        return "lmcache is not installed: pip install lmcache beside SGLang, on a machine with CUDA"
    try:
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "lmcache needs CUDA, and nvidia-smi finds no GPU here"
    if not {"LMCACHE_MP_HOST", "LMCACHE_CONFIG_FILE"} & os.environ.keys():
        return "lmcache needs a running `lmcache server`, and LMCACHE_MP_HOST and LMCACHE_MP_PORT (5555) to say where it is"
    return None
