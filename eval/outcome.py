"""How results are told on the terminal; and what all benches do alike: the option `--out`, the run.

`results` have `verdict` (sentences) and `tables` ({"title", "rows", "note"}), which are printed and
shown by `report`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from eval.run import Run, Summary, new_folder

Row = dict[str, Any]


def add_out_option(parser: argparse.ArgumentParser) -> None:
    """`--out`, the run's folder."""
    text = (
        "the run's folder: new, or that of the run to go on with (default: runs/<time>-bench-NAME)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)


def open_run(
    name: str, options: argparse.Namespace, summarize: Summary, *, without: Sequence[str] = ()
) -> Run:
    """The run of a bench. Its settings are the options, apart from those that change no figure
    (`without`)."""
    # A run continues only with equal settings: a moved folder must not make it another run.
    spec = {key: value for key, value in vars(options).items() if key not in ("out", *without)}
    folder = options.out or new_folder(f"bench-{name}")
    return Run(folder, kind="bench", spec={"bench": name, **spec}, summarize=summarize)


def table(title: str, rows: Sequence[Row], note: str | None = None) -> Row:
    """A table of a record: every row with the columns of all rows, None where it has none."""
    columns = dict.fromkeys(column for row in rows for column in row)
    full = [dict.fromkeys(columns) | row for row in rows]
    return {"title": title, "rows": full, **({"note": note} if note else {})}


def interval(found: Sequence[float | None] | Mapping[str, Any], digits: int = 3) -> str:
    """(value, low, high), or a contrast, as text."""
    triple = (
        [found[key] for key in ("value", "low", "high")] if isinstance(found, Mapping) else found
    )
    value, low, high = ("none" if number is None else f"{number:.{digits}f}" for number in triple)
    return f"{value} [{low}, {high}]"


def text(tables: Sequence[Row], *, floatfmt: str = "g") -> str:
    """A record's tables for a terminal, an empty line after each."""
    shown = (
        (one, tabulate(one["rows"], headers="keys", floatfmt=floatfmt, missingval="-"))
        for one in tables
    )
    return "\n".join(f"{one['title']}\n{rows}\n{one.get('note', '')}\n" for one, rows in shown)


def tell(run: Run) -> dict[str, Any]:
    """Print tables, verdict, folder and, as the last line, the results as JSON.
    Returns the results."""
    results = run.results()
    print("\n".join([text(results["tables"]), *results["verdict"], f"record: {run.folder}"]))
    print(json.dumps(results))
    return results
