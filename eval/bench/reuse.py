"""Time to first token against recompute ratio: at which ratio does moving chunks stop paying?

    python -m eval bench reuse [--tokens 2000 6000] [--ratios 0 0.05 ...] [--selector query ...] [--pairs 20] [--stock] [-- FLAGS]

One server of ours, one client, one request at a time. A round sends one request of every arm, in a rotating order:

    full           no chunk reused: the time that reuse must beat
    exact          the same prompt repeated: the minimum time of a request
    SEL/host/R     moved from the store, selector SEL, ratio R         SEL/device/R   moved from other prompts' KV on the device
    stock          with --stock: stock SGLang, same flags, the chunks in the user message, nothing reused

A share is an arm's median time over that of `full`, with a bootstrap interval over rounds; below 1, moving pays. The crossover is
the ratio where the share reaches 1, interpolated linearly. Every measured prompt has a unique head, cached by a short request
before it: exactly the head is an exact hit, nothing is a fused hit, and the fates of each answer must show this. Samples that do
not are kept, shown and counted as wrong, and the command fails.

Phases are the server's own times (`chunkcache.reuse.ms`); on a GPU they are the host's, which does not wait for queued work.
Weights are random, so nothing here measures quality.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.bench.reuse_figures import PHASES, summarize
from eval.data.random_text import WORDS, random_text
from eval.errors import CommandError
from eval.http import get, post
from eval.outcome import add_out_option, open_run, tell
from eval.random_model import SHAPES, write_random_model
from eval.run import Run, Sample
from eval.serve import arms as serve_arms
from eval.serve.client import open_session, send
from eval.server import Server
from eval.task import Request, TextChunk

QUESTION_WORDS = 24
NEIGHBOR = TextChunk("behind", "Behind this.")
"""Stored chunks are computed after it. Of equal sources the server prefers a preprocessed one to a device copy."""
MAX_DRAINS = 1000
"""If chunks still wait for the store after this many requests, the bench fails."""
SHORT_LEN = 200
"""Tokens; an upper bound for head, question and answer of any prompt here."""
OUR_FLAGS = ["--reuse", "fused", "--chunkcache-min-saved-tokens", "0", "--chunkcache-store-threshold", "1000000"]
"""Moving is never declined, and only preprocessing fills the store."""
SOURCES = ("host", "device")
ROUTES = {"ours": serve_arms.Arm("ours", "", route="rag"), "stock": serve_arms.Arm("stock", "", route="chat")}


@dataclass(frozen=True)
class Arm:
    """One kind of request. `kind`: full, exact, stock or fused; the other fields are for fused ones."""

    kind: str
    source: str = ""
    selector: str = ""
    ratio: float = 0.0

    @property
    def name(self) -> str:
        """As samples have it."""
        return self.kind if self.kind != "fused" else f"{self.selector}/{self.source}/{self.ratio:g}"


def arms_of(args: argparse.Namespace) -> list[Arm]:
    """Every arm once: the sweep of each selector from both sources, and each phase selector at one ratio."""
    arms = [Arm("full"), Arm("exact"), *([Arm("stock")] if args.stock else [])]
    sweeps = ((selector, source, ratio) for selector in args.selector for source in SOURCES for ratio in args.ratios)
    arms += [Arm("fused", source, selector, ratio) for selector, source, ratio in sweeps]
    arms += [Arm("fused", "host", s, 0.0 if s == "none" else args.phase_ratio) for s in args.phase_selectors]
    return list(dict.fromkeys(arms))


def turned(arms: Sequence[Arm], number: int) -> list[Arm]:
    """The order of round `number`: each arm is first once in every `len(arms)` rounds, and odd rounds run backwards."""
    start = number % len(arms)
    order = [*arms[start:], *arms[:start]]
    return order if number % 2 == 0 else order[::-1]


class Bench:
    """Sends the requests of all arms for one prompt length, and flushes the caches before the pool is full.

    Args:
        urls: "ours", which must get no other requests, and "stock" if there is such an arm.
        num_tokens: about as many tokens have all chunks of a prompt, rounded to whole chunks.
    """

    def __init__(self, urls: Mapping[str, str], num_tokens: int, chunk_tokens: int, runner: asyncio.Runner) -> None:
        self._urls, self._runner = urls, runner
        words = random_text("tokenizer", 1000)
        self._num_words = round(chunk_tokens * 1000 / int(post(urls["ours"] + "/tokenize", {"prompt": words})["count"]))
        self._num_chunks = max(2, round(num_tokens / chunk_tokens))
        # The host store holds the one set of chunks, the device the other, since what both hold says nothing of either.
        self._chunks = {source: [self._chunk(f"{source} {i}") for i in range(self._num_chunks)] for source in SOURCES}
        self._rng = random.Random(0)
        self._areas = dict.fromkeys(SOURCES, 0)
        rank = self.rank()
        self._pool = rank["free"] + rank["evictable"] + rank["protected"]
        self._num_sent = self._used = 0
        self._fill()

    def rank(self) -> dict[str, Any]:
        """Our server's statistics."""
        stats: dict[str, Any] = get(self._urls["ours"] + "/chunkcache/stats")["ranks"][0]
        return stats

    def sample(self, arm: Arm) -> Sample:
        """Send one request of an arm; what its answer says, and in `wrong` how that differs from the arm."""
        self._make_space()
        source = "host" if arm.source == "host" else "device"
        if arm.kind == "exact":
            answer = self._send(self._first, {"mode": "exact"})
        elif arm.kind == "stock":
            answer = self._send(self._prompt(source, "stock"), {}, "stock")
        else:
            fused = {"mode": "fused", "selector": arm.selector, "ratio": arm.ratio}
            answer = self._send(self._prompt(source), fused if arm.kind == "fused" else {"mode": "exact"})
            self._used += self._areas[source] + SHORT_LEN
        return {**answer, "wrong": wrong_fates(arm, answer, self._areas[source], self._num_chunks)}

    # Private, in order of use

    def _chunk(self, name: str) -> TextChunk:
        return TextChunk(name, random_text(name, self._num_words))

    def _make_space(self) -> None:
        if self._used + max(self._areas.values()) + 2 * SHORT_LEN > self._pool:
            self._fill()

    def _fill(self) -> None:
        """Empty the caches, then put one set of chunks into the store and the other into the tree, as the `exact` prompt."""
        for url in self._urls.values():
            get(url + "/flush_cache?timeout=60")
        self._used = 0
        for chunk in self._chunks["host"]:
            self._capture(chunk, (NEIGHBOR,))
        self._drain()
        self._first = self._prompt("device")
        for source, chunks in self._chunks.items():
            messages = [{"role": "system", "content": self._first.system}, {"role": "user", "content": "Which?"}]
            asked = {"messages": messages, "chunks": list(map(_json, chunks)), "order": "retriever", "max_tokens": 1}
            spans = post(self._urls["ours"] + "/chunkcache/explain", asked)["spans"]
            self._areas[source] = spans[-1]["end"] - spans[0]["start"]
        longest = max(self._areas.values())
        if self._used + 3 * longest > self._pool:
            raise CommandError(f"a pool of {self._pool} tokens is too small for prompts of {longest}")
        if (stored := self.rank()["store"]["num_chunks"]) != self._num_chunks:
            raise CommandError(f"the store holds {stored} of {self._num_chunks} chunks: --store-mib is too small")
        self._send(self._first, {"mode": "exact"})
        self._used += longest + SHORT_LEN

    def _prompt(self, source: str, server: str = "ours") -> Request:
        """Chunks in a new order after a head that no other prompt has. Sends a short request that caches the head."""
        self._num_sent += 1
        system = f"{self._num_sent:06d} {random_text(f'head {self._num_sent}', 6)}"

        def request(chunks: Sequence[TextChunk]) -> Request:
            question = " ".join(self._rng.choices(WORDS, k=QUESTION_WORDS))
            return Request(str(self._num_sent), question, tuple(chunks), system=system)

        none = TextChunk("none", f"none {self._num_sent}")
        self._send(request([none]), {"mode": "exact"} if server == "ours" else {}, server)
        self._used += SHORT_LEN if server == "ours" else 0
        return request(self._rng.sample(self._chunks[source], self._num_chunks))

    def _send(self, request: Request, reuse: Mapping[str, Any], server: str = "ours") -> Sample:
        body = {"order": "retriever", "reuse": reuse} if server == "ours" else {}

        async def once() -> Any:
            async with open_session(timeout_s=600) as session:
                return await send(session, self._urls[server], ROUTES[server], request, (), max_new_tokens=1, body=body)

        answer = self._runner.run(once())
        if answer.error or answer.prompt_tokens is None:
            raise CommandError(f"{self._urls[server]}: {answer.error or 'no usage in the answer'}")
        told = answer.chunkcache or {}
        report = told.get("reuse") or {}
        metrics = {
            "ttft_s": answer.ttft_s,
            **{f"{p}_s": report["ms"].get(p, 0) / 1000 for p in PHASES if "ms" in report},
        }
        if moved := sum((answer.fates or {}).get(fate, 0) for fate in ("relocated", "recomputed")):
            metrics["recomputed_share"] = answer.fates["recomputed"] / moved
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

    def _capture(self, chunk: TextChunk, neighbors: Sequence[TextChunk]) -> dict[str, Any]:
        body = {"chunk": _json(chunk), "neighbors": list(map(_json, neighbors))}
        answer = post(self._urls["ours"] + "/chunkcache/preprocess", body)
        self._used += answer["chunk_tokens"] * (1 + len(neighbors)) + SHORT_LEN
        return answer

    def _drain(self) -> dict[str, Any]:
        """Send batches until no chunk waits for the store; the rank's statistics then."""
        for number in range(MAX_DRAINS):
            rank = self.rank()
            if not rank["store"]["pending"]:
                return rank
            message = {"role": "user", "content": f"{number} {self._rng.random()}"}
            post(self._urls["ours"] + "/rag/v1/chat/completions", {"messages": [message], "max_tokens": 1})
        raise CommandError("chunks wait for the store and never enter it")


