"""Calibration finds where a model keeps its evidence, wherever that is,
and leaves the pools as they were."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.world.canned import prompts
from radix_ext import FusionRequest
from radix_ext.fusion_request import MAX_AUTO
from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.errors import BusyError
from sglang_chunkcache.front.calibration import CANNED
from sglang_chunkcache.front.prompt import PromptAssembler
from sglang_chunkcache.fusion import calibration
from sglang_chunkcache.fusion.calibration import Calibration, Step
from sglang_chunkcache.fusion.calibration_places import NUM_ROWS
from sglang_chunkcache.fusion.calibration_trial import Calibrator, calibrate
from sglang_chunkcache.fusion.trial_rows import Means
from sglang_chunkcache.wire.state import CalibrationPrompt
from tests import models
from tests.kit.pieces import pieces_of
from tests.kit.tensors import means_of

NUM_ADDED = 4
Trial = Callable[[Path], Means]


def stretched(folder: Path, before: int) -> Path:
    """The bundled model with layers in front of `before` (from 0) that do nothing:
    what they add to the stream is zero."""
    weights = load_file(model_dir() / "model.safetensors")
    made: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if not name.startswith("model.layers."):
            made[name] = tensor
            continue
        number, rest = name.removeprefix("model.layers.").split(".", 1)
        layer = int(number)
        made[f"model.layers.{layer + (NUM_ADDED if layer >= before else 0)}.{rest}"] = tensor
        if layer == 0:
            scale = 0 if rest.startswith(("self_attn.o_proj", "mlp.down_proj")) else 1
            for added in range(before, before + NUM_ADDED):
                made[f"model.layers.{added}.{rest}"] = scale * tensor
    config = json.loads((model_dir() / "config.json").read_text())
    config["num_hidden_layers"] += NUM_ADDED
    (folder / "config.json").write_text(json.dumps(config))
    save_file(made, folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine would try fewer prompts, and find less."""
    monkeypatch.setattr("sglang_chunkcache.fusion.calibration_trial.MAX_SECONDS", math.inf)


@pytest.fixture
def trial_of() -> Iterator[Trial]:
    runners = []

    def trial_of(path: Path) -> Means:
        runner = models.make_runner(path)
        runners.append(runner)
        return means_of(runner)

    yield trial_of
    for runner in runners:
        models.assert_given_back(runner)


def canned(num_prompts: int) -> list[CalibrationPrompt]:
    from transformers import AutoTokenizer

    assembler = PromptAssembler(AutoTokenizer.from_pretrained(model_dir()), separator="\n\n")
    found = []
    for line in CANNED.read_text(encoding="utf-8").splitlines()[:num_prompts]:
        example = json.loads(line)
        pieces = pieces_of(assembler, [{"role": "user", "content": example["question"]}])
        chunks = [list(assembler.chunk(text, "").token_ids) for text in example["chunks"]]
        found.append(CalibrationPrompt([*pieces.lead, *pieces.intro], chunks, list(pieces.outro)))
    return found


def test_canned_prompts_are_those_that_are_made() -> None:
    assert [json.loads(line) for line in CANNED.read_text(encoding="utf-8").splitlines()] == list(
        prompts()
    )


@pytest.mark.parametrize(
    ("before", "depth", "layer", "head"),
    [
        (1, 7, 7, 6),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((0, 7, 7, 6), (3, 3, 3, 2))),
    ],
)
def test_calibration_follows_the_model(
    tmp_path: Path, trial_of: Trial, before: int, depth: int, layer: int, head: int
) -> None:
    """The third layer's KV deviates, by the second's attention; idle layers before shift that."""
    means = trial_of(stretched(tmp_path, before))
    found = calibrate(means, canned(2), ratio=0.15)
    assert (found.depth, found.layer) == (depth, layer)
    assert found.heads[0][0] + 1 == head
    assert found.figures["gain_by_depth"][depth] > 0.9
    assert found.figures["gain_by_depth"][2] < 0.1
    assert found.figures["gain_of_critical"] > 0.9
    limits = [step.above for step in found.steps]
    assert limits == sorted(limits, reverse=True)
    assert found.steps[-1].gain > found.steps[0].gain


def test_nothing_to_restore_leaves_the_papers_layers(trial_of: Trial) -> None:
    """One chunk, the same in any place: moved KV answers as computed KV does."""
    means = trial_of(model_dir())
    prompt = canned(1)[0]
    alone = CalibrationPrompt(prompt.head, [prompt.chunks[0]], prompt.question)
    found = calibrate(means, [alone], ratio=0.15)
    assert (found.depth, found.layer, found.heads) == (2, 0, ())
    assert found.figures["moved"] < 1e-4
    assert not found.steps


