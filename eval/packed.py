"""A record's compact form: rows of tables without their keys, and what `compare` and `report` need
of the samples as one text.

    [{"a": 1, "b": {"c": 2}},   ->   {"shapes": [{"paths": [["a"], ["b", "c"]], "same": {"0": 1},
                                     "texts": {}}],
     {"a": 1, "b": {"c": 3}}]         "rows": [[0, 2], [0, 3]]}
                                     a row: the number of its shape, and the values that differ
                                     between rows of this shape
    samples                     ->   base 85 of LZMA of JSON: arm, cell, request, block, metrics of
                                     each measured one

Of a replay, whose samples are counts of bins of requests, the sums of blocks of bins are kept: a
comparison draws whole blocks. With fewer than `MIN_BLOCKS` it draws bins, so each bin is kept.
Nothing here computes figures.
"""

from __future__ import annotations

import base64
import json
import lzma
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from eval.metrics import MIN_BLOCKS, is_time

MIN_ROWS = 3
"""Fewer rows keep their keys."""
COUNTS = ("hits", "dropped", "lost", "token_hits", "dropped_tokens", "lost_tokens")
TOTALS = ("chunks", "tokens")
UNREAD = ("p50", "p90", "p99")
"""Only times are shown by their quantiles."""

Row = dict[str, Any]
Keys = tuple[str, ...]


def pack_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results without keys in rows, and without quantiles that nobody reads."""
    cells = [_without_unread(cell) for cell in results.get("cells") or ()]
    return _packed({**results, **({"cells": cells} if cells else {})})  # type: ignore[no-any-return]


def unpack_results(packed: Mapping[str, Any]) -> dict[str, Any]:
    """The results; those that were never packed are unchanged."""
    return _unpacked(packed)  # type: ignore[no-any-return]


def pack_samples(samples: Sequence[Mapping[str, Any]], block: int | None) -> str:
    """Rows of samples.jsonl as one text. Those that describe a trace are left out.
    block: a replay's, in requests."""
    # A replay's description of its trace has no cell; its figures are in the results.
    rows = [row for row in samples if "cell" in row]
    replayed = [_blocks(row, block) for row in rows if "bin" in row]
    requests: dict[tuple[str, Any], int] = {}
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "metrics" in row:
            groups.setdefault(
                json.dumps([row["arm"], row["cell"], bool(row.get("warm_up"))]), []
            ).append(row)
    columns = [_columns(taken, requests) for taken in groups.values()]
    kept = {"requests": list(requests), "groups": columns, "replayed": replayed}
    # LZMA keeps 15% fewer bytes of our records than zlib; base 85 adds a quarter, base 64 a third.
    return base64.b85encode(
        lzma.compress(json.dumps(kept, separators=(",", ":")).encode())
    ).decode()


def unpack_samples(text: str) -> list[Row]:
    """Rows by arm and cell: `arm`, `cell`, `request`, `block`, finite `metrics`, `warm_up` (then
    without metrics), `error`. A replay's: `cell`, `bin`, `num` bins, and sums of `step` bins
    each."""
    kept = json.loads(lzma.decompress(base64.b85decode(text)))
    return [
        *kept["replayed"],
        *(row for group in kept["groups"] for row in _rows(group, kept["requests"])),
    ]


def record_text(record: Mapping[str, Any]) -> str:
    """JSON with a line for each row of a table, so that a difference shows which one."""
    return _text(record, 2) + "\n"


# Private, in order of use


def _without_unread(cell: Mapping[str, Any]) -> Mapping[str, Any]:
    metrics = {
        name: {key: value for key, value in found.items() if is_time(name) or key not in UNREAD}
        if isinstance(found, dict)
        else found
        for name, found in (cell.get("metrics") or {}).items()
    }
    return {**cell, "metrics": metrics} if metrics else cell


def _packed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _packed(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) < MIN_ROWS or not all(isinstance(row, dict) for row in value):
        return [_packed(each) for each in value]
    flat = [{path: _packed(each) for path, each in _flat(row)} for row in value]
    # Rows with the same columns in another order are of another shape, so key order survives.
    kinds = dict.fromkeys(map(tuple, flat))
    shapes = [
        _shape(paths, [[*row.values()] for row in flat if tuple(row) == paths]) for paths in kinds
    ]
    numbers = {shape["paths"]: number for number, shape in enumerate(shapes)}
    rows = [
        [numbers[tuple(row)], *_differing(shapes[numbers[tuple(row)]], row.values())]
        for row in flat
    ]
    return {"shapes": shapes, "rows": rows}


