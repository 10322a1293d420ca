"""Measures, on prompts, which layers and heads of the loaded model tell the tokens that matter.

    gain = 1 - KL(full, moved and recomputed) / KL(full, moved)       mean over the answer's tokens

A choice of `ratio` of the tokens is tried for the deviation at each depth and for the question's
attention in each layer (in a deep model at every few, then beside the best). Chosen is the first of
those that gain nearly the most: what is before it runs for each request. The head is chosen by how
many of the tokens that deviate most at that depth are among the `BY_CONTEXT` tokens that look
beyond their chunk most. Then tokens are recomputed down to less and less deviation, which tells how
much of it may stay (ratio "auto").
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from radix_ext.fusion_request import BY_CONTEXT, MAX_AUTO
from sglang_chunkcache.errors import BusyError
from sglang_chunkcache.fusion.calibration import Calibration, Step, file_of, load, save
from sglang_chunkcache.fusion.calibration_places import (
    MAX_ANSWER,
    NUM_PLACES,
    NUM_ROWS,
    Measured,
    Place,
    Trial,
)
from sglang_chunkcache.fusion.measure import Head
from sglang_chunkcache.fusion.selectors.top_k import num_critical
from sglang_chunkcache.fusion.trial_rows import Means
from sglang_chunkcache.wire.state import CalibrationPrompt

logger = logging.getLogger(__name__)

MAX_TRIED = 8
"""Depths, and layers, that are tried before the neighbours of the best."""
SHARES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
"""Of all tokens: the shares whose least deviation is tried as the limit."""
MAX_SECONDS = 30
"""About: fewer prompts are tried, one at least, where all of them would take longer. Fewer prompts
find less, but SGLang's health check fails after 20 s in which nothing is answered."""
MIN_KL, MIN_GAIN = 1e-4, 0.1
"""Below, nothing is to be restored, or no depth or layer restores it: the paper's stays."""
MIN_KEPT = 0.9
"""Share of the most gain that is nearly the most. So much of the gain of comparing all tokens must
comparing the proposed ones have."""


class Calibrator:
    """Measures the loaded model, and remembers what it found, by the fingerprint of the weights.
    None: they cannot be told apart.

    ratio: share of the tokens that choices are tried with.
    """

    def __init__(self, means: Means, ratio: float) -> None:
        self._means, self._ratio = means, ratio

    def num_slots(self, prompts: Sequence[CalibrationPrompt], room: int) -> int:
        """KV slots that measuring takes.

        Raises:
            ValueError: no prompt, one longer than the context, or more than `room` slots; with the
                figures.
            BusyError: requests that run have too many rows.
        """
        if not prompts:
            raise ValueError("calibration needs prompts")
        if (num_free := self._means.params.req_to_token_pool.available_size()) < NUM_ROWS:
            raise BusyError(f"{NUM_ROWS} free request rows are needed, and {num_free} are free")
        longest = max(prompt.num_tokens for prompt in prompts) + MAX_ANSWER
        needed = NUM_ROWS * longest + NUM_PLACES * sum(prompt.num_tokens for prompt in prompts)
        if longest > self._means.runner.model_config.context_len or needed > room:
            raise ValueError(
                f"{len(prompts)} prompts of up to {longest} tokens need {needed} KV slots, {room}"
                " can be had"
            )
        return needed

    def kept(self, weights: int | None) -> Calibration:
        """What was found with these weights; the papers' layers if nothing was."""
        kept = None if weights is None else load(self._file(weights))
        if kept is None:
            return Calibration()
        config = self._means.runner.model_config
        if not kept.fits(config.num_hidden_layers, config.num_attention_heads):
            logger.warning(
                "chunk cache: the kept calibration is of no such model: %s", kept.as_dict()
            )
            return Calibration()
        return kept

    def measure(self, prompts: Sequence[CalibrationPrompt], weights: int | None) -> Calibration:
        """See `calibrate`. What was found is kept, too."""
        found = calibrate(self._means, prompts, self._ratio)
        if weights is not None:
            save(self._file(weights), found)
        return found

    def _file(self, weights: int) -> Path:
        return file_of(self._means.runner.model_config.hf_config, weights)


def calibrate(means: Means, prompts: Sequence[CalibrationPrompt], ratio: float) -> Calibration:
    """Layers and heads of the loaded model.

    Raises:
        RuntimeError: the pools have too few free slots or rows.
    """
    started = time.perf_counter()
    lens = [prompt.num_tokens for prompt in prompts]
    longest = max(lens) + MAX_ANSWER
    means.synchronize()  # the attention backend's buffers may serve a batch that still runs
    with (
        torch.no_grad(),
        means.rows([longest] * NUM_ROWS) as rows,
        means.slots(NUM_PLACES * sum(lens)) as slots,
    ):
        places: list[Place] = []
        for prompt, part in zip(
            prompts, torch.split(slots, [NUM_PLACES * n for n in lens]), strict=True
        ):
            # Prompts share rows: then a trial uses `moved` alone, which is filled each time.
            places += Trial(means, prompt, rows).places(part.chunk(NUM_PLACES))
            # A third of the time is for prompts, the rest for choices (`_Search`).
            if time.perf_counter() - started > MAX_SECONDS / 3:
                break
        found = _Search(means, places, ratio).run()
        means.synchronize()
    figures = {**found.figures, "ratio": ratio, "seconds": round(time.perf_counter() - started, 2)}
    return replace(found, figures=figures)


