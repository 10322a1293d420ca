"""Time to first token against recompute ratio: at which ratio does moving chunks stop paying?

    python -m eval.bench.reuse [--tokens 2000 6000] [--ratios 0 0.05 ...] [--selector query ...] [--pairs 20] [--record]
                               [--model-path DIR] [--url U] [--stock | --stock-url U] [-- FLAGS OF THE SERVERS]

One server of ours, one client, one request at a time. A round sends one request of every arm, in a rotating order:

    full           no chunk reused: the time that reuse must beat
    exact          the same prompt repeated: the minimum time of a request (on the CPU high, since SGLang's attention there
                   pads the question to the whole prompt)
    SEL/host/R     moved from the store, selector SEL, ratio R         SEL/device/R   moved from other prompts' KV on the device
    stock          with --stock: stock SGLang, same flags, the chunks in the user message, nothing reused

A share is an arm's median time over that of `full`, with a bootstrap interval over rounds; below 1, moving pays. The crossover is
the ratio where the share reaches 1, interpolated linearly, or null if the share is below 1 at every measured ratio. Every
measured prompt has a unique head, cached by a short request before it: exactly the head is an exact hit, nothing is a fused
hit, and the fates of each answer must show this. Samples that do not are kept, shown and counted as wrong, and the command fails.

Phases are the server's own times (`chunkcache.reuse.ms`) over the median of `full`; on a GPU they are the host's, which does not
wait for queued work. Preprocessing is `POST /chunkcache/preprocess`, alternately alone and after neighbours; the server scores
and copies a chunk with its next batch, which is sent at once. Weights are random, so nothing here measures quality.

A server given by `--url` is flushed and must get no other requests. It needs an empty cache, --reuse fused,
--chunkcache-min-saved-tokens 0, --chunkcache-store-threshold 1000000 and a pass as long as the longest prompt
(--chunkcache-max-pass-tokens).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from eval.errors import CommandError
from eval.http import get, post
from eval.intervals import bootstrap, quantile
from eval.random_model import SHAPES, write_random_model
from eval.record import make_record, write_record
from eval.server import Server

WORDS = [a + b + c for a in "bdfgklmnprst" for b in "aeio" for c in ("ran", "sel", "tor", "min", "dus")]
QUESTION_WORDS = 24
PHASES = ("lookup", "relocate", "select", "recompute")
NEIGHBOR = "Behind this."
"""Stored chunks are computed after it. Of equal sources the server prefers a preprocessed one to a device copy."""
MAX_DRAINS = 1000
"""If chunks still wait for the store after this many requests, the bench fails."""
SHORT_LEN = 200
"""Tokens; an upper bound for head, question and answer of any prompt here."""


@dataclass(frozen=True)
class Arm:
    """One kind of request. `kind`: full, exact, stock or fused; the other fields are for fused ones."""

    kind: str
    source: str = ""
    selector: str = ""
    ratio: float = 0.0

    @property
    def name(self) -> str:
        return self.kind if self.kind != "fused" else f"{self.selector}/{self.source}/{self.ratio:g}"


@dataclass(frozen=True)
class Load:
    """The chunks of one prompt length. `stored` are in the host store, `plain` on the device; about equally long."""

    stored: tuple[str, ...]
    plain: tuple[str, ...]

    @classmethod
    def make(cls, num_tokens: int, chunk_tokens: int, words_per_token: float) -> Load:
        """Make chunks of random words with about `num_tokens` tokens, rounded to whole chunks."""
        num_chunks = max(2, round(num_tokens / chunk_tokens))
        num_words = max(1, round(chunk_tokens * words_per_token))
        stored, plain = ([_text(f"{kind} {i}", num_words) for i in range(num_chunks)] for kind in ("stored", "plain"))
        return cls(tuple(stored), tuple(plain))


def main(argv: Sequence[str]) -> int:
    """Run; returns 1 if the fates of an answer do not match its arm."""
    args = _parse(argv)
    arms = arms_of(
        args.selector, args.ratios, args.phase_selectors, args.phase_ratio, stock=args.stock or args.stock_url
    )
    with ExitStack() as stack:
        urls = {"ours": args.url, "stock": args.stock_url}
        model = args.model_path
        if model is None and (args.url is None or args.stock):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            model = str(write_random_model(Path(folder), SHAPES[args.params], [" ".join(WORDS)] * 50))
        for name, extra in (("ours", OUR_FLAGS), ("stock", ["--stock"])):
            if urls[name] is None and (name == "ours" or args.stock):
                urls[name] = stack.enter_context(_server(args, name, extra, model)).url
        bench = Bench(urls["ours"], urls["stock"])
        rows, sizes = [], {}
        for num_tokens in args.tokens:
            load = Load.make(num_tokens, args.chunk_tokens, bench.words_per_token())
            found = bench.rounds(load, arms, warm_up=args.warm_up, pairs=args.pairs)
            prepared = bench.preprocess(load, args.preprocess, args.neighbors)
            rows += [{"tokens": num_tokens, "round": i, **row} for i, row in enumerate(found)]
            rows += [{"tokens": num_tokens, "preprocess": row} for row in prepared]
            sizes[str(num_tokens)] = summarize(found, arms) | {"preprocess": summarize_preprocessing(prepared, found)}
            print(table(num_tokens, sizes[str(num_tokens)]), flush=True)
        stats = get(bench.url + "/chunkcache/stats")["ranks"][0]
    results = {
        "sizes": sizes,
        "wrong": sum(size["wrong"] for size in sizes.values()),
        "evicted_chunks": stats["evicted_chunks"],
        "gate": stats["gate"],
    }
    record = make_record("reuse", spec=vars(args), results=results)
    if args.record:
        folder_path = write_record(record)
        (folder_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print("record:", folder_path)
    print(json.dumps(results))
    return 1 if results["wrong"] or results["evicted_chunks"] else 0


OUR_FLAGS = ["--reuse", "fused", "--chunkcache-min-saved-tokens", "0", "--chunkcache-store-threshold", "1000000"]
"""Moving is never declined, and only preprocessing fills the store."""


# What is sent, in which order


def arms_of(
    selectors: Sequence[str], ratios: Sequence[float], phase_selectors: Sequence[str], phase_ratio: float, *, stock: Any
) -> list[Arm]:
    """Every arm once: the sweep of each of `selectors` from both sources, and each of `phase_selectors` at one ratio."""
    arms = [Arm("full"), Arm("exact"), *([Arm("stock")] if stock else [])]
    arms += [
        Arm("fused", source, selector, ratio)
        for selector in selectors
        for source in ("host", "device")
        for ratio in ratios
    ]
    arms += [Arm("fused", "host", selector, 0.0 if selector == "none" else phase_ratio) for selector in phase_selectors]
    return list(dict.fromkeys(arms))


def turned(arms: Sequence[Arm], number: int) -> list[Arm]:
    """The order of round `number`: each arm is first once in every `len(arms)` rounds, and odd rounds run backwards."""
    start = number % len(arms)
    order = [*arms[start:], *arms[:start]]
    return order if number % 2 == 0 else order[::-1]


class Bench:
    """Sends the requests of all arms, and flushes the cache before the pool is full."""

    def __init__(self, url: str, stock_url: str | None) -> None:
        """Raises CommandError for a server that moves no chunks."""
        self.url, self._stock_url = url, stock_url
        self._rng = random.Random(0)
        self._num_sent = 0
        self._used = 0
        self._areas: dict[str, int] = {}
        self._first: dict[str, Any] = {}
        rank = get(url + "/chunkcache/stats")["ranks"][0]
        if "moves" not in rank:
            raise CommandError(f"{url} moves no chunks: start it with --reuse fused")
        self._pool = rank["free"] + rank["evictable"] + rank["protected"]

    def words_per_token(self) -> float:
        """Words per token of random text, by the server's tokenizer."""
        answer = post(self.url + "/tokenize", {"prompt": _text("tokenizer", 1000)})
        return 1000 / int(answer["count"])

    def rounds(self, load: Load, arms: Sequence[Arm], *, warm_up: int, pairs: int) -> list[dict[str, Any]]:
        """One dict of arm name -> sample per measured round."""
        self._fill(load)
        rows = []
        for number in range(warm_up + pairs):
            row = {}
            for arm in turned(arms, number):
                self._make_space(load)
                row[arm.name] = self._sample(arm, load)
            print(number, {name: round(sample["ttft_s"], 3) for name, sample in row.items()}, flush=True)
            rows += [row] if number >= warm_up else []
        return rows

    def preprocess(self, load: Load, num_chunks: int, num_neighbors: int) -> list[dict[str, Any]]:
        """Preprocess chunks, alternately alone and after neighbours from the store."""
        self._fill(load)
        num_words = len(load.stored[0].split())
        num_neighbors = min(num_neighbors, len(load.stored))
        rows = []
        for i in range(num_chunks):
            row = {}
            for name in ("alone", "behind")[:: 1 if i % 2 == 0 else -1]:
                neighbors = load.stored[:num_neighbors] if name == "behind" else ()
                self._make_space(load)
                row[name] = self._preprocess(_text(f"{name} {i}", num_words), neighbors)
            rows.append(row)
        return rows

    # Private, in order of use

    def _make_space(self, load: Load) -> None:
        if self._used + max(self._areas.values()) + 2 * SHORT_LEN > self._pool:
            self._fill(load)

    def _fill(self, load: Load) -> None:
        """Empty the cache, then put `stored` into the store and `plain` into the tree, in the prompt of the `exact` arm."""
        get(self.url + "/flush_cache?timeout=60")
        self._used = 0
        for text in load.stored:
            self._capture(text, (NEIGHBOR,))
        self._drain()
        self._first = self._prompt(load.plain)
        asked = {**self._first, "order": "retriever", "max_tokens": 1}
        for source, texts in (("host", load.stored), ("device", load.plain)):
            spans = post(self.url + "/chunkcache/explain", {**asked, "chunks": _chunks(texts)})["spans"]
            self._areas[source] = spans[-1]["end"] - spans[0]["start"]
        longest = max(self._areas.values())
        if self._used + 3 * longest > self._pool:
            raise CommandError(f"a pool of {self._pool} tokens is too small for prompts of {longest}")
        if self._stock_url is not None:
            get(self._stock_url + "/flush_cache?timeout=60")
        stored = get(self.url + "/chunkcache/stats")["ranks"][0]["store"]["num_chunks"]
        if stored != len(load.stored):
            raise CommandError(
                f"the store holds {stored} of {len(load.stored)} chunks: --chunkcache-store-mib is too small"
            )
        self._send(self._first, {"mode": "exact"})
        self._used += longest + SHORT_LEN

    def _prompt(self, texts: Sequence[str], *, stock: bool = False) -> dict[str, Any]:
        """Messages and chunks, in a new order after a head that no other prompt has. Sends a request that caches the head."""
        self._num_sent += 1
        system = {"role": "system", "content": f"{self._num_sent:06d} {_text(f'head {self._num_sent}', 6)}"}

        def prompt(texts: Sequence[str]) -> dict[str, Any]:
            question = " ".join(self._rng.choices(WORDS, k=QUESTION_WORDS))
            return {"messages": [system, {"role": "user", "content": question}], "chunks": _chunks(texts)}

        short = prompt([f"none {self._num_sent}"])
        if stock:
            self._send_stock(short)
        else:
            self._send(short, {"mode": "exact"})
            self._used += SHORT_LEN
        return prompt(self._rng.sample(texts, len(texts)))

    def _sample(self, arm: Arm, load: Load) -> dict[str, Any]:
        area = self._areas["host" if arm.source == "host" else "device"]
        if arm.kind == "exact":
            sample = self._send(self._first, {"mode": "exact"})
        elif arm.kind == "stock":
            sample = self._send_stock(self._prompt(load.plain, stock=True))
        elif arm.kind == "full":
            sample = self._send(self._prompt(load.plain), {"mode": "exact"})
        else:
            reuse = {"mode": "fused", "selector": arm.selector, "ratio": arm.ratio}
            sample = self._send(self._prompt(load.stored if arm.source == "host" else load.plain), reuse)
        if arm.kind not in ("exact", "stock"):
            self._used += area + SHORT_LEN
        wrong = wrong_fates(arm, sample, area, len(load.stored))
        if wrong:
            print(f"wrong: {arm.name}: {'; '.join(wrong)}", flush=True)
        return {**sample, "wrong": wrong}

    def _send(self, prompt: Mapping[str, Any], reuse: Mapping[str, Any]) -> dict[str, Any]:
        body = {**prompt, "order": "retriever", "reuse": reuse}
        seconds, usage, answer = _stream(self.url + "/rag/v1/chat/completions", body)
        report = answer.get("reuse") or {}
        return {
            "ttft_s": seconds,
            "prompt": usage["prompt_tokens"],
            "head": answer["head_tokens"],
            "fates": answer["fates"],
            "fused_hit": report.get("fused_hit", 0),
            "gap": report.get("gap", 0),
            "sources": [source["from"] for source in report.get("sources", ())],
            "fallbacks": answer["fallbacks"],
            "ms": report.get("ms", {}),
        }

    def _send_stock(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        assert self._stock_url is not None
        system, user = prompt["messages"]
        text = "".join(chunk["text"] + "\n\n" for chunk in prompt["chunks"]) + user["content"]
        body = {"messages": [system, {**user, "content": text}]}
        seconds, usage, _ = _stream(self._stock_url + "/v1/chat/completions", body)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return {"ttft_s": seconds, "prompt": usage["prompt_tokens"], "cached": cached}

    def _preprocess(self, text: str, neighbors: Sequence[str]) -> dict[str, Any]:
        """Seconds of the request, then of scoring and copying."""
        before = get(self.url + "/chunkcache/stats")["ranks"][0]["moves"]["seconds"]
        answer = self._capture(text, neighbors)
        after = self._drain()["moves"]["seconds"]
        took = {phase: after.get(phase, 0.0) - before.get(phase, 0.0) for phase in ("relocate", "score", "capture")}
        return {"seconds": answer["seconds"], "chunk": answer["chunk_tokens"], "fates": answer["fates"], **took}

    def _capture(self, text: str, neighbors: Sequence[str]) -> dict[str, Any]:
        answer = post(self.url + "/chunkcache/preprocess", {"chunk": {"text": text}, "neighbors": _chunks(neighbors)})
        self._used += answer["chunk_tokens"] * (1 + len(neighbors)) + SHORT_LEN
        return answer

    def _drain(self) -> dict[str, Any]:
        """Send batches until no chunk waits for the store; the rank's stats then."""
        for number in range(MAX_DRAINS):
            rank: dict[str, Any] = get(self.url + "/chunkcache/stats")["ranks"][0]
            if not rank["store"]["pending"]:
                return rank
            message = {"role": "user", "content": f"{number} {self._rng.random()}"}
            post(self.url + "/rag/v1/chat/completions", {"messages": [message], "max_tokens": 1})
        raise CommandError("chunks wait for the store and never enter it")


# What came of it


def wrong_fates(arm: Arm, sample: Mapping[str, Any], area: int, num_chunks: int) -> list[str]:
    """How an answer's fates differ from its arm's; `area`: tokens of the prompt's chunks."""
    if arm.kind == "stock":
        return [] if sample["cached"] <= sample["prompt"] - area else [f"{sample['cached']} tokens cached"]
    fates, reasons = sample["fates"], []
    moved = fates["relocated"] + fates["recomputed"]
    if arm.kind == "exact":
        if fates["exact"] < sample["head"] + area or moved:
            reasons.append(f"{fates}: expected {sample['head'] + area} exact")
    elif fates["exact"] != sample["head"]:
        reasons.append(f"{fates['exact']} tokens exact, the head has {sample['head']}")
    if arm.kind == "full" and moved:
        reasons.append(f"{moved} tokens moved")
    if arm.kind == "fused":
        if moved != area:
            reasons.append(f"{moved} tokens moved, not {area}")
        low, high = _recomputed_bounds(arm, area, num_chunks)
        if not low <= fates["recomputed"] <= high:
            reasons.append(f"{fates['recomputed']} tokens recomputed, not {low} to {high}")
        # `context` may choose between two equally good sources, one of them left in the tree by preprocessing.
        allowed = {"host", "device"} if arm.selector == "context" else {arm.source}
        if len(sample["sources"]) != num_chunks or not allowed.issuperset(sample["sources"]):
            reasons.append(f"sources {sample['sources']}")
    reasons += [f"{name} {sample[name]}" for name in ("fused_hit", "gap", "fallbacks") if sample[name]]
    return reasons


def summarize(rows: Sequence[Mapping[str, Any]], arms: Sequence[Arm]) -> dict[str, Any]:
    """For each arm its share of `full` and its phases' shares; the crossover of every sweep. `rows`: see `Bench.rounds`."""
    full_s = statistics.median(row["full"]["ttft_s"] for row in rows)
    summary: dict[str, Any] = {
        "rounds": len(rows),
        "wrong": sum(bool(sample["wrong"]) for row in rows for sample in row.values()),
        "arms": {},
        "crossover": {},
    }
    for arm in arms:
        samples = [row[arm.name] for row in rows]
        times = [sample["ttft_s"] for sample in samples]
        figures: dict[str, Any] = {
            "median_s": statistics.median(times),
            "p90_s": quantile(times, 0.9),
            "prompt_tokens": statistics.mean(sample["prompt"] for sample in samples),
            "share_of_full": bootstrap(rows, _share_of(arm.name, "full")),
        }
        if "stock" in rows[0]:
            figures["share_of_stock"] = bootstrap(rows, _share_of(arm.name, "stock"))
        if arm.kind == "fused":
            phases = {phase: [sample["ms"].get(phase, 0.0) / 1000 for sample in samples] for phase in PHASES}
            phases["rest"] = [t - sum(parts) for t, *parts in zip(times, *phases.values(), strict=True)]
            figures["phases_of_full"] = {phase: statistics.median(s) / full_s for phase, s in phases.items()}
            figures["phases_ms"] = {phase: 1000 * statistics.median(s) for phase, s in phases.items()}
            figures["recomputed_share"] = statistics.mean(
                s["fates"]["recomputed"] / max(1, s["fates"]["recomputed"] + s["fates"]["relocated"]) for s in samples
            )
            figures["sources"] = sorted({source for sample in samples for source in sample["sources"]})
        summary["arms"][arm.name] = figures
    for (selector, source), ratios in _sweeps(arms).items():
        cross = _crossing_of([Arm("fused", source, selector, ratio) for ratio in ratios])
        summary["crossover"][f"{selector}/{source}"] = [None if math.isinf(x) else x for x in bootstrap(rows, cross)]
    return summary


def crossover(points: Sequence[tuple[float, float]]) -> float:
    """The ratio where the share of full prefill first reaches 1, linear between points.

    points: (ratio, share), ratios ascending. Returns the first ratio if its share is above 1, infinity if all are below.
    """
    if points[0][1] >= 1:
        return points[0][0]
    for (low, below), (high, above) in pairwise(points):
        if above >= 1:
            return low + (high - low) * (1 - below) / (above - below)
    return math.inf


def summarize_preprocessing(
    rows: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Median seconds per chunk, and their ratio to `full`'s time for as many tokens; None if nothing was preprocessed."""
    if not rows:
        return None
    full_per_token = statistics.median(row["full"]["ttft_s"] / row["full"]["prompt"] for row in rounds)
    summary: dict[str, Any] = {
        "chunks": len(rows),
        "behind_over_alone": bootstrap(rows, lambda sample: _median(sample, "behind") / _median(sample, "alone")),
    }
    for name in ("alone", "behind"):
        seconds = {phase: _median(rows, name, phase) for phase in ("seconds", "relocate", "score", "capture")}
        full_s = full_per_token * statistics.mean(row[name]["chunk"] for row in rows)
        summary[name] = {
            "chunk_tokens": statistics.mean(row[name]["chunk"] for row in rows),
            **{f"{phase}_s" if phase != "seconds" else phase: value for phase, value in seconds.items()},
            "of_full": {phase: value / full_s for phase, value in seconds.items()},
        }
    return summary


def table(num_tokens: int, size: Mapping[str, Any]) -> str:
    """The figures of one prompt length, for people."""
    lines = [f"{num_tokens} tokens, {size['rounds']} rounds, {size['wrong']} wrong samples; times are shares of `full`"]
    lines.append(
        f"{'arm':<22}{'share':>7}  {'95%':<14}{'recomputed':>11}" + "".join(f"{p:>11}" for p in (*PHASES, "rest"))
    )
    for name, figures in size["arms"].items():
        share, low, high = figures["share_of_full"]
        line = f"{name:<22}{share:>7.3f}  {f'[{low:.2f}, {high:.2f}]':<14}"
        if phases := figures.get("phases_of_full"):
            line += f"{figures['recomputed_share']:>11.3f}" + "".join(f"{phases[p]:>11.4f}" for p in (*PHASES, "rest"))
        lines.append(line)
    for name, interval in size["crossover"].items():
        shown = ["none" if x is None else f"{x:.2f}" for x in interval]
        lines.append(
            f"crossover {name}: ratio {shown[0]} [{shown[1]}, {shown[2]}] (interpolated; none: pays everywhere)"
        )
    if prepared := size["preprocess"]:
        ratio, low, high = prepared["behind_over_alone"]
        lines.append(f"preprocessing after neighbours / alone: {ratio:.2f} [{low:.2f}, {high:.2f}]")
        for name in ("alone", "behind"):
            parts = ", ".join(f"{phase} {value:.2f}" for phase, value in prepared[name]["of_full"].items())
            lines.append(f"  {name}, over full prefill of as many tokens: {parts}")
    return "\n".join(lines)


# Private, in order of use


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 6000], help="lengths of the chunks together")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0, 0.05, 0.15, 0.3, 0.5, 1])
    parser.add_argument("--selector", nargs="+", default=["query"], help="selectors to sweep the ratios with")
    parser.add_argument("--phase-selectors", nargs="*", default=["none", "first", "query", "deviation", "context"])
    parser.add_argument("--phase-ratio", type=float, default=0.15, help="ratio of the phase selectors")
    parser.add_argument("--pairs", type=int, default=20, help="measured rounds a length")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before them")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--preprocess", type=int, default=8, help="chunks to preprocess each way; 0: none")
    parser.add_argument("--neighbors", type=int, default=4)
    parser.add_argument("--params", type=int, choices=sorted(SHAPES), default=100, help="millions, of the random model")
    parser.add_argument("--model-path", help="another model; only its times are meaningful")
    parser.add_argument("--url", help="our server, already running")
    parser.add_argument("--stock", action="store_true", help="measure stock SGLang too")
    parser.add_argument("--stock-url", help="stock SGLang, already running")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of the servers (default: theirs)")
    parser.add_argument(
        "--max-total-tokens", type=int, default=200_000, help="our KV pool; flushed between requests when it is full"
    )
    parser.add_argument("--store-mib", type=int, default=4096, help="our store; must hold the chunks of one length")
    parser.add_argument("--start-limit-s", type=float, default=300.0, help="seconds until a server must be ready")
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--record", action="store_true", help="write eval/results/")
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAGS", help="more flags for all servers started here")
    args = parser.parse_args(argv)
    if args.ratios != sorted(set(args.ratios)) or not 0 <= args.ratios[0] <= args.ratios[-1] <= 1:
        parser.error("--ratios: expected numbers from 0 to 1, ascending")
    if args.pairs < 1:
        parser.error("--pairs: expected at least 1")
    return args