def test_prompts_that_cannot_be_measured_on_are_refused_with_the_figures(trial_of: Trial) -> None:
    """Beforehand: nothing need be evicted for them. As many slots are named as measuring takes."""
    means = trial_of(model_dir())
    calibrator, prompt = Calibrator(means, 0.15), canned(1)[0]
    needed = calibrator.num_slots([prompt], 2048)
    assert calibrator.num_slots([prompt], needed) == needed
    message = rf"1 prompts of up to \d+ tokens need {needed} KV slots, {needed - 1} can be had"
    with pytest.raises(ValueError, match=message):
        calibrator.num_slots([prompt], needed - 1)
    with pytest.raises(ValueError, match="needs prompts"):
        calibrator.num_slots([], 2048)
    with pytest.raises(ValueError, match="prompts of up to"):
        calibrator.num_slots([CalibrationPrompt([1] * 2048, [], [])], 1 << 20)
    allocator = means.runner.token_to_kv_pool_allocator
    taken = allocator.alloc(2048 - needed)
    calibrator.measure([prompt], None)
    allocator.free(taken)
    rows = means.runner.req_to_token_pool
    taken_rows = rows.alloc_rows(rows.available_size() - NUM_ROWS + 1)
    with pytest.raises(BusyError, match="3 free request rows are needed, and 2 are free"):
        calibrator.num_slots([prompt], needed)
    rows.free_slots.extend(taken_rows)


def test_calibration_is_kept_for_a_model_and_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that cannot be read is no calibration, and neither is that of other weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = Calibration(3, 4, ((1, 3), (0, 2)), (Step(0.25, 0.5, 0.01),), {"gain": 0.5})
    monkeypatch.setattr("sglang_chunkcache.fusion.calibration_trial.calibrate", lambda *_: found)
    config = SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4})
    model = SimpleNamespace(hf_config=config, num_hidden_layers=4, num_attention_heads=4)
    means: Any = SimpleNamespace(runner=SimpleNamespace(model_config=model))
    keeping = Calibrator(means, 0.15)
    assert keeping.measure([], None) == found
    assert list(tmp_path.iterdir()) == []
    assert keeping.measure([], 7) == found
    none = Calibration()
    assert [keeping.kept(weights) for weights in (7, 8, None)] == [found, none, none]
    [path] = tmp_path.rglob("*.json")
    kept = path.read_text()
    odd = ('"depth": 3', "Infinity"), ('"depth": 3', "0"), ('"layer": 4', "5"), ('"head": 4', "5")
    wrong = [kept.replace(each, each[:-1] + value) for each, value in odd]
    for broken in ("{}", "[" * 100_000, *wrong):
        path.write_text(broken)
        assert keeping.kept(7) == Calibration()
    assert calibration.load(tmp_path / "none") is None


def test_requests_that_leave_layers_open_get_the_calibrated_ones() -> None:
    found, other = Calibration(5, 6, ((1, 3),)), Calibration(5, 6, ((1, 3), (0, 2)))
    asked = FusionRequest("critical", 0.1, "r", depth=None, layer=None)
    assert (found.resolve(asked).depth, found.resolve(asked).layer) == (5, 6)
    fixed = FusionRequest("critical", 0.1, "r", depth=3, layer=0)
    assert (found.resolve(fixed).depth, found.resolve(fixed).layer) == (3, 0)
    papers = FusionRequest("deviation", 0.1, "r")
    assert found.resolve(papers) == papers
    deviation = FusionRequest("deviation", 0.1, "r", depth=None)
    requests = asked, fixed, deviation
    recipes = {one.resolve(each).recipe for one in (found, other) for each in requests}
    assert len(recipes) == 5  # heads are nothing to `deviation`


def test_quality_takes_twice_what_reached_it() -> None:
    """Of the most that any limit did. Without measurements the ratio counts."""
    figures = (0.5, 0.4, 0.01), (0.25, 0.76, 0.02), (0.125, 0.7, 0.05), (0.0625, 0.8, 0.1)
    steps = tuple(Step(*each) for each in figures)
    asked = FusionRequest("deviation", 0.15, "r", depth=None, quality=0.9)
    for quality, step in ((0.5, steps[1]), (0.9, steps[2]), (0.96, steps[3]), (1.0, steps[3])):
        found = Calibration(3, 3, (), steps).resolve(replace(asked, quality=quality))
        assert (found.above, found.expected_ratio) == (step.above, step.share)
        assert found.ratio == MAX_AUTO
        assert found.cheaper is None
    unknown = Calibration(3, 3).resolve(asked)
    assert (unknown.above, unknown.expected_ratio, unknown.ratio) == (None, 0.15, 0.15)
    other = Calibration(3, 3, (), (Step(0.4, 0.9, 0.01),)).resolve(asked)
    assert other.recipe != Calibration(3, 3, (), steps).resolve(asked).recipe