class _Search:
    """What choices gain, on average over the places."""

    def __init__(self, means: Means, places: Sequence[Place], ratio: float) -> None:
        self._means, self._ratio = means, ratio
        self._num_layers = means.pool.layer_num
        # Of one place: three lists of choices, and for each choice evidence, a pass, question and
        # answer.
        num_choices = 2 * min(self._num_layers, 2 * MAX_TRIED) + len(SHARES)
        expected, moved = 0.0, list[float]()
        for place in places:
            started = time.perf_counter()
            kl = place.kl(torch.arange(0))
            expected += 3 * num_choices * (time.perf_counter() - started)
            # Both places of the first prompt are tried, however long they take.
            if len(moved) >= NUM_PLACES and expected > MAX_SECONDS * 2 / 3:
                break
            moved.append(kl)
        self._places, self._moved = places[: len(moved)], fmean(moved)

    def run(self) -> Calibration:
        if self._moved < MIN_KL:
            return Calibration(figures=self._figures())
        num_layers = self._num_layers
        # Layer 1 cannot tell deviation: its KV depends on its token alone.
        depths = self._try(range(2, num_layers + 1), Place.deviation)
        layers = self._try(range(1, num_layers + 1), Place.question)
        depth = _first_of_best(depths, otherwise=Calibration.depth)
        layer = _first_of_best(layers, otherwise=Calibration.layer)
        head, recall = self._head(depth)
        heads: tuple[Head, ...] = (head,)
        measured, gain = self._critical(depth, layer, heads)
        # Without a head `critical` compares all tokens.
        all_measured, gain_of_all = self._critical(depth, layer, ())
        if gain < MIN_KEPT * gain_of_all:
            heads, measured = (), all_measured
        figures = self._figures(
            gain_by_depth=dict(sorted(depths.items())),
            gain_by_layer=dict(sorted(layers.items())),
            recall_of_heads=round(recall, 4),
            gain_of_critical=gain,
            gain_of_critical_on_all=gain_of_all,
        )
        return Calibration(depth, layer, heads, self._steps(measured), figures)

    def _critical(
        self, depth: int, layer: int, heads: tuple[Head, ...]
    ) -> tuple[list[Measured], float]:
        """What the selector of this name knows of each place, and what its choice gains."""
        found = [place.critical(depth, layer, heads, self._ratio) for place in self._places]
        return found, self._gain(each.choose(self._ratio) for each in found)

    def _figures(self, **more: Any) -> dict[str, Any]:
        return {"places": len(self._places), "moved": round(self._moved, 6), **more}

    def _steps(self, measured: Collection[Measured]) -> tuple[Step, ...]:
        """What recomputing everything above a limit gains, for limits that `SHARES` exceed."""
        compared = torch.cat([each.compared for each in measured]).sort(descending=True).values
        num_tokens = sum(chunk.num_tokens for each in measured for chunk in each.chunks)
        steps = []
        for share in SHARES:
            # Only proposed tokens were compared: of a larger share no limit is known.
            if (k := num_critical(share, num_tokens)) >= len(compared):
                break
            above = float(compared[k])  # k tokens deviate more
            gain = self._gain(each.choose(MAX_AUTO, above) for each in measured)
            steps.append(Step(above, gain, share))
        return tuple(steps) if any(step.gain >= MIN_GAIN for step in steps) else ()

    def _try(self, choices: range, score_of: Callable[[Place, int], Tensor]) -> dict[int, float]:
        """Gains of the choices that were tried."""
        tried: dict[int, float] = {}
        step = max(1, ceil(len(choices) / MAX_TRIED))
        wanted: Sequence[int] = choices[::step]
        while True:
            for at in wanted:
                if at in choices and at not in tried:
                    tried[at] = self._gain(
                        place.highest(score_of(place, at), self._ratio) for place in self._places
                    )
            if step == 1:
                return tried
            step = ceil(step / 2)
            best = _first_of_best(tried, otherwise=max(tried, key=tried.__getitem__))
            wanted = best - step, best + step

    def _gain(self, chosen: Iterable[Tensor]) -> float:
        """Of what is recomputed in each place."""
        pairs = zip(self._places, chosen, strict=True)
        left = fmean(place.kl(positions) for place, positions in pairs)
        # No division by 0: where moved KV answers alike, `run` has returned.
        return round(1 - left / self._moved, 4)

    def _head(self, depth: int) -> tuple[Head, float]:
        """The head that points at most of what deviates most, and at which share of it."""
        found = []
        for outward, wanted in (place.looks(depth, self._ratio / 3) for place in self._places):
            k = num_critical(BY_CONTEXT, outward.shape[-1])
            # Stable, as `top_k.highest`: ties go to the earlier token.
            ranks = outward.sort(dim=-1, descending=True, stable=True).indices[..., :k]
            found.append(wanted[ranks].sum(-1) / wanted.sum())
        recall = torch.stack(found).mean(0)
        layer, head = divmod(int(recall.argmax()), recall.shape[1])
        return (layer, head), float(recall.max())


def _first_of_best(tried: Mapping[int, float], *, otherwise: int) -> int:
    """The first choice that gains nearly the most, if that is enough."""
    most = max(tried.values(), default=0.0)
    good = [at for at, gain in tried.items() if gain >= max(MIN_GAIN, MIN_KEPT * most)]
    return min(good, default=otherwise)