def wrong_fates(arm: Arm, sample: Mapping[str, Any], area: int, num_chunks: int) -> list[str]:
    """How an answer's fates differ from its arm's; `area`: tokens of the prompt's chunks."""
    if arm.kind == "stock":
        is_alone = sample["cached_tokens"] <= sample["prompt_tokens"] - area
        return [] if is_alone else [f"{sample['cached_tokens']} tokens cached"]
    fates, head, reasons = sample["fates"], sample["head_tokens"], []
    moved = fates["relocated"] + fates["recomputed"]
    least = head + area if arm.kind == "exact" else head
    if fates["exact"] < least or (arm.kind != "exact" and fates["exact"] > head):
        reasons.append(f"{fates['exact']} tokens exact, not {least}")
    if moved != (area if arm.kind == "fused" else 0):
        reasons.append(f"{moved} tokens moved")
    if arm.kind == "fused":
        low, high = math.ceil(arm.ratio * area - 1e-6), min(area, math.ceil(arm.ratio * area) + num_chunks)
        if arm.selector in ("none", "set", "context"):  # the ratio of `context` follows from the scores and the focus
            low, high = 0, area if arm.selector == "context" else 0
        if not low <= fates["recomputed"] <= high:
            reasons.append(f"{fates['recomputed']} tokens recomputed, not {low} to {high}")
        # `context` may choose between two equally good sources, one of them left in the tree by preprocessing.
        allowed = set(SOURCES) if arm.selector == "context" else {arm.source}
        if len(sample["sources"]) != num_chunks or not allowed.issuperset(sample["sources"]):
            reasons.append(f"sources {sample['sources']}")
    return reasons + [f"{name} {found}" for name, found in sample["other"].items() if found]


