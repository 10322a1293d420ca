"""`python -m eval roofline --model-shape M --machine X`: times of a moved request by arithmetic,
step by step, and of the prefill it replaces.

    as built    the code as it is: its launches, reads and host work, counted
    graphs      likewise with its passes in SGLang's prefill graphs, which no GPU has tried
    reviewed    as it was before the first GPU run
    limit       with the passes as one, evidence by the same kernels, the choice on the device

Rates and shares are eval/machines.py's, counts eval/roofline/build.py's. No model and no GPU. For
the shape and the machine of the GPU records (llama-3.1-8b, h200) their figures stand beside.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from eval.errors import CommandError
from eval.machines import MACHINES, SHAPES
from eval.outcome import Row, add_out_option, open_run, table, tell
from eval.roofline.build import BUILT, GRAPHS, LIMIT, REVIEWED, Build
from eval.roofline.measured import MEASURED_ON, compared
from eval.roofline.model import QUESTION_TOKENS, STEPS, Model, Prompt, Step
from eval.run import Sample
from retrieval.command_line import Parser

BUILDS = {"built": BUILT, "graphs": GRAPHS, "reviewed": REVIEWED, "limit": LIMIT}
MIN_TOKENS, MAX_TOKENS = 128, 1 << 20


def main(argv: Sequence[str]) -> int:
    """Print the tables, or with --json one JSON object, and write a record."""
    options = _parser().parse_args(argv)
    if not 0 < options.ratio <= 1:
        raise CommandError(f"--ratio must be over 0, up to 1, but got {options.ratio:g}")
    for num_tokens in options.tokens:
        if not MIN_TOKENS <= num_tokens <= MAX_TOKENS:
            raise CommandError(
                f"--tokens must be from {MIN_TOKENS} to {MAX_TOKENS} but got {num_tokens}"
            )
    options.tokens = sorted(set(options.tokens))
    options.choose_s = options.choose_python_s = None
    if options.time_choice:
        from eval.roofline.host import choice_s  # only here: it needs SGLang

        found = [(each, choice_s(Prompt(each, options.ratio))) for each in options.tokens]
        options.choose_s = [(each, taken.total) for each, taken in found]
        options.choose_python_s = [(each, taken.python) for each, taken in found]
    with open_run("roofline", options, partial(summarize, options), without=("json",)) as run:
        for num_tokens in options.tokens:
            for name in BUILDS:
                key = f"{name}/{num_tokens}"
                if key not in run:
                    run.add(key, _sample(options, name, num_tokens))
        if options.json:
            print(json.dumps(run.results()))
            return 0
    tell(run)
    return 0


def summary_rows(
    machine: str,
    shape: str,
    tokens: Sequence[int],
    ratio: float,
    builds: Mapping[str, Build] = BUILDS,
) -> list[Row]:
    """A row a length: times in milliseconds, and prefill's over them."""
    rows = []
    for num_tokens in tokens:
        prompt, row = Prompt(num_tokens, ratio), dict[str, Any]()
        for name, build in builds.items():
            model = Model(MACHINES[machine], SHAPES[shape], build)
            steps, full = model.steps(prompt), model.full(prompt).seconds
            if not row:
                row = {"tokens": num_tokens, "full": _ms(full)}
            if name in ("graphs", "reviewed"):
                row[name] = _over(full, model.device_s(steps))
                continue
            row[name] = _over(full, model.device_s(steps))
            row[f"{name}, from host"] = _over(full, model.host_s(steps))
            row[f"{name}, scored"] = _over(full, model.scored_s(prompt, steps))
        rows.append(row)
    return rows


def step_rows(
    machine: str, shape: str, num_tokens: int, ratio: float, builds: Mapping[str, Build] = BUILDS
) -> list[Row]:
    """A row a step: what it does as built, and its time by build in milliseconds."""
    prompt = Prompt(num_tokens, ratio)
    models = {
        name: Model(MACHINES[machine], SHAPES[shape], build) for name, build in builds.items()
    }
    steps = {name: model.steps(prompt) for name, model in models.items()}
    full = models["built"].full(prompt)
    every: dict[str, Mapping[str, Step]] = {"full": dict.fromkeys(models, full)}
    every |= {step: {name: steps[name][step] for name in models} for step in STEPS}
    rows = []
    for step, by_build in every.items():
        built = by_build["built"]
        rows.append(
            {
                "step": step,
                "GFLOP": round(built.flops / 1e9),
                "MB": round(built.device_bytes / 1e6),
                "bus MB": round(built.bus_bytes / 1e6),
                "launches": round(built.launches),
                "device": _ms(built.device_s),
                "host": _ms(built.host_s),
                "bound": built.bound,
                **{name: _ms(each.seconds) for name, each in by_build.items()},
            }
        )
    return rows


