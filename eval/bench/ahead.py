"""What do loads hide that begin before their request, or run beside its forward? Time to first
token where something is slow.

    python -m eval bench ahead [--tokens 2000 6000] [--us-per-token 250 1000]
                               [--moved-us-per-token 25 100] [--search-ms 5 20 50] [--rounds 8]
                               [-- FLAGS]

Three servers, one after the other, one request at a time, `--new` tokens of each to compute. With
--us-per-token a prompt is in host memory, and a copy to the device sleeps so long for each of its
tokens. With --moved-us-per-token chunks are moved from the store, preprocessed behind another, and
15% of their tokens recomputed, chosen by each of --selectors:

    computed   another prompt, that nobody has asked for
    in line    all layers are copied before the forward, or before the passes that recompute
    beside     as many layers as the server thinks best are copied before, the others beside it, or
               beside the passes

With --search-ms it is in a storage on disk, and the passages are found by the server, in an index
of 128 lists of which all take so long:

    computed   as above
    arrival    it is loaded when the search is over
    hint       --ahead-ms before the request, by its chunks

Load is a copy's sleep. Hidden is by how much sooner the first token comes beside than in line, as a
share of it; won, by how much sooner than at arrival, in ms; both the median of the rounds. Weights
are random. It runs in the repository's root.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from eval.bench.rounds import by_cell, take_rounds, told_ratio
from eval.bench.storage import POLL_S, SYSTEM
from eval.bench.tiers import PROMPTS, mib_of
from eval.data.random_text import random_text
from eval.http import get, post
from eval.outcome import Row, add_out_option, open_run, table, tell
from eval.random_model import SHAPES, write_words_model
from eval.run import Sample
from eval.serve import arms as serve_arms
from eval.server import Server
from eval.stats import quantile
from retrieval.command_line import Parser

KEPT = 4
"""Prompts that are asked for in turn: by the next time they have left faster tiers."""
COPIED = 10
"""Tokens of an answer while which about a prompt's chunks are copied to host memory,
for 500 of its tokens 2 more."""
NUM_LISTS, PER_LIST = 128, 40
"""Of the index, and the passages that make faiss content with them."""
NOTE = (
    "computed / arm: above 1, the arm is faster. Prefetched chunks count as used where a request"
    " asked for them, whoever had them loaded."
)
PREFETCH = ("requested", "loaded", "used")
"""Counters of the storage's stats."""
MOVED = {"mode": "fused", "ratio": 0.15, "move": "always"}
LAYERS, SEARCH = ("computed", "in line", "beside"), ("computed", "arrival", "hint")
PARTS = {"us_per_token": LAYERS, "moved_us_per_token": LAYERS, "search_ms": SEARCH}