def _shape(paths: tuple[Keys, ...], rows: Sequence[Sequence[Any]]) -> Row:
    """`same`: what all rows have, by the number of the column;
    `texts`: of columns with nothing else, whose rows have numbers."""
    same, texts = Row(), Row()
    for at, column in enumerate(zip(*rows, strict=True)):
        # As JSON: in Python 1, 1.0 and True are equal.
        if len(set(map(json.dumps, column))) == 1:
            same[str(at)] = column[0]
        # Numbers of texts are shorter than the texts only where these recur.
        elif all(isinstance(each, str) for each in column) and len(set(column)) <= len(column) / 2:
            texts[str(at)] = [*dict.fromkeys(column)]
    return {"paths": paths, "same": same, "texts": texts}


def _differing(shape: Row, values: Iterable[Any]) -> Iterator[Any]:
    for at, value in enumerate(values):
        if str(at) not in shape["same"]:
            texts = shape["texts"].get(str(at))
            yield texts.index(value) if texts else value


def _flat(row: Mapping[str, Any], at: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in row.items():
        # An empty object has no paths: without a column of its own it would be lost.
        if isinstance(value, dict) and value:
            yield from _flat(value, (*at, str(key)))
        else:
            yield (*at, str(key)), value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {"shapes", "rows"}:
        return {key: _unpacked(each) for key, each in value.items()}
    found = []
    for number, *values in value["rows"]:
        shape, differing, row = value["shapes"][number], iter(values), Row()
        for at, (*outer, last) in enumerate(shape["paths"]):
            inner, key = row, str(at)
            for name in outer:
                inner = inner.setdefault(name, {})
            each = shape["same"][key] if key in shape["same"] else next(differing)
            inner[last] = shape["texts"][key][each] if key in shape["texts"] else _unpacked(each)
        found.append(row)
    return found


def _blocks(row: Mapping[str, Any], block: int | None) -> Row:
    """Sums over blocks of bins, as long as the replay's own."""
    num = max((len(row.get(name) or ()) for name in TOTALS), default=0)
    length = max(1, (block or 1) // row["bin"])
    # Below MIN_BLOCKS blocks a comparison draws single bins (`stats._units`).
    step = length if math.ceil(num / length) >= MIN_BLOCKS else 1
    sums = {
        name: [sum(row[name][at : at + step]) for at in range(0, num, step)]
        for name in COUNTS
        if row.get(name)
    }
    totals = {name: sum(row[name]) for name in TOTALS if row.get(name)}
    return {
        "cell": row["cell"],
        "bin": row["bin"],
        "num": num,
        "step": step,
        "length": length,
        **sums,
        **totals,
    }


def _columns(rows: Sequence[Mapping[str, Any]], requests: dict[tuple[str, Any], int]) -> Row:
    """Of rows of one arm and cell, all of warm-up or none."""
    arm, cell, is_warm_up = rows[0]["arm"], rows[0]["cell"], bool(rows[0].get("warm_up"))
    failed = [at for at, row in enumerate(rows) if row.get("error")]
    found = {"arm": arm, "cell": cell, "warm_up": is_warm_up, "num": len(rows), "failed": failed}
    if is_warm_up:
        return found
    names = dict.fromkeys(name for row in rows for name in row["metrics"])
    return found | {
        "at": [
            # Every arm answers the same requests: their ids are stored once, a number per row.
            requests.setdefault((str(row["request"]), row.get("block")), len(requests))
            for row in rows
        ],
        "metrics": {name: [_finite(row["metrics"].get(name)) for row in rows] for name in names},
    }


def _finite(value: Any) -> Any:
    # JSON has neither NaN nor infinity; `_rows` leaves None out.
    return value if value is not None and math.isfinite(value) else None


def _rows(group: Row, requests: Sequence[tuple[str, Any]]) -> Iterator[Row]:
    failed = set(group["failed"])
    for at in range(group["num"]):
        row = {
            "arm": group["arm"],
            "cell": group["cell"],
            "warm_up": group["warm_up"],
            "metrics": {},
        }
        if not group["warm_up"]:
            row["request"], row["block"] = requests[group["at"][at]]
            found = {name: values[at] for name, values in group["metrics"].items()}
            row["metrics"] = {name: value for name, value in found.items() if value is not None}
        yield row | ({"error": True} if at in failed else {})


def _text(value: Any, depth: int, indent: str = "") -> str:
    """Objects to this depth, and rows, have a line for each item."""
    if isinstance(value, dict) and value.keys() == {"shapes", "rows"}:
        rows = ",\n".join(
            json.dumps(row, separators=(",", ":"), allow_nan=False) for row in value["rows"]
        )
        return f'{{"shapes": {json.dumps(value["shapes"])}, "rows": [\n{rows}\n{indent}]}}'
    if isinstance(value, dict) and value and depth:
        inner = indent + " "
        items = (
            f"{inner}{json.dumps(key)}: {_text(each, depth - 1, inner)}"
            for key, each in value.items()
        )
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    return json.dumps(value, allow_nan=False)
