"""How many chunks a second does preprocessing fill a store with, by requests in flight?

    python -m eval bench preprocess [--batch 1 10 32] [--chunks 64] [--neighbors 10] [--rounds 8]
                                    [-- FLAGS]

One server with moved KV, and the command a user runs (`python -m sglang_chunkcache.preprocess`). In
each round every arm, so many requests in flight, gets a block of chunks that nobody has seen: all
alone, then each behind --neighbors others of its block. The command is run once more: what store or
storage have kept is not computed again. They and the KV pool are emptied between. A ratio is that
of medians, of the first arm's seconds over an arm's: above 1, the arm is faster. Seconds are the
command's own, without its start. With --storage-mib a storage on disk is below the store.

The random model has the shape of --params cut to --layers; only times are meaningful. It runs in
the repository's root.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from eval.bench.rounds import by_cell, take_rounds, told_ratio
from eval.data.random_text import random_text
from eval.errors import CommandError
from eval.http import post
from eval.outcome import Row, add_out_option, open_run, table, tell
from eval.random_model import SHAPES, write_words_model
from eval.run import Sample
from eval.serve import arms as serve_arms
from eval.server import Server
from eval.stats import quantile
from retrieval.command_line import Parser

PASSES = {"alone": "alone_s", "behind_neighbors": "behind_s"}
"""Of the command -> seconds a chunk."""
NOTE = (
    "chunks/s: both passes, each chunk alone and behind its neighbors; faster: above 1, than the"
    " first row; kept, computed: of a block's requests by the same command once more"
)


class Blocks:
    """Chunks for one server."""

    def __init__(self, url: str, args: argparse.Namespace, folder: Path) -> None:
        self._url, self._args, self._folder = url, args, folder
        count = int(post(url + "/tokenize", {"prompt": random_text("tokenizer", 1000)})["count"])
        self._num_words = round(args.chunk_tokens * 1000 / count)

    def sample(self, batch: int, number: int) -> Sample:
        """One block, `batch` requests in flight, and the same block again."""
        command = self._command(f"{number}.{batch}", batch)
        result = _output(command)
        if any(result[name]["chunks"] != self._args.chunks for name in PASSES):
            raise CommandError(f"preprocess: not every chunk was computed: {result}")
        # before `_empty`: the second time everything must be found
        again = _output(command)
        self._empty()
        metrics = {
            seconds: result[name]["seconds"] / result[name]["chunks"]
            for name, seconds in PASSES.items()
        }
        stored = [rank["num_variants"] for rank in result["stores"]]
        return {
            "metrics": {**metrics, "chunk_s": sum(metrics.values())},
            "chunk_tokens": result["alone"]["chunk_tokens"] / result["alone"]["chunks"],
            "neighbors": result["behind_neighbors"]["neighbors"],
            # the store in memory may have evicted what a storage below it still holds
            "entries": sum([rank["num_entries"] for rank in result["storages"]] or stored),
            "again": {
                name: sum(again[each][name] for each in PASSES)
                for name in ("kept", "chunks", "seconds")
            },
        }

    # Private, in order of use

    def _command(self, seed: str, batch: int) -> list[str]:
        """What a user runs, on a corpus that is written for it."""
        rng, names = random.Random(seed), [f"{seed}.{n}" for n in range(self._args.chunks)]
        num_neighbors = self._args.neighbors
        rows: dict[str, Iterator[dict[str, Any]]] = {
            "corpus": ({"id": name, "text": random_text(name, self._num_words)} for name in names),
            "neighbors": (
                # one more is drawn than needed, since the chunk itself may be among them
                {"id": name, "neighbors": [each for each in drawn if each != name][:num_neighbors]}
                for name, drawn in ((name, rng.sample(names, num_neighbors + 1)) for name in names)
            ),
        }
        command = [
            sys.executable,
            "-m",
            "sglang_chunkcache.preprocess",
            "--url",
            self._url,
            "--json",
        ]
        command += ["--batch", str(batch), "--top-n", str(num_neighbors)]
        for name, lines in rows.items():
            path = self._folder / f"{name}.jsonl"
            with path.open("w", encoding="utf-8") as out:
                out.writelines(json.dumps(line) + "\n" for line in lines)
            command += [f"--{name}", str(path)]
        return command

    def _empty(self) -> None:
        for path in ("/chunkcache/clear_store", "/flush_cache?timeout=10"):
            post(self._url + path)


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """One row an arm."""
    done = [arms for _, arms in by_cell(samples)]
    rows = [
        _row(arm, next(iter(arms.values())), taken) for arms in done for arm, taken in arms.items()
    ]
    verdict = [
        f"{row['requests in flight']} in flight: {row['chunks/s']} chunks a second, {row['faster']}"
        f" times as fast as {rows[0]['requests in flight']}."
        for row in rows
    ]
    tables = [table("Chunks a second by requests in flight", rows, NOTE)]
    return {"verdict": verdict, "tables": [one for one in tables if one["rows"]]}


def main(argv: Sequence[str]) -> int:
    """Run."""
    args = _parse(argv)
    with open_run("preprocess", args, summarize, without=("logs",)) as run, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shape = replace(SHAPES[args.params], layers=args.layers)
        model = write_words_model(folder / "model", shape)
        blocks = Blocks(stack.enter_context(_server(args, model, folder)).url, args, folder)
        cell = {"chunk_tokens": args.chunk_tokens, "neighbors": args.neighbors}
        take_rounds(
            run,
            cell,
            {str(batch): partial(blocks.sample, batch) for batch in args.batch},
            args.rounds,
        )
    tell(run)
    return 0


# Private, in order of use


def _output(command: Sequence[str]) -> dict[str, Any]:
    """What the command says. Chunks that were refused, lost or evicted, or lack neighbours,
    make a rate of nothing."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(f"preprocess: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _row(arm: str, base: Sequence[Sample], taken: Sequence[Sample]) -> Row:
    def rate(metric: str) -> float:
        return round(1 / quantile([one["metrics"][metric] for one in taken], 0.5), 2)

    found: Mapping[str, int] = {
        kind: sum(one["neighbors"][kind] for one in taken)
        for kind in ("moved", "computed", "missing")
    }
    return {
        "requests in flight": int(arm),
        "rounds": len(taken),
        "chunk tokens": round(quantile([one["chunk_tokens"] for one in taken], 0.5)),
        "alone, chunks/s": rate("alone_s"),
        "behind, chunks/s": rate("behind_s"),
        "chunks/s": rate("chunk_s"),
        "alone, faster": told_ratio(base, taken, "alone_s", 2),
        "behind, faster": told_ratio(base, taken, "behind_s", 2),
        "faster": told_ratio(base, taken, "chunk_s", 2),
        **found,
        "entries": round(quantile([one["entries"] for one in taken], 0.5)),
        "again, kept": sum(one["again"]["kept"] for one in taken),
        "again, computed": sum(one["again"]["chunks"] for one in taken),
        "again (s)": round(quantile([one["again"]["seconds"] for one in taken], 0.5), 1),
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval bench preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 10, 32],
        help="requests in flight; the first one is compared with",
    )
    add("--chunks", type=int, default=64, help="in a block")
    add("--neighbors", type=int, default=10, help="before a chunk")
    add("--chunk-tokens", type=int, default=256)
    add("--rounds", type=int, default=8, help="measured blocks of each arm, after one of warm-up")
    add(
        "--params",
        type=int,
        choices=sorted(SHAPES),
        default=100,
        help="millions of the random model's parameters",
    )
    add("--layers", type=int, default=2, help="of the random model")
    add("--storage-mib", type=int, help="of a storage on disk below the store (default: none)")
    add("--threads", type=int, help="OMP_NUM_THREADS of the server (default: its own)")
    add("--start-limit-s", type=float, default=300.0, help="seconds until the server must be ready")
    add("--logs", type=Path, default=Path("logs"))
    add_out_option(parser)
    add("server_flags", nargs="*", metavar="-- FLAGS", help="more flags for the server")
    args = parser.parse_args(argv)
    if args.chunks <= args.neighbors:
        parser.error("--chunks: must be more than --neighbors")
    return args


