"""Recall of BM25, vectors and rank fusion on question sets, and overlap of their result lists. No
server.

    python -m eval recall --data DIR [--sets squad nq ...] [--encoder PATH] [--factory IVF64,PQ64]

    set ── an index for each domain ── Retriever ── k ids for each question
        ── one sample: recall, overlap, neighbours

DIR holds a folder for each set: passages.jsonl.gz and questions.jsonl.gz or conversations.jsonl.gz
(eval/data/question_set.py). Passages are not cut. Single questions are shuffled. A conversation's
turn is searched by its question (`last`), its last two questions (`turns:2`) or the set's
self-contained version (`rewrite`).

Overlap compares a list with earlier ones, because only KV that was computed before can be reused
(CRAFT 3.1):

    R1 = [c1 c4 c5 c6 c7]   R2 = [c1 c2 c3 c4 c5]   prefix of R2: 1/5 (c1)   total of R2: 3/5 (c1 c4
                                                                             c5)

`hit` is the share of passages that any earlier list had, `repeated` that an earlier turn of the
conversation had. Neighbours are FusionRAG's figure 7a: how likely passages found together are each
other's n nearest. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, get_args

from eval.data.question_set import read_conversations, read_questions
from eval.data.retrieve import open_index, search
from eval.errors import CommandError
from eval.progress import tracked
from eval.run import Run, Sample, new_folder
from eval.task import TaskData
from retrieval.command_line import Parser

if TYPE_CHECKING:
    from retrieval.encoder import Encoder
    from retrieval.index import Index

SETS = ("squad", "hotpotqa", "2wikimqa", "musique", "nq", "triviaqa", "mtrag")
QUERIES = ("last", "turns:2", "rewrite")
SEED = 0
DIM, NPROBE = 512, 128
"""Of the embedded encoder; lists visited in an IVF index."""
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
    try:
        from eval.outcome import tell
        from retrieval import RetrievalError

        with Run(
            args.out or new_folder("recall"), kind="recall", spec=vars(args), summarize=summarize
        ) as taken:
            _measure(taken, args)
        tell(taken)
    except ImportError as error:
        raise CommandError(f"recall needs the extras `retrieval` and `eval` ({error})") from None
    except RetrievalError as error:
        raise CommandError(str(error)) from None
    return 0


def read_set(folder: Path, queries: Sequence[str], *, limit: int | None) -> dict[str, TaskData]:
    """A set for each kind of query, `last` alone for single questions; the requests' questions are
    the queries.

    Args:
        limit: maximum number of questions, taken after the shuffle; None: all.
    Raises:
        CommandError: a file is missing or invalid.
    """
    if not (path := folder / "conversations.jsonl.gz").exists():
        single = read_questions(folder, folder.name)
        # In the files questions about one passage follow each other: a limit takes a sample.
        requests = random.Random(SEED).sample(single.requests, len(single.requests))
        found = {"last": replace(single, requests=tuple(requests))}
    else:
        turns = read_conversations(path, folder.name)
        known = {"last": lambda: turns, "turns:2": lambda: _last_two(turns)}
        known["rewrite"] = lambda: read_conversations(path, folder.name, field="rewrite")
        found = {query: known[query]() for query in queries}
    return {
        query: replace(asked, requests=asked.requests[:limit]) for query, asked in found.items()
    }


def samples(
    data: TaskData, ranked: Sequence[Sequence[str]], nearest: Mapping[str, Sequence[str]], *, k: int
) -> list[Sample]:
    """One sample for each question.

    Args:
        ranked: the retrieved ids of each question.
        nearest: id -> its nearest ids; empty: not measured.

    Returns:
        `metrics`: those of `overlap`, `recall@k`, the share of the gold passages among the k, and
            `all_gold@k`, 1 if all are.
        `neighbors`: for each passage of a list of two or more, the places of the others among its
            nearest.
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
                [place for place, other in enumerate(nearest.get(one, ())) if other in together]
                for one in together
            ]
        rows.append(row)
    return rows


