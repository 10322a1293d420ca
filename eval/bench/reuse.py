"""Time to first token against recompute ratio: at which ratio does moving chunks stop paying?

    python -m eval bench reuse [--tokens 2000 6000] [--ratios 0 0.05 ...]
                               [--selectors query none ...] [--pairs 20] [--stock] [-- FLAGS]

One server of ours, one client, one request at a time. A round sends one request of every arm, in a
rotating order:

    full           no chunk reused: the time that reuse must beat
    exact          the same prompt repeated: the minimum time of a request
    SEL/host/R     moved from the store, selector SEL, ratio R
    SEL/device/R   moved from other prompts' KV on the device
    planned/host   moved from the store if the server estimates that this pays, first selector, 15%;
                   likewise planned/device
    stock          with --stock: stock SGLang, same flags, the chunks in the user message, nothing
                   reused

The first selector has every ratio from both sources, the others 15% from the store, or R of SEL=R.
SEL@N reads the N-th layer, for KV and question alike, instead of those that the server would.

A share is an arm's median time over that of `full`, with a bootstrap interval over rounds; below 1,
moving pays. The crossover is the ratio where the share reaches 1, interpolated linearly. Every
measured prompt has a unique head, cached by a short request before it: exactly the head is an exact
hit, nothing is a fused hit, and the fates of each answer must show this. Samples that do not are
kept, shown and counted as wrong, and the command fails.

Phases are the server's own times (`chunkcache.reuse.ms`); on a GPU they are the host's, which does
not wait for queued work. Weights are random, so nothing here measures quality.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eval.bench.reuse_figures import PHASES, PLANNED_RATIO, summarize
from eval.bench.rounds import take_rounds
from eval.data.random_text import WORDS, random_text
from eval.errors import CommandError
from eval.http import get, post
from eval.outcome import add_out_option, open_run, tell
from eval.random_model import SHAPES, write_words_model
from eval.run import Sample
from eval.serve import arms as serve_arms
from eval.serve.client import open_session, send
from eval.server import Server
from eval.task import Request, TextChunk
from retrieval.command_line import Parser

QUESTION_WORDS = 24
NEIGHBOR = TextChunk("behind", "Behind this.")
"""Stored chunks are computed after it.
Of equal sources the server prefers a preprocessed one to a device copy."""
MAX_DRAINS = 1000
"""If chunks still wait for the store after this many requests, the bench fails."""
OUR_FLAGS = [
    *("--reuse", "fused"),
    *("--chunkcache-store-threshold", "1000000"),
    *serve_arms.SCORED,
    *("--chunkcache-calibrate", "on"),
    *serve_arms.UNAUDITED,
]
"""Only preprocessing fills the store, scored for the selectors that read scores."""
SOURCES = ("host", "device")
ROUTES = {
    "ours": serve_arms.Arm("ours", "", route="rag"),
    "stock": serve_arms.Arm("stock", "", route="chat"),
}


@dataclass(frozen=True)
class Arm:
    """One kind of request. `kind`: full, exact, stock, fused or planned;
    the other fields are for the last two."""

    kind: str
    source: str = "device"
    selector: str = ""
    ratio: float = 0.0

    @property
    def name(self) -> str:
        """As samples have it."""
        if self.kind == "planned":
            return f"planned/{self.source}"
        return (
            self.kind if self.kind != "fused" else f"{self.selector}/{self.source}/{self.ratio:g}"
        )


def arms_of(selectors: Sequence[str], ratios: Sequence[float], *, stock: bool) -> list[Arm]:
    """Every arm once."""
    swept, *others = selectors
    arms = [Arm("full"), Arm("exact"), *([Arm("stock")] if stock else [])]
    arms += [Arm("fused", source, swept, ratio) for source in SOURCES for ratio in ratios]
    arms += [Arm("planned", source, swept, PLANNED_RATIO) for source in SOURCES]
    for other in others:
        name, _, ratio = other.partition("=")
        arms.append(
            Arm("fused", "host", name, 0.0 if name == "none" else float(ratio or PLANNED_RATIO))
        )
    return arms


def choice_of(selector: str) -> dict[str, Any]:
    """The fields of a request's `reuse` for SEL or SEL@N."""
    name, _, layer = selector.partition("@")
    fields = {"deviation": ("depth",), "query": ("layers",), "critical": ("depth", "layers")}
    if layer and name not in fields:
        raise CommandError(f"--selectors {selector}: {name} reads no layer that could be chosen")
    return {"selector": name, **{field: int(layer) for field in fields.get(name, ()) if layer}}


