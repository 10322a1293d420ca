"""Tiny data sets in the folder's schema, and what a command makes of them."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eval.task import Request, add_task_options, load_requests

WORDS = ["amber", "basalt", "copper", "dolomite", "emerald"]
WORDS += ["feldspar", "garnet", "hematite", "iolite", "jasper"]


def requests(*options: str | Path) -> list[Request]:
    """What a command with these options would send."""
    return load_requests(parse(*options))


def parse(*options: str | Path) -> argparse.Namespace:
    """The options as a command parses them."""
    parser = argparse.ArgumentParser()
    add_task_options(parser)
    return parser.parse_args([str(option) for option in options])


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON Lines, gzip; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def write_questions(folder: Path) -> None:
    """Twenty passages, two about each mineral;
    ten questions, each about one, whose list begins with other passages."""
    texts = [f"The {WORDS[i % 10]} mine number {i} was opened in 18{i:02}." for i in range(20)]
    passages = [{"id": f"p{i}", "title": f"Page {i}", "text": t} for i, t in enumerate(texts)]
    write_rows(folder / "passages.jsonl.gz", passages)
    questions = [
        {
            "id": f"q{i}",
            "question": f"When was the {WORDS[i]} mine number {i} opened?",
            "answers": [f"18{i:02}"],
            "gold_passage_ids": [f"p{i}"],
            "context_passage_ids": [f"p{(i + 1) % 20}", f"p{(i + 2) % 20}", f"p{i}"],
        }
        for i in range(10)
    ]
    write_rows(folder / "questions.jsonl.gz", questions)


def write_conversations(folder: Path) -> None:
    """Two conversations of three turns in two domains, whose passages say the same;
    the other file lists no passages."""
    passages = [
        {"id": f"{d}-{i}", "title": "", "text": f"A note on {word}, the {i}th.", "domain": d}
        for d in ("clapnq", "govt")
        for i, word in enumerate(WORDS)
    ]
    write_rows(folder / "passages.jsonl.gz", passages)
    for name, field in (("conversations", "retrieved_passage_ids"), ("conversations_un", "unused")):
        rows = []
        for c, domain in enumerate(("govt", "clapnq")):
            turns = [
                {
                    "turn": t + 1,
                    "question": f"What about {WORDS[t]}?",
                    "answer": f"It is reply {t} of four words.",
                    "gold_passage_ids": [f"{domain}-{t}"],
                    field: [f"{domain}-{t}", f"{domain}-{t + 1}"],
                }
                for t in range(3)
            ]
            rows.append({"id": f"c{c}", "domain": domain, "turns": turns})
        write_rows(folder / f"{name}.jsonl.gz", rows)


def write_ragpulse(folder: Path) -> None:
    """Four requests, the third without passages; passages 1 and 2 come again."""
    lengths = {"sys_prompt": {10: 8, 11: 4}, "history": {20: 6}}
    lengths |= {"user_input": {30: 4}, "passage": {1: 40, 2: 20, 3: 30}}
    components = [
        {"kind": kind, "id": name, "token_length": length}
        for kind, by_id in lengths.items()
        for name, length in by_id.items()
    ]
    write_rows(folder / "components.jsonl.gz", components)
    parts = {"sys_prompt": [10, 11], "history": [20], "web_search": [], "user_input": [30]}
    about = {"session_id": "s", "input_length": 100, "output_length": 12, **parts}
    requests = [
        {"id": 100 + i, "timestamp": 50.0 + 7 * i, "passages": passages, **about}
        for i, passages in enumerate(([1, 2], [2, 3], [], [3, 1]))
    ]
    write_rows(folder / "requests.jsonl.gz", requests)
