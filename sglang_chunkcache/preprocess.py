"""Fill a running server's chunk store ahead of requests: every chunk alone, then after its nearest neighbours.

    python -m sglang_chunkcache.preprocess --url http://127.0.0.1:30000 --corpus corpus.jsonl --neighbors neighbors.jsonl

A chunk computed after texts that resemble it has attended to texts that are likely to come before it in a prompt. FusionRAG
(3.1) replaces by it the attention that moving a chunk leaves out. The first pass stores every chunk alone; the second moves
these to a chunk's neighbours' places (eq. 10) and computes the chunk after them. Needs a server started with `--reuse fused`, and
two prefills per chunk.

A neighbour that the store and the KV pool have lost meanwhile is computed alone again. Where one cannot be held even then it is
missing, and the chunk is not stored: what it became would depend on the order of the corpus.

    corpus      {"id": "d1", "text": "..."}                          one JSON object a line; may be gzipped
    neighbors   {"id": "d1", "neighbors": ["d7", "d3", ...]}         nearest first; a chunk without a line has none

Progress goes to stderr; the last line of stdout is one JSON object. Exit codes:

    0   every chunk was computed
    1   single chunks were refused, for example because they are too long together with their neighbours, a larger share of the
        neighbours than --max-missing was missing, or chunks left the KV pool before they were stored
    2   a mistake in files or flags, or a server that does not answer
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_chunkcache.client import Client, RefusedError, ServerError, settle

PROGRESS_S = 5.0
MAX_NAMED = 5
"""Refused chunks named on stderr; all are counted."""


@dataclass
class Pass:
    """One run over chunks: their number, their tokens, and the seconds that the server took."""

    chunks: int = 0
    chunk_tokens: int = 0
    seconds: float = 0.0
    refused: list[str] = field(default_factory=list)
    neighbors: Counter[str] = field(default_factory=lambda: Counter(moved=0, computed=0, missing=0))

    def summary(self) -> dict[str, Any]:
        """For the JSON line."""
        return {
            "chunks": self.chunks,
            "chunk_tokens": self.chunk_tokens,
            "seconds": round(self.seconds, 3),
            "seconds_per_chunk": round(self.seconds / self.chunks, 6) if self.chunks else None,
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
    try:
        texts = read_corpus(args.corpus)
        neighbors = read_neighbors(args.neighbors, texts)
        result = preprocess(Client(args.url, args.api_key), texts, neighbors, top_n=args.top_n, system=args.system)
    except ServerError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    found = result["behind_neighbors"]["neighbors"]
    if not args.json:
        for name in ("alone", "behind_neighbors"):
            one = result[name]
            if one["chunks"]:
                per_chunk = 1000 * one["seconds_per_chunk"]
                print(f"{name.replace('_', ' '):17} {one['chunks']:7} chunks {per_chunk:9.1f} ms per chunk")
        print("neighbors         " + ", ".join(f"{number} {kind}" for kind, number in found.items()))
    print(json.dumps(result))
    if too_many := found["missing"] > args.max_missing * sum(found.values()):
        share = found["missing"] / sum(found.values())
        print(
            f"{parser.prog}: {share:.1%} of the neighbors were missing, more than --max-missing {args.max_missing:.1%}: "
            "enlarge the server's KV pool (--mem-fraction-static, --max-total-tokens) or its store "
            "(--chunkcache-store-mib), or lower --top-n",
            file=sys.stderr,
        )
    if lost := result["lost"]:
        print(f"{parser.prog}: {lost} chunks did not get into a store: they left the KV pool before", file=sys.stderr)
    return int(bool(too_many or lost or result["alone"]["refused"] or result["behind_neighbors"]["refused"]))


def read_corpus(path: Path) -> dict[str, str]:
    """Texts by id, in the file's order. Raises ServerError naming file and line."""
    texts: dict[str, str] = {}
    for where, row in _rows(path):
        name, text = _id_of(row, where), row.get("text")
        if not isinstance(text, str) or not text:
            raise ServerError(f"{where}: text must be a text that is not empty")
        if name in texts:
            raise ServerError(f"{where}: id {name!r} occurs twice")
        texts[name] = text
    if not texts:
        raise ServerError(f"{path}: no chunks")
    return texts


def read_neighbors(path: Path, known: Mapping[str, str]) -> dict[str, list[str]]:
    """Ids of the neighbours, nearest first, by id. Raises ServerError naming file and line."""
    neighbors: dict[str, list[str]] = {}
    for where, row in _rows(path):
        name, listed = _id_of(row, where), row.get("neighbors")
        if name not in known:
            raise ServerError(f"{where}: id {name!r} is not in the corpus")
        if name in neighbors:
            raise ServerError(f"{where}: id {name!r} occurs twice")
        if not isinstance(listed, list) or not all(_is_id(item) for item in listed):
            raise ServerError(f"{where}: neighbors must be a list of ids")
        ids = [str(item) for item in listed]
        if unknown := next((item for item in ids if item not in known), None):
            raise ServerError(f"{where}: neighbor {unknown!r} is not in the corpus")
        neighbors[name] = [item for item in dict.fromkeys(ids) if item != name]
    return neighbors


def preprocess(
    client: Client,
    texts: Mapping[str, str],
    neighbors: Mapping[str, Sequence[str]],
    *,
    top_n: int,
    system: str | None = None,
) -> dict[str, Any]:
    """Compute every chunk alone, then each chunk that has neighbours after the `top_n` nearest; returns the JSON line's object.

    Raises:
        ServerError: a server that does not answer, or one that was not started with `--reuse fused`.
    """
    stats = client.get("/chunkcache/stats")
    if stats.get("reuse") != "fused":
        raise ServerError(f"{client.url}: not a server started with --reuse fused")
    messages = [{"role": "system", "content": system}] if system else []

    def run(name: str, plan: Sequence[tuple[str, Sequence[str]]]) -> dict[str, Any]:
        done = Pass()
        last_s = time.monotonic()
        for number, (chunk, before) in enumerate(plan, 1):
            body = {
                "chunk": {"id": chunk, "text": texts[chunk]},
                "neighbors": [{"id": item, "text": texts[item]} for item in before],
                "messages": messages,
            }
            try:
                answer = client.post("/chunkcache/preprocess", body)
            except RefusedError as error:
                done.refused.append(chunk)
                if len(done.refused) <= MAX_NAMED:
                    print(f"{name}: {chunk!r} is refused: {error}", file=sys.stderr)
                continue
            done.chunks += 1
            done.chunk_tokens += answer["chunk_tokens"]
            done.seconds += answer["seconds"]
            done.neighbors.update(answer["neighbors"])
            if time.monotonic() - last_s > PROGRESS_S:
                last_s = time.monotonic()
                per_chunk = 1000 * done.seconds / done.chunks
                print(f"{name}: {number}/{len(plan)}, {per_chunk:.1f} ms per chunk", file=sys.stderr)
        settle(client)
        return done.summary()

    alone = run("alone", [(chunk, ()) for chunk in texts])
    behind = run(
        "after neighbors",
        [(chunk, neighbors[chunk][:top_n]) for chunk in texts if neighbors.get(chunk)],
    )
    stores = [rank.get("store") for rank in client.get("/chunkcache/stats")["ranks"]]
    lost = sum(store["dropped"] for store in stores) - sum(rank["store"]["dropped"] for rank in stats["ranks"])
    return {
        "url": client.url,
        "top_n": top_n,
        "alone": alone,
        "behind_neighbors": behind,
        "lost": lost,
        "stores": stores,
    }


# Private, in order of use


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