def overlap(
    ranked: Sequence[Sequence[str]], conversations: Sequence[str | None], *, k: int
) -> list[dict[str, float]]:
    """`prefix`, `total`, `hit` and `repeated` of each list; the first list has no prefix and no
    total.

    Prefix is max_{j<i} LCP(R_i, R_j) / k, total is max_{j<i} |R_i ∩ R_j| / k (CRAFT 3.1).
    """
    # Comparing with all earlier lists would take time quadratic in the number of lists.
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
        # Only now: a list is compared with earlier ones, not with itself.
        for one in set(ids):
            lists_with[one].append(number)
        if conversation is not None:
            shown.setdefault(conversation, set()).update(ids)
        rows.append(row)
    return rows


def summarize(taken: Sequence[Sample]) -> dict[str, Any]:
    """Means of each cell, tables of them, and which arms find more than BM25."""
    import pandas as pd

    # `Run` writes a record before the first search.
    if not taken:
        return {"cells": [], "tables": [], "verdict": []}
    frame = pd.DataFrame(
        [
            row["cell"] | row["metrics"] | {key: row[key] for key in ("arm", "found")}
            for row in taken
        ]
    )
    lists: defaultdict[tuple[Any, ...], list[list[list[int]]]] = defaultdict(list)
    for row in taken:
        if "neighbors" in row:
            lists[(*row["cell"].values(), row["arm"])].append(row["neighbors"])
    metrics = [name for name in frame if name not in ("data", "query", "arm", "found")]
    cells = []
    for (data, query, arm), group in frame.groupby(["data", "query", "arm"], sort=False):
        means = group[metrics].mean()
        # of all that were found
        means["hit"] = (group["hit"] * group["found"]).sum() / max(1, group["found"].sum())
        cell = {"arm": arm, "cell": {"data": data, "query": query}, "n": len(group)}
        cell["metrics"] = {
            str(name): {"mean": round(float(value), 4)} for name, value in means.dropna().items()
        }
        cells.append(cell | {"neighbors": neighbor_shares(lists[data, query, arm])})
    return {"cells": cells, "tables": _tables(cells), "verdict": _verdict(frame)}


def neighbor_shares(lists: Sequence[Sequence[Sequence[int]]]) -> dict[str, dict[str, float]]:
    """Three readings of FusionRAG's figure 7a, by n; empty without lists.

    The paper gives a chance that related chunks are retrieved, over 50% at n = 2 and above 80% at n
    = 10, but does not define it:

        questions   share of questions with at least one pair (a, b) in their list, b among the top
                    n of a
        any         share of found passages with at least one other passage of the same list among
                    their top n
        pairs       share of ordered pairs (a, b), a != b, of the same list with b among the top n
                    of a

    Args:
        lists: for each question, for each passage that was found, the places of the others among
            its nearest, ascending.
    """
    if not lists:
        return {}
    # Lists without a pair count at place max(NEIGHBORS), which is beyond the top n of every n.
    first = Counter(
        min((place for places in one for place in places), default=max(NEIGHBORS)) for one in lists
    )
    closest = Counter(places[0] for one in lists for places in one if places)
    paired = Counter(place for one in lists for places in one for place in places)
    wholes = (len(lists), sum(map(len, lists)), sum(len(one) * (len(one) - 1) for one in lists))
    return {
        reading: {
            str(n): round(sum(counts[place] for place in range(n)) / whole, 4) for n in NEIGHBORS
        }
        for reading, counts, whole in zip(
            ("questions", "any", "pairs"), (first, closest, paired), wholes, strict=True
        )
    }


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval recall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with a folder for each set")
    add("--sets", nargs="+", default=list(SETS), metavar="NAME", help=f"default: {' '.join(SETS)}")
    add(
        "--modes",
        nargs="+",
        choices=get_args(Mode),
        default=list(get_args(Mode)),
        help="default: all",
    )
    add(
        "--query",
        nargs="+",
        choices=QUERIES,
        default=list(QUERIES),
        help="for a turn; default: all",
    )
    add("--k", type=int, default=5, metavar="N", help="passages for each question; default: 5")
    add("--limit", type=int, metavar="N", help="N questions of each set only")
    add(
        "--encoder",
        metavar="PATH",
        help="a sentence-transformers model instead of the embedded encoder",
    )
    add("--factory", default="Flat", metavar="NAME", help="FAISS factory string; default: Flat")
    add(
        "--out", type=Path, metavar="DIR", help="folder of the record; an interrupted run continues"
    )
    return parser


