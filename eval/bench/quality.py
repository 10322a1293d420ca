"""What does moving chunks cost in quality, and what does recomputing some of their tokens win back? A curve per selector.

    python -m eval.bench.quality [--questions 100] [--ratios 0 0.05 0.15 0.3 0.5 1] [--record]

One server of ours with `--reuse fused`. Every question is asked once with full prefill, then once per cell (selector and
ratio) over moved chunks. Exact match and F1 are against the right answer; agreement, ROUGE-L and KL against full prefill's.
An arm says how the chunks' KV was captured, before any cell runs and once a chunk, so all selectors move the same KV:

    alone          behind nothing. The prompt's first chunk is then an exact hit
    live           in requests that mix half of the question's chunks with strangers, each behind a stranger
    preprocessed   behind the passages nearest to it by words, none of them in the prompt (FusionRAG 3.1)

Nothing leaks: every question has `cache_salt`s of its own, one an arm and one for full prefill, and `set` goes last because
what it does not reuse it computes, which leaves new sources. `foreign_sources` counts moved chunks from anywhere else.

Ratio 0 and ratio 1 are the same for all selectors and run once. `context` comes with its focus (Cache-Craft algorithm 1),
which spares chunks and so recomputes less than the ratio says; `context-all` is without. Real shares stand beside.

With `--data DIR --dataset NAME` the same weights read a real data set, of which they know nothing: that measures how far
moved KV is from full prefill's on such text, and nothing about the answers of a real model.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.errors import CommandError
from eval.http import get, post
from eval.intervals import bootstrap
from eval.passages import TextChunk, load_samples
from eval.quality import answer_kl, exact_match, f1, kl_divergence, rouge_l
from eval.record import make_record, write_record
from eval.server import Server

HEAD, TAIL = "<|bos|><|user|>\n", "<|end|>\n<|assistant|>\n"
"""The bundled model's turn around chunks and question; `check_prompt` compares it with the chat route's."""

FLAGS = ["--reuse", "fused", "--chunkcache-min-saved-tokens", "0", "--chunkcache-store-threshold", "1"]
"""Everything that can be moved is moved, and every chunk enters the store at once."""

SELECTORS = ("none", "first", "random", "h2o", "deviation", "query", "context", "context-all", "set")
UNRATED = ("none", "set")  # no ratio changes what they do
KINDS = ("one-hop", "two-hop", "order", "linked")
ARMS = ("alone", "live", "preprocessed")
METRICS = ("em", "f1", "same", "rouge_l", "kl_first", "kl")
GOLD_METRICS = ("em", "f1")  # need a right answer
PAIRED_RATIO = 0.15
PAIRED = tuple((a, b) for a in ("query", "context", "context-all") for b in ("random", "first"))
UNSEEN = 1 << 60  # worlds beyond the seeds that training draws
CLIP_CHARS = 600  # of a real passage: the model's context is 4,096 tokens, and it reads such text nearly byte by byte
DATA_NOTE = "a model that knows nothing of this text: agreement with full prefill, not the answers of a real model"
DRAWS = 1000


@dataclass(frozen=True)
class Cell:
    """One way to reuse. `row` and `column` say where it stands in the tables."""

    row: str
    column: str
    reuse: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One question with its chunks in prompt order, and what they are captured behind."""

    kind: str
    question: str
    gold: tuple[str, ...]
    chunks: tuple[TextChunk, ...]
    strangers: tuple[TextChunk, ...]
    """As many as chunks, none of them in the prompt."""
    neighbors: dict[str, tuple[TextChunk, ...]]
    """By chunk id, nearest first, none of them in the prompt."""


@dataclass(frozen=True)
class Answer:
    """A greedy answer, a distribution a token, and what the server says it did."""

    text: str
    tokens: list[int]
    steps: list[dict[int, float]]
    info: dict[str, Any]


@dataclass
class Row:
    """One case in one arm: a value per metric and cell, in the cells' order."""

    arm: str
    kind: str
    num_chunks: int
    full: dict[str, float]
    values: dict[str, list[float]]
    tokens: list[dict[str, int]] = field(default_factory=list)
    """By cell: prompt tokens by fate."""
    sources: Counter[str] = field(default_factory=Counter)
    """Moved chunks: from where, `own` (as captured) or `foreign`."""
    fallbacks: Counter[str] = field(default_factory=Counter)


