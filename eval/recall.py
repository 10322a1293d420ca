"""Recall of BM25, vectors and rank fusion on question sets, and overlap of their result lists. No server.

    python -m eval recall --data DIR [--sets squad nq ...] [--encoder PATH] [--factory IVF64,PQ64]

    set ── an index for each domain ── Retriever ── k ids for each question ── one sample: recall, overlap, neighbours

DIR holds a folder for each set: passages.jsonl.gz and questions.jsonl.gz or conversations.jsonl.gz (eval/data/question_set.py);
`--sets NAME/FILE` names another file. Passages are not cut. Single questions are shuffled. A conversation's turn is searched by
its question (`last`), its last N questions (`turns:N`) or the set's self-contained version (`rewrite`).

Overlap compares a list with earlier ones, because only KV that was computed before can be reused (CRAFT 3.1):

    R1 = [c1 c4 c5 c6 c7]   R2 = [c1 c2 c3 c4 c5]     prefix of R2: 1/5 (c1)   total of R2: 3/5 (c1 c4 c5)

`hit` is the share of passages that any earlier list had, `repeated` that an earlier turn of the conversation had. Neighbours
are FusionRAG's figure 7a: how likely passages found together are each other's n nearest. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, variance
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, get_args

from eval.data.question_set import read_conversations, read_questions
from eval.data.retrieve import by_domain, open_index
from eval.errors import CommandError
from eval.run import Run, Sample
from eval.serve.options import default_folder
from eval.task import TaskData

if TYPE_CHECKING:
    from retrieval.encoder import Encoder
    from retrieval.index import Index

SETS = ("squad", "hotpotqa", "2wikimqa", "musique", "nq", "triviaqa", "mtrag")
QUESTION_FILES = ("questions.jsonl.gz", "conversations.jsonl.gz")
QUERIES = ("last", "turns:2", "rewrite")
Mode = Literal["bm25", "dense", "fusion"]
NEIGHBORS = range(2, 16)
"""Numbers of neighbours for which FusionRAG's figure 7a is measured."""
SHOWN_NEIGHBORS = (2, 3, 5, 10, 15)
TITLES = {
    "prefix": "Share of a list that is a prefix of the best earlier list (CRAFT: prefix)",
    "total": "Share of a list that the best earlier list contains (CRAFT: total)",
    "hit": "Share of a list that any earlier list had",
    "repeated": "Share of a turn's list that the conversation had (CRAFT 3.2)",
    "recall": "{}: share of the gold passages found",
    "all_gold": "{}: share of questions with all their gold passages found",
}
SEARCH_BATCH = 256
NEIGHBOR_BATCH = 1024
MODEL_BATCH = 32


@dataclass(frozen=True)
class Asked:
    """A set searched by one kind of query; the requests' questions are the queries."""

    name: str
    query: str
    data: TaskData

    @property
    def cell(self) -> dict[str, str]:
        return {"data": self.name, "query": self.query}


