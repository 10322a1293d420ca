"""Fill a running server's chunk store ahead of requests: every chunk alone, then after its nearest neighbours.

    python -m sglang_chunkcache.preprocess --url http://127.0.0.1:30000 --corpus corpus.jsonl --neighbors neighbors.jsonl

A chunk computed after texts that resemble it has attended to texts that are likely to come before it in a prompt. FusionRAG
(3.1) replaces by it the attention that moving a chunk leaves out. The first pass stores every chunk alone; the second moves
these to a chunk's neighbours' places (eq. 10) and computes the chunk after them. Needs a server started with `--reuse fused`, and
two prefills per chunk.

A neighbour that the store and the KV pool have lost meanwhile is loaded from the server's storage, or computed alone again. Where
one cannot be held even then it is missing, and the chunk is not stored: what it became would depend on the order of the corpus.
Of chunks that were in flight together those are tried once more, one at a time.

Cut off, the command or the server, it is started again: what store or storage have is kept and not computed.

    corpus      {"id": "d1", "text": "..."}                          one JSON object a line; may be gzipped
    neighbors   {"id": "d1", "neighbors": ["d7", "d3", ...]}         nearest first; a chunk without a line has none

Progress goes to stderr; the last line of stdout is one JSON object. Exit codes:

    0   every chunk is there; --plan: all would fit
    1   single chunks were refused, for example because they are too long together with their neighbours, a larger share of the
        neighbours than --max-missing was missing, chunks left the KV pool before they were stored, or the storage has failed;
        --plan: the storage, or the store of a server without one, is too small
    2   a mistake in files or flags, or a server that does not answer
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from radix_ext.filling import Filling
from radix_ext.variants import VariantIndex
from sglang_chunkcache.client import Client, RefusedError, ServerError, settle

T = TypeVar("T")

DEFAULT_BATCH = 8
"""Requests in flight: with ten neighbours of 256 tokens they need 23,000 slots of the KV pool. More bring little on
a CPU."""
MAX_BATCH = 64
"""The server drafts that many long requests at most (`front/draft_queue.py`)."""
PLANNED = 32
"""Chunks behind their neighbours that --plan measures."""
PROGRESS_S = 5.0
MAX_NAMED = 5
"""Refused chunks named on stderr; all are counted."""
PROBLEMS = ("failed", "paused")
"""Of a storage: it has not done what it was asked for."""


@dataclass
class Pass:
    """One run over chunks."""

    chunks: int = 0
    """Computed."""
    kept: int = 0
    """The server had them."""
    chunk_tokens: int = 0
    """Of both."""
    seconds: float = 0.0
    """Until the last answer."""
    refused: list[str] = field(default_factory=list)
    neighbors: Counter[str] = field(default_factory=lambda: Counter(moved=0, computed=0, missing=0))

    @property
    def rate(self) -> float | None:
        """Chunks a second. None: nothing was computed."""
        return self.chunks / self.seconds if self.chunks else None

    def add(self, answer: Mapping[str, Any]) -> None:
        """Count what the server has done."""
        self.kept += answer["kept"]
        self.chunks += not answer["kept"]
        self.chunk_tokens += answer["chunk_tokens"]
        self.neighbors.update(answer["neighbors"])

    def summary(self) -> dict[str, Any]:
        """For the JSON line."""
        return {
            "chunks": self.chunks,
            "kept": self.kept,
            "chunk_tokens": self.chunk_tokens,
            "seconds": round(self.seconds, 3),
            "chunks_per_s": self.rate and round(self.rate, 3),
            "refused": len(self.refused),
            "neighbors": self.neighbors,
        }


def main(argv: Sequence[str]) -> int:
    """Run both passes; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.top_n < 1:
        parser.error("--top-n: must be at least 1")
    if not 0 <= args.max_missing <= 1:
        parser.error("--max-missing: must be from 0 to 1")
    if not 1 <= args.batch <= MAX_BATCH:
        parser.error(f"--batch: must be from 1 to {MAX_BATCH}")
    if args.plan is not None and args.plan < 1:
        parser.error("--plan: must be at least 1")
    has_bar = sys.stderr.isatty() and not args.json
    options = {"top_n": args.top_n, "system": args.system, "batch": args.batch, "has_bar": has_bar}
    try:
        client = Client(args.url, args.api_key, max_connections=args.batch)
        if args.plan is not None:
            result = plan(client, args.corpus, args.neighbors, measured=args.plan, **options)
        else:
            texts = read_corpus(args.corpus)
            result = preprocess(client, texts, read_neighbors(args.neighbors, texts), **options)
    except ServerError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if not args.json:
        print("\n".join(_table(result)))
    print(json.dumps(result))
    troubles = list(_troubles(result, args.max_missing))
    for trouble in troubles:
        print(f"{parser.prog}: {trouble}", file=sys.stderr)
    return int(bool(troubles or result["alone"]["refused"] or result["behind_neighbors"]["refused"]))


