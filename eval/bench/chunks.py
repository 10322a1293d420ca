"""Does a prompt cost by its tokens or by its chunks? Time to first token of the same text as few
chunks and as many.

    python -m eval bench chunks [--counts 10 100 1000] [--rounds 20] [-- FLAGS]

One server with `--reuse fused`, one request at a time, none of which asks for moved KV. The text of
a round is as many numbers of three digits (with 10,000 chunks four, and so on) as the largest of
--counts, in a new order and under a new `cache_salt`, so that nothing of it is cached. An arm is a
number of chunks that it is cut into. The bundled model reads a number and its separator as four
tokens, and between two numbers of a chunk there is one token as well, so all arms have as many
tokens.

Each request is measured behind one of its kind, which is not: the KV pool holds less than two of
them, so what is evicted are as many chunks as are computed. A ratio is that of medians, of an arm
over the first one; it is promised to be at most 1.15 for four tokens a chunk. Beside it is that of
the CPU time that the server's processes took for both requests, which tells more than time where
other work runs on the machine; None without /proc. It runs in the repository's root.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from eval.bench.rounds import by_cell, ratio, take_rounds, told_ratio
from eval.bench.storage import RAG, SYSTEM
from eval.errors import CommandError
from eval.outcome import Row, add_out_option, interval, open_run, table, tell
from eval.run import Sample
from eval.serve import arms as serve_arms
from eval.serve.client import open_session, send
from eval.server import Server
from eval.stats import quantile
from eval.task import Request, TextChunk
from retrieval.command_line import Parser

AT_MOST = 1.15
"""What is promised of the ratio."""
BETWEEN = "\n"
"""Two numbers of a chunk: one token, as the server's separator behind each chunk."""


class Bench:
    """Cuts the text of a round for each arm."""

    def __init__(self, server: Server, num_units: int, runner: asyncio.Runner) -> None:
        self._server, self._runner, self._num_units = server, runner, num_units

    def sample(self, arm: str, number: int) -> Sample:
        """The measured request of an arm, behind one that fills the pool."""
        before = _cpu_s(self._server.pid)
        self._send(f"{number} before", arm)
        sample = self._send(str(number), arm)
        if before is not None:
            sample["metrics"]["cpu_s"] = (_cpu_s(self._server.pid) or before) - before
        return sample

    def _send(self, seed: str, arm: str) -> Sample:
        chunks = cut(seed, self._num_units, int(arm))
        request = Request(seed, "Which of them comes last?", chunks, system=SYSTEM)

        async def once() -> Any:
            async with open_session() as session:
                # the salt keeps arms and rounds from finding each other's chunks
                body = {"order": "retriever", "cache_salt": f"{seed} {arm}", "ignore_eos": True}
                return await send(
                    session, self._server.url, RAG, request, (), max_new_tokens=1, body=body
                )

        answer = self._runner.run(once())
        if answer.error or answer.ttft_s is None:
            raise CommandError(f"{arm} chunks: {answer.error or 'no token'}")
        return {
            "metrics": {"ttft_s": answer.ttft_s},
            "prompt_tokens": answer.prompt_tokens,
            "fates": answer.fates,
        }


def cut(seed: str, num_units: int, num_chunks: int) -> tuple[TextChunk, ...]:
    """All numbers below `num_units` in an order by `seed`, in so many chunks of as many numbers."""
    units = [f"{number:0{len(str(num_units - 1))}}" for number in range(num_units)]
    random.Random(seed).shuffle(units)
    size = num_units // num_chunks
    texts = [BETWEEN.join(units[start : start + size]) for start in range(0, num_units, size)]
    return tuple(TextChunk(str(number), text) for number, text in enumerate(texts))


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """One row an arm."""
    rows: list[Row] = []
    for _, arms in by_cell(samples):
        base = next(iter(arms))
        rows += [_row(base, arm, arms[base], taken) for arm, taken in arms.items()]
    verdict = [
        f"{row['chunks']} chunks: {row['ratio']} times the time of {row['base']} chunks of the same"
        f" tokens: {'kept' if row['kept'] else 'NOT kept'}."
        for row in rows
        if row["chunks"] != row["base"]
    ]
    note = (
        "ratio: of medians, over the base; of CPU: of the request and the one before; kept: the"
        f" ratio is at most {AT_MOST}"
    )
    return {
        "verdict": verdict,
        "tables": [table("Time to first token by number of chunks", rows, note)],
    }