class Bench:
    """Sends the requests of all arms for one prompt length, and flushes the caches before the pool
    is full.

    Args:
        urls: "ours", which must get no other requests, and "stock" if there is such an arm.
        num_tokens: about as many tokens have all chunks of a prompt, rounded to whole chunks.
    """

    def __init__(
        self, urls: Mapping[str, str], num_tokens: int, chunk_tokens: int, runner: asyncio.Runner
    ) -> None:
        self._urls, self._runner = urls, runner
        count = int(
            post(urls["ours"] + "/tokenize", {"prompt": random_text("tokenizer", 1000)})["count"]
        )
        num_words, self._num_chunks = (
            round(chunk_tokens * 1000 / count),
            max(2, round(num_tokens / chunk_tokens)),
        )
        # The host store holds the one set of chunks, the device the other, since what both hold
        # says nothing of either.
        names = {
            source: [f"{source} {number}" for number in range(self._num_chunks)]
            for source in SOURCES
        }
        self._chunks = {
            source: [TextChunk(name, random_text(name, num_words)) for name in names[source]]
            for source in SOURCES
        }
        self._rng, self._num_sent = random.Random(0), 0
        self._fill()

    def rank(self) -> dict[str, Any]:
        """Our server's statistics."""
        stats: dict[str, Any] = get(self._urls["ours"] + "/chunkcache/stats")["ranks"][0]
        return stats

    def sample(self, arm: Arm) -> Sample:
        """Send one request of an arm; what its answer says, and in `wrong` how that differs from
        the arm."""
        if self._is_full():
            self._fill()
        if arm.kind == "exact":
            answer = self._send(self._first, {"mode": "exact"})
        elif arm.kind == "stock":
            answer = self._send(self._prompt(arm.source, "stock"), {}, "stock")
        else:
            fused = {"mode": "fused", "ratio": arm.ratio, **choice_of(arm.selector)}
            fused["move"] = "pays" if arm.kind == "planned" else "always"
            answer = self._send(
                self._prompt(arm.source), {"mode": "exact"} if arm.kind == "full" else fused
            )
        return {
            **answer,
            "wrong": wrong_fates(arm, answer, self._areas[arm.source], self._num_chunks),
        }

    # Private, in order of use

    def _is_full(self) -> bool:
        return bool(self.rank()["free"] < 3 * max(self._areas.values()))

    def _fill(self) -> None:
        """Empty the caches, then put one set of chunks into the store and the other into the tree,
        as the `exact` prompt."""
        ours = self._urls["ours"]
        for url in self._urls.values():
            # longer than the server waits, so that it says itself why it could not
            get(url + "/flush_cache?timeout=60", timeout_s=90)
        post(ours + "/chunkcache/clear_store")
        for chunk in self._chunks["host"]:
            post(
                ours + "/chunkcache/preprocess",
                {"chunk": asdict(chunk), "neighbors": [asdict(NEIGHBOR)]},
            )
        self._drain()
        # preprocessed chunks stay in the store; what the device has of them would be the source
        get(ours + "/flush_cache?timeout=60", timeout_s=90)
        self._first, self._areas = self._prompt("device"), dict[str, int]()
        for source, chunks in self._chunks.items():
            messages = [
                {"role": "system", "content": self._first.system},
                {"role": "user", "content": "Which?"},
            ]
            asked = {
                "messages": messages,
                "chunks": [*map(asdict, chunks)],
                "order": "retriever",
                "max_tokens": 1,
            }
            spans = post(ours + "/chunkcache/explain", asked)["spans"]
            self._areas[source] = spans[-1]["end"] - spans[0]["start"]
        if self._is_full():
            raise CommandError(
                f"--max-total-tokens is too small for prompts of {max(self._areas.values())} tokens"
            )
        if (stored := self.rank()["store"]["num_chunks"]) < self._num_chunks:  # and the neighbour
            raise CommandError(
                f"the store holds {stored} of {self._num_chunks} chunks: --store-mib is too small"
            )
        self._send(self._first, {"mode": "exact"})

    def _drain(self) -> None:
        """Send batches until no chunk waits for the store."""
        for number in range(MAX_DRAINS):
            if not self.rank()["store"]["pending"]:
                return
            message = {"role": "user", "content": f"{number} {self._rng.random()}"}
            post(
                self._urls["ours"] + "/rag/v1/chat/completions",
                {"messages": [message], "max_tokens": 1},
            )
        raise CommandError("chunks wait for the store and never enter it")

    def _prompt(self, source: str, server: str = "ours") -> Request:
        """Chunks in a new order after a head that no other prompt has.
        Sends a short request that caches the head."""
        self._num_sent += 1
        system = f"{self._num_sent:06d} {random_text(f'head {self._num_sent}', 6)}"

        def request(chunks: Sequence[TextChunk]) -> Request:
            question = " ".join(self._rng.choices(WORDS, k=QUESTION_WORDS))
            return Request(str(self._num_sent), question, tuple(chunks), system=system)

        # with a chunk: what is before the first chunk is a head, and cached up to there
        none = TextChunk("none", f"none {self._num_sent}")
        self._send(request([none]), {"mode": "exact"}, server)
        return request(self._rng.sample(self._chunks[source], self._num_chunks))

    def _send(self, request: Request, reuse: Mapping[str, Any], server: str = "ours") -> Sample:
        body = {"order": "retriever", "reuse": reuse} if server == "ours" else {}

        async def once() -> Any:
            async with open_session(timeout_s=600) as session:
                return await send(
                    session,
                    self._urls[server],
                    ROUTES[server],
                    request,
                    (),
                    max_new_tokens=1,
                    body=body,
                )

        answer = self._runner.run(once())
        if answer.error or answer.prompt_tokens is None:
            raise CommandError(f"{self._urls[server]}: {answer.error or 'no usage in the answer'}")
        told = answer.chunkcache or {}
        report = told.get("reuse") or {}
        metrics = {"ttft_s": answer.ttft_s}
        if "ms" in report:
            metrics |= {f"{phase}_s": report["ms"].get(phase, 0) / 1000 for phase in PHASES}
            moved, recomputed = (answer.fates[fate] for fate in ("relocated", "recomputed"))
            metrics["recomputed_share"] = recomputed / max(1, moved + recomputed)
        if report.get("estimated_ms"):
            # the server's estimate is of filling and extend, not of the lookup
            passed = sum(report["ms"].get(phase, 0) for phase in (*PHASES[1:], "extend"))
            estimated = report["estimated_ms"]["planned" if moved + recomputed else "computed"]
            metrics |= {"estimated_s": estimated / 1000, "passed_s": passed / 1000}
        return {
            "metrics": metrics,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens or 0,
            "head_tokens": told.get("head_tokens", 0),
            "fates": answer.fates,
            "sources": [source["from"] for source in report.get("sources", ())],
            "other": {name: report.get(name, 0) for name in ("fused_hit", "gap")}
            | {"fallbacks": told.get("fallbacks", [])},
        }