def read_corpus(path: Path) -> dict[str, str]:
    """Texts by id, in the file's order. Raises ServerError naming file and line."""
    return _read_corpus(path, lambda name, text: text)


def read_neighbors(path: Path, known: Iterable[str]) -> dict[str, list[str]]:
    """Ids of the neighbours, nearest first, by id; the strings are those `known`. Raises ServerError naming file and line."""
    names = {name: name for name in known}
    neighbors: dict[str, list[str]] = {}
    for where, row in _rows(path):
        name, listed = _id_of(row, where), row.get("neighbors")
        if name not in names:
            raise ServerError(f"{where}: id {name!r} is not in the corpus")
        if name in neighbors:
            raise ServerError(f"{where}: id {name!r} occurs twice")
        if not isinstance(listed, list) or not all(_is_id(item) for item in listed):
            raise ServerError(f"{where}: neighbors must be a list of ids")
        ids = [str(item) for item in listed]
        if unknown := next((item for item in ids if item not in names), None):
            raise ServerError(f"{where}: neighbor {unknown!r} is not in the corpus")
        neighbors[names[name]] = [names[item] for item in dict.fromkeys(ids) if item != name]
    return neighbors


def preprocess(
    client: Client,
    texts: Mapping[str, str],
    neighbors: Mapping[str, Sequence[str]],
    *,
    top_n: int,
    system: str | None = None,
    batch: int = DEFAULT_BATCH,
    has_bar: bool = False,
) -> dict[str, Any]:
    """Compute every chunk alone, then each chunk that has neighbours after the `top_n` nearest, `batch` requests at a time;
    returns the JSON line's object.

    Raises:
        ServerError: a server that does not answer, or one that was not started with `--reuse fused`.
    """
    stats = client.get("/chunkcache/stats")
    if stats.get("reuse") != "fused":
        raise ServerError(f"{client.url}: not a server started with --reuse fused")
    messages = [{"role": "system", "content": system}] if system else []

    def post(chunk: str, before: Sequence[str]) -> dict[str, Any] | RefusedError:
        body = {
            "chunk": {"id": chunk, "text": texts[chunk]},
            "neighbors": [{"id": item, "text": texts[item]} for item in before if texts[item] != texts[chunk]],
            "messages": messages,
        }
        try:
            return client.post("/chunkcache/preprocess", body)
        except RefusedError as error:
            return error

    def run(name: str, work: Mapping[str, Sequence[str]]) -> Pass:
        done, again = Pass(), list[str]()
        started = time.monotonic()
        with _Progress(name, len(work), has_bar=has_bar) as progress:
            for num, chunks in ((batch, work), (1, again)):
                for chunk, answer in _answers(lambda chunk: post(chunk, work[chunk]), chunks, num):
                    if isinstance(answer, RefusedError):
                        done.refused.append(chunk)
                        if len(done.refused) <= MAX_NAMED:
                            progress.tell(f"{name}: {chunk!r} is refused: {answer}")
                    elif num > 1 and answer["neighbors"].get("missing"):
                        again.append(chunk)
                        continue
                    else:
                        done.add(answer)
                    progress.update()
            done.seconds = time.monotonic() - started
            settle(client)
        return done

    alone = run("alone", dict.fromkeys(texts, ()))
    behind = run("after neighbors", {chunk: neighbors[chunk][:top_n] for chunk in texts if neighbors.get(chunk)})
    before, after = stats["ranks"], client.get("/chunkcache/stats")["ranks"]
    return {
        "url": client.url,
        "top_n": top_n,
        "batch": batch,
        "alone": alone.summary(),
        "behind_neighbors": behind.summary(),
        "lost": sum(rank["store"]["dropped"] for rank in after) - sum(rank["store"]["dropped"] for rank in before),
        "unwritten": _num_problems(after) - _num_problems(before),
        "stores": [rank["store"] for rank in after],
        "storages": [rank["storage"] for rank in after if "storage" in rank],
    }


