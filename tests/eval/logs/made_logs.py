"""The same calls as different programs log them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
TEXTS = {
    name: f"The company {name} makes boots, number {name}." for name in ("Lumum", "Torex", "Velex")
}
CALLS = [("Lumum", "Torex"), ("Torex", "Velex"), ("Lumum", "Torex")]
SYSTEM, START_S = "You answer questions.", 1_760_000_000


def write(path: Path, rows: Sequence[Row | str | bytes]) -> Path:
    """Rows as JSON Lines; texts and bytes as they are."""
    lines = [
        row
        if isinstance(row, bytes)
        else (row if isinstance(row, str) else json.dumps(row)).encode()
        for row in rows
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def messages(names: Sequence[str], number: int = 0, *, system: str = SYSTEM) -> list[Row]:
    passages = "\n\n".join(TEXTS[name] for name in names)
    user = f"Read this.\n\n{passages}\n\nQuestion {number}?"
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def otlp(spans: Sequence[Row]) -> Row:
    """A line of the collector's file exporter."""
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": [*spans]}]}]}


def span(
    trace: int, name: str, at_s: float, told: Row, *, parent: str = "", events: Any = ()
) -> Row:
    """OTLP's JSON; lists and objects in its own form."""
    attributes = [{"key": key, "value": _value(value)} for key, value in told.items()]
    start = {"startTimeUnixNano": str(int(at_s * 1e9)), "parentSpanId": parent}
    named = {"traceId": f"{trace:032x}", "spanId": name, "name": name}
    return {**named, **start, "attributes": attributes, "events": [*events]}


def flat(name: str, rows: Sequence[Row], kind: str = "") -> Row:
    """`name.0.kind.field`, as OpenInference and OpenLLMetry have lists."""
    dot = f"{kind}." if kind else ""
    return {f"{name}.{n}.{dot}{key}": row[key] for n, row in enumerate(rows) for key in row}


def _value(value: Any) -> Row:
    if isinstance(value, list):
        return {"arrayValue": {"values": [*map(_value, value)]}}
    if isinstance(value, dict):
        fields = [{"key": key, "value": _value(each)} for key, each in value.items()]
        return {"kvlistValue": {"values": fields}}
    return {"stringValue": value}
