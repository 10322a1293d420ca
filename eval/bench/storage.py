"""Does a storage below the store cost time? Time to first token with one over that without,
whatever the storage does.

    python -m eval bench storage [--states healthy slowed hanging refusing] [--tokens 2000]
                                 [--pairs 60] [-- FLAGS]

Two servers run at once, `off` and `on`, one client, one request at a time, all with moved KV: a
prompt draws chunks at random from a pool that neither the KV pool nor the store in memory holds.
Both answer the same requests in turn, each measured one right behind a short one that is not
measured, of which the storage's thread still has work. `on` has a storage of a class for tests:

    healthy    a dict                    hanging    no call ever returns
    slowed     sleeps, --ms-per-mib      refusing   every call raises

A ratio is the median of the pairs', on over off, with a bootstrap interval; above 1, the storage
costs time. It is promised that the interval ends at 1.05 at most, and that the ratio of 99th
percentiles is at most 1.15. What the thread did is told beside them: if it did nothing, the command
fails. Weights are random, and only times are meaningful. It runs in the repository's root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from eval.bench.rounds import by_cell, take_rounds
from eval.data.random_text import WORDS, random_text
from eval.errors import CommandError
from eval.http import get, post
from eval.outcome import Row, add_out_option, interval, open_run, table, tell
from eval.random_model import SHAPES, write_words_model
from eval.run import Sample
from eval.serve import arms as serve_arms
from eval.serve.client import open_session, send
from eval.server import Server
from eval.stats import quantile, summary
from eval.task import Request, TextChunk
from retrieval.command_line import Parser

STATES = ("healthy", "slowed", "hanging", "refusing")
AT_WORK = ("loaded", "written", "late", "skipped", "queue")
"""Counters of the storage that a thread at work raises, beside its problems."""
MEDIAN_AT_MOST, P99_AT_MOST = 1.05, 1.15
"""What is promised of the interval's upper end, and of the ratio of 99th percentiles."""
RAG = serve_arms.Arm("rag", "", route="rag")
SYSTEM = "Answer from the passages."
POLL_S = 0.05


