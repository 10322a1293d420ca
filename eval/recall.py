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
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, get_args

from eval.data.question_set import read_conversations, read_questions
from eval.data.retrieve import open_index, search
from eval.errors import CommandError
from eval.run import Run, Sample, new_folder
from eval.task import TaskData

if TYPE_CHECKING:
    from retrieval.encoder import Encoder
    from retrieval.index import Index

SETS = ("squad", "hotpotqa", "2wikimqa", "musique", "nq", "triviaqa", "mtrag")
FILES = ("questions.jsonl.gz", "conversations.jsonl.gz")
Mode = Literal["bm25", "dense", "fusion"]
NEIGHBORS = range(2, 16)
"""Numbers of neighbours for which FusionRAG's figure 7a is measured."""
SHOWN_NEIGHBORS = (2, 3, 5, 10, 15)
NOTES = {
    "prefix": "Share of a list that is a prefix of the best matching earlier list.",
    "total": "Share of a list that the best matching earlier list contains.",
    "repeated": "Share of a turn's list that earlier turns of the conversation had.",
}


def main(argv: Sequence[str]) -> int:
    """Ask all questions, print tables and the verdict; returns the exit code."""
    args = _parser().parse_args(argv)
    for name in ("k", "nprobe", "limit", "dim"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise CommandError(f"--{name} must be at least 1, got {getattr(args, name)}")
    try:
        from eval.outcome import tell
        from retrieval import RetrievalError

        with Run(args.out or new_folder("recall"), kind="recall", spec=vars(args), summarize=summarize) as taken:
            _measure(taken, args)
        tell(taken)
    except ImportError as error:
        raise CommandError(f"recall needs the extras `retrieval` and `eval` ({error})") from None
    except RetrievalError as error:
        raise CommandError(str(error)) from None
    return 0


def read_set(data: Path, name: str, queries: Sequence[str], *, seed: int, limit: int | None) -> dict[str, TaskData]:
    """A set for each kind of query, `last` alone for single questions; the requests' questions are the queries.

    Args:
        name: a folder of `data`, or a file in such a folder.
        limit: maximum number of questions, taken after the shuffle; None: all.
    Raises:
        CommandError: a file is missing or invalid, or a gold passage is not among those that its question searches.
    """
    path = data / name
    if not path.is_file():
        path /= next((file for file in FILES if (path / file).exists()), FILES[0])
    if path.name == FILES[0]:
        single = read_questions(path.parent, name)
        shuffled = list(single.requests)
        random.Random(seed).shuffle(shuffled)
        found = {"last": replace(single, requests=tuple(shuffled))}
    else:
        turns = read_conversations(path, name)
        found = {query: _last(turns, query) for query in queries if query != "rewrite"}
        if "rewrite" in queries:
            found["rewrite"] = read_conversations(path, name, field="rewrite")
    for query, asked in found.items():
        if not asked.requests:
            raise CommandError(f"{path}: no " + ("rewrites" if query == "rewrite" else "questions"))
        for request in asked.requests:
            domain = asked.domains.get(request.id, "")
            if wrong := [gold for gold in request.gold_ids if asked.domains.get(gold, "") != domain and domain]:
                raise CommandError(f"{path}: {request.id}: gold passage {wrong[0]!r} is not of domain {domain!r}")
    return {query: replace(asked, requests=asked.requests[:limit]) for query, asked in found.items()}


def samples(
    data: TaskData, ranked: Sequence[Sequence[str]], nearest: Mapping[str, Sequence[str]], *, k: int
) -> list[Sample]:
    """One sample for each question.

    Args:
        ranked: the retrieved ids of each question.
        nearest: id -> its nearest ids; empty: not measured.

    Returns:
        `metrics`: those of `overlap`, `recall@k`, the share of the gold passages among the k, and `all_gold@k`, 1 if all are.
        `neighbors`: for each passage of a list of two or more, the places of the others among its nearest.
    """
    first: dict[tuple[str, str], str] = {}  # of equal texts of a domain the index keeps the first
    kept = {
        passage.id: first.setdefault((data.domains.get(passage.id, ""), passage.text), passage.id)
        for passage in data.passages
    }
    rows = []
    overlaps = overlap(ranked, [request.conversation for request in data.requests], k=k)
    for request, ids, metrics in zip(data.requests, ranked, overlaps, strict=True):
        if gold := {kept[name] for name in request.gold_ids}:
            share = len(gold.intersection(ids)) / len(gold)
            metrics |= {f"recall@{k}": share, f"all_gold@{k}": float(share == 1)}
        rounded = {name: round(value, 6) for name, value in metrics.items()}
        row: Sample = {"request": request.id, "metrics": rounded, "found": len(ids)}
        together = dict.fromkeys(ids)
        if nearest and len(together) > 1:
            row["neighbors"] = [
                [place for place, other in enumerate(nearest.get(one, ())) if other in together] for one in together
            ]
        rows.append(row)
    return rows


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
    """Means of each cell, tables of them, and which arms find more than BM25."""
    import pandas as pd

    if not taken:
        return {"cells": [], "tables": [], "verdict": []}
    frame = pd.DataFrame([row["cell"] | row["metrics"] | {key: row[key] for key in ("arm", "found")} for row in taken])
    lists: defaultdict[tuple[Any, ...], list[list[list[int]]]] = defaultdict(list)
    for row in taken:
        if "neighbors" in row:
            lists[(*row["cell"].values(), row["arm"])].append(row["neighbors"])
    metrics = [name for name in frame if name not in ("data", "query", "arm", "found")]
    cells = []
    for (data, query, arm), group in frame.groupby(["data", "query", "arm"], sort=False):
        means = group[metrics].mean()
        means["hit"] = (group["hit"] * group["found"]).sum() / max(1, group["found"].sum())  # of all that were found
        cell = {"arm": arm, "cell": {"data": data, "query": query}, "n": len(group)}
        cell["metrics"] = {str(name): {"mean": round(float(value), 4)} for name, value in means.dropna().items()}
        cells.append(cell | {"neighbors": neighbor_shares(lists[data, query, arm])})
    return {"cells": cells, "tables": _tables(cells), "verdict": _verdict(frame)}


def neighbor_shares(lists: Sequence[Sequence[Sequence[int]]]) -> dict[str, dict[str, float]]:
    """Three readings of FusionRAG's figure 7a, by n; empty without lists.

    The paper gives a chance that related chunks are retrieved, over 50% at n = 2 and above 80% at n = 10, but does not define it:

        questions    share of questions with at least one pair (a, b) in their list, b among the top n of a
        any          share of found passages with at least one other passage of the same list among their top n
        pairs        share of ordered pairs (a, b), a != b, of the same list with b among the top n of a

    Args:
        lists: for each question, for each passage that was found, the places of the others among its nearest, ascending.
    """
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


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval recall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with a folder for each set")
    add("--sets", nargs="+", default=list(SETS), metavar="NAME", help=f"default: {' '.join(SETS)}")
    add("--modes", nargs="+", choices=get_args(Mode), default=list(get_args(Mode)), help="default: all")
    queries = ["last", "turns:2", "rewrite"]
    add("--query", nargs="+", type=_query, default=queries, help=f"for a turn; default: {' '.join(queries)}")
    add("--k", type=int, default=5, metavar="N", help="passages for each question; default: 5")
    add("--limit", type=int, metavar="N", help="N questions of each set only")
    add("--seed", type=int, default=0, metavar="N", help="of the order of single questions")
    add("--encoder", metavar="PATH", help="a sentence-transformers model instead of the embedded encoder")
    add("--dim", type=int, default=512, metavar="N", help="dimensions of the embedded encoder; default: 512")
    add("--factory", default="Flat", metavar="NAME", help="FAISS factory string; default: Flat")
    add("--nprobe", type=int, default=128, metavar="N", help="lists visited in an IVF index; default: 128")
    add("--out", type=Path, metavar="DIR", help="folder of the record; an interrupted run continues")
    return parser


def _query(word: str) -> str:
    kind, _, number = word.partition(":")
    if word not in ("last", "rewrite") and not (kind == "turns" and number.isdecimal() and int(number)):
        raise argparse.ArgumentTypeError(f"must be last, rewrite or turns:N with N at least 1, got {word!r}")
    return word


def _measure(run: Run, args: argparse.Namespace) -> None:
    """Take the samples that the run does not have, all of a set, query and mode at once."""
    encoder = _encoder(args.encoder)
    for name in args.sets:
        asked = read_set(args.data, name, args.query, seed=args.seed, limit=args.limit)
        keys = {(query, mode): f"{name} {query} {_arm(mode, encoder)}" for query in asked for mode in args.modes}
        missing = [cell for cell, key in keys.items() if f"{key} {asked[cell[0]].requests[0].id}" not in run]
        if not missing:
            continue
        ranked, nearest = _search(asked, missing, encoder, args)
        for query, mode in missing:
            found = [ranked[query, mode, request.id] for request in asked[query].requests]
            wants = mode != "bm25" and query == "last"
            rows = samples(asked[query], found, nearest if wants else {}, k=args.k)
            place = {"arm": _arm(mode, encoder), "cell": {"data": name, "query": query}}
            run.add_all((f"{keys[query, mode]} {row['request']}", place | row) for row in rows)
            print(f"{keys[query, mode]}: {len(rows)} questions", file=sys.stderr)


def _encoder(path: str | None) -> Encoder | None:
    if path is None:
        return None
    from retrieval.sentence_encoder import SentenceEncoder

    return SentenceEncoder(path, device=None, batch_size=32, query_prefix=None, passage_prefix=None, normalize=True)


def _arm(mode: str, encoder: Encoder | None) -> str:
    return f"{mode}/{Path(encoder.spec()['model']).name}" if encoder and mode != "bm25" else mode


def _search(
    asked: Mapping[str, TaskData], cells: Sequence[tuple[str, Mode]], encoder: Encoder | None, args: argparse.Namespace
) -> tuple[dict[tuple[str, str, str], list[str]], dict[str, list[str]]]:
    """The ids by (query, mode, request), and every passage's nearest if they are needed; one index for each domain."""
    from retrieval.settings import IndexSettings

    modes = {mode for _, mode in cells}
    settings = IndexSettings(
        is_split=False,
        factory=args.factory,
        bm25_language=None if modes == {"dense"} else "english",  # words need another library
        encoder=encoder.spec() if encoder else {"kind": "hashed", "dim": args.dim},
    )
    some = next(iter(asked.values()))
    requests = tuple({request.id: request for data in asked.values() for request in data.requests}.values())
    domains = {name: domain for data in asked.values() for name, domain in data.domains.items()}
    ranked: dict[tuple[str, str, str], list[str]] = {}
    neighbors: dict[str, list[str]] = {}
    for passages, inside in replace(some, requests=requests, domains=domains).by_domain():
        names = {request.id for request in inside}
        with TemporaryDirectory(prefix="eval-recall-") as folder:
            retriever = open_index(passages, Path(folder), settings, encoder=encoder, seed=args.seed)
            for query, mode in cells:
                chosen = [request for request in asked[query].requests if request.id in names]
                questions = [request.question for request in chosen]
                found = search(retriever, questions, k=args.k, mode=mode, nprobe=args.nprobe)
                for request, hits in zip(chosen, found, strict=True):
                    ranked[query, mode, request.id] = [hit.passage.id for hit in hits]
            if any(query == "last" and mode != "bm25" for query, mode in cells):
                neighbors |= _nearest(retriever.index, nprobe=args.nprobe)
    return ranked, neighbors


def _nearest(index: Index, *, nprobe: int) -> dict[str, list[str]]:
    from retrieval.neighbors import BATCH_ROWS, nearest

    names = index.store.ids(range(index.num_rows))
    found: dict[str, list[str]] = {}
    for first in range(0, index.num_rows, BATCH_ROWS):
        last = min(first + BATCH_ROWS, index.num_rows)
        near = nearest(index, first, last, n=max(NEIGHBORS), nprobe=nprobe)
        found |= {names[row]: [names[other] for other in others] for row, others in near.items()}
    return found


def _last(turns: TaskData, query: str) -> TaskData:
    """Each turn searched by its conversation's last questions, oldest first, one in a line."""
    num = 1 if query == "last" else int(query.removeprefix("turns:"))
    asked: defaultdict[str | None, list[str]] = defaultdict(list)
    requests = []
    for request in turns.requests:
        asked[request.conversation].append(request.question)
        requests.append(replace(request, question="\n".join(asked[request.conversation][-num:])))
    return replace(turns, requests=tuple(requests))


def _tables(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A table per metric, with a row per set and query and a column per arm, and one of the neighbours."""
    rows: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    near: list[dict[str, Any]] = []
    for cell in cells:
        data, query = cell["cell"]["data"], cell["cell"]["query"]
        name = data if query == "last" else f"{data}, {query}"
        for metric, figures in cell["metrics"].items():
            rows[metric].setdefault(name, {"set": name})[cell["arm"]] = figures["mean"]
        for reading, shares in cell["neighbors"].items():
            shown = {f"n = {n}": shares[str(n)] for n in SHOWN_NEIGHBORS}
            near.append({"set": data, "arm": cell["arm"], "reading": reading} | shown)
    tables: list[dict[str, Any]] = []
    for metric in sorted(rows, key=lambda name: "@" not in name):
        found = [*rows[metric].values()]
        note = {"note": NOTES[metric]} if metric in NOTES else {}
        means = _mean([row for row in found if ", " not in row["set"]])
        tables.append({"title": metric, "rows": found + means, **note})
    kinds = dict.fromkeys((row["arm"], row["reading"]) for row in near)
    near += [one for kind in kinds for one in _mean([row for row in near if (row["arm"], row["reading"]) == kind])]
    return tables + ([{"title": "passages found together that are neighbours", "rows": near}] if near else [])


def _mean(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row of the numbers' means over sets; none for a single set."""
    if len(rows) < 2:
        return []
    means = {
        name: round(fmean(row[name] for row in rows if name in row), 4) if isinstance(value, float) else value
        for name, value in rows[0].items()
    }
    return [means | {"set": "mean of sets"}]


def _verdict(frame: Any) -> list[str]:
    """Each arm against BM25 on the last questions: the mean over sets of the difference in recall, with a 95% interval."""
    recall = next((name for name in frame if name.startswith("recall@")), None)
    if recall is None or "bm25" not in set(frame["arm"]):
        return []
    asked = frame[frame["query"] == "last"].copy()
    asked["place"] = asked.groupby(["data", "arm"]).cumcount()  # the same questions in the same order
    table = asked.pivot(index=["data", "place"], columns="arm", values=recall)
    sentences = []
    for arm in (name for name in dict.fromkeys(frame["arm"]) if name != "bm25" and name in table):
        differences = (100 * (table[arm] - table["bm25"])).dropna().groupby("data")
        mean = differences.mean().mean()
        half = 1.96 * (differences.var() / differences.count()).sum() ** 0.5 / max(1, differences.ngroups)
        more = "finds more" if mean > half else "finds less" if mean < -half else "differs by no more than chance"
        sentences.append(
            f"{arm} against bm25: {more} ({recall} {mean:+.1f} points [{mean - half:+.1f}, {mean + half:+.1f}], "
            f"mean of {differences.ngroups} sets, last questions)."
        )
    return sentences