def main(argv: Sequence[str]) -> int:
    """Run; 1 if a moved chunk came from anywhere but its arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--selectors", nargs="+", choices=SELECTORS, default=list(SELECTORS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0, 0.05, 0.15, 0.3, 0.5, 1])
    parser.add_argument("--questions", type=int, default=100, help="per kind and number of chunks")
    parser.add_argument("--chunks", nargs="+", type=int, default=[4, 6])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--neighbors", type=int, default=3, help="top-n of the arm preprocessed")
    parser.add_argument("--no-ablation", action="store_true", help="leave Cache-Craft's parts alone")
    parser.add_argument("--data", type=Path, help="folder of data sets; with --dataset")
    parser.add_argument("--dataset", help="musique, hotpotqa, ...")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    # The whole vocabulary takes most of the time, for the same figures: what is left out makes KL 1 to 3% low.
    parser.add_argument("--top-logprobs", type=int, default=100, help="of a step; 1101 are the whole vocabulary")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-total-tokens", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--record", action="store_true", help="write eval/results/")
    args = parser.parse_args(argv)
    if (args.data is None) != (args.dataset is None):
        parser.error("--data and --dataset go together")
    if args.data:
        args.kinds = [args.dataset]
    cases = list(data_cases(args) if args.data else world_cases(args))
    if not cases:
        raise CommandError("no questions")
    cells = make_cells(args.selectors, args.ratios, ablation=not args.no_ablation)
    flags = ["--model-path", "bundled", *FLAGS, "--max-total-tokens", str(args.max_total_tokens)]
    print(f"{len(cases)} questions, {len(args.arms)} arms, {len(cells)} cells", file=sys.stderr)
    with Server(flags, log=args.logs / "quality.log") as server:
        check_prompt(server.url, cases[0], args)
        rows = run(server.url, cases, cells, args)
        store = get(server.url + "/chunkcache/stats")["ranks"][0]["store"]
    results = summarise(rows, cells) | {"store": store} | ({"note": DATA_NOTE} if args.data else {})
    print(report(results, args.ratios))
    record = make_record("quality", spec=vars(args), results=results)
    if args.record:
        folder = write_record(record)
        lines = (json.dumps(sample(row), separators=(",", ":")) + "\n" for row in rows)
        (folder / "samples.jsonl").write_text("".join(lines))
        print("record:", folder)
    print(json.dumps(results))
    return 1 if any("foreign" in source for arm in results["sources"].values() for source in arm) else 0


def make_cells(selectors: Sequence[str], ratios: Sequence[float], *, ablation: bool) -> list[Cell]:
    """All cells in the order in which they run: `set` last."""
    cells = [Cell("none", "0", _reuse("none", 0.0))]
    for selector in (name for name in selectors if name not in UNRATED):
        cells += [Cell(selector, f"{r:g}", _reuse(selector, r)) for r in ratios if 0 < r < 1]
    if 1 in ratios:
        cells.append(Cell("all", "1", _reuse("first", 1.0)))
    if ablation:
        parts: dict[str, dict[str, Any]] = {
            "no beta": {"without": ["beta"]},
            "no cci": {"without": ["cci"]},
        }
        cells += [Cell(f"context, {name}", "0.15", _reuse("context", 0.15) | part) for name, part in parts.items()]
        parts["no focus"] = {"focus": False}
        cells += [
            Cell(f"context, {name}", "alpha 1", _reuse("context", 0.15) | {"alpha": 1.0} | part)
            for name, part in parts.items()
        ]
        for alpha in (0.5, 1.0, 2.0, 3.0):  # Cache-Craft fig. 26
            cells.append(Cell("context", f"alpha {alpha:g}", _reuse("context", 0.15) | {"alpha": alpha}))
    if "set" in selectors:
        cells.append(Cell("set", "0", _reuse("set", 0.0)))
    return cells


def world_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Questions about worlds that training never draws, as many for each kind and number of chunks."""
    from sglang_chunkcache.bundled_model.world import World, linked_questions, order_questions

    for kind in args.kinds:
        world = World(args.seed | UNSEEN, links=kind == "linked")
        corpus = [TextChunk(p.id, p.text) for p in world.passages]
        for num_chunks in args.chunks:
            rng = random.Random(f"{args.seed} {kind} {num_chunks}")
            asked = [q for q in world.questions if q.hop == (2 if kind == "two-hop" else 1)]
            rng.shuffle(asked)
            for question in asked[: args.questions]:
                if kind == "linked":
                    passages = world.linked_context(num_chunks, rng)
                    question = rng.choice(linked_questions(passages))
                else:
                    passages = list(world.context(question, num_chunks, rng))
                if kind == "order":
                    question = rng.choice(order_questions(passages)[:2])  # the model never learned "after"
                chunks = tuple(TextChunk(p.id, p.text) for p in passages)
                yield make_case(kind, question.question, question.answers, chunks, corpus, args.neighbors, rng)


