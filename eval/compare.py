"""`python -m eval compare A [B]`: differences beyond chance between two runs, or between the arms of one.

    python -m eval compare runs/monday runs/friday                   the same arm and request in both, B against A
    python -m eval compare runs/monday --against stock-lpm           the arms of one run, request by request
    python -m eval compare runs/monday runs/friday --fail-if-worse   exit code 1 where B is worse: for CI

Only requests that both sides answered count. Two runs are not interleaved, so differences of their times may come from the
machine. Runs of different requests get figures but no verdict: only the numbers of their requests are the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.contrast import Contrast, contrast_arms, direction, sentences
from eval.errors import CommandError
from eval.metrics import is_time
from eval.recorded import Recorded, read_recorded
from eval.report.tables import contrast_table
from eval.run import Sample

BASELINES = ("stock-lpm", "stock-fcfs", "no-cache", "retriever shown", "retriever", "full-prefill")
"""Default arms to compare against, if neither the run nor --against names one: see `compare_arms`."""
DIGESTS = ("requests_sha256", "trace_sha256")
SOURCES = ("task", "data", "hub", "corpus", "retriever", "scale", "seed", "k", "trace")
"""Settings that determine the requests of a record that has no digest of them."""


def main(argv: Sequence[str]) -> int:
    """Print table, sentences and one JSON object; returns 1 if B is worse and --fail-if-worse was given, else 0."""
    options = _parser().parse_args(argv)
    runs = [read_recorded(path) for path in options.records]
    if len(runs) > 2:
        raise CommandError(f"expected one or two records, got {len(runs)}")
    kinds = [" ".join(filter(None, [run.kind, run.record["spec"].get("bench")])) for run in runs]
    if len(set(kinds)) > 1:
        raise CommandError(f"A is a {kinds[0]} record and B a {kinds[1]} record")
    measured = set.intersection(*map(_measured, runs))
    if not measured:
        names = ", ".join(run.name for run in runs)
        raise CommandError(f"the samples of {names} have no metric in common: there is nothing to compare")
    if options.metric and not set(options.metric) & measured:
        raise CommandError(
            f"--metric: {', '.join(options.metric)} was not measured; measured: {', '.join(sorted(measured))}"
        )
    compare = compare_runs if len(runs) == 2 else compare_arms
    report = compare(*runs, against=options.against, metrics=options.metric)
    if not report["contrasts"]:
        arms = f"--against selects another arm of {runs[0].name}: {', '.join(map(repr, runs[0].arms))}"
        raise CommandError(f"no request was answered on both sides in the same cell; {arms}")
    print(contrast_table(report["contrasts"]).text())
    print("\n".join(["", *_sentences(report), ""]))
    print(json.dumps(report))
    worse = any(direction(found) == "worse" for found in report["contrasts"])
    return int(options.fail_if_worse and not report["no_verdict"] and worse)


def compare_runs(a: Recorded, b: Recorded, *, against: str | None, metrics: Sequence[str] | None) -> dict[str, Any]:
    """Compare each arm that both have; with `against`, that arm of A with every arm of B.

    Raises:
        CommandError: no arm to compare.
    """
    if against is not None:
        _has(a, against)
        arms = [(against, arm) for arm in b.arms]
    elif len(a.arms) == len(b.arms) == 1:
        arms = [(a.arms[0], b.arms[0])]
    else:
        arms = [(arm, arm) for arm in a.arms if arm in b.arms]
    if not arms:
        names = f"A has {', '.join(a.arms)}, B {', '.join(b.arms)}"
        raise CommandError(f"no arm is in both: {names}; --against selects A's")
    sides = [(_of(a, left), _of(b, right), f"{left} in A", f"{right} in B") for left, right in arms]
    report = {**_report(sides, metrics), "records": {"A": a.name, "B": b.name}, "differs": differences(a, b)}
    if others := other_requests(a, b):
        report |= {"verdict": [], "no_verdict": f"the runs are of different requests: {', '.join(others)} differ"}
    return report


def compare_arms(run: Recorded, *, against: str | None, metrics: Sequence[str] | None) -> dict[str, Any]:
    """Compare every other arm with `against`; by default the run's own baseline, else the first of the usual ones, else the
    run's first arm. A default arm that has nothing in common with any other, e.g. since it has cells of its own, is skipped.

    Raises:
        CommandError: the run has fewer than two arms, or none of that name.
    """
    if len(run.arms) < 2:
        raise CommandError(f"{run.folder} has {len(run.arms)} arm, so name a second record to compare it with")
    if against is not None:
        _has(run, against)
    usual = dict.fromkeys([run.record["spec"].get("against"), *BASELINES, *run.arms])
    samples = {arm: _of(run, arm) for arm in run.arms}
    for base in [name for name in usual if name in run.arms] if against is None else [against]:
        report = _report([(samples[base], samples[arm], base, arm) for arm in run.arms if arm != base], metrics)
        if report["contrasts"]:
            break
    return {**report, "records": {"A": run.name}, "differs": []}


def other_requests(a: Recorded, b: Recorded) -> list[str]:
    """The settings by which the requests of two runs differ: their digest, or its substitutes in old records."""
    left, right = a.record["spec"], b.record["spec"]
    digests = [name for name in DIGESTS if left.get(name) and right.get(name)]
    return [name for name in digests or SOURCES if left.get(name) != right.get(name)]


def differences(a: Recorded, b: Recorded) -> list[str]:
    """What differs between two runs besides requests, e.g. "machine cores: 2, 16"."""
    left, right = _facts(a), _facts(b)
    return [
        f"{key}: {_text(left.get(key))} in A, {_text(right.get(key))} in B"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    ]


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="a run's folder or its record.json")
    parser.add_argument("--metric", nargs="+", metavar="NAME", help="only these metrics (default: all measured ones)")
    parser.add_argument("--against", metavar="ARM", help="the arm of A to compare all others with")
    parser.add_argument("--fail-if-worse", action="store_true", help="exit code 1 if any verdict says that B is worse")
    return parser


def _has(run: Recorded, arm: str) -> None:
    if arm not in run.arms:
        raise CommandError(f"--against: {run.name} has no arm {arm!r}; it has {', '.join(run.arms)}")


def _of(run: Recorded, arm: str) -> list[Sample]:
    return [sample for sample in run.samples if sample["arm"] == arm]


def _facts(run: Recorded) -> dict[str, Any]:
    record = run.record
    groups = {name: record[name] for name in ("versions", "machine", "spec")}
    groups |= {f"server {arm}": facts for arm, facts in run.servers.items()}
    flat = {f"{name} {key}": value for name, group in groups.items() for key, value in group.items()}
    return flat | {"complete": record.get("complete"), "git": record.get("git")}


def _report(
    sides: Iterable[tuple[list[Sample], list[Sample], str, str]], metrics: Sequence[str] | None
) -> dict[str, Any]:
    contrasts: list[Contrast] = []
    counts = []
    for left, right, a, b in sides:
        contrasts += contrast_arms(left, right, a=a, b=b, metrics=metrics)
        keys, others = _answered(left), _answered(right)
        count = {"a": a, "b": b, "both": len(keys & others), "only_a": len(keys - others), "only_b": len(others - keys)}
        errors = (sum(bool(sample.get("error")) for sample in side) for side in (left, right))
        counts.append(count | dict(zip(("errors_a", "errors_b"), errors, strict=True)))
    return {"contrasts": contrasts, "verdict": sentences(contrasts), "no_verdict": None, "counts": counts}


def _answered(samples: Sequence[Sample]) -> set[tuple[str, str]]:
    kept = (sample for sample in samples if not sample.get("warm_up") and not sample.get("error"))
    return {(json.dumps(sample["cell"], sort_keys=True), str(sample["request"])) for sample in kept}


def _measured(run: Recorded) -> set[str]:
    return {name for sample in run.samples for name in sample["metrics"]}


def _sentences(report: Mapping[str, Any]) -> list[str]:
    """Verdicts, then their limitations."""
    contrasts = report["contrasts"]
    lines = [f"No verdict: {report['no_verdict']}."] if report["no_verdict"] else list(report["verdict"])
    if len(contrasts) >= 20 and not report["no_verdict"]:
        found, chance = sum(map(bool, map(direction, contrasts))), round(0.05 * len(contrasts))
        lines.append(f"{found} of {len(contrasts)} intervals exclude no difference; about {chance} would by chance.")
    for side in report["counts"]:
        a, b = side["a"], side["b"]
        if side["only_a"] or side["only_b"]:
            alone = f"{side['only_a']} only in the first, {side['only_b']} only in the second"
            lines.append(f"{a}, {b}: {side['both']} requests in both; not used: {alone}.")
        if side["errors_a"] or side["errors_b"]:
            lines.append(f"Failed requests, not used: {a} {side['errors_a']}, {b} {side['errors_b']}.")
    if report["differs"]:
        lines += ["The runs differ in:", *(f"  {line}" for line in report["differs"])]
    if "B" in report["records"] and any(is_time(found["metric"]) for found in contrasts):
        lines.append("Times: the two runs were not interleaved, so a difference may come from the machine or the hour.")
    return lines


def _text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