def main(argv: Sequence[str]) -> int:
    """Run; returns 1 if the fates of an answer do not match its arm."""
    args = _parse(argv)
    with open_run("reuse", args, summarize, without=("logs",)) as run, ExitStack() as stack:
        model = args.model_path
        if model is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = str(write_random_model(Path(folder), SHAPES[args.params], [" ".join(WORDS)] * 50))
        names = ["ours", *(["stock"] if args.stock else [])]
        urls = {name: stack.enter_context(_server(args, name, model)).url for name in names}
        runner = stack.enter_context(asyncio.Runner())
        for num_tokens in args.tokens:
            _measure(run, args, num_tokens, Bench(urls, num_tokens, args.chunk_tokens, runner))
    return 1 if tell(run)["wrong"] else 0


def _measure(run: Run, args: argparse.Namespace, num_tokens: int, bench: Bench) -> None:
    """The rounds of one prompt length, as far as they are missing."""
    arms, cell = arms_of(args), {"tokens": num_tokens}
    for number in range(args.warm_up + args.pairs):
        if f"{num_tokens}/{number}/full" in run:
            continue
        about = {"cell": cell, "request": str(number), "warm_up": number < args.warm_up}
        taken = {arm.name: bench.sample(arm) for arm in turned(arms, number)}
        run.add_all((f"{num_tokens}/{number}/{name}", {"arm": name, **about, **one}) for name, one in taken.items())
        print(number, {name: round(one["metrics"]["ttft_s"], 3) for name, one in taken.items()}, flush=True)
    if evicted := bench.rank()["evicted_chunks"]:
        raise CommandError(f"{evicted} chunks were evicted, so other arms moved less: give more --max-total-tokens")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval bench reuse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[2000, 6000], help="lengths of the chunks together")
    add("--ratios", type=float, nargs="+", default=[0, 0.05, 0.15, 0.3, 0.5, 1])
    add("--selector", nargs="+", default=["query"], help="selectors to sweep the ratios with")
    add("--phase-selectors", nargs="*", default=["none", "first", "query", "deviation", "context"])
    add("--phase-ratio", type=float, default=0.15, help="ratio of the phase selectors")
    add("--pairs", type=int, default=20, help="measured rounds a length")
    add("--warm-up", type=int, default=1, help="rounds before them")
    add("--chunk-tokens", type=int, default=256)
    add("--params", type=int, choices=sorted(SHAPES), default=100, help="millions, of the random model")
    add("--model-path", help="another model; only its times are meaningful")
    add("--stock", action="store_true", help="measure stock SGLang too")
    add("--threads", type=int, help="OMP_NUM_THREADS of the servers (default: theirs)")
    add("--max-total-tokens", type=int, default=200_000, help="our KV pool; flushed between requests when it is full")
    add("--store-mib", type=int, default=4096, help="our store; must hold the chunks of one length")
    add("--start-limit-s", type=float, default=300.0, help="seconds until a server must be ready")
    add("--logs", type=Path, default=Path("logs"))
    add_out_option(parser)
    add("server_flags", nargs="*", metavar="-- FLAGS", help="more flags for all servers")
    args = parser.parse_args(argv)
    if args.ratios != sorted(set(args.ratios)) or not 0 <= args.ratios[0] <= args.ratios[-1] <= 1:
        parser.error("--ratios: expected numbers from 0 to 1, ascending")
    if args.pairs < 1:
        parser.error("--pairs: expected at least 1")
    return args


def _server(args: argparse.Namespace, name: str, model: str) -> Server:
    # Stock gets one of several requests, and both servers are flushed together: a quarter of the pool is enough for it.
    num_slots = args.max_total_tokens // (1 if name == "ours" else 4)
    flags = ["--model-path", model, "--max-total-tokens", str(num_slots), "--enable-cache-report"]
    if args.model_path is None:
        # On the CPU SGLang's attention pads every piece of a prefill to the whole prompt: pieces would slow `full` down.
        flags += ["--chunked-prefill-size", "-1"]
    if name == "ours":
        longest = ["--chunkcache-max-pass-tokens", str(2 * max(args.tokens))]
        flags = [*OUR_FLAGS, *flags, *longest, "--chunkcache-store-mib", str(args.store_mib)]
    else:
        flags = ["--stock", *flags]
    env = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    log = args.logs / f"reuse-{name}.log"
    return Server([*flags, *args.server_flags], log=log, env=env, timeout_s=args.start_limit_s)


def _json(chunk: TextChunk) -> dict[str, str]:
    return {"id": chunk.id, "text": chunk.text}
