"""Where the loaded model keeps the evidence for selectors: layers and heads, and the file that
remembers them.

The papers fix the second layer (CacheBlend) and the last one (FusionRAG). Which layers tell the
tokens that matter differs between models, so it is measured (calibration_trial.py), once for a
config and its weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from radix_ext import FusionRequest
from radix_ext.fusion_request import MAX_AUTO
from sglang_chunkcache.config import cache_folder
from sglang_chunkcache.fusion.measure import Head

logger = logging.getLogger(__name__)


MARGIN = 2
"""How many times the tokens that sufficed for the calibration's prompts a quality takes. The
prompts are few, and an answer hangs on single tokens: of others one in seven needed a lower limit
than all of them (eval/LOG.md)."""


class Step(NamedTuple):
    """Of recomputing tokens that deviate more than `above`: gain and their share, on average."""

    above: float
    gain: float
    share: float


@dataclass(frozen=True)
class Calibration:
    """Without measurements: the papers' layers, and no head."""

    depth: int = 2
    """The layer, counted from 1, whose KV tells what deviates."""
    layer: int = 0
    """The layer, counted from 1, whose attention tells what the question looks at; 0: the last."""
    heads: tuple[Head, ...] = ()
    """Heads whose attention tells which tokens look beyond their chunk."""
    steps: tuple[Step, ...] = ()
    """How much deviation can stay, from few tokens recomputed to many; empty: unknown."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What was measured; empty: nothing."""

    def fits(self, num_layers: int, num_heads: int) -> bool:
        """Whether a model of that size has these layers and heads."""
        has_heads = all(0 <= at < num_layers and 0 <= head < num_heads for at, head in self.heads)
        return has_heads and 1 <= self.depth <= num_layers and 0 <= self.layer <= num_layers

    def resolve(self, fusion: FusionRequest) -> FusionRequest:
        """The request with the layers that it leaves to calibration, which its recipe then names:
        another calibration makes other fused KV. So the front, which knows no calibration, does not
        aim its order at such chains."""
        # `critical` reads heads, too, which the calibration alone knows.
        if fusion.selector != "critical" and fusion.depth is not None and fusion.layer is not None:
            return fusion
        depth = self.depth if fusion.depth is None else fusion.depth
        layer = self.layer if fusion.layer is None else fusion.layer
        read = self.heads if fusion.selector == "critical" else ()
        heads = "+".join(f"{at}.{head}" for at, head in read)
        recipe = f"{fusion.recipe}/at={depth}.{layer}.{heads}"
        fusion = replace(fusion, depth=depth, layer=layer, recipe=recipe)
        if fusion.quality is None or not self.steps:
            return fusion
        # Steps go from few tokens to many, so the first that gains enough takes the fewest.
        enough = fusion.quality * max(step.gain for step in self.steps)
        sufficed = next(step for step in self.steps if step.gain >= enough)
        step = next(
            (step for step in self.steps if step.share >= MARGIN * sufficed.share), self.steps[-1]
        )
        # In full: limits that print alike must not share fused nodes.
        recipe = f"{fusion.recipe}/above={step.above!r}"
        return replace(fusion, ratio=MAX_AUTO, above=step.above, expected=step.share, recipe=recipe)

    def as_dict(self) -> dict[str, Any]:
        """For stats and file; layers and heads counted from 1."""
        return {
            "depth": self.depth,
            "layer": self.layer,
            "heads": [{"layer": layer + 1, "head": head + 1} for layer, head in self.heads],
            "steps": [step._asdict() for step in self.steps],
            "figures": dict(self.figures),
        }


def file_of(hf_config: Any, weights: int) -> Path:
    """Where the calibration for weights of this fingerprint is kept, under `XDG_CACHE_HOME`."""
    text = json.dumps(hf_config.to_dict(), sort_keys=True, default=str)
    key = blake2b(f"{weights}\0{text}".encode(), digest_size=12).hexdigest()
    return cache_folder() / f"selection-{key}.json"


def load(path: Path) -> Calibration | None:
    """What is kept there. None: nothing, or nothing that can be read."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        heads = tuple((int(each["layer"]) - 1, int(each["head"]) - 1) for each in told["heads"])
        steps = tuple(Step(*(float(each[name]) for name in Step._fields)) for each in told["steps"])
        return Calibration(
            int(told["depth"]), int(told["layer"]), heads, steps, dict(told["figures"])
        )
    except FileNotFoundError:
        return None
    # json allows Infinity, which int() refuses as an ArithmeticError, and nests without a limit.
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        logger.warning("chunk cache: %s is no calibration: %r", path, error)
        return None


def save(path: Path, calibration: Calibration) -> None:
    """Keep it; a warning where that cannot be done."""
    # Another server may read the file meanwhile, or write its own: it is there whole or not.
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(calibration.as_dict()), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        logger.warning("chunk cache: the calibration is not kept: %s", error)