def data_cases(args: argparse.Namespace) -> Iterator[Case]:
    """The first questions of a data set with enough passages, which are clipped."""
    samples = load_samples(args.data / args.dataset, args.questions)
    clipped = {c.id: TextChunk(c.id, c.text[:CLIP_CHARS]) for sample in samples for c in sample.chunks}
    corpus = list(clipped.values())
    for num_chunks in args.chunks:
        rng = random.Random(f"{args.seed} {args.dataset} {num_chunks}")
        for sample in (s for s in samples if len(s.chunks) >= num_chunks):
            chunks = tuple(clipped[c.id] for c in sample.chunks[:num_chunks])
            yield make_case(args.dataset, sample.question, (), chunks, corpus, args.neighbors, rng)


def make_case(
    kind: str,
    question: str,
    gold: tuple[str, ...],
    chunks: tuple[TextChunk, ...],
    corpus: Sequence[TextChunk],
    num_neighbors: int,
    rng: random.Random,
) -> Case:
    """The case with strangers and neighbours from `corpus`."""
    shown = {chunk.text for chunk in chunks}
    others = [chunk for chunk in corpus if chunk.text not in shown]
    if len(others) < max(len(chunks), num_neighbors):
        raise CommandError(f"{kind}: {len(others)} passages beside the prompt's are too few")
    rank = ranker(others)
    neighbors = {chunk.id: tuple(rank(chunk.text, num_neighbors)) for chunk in chunks}
    return Case(kind, question, gold, chunks, tuple(rng.sample(others, len(chunks))), neighbors)


def ranker(corpus: Sequence[TextChunk]) -> Callable[[str, int], list[TextChunk]]:
    """(text, n) -> the n passages that share most words with it, rare words counting more; ties in the corpus' order."""
    bags = [set(chunk.text.lower().split()) for chunk in corpus]
    frequency = Counter(word for bag in bags for word in bag)
    weight = {word: math.log(len(corpus) / count) for word, count in frequency.items()}

    def nearest(text: str, n: int) -> list[TextChunk]:
        words = set(text.lower().split())
        scores = [sum(sorted(weight[word] for word in words & bag)) for bag in bags]
        return [corpus[i] for i in sorted(range(len(corpus)), key=lambda i: -scores[i])[:n]]

    return nearest


def check_prompt(url: str, case: Case, args: argparse.Namespace) -> None:
    """The chat route and ours must make the same prompt. Raises CommandError if not."""
    ours = ask(url, case.question, case.chunks, "prompt-ours", "exact", args)
    body = {
        "messages": [{"role": "user", "content": case.question}],
        "chunks": [{"id": chunk.id, "text": chunk.text} for chunk in case.chunks],
        "order": "retriever",
        "cache_salt": "prompt-ours",
        "max_tokens": args.max_new_tokens,
        "temperature": 0,
    }
    chat = post(url + "/rag/v1/chat/completions", body)
    num_tokens, exact = chat["usage"]["prompt_tokens"], chat["chunkcache"]["fates"]["exact"]
    if exact != num_tokens - 1 or chat["choices"][0]["message"]["content"] != ours.text:
        raise CommandError(f"the chat route's prompt differs: {exact} of {num_tokens} tokens were ours, or its answer")


def run(url: str, cases: Sequence[Case], cells: Sequence[Cell], args: argparse.Namespace) -> list[Row]:
    """Every case through every arm and cell, several cases at a time."""

    def one(number: int) -> list[Row]:
        case = cases[number]
        full = ask(url, case.question, case.chunks, f"{number}-full", "exact", args)
        if full.info["fates"]["exact"]:
            raise CommandError(f"{case.kind} question {number}: full prefill found cached KV under a salt of its own")
        rows = []
        for arm in args.arms:
            salt = f"{number}-{arm}"
            behind = capture(url, arm, case, salt, random.Random(f"{args.seed} {number}"), args)
            answers = [ask(url, case.question, case.chunks, salt, cell.reuse, args) for cell in cells]
            rows.append(score(arm, case, full, answers, behind))
        return rows

    rows: list[Row] = []
    with ThreadPoolExecutor(args.clients) as pool:
        for done, found in enumerate(pool.map(one, range(len(cases))), 1):
            rows += found
            if done % 20 == 0:
                print(f"{done}/{len(cases)}", file=sys.stderr)
    return rows