def _measure(run: Run, args: argparse.Namespace) -> None:
    """Take the samples that the run does not have, all of a set, query and mode at once."""
    encoder = _encoder(args.encoder)
    for name in args.sets:
        asked = read_set(args.data / name, args.query, limit=args.limit)
        keys = {
            (query, mode): f"{name} {query} {_arm(mode, encoder)}"
            for query in asked
            for mode in args.modes
        }
        # A cell's samples are added in one write, so its first question tells of all.
        missing = [
            cell
            for cell, key in keys.items()
            if f"{key} {asked[cell[0]].requests[0].id}" not in run
        ]
        if not missing:
            continue
        ranked, nearest = _search(asked, missing, encoder, args)
        for query, mode in missing:
            whole = [ranked[query, mode, request.id] for request in asked[query].requests]
            # Neighbours are of vectors, which BM25 has not.
            wants = mode != "bm25" and query == "last"
            rows = samples(asked[query], whole, nearest if wants else {}, k=args.k)
            place = {"arm": _arm(mode, encoder), "cell": {"data": name, "query": query}}
            run.add_all((f"{keys[query, mode]} {row['request']}", place | row) for row in rows)
            print(f"{keys[query, mode]}: {len(rows)} questions", file=sys.stderr)


def _encoder(path: str | None) -> Encoder | None:
    if path is None:
        return None
    from retrieval.sentence_encoder import SentenceEncoder

    return SentenceEncoder(
        path, device=None, batch_size=32, query_prefix=None, passage_prefix=None, normalize=True
    )


def _arm(mode: str, encoder: Encoder | None) -> str:
    return f"{mode}/{Path(encoder.spec()['model']).name}" if encoder and mode != "bm25" else mode


def _search(
    asked: Mapping[str, TaskData],
    cells: Sequence[tuple[str, Mode]],
    encoder: Encoder | None,
    args: argparse.Namespace,
) -> tuple[dict[tuple[str, str, str], list[str]], dict[str, list[str]]]:
    """The ids by (query, mode, request), and every passage's nearest if they are needed;
    one index for each domain."""
    from retrieval.settings import IndexSettings

    modes = {mode for _, mode in cells}
    settings = IndexSettings(
        is_split=False,
        factory=args.factory,
        bm25_language=None if modes == {"dense"} else "english",  # words need another library
        encoder=encoder.spec() if encoder else {"kind": "hashed", "dim": DIM},
    )
    some = next(iter(asked.values()))
    # Kinds of query leave out different turns: of their union each domain is indexed once.
    requests = tuple(
        {request.id: request for data in asked.values() for request in data.requests}.values()
    )
    domains = {name: domain for data in asked.values() for name, domain in data.domains.items()}
    ranked: dict[tuple[str, str, str], list[str]] = {}
    neighbors: dict[str, list[str]] = {}
    for passages, inside in replace(some, requests=requests, domains=domains).by_domain():
        names = {request.id for request in inside}
        with TemporaryDirectory(prefix="eval-recall-") as folder:
            # One index for all queries and modes: a model needs minutes to encode the passages.
            retriever = open_index(passages, Path(folder), settings, encoder=encoder, seed=SEED)
            for query, mode in cells:
                chosen = [request for request in asked[query].requests if request.id in names]
                questions = [request.question for request in chosen]
                found = search(retriever, questions, k=args.k, mode=mode, nprobe=NPROBE)
                for request, hits in zip(chosen, found, strict=True):
                    ranked[query, mode, request.id] = [hit.passage.id for hit in hits]
            if any(query == "last" and mode != "bm25" for query, mode in cells):
                neighbors |= _nearest(retriever.index)
    return ranked, neighbors