def plan(client: Client, corpus: Path, neighbors: Path, *, measured: int, top_n: int, **options: Any) -> dict[str, Any]:
    """`preprocess` the first `measured` chunks that have neighbours, with these. Tells as `plan` what all would take, which is
    simulated request by request on an empty store and storage of the server's size. No more of the corpus is kept in memory than
    lengths and ids.

    Raises:
        ServerError: as `preprocess`.
    """
    lengths = _read_corpus(corpus, lambda name, text: len(text))
    listed = {name: near[:top_n] for name, near in read_neighbors(neighbors, lengths).items() if near}
    first = {name: listed[name] for name in _first(measured, (name for name in lengths if name in listed))}
    needed = {*_first(measured, lengths), *first, *(name for near in first.values() for name in near)}
    found = _read_corpus(corpus, lambda name, text: text if name in needed else "")
    result = preprocess(client, {name: text for name, text in found.items() if text}, first, top_n=top_n, **options)
    num_chars = sum(lengths[name] for name in needed)
    return {**result, "plan": _estimate(result, lengths, listed, num_chars, has_bar=options.get("has_bar", False))}


# Private, in order of use


def _answers(post: Callable[[str], T], chunks: Iterable[str], num: int) -> Iterator[tuple[str, T]]:
    """(chunk, answer) as they come, `num` in flight."""
    with ThreadPoolExecutor(num) as pool:
        waiting: dict[Future[T], str] = {}
        for chunk in chunks:
            waiting[pool.submit(post, chunk)] = chunk
            if len(waiting) == num:
                yield from _next_of(waiting)
        while waiting:
            yield from _next_of(waiting)


def _next_of(waiting: dict[Future[T], str]) -> Iterator[tuple[str, T]]:
    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
        yield waiting.pop(future), future.result()


class _Progress:
    """A bar on stderr, or a line every PROGRESS_S: how many are done, how fast, and the time left."""

    def __init__(self, name: str, total: int, *, has_bar: bool) -> None:
        self._name = name
        self._bar = tqdm(
            total=total, desc=name, unit=" chunks", dynamic_ncols=True, file=sys.stderr, disable=not has_bar
        )
        self._total, self._num, self._last = total, 0, (time.monotonic(), 0)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self) -> None:
        """One more is done."""
        self._num += 1
        self._bar.update()
        now, (last_s, last_num) = time.monotonic(), self._last
        if self._bar.disable and now - last_s > PROGRESS_S:
            rate, self._last = (self._num - last_num) / (now - last_s), (now, self._num)
            left = tqdm.format_interval((self._total - self._num) / rate)
            self.tell(f"{self._name}: {self._num}/{self._total}, {rate:.1f} chunks/s, {left} left")

    def tell(self, line: str) -> None:
        """A line of its own."""
        self._bar.write(line, file=sys.stderr)


def _num_problems(ranks: Iterable[Mapping[str, Any]]) -> int:
    storages = [rank["storage"] for rank in ranks if "storage" in rank]
    return sum(each["unwritten"] + sum(each["problems"].get(name, 0) for name in PROBLEMS) for each in storages)


def _first(num: int, names: Iterable[str]) -> list[str]:
    return list(islice(names, num))


