"""What does a scheduling round take while many requests wait, against stock SGLang's?

    python -m eval bench waiting [--requests 320] [--waiting 256]

Requests of twelve chunks come at once to a KV pool with room for 28 of them, stock's with the same
text. Counted are rounds that begin with at least `--waiting`, those in which some are admitted as
well, in CPU time of the scheduler's thread.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.bench.round_server import FILE_VAR
from eval.bench.rounds import by_cell, take_rounds
from eval.bench.together import AROUND, FIT, K, bodies, chunks
from eval.data.random_text import WORDS
from eval.http import post
from eval.outcome import Row, add_out_option, open_run, table, tell
from eval.random_model import SHAPES, write_random_model
from eval.run import Sample
from eval.serve.arms import EVERY_SERVER, LPM, UNAUDITED
from eval.server import Server
from eval.stats import quantile
from retrieval.command_line import Parser

OUTPUT = 256
MIN_ROUNDS = 20
ARMS: dict[str, tuple[str, ...]] = {
    "stock": ("--stock",),
    "fused": ("--reuse", "fused", "--chunkcache-move", "always", *UNAUDITED),
}
NOTE = "milliseconds of CPU time a round: mean and p90 of a run's rounds, means of runs"


def rounds_of(text: str, waiting: int) -> list[float]:
    """Seconds of the rounds that count, of what the server has written."""
    rows = (line.split() for line in text.splitlines())
    return [float(took) for before, _, took in rows if int(before) >= waiting]


def measure(
    url: str, rounds: Path, arm: str, found: Sequence[Mapping[str, str]], number: int, *, args: Any
) -> Sample:
    """Send a crowd and read what the rounds took."""
    post(url + "/flush_cache?timeout=30")
    asked = bodies(number, args.requests, found, common=0, output=OUTPUT)
    rounds.write_text("")
    send = partial(_answer, url) if arm == "stock" else partial(post, f"{url}{ROUTE}")
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(send, asked))
    times = rounds_of(rounds.read_text(), args.waiting)
    metrics = (
        {"mean_ms": 1000 * fmean(times), "p90_ms": 1000 * quantile(times, 0.9)} if times else {}
    )
    return {"metrics": metrics, "num_rounds": len(times)}


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """A row an arm."""
    rows: list[Row] = []
    for _, arms in by_cell(samples):
        means: dict[str, dict[str, float]] = {}
        for arm, taken in arms.items():
            told = [one for one in taken if one["num_rounds"] >= MIN_ROUNDS]
            means[arm] = {
                name: sum(one["metrics"][name] for one in told) / len(told)
                for name in ("mean_ms", "p90_ms")
                if told
            }
            counted = sum(one["num_rounds"] for one in taken)
            figures = {name: round(value, 3) for name, value in means[arm].items()}
            rows.append({"arm": arm, "runs": len(told), "rounds": counted, **figures})
        stock = means.get("stock", {})
        for row in rows:
            if stock and means[row["arm"]]:
                row["over stock"] = round(means[row["arm"]]["mean_ms"] - stock["mean_ms"], 3)
    verdict = [
        f"{row['arm']}: a round takes {row['over stock']} ms more than stock's."
        for row in rows
        if row["arm"] != "stock" and "over stock" in row
    ]
    return {"verdict": verdict, "tables": [table("Rounds with many waiting", rows, NOTE)]}


def main(argv: Sequence[str]) -> int:
    """Run."""
    args = _parse(argv)
    with open_run("waiting", args, summarize, without=("logs",)) as run, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        texts = [" ".join(WORDS)] * 50
        model = str(write_random_model(folder / "model", SHAPES[args.params], texts))
        found = chunks(args.chunk_tokens)
        pool = FIT * (K * args.chunk_tokens + AROUND + OUTPUT)
        arms = {}
        for arm, flags in ARMS.items():
            rounds = folder / arm
            server = Server(
                [
                    *flags,
                    *LPM,
                    "--model-path",
                    model,
                    "--max-total-tokens",
                    str(pool),
                    *EVERY_SERVER,
                    *("--dtype", "float32"),  # a CPU decodes several times faster in it
                ],
                log=args.logs / f"waiting-{arm}.log",
                launcher=("-m", "eval.bench.round_server"),
                env={FILE_VAR: str(rounds)},
            )
            url = stack.enter_context(server).url
            arms[arm] = partial(measure, url, rounds, arm, found, args=args)
        take_rounds(run, {"waiting": args.waiting}, arms, args.rounds)
    tell(run)
    return 0


# Private, in order of use

ROUTE = "/rag/v1/chat/completions"


def _answer(url: str, body: Mapping[str, Any]) -> None:
    """By stock SGLang, of the same text."""
    texts = [chunk["text"] for chunk in body["chunks"]]
    (message,) = body["messages"]
    asked = {**message, "content": "\n\n".join([*texts, message["content"]])}
    kept = {name: body[name] for name in ("model", "temperature", "max_tokens", "ignore_eos")}
    post(f"{url}/v1/chat/completions", {**kept, "messages": [asked]})


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval bench waiting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--requests", type=int, default=320, help="at once")
    add("--waiting", type=int, default=256, help="in a round that counts, at least")
    add("--rounds", type=int, default=3, help="measured runs of each arm, after one of warm-up")
    add("--params", type=int, choices=sorted(SHAPES), default=1, help="millions; default: 1")
    add("--chunk-tokens", type=int, default=60)
    add("--logs", type=Path, default=Path("logs"))
    add_out_option(parser)
    return parser.parse_args(argv)