def _nearest(index: Index) -> dict[str, list[str]]:
    from retrieval.neighbors import BATCH_ROWS, nearest

    names = index.store.ids(range(index.num_rows))
    found: dict[str, list[str]] = {}
    for first in tracked("neighbors", range(0, index.num_rows, BATCH_ROWS)):
        last = min(first + BATCH_ROWS, index.num_rows)
        near = nearest(index, first, last, n=max(NEIGHBORS), nprobe=NPROBE)
        found |= {names[row]: [names[other] for other in others] for row, others in near.items()}
    return found


def _last_two(turns: TaskData) -> TaskData:
    """Each turn searched by its conversation's last two questions, the older first,
    one in a line."""
    asked: dict[str | None, str] = {}
    requests = []
    for request in turns.requests:
        before = asked.get(request.conversation)
        requests.append(
            replace(
                request, question=f"{before}\n{request.question}" if before else request.question
            )
        )
        asked[request.conversation] = request.question
    return replace(turns, requests=tuple(requests))


def _tables(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A table per metric, with a row per set and query and a column per arm,
    and one of the neighbours."""
    import pandas as pd

    from eval.outcome import table

    rows, near = [], []
    for cell in cells:
        data, query = cell["cell"]["data"], cell["cell"]["query"]
        about = {"set": data if query == "last" else f"{data}, {query}", "arm": cell["arm"]}
        rows.append(
            about | {metric: figures["mean"] for metric, figures in cell["metrics"].items()}
        )
        for reading, by_n in cell["neighbors"].items():
            near.append(
                {**about, "reading": reading} | {f"n = {n}": by_n[str(n)] for n in SHOWN_NEIGHBORS}
            )
    frame, tables = pd.DataFrame(rows), list[dict[str, Any]]()
    for metric in sorted(frame.columns.drop(["set", "arm"]), key=lambda name: "@" not in name):
        wide = frame.pivot_table(index="set", columns="arm", values=metric, sort=False)
        # Other queries than the last question are asked of conversations only: a mean with
        # them would weigh conversations more than the other sets.
        sets = wide[[", " not in name for name in wide.index]]
        if len(sets) > 1:
            wide.loc["mean of sets"] = sets.mean()
        # NaN is no JSON; a column of floats would turn None into it again.
        told = wide.round(4).astype(object).where(wide.notna(), None).reset_index()
        tables.append(table(metric, _records(told), NOTES.get(metric)))
    if near:
        frame = pd.DataFrame(near)
        means = (
            frame.drop(columns="set")
            .groupby(["arm", "reading"], sort=False)
            .mean()
            .round(4)
            .reset_index()
        )
        near += _records(means.assign(set="mean of sets")) if frame["set"].nunique() > 1 else []
        tables.append(table("passages found together that are neighbours", near))
    return tables


def _records(frame: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = frame.to_dict("records")
    return rows


def _verdict(frame: Any) -> list[str]:
    """Each arm against BM25 on the last questions:
    the mean over sets of the difference in recall, with a 95% interval."""
    recall = next((name for name in frame if name.startswith("recall@")), None)
    if recall is None or "bm25" not in set(frame["arm"]):
        return []
    asked = frame[frame["query"] == "last"].copy()
    # the same questions in the same order
    asked["place"] = asked.groupby(["data", "arm"]).cumcount()
    table = asked.pivot(index=["data", "place"], columns="arm", values=recall)
    sentences = []
    for arm in (name for name in dict.fromkeys(frame["arm"]) if name != "bm25" and name in table):
        differences = (100 * (table[arm] - table["bm25"])).dropna().groupby("data")
        mean = differences.mean().mean()
        # Each set weighs the same, whatever its size: the variances of the sets' means add up.
        half = (
            1.96
            * (differences.var() / differences.count()).sum() ** 0.5
            / max(1, differences.ngroups)
        )
        more = (
            "finds more"
            if mean > half
            else "finds less"
            if mean < -half
            else "differs by no more than chance"
        )
        sentences.append(
            f"{arm} against bm25: {more} ({recall} {mean:+.1f} points [{mean - half:+.1f},"
            f" {mean + half:+.1f}], mean of {differences.ngroups} sets, last questions)."
        )
    return sentences