def main(argv: Sequence[str]) -> int:
    """Run."""
    args = _parse(argv)
    with ExitStack() as stack:
        run = stack.enter_context(open_run("chunks", args, summarize, without=("logs",)))
        server, runner = stack.enter_context(_server(args)), stack.enter_context(asyncio.Runner())
        bench = Bench(server, max(args.counts), runner)
        arms = {str(count): partial(bench.sample, str(count)) for count in args.counts}
        take_rounds(run, {"reuse": "fused"}, arms, args.rounds)
    tell(run)
    return 0


# Private, in order of use


def _row(base: str, arm: str, base_taken: Sequence[Sample], taken: Sequence[Sample]) -> Row:
    found = ratio(taken, base_taken, "ttft_s")
    return {
        "chunks": int(arm),
        "base": int(base),
        "rounds": len(taken),
        "prompt tokens": quantile([one["prompt_tokens"] for one in taken], 0.5),
        "computed tokens": quantile([one["fates"]["computed"] for one in taken], 0.5),
        "p50 (s)": round(quantile([one["metrics"]["ttft_s"] for one in taken], 0.5), 4),
        "ratio": interval(found),
        "ratio of CPU": told_ratio(taken, base_taken, "cpu_s")
        if "cpu_s" in taken[0]["metrics"]
        else None,
        "kept": found["value"] <= AT_MOST,
    }


def _cpu_s(group: int) -> float | None:
    """Of all processes of a group so far."""
    ticks = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            # from the last bracket on, since a process's name may have spaces and brackets;
            # 2 is the group, `Server`'s own session, 11 and 12 are user and system ticks
            told = path.read_text(encoding="utf-8").rpartition(")")[2].split()
            ticks += [int(told[11]) + int(told[12])] if int(told[2]) == group else []
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval bench chunks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--counts",
        type=int,
        nargs="+",
        default=[10, 100, 1000],
        help="chunks that the text is cut into; the first is the base",
    )
    add("--rounds", type=int, default=20, help="measured requests of each, after one of warm-up")
    add("--model-path", default="bundled", help="only times are meaningful")
    add("--max-total-tokens", type=int, default=7000, help="KV pool: less than two prompts")
    add("--threads", type=int, help="OMP_NUM_THREADS of the server (default: its own)")
    add("--start-limit-s", type=float, default=300.0, help="seconds until the server must be ready")
    add("--logs", type=Path, default=Path("logs"))
    add_out_option(parser)
    add("server_flags", nargs="*", metavar="-- FLAGS", help="more flags for the server")
    args = parser.parse_args(argv)
    if any(max(args.counts) % count for count in args.counts):
        parser.error(f"--counts: each must divide the largest, {max(args.counts)}")
    return args


def _server(args: argparse.Namespace) -> Server:
    flags = [
        *(
            "--model-path",
            args.model_path,
            "--reuse",
            "fused",
            "--max-total-tokens",
            str(args.max_total_tokens),
        ),
        *("--chunkcache-max-chunks", str(max(args.counts)), *serve_arms.EVERY_SERVER),
        # On the CPU SGLang's attention pads every piece of a prefill to the whole prompt: pieces
        # would slow it down.
        *("--chunked-prefill-size", "-1", "--max-prefill-tokens", str(args.max_total_tokens)),
    ]
    env = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    log = args.logs / "chunks.log"
    return Server([*flags, *args.server_flags], log=log, env=env, timeout_s=args.start_limit_s)
