"""A measurement: arms, their servers, and cells, each one combination of swept settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.serve.workload import Load

if TYPE_CHECKING:
    from eval.serve.arms import Arm
    from eval.task import Request


SERVER = "server"
"""In a cell's label: the number of the server, where every arm has several.
No setting: cells that differ in it are one."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of the swept settings:
    every arm of the plan answers `requests` under `load`."""

    label: Mapping[str, Any]
    """Swept settings only, as JSON, and SERVER, for each sample's `cell` and key.
    {} without either."""
    requests: Sequence[Request]
    load: Load = field(default_factory=Load)
    flags: tuple[str, ...] = ()
    """Added to the flags of servers that run our cache.
    Cells with different flags use different servers."""
    reuse: Mapping[str, Any] = field(default_factory=dict)
    """Changes the `reuse` of requests of arms that move KV: `{"ratio": 0.3}`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings that all cells share."""

    arms: Sequence[Arm]
    server_flags: Sequence[str] = ()
    """Flags of every server that is started: model, pool, and the user's."""
    threads: int = 2
    block: int = 10
    """Requests that one arm answers before the next arm; 0: all."""
    warm_up: int = 0
    """Number of first requests of each cell that are sent and kept, but marked."""
    max_new_tokens: int | None = None
    """Maximum length of an answer; None: the request's own."""
    bystanders: int = 0
    """Streams that decode while a block is measured (bystanders.py)."""
    peaks: bool = False
    """Also keep what each block has in use at most (peaks.py)."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Added to the requests of all arms."""
    contextpilot_python: Path | None = None
    seed: int = 0
    flush: bool = False
    """Also flush running servers before every cell;
    servers that are started always begin a cell with an empty cache."""
    keeps_start: bool = False
    """Servers that are started begin with what they have loaded at their start (restart.py)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Filled by `measure`: `servers` (arm -> the server's own description), `skipped` (arm -> why),
    `resumed_at` (dates), `overhead` (cell and arm -> seconds of our cache and of all times to first
    token), `tiers` (cell and arm -> what each rank says of host memory and storage), `preprocessed`
    (cell and arm -> per system message seconds and counts)."""
