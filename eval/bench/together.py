"""What do fused requests compute that come at once, against the same one after the other, and with
a KV pool that not all of them fit into, against an ample one?

    python -m eval bench together [--rounds 8] [--params 10]

    alone, at once   twelve requests of twelve chunks, two of which all have in common
    ample, tight     32 requests at once; the tight pool has room for 28 with their answers

Every chunk was served alone before; the tree is emptied between rounds. Always moved, `query`, 15%.
Computed are tokens of prompts that are computed or recomputed; a ratio of times is that of medians.
The model is random: only counts and times are meaningful.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from eval.bench.rounds import Take, by_cell, take_rounds, told_ratio
from eval.data.random_text import random_text
from eval.http import post
from eval.outcome import Row, add_out_option, open_run, table, tell
from eval.random_model import SHAPES, write_words_model
from eval.run import Sample
from eval.serve.arms import EVERY_SERVER, UNAUDITED
from eval.server import Server
from retrieval.command_line import Parser

NUM_CHUNKS, K, COMMON = 24, 12, 2
TWELVE, CROWD, FIT = 12, 32, 28
OUTPUTS = {16: 2, 512: 4}
"""Tokens of an answer of the crowd, and of how many rounds one is taken: what is computed hardly
differs."""
AROUND = 60
"""Tokens of a prompt that are no chunk's, at most."""
NOTE = "tokens of all requests of a round, means; computed / first: of the cell's first row"


def chunks(words: int) -> list[dict[str, str]]:
    """Of random words."""
    return [{"id": f"c{i}", "text": random_text(f"chunk {i}", words)} for i in range(NUM_CHUNKS)]


def bodies(
    number: int, count: int, found: Sequence[Mapping[str, str]], *, common: int, output: int
) -> list[dict[str, Any]]:
    """The requests of a round, equal for its arms. `common`: chunks that each one begins with."""
    rng = random.Random(number)
    fused = {"reuse": {"mode": "fused", "selector": "query", "ratio": 0.15}}
    return [
        _body(
            [*found[:common], *rng.sample(found[common:], K - common)],
            f"{number} {each}",
            max_tokens=output,
            ignore_eos=True,
            **fused,
        )
        for each in range(count)
    ]


def ask(url: str, asked: Sequence[Mapping[str, Any]], *, at_once: bool) -> Sample:
    """Seconds until all are answered, and tokens of their prompts by fate."""
    send = partial(post, f"{url}/rag/v1/chat/completions")
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(asked) if at_once else 1) as pool:
        told = [each["chunkcache"] for each in pool.map(send, asked)]
    seconds = time.perf_counter() - begun
    fates, fallbacks = Counter[str](), Counter[str]()
    for each in told:
        fates.update(each["fates"])
        fallbacks.update(each["fallbacks"])
    computed = fates["computed"] + fates["recomputed"]
    return {
        "metrics": {"all_s": seconds},
        "fates": dict(fates),
        "computed": computed,
        "fallbacks": dict(fallbacks),
    }


def measure(
    url: str,
    found: Sequence[Mapping[str, str]],
    number: int,
    *,
    count: int,
    common: int,
    output: int,
    at_once: bool,
) -> Sample:
    """A round of one arm, whose server has nothing but each chunk alone."""
    post(url + "/flush_cache?timeout=30")
    for each in found:
        post(f"{url}/rag/v1/chat/completions", _body([each], "alone", max_tokens=1))
    asked = bodies(number, count, found, common=common, output=output)
    return ask(url, asked, at_once=at_once)


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """A row an arm and cell."""
    rows: list[Row] = []
    for cell, arms in by_cell(samples):
        base = next(iter(arms.values()))
        for arm, taken in arms.items():
            fates = {
                name: round(sum(one["fates"][name] for one in taken) / len(taken))
                for name in ("exact", "relocated", "computed", "recomputed")
            }
            computed, first = (sum(one["computed"] for one in each) for each in (taken, base))
            rows.append(
                {
                    **cell,
                    "arm": arm,
                    "rounds": len(taken),
                    **fates,
                    "computed / first": round(computed / first, 3),
                    "time / first": told_ratio(taken, base, "all_s"),
                    "fallbacks": sum(sum(one["fallbacks"].values()) for one in taken),
                }
            )
    verdict = [
        f"{row['requests']} requests, {row['output']} tokens of answer, {row['arm']}:"
        f" {row['computed / first']} times the tokens computed, {row['time / first']} times the"
        " time."
        for row in rows
        if row["arm"] in ("at once", "tight")
    ]
    return {"verdict": verdict, "tables": [table("Fused requests together", rows, NOTE)]}


def main(argv: Sequence[str]) -> int:
    """Run."""
    args = _parse(argv)
    with open_run("together", args, summarize, without=("logs",)) as run, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_words_model(folder / "model", SHAPES[args.params])
        found = chunks(args.chunk_tokens)
        prompt = K * args.chunk_tokens + AROUND
        crowds = ((CROWD, 0, output, part) for output, part in OUTPUTS.items())
        for count, common, output, part in ((TWELVE, COMMON, 2, 1), *crowds):
            take = partial(measure, found=found, count=count, common=common, output=output)
            ample, tight = 2 * CROWD * (prompt + output), FIT * (prompt + output)
            with ExitStack() as servers:
                start = partial(_server, args, model)
                first = servers.enter_context(start(ample)).url
                if count == CROWD:
                    second = servers.enter_context(start(tight)).url
                    arms = {
                        "ample": _taker(take, first, at_once=True),
                        "tight": _taker(take, second, at_once=True),
                    }
                else:
                    arms = {
                        "one by one": _taker(take, first, at_once=False),
                        "at once": _taker(take, first, at_once=True),
                    }
                take_rounds(
                    run, {"requests": count, "output": output}, arms, max(1, args.rounds // part)
                )
    tell(run)
    return 0


# Private, in order of use


def _taker(take: Callable[..., Sample], url: str, *, at_once: bool) -> Take:
    return lambda number: take(url, number=number, at_once=at_once)


def _body(found: Sequence[Mapping[str, str]], question: str, **more: Any) -> dict[str, Any]:
    asked = random_text(f"question {question}", 12)
    return {
        "model": "default",
        "temperature": 0,
        "messages": [{"role": "user", "content": asked}],
        "chunks": list(found),
        **more,
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval bench together",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--rounds",
        type=int,
        default=8,
        help="measured rounds of each arm, after one of warm-up; of 32 requests fewer",
    )
    add("--params", type=int, choices=sorted(SHAPES), default=10, help="millions; default: 10")
    add("--chunk-tokens", type=int, default=190)
    add("--logs", type=Path, default=Path("logs"))
    add_out_option(parser)
    add("server_flags", nargs="*", metavar="-- FLAGS", help="more flags for the servers")
    args = parser.parse_args(argv)
    if min(args.rounds, args.chunk_tokens) < 1:
        parser.error("--rounds and --chunk-tokens must be at least 1")
    return args


def _server(args: argparse.Namespace, model: str, pool: int) -> Server:
    flags = [
        *("--model-path", model, "--reuse", "fused", "--chunkcache-move", "always"),
        *("--max-total-tokens", str(pool), *UNAUDITED, *EVERY_SERVER),
    ]
    return Server([*flags, *args.server_flags], log=args.logs / f"together-{pool}.log")