def capture(url: str, arm: str, case: Case, salt: str, rng: random.Random, args: argparse.Namespace) -> dict[str, int]:
    """Bring the case's chunks into the server under `salt`; chunk id -> how many chunks stood before it then."""
    if arm == "live":
        behind: dict[str, int] = {}
        strangers = list(case.strangers)
        shuffled = rng.sample(case.chunks, len(case.chunks))
        for half in (shuffled[::2], shuffled[1::2]):
            mixed = [each for chunk in half for each in (strangers.pop(), chunk)]
            ask(url, case.question, mixed, salt, "exact", args, max_new_tokens=1)
            behind |= {chunk.id: 2 * i + 1 for i, chunk in enumerate(half)}
        return behind
    neighbors = case.neighbors if arm == "preprocessed" else {chunk.id: () for chunk in case.chunks}
    for each in dict.fromkeys(near for found in neighbors.values() for near in found):
        _preprocess(url, each, (), salt)  # movable, so that it can stand in front of a chunk
    for chunk in case.chunks:
        _preprocess(url, chunk, neighbors[chunk.id], salt)
    return {chunk_id: len(found) for chunk_id, found in neighbors.items()}


def ask(
    url: str,
    question: str,
    chunks: Sequence[TextChunk],
    salt: str,
    reuse: str | dict[str, Any],
    args: argparse.Namespace,
    max_new_tokens: int | None = None,
) -> Answer:
    """One greedy answer with its distributions."""
    body = {
        "parts": [HEAD, {"chunks": [{"id": c.id, "text": c.text} for c in chunks]}, question + TAIL],
        "order": "retriever",
        "reuse": reuse,
        "cache_salt": salt,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens or args.max_new_tokens},
        "return_logprob": True,
        "top_logprobs_num": args.top_logprobs,
    }
    reply = post(url + "/rag/v1/generate", body)
    steps = [{token: logprob for logprob, token, _ in step} for step in reply["meta_info"]["output_top_logprobs"]]
    return Answer(reply["text"], reply["output_ids"], steps, reply["chunkcache"])


def score(arm: str, case: Case, full: Answer, answers: Sequence[Answer], behind: Mapping[str, int]) -> Row:
    """What the cells' answers are worth, and whether each moved chunk came from its capture."""
    row = Row(arm, case.kind, len(case.chunks), _against_gold(full, case.gold), defaultdict(list))
    for answer in answers:
        values = _against_gold(answer, case.gold) | {
            "same": float(answer.text == full.text),
            "rouge_l": rouge_l(answer.text, full.text),
            "kl_first": kl_divergence(full.steps[0], answer.steps[0]),
            "kl": answer_kl(full.steps, full.tokens, answer.steps, answer.tokens),
        }
        for metric, value in values.items():
            row.values[metric].append(value)
        row.tokens.append(answer.info["fates"] | {"fused_hit": answer.info["reuse"]["fused_hit"]})
        row.fallbacks.update(answer.info["fallbacks"])
        for source in answer.info["reuse"]["sources"]:
            where = source["from"]
            if where != "gap":
                own = source["variant_prefix"] == behind.get(source["chunk"])
                where += ", own" if own else ", foreign"
            row.sources[where] += 1
    return row


def summarise(rows: Sequence[Row], cells: Sequence[Cell]) -> dict[str, Any]:
    """Means with intervals over questions by arm, kind and cell; paired differences; where moved chunks came from."""
    groups: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row.arm][row.kind].append(row)
    index = {(cell.row, cell.column): i for i, cell in enumerate(cells)}
    paired = [
        (a, b, index[a, f"{PAIRED_RATIO:g}"], index[b, f"{PAIRED_RATIO:g}"])
        for a, b in PAIRED
        if (a, f"{PAIRED_RATIO:g}") in index and (b, f"{PAIRED_RATIO:g}") in index
    ]
    results: dict[str, Any] = {"quality": {}, "paired": {}, "sources": {}, "fallbacks": {}}
    for arm, kinds in groups.items():
        of_arm = [row for found in kinds.values() for row in found]
        results["sources"][arm] = dict(sum((row.sources for row in of_arm), Counter[str]()))
        results["fallbacks"][arm] = dict(sum((row.fallbacks for row in of_arm), Counter[str]()))
        results["quality"][arm], results["paired"][arm] = {}, {}
        for kind, found in kinds.items():
            metrics = [m for m in METRICS if m in found[0].values]
            results["quality"][arm][kind] = {
                "questions": len(found),
                "full_prefill": {m: _interval([row.full[m] for row in found]) for m in found[0].full},
                "cells": [
                    {"row": cell.row, "column": cell.column}
                    | {m: _interval([row.values[m][i] for row in found]) for m in metrics}
                    | _shares([row.tokens[i] for row in found])
                    for i, cell in enumerate(cells)
                ],
            }
            results["paired"][arm][kind] = {
                f"{a} - {b}": {m: _interval([row.values[m][i] - row.values[m][j] for row in found]) for m in metrics}
                for a, b, i, j in paired
            }
    return results