def main(argv: Sequence[str]) -> int:
    """Ask all questions, print tables and the verdict; returns the exit code."""
    args = _parser().parse_args(argv)
    for name in ("k", "nprobe", "limit", "dim"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise CommandError(f"--{name} must be at least 1, got {getattr(args, name)}")
    folder = args.out or default_folder("recall")
    try:
        from retrieval import RetrievalError

        with Run(folder, kind="recall", spec=vars(args), summarize=summarize) as taken:
            measure(taken, args)
    except ImportError as error:
        raise CommandError(f"recall needs the extra `retrieval` ({error})") from None
    except RetrievalError as error:
        raise CommandError(str(error)) from None
    results = taken.results()
    print(text(results), f"record: {folder}", json.dumps(results), sep="\n")
    return 0


def measure(run: Run, args: argparse.Namespace) -> None:
    """Take the samples that the run does not have, all of a set, query and mode at once."""
    encoder = _encoder(args)
    for name in args.sets:
        for asked in read_set(args.data, name, args.query, seed=args.seed, limit=args.limit):
            arms = {mode: _arm(mode, encoder) for mode in args.modes}
            key = f"{name} {asked.query}"
            missing = [mode for mode, arm in arms.items() if f"{key} {arm} {asked.data.requests[0].id}" not in run]
            if not missing:
                continue
            ranked, neighbors = _search(asked.data, missing, encoder, args)
            for mode in missing:
                found = [ranked[mode, request.id] for request in asked.data.requests]
                wants = mode != "bm25" and asked.query == "last"
                rows = samples(asked, found, neighbors if wants else None, arm=arms[mode], k=args.k)
                run.add_all((f"{key} {arms[mode]} {row['request']}", row) for row in rows)
                print(f"{key} {arms[mode]}: {len(rows)} questions", file=sys.stderr)


def read_set(data: Path, name: str, queries: Sequence[str], *, seed: int, limit: int | None) -> Iterator[Asked]:
    """A set once for each kind of query: `last` alone for single questions.

    Args:
        name: a folder of `data`, or a file in such a folder.
        limit: maximum number of questions, taken after the shuffle; None: all.
    Raises:
        CommandError: a file is missing or invalid, or a gold passage is not among those that its question searches.
    """
    path = data / name
    if not path.is_file():
        path /= next((file for file in QUESTION_FILES if (path / file).exists()), QUESTION_FILES[0])
    if path.name == QUESTION_FILES[0]:
        single = read_questions(path.parent, name)
        shuffled = list(single.requests)
        random.Random(seed).shuffle(shuffled)
        found = {"last": replace(single, requests=tuple(shuffled))}
    else:
        turns = read_conversations(path, name)
        found = {
            query: read_conversations(path, name, field=query) if query == "rewrite" else _last(turns, query)
            for query in queries
        }
    for query, asked in found.items():
        if not asked.requests:
            raise CommandError(f"{path}: no " + ("rewrites" if query == "rewrite" else "questions"))
        for request in asked.requests:
            domain = asked.domains.get(request.id, "")
            if wrong := [gold for gold in request.gold_ids if asked.domains.get(gold, "") != domain and domain]:
                raise CommandError(f"{path}: {request.id}: gold passage {wrong[0]!r} is not of domain {domain!r}")
        yield Asked(name, query, replace(asked, requests=asked.requests[:limit]))


def samples(
    asked: Asked,
    ranked: Sequence[Sequence[str]],
    neighbors: Mapping[str, Sequence[str]] | None,
    *,
    arm: str,
    k: int,
) -> list[Sample]:
    """One sample for each question.

    Args:
        ranked: the retrieved ids of each question.
        neighbors: id -> ids, nearest first; None: not measured.

    Returns:
        `metrics` as in the module's docstring; `recall@k` is the share of the gold passages among the k, `all_gold@k` is 1 if all
        of them are. Figures that a question does not have are missing. `neighbors`: for each passage of a list, the places of the
        others among its nearest.
    """
    kept = _kept_ids(asked.data)
    found = []
    overlaps = overlap(ranked, [request.conversation for request in asked.data.requests], k=k)
    for request, ids, metrics in zip(asked.data.requests, ranked, overlaps, strict=True):
        if gold := {kept[name] for name in request.gold_ids}:
            share = len(gold.intersection(ids)) / len(gold)
            metrics |= {f"recall@{k}": share, f"all_gold@{k}": float(share == 1)}
        row: Sample = {"arm": arm, "cell": asked.cell, "request": request.id, "metrics": metrics, "found": len(ids)}
        together = dict.fromkeys(ids)
        if neighbors is not None and len(together) > 1:
            row["neighbors"] = [
                [place for place, other in enumerate(neighbors.get(one, ())) if other in together] for one in together
            ]
        found.append(row)
    return found


def overlap(ranked: Sequence[Sequence[str]], conversations: Sequence[str | None], *, k: int) -> list[dict[str, float]]:
    """`prefix`, `total`, `hit` and `repeated` of each list; the first list has no prefix and no total.

    Prefix is max_{j<i} LCP(R_i, R_j) / k, total is max_{j<i} |R_i ∩ R_j| / k (CRAFT 3.1).
    """
    trie: dict[str, Any] = {}
    lists_with: defaultdict[str, list[int]] = defaultdict(list)
    shown: dict[str, set[str]] = {}
    rows: list[dict[str, float]] = []
    for number, (ids, conversation) in enumerate(zip(ranked, conversations, strict=True)):
        row: dict[str, float] = {}
        node, depth = trie, 0
        for one in ids:
            depth += one in node  # a new node is empty: nothing after it counts
            node = node.setdefault(one, {})
        if number:
            shared = Counter(other for one in set(ids) for other in lists_with[one])
            row = {"prefix": depth / k, "total": max(shared.values(), default=0) / k}
        if ids:
            row["hit"] = sum(bool(lists_with[one]) for one in ids) / len(ids)
            if conversation in shown:
                row["repeated"] = sum(one in shown[conversation] for one in ids) / len(ids)
        for one in set(ids):
            lists_with[one].append(number)
        if conversation is not None:
            shown.setdefault(conversation, set()).update(ids)
        rows.append(row)
    return rows


def summarize(taken: Sequence[Sample]) -> dict[str, Any]:
    """Means of each cell, tables of them, and which mode finds more than BM25."""
    groups: defaultdict[tuple[str, str, str], list[Sample]] = defaultdict(list)
    for sample in taken:
        groups[sample["cell"]["data"], sample["cell"]["query"], sample["arm"]].append(sample)
    cells = [
        {
            "arm": arm,
            "cell": {"data": data, "query": query},
            "n": len(group),
            "metrics": _metrics(group),
            **({"neighbors": shares} if (shares := _neighbor_shares(group)) else {}),
        }
        for (data, query, arm), group in groups.items()
    ]
    return {"cells": cells, "tables": _tables(cells), "verdict": _verdict(groups)}


def text(results: Mapping[str, Any]) -> str:
    """The tables and the verdict for the terminal."""
    from tabulate import tabulate

    tables = (f"{one['title']}\n{tabulate(one['rows'], headers='keys', floatfmt='.3f')}\n" for one in results["tables"])
    return "\n".join([*tables, *results["verdict"]])


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval recall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with a folder for each set")
    add("--sets", nargs="+", default=list(SETS), metavar="NAME", help="default: the seven of eval/tasks")
    add("--modes", nargs="+", choices=get_args(Mode), default=list(get_args(Mode)), help="default: all")
    add("--query", nargs="+", type=_query, default=list(QUERIES), help="of a conversation's turn; default: %(default)s")
    add("--k", type=int, default=5, metavar="N", help="passages for each question; default: 5")
    add("--limit", type=int, metavar="N", help="N questions of each set only")
    add("--seed", type=int, default=0, metavar="N", help="of the order of single questions")
    add("--encoder", metavar="PATH", help="a sentence-transformers model instead of the embedded encoder")
    add("--dim", type=int, metavar="N", help="dimensions of the embedded encoder")
    add("--factory", default="Flat", metavar="NAME", help="FAISS factory string; default: Flat")
    add("--nprobe", type=int, default=128, metavar="N", help="lists visited in an IVF index; default: 128")
    add("--out", type=Path, metavar="DIR", help="folder of the record; an interrupted run continues")
    return parser


def _query(word: str) -> str:
    if word not in ("last", "rewrite") and not (word.startswith("turns:") and word[6:].isdecimal() and int(word[6:])):
        raise argparse.ArgumentTypeError(f"must be last, rewrite or turns:N with N at least 1, got {word!r}")
    return word


def _encoder(args: argparse.Namespace) -> Encoder | None:
    if args.encoder is None:
        return None
    from retrieval.sentence_encoder import SentenceEncoder

    return SentenceEncoder(
        args.encoder, device=None, batch_size=MODEL_BATCH, query_prefix=None, passage_prefix=None, normalize=True
    )


def _arm(mode: str, encoder: Encoder | None) -> str:
    name = Path(encoder.spec()["model"]).name if encoder else None
    return mode if name is None or mode == "bm25" else f"{mode}/{name}"


def _search(
    data: TaskData, modes: Sequence[Mode], encoder: Encoder | None, args: argparse.Namespace
) -> tuple[dict[tuple[str, str], list[str]], dict[str, list[str]]]:
    """The ids by (mode, request), and the neighbours of every passage, in one index for each domain."""
    from retrieval.settings import IndexSettings

    settings = IndexSettings(
        is_split=False,
        factory=args.factory,
        bm25_language=None if modes == ["dense"] else "english",
        **(
            {"encoder": encoder.spec()}
            if encoder
            else {"encoder": {"kind": "hashed", "dim": args.dim}}
            if args.dim
            else {}
        ),
    )
    ranked: dict[tuple[str, str], list[str]] = {}
    neighbors: dict[str, list[str]] = {}
    for passages, asked in by_domain(data, data.requests):
        with TemporaryDirectory(prefix="eval-recall-") as folder:
            retriever = open_index(passages, Path(folder), settings, encoder=encoder, seed=args.seed)
            for mode in modes:
                for first in range(0, len(asked), SEARCH_BATCH):
                    batch = asked[first : first + SEARCH_BATCH]
                    queries = [request.question for request in batch]
                    hits = retriever.search(queries, k=args.k, mode=mode, nprobe=args.nprobe).hits
                    for request, best in zip(batch, hits, strict=True):
                        ranked[mode, request.id] = [hit.passage.id for hit in best]
            if modes != ["bm25"]:
                neighbors.update(_nearest(retriever.index, nprobe=args.nprobe))
    return ranked, neighbors


def _nearest(index: Index, *, nprobe: int) -> Iterator[tuple[str, list[str]]]:
    from retrieval.neighbors import nearest

    names = index.store.ids(range(index.num_rows))
    for first in range(0, index.num_rows, NEIGHBOR_BATCH):
        last = min(first + NEIGHBOR_BATCH, index.num_rows)
        for row, others in nearest(index, first, last, n=max(NEIGHBORS), nprobe=nprobe).items():
            yield names[row], [names[other] for other in others]


def _last(turns: TaskData, query: str) -> TaskData:
    """Each turn searched by its conversation's last questions, oldest first, one in a line."""
    num = 1 if query == "last" else int(query.removeprefix("turns:"))
    asked: defaultdict[str | None, list[str]] = defaultdict(list)
    requests = []
    for request in turns.requests:
        asked[request.conversation].append(request.question)
        requests.append(replace(request, question="\n".join(asked[request.conversation][-num:])))
    return replace(turns, requests=tuple(requests))


def _kept_ids(data: TaskData) -> dict[str, str]:
    """Passage id -> the id under which its text is indexed: of equal texts of a domain, the index keeps the first."""
    first: dict[tuple[str, str], str] = {}
    return {
        passage.id: first.setdefault((data.domains.get(passage.id, ""), passage.text), passage.id)
        for passage in data.passages
    }


def _metrics(group: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Mean of each metric over the questions that have it; of recall also the 95% interval, as questions are independent."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for sample in group for name in sample["metrics"]):
        rows = [(sample["metrics"][name], sample["found"]) for sample in group if name in sample["metrics"]]
        values = [value for value, _ in rows]
        mean = fmean(values)
        if name == "hit":  # of all passages that were found
            mean = sum(value * weight for value, weight in rows) / sum(weight for _, weight in rows)
        found[name] = {"mean": round(mean, 4)}
        if "@" in name and len(values) > 1:
            half = 1.96 * sqrt(variance(values) / len(values))
            found[name] |= {"low": round(mean - half, 4), "high": round(mean + half, 4)}
    return found


def _neighbor_shares(group: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Three readings of FusionRAG's figure 7a, by n; empty if not measured.

    The paper gives a chance that related chunks are retrieved, over 50% at n = 2 and above 80% at n = 10, but does not define it:

        questions    share of questions with at least one pair (a, b) in their list, b among the top n of a
        any          share of found passages with at least one other passage of the same list among their top n
        pairs        share of ordered pairs (a, b), a != b, of the same list with b among the top n of a
    """
    lists = [sample["neighbors"] for sample in group if "neighbors" in sample]
    if not lists:
        return {}
    first = Counter(min((place for places in one for place in places), default=max(NEIGHBORS)) for one in lists)
    closest = Counter(places[0] for one in lists for places in one if places)
    paired = Counter(place for one in lists for places in one for place in places)
    wholes = (len(lists), sum(map(len, lists)), sum(len(one) * (len(one) - 1) for one in lists))
    return {
        reading: {str(n): round(sum(counts[place] for place in range(n)) / whole, 4) for n in NEIGHBORS}
        for reading, counts, whole in zip(("questions", "any", "pairs"), (first, closest, paired), wholes, strict=True)
    }


def _tables(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    tables = []
    for metric in dict.fromkeys(name for cell in cells for name in cell["metrics"]):
        rows: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for cell in cells:
            if metric in cell["metrics"]:
                label = _label(cell["cell"])
                rows[label] |= {"set": label, cell["arm"]: cell["metrics"][metric]["mean"]}
        tables.append({"title": TITLES.get(metric.partition("@")[0], "{}").format(metric), "rows": list(rows.values())})
    near = [cell for cell in cells if "neighbors" in cell]
    found = [
        {"set": cell["cell"]["data"], "arm": cell["arm"], "reading": reading}
        | {f"n = {n}": shares[str(n)] for n in SHOWN_NEIGHBORS}
        for cell in near
        for reading, shares in cell["neighbors"].items()
    ]
    for arm in dict.fromkeys(cell["arm"] for cell in near):
        chosen = [cell["neighbors"] for cell in near if cell["arm"] == arm]
        found += [
            {"set": "mean of sets", "arm": arm, "reading": reading}
            | {f"n = {n}": round(fmean(one[reading][str(n)] for one in chosen), 4) for n in SHOWN_NEIGHBORS}
            for reading in chosen[0]
        ]
    return tables + ([{"title": "Passages found together that are neighbours", "rows": found}] if found else [])


def _label(cell: Mapping[str, str]) -> str:
    return cell["data"] if cell["query"] == "last" else f"{cell['data']}, {cell['query']}"


def _verdict(groups: Mapping[tuple[str, str, str], Sequence[Sample]]) -> list[str]:
    """Each arm against BM25 on the last questions: the mean over sets of the difference in recall, with a 95% interval."""
    sentences = []
    for arm in dict.fromkeys(arm for _, _, arm in groups if arm != "bm25"):
        means, errors = [], []
        for data in dict.fromkeys(data for data, _, _ in groups):
            both = [_recalls(groups.get((data, "last", name), [])) for name in (arm, "bm25")]
            if len(shared := both[0].keys() & both[1].keys()) > 1:
                differences = [both[0][request] - both[1][request] for request in shared]
                means.append(fmean(differences))
                errors.append(variance(differences) / len(differences))
        if means:
            mean, half = 100 * fmean(means), 196 * sqrt(sum(errors)) / len(errors)
            more = "as much as" if abs(mean) <= half else "more than" if mean > 0 else "less than"
            sentences.append(
                f"{arm} finds {more} bm25: recall {mean:+.1f} points [{mean - half:+.1f}, {mean + half:+.1f}], "
                f"mean of {len(means)} sets' last questions."
            )
    return sentences


def _recalls(group: Sequence[Sample]) -> dict[str, float]:
    return {
        sample["request"]: value
        for sample in group
        for name, value in sample["metrics"].items()
        if name.startswith("recall@")
    }