def wrong_fates(arm: Arm, sample: Mapping[str, Any], area: int, num_chunks: int) -> list[str]:
    """How an answer's fates differ from its arm's; `area`: tokens of the prompt's chunks."""
    if arm.kind == "planned":
        return []  # it may move all, some or nothing
    if arm.kind == "stock":
        is_alone = sample["cached_tokens"] <= sample["prompt_tokens"] - area
        return [] if is_alone else [f"{sample['cached_tokens']} tokens cached"]
    fates, head, is_fused = sample["fates"], sample["head_tokens"], arm.kind == "fused"
    # 1e-6: a product such as .07 * 100 ends just above the whole number that it stands for
    asked = math.ceil(arm.ratio * area - 1e-6)
    # The ratio of `context` follows from the scores and the focus.
    chosen = {"none": (0, 0), "context": (0, area)}.get(
        arm.selector, (asked, min(area, asked + num_chunks))
    )
    expected = {
        "exact": (fates["exact"], (head + area, math.inf) if arm.kind == "exact" else (head, head)),
        "moved": (fates["relocated"] + fates["recomputed"], (area, area) if is_fused else (0, 0)),
        "recomputed": (fates["recomputed"], chosen if is_fused else (0, 0)),
    }
    reasons = [
        f"{found} tokens {fate}, not {low} to {high}"
        for fate, (found, (low, high)) in expected.items()
        if not low <= found <= high
    ]
    if is_fused and sample["sources"] != [arm.source] * num_chunks:
        reasons.append(f"sources {sample['sources']}")
    other = sample["other"]
    # nothing was to be reused: the reasons are why exact reuse found nothing
    if arm.kind == "full":
        other = {**other, "fallbacks": []}
    return reasons + [f"{name} {found}" for name, found in other.items() if found]