def _estimate(
    result: Mapping[str, Any],
    lengths: Mapping[str, int],
    listed: Mapping[str, Sequence[str]],
    num_chars: int,
    *,
    has_bar: bool,
) -> dict[str, Any]:
    """What all takes, by the tokens a character and the chunks a second of `result`, which has read `num_chars` characters."""
    tokens_a_char = result["alone"]["chunk_tokens"] / num_chars
    num_tokens = tokens_a_char * (sum(lengths.values()) + sum(lengths[name] for name in listed))
    kept = result["storages"] or result["stores"]
    token_bytes = result["stores"][0]["token_bytes"]
    num_bytes = {name: round(tokens_a_char * length * token_bytes) for name, length in lengths.items()}
    simulated = _simulated(result["stores"], result["storages"], num_bytes, listed, has_bar=has_bar)
    nums = len(lengths) + simulated["neighbors_again"], len(listed)
    rates = result["alone"]["chunks_per_s"], result["behind_neighbors"]["chunks_per_s"]
    parts = [num and (num / rate if rate else None) for num, rate in zip(nums, rates, strict=True)]
    return {
        "chunks": len(lengths),
        "with_neighbors": len(listed),
        "neighbors": sum(map(len, listed.values())),
        "requests": len(lengths) + len(listed),
        "tokens": round(num_tokens),
        "bytes": round(num_tokens * token_bytes),
        "max_bytes": min(each["max_bytes"] for each in kept),
        "max_entries": min(each["max_entries"] for each in kept),
        "seconds": None if None in parts else round(sum(part for part in parts if part)),
        "simulated": simulated,
    }


def _simulated(
    stores: Sequence[Mapping[str, Any]],
    storages: Sequence[Mapping[str, Any]],
    num_bytes: Mapping[str, int],
    listed: Mapping[str, Sequence[str]],
    *,
    has_bar: bool,
) -> dict[str, Any]:
    """Both passes on the smallest of these, and once more: with a storage on a server that was started anew."""

    def create(sizes: Sequence[Mapping[str, Any]]) -> VariantIndex:
        max_bytes, max_entries = (min(each[name] for each in sizes) for name in ("max_bytes", "max_entries"))
        max_variants = stores[0]["max_variants"]
        return VariantIndex(
            max_bytes=max_bytes, max_chunks=max_entries // max_variants, max_variants=max_variants, window=1
        )

    def run(filling: Filling) -> Filling:
        for near in (dict.fromkeys(num_bytes, ()), listed):
            for chunk in num_bytes:
                if chunk in near:
                    filling.request(chunk, near[chunk])
                    progress.update()
        return filling

    storage = create(storages) if storages else None
    with _Progress("simulated", 2 * (len(num_bytes) + len(listed)), has_bar=has_bar) as progress:
        first = run(Filling(create(stores), storage, num_bytes))
        held = (storage or first.store).stats()
        again = run(Filling(create(stores) if storages else first.store, storage, num_bytes))
    return {
        "entries": held.num_variants,
        "bytes": held.num_bytes,
        "evicted": held.num_evicted,
        "neighbors_loaded": first.counts.loads,
        "neighbors_again": first.counts.again,
        "started_again": {"kept": again.counts.kept, "computed": again.counts.computed},
    }


def _table(result: Mapping[str, Any]) -> Iterator[str]:
    for name in ("alone", "behind_neighbors"):
        one = result[name]
        if one["chunks"] or one["kept"]:
            rate = f"{one['chunks_per_s']:9.1f} chunks/s" if one["chunks"] else ""
            yield f"{name.replace('_', ' '):17} {one['chunks']:7} chunks {rate:18} {one['kept']:7} kept"
    found = result["behind_neighbors"]["neighbors"]
    yield "neighbors         " + ", ".join(f"{number} {kind}" for kind, number in found.items())
    if "plan" in result:
        told = result["plan"]
        left = (
            "unknown, all measured chunks were kept"
            if told["seconds"] is None
            else tqdm.format_interval(told["seconds"])
        )
        yield f"plan              {told['requests']} requests, {told['chunks']} chunks, {told['neighbors']} neighbors"
        yield f"                  {told['tokens']} tokens, {told['bytes'] / 2**20:.0f} of {told['max_bytes'] / 2**20:.0f} MiB"
        yield f"                  {told['requests']} of {told['max_entries']} entries"
        yield f"                  time {left}"
        found = told["simulated"]
        again = found["started_again"]
        yield f"simulated         {found['entries']} entries, {found['bytes'] / 2**20:.0f} MiB, {found['evicted']} evicted"
        yield f"                  neighbors: {found['neighbors_loaded']} loaded, {found['neighbors_again']} computed again"
        yield f"                  started again: {again['kept']} kept, {again['computed']} computed"


