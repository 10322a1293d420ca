"""What does a chain cost that is in a slower tier? Time to first token with loads from host memory,
disk and network.

    python -m eval bench tiers [--tokens 2000 6000] [--places alone behind hinted] [--rounds 20]
                               [--redis PORT] [-- FLAGS]

One server a tier, in exact mode, all at once. Each prompt is asked for twice before, so that it is
where it is looked for; then others follow it until it has left all faster tiers:

    compute   a KV pool of less than two prompts   disk      host memory of less than two, and a
                                                             storage in a folder
    host      host memory of all prompts as well   network   the same in a Redis server at --redis;
                                                             without it there is none

With --waits there is a server on disk for each: requests wait for their loads so long, as a share
of computing.

A prompt is measured alone; right behind two half as long that share nothing with it, one request
running at a time: while the second is computed, a load from disk or network may come; and alone
after a hint (`/chunkcache/prefetch`) --ahead-ms before. A ratio is that of medians, of computing
over the tier: above 1, the load is faster. Weights are random. It runs in the repository's root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from eval.bench.rounds import by_cell, take_rounds, told_ratio
from eval.bench.storage import POLL_S, RAG, SYSTEM
from eval.data.random_text import WORDS, random_text
from eval.errors import CommandError
from eval.http import get, post
from eval.outcome import Row, add_out_option, open_run, table, tell
from eval.random_model import SHAPES, write_words_model
from eval.run import Sample
from eval.serve import arms as serve_arms
from eval.serve.client import Answer, open_session, send
from eval.server import Server
from eval.stats import quantile
from eval.task import Request, TextChunk
from retrieval.command_line import Parser

HEAD_START_S = 0.02
"""Of a prompt over the next one."""
PLACES, LOADLESS = ("alone", "behind", "hinted"), ("compute", "host")
PROMPTS = 1.7
"""What a tier holds that must not hold two, and the KV pool beside the prompt before."""


class Lane:
    """Prompts of one length for all servers."""

    def __init__(
        self, urls: Mapping[str, str], tokens: int, args: argparse.Namespace, runner: asyncio.Runner
    ) -> None:
        self._urls, self._runner, self._ahead_s = urls, runner, args.ahead_ms / 1000
        url = next(iter(urls.values()))
        count = int(post(url + "/tokenize", {"prompt": random_text("tokenizer", 1000)})["count"])
        num_words = round(args.chunk_tokens * 1000 / count)
        self._before = num_words * tokens // (2 * args.chunk_tokens)
        self._chunks = [
            [
                TextChunk(f"{prompt}.{n}", random_text(f"{prompt}.{n}", num_words))
                for n in range(tokens // args.chunk_tokens)
            ]
            for prompt in range(args.rounds + 1)
        ]
        for tier, each in urls.items():
            # `compute` must not have seen a prompt before it is measured
            for chunks in self._chunks if tier != "compute" else ():
                self._sent(each, "computed", chunks)
                refused = -1
                # what found no place in the queue is written with the chain's next request
                while refused < (now := _num_refused(each)):
                    refused = now
                    # a forward writes back up to 512 tokens of what a request has found cached:
                    # about as many are copied after each
                    self._sent(each, "found", chunks, num_tokens=4 + tokens // 500)

    def sample(self, arm: str, place: str, number: int) -> Sample:
        """One request, at its place."""
        url, chunks = self._urls[arm], self._chunks[number]
        if place == "hinted":
            if arm not in LOADLESS:
                hint = {
                    "messages": [{"role": "system", "content": SYSTEM}],
                    "texts": [chunk.text for chunk in chunks],
                }
                post(url + "/chunkcache/prefetch", {**hint, "order": "retriever"})
            # all arms wait, so that each is measured on a server that was idle as long
            time.sleep(self._ahead_s)
        answer = self._sent(
            url, str(number), chunks, before=f"{number} {place}" if place == "behind" else ""
        )
        stats = get(url + "/chunkcache/stats")["ranks"][0]
        told = answer.chunkcache or {}
        return {
            "metrics": {"ttft_s": answer.ttft_s},
            "prompt_tokens": answer.prompt_tokens,
            "exact": (answer.fates or {}).get("exact"),
            "loaded": told.get("loaded"),
            "late": (stats.get("storage") or {}).get("late"),
        }

    def _sent(
        self,
        url: str,
        seed: str,
        chunks: Sequence[TextChunk],
        *,
        before: str = "",
        num_tokens: int = 1,
    ) -> Answer:
        async def both() -> Answer:
            async with open_session() as session:
                requests = [Request(seed, f"{seed} {WORDS[0]}", tuple(chunks), system=SYSTEM)]
                # each is put in front, so `first` is sent first
                for name in (f"{before} second", f"{before} first") if before else ():
                    short = TextChunk(name, random_text(name, self._before))
                    requests.insert(0, Request(name, name, (short,), system=name))
                under_way = []
                for request in requests:
                    body = {"order": "retriever", "ignore_eos": True}
                    asking = send(
                        session, url, RAG, request, (), max_new_tokens=num_tokens, body=body
                    )
                    under_way.append(asyncio.create_task(asking))
                    # else requests, each on its own connection, could overtake each other
                    await asyncio.sleep(HEAD_START_S)
                answers = await asyncio.gather(*under_way)
                for each in answers:
                    if each.error or each.ttft_s is None:
                        raise CommandError(f"{url}: {each.error or 'no token'}")
                return answers[-1]

        return self._runner.run(both())


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """One row a length, place and tier."""
    rows = [
        _row(cell, arm, arms["compute"], taken)
        for cell, arms in by_cell(samples)
        for arm, taken in arms.items()
    ]
    verdict = [
        f"{row['tokens']} tokens, {row['place']}: from {row['tier']} {row['compute / tier']} times"
        " sooner than computed."
        for row in rows
        if row["tier"] != "compute"
    ]
    note = "compute / tier: above 1, the load is faster"
    return {"verdict": verdict, "tables": [table("Time to first token by tier", rows, note)]}


def main(argv: Sequence[str]) -> int:
    """Run."""
    args = _parse(argv)
    with open_run("tiers", args, summarize, without=("logs", "redis")) as run, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_words_model(folder, SHAPES[args.params])
        runner = stack.enter_context(asyncio.Runner())
        for tokens in args.tokens:
            with ExitStack() as servers:
                flags = _flags(args, tokens, folder)
                urls = {
                    tier: servers.enter_context(_server(args, tier, tokens, model, flags[tier])).url
                    for tier in flags
                }
                lane = Lane(urls, tokens, args, runner)
                for place in args.places:
                    cell = {"tokens": tokens, "place": place}
                    take_rounds(
                        run,
                        cell,
                        {arm: partial(lane.sample, arm, place) for arm in urls},
                        args.rounds,
                    )
    tell(run)
    return 0


def mib_of(args: argparse.Namespace, tokens: int) -> float:
    """KV of so many tokens."""
    # the 2 below: keys and values
    shape, num_bytes = SHAPES[args.params], {"bfloat16": 2, "float32": 4}[args.dtype]
    return (
        2
        * num_bytes
        * shape.layers
        * shape.kv_heads
        * shape.hidden
        // shape.heads
        * tokens
        / (1 << 20)
    )


# Private, in order of use


def _num_refused(url: str) -> int:
    """Writes that the storage had no place for, once none is under way."""
    while (found := get(url + "/chunkcache/stats")["ranks"][0].get("storage")) and found["queue"]:
        time.sleep(POLL_S)
    return found["full"] if found else 0


def _row(cell: Mapping[str, Any], arm: str, base: Sequence[Sample], taken: Sequence[Sample]) -> Row:
    return {
        **cell,
        "tier": arm,
        "rounds": len(taken),
        "prompt tokens": quantile([one["prompt_tokens"] for one in taken], 0.5),
        "found tokens": quantile([one["exact"] for one in taken], 0.5),
        "loaded tokens": quantile([one["loaded"] or 0 for one in taken], 0.5),
        "p50 (s)": round(quantile([one["metrics"]["ttft_s"] for one in taken], 0.5), 4),
        "compute / tier": told_ratio(base, taken, "ttft_s", 2),
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval bench tiers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--tokens",
        type=int,
        nargs="+",
        default=[2000, 6000],
        help="length of a prompt's chunks together",
    )
    add(
        "--rounds",
        type=int,
        default=20,
        help="measured prompts of each server, length and place, after one of warm-up",
    )
    add("--places", nargs="+", choices=PLACES, default=PLACES, help="where a prompt is measured")
    add(
        "--waits",
        type=float,
        nargs="+",
        default=[1.0],
        help="--chunkcache-storage-wait of the servers on disk",
    )
    add("--ahead-ms", type=int, default=100, help="of a hint before its request")
    add("--chunk-tokens", type=int, default=250)
    add(
        "--redis",
        type=int,
        metavar="PORT",
        help="a Redis server on this machine, for the tier `network`",
    )
    add = parser.add_argument_group("servers").add_argument
    add(
        "--params",
        type=int,
        choices=sorted(SHAPES),
        default=100,
        help="millions of the random model's parameters",
    )
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights and KV")
    add("--threads", type=int, help="OMP_NUM_THREADS of the servers (default: theirs)")
    add("--start-limit-s", type=float, default=300.0, help="seconds until a server must be ready")
    add("--logs", type=Path, default=Path("logs"))
    add_out_option(parser)
    add("server_flags", nargs="*", metavar="-- FLAGS", help="more flags for all servers")
    return parser.parse_args(argv)


def _flags(args: argparse.Namespace, tokens: int, folder: Path) -> dict[str, list[str]]:
    """Tier -> what its server adds."""
    mib = mib_of(args, tokens)
    # room for two more prompts than there are: none may leave host memory
    one, every = (str(max(10, round(number * mib))) for number in (PROMPTS, args.rounds + 3))
    flag = "--chunkcache-storage"
    kept = ["--chunkcache-host-mib", one, f"{flag}-mib", "4096", f"{flag}-backend"]
    redis = {
        "backend_name": "redis",
        "module_path": "tests.reference.redis_storage",
        "class_name": "RedisStorage",
    }
    network = {**redis, "port": args.redis, "directory": str(folder / f"network-{tokens}")}
    found = {
        "compute": ["--chunkcache-host-mib", "0"],
        "host": ["--chunkcache-host-mib", every],
        **{
            "disk" if wait == args.waits[0] else f"disk, wait {wait:g}": [
                *(*kept, "file", f"{flag}-backend-extra-config"),
                *(
                    json.dumps({"directory": str(folder / f"disk-{tokens}-{wait}")}),
                    f"{flag}-wait",
                    str(wait),
                ),
            ]
            for wait in args.waits
        },
        "network": [*kept, "dynamic", f"{flag}-backend-extra-config", json.dumps(network)],
    }
    if args.redis is None:
        del found["network"]
    return found


def _server(
    args: argparse.Namespace, name: str, tokens: int, model: str, flags: Sequence[str]
) -> Server:
    # 200 for the head, the question and the answer of a prompt
    pool = round(PROMPTS * tokens) + 200
    shared = [
        *(
            "--model-path",
            model,
            "--dtype",
            args.dtype,
            "--max-total-tokens",
            str(pool),
            *serve_arms.EVERY_SERVER,
        ),
        # On the CPU SGLang's attention pads every piece of a prefill to the whole prompt: pieces
        # would slow it down.
        *(
            "--chunked-prefill-size",
            "-1",
            "--max-prefill-tokens",
            str(2 * tokens),
            "--max-running-requests",
            "1",
        ),
    ]
    env = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    log = args.logs / f"tiers-{name}-{tokens}.log"
    return Server(
        [*shared, *flags, *args.server_flags], log=log, env=env, timeout_s=args.start_limit_s
    )
