"""The log of calls, without a framework."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_chunkcache.integrations.call_log import MAX_KNOWN, CallLog


def test_a_call_has_the_passages_in_its_text(tmp_path: Path) -> None:
    """Of those retrieved last, in whatever part of a message; another call has others."""
    log = CallLog(tmp_path / "calls.jsonl")
    log.retrieved([("0", "forgotten"), *((None, f"other {n}") for n in range(MAX_KNOWN - 2))])
    log.retrieved([("1", "boots"), (None, "pens"), ("2", "")])
    parts = [{"type": "text", "text": "Of pens"}, {"type": "image_url", "image_url": {}}]
    log.asked([{"role": "user", "content": parts}, {"role": "user", "content": None}], model="m")
    log.asked([{"role": "user", "content": "Of boots and forgotten pens"}], model=None, tools=None)
    first, second = map(json.loads, (tmp_path / "calls.jsonl").read_text().splitlines())
    assert (first["model"], first["chunks"]) == ("m", [{"id": None, "text": "pens"}])
    assert second["chunks"] == [{"id": "1", "text": "boots"}, {"id": None, "text": "pens"}]
    assert second.keys() == {"timestamp", "messages", "chunks"}
    assert second["timestamp"] >= first["timestamp"]