def _troubles(result: Mapping[str, Any], max_missing: float) -> Iterator[str]:
    """What makes the command fail, beside refused chunks."""
    found = result["behind_neighbors"]["neighbors"]
    if found["missing"] > max_missing * sum(found.values()):
        share = found["missing"] / sum(found.values())
        yield (
            f"{share:.1%} of the neighbors were missing, more than --max-missing {max_missing:.1%}: "
            "enlarge the server's KV pool (--mem-fraction-static, --max-total-tokens) or its store "
            "(--chunkcache-store-mib), or lower --top-n"
        )
    if lost := result["lost"]:
        yield f"{lost} chunks did not get into a store: they left the KV pool before; start the command again"
    if unwritten := result["unwritten"]:
        yield f"the storage has failed, or not taken an entry, {unwritten} times; start the command again"
    if told := result.get("plan"):
        flag = "--chunkcache-storage-mib" if result["storages"] else "--chunkcache-store-mib"
        if told["bytes"] > told["max_bytes"]:
            yield f"too small: {flag} {math.ceil(told['bytes'] / 2**20)} is needed"
        if told["requests"] > told["max_entries"]:
            yield f"too few entries: raise --chunkcache-store-chunks by the factor {told['requests'] / told['max_entries']:.1f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_chunkcache.preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", required=True, help="the server, for example http://127.0.0.1:30000")
    parser.add_argument("--corpus", type=Path, required=True, help="chunks, one JSON object a line")
    parser.add_argument("--neighbors", type=Path, required=True, help="their neighbors, one JSON object a line")
    parser.add_argument("--top-n", type=int, default=10, help="neighbors before a chunk; default: %(default)s")
    parser.add_argument(
        "--batch",
        type=int,
        default=DEFAULT_BATCH,
        metavar="N",
        help="requests in flight; the KV pool should hold as many chunks with their neighbors; default: %(default)s",
    )
    parser.add_argument(
        "--plan",
        type=int,
        nargs="?",
        const=PLANNED,
        metavar="N",
        help="do the first N chunks that have neighbors, with these, and tell what all would take; N: %(const)s",
    )
    parser.add_argument(
        "--max-missing",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="share of the neighbors that may be missing, 0 to 1; default: %(default)s",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of the prompts; default: none")
    parser.add_argument("--api-key", metavar="KEY", help="the API key of the server, or its admin key if it has one")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    return parser


def _read_corpus(path: Path, keep: Callable[[str, str], T]) -> dict[str, T]:
    """What is to be kept of (id, text), by id."""
    texts: dict[str, T] = {}
    for where, row in _rows(path):
        name, text = _id_of(row, where), row.get("text")
        if not isinstance(text, str) or not text:
            raise ServerError(f"{where}: text must be a text that is not empty")
        if name in texts:
            raise ServerError(f"{where}: id {name!r} occurs twice")
        texts[name] = keep(name, text)
    if not texts:
        raise ServerError(f"{path}: no chunks")
    return texts


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) for every line that is not empty."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ServerError(f"{where}: not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise ServerError(f"{where}: must be a JSON object")
                yield where, row
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ServerError(f"{path}: {error}") from None


def _is_id(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _id_of(row: Mapping[str, Any], where: str) -> str:
    if not _is_id(row.get("id")):
        raise ServerError(f"{where}: id must be a text or a number")
    return str(row["id"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
