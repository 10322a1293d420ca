"""Requests with text for servers: from a folder of real data, or from the generated world.

A folder holds `passages.jsonl.gz` (`id`, `text`) and either `conversations.jsonl.gz` (`turns` with `question` and
`retrieved_passage_ids`) or `questions.jsonl.gz` (`question` and `context_passage_ids`).
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import CommandError


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A retrieved passage."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: a question, its chunks in retriever order, right answers if known, the conversation if any."""

    question: str
    chunks: tuple[TextChunk, ...]
    answers: tuple[str, ...] = ()
    conversation: str | None = None


def load_samples(folder: Path, limit: int) -> list[Sample]:
    """The first `limit` requests of a data set. Raises CommandError for a folder that is not one."""
    texts = {str(row["id"]): str(row["text"]) for row in _rows(folder / "passages.jsonl.gz")}
    conversations = folder / "conversations.jsonl.gz"
    samples = (
        _turns(conversations, texts) if conversations.exists() else _questions(folder / "questions.jsonl.gz", texts)
    )
    found = [sample for sample, _ in zip((s for s in samples if s.chunks), range(limit), strict=False)]
    if not found:
        raise CommandError(f"{folder} has no question with retrieved passages")
    return found


def load_texts(folder: Path) -> list[str]:
    """All passages of a data set."""
    return [str(row["text"]) for row in _rows(folder / "passages.jsonl.gz")]


def world_samples(limit: int, seed: int, *, num_passages: int = 60, num_chunks: int = 4) -> list[Sample]:
    """One-hop questions about a generated world, popular entities more often; the model can answer them."""
    from sglang_chunkcache.bundled_model.world import World

    world, rng = World(seed, num_passages), random.Random(seed)
    asked = [question for question in world.questions if question.hop == 1]
    by_gold: dict[str, list[Any]] = {}
    for question in asked:
        by_gold.setdefault(question.gold_passage_ids[0], []).append(question)
    subjects = sorted(by_gold)
    rng.shuffle(subjects)
    weights = [1 / (rank + 1) for rank in range(len(subjects))]
    samples = []
    for subject in rng.choices(subjects, weights, k=limit):
        question = rng.choice(by_gold[subject])
        context = world.context(question, num_chunks, random.Random(f"{seed} {subject} {rng.randrange(2)}"))
        rng.shuffle(context)
        samples.append(Sample(question.question, tuple(TextChunk(p.id, p.text) for p in context), question.answers))
    return samples


def _turns(path: Path, texts: dict[str, str]) -> Iterator[Sample]:
    for row in _rows(path):
        for turn in row["turns"]:
            ids = dict.fromkeys(str(i) for i in turn.get("retrieved_passage_ids") or [])
            chunks = tuple(TextChunk(i, texts[i]) for i in ids if i in texts)
            yield Sample(turn["question"], chunks, (turn.get("answer") or "",), str(row["id"]))


def _questions(path: Path, texts: dict[str, str]) -> Iterator[Sample]:
    for row in _rows(path):
        ids = row.get("context_passage_ids") or row.get("gold_passage_ids") or []
        chunks = tuple(TextChunk(str(i), texts[str(i)]) for i in dict.fromkeys(ids) if str(i) in texts)
        yield Sample(row["question"], chunks, tuple(row.get("answers") or ()))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: {error}") from None