def main(argv: Sequence[str]) -> int:
    """Run; returns 1 if the fates of an answer do not match its arm."""
    args = _parse(argv)
    arms = arms_of(args.selectors, args.ratios, stock=args.stock)
    with open_run("reuse", args, summarize, without=("logs",)) as run, ExitStack() as stack:
        model = args.model_path
        if model is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = write_words_model(Path(folder), SHAPES[100])
        names = ["ours", *(["stock"] if args.stock else [])]
        urls = {name: stack.enter_context(_server(args, name, model)).url for name in names}
        runner = stack.enter_context(asyncio.Runner())
        for num_tokens in args.tokens:
            bench = Bench(urls, num_tokens, args.chunk_tokens, runner)
            takes = {arm.name: partial(_take, bench, arm) for arm in arms}
            take_rounds(run, {"tokens": num_tokens}, takes, args.pairs)
            if evicted := bench.rank()["evicted_chunks"]:
                raise CommandError(
                    f"{evicted} chunks were evicted, so other arms moved less: more"
                    " --max-total-tokens"
                )
    return 1 if tell(run)["wrong"] else 0


def _take(bench: Bench, arm: Arm, number: int) -> Sample:
    return bench.sample(arm)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval bench reuse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--tokens", type=int, nargs="+", default=[2000, 6000], help="lengths of the chunks together"
    )
    add("--ratios", type=float, nargs="+", default=[0, 0.05, 0.15, 0.3, 0.5, 1])
    add(
        "--selectors",
        nargs="+",
        default=["critical", "query", "none", "first", "deviation", "context"],
    )
    add("--pairs", type=int, default=20, help="measured rounds a length, after one of warm-up")
    add("--chunk-tokens", type=int, default=256)
    add = parser.add_argument_group("servers").add_argument
    add(
        "--model-path",
        help="default: a random model of 100 million parameters; only times are meaningful",
    )
    add("--stock", action="store_true", help="measure stock SGLang too")
    add("--threads", type=int, help="OMP_NUM_THREADS of the servers (default: theirs)")
    add(
        "--max-total-tokens",
        type=int,
        default=200_000,
        help="our KV pool; flushed between requests when it is full",
    )
    add("--store-mib", type=int, default=4096, help="our store; must hold the chunks of one length")
    add("--start-limit-s", type=float, default=300.0, help="seconds until a server must be ready")
    add("--logs", type=Path, default=Path("logs"))
    add_out_option(parser)
    add("server_flags", nargs="*", metavar="-- FLAGS", help="more flags for all servers")
    args = parser.parse_args(argv)
    if args.ratios != sorted(set(args.ratios)) or not 0 <= args.ratios[0] <= args.ratios[-1] <= 1:
        parser.error("--ratios: expected numbers from 0 to 1, ascending")
    return args


def _server(args: argparse.Namespace, name: str, model: str) -> Server:
    # Stock gets one of several requests, and both servers are flushed together: a quarter of the
    # pool is enough for it.
    num_slots = args.max_total_tokens // (1 if name == "ours" else 4)
    flags = ["--model-path", model, "--max-total-tokens", str(num_slots), "--enable-cache-report"]
    if args.model_path is None:
        # On the CPU SGLang's attention pads every piece of a prefill to the whole prompt: pieces
        # would slow `full` down.
        flags += ["--chunked-prefill-size", "-1"]
    if name == "ours":
        longest = ["--chunkcache-max-pass-tokens", str(2 * max(args.tokens))]
        flags = [*OUR_FLAGS, *flags, *longest, "--chunkcache-store-mib", str(args.store_mib)]
    else:
        flags = ["--stock", *flags]
    env = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    log = args.logs / f"reuse-{name}.log"
    return Server([*flags, *args.server_flags], log=log, env=env, timeout_s=args.start_limit_s)
