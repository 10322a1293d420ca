"""What does admission take in a scheduling round while many requests wait, against stock SGLang's?

    python -m eval bench waiting [--requests 320] [--waiting 256]

Requests of twelve chunks come at once to a KV pool with room for 28 of them, stock's with the same
text. Counted is the CPU time of the scheduler's thread in rounds that begin with at least
`--waiting`: of a round, most of which admit nobody, and of all rounds by request that they admit.
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
from typing import Any, NamedTuple

from eval.bench.round_server import FILE_VAR
from eval.bench.rounds import take_rounds
from eval.bench.together import AROUND, FIT, K, bodies, chunks
from eval.http import post
from eval.outcome import Row, add_out_option, open_run, table, tell
from eval.random_model import SHAPES, write_words_model
from eval.run import Sample
from eval.serve.arms import EVERY_SERVER, LPM, UNAUDITED
from eval.server import Server
from retrieval.command_line import Parser

OUTPUT = 256
ARMS: dict[str, tuple[str, ...]] = {
    "stock": ("--stock",),
    "fused": ("--reuse", "fused", "--chunkcache-move", "always", *UNAUDITED),
}
NOTE = "milliseconds of CPU time, means of runs"
METRICS = ("round_ms", "admitted_ms")


class Round(NamedTuple):
    """One that counts."""

    seconds: float
    num_admitted: int


def rounds_of(text: str, waiting: int) -> list[Round]:
    """Those that count, of what the server has written."""
    rows = (line.split() for line in text.splitlines())
    return [
        Round(float(took), int(before) - int(after))
        for before, after, took in rows
        if int(before) >= waiting
    ]


def measure(
    url: str, rounds: Path, arm: str, found: Sequence[Mapping[str, str]], number: int, *, args: Any
) -> Sample:
    """Send a crowd and read what the rounds took."""
    post(url + "/flush_cache?timeout=30")
    asked = bodies(number, args.requests, found, common=0, output=OUTPUT)
    rounds.write_text("")
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(partial(_ask_stock if arm == "stock" else _ask, url), asked))
    taken = rounds_of(rounds.read_text(), args.waiting)
    total_ms = 1000 * sum(each.seconds for each in taken)
    num_admitted = sum(each.num_admitted for each in taken)
    metrics = {"round_ms": total_ms / len(taken)} if taken else {}
    metrics |= {"admitted_ms": total_ms / num_admitted} if num_admitted else {}
    return {"metrics": metrics, "num_rounds": len(taken), "num_admitted": num_admitted}


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """A row an arm."""
    rows: list[Row] = []
    taken = [one for one in samples if not one["warm_up"] and one["num_admitted"]]
    for arm in ARMS:
        if of_arm := [one for one in taken if one["arm"] == arm]:
            figures = {
                name: round(fmean(one["metrics"][name] for one in of_arm), 3) for name in METRICS
            }
            counts = {
                name: sum(one[f"num_{name}"] for one in of_arm) for name in ("rounds", "admitted")
            }
            rows.append({"arm": arm, "runs": len(of_arm), **counts, **figures})
    verdict = []
    if len(rows) == len(ARMS):
        stock, fused = rows
        by_round, by_request = (round(fused[name] - stock[name], 3) for name in METRICS)
        verdict = [
            f"A round takes {by_round} ms more than stock's, a request {by_request} ms more."
        ]
    return {"verdict": verdict, "tables": [table("Rounds with many waiting", rows, NOTE)]}


def main(argv: Sequence[str]) -> int:
    """Run."""
    args = _parse(argv)
    with open_run("waiting", args, summarize, without=("logs",)) as run, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_words_model(folder / "model", SHAPES[args.params])
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


def _ask(url: str, body: Mapping[str, Any]) -> None:
    post(f"{url}/rag/v1/chat/completions", body)


def _ask_stock(url: str, body: Mapping[str, Any]) -> None:
    """The same text."""
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
    args = parser.parse_args(argv)
    if not 0 < args.waiting <= args.requests or min(args.rounds, args.chunk_tokens) < 1:
        parser.error("--waiting must be in 1..--requests, --rounds and --chunk-tokens at least 1")
    return args