def report(results: Mapping[str, Any], ratios: Sequence[float]) -> str:
    """Tables for people: EM (where there is a right answer), agreement, KL, and the share of moved tokens recomputed."""
    lines = [results["note"]] if "note" in results else []
    columns = [f"{ratio:g}" for ratio in sorted(ratios)]
    for arm, kinds in results["quality"].items():
        for kind, found in kinds.items():
            cells = {(cell["row"], cell["column"]): cell for cell in found["cells"]}
            full = "".join(f", full prefill {m} {v[0]:.3f}" for m, v in found["full_prefill"].items())
            lines += ["", f"{arm}, {kind}: {found['questions']} questions{full}"]
            lines.append(_line("EM  same  KL  recomputed" if full else "same  KL  recomputed", columns))
            curves = [name for name in SELECTORS if any(row == name for row, _ in cells)]
            for name in curves:
                ends = {} if name in UNRATED else {"0": ("none", "0"), "1": ("all", "1")}
                lines.append(_line(name, [_shown(cells.get(ends.get(c, (name, c)))) for c in columns]))
            others = (key for key in cells if key[1] not in columns or key[0] not in (*curves, "all"))
            lines += [_line(f"{name} at {column}", [_shown(cells[name, column])]) for name, column in others]
            for name, metrics in results["paired"][arm][kind].items():
                shown = [m for m in ("em", "same", "kl") if m in metrics]
                values = [f"{m} {metrics[m][0]:+.2g} [{metrics[m][1]:+.2g}, {metrics[m][2]:+.2g}]" for m in shown]
                lines.append(_line(f"{name} at {PAIRED_RATIO:g}", values, width=36))
        lines.append(f"{arm}, moved chunks: {results['sources'][arm]}; fallbacks: {results['fallbacks'][arm]}")
    return "\n".join(lines)


def sample(row: Row) -> dict[str, Any]:
    """One line of samples.jsonl: a value per cell, in the cells' order. F1 and ROUGE-L are left out, for size."""
    flags = {m: "".join(str(int(v)) for v in row.values[m]) for m in ("em", "same") if m in row.values}
    rounded = [float(f"{v:.1e}") for v in row.values["kl"]]
    return {"arm": row.arm, "kind": row.kind, "chunks": row.num_chunks, "full": row.full} | flags | {"kl": rounded}


# Private, in order of use


def _reuse(selector: str, ratio: float) -> dict[str, Any]:
    name = selector.removesuffix("-all")
    return {"mode": "fused", "selector": name, "ratio": float(ratio)} | ({"focus": False} if name != selector else {})


def _preprocess(url: str, chunk: TextChunk, neighbors: Sequence[TextChunk], salt: str) -> None:
    body = {
        "chunk": {"id": chunk.id, "text": chunk.text},
        "neighbors": [{"id": each.id, "text": each.text} for each in neighbors],
        "cache_salt": salt,
    }
    post(url + "/chunkcache/preprocess", body)


def _against_gold(answer: Answer, gold: Sequence[str]) -> dict[str, float]:
    if not gold:
        return {}
    return {"em": float(exact_match(answer.text, gold)), "f1": f1(answer.text, gold)}


def _interval(values: Sequence[float]) -> list[float]:
    return [float(f"{x:.4g}") for x in bootstrap(values, lambda drawn: sum(drawn) / len(drawn), draws=DRAWS)]


def _shares(tokens: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Of all prompt tokens: exact, moved; of the moved ones: recomputed."""
    total = sum((Counter(each) for each in tokens), Counter[str]())
    prompt = sum(total[fate] for fate in ("exact", "relocated", "recomputed", "computed"))
    moved = total["relocated"] + total["recomputed"]
    return {
        "exact": round(total["exact"] / prompt, 4),
        "moved": round(moved / prompt, 4),
        "recomputed": round(total["recomputed"] / moved, 4) if moved else 0.0,
        "fused_hits": total["fused_hit"],
    }


def _line(name: str, values: Sequence[str], width: int = 26) -> str:
    return f"    {name:36}" + "".join(f"{value:>{width}}" for value in values)


def _shown(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "-"
    em = f"{cell['em'][0]:.2f}  " if "em" in cell else ""
    return f"{em}{cell['same'][0]:.2f}  {cell['kl'][0]:.1e}  {cell['recomputed']:4.0%}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
