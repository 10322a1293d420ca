"""`python -m eval compare A [B]`: differences beyond chance between two runs, or between the arms
of one.

    python -m eval compare runs/monday runs/friday                   the same arm and request in
                                                                     both, B against A
    python -m eval compare runs/monday --against stock-lpm           the arms of one run, request by
                                                                     request
    python -m eval compare runs/monday runs/friday --fail-if-worse   exit code 1 where B is worse:
                                                                     for CI

Only requests that both sides answered count. Two runs are not interleaved, so differences of their
times may come from the machine. Runs of different requests get figures but no verdict: only the
numbers of their requests are the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from eval.contrast import Contrast, contrast_arms, direction, sentences
from eval.errors import CommandError
from eval.metrics import is_time
from eval.recorded import Recorded, read_recorded
from eval.report.tables import contrast_table, flat
from retrieval.command_line import Parser

BASELINES = ("stock-lpm", "stock-fcfs", "no-cache", "retriever shown", "retriever", "full-prefill")
"""Default arms to compare against, if neither the run nor --against names one:
see `pairs_within`."""
DIGESTS = ("requests_sha256", "trace_sha256")
SOURCES = ("task", "data", "hub", "corpus", "retriever", "scale", "seed", "k", "trace")
"""Settings that determine the requests of a record that has no digest of them."""

Pairs = Sequence[tuple[str, str]]


def main(argv: Sequence[str]) -> int:
    """Print table, sentences and one JSON object;
    returns 1 if B is worse and --fail-if-worse was given, else 0."""
    parser = Parser(
        prog="python -m eval compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", type=Path, metavar="A", help="a run's folder or its record.json")
    parser.add_argument("b", type=Path, metavar="B", nargs="?", help="another one")
    parser.add_argument(
        "--metric",
        nargs="+",
        metavar="NAME",
        help="only these metrics (default: all measured ones)",
    )
    parser.add_argument("--against", metavar="ARM", help="the arm of A to compare all others with")
    parser.add_argument(
        "--fail-if-worse",
        action="store_true",
        help="exit code 1 if any verdict says that B is worse",
    )
    options = parser.parse_args(argv)
    a, b = read_recorded(options.a), options.b and read_recorded(options.b)
    # Within one run the choices are tried one after another, until two arms share a cell.
    choices = [pairs_between(a, b, options.against)] if b else pairs_within(a, options.against)
    found = next(
        filter(None, (_contrasts(a, b or a, pairs, options.metric) for pairs in choices)), []
    )
    if not found:
        measured = sorted({name for sample in a.samples for name in sample["metrics"]})
        raise CommandError(
            "no request was answered on both sides in the same cell: give a second record, or"
            f" another of the arms of {a.name} with --against: {', '.join(map(repr, a.arms))};"
            f" measured: {', '.join(measured)}"
        )
    others, differs = (other_requests(a, b), differences(a, b)) if b else ([], [])
    verdict = (
        [f"No verdict: the runs are of different requests: {', '.join(others)} differ."]
        if others
        else sentences(found)
    )
    print(contrast_table(found).text())
    print("\n".join(["", *verdict]))
    if b and any(is_time(one["metric"]) for one in found):
        print(
            "Times: the two runs were not interleaved, so a difference may come from the machine or"
            " the hour."
        )
    if differs:
        print("\n  ".join(["The runs differ in:", *differs]))
    print(json.dumps({"contrasts": found, "verdict": verdict, "differs": differs}))
    # Other requests may be harder ones: that is no fault of B for which CI should fail.
    worse = any(direction(one) == "worse" for one in found)
    return int(options.fail_if_worse and worse and not others)


def pairs_between(a: Recorded, b: Recorded, against: str | None) -> Pairs:
    """Each arm that both have, or the only arm of each;
    with `against`, that arm of A and every arm of B."""
    if against is not None:
        return [(against, arm) for arm in b.arms]
    if len(a.arms) == len(b.arms) == 1:
        return [(a.arms[0], b.arms[0])]
    return [(arm, arm) for arm in a.arms if arm in b.arms]


def pairs_within(run: Recorded, against: str | None) -> Iterable[Pairs]:
    """An arm and every other: `against`, or one choice after another: the run's own baseline, the
    usual ones, any other.

    The next choice is for arms that have nothing in common with any other, e.g. since they have
    cells of their own.
    """
    usual = dict.fromkeys([run.record["spec"].get("against"), *BASELINES, *run.arms])
    for base in [name for name in usual if name in run.arms] if against is None else [against]:
        yield [(base, arm) for arm in run.arms if arm != base]


def other_requests(a: Recorded, b: Recorded) -> list[str]:
    """The settings by which the requests of two runs differ:
    their digest, or its substitutes in old records."""
    left, right = a.record["spec"], b.record["spec"]
    # Equal digests are equal requests, from whatever folder or hub they were read.
    digests = [name for name in DIGESTS if left.get(name) and right.get(name)]
    return [name for name in digests or SOURCES if left.get(name) != right.get(name)]


def differences(a: Recorded, b: Recorded) -> list[str]:
    """What differs between two runs besides requests, e.g. "machine cores: 2 in A, 16 in B"."""
    names = ("complete", "git", "machine", "spec", "versions")
    left, right = (
        flat({name: run.record[name] for name in names} | {"server": run.servers}) for run in (a, b)
    )
    keys = [key for key in sorted(left.keys() | right.keys()) if left.get(key) != right.get(key)]
    return [f"{key}: {left.get(key)} in A, {right.get(key)} in B" for key in keys]


def _contrasts(
    a: Recorded, b: Recorded, pairs: Pairs, metrics: Sequence[str] | None
) -> list[Contrast]:
    # The same arm on both sides would be "ours is faster than ours" in a sentence.
    sides = ("", "") if a is b else (" in A", " in B")
    found: list[Contrast] = []
    for left, right in pairs:
        arms = [
            [one for one in run.samples if one["arm"] == arm]
            for run, arm in ((a, left), (b, right))
        ]
        found += contrast_arms(*arms, a=left + sides[0], b=right + sides[1], metrics=metrics)
    return found
