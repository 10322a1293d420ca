"""Does the front's prediction equal SGLang's report? Requests one at a time through the real server.

    python -m eval.bench.prediction --task mtrag --data DIR [--requests 300] [--record]

The model is small and random. For every request the front predicts how many prompt tokens the rank holds (head and predicted
chain). SGLang's own `cached_tokens` must equal the prediction if the chain ends before the last chunk, and be at least that if
all chunks hit: the excess is then a match inside the question. Without a predicted chunk only the head can match.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.http import get, post
from eval.random_model import SHAPES, write_random_model
from eval.record import make_record, write_record
from eval.server import Server
from eval.task import Request, add_task_options, load_requests, load_texts


def main(argv: Sequence[str]) -> int:
    """Run; returns 1 if a prediction is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-total-tokens", type=int, default=400_000)
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--record", action="store_true", help="write eval/results/")
    add_task_options(parser)
    parser.set_defaults(requests=300)
    args = parser.parse_args(argv)
    requests = load_requests(args)
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder), SHAPES[1], load_texts(args))
        flags = ["--model-path", str(model), "--max-total-tokens", str(args.max_total_tokens)]
        with Server(flags, log=args.logs / "prediction.log") as server:
            rows = [check(server.url, request) for request in requests]
            stats = get(server.url + "/chunkcache/stats")
    wrong = [row for row in rows if not row["right"]]
    results = {
        "requests": len(rows),
        "wrong": len(wrong),
        "first_wrong": wrong[:3],
        "with_planned_chunks": sum(1 for row in rows if row["planned"]),
        "all_chunks_hit": sum(1 for row in rows if row["planned"] == row["chunks"]),
        "prompt_tokens": sum(row["prompt_tokens"] for row in rows),
        "cached_tokens": sum(row["cached"] for row in rows),
        "evicted_chunks": stats["ranks"][0]["evicted_chunks"],
        "mirror_agrees": stats["ranks"][0]["mirror"]["agrees"],
    }
    record = make_record("prediction", spec=vars(args), results=results)
    if args.record:
        print("record:", write_record(record))
    print(json.dumps(results))
    return 1 if wrong else 0


def check(url: str, request: Request) -> dict[str, Any]:
    """Send one request; returns the prediction and SGLang's report."""
    body = {
        "messages": [{"role": "user", "content": request.question}],
        "chunks": [{"id": c.id, "text": c.text} for c in request.chunks],
        "max_tokens": 1,
        "temperature": 0,
        "return_meta_info": True,
    }
    reply = post(url + "/rag/v1/chat/completions", body)
    ours, cached = reply["chunkcache"], reply["choices"][0]["meta_info"]["cached_tokens"]
    planned, predicted, num_chunks = ours["chunks_planned"], ours["predicted_exact"], len(ours["order"])
    if planned == num_chunks:
        right = cached >= predicted
    elif planned:
        right = cached == predicted
    else:
        right = cached <= ours["head_tokens"]
    return {
        "right": right,
        "planned": planned,
        "chunks": num_chunks,
        "predicted": predicted,
        "cached": cached,
        "prompt_tokens": reply["usage"]["prompt_tokens"],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