def _server(args: argparse.Namespace, name: str, extra: Sequence[str], model: str) -> Server:
    # Stock gets one of several requests, and both servers are flushed together: a quarter of the pool is enough for it.
    num_slots = args.max_total_tokens // (1 if name == "ours" else 4)
    flags = ["--model-path", model, "--max-total-tokens", str(num_slots), "--enable-cache-report"]
    if args.model_path is None:
        # On the CPU SGLang's attention pads every piece of a prefill to the whole prompt: pieces would slow `full` down.
        flags += ["--chunked-prefill-size", "-1"]
    if name == "ours":
        flags += [
            "--chunkcache-max-pass-tokens",
            str(2 * max(args.tokens)),
            "--chunkcache-store-mib",
            str(args.store_mib),
        ]
    env = {"OMP_NUM_THREADS": str(args.threads)} if args.threads else {}
    return Server(
        [*extra, *flags, *args.server_flags],
        log=args.logs / f"reuse-{name}.log",
        env=env,
        timeout_s=args.start_limit_s,
    )


def _text(seed: str, num_words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def _chunks(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


def _stream(url: str, body: Mapping[str, Any]) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """(seconds to the first token, usage, the `chunkcache` object) of one streamed answer of one token."""
    full = {**body, "temperature": 0, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(full).encode()
    first: float | None = None
    usage: dict[str, Any] | None = None
    answer: dict[str, Any] = {}
    start = time.perf_counter()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                # The first event only names the role; it is sent together with the first token.
                first = first or time.perf_counter() - start
                event = json.loads(line[6:])
                if "error" in event:
                    raise CommandError(f"{url}: {event['error']}")
                usage, answer = event.get("usage") or usage, event.get("chunkcache") or answer
    if first is None or usage is None:
        raise CommandError(f"{url}: the answer has no token")
    return first, usage, answer


def _recomputed_bounds(arm: Arm, area: int, num_chunks: int) -> tuple[int, int]:
    if arm.selector in ("none", "set"):
        return 0, 0
    if arm.selector == "context":  # its ratio follows from the scores, and the focus reduces it further
        return 0, area
    return math.ceil(arm.ratio * area - 1e-6), min(area, math.ceil(arm.ratio * area) + num_chunks)


def _share_of(arm: str, base: str) -> Callable[[Sequence[Mapping[str, Any]]], float]:
    def share(rows: Sequence[Mapping[str, Any]]) -> float:
        return _median(rows, arm, "ttft_s") / _median(rows, base, "ttft_s")

    return share


def _sweeps(arms: Sequence[Arm]) -> dict[tuple[str, str], list[float]]:
    """Ratios, ascending, by selector and source; a single ratio is not a sweep."""
    found: dict[tuple[str, str], list[float]] = {}
    for arm in arms:
        if arm.kind == "fused":
            found.setdefault((arm.selector, arm.source), []).append(arm.ratio)
    return {key: sorted(ratios) for key, ratios in found.items() if len(ratios) > 1}


def _crossing_of(arms: Sequence[Arm]) -> Callable[[Sequence[Mapping[str, Any]]], float]:
    shares = [(arm.ratio, _share_of(arm.name, "full")) for arm in arms]
    return lambda rows: crossover([(ratio, share(rows)) for ratio, share in shares])


def _median(rows: Sequence[Mapping[str, Any]], name: str, phase: str = "seconds") -> float:
    return float(statistics.median(row[name][phase] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