class Bench:
    """Sends the same requests to both servers."""

    def __init__(
        self, urls: Mapping[str, str], args: argparse.Namespace, runner: asyncio.Runner
    ) -> None:
        self._urls, self._runner = urls, runner
        count = int(
            post(urls["off"] + "/tokenize", {"prompt": random_text("tokenizer", 1000)})["count"]
        )
        num_words, self._num_chunks = (
            round(args.chunk_tokens * 1000 / count),
            round(args.tokens / args.chunk_tokens),
        )
        names = [f"chunk {number}" for number in range(args.pool)]
        self._pool = [TextChunk(name, random_text(name, num_words)) for name in names]

    def sample(self, arm: str, number: int) -> Sample:
        """The measured request of a pair, behind one that is not; then whatever can end ends."""
        self._send(arm, f"{number} before", self._num_chunks // 4 or 1)
        answer = self._send(arm, str(number), self._num_chunks)
        before = -1
        # the same number twice: none, or it hangs
        while (left := (self.storage() or {"queue": 0})["queue"]) != before:
            before = left
            time.sleep(POLL_S)
        return {**answer, "storage": self.storage() if arm == "on" else None}

    def storage(self) -> dict[str, Any] | None:
        """The counters of `on`."""
        found: dict[str, Any] | None = get(self._urls["on"] + "/chunkcache/stats")["ranks"][0].get(
            "storage"
        )
        return found

    def _send(self, arm: str, seed: str, num_chunks: int) -> Sample:
        rng = random.Random(seed)
        # drawn by the request's seed: both servers get the same question and chunks
        question = " ".join(rng.choices(WORDS, k=24))
        request = Request(seed, question, tuple(rng.sample(self._pool, num_chunks)), system=SYSTEM)

        async def once() -> Any:
            body = {"order": "retriever", "reuse": {"mode": "fused"}}
            async with open_session() as session:
                return await send(
                    session, self._urls[arm], RAG, request, (), max_new_tokens=1, body=body
                )

        answer = self._runner.run(once())
        if answer.error or answer.ttft_s is None:
            raise CommandError(f"{arm}: {answer.error or 'no token'}")
        # kept with the sample: they say why a request moved less than its pair
        fallbacks = (answer.chunkcache or {}).get("fallbacks", [])
        return {"metrics": {"ttft_s": answer.ttft_s}, "fates": answer.fates, "fallbacks": fallbacks}


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """One row a state; `idle`: states in which the storage's thread did nothing."""
    rows = [_row(cell["storage"], arms["off"], arms["on"]) for cell, arms in by_cell(samples)]
    verdict = [
        f"{row['storage']}: time to first token with the storage / without {row['on / off']} at the"
        f" median, {row['p99 on / off']} at p99: {'kept' if row['kept'] else 'NOT kept'}."
        for row in rows
    ]
    note = (
        f"kept: the interval ends at or below {MEDIAN_AT_MOST}, the ratio of p99 is at most"
        f" {P99_AT_MOST}"
    )
    # counters only grow, so a state's last sample has them all
    counted = [
        {"storage": cell["storage"], **_counts(arms["on"][-1])} for cell, arms in by_cell(samples)
    ]
    idle = [
        row["storage"] for row in counted if not any(row[name] for name in (*AT_WORK, "problems"))
    ]
    tables = [
        table("Time to first token with a storage", rows, note),
        table(
            "What its thread did",
            counted,
            "counts since the server's start; ms per MiB as it estimates loads",
        ),
    ]
    return {"verdict": verdict, "tables": tables, "idle": idle}


# Private, in order of use


def _row(state: str, off: Sequence[Sample], on: Sequence[Sample]) -> Row:
    times = {
        name: [one["metrics"]["ttft_s"] for one in taken]
        for name, taken in (("off", off), ("on", on))
    }
    # a ratio of medians of the same samples has nearly three times as wide an interval
    # (2026-11-23T1707-storage-states)
    pairs = summary([b / a for a, b in zip(times["off"], times["on"], strict=True)], of_median=True)
    p99 = quantile(times["on"], 0.99) / quantile(times["off"], 0.99)
    moved = {name: round(_moved(taken)) for name, taken in (("off", off), ("on", on))}
    return {
        "storage": state,
        "pairs": len(on),
        "off p50 (s)": round(quantile(times["off"], 0.5), 4),
        "on p50 (s)": round(quantile(times["on"], 0.5), 4),
        "on / off": interval([pairs[name] for name in ("p50", "low", "high")]),
        "p99 on / off": round(p99, 3),
        "kept": pairs["high"] <= MEDIAN_AT_MOST and p99 <= P99_AT_MOST,
        "moved tokens off": moved["off"],
        "moved tokens on": moved["on"],
    }


def _moved(samples: Sequence[Sample]) -> float:
    return mean(float(one["fates"]["relocated"] + one["fates"]["recomputed"]) for one in samples)


def _counts(last: Sample) -> Row:
    found = last["storage"]
    names = (*AT_WORK, "full", "pauses", "num_entries", "pays", "load_ms_per_mib")
    return {**{name: found[name] for name in names}, "problems": sum(found["problems"].values())}


def main(argv: Sequence[str]) -> int:
    """Run; returns 1 if a storage's thread did nothing."""
    args = _parse(argv)
    with open_run("storage", args, summarize, without=("logs",)) as run, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = args.model_path or write_words_model(folder, SHAPES[args.params])
        runner = stack.enter_context(asyncio.Runner())
        # new servers both: what was asked for before decides what is kept
        for state in args.states:
            flags = _storage_flags(args, state, folder)
            with _server(args, "off", model, []) as off, _server(args, state, model, flags) as on:
                bench = Bench({"off": off.url, "on": on.url}, args, runner)
                takes = {arm: partial(bench.sample, arm) for arm in ("off", "on")}
                take_rounds(run, {"storage": state}, takes, args.pairs)
    return 1 if tell(run)["idle"] else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval bench storage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--states",
        nargs="+",
        choices=STATES,
        default=STATES,
        help="of the storage, one after the other",
    )
    add("--tokens", type=int, default=2000, help="length of a prompt's chunks together")
    add(
        "--pairs",
        type=int,
        default=60,
        help="measured requests of each server and state, after one of warm-up",
    )
    add("--pool", type=int, default=32, help="chunks that requests draw from")
    add("--chunk-tokens", type=int, default=256)
    add(
        "--ms-per-mib",
        type=float,
        default=1000.0,
        help="slowed: what a call with so many bytes takes",
    )
    add = parser.add_argument_group("servers").add_argument
    add("--model-path", help="default: a random model; only times are meaningful")
    add(
        "--params",
        type=int,
        choices=sorted(SHAPES),
        default=100,
        help="millions of the random model's parameters",
    )
    add("--threads", type=int, help="OMP_NUM_THREADS of the servers (default: theirs)")
    add(
        "--max-total-tokens",
        type=int,
        default=10_000,
        help="KV pool: a few prompts, so that chunks leave the device",
    )
    add(
        "--store-mib",
        type=int,
        default=24,
        help="store in memory: less than the pool's chunks, so that they leave it",
    )
    add("--start-limit-s", type=float, default=300.0, help="seconds until a server must be ready")
    add("--logs", type=Path, default=Path("logs"))
    add_out_option(parser)
    add("server_flags", nargs="*", metavar="-- FLAGS", help="more flags for all servers")
    return parser.parse_args(argv)


def _storage_flags(args: argparse.Namespace, state: str, folder: Path) -> list[str]:
    extra = {
        "backend_name": "memory",
        "module_path": "tests.reference.memory_storage",
        "class_name": "MemoryStorage",
        "state": state,
        "ms_per_mib": args.ms_per_mib,
        "directory": str(folder / state),
    }
    flag = "--chunkcache-storage"
    return [
        f"{flag}-backend",
        "dynamic",
        f"{flag}-mib",
        "4096",
        f"{flag}-backend-extra-config",
        json.dumps(extra),
    ]


def _server(args: argparse.Namespace, name: str, model: str, flags: Sequence[str]) -> Server:
    shared = [
        *(
            "--model-path",
            model,
            "--reuse",
            "fused",
            "--max-total-tokens",
            str(args.max_total_tokens),
        ),
        *("--chunkcache-store-threshold", "1", "--chunkcache-store-mib", str(args.store_mib)),
        *("--chunkcache-calibrate", "off", *serve_arms.UNAUDITED, *serve_arms.EVERY_SERVER),
        # On the CPU SGLang's attention pads every piece of a prefill to the whole prompt: pieces
        # would slow it down.
        *("--chunked-prefill-size", "-1", "--max-prefill-tokens", str(2 * args.tokens)),
    ]
    env = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    log = args.logs / f"storage-{name}.log"
    return Server(
        [*shared, *flags, *args.server_flags], log=log, env=env, timeout_s=args.start_limit_s
    )
