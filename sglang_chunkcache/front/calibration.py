"""`/chunkcache/calibrate`: prompts for every rank to find out where the model keeps the evidence
that selectors read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from sglang_chunkcache.front.bodies import CalibrateIn, CalibrationExample
from sglang_chunkcache.front.parts import Parts
from sglang_chunkcache.wire.state import CalibrationPrompt

CANNED = Path(__file__).parent.parent / "canned_prompts.jsonl"
"""Made up; eval/world/canned.py writes it."""


async def calibrate(parts: Parts, body: CalibrateIn) -> dict[str, Any]:
    """Per rank what was found. Nothing else runs meanwhile.

    Raises:
        ChunkCacheError: as `Engine.calibrate`.
    """
    examples = body.examples or [
        CalibrationExample.model_validate_json(line)
        for line in CANNED.read_text(encoding="utf-8").splitlines()
    ]
    # Tokenised off the event loop: a body may have 64 examples of 64 chunks.
    prompts = await asyncio.to_thread(lambda: [_prompt(parts, example) for example in examples])
    return {"ranks": await parts.engine.calibrate(prompts)}


def _prompt(parts: Parts, example: CalibrationExample) -> CalibrationPrompt:
    assembler, encode = parts.assembler, parts.assembler.tokenizer.encode
    question = {"role": "user", "content": example.question}
    (exchange,) = assembler.exchanges([question], with_chunks=[0])
    (area,) = exchange.areas
    chunks = [list(assembler.chunk(text, "").token_ids) for text in example.chunks]
    before = [*encode(exchange.lead), *encode(area.intro)]
    return CalibrationPrompt(before, chunks, list(encode(area.ending)))