def _server(args: argparse.Namespace, model: str, folder: Path) -> Server:
    chunk = args.chunk_tokens + 16
    prompt = (args.neighbors + 1) * chunk
    budget = max(2 * prompt, max(args.batch) * chunk)
    # A block's chunks, what is in flight with its neighbours, and what a prefill may take: nothing
    # is evicted and computed again.
    pool = 2 * args.chunks * chunk + 2 * max(args.batch) * prompt + budget
    flags = [
        *("--model-path", model, "--reuse", "fused", "--max-total-tokens", str(pool)),
        *("--max-running-requests", str(max(args.batch))),
        *("--chunkcache-calibrate", "off", *serve_arms.UNAUDITED, *serve_arms.EVERY_SERVER),
        # On the CPU SGLang's attention pads every piece of a prefill to the whole prompt: pieces
        # would slow it down.
        *("--chunked-prefill-size", "-1", "--max-prefill-tokens", str(budget)),
    ]
    if args.storage_mib:
        flags += [
            "--chunkcache-storage-backend",
            "file",
            "--chunkcache-storage-mib",
            str(args.storage_mib),
        ]
        flags += [
            "--chunkcache-storage-backend-extra-config",
            json.dumps({"directory": str(folder / "kept")}),
        ]
    env = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    log = args.logs / "preprocess.log"
    return Server([*flags, *args.server_flags], log=log, env=env, timeout_s=args.start_limit_s)