class Lane:
    """One server, its prompts and its switch."""

    def __init__(
        self, url: str, switch: Path, prompts: Mapping[str, Sequence[str]], args: argparse.Namespace
    ) -> None:
        self._url, self._switch, self._prompts, self._args = url, switch, prompts, args
        self._passages = _passages(prompts)
        self._turn = 0
        self._texts: dict[str, list[str]] = {}
        """Of a kept prompt's chunks, in its order."""

    def keep(self, tokens: int, part: str) -> None:
        """Ask for the prompts until they are where they will be looked for."""
        for name in (f"kept{number}" for number in range(KEPT)):
            if part == "moved_us_per_token":
                # The last one lets those before it enter the store.
                for chunk in (*self._chunks(name), {"id": "-", "text": name}):
                    one = {"chunk": chunk, "neighbors": [{"id": "", "text": "Behind."}]}
                    post(self._url + "/chunkcache/preprocess", one)
                continue
            # what the second request finds cached is written back while it decodes
            for num_tokens in (1, COPIED + 2 * tokens // 500):
                self._ask(name, "first", num_tokens, retrieves=part == "search_ms")
                self._settle()

    def sample(self, arm: str, slow: Mapping[str, Any], number: int) -> Sample:
        """One request."""
        is_search, is_moved = "search_ms" in slow, "moved_us_per_token" in slow
        sleeps = {name.removeprefix("moved_"): slow[name] for name in PARTS if name in slow}
        switch(self._switch, **sleeps, in_line=arm == "in line")
        if is_moved:  # nothing is left on the device
            # longer than the server waits, so that it says itself why it could not
            get(self._url + "/flush_cache?timeout=60", timeout_s=90)
        prompt = f"{'found' if is_search else 'sent'}{number}"
        if arm != "computed":
            self._turn += 1
            prompt = f"kept{self._turn % KEPT}"
        before = self._stats()
        if arm == "hint":
            hint = {
                "messages": [{"role": "system", "content": SYSTEM}],
                "texts": self._texts[prompt],
            }
            post(self._url + "/chunkcache/prefetch", {**hint, "order": "retriever"})
            time.sleep(self._args.ahead_ms / 1000)
        reuse = (
            {**MOVED, "selector": slow["selector"]}
            if is_moved and arm != "computed"
            else {"mode": "exact"}
        )
        seconds, answer = self._ask(prompt, f"{number} {arm}", 1, retrieves=is_search, reuse=reuse)
        after = self._settle()
        counts, loader = answer["fates"], "moves" if is_moved else "host"
        loaded = counts["relocated"] + counts["recomputed"] if is_moved else answer["loaded"]
        return {
            "metrics": {"ttft_s": seconds},
            "prompt_tokens": sum(counts.values()),
            "exact": counts["exact"],
            "loaded": loaded,
            "layers_ahead": after[loader]["layers_ahead"] if not is_search else None,
            "prefetch": {
                name: _prefetched(after, name) - _prefetched(before, name) for name in PREFETCH
            },
            "late": after["storage"]["late"] - before["storage"]["late"] if is_search else None,
        }

    def _chunks(self, prompt: str) -> list[dict[str, str]]:
        return [
            {"id": f"{prompt}.{n}", "text": text} for n, text in enumerate(self._prompts[prompt])
        ]

    def _ask(
        self, prompt: str, question: str, num_tokens: int, *, retrieves: bool, **fields: Any
    ) -> tuple[float, Mapping[str, Any]]:
        """(seconds until the answer of one token or more has come, what it says of the cache)"""
        found = {
            "retrieve": {
                "query": marker(prompt),
                "k": len(self._prompts[prompt]),
                "mode": "dense",
                "nprobe": NUM_LISTS,
            }
        }
        sent = {"chunks": self._chunks(prompt)}
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": random_text(question, self._args.new)},
        ]
        body = {
            "messages": messages,
            "order": "retriever",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            **fields,
        }
        started = time.perf_counter()
        answer = post(
            self._url + "/rag/v1/chat/completions", {**body, **(found if retrieves else sent)}
        )["chunkcache"]
        seconds = time.perf_counter() - started
        # a hint finds a chain in that chain's order only, and the index ranks chunks by itself
        self._texts[prompt] = [self._passages[name] for name in answer["order"]]
        return seconds, answer

    def _stats(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = get(self._url + "/chunkcache/stats")["ranks"][0]
        return found

    def _settle(self) -> Mapping[str, Any]:
        # without a storage there is no queue to wait for
        while (found := self._stats()).get("storage", {"queue": 0})["queue"]:
            time.sleep(POLL_S)
        return found


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """One row a cell and arm."""
    tables = []
    for title, key, base, metric, unit in (
        ("Copies from host memory", "us_per_token", "in line", "hidden", _load_s),
        ("Chunks moved from the store", "moved_us_per_token", "in line", "hidden", _load_s),
        ("Searches", "search_ms", "arrival", "won (ms)", lambda cell, one: 1e-3),
    ):
        rows = [
            _row(cell, arm, taken, arms, base, metric, partial(unit, cell))
            for cell, arms in by_cell(samples)
            if key in cell
            for arm, taken in arms.items()
        ]
        if rows:
            tables.append(table(title, rows, NOTE))
    shown = [
        row
        for one in tables
        for row in one["rows"]
        if row["arm"] not in ("computed", "in line", "arrival")
    ]
    verdict = [
        ", ".join(
            f"{name} {row[name]}" for name in row if name in ("tokens", *PARTS, "selector", "arm")
        )
        + f": {row['computed / arm']} times sooner than computed, "
        + ", ".join(f"{name} {row[name]}" for name in ("hidden", "won (ms)") if name in row)
        for row in shown
    ]
    return {"verdict": verdict, "tables": tables}


def main(argv: Sequence[str]) -> int:
    """Run."""
    args = _parse(argv)
    with open_run("ahead", args, summarize, without=("logs",)) as run, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_words_model(folder, SHAPES[args.params])
        for tokens in args.tokens:
            prompts = _prompts(tokens, args)
            for name, arms in PARTS.items():
                if not (values := getattr(args, name)):
                    continue
                is_search = name == "search_ms"
                index = _index(folder / f"index-{tokens}", prompts) if is_search else None
                switched = folder / "switch.json"
                switch(switched)
                with _server(args, tokens, model, folder, name, index) as server:
                    lane = Lane(server.url, switched, prompts, args)
                    lane.keep(tokens, name)
                    choices = (
                        [{"selector": one} for one in args.selectors]
                        if name == "moved_us_per_token"
                        else [{}]
                    )
                    for slow in ({name: value, **choice} for value in values for choice in choices):
                        takes = {arm: partial(lane.sample, arm, slow) for arm in arms}
                        take_rounds(run, {"tokens": tokens, **slow}, takes, args.rounds)
    tell(run)
    return 0


def marker(prompt: str) -> str:
    """What all passages of a prompt have and no other: a word."""
    return random_text(prompt, 3).replace(" ", "")


def switch(path: Path, **values: Any) -> None:
    """What the server does from now on (tests/e2e/slow_server.py)."""
    # replaced whole: the server reads it during copies and searches
    part = path.with_suffix(".part")
    part.write_text(json.dumps(values), encoding="utf-8")
    part.replace(path)


# Private, in order of use


def _prefetched(stats: Mapping[str, Any], name: str) -> int:
    found: int = stats.get("storage", {}).get("prefetch", {}).get(name, 0)
    return found


def _load_s(cell: Mapping[str, Any], sample: Sample) -> float:
    # a cell has one part only; unpacking fails where it has two
    (us_per_token,) = (cell[name] for name in PARTS if name in cell)
    return float(us_per_token * 1e-6 * sample["loaded"])


def _row(
    cell: Mapping[str, Any],
    arm: str,
    taken: Sequence[Sample],
    arms: Mapping[str, Sequence[Sample]],
    base: str,
    metric: str,
    unit: Callable[[Sample], float],
) -> Row:
    sooner = [
        (late["metrics"]["ttft_s"] - soon["metrics"]["ttft_s"]) / unit(soon)
        for late, soon in zip(arms[base], taken, strict=True)
        # what the server did not load, or loaded without a sleep, has no time to be hidden
        if arm not in ("computed", base) and soon["loaded"] and unit(soon)
    ]
    prefetch = {name: sum(one["prefetch"][name] for one in taken) for name in PREFETCH}
    return {
        **cell,
        "arm": arm,
        "rounds": len(taken),
        "prompt tokens": quantile([one["prompt_tokens"] for one in taken], 0.5),
        "loaded tokens": quantile([one["loaded"] or 0 for one in taken], 0.5),
        "p50 (s)": round(quantile([one["metrics"]["ttft_s"] for one in taken], 0.5), 4),
        "computed / arm": told_ratio(arms["computed"], taken, "ttft_s", 2),
        metric: round(quantile(sooner, 0.5), 3) if sooner else None,
        **(
            {f"prefetch {name}": count for name, count in prefetch.items()}
            if "search_ms" in cell
            else {}
        ),
        **(
            {}
            if "search_ms" in cell
            else {"layers ahead": quantile([one["layers_ahead"] for one in taken], 0.5)}
        ),
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval bench ahead",
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
        "--us-per-token",
        type=int,
        nargs="*",
        default=[250, 1000],
        help="of a copy to the device; none: no such part",
    )
    add(
        "--moved-us-per-token",
        type=int,
        nargs="*",
        default=[25, 100],
        help="of a move from the store; none: no such part",
    )
    add(
        "--selectors",
        nargs="+",
        default=["first", "critical"],
        help="of the tokens that are recomputed of what is moved",
    )
    add(
        "--search-ms",
        type=int,
        nargs="*",
        default=[5, 20, 50],
        help="of a search of all lists; none: no such part",
    )
    add("--new", type=int, default=100, help="words of a question, which are computed")
    add("--ahead-ms", type=int, default=100, help="of a hint before its request")
    add("--rounds", type=int, default=8, help="of each cell, after one of warm-up")
    add("--chunk-tokens", type=int, default=250)
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


def _prompts(tokens: int, args: argparse.Namespace) -> dict[str, list[str]]:
    """Name -> texts of its chunks, somewhat longer than asked for:
    a marker is no word of the tokenizer's."""
    computed = range((args.rounds + 1) * max(len(getattr(args, name)) for name in PARTS))
    names = [
        *(f"kept{n}" for n in range(KEPT)),
        *(f"{kind}{n}" for kind in ("sent", "found") for n in computed),
    ]
    found = {}
    for name in names:
        texts = [
            random_text(f"{name}.{n}", args.chunk_tokens).split()
            for n in range(tokens // args.chunk_tokens)
        ]
        for words in texts:
            words[::25] = [marker(name)] * len(words[::25])
        found[name] = [" ".join(words) for words in texts]
    return found


def _passages(prompts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Text by id, of the prompts' chunks and of others."""
    others = {f"other{n}": random_text(f"other{n}", 30) for n in range(NUM_LISTS * PER_LIST)}
    return {
        f"{name}.{n}": text for name, texts in prompts.items() for n, text in enumerate(texts)
    } | others


def _index(folder: Path, prompts: Mapping[str, Sequence[str]]) -> Path:
    source = folder.with_suffix(".jsonl")
    rows = [
        json.dumps({"id": name, "text": text}) + "\n" for name, text in _passages(prompts).items()
    ]
    source.write_text("".join(rows), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "retrieval",
        "build",
        str(source),
        "--out",
        str(folder),
        # a passage must stay one chunk, else the ids of `_passages` are not those of the index
        "--no-split",
    ]
    # every request searches by `dense`: BM25 would only lengthen the build
    command += ["--factory", f"IVF{NUM_LISTS},Flat", "--bm25", "off", "--device", "cpu"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def _server(
    args: argparse.Namespace, tokens: int, model: str, folder: Path, part: str, index: Path | None
) -> Server:
    is_moved = part == "moved_us_per_token"
    mib, pool = (
        mib_of(args, tokens),
        round((2 * PROMPTS if is_moved else PROMPTS) * tokens) + 4 * args.new,
    )
    flags = [
        "--model-path",
        model,
        "--dtype",
        args.dtype,
        "--max-total-tokens",
        str(pool),
        *serve_arms.EVERY_SERVER,
    ]
    # On the CPU SGLang's attention pads every piece of a prefill to the whole prompt: pieces would
    # slow it down.
    flags += ["--chunked-prefill-size", "-1", "--max-prefill-tokens", str(2 * tokens)]
    # moving is tried at the start, with four
    flags += ["--max-running-requests", "4" if is_moved else "1"]
    if is_moved:
        flags += ["--reuse", "fused", "--chunkcache-store-mib", str(round((KEPT + 2) * mib))]
        # what was preprocessed and nothing else
        flags += ["--chunkcache-store-threshold", "1000000"]
    elif index is None:
        flags += ["--chunkcache-host-mib", str(round((KEPT + 2) * mib))]
    else:
        kept = json.dumps({"directory": str(folder / f"disk-{tokens}")})
        flags += [
            "--chunkcache-host-mib",
            str(round(PROMPTS * mib)),
            "--chunkcache-storage-backend",
            "file",
        ]
        flags += [
            "--chunkcache-storage-backend-extra-config",
            kept,
            "--chunkcache-storage-mib",
            "4096",
        ]
        # the default bounds a request at 256 chunks, whatever `--tokens` and `--chunk-tokens` are
        flags += ["--index", str(index), "--chunkcache-max-chunks", "1000"]
    env = {"SLOW_SERVER_SWITCH": str(folder / "switch.json")}
    env |= {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    log = args.logs / f"ahead-{tokens}-{part}.log"
    launcher = ("-m", "tests.e2e.slow_server")
    return Server(
        [*flags, *args.server_flags],
        log=log,
        launcher=launcher,
        env=env,
        timeout_s=args.start_limit_s,
    )