def summarize(options: argparse.Namespace, samples: Sequence[Sample]) -> dict[str, Any]:
    """`results`: the tables, and in a sentence a length what takes longest."""
    machine, shape, ratio = options.machine, options.model_shape, options.ratio
    builds = _builds(options)
    tokens = list(dict.fromkeys(sample["cell"]["tokens"] for sample in samples))
    note = (
        f"Milliseconds by arithmetic, and how often prefill takes that; {ratio:g} recomputed, a"
        f" question of {QUESTION_TOKENS} tokens. Scored: `context`, no evidence is measured."
    )
    title = f"{shape} on {machine}"
    tables = [table(title, summary_rows(machine, shape, tokens, ratio, builds), note)]
    for num_tokens in tokens:
        rows = step_rows(machine, shape, num_tokens, ratio, builds)
        note = "As built; the last four are milliseconds by build. Load is in place of copy."
        tables.append(table(f"{title}, {num_tokens:,} tokens: steps", rows, note))
    if options.choose_s is not None:
        times = zip(options.choose_s, options.choose_python_s, strict=True)
        rows = [
            {"tokens": each, "CPU": _ms(total), "Python": _ms(python)}
            for (each, total), (_, python) in times
        ]
        note = "Milliseconds of one of this machine's cores; Python: torch computes nothing."
        tables.append(table("Choosing", rows, note))
    if (shape, machine) == MEASURED_ON and tokens:
        tables.append(compared())
    return {"tables": tables, "verdict": [_told(options, each) for each in tokens]}


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval roofline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-shape", choices=SHAPES, required=True)
    add("--machine", choices=MACHINES, required=True)
    text = "prompt lengths, by commas; default: 2048,8192,32768"
    add("--tokens", type=_lengths, default=[2048, 8192, 32_768], help=text)
    add("--ratio", type=float, default=0.15, help="recomputed share; default: %(default)s")
    text = "take the host's time of choosing on this machine, in place of the constants"
    add("--time-choice", action="store_true", help=text)
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add_out_option(parser)
    return parser


def _lengths(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers with commas but got {text!r}"
        ) from None


def _builds(options: argparse.Namespace) -> dict[str, Build]:
    if options.choose_s is None:
        return BUILDS
    timed = {name: BUILDS[name]._replace(choose_s=options.choose_s) for name in ("built", "graphs")}
    return BUILDS | timed


def _sample(options: argparse.Namespace, name: str, num_tokens: int) -> Sample:
    model = Model(MACHINES[options.machine], SHAPES[options.model_shape], _builds(options)[name])
    prompt = Prompt(num_tokens, options.ratio)
    steps = model.steps(prompt)
    times = {
        "full_s": model.full(prompt).seconds,
        "device_s": model.device_s(steps),
        "host_s": model.host_s(steps),
        "scored_s": model.scored_s(prompt, steps),
    }
    return {
        "arm": name,
        "cell": {"tokens": num_tokens},
        "request": "0",
        "metrics": times,
        "steps": {step: each._asdict() for step, each in steps.items()},
    }


def _told(options: argparse.Namespace, num_tokens: int) -> str:
    model = Model(MACHINES[options.machine], SHAPES[options.model_shape], _builds(options)["built"])
    prompt = Prompt(num_tokens, options.ratio)
    steps = model.steps(prompt)
    by_host = [each for name, each in steps.items() if name != "load" and each.bound == "host"]
    total, idle = model.device_s(steps), sum(each.seconds for each in by_host)
    return (
        f"{num_tokens:,} tokens: moved is {model.full(prompt).seconds / total:.1f} times as fast as"
        f" prefill; the host decides {idle / total:.0%} of its time."
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1 if seconds < 0.1 else None)


def _over(full: float, seconds: float) -> str:
    return f"{_ms(seconds):g} ({full / seconds:.1f})"
