"""What a measurement is: arms, the servers they run on, and the cells, each one setting of what is swept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eval.serve.workload import Load

if TYPE_CHECKING:
    from eval.serve.arms import Arm
    from eval.task import Request

History = Literal["own", "reference"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of the swept settings: every arm of the plan answers `requests` under `load`."""

    label: Mapping[str, Any]
    """Swept settings only, JSON: goes into each sample's `cell` and key. {} without a sweep."""
    requests: Sequence[Request]
    load: Load = field(default_factory=Load)
    flags: tuple[str, ...] = ()
    """Added to the flags of servers that run our cache. Cells with different flags have servers of their own."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Added to requests by `eval.serve.arms.request_body`: `{"reuse": {"ratio": 0.3}}` changes that of arms that move KV only."""

    @property
    def name(self) -> str:
        """The label in one word, "" without a sweep."""
        return ",".join(f"{key}={value}" for key, value in self.label.items())


@dataclass(frozen=True, slots=True)
class Plan:
    """What all cells have in common."""

    arms: Sequence[Arm]
    server_flags: Sequence[str] = ()
    """Of every server that is started: model, pool, and whatever the user adds."""
    threads: int = 2
    block: int = 10
    """Requests that one arm answers before the next has its turn; 0: all."""
    warm_up: int = 0
    """The first so many requests of each cell are sent and kept, but marked."""
    max_new_tokens: int | None = None
    """At most; None: what the request says."""
    history: History = "own"
    body: Mapping[str, Any] = field(default_factory=dict)
    """Added to the requests of all arms."""
    contextpilot_python: Path | None = None
    seed: int = 0
    max_servers: int = 6
    flush: bool = False
    """Servers that are already there start every cell with empty caches, too, as those that are started always do."""
    resume_warm_up: int = 100
    """A run that goes on first sends each arm again what it had served last, so many requests, and the other turns of these
    conversations and of those that go on: its cache is gone. Nothing of it is measured."""
    timeout_s: float = 600.0
    """Without a word from the server."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Filled by `measure`: `servers` (arm -> what really runs), `skipped` (arm -> why), `resumed_at` (dates)."""
