"""Runs made up for the tests of compare, report and charts, seeded."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from eval.contrast import contrast_arms, sentences
from eval.replay.command import main as replay
from eval.stats import summary

HOSTILE = '<script>alert(1)</script> & "quoted" $x_1$ naïve 漢字 ' + "very-long-" * 12
Sample = dict[str, Any]


def make_served(
    arms: Mapping[str, float],
    *,
    cells: Sequence[dict[str, Any]] = ({},),
    requests: int = 40,
    seed: int = 0,
) -> list[Sample]:
    """Samples as `serve` takes them: arm -> how much slower than 0.2 s it is;
    times of one request go together."""
    rng = random.Random(seed)
    samples = []
    for cell in cells:
        for number in range(requests):
            size = rng.lognormvariate(0, 0.5)
            for arm, slow in arms.items():
                pace = 0.2 * slow * (1 + 0.2 * cell.get("rate", 0))
                ttft = pace * size * rng.lognormvariate(0, 0.15)
                exact = 0 if arm == "no-cache" else rng.randrange(400)
                metrics = {"ttft_s": ttft, "itl_s": 0.02 * size, "e2e_s": ttft + 0.2}
                about: Sample = {"cell": cell, "warm_up": number < 2, "block": number // 4}
                fates = {"exact": exact, "relocated": 40, "recomputed": 10, "computed": 550 - exact}
                samples.append(
                    {
                        **_asked(arm, number, **about),
                        "sent_s": number * 0.9,
                        "metrics": {**metrics, "hit_share": exact / 400},
                        "fates": fates,
                    }
                )
    return samples


def _asked(arm: str, number: int, *, cell: dict[str, Any], **more: Any) -> Sample:
    about = {"key": f"{cell}/{arm}/{number}", "arm": arm, "cell": cell}
    return {**about, "request": f"made:{number}", "warm_up": False, "fates": None, **more}


def make_failed(arm: str, requests: int = 10) -> list[Sample]:
    """Every request refused."""
    refused: Sample = {"metrics": {}, "error": "refused"}
    return [_asked(arm, n, cell={}, **refused) for n in range(requests)]


def summarize(samples: Sequence[Sample], *, against: str) -> dict[str, Any]:
    """`results` in the shape that all commands write."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if not sample["warm_up"]:
            groups.setdefault((json.dumps(sample["cell"]), sample["arm"]), []).append(sample)
    cells = []
    for (cell, arm), taken in groups.items():
        good = [sample for sample in taken if not sample.get("error")]
        names = dict.fromkeys(name for sample in good for name in sample["metrics"])
        values = {
            name: [s["metrics"][name] for s in good if s["metrics"].get(name) is not None]
            for name in names
        }
        metrics = {name: figures(name, each) for name, each in values.items()}
        spent = sum(sample["metrics"].get("e2e_s", 0.5) for sample in good) or 1.0
        rates = {"requests_per_s": len(good), "output_tokens_per_s": 8 * len(good)}
        counts = {"n": len(good), "errors": len(taken) - len(good), "metrics": metrics}
        throughput = {name: count / spent for name, count in rates.items()}
        cells.append({"arm": arm, "cell": json.loads(cell), **counts, "throughput": throughput})
    arms = list(dict.fromkeys(sample["arm"] for sample in samples))
    of = {arm: [sample for sample in samples if sample["arm"] == arm] for arm in arms}
    contrasts = [
        one
        for arm in arms
        if arm != against and against in of
        for one in contrast_arms(of[against], of[arm], a=against, b=arm)
    ]
    return {"cells": cells, "contrasts": contrasts, "verdict": sentences(contrasts)}


def figures(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, quantiles, interval: of the median for times, of the mean for the rest."""
    return summary(values, of_median=name.endswith("_s"), draws=50)


def make_ratio(requests: int = 12) -> list[Sample]:
    """Samples as `quality ratio` takes them:
    F1 rises with the share recomputed, an arm a selector."""
    rng = random.Random(5)
    rows: list[tuple[str, dict[str, Any], int, float]] = []
    for arm, gain in {"query": 0.5, "random": 0.3, "first": 0.1}.items():
        for ratio in (0.05, 0.15, 0.3, 0.5):
            cell, mean = {"kind": "linked", "ratio": ratio}, min(1.0, 0.35 + gain * ratio * 2)
            rows += [(arm, cell, n, mean) for n in range(requests)]
    rows += [("full-prefill", {"kind": "linked"}, n, 0.95) for n in range(requests)]
    samples = []
    for arm, cell, n, mean in rows:
        f1, em = min(1.0, max(0.0, rng.gauss(mean, 0.1))), float(rng.random() < mean)
        samples.append(_asked(arm, n, cell=cell, mode="ratio", metrics={"f1": f1, "em": em}))
    return samples


def make_permutation(requests: int = 12) -> dict[str, Any]:
    """`results` of `quality permutation`."""
    rng = random.Random(6)
    spread = [
        {"baseline": rng.random(), "mean": rng.random(), "sd": 0.1 * rng.random()}
        for _ in range(requests)
    ]
    told = [{"request": f"made:{n}", "metrics": {"f1": f1}} for n, f1 in enumerate(spread)]
    return {"cells": [], "contrasts": [], "verdict": [], "requests": told}


def write_replay(folder: Path, *options: str) -> Path:
    """A run of `replay` itself: 30 conversations of four turns,
    whose histories a small cache loses."""
    rng = random.Random(7)
    lines = [
        {
            "passages": [
                *rng.sample([f"{talk}-{n}" for n in range(6)], 2),
                *(f"all-{n}" for n in rng.sample(range(9), rng.choice((1, 3, 7)))),
            ],
            "conversation": f"{talk}",
        }
        for _ in range(4)
        for talk in range(30)
    ]
    trace = folder.parent / f"{folder.name}.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    grid = options or ("--order", "retriever", "tree", "--capacity", "0", "1000", "50")
    with redirect_stdout(io.StringIO()):
        assert replay(["--trace", str(trace), "--out", str(folder), *grid]) == 0
    return folder


def write_run(
    folder: Path,
    kind: str,
    samples: Sequence[Sample],
    results: Mapping[str, Any],
    *,
    complete: bool = True,
    **more: Any,
) -> Path:
    """A folder as `eval.run.Run` leaves it."""
    folder.mkdir(parents=True)
    record = {
        "kind": kind,
        "complete": complete,
        "baseline": None,
        "name": folder.name,
        "command": f"python -m eval {kind} --seed 3",
        "date": "2026-01-02T03:04:05+00:00",
        "git": {"sha": "0123456789abcdef", "dirty": True},
        "versions": {"sglang": "0.5.21", "torch": None},
        "machine": {"cores": 2, "processor": "x86_64", "gpu": None},
        "spec": {"seed": 3, "warm_up": 2 if kind == "serve" else 0},
        "results": dict(results),
        **more,
    }
    (folder / "record.json").write_text(json.dumps(record))
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def write_served(folder: Path, samples: Sequence[Sample], *, against: str, **more: Any) -> Path:
    """A run of `serve` with the results of its samples."""
    about = {"model": "random", "attention_backend": "torch_native"}
    about |= {"dtype": "bfloat16", "device": "cpu"}
    arms = dict.fromkeys(sample["arm"] for sample in samples)
    servers = {arm: {**about, "flags": ["--a", arm]} for arm in arms}
    results = {**summarize(samples, against=against), "servers": servers}
    results |= {"skipped": {"lmcache": "needs CUDA"}, **more.pop("results", {})}
    return write_run(folder, "serve", samples, results, **more)
