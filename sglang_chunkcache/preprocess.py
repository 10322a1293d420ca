"""Fill a running server's chunk store ahead of requests: every chunk alone, then after its nearest
neighbours (FusionRAG 3.1).

    python -m sglang_chunkcache.preprocess --url http://127.0.0.1:30000 --corpus corpus.jsonl
                                           --neighbors neighbors.jsonl

    corpus      {"id": "d1", "text": "..."}, one JSON object a line; may be gzipped
    neighbors   {"id": "d1", "neighbors": ["d7", "d3", ...]}, nearest first

The first pass stores every chunk alone; the second moves these to a chunk's neighbours' places (eq.
10) and computes the chunk after them. Needs a server started with `--reuse fused`, and two prefills
per chunk. A chunk whose neighbours cannot all be held is not stored;
of chunks that were in flight together it is tried once more, alone. Cut off, the command is started
again: what store or storage have is kept and not computed.

Stderr tells first what all needs of the room that the storage has, or the store of a server without
one, then, at a terminal, the progress; the last line of stdout is one JSON object. Exit codes:

    0   every chunk is there
    1   chunks were refused, left the KV pool before they were stored, found no room, or were
        evicted; more neighbours than --max-missing were missing; or the storage has failed
    2   a mistake in files or flags, or a server that does not answer
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar

from radix_ext.variants import RESERVED_SHARE
from retrieval.command_line import Parser
from sglang_chunkcache.client import Client, RefusedError, ServerError, settle
from sglang_chunkcache.installation import server_installation

T = TypeVar("T")

TOP_N = 1
"""More neighbours have kept no more answers (eval/LOG.md, 2026-11-23 and 2026-11-21,
FusionRAG's figure 17)."""
DEFAULT_BATCH = 8
"""Requests in flight: 10 and 32 are as fast on a CPU (record
2026-11-23T2231-preprocess-batches)."""
MAX_BATCH = 64
"""The server drafts that many long requests at most (`front/draft_queue.py`)."""
NUM_SAMPLED = 32
"""Chunks whose tokens are counted for the size of all."""
MAX_NAMED = 5
"""Refused chunks named on stderr; all are counted."""
PASSES = ("alone", "behind_neighbors")
PROBLEMS = ("failed", "paused")
"""Of a storage: it has not done what it was asked for."""
FLAGS = ("--chunkcache-store-mib", "--chunkcache-storage-mib")
"""Which make room without, and with a storage."""


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
    try:
        with server_installation():
            from sglang_chunkcache.chunk_files import read_corpus, read_neighbors

        texts = read_corpus(args.corpus)
        neighbors = read_neighbors(args.neighbors, texts)
        client = Client(args.url, args.api_key, max_connections=args.batch)
        how = {"top_n": args.top_n, "system": args.system, "batch": args.batch}
        result = preprocess(client, texts, neighbors, **how, has_bar=not args.json)
    except ServerError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if not args.json:
        print("\n".join(_table(result)))
    print(json.dumps(result))
    troubles = list(_troubles(result, args.max_missing))
    for trouble in troubles:
        print(f"{parser.prog}: {trouble}", file=sys.stderr)
    return int(bool(troubles) or any(result[name]["refused"] for name in PASSES))


def preprocess(
    client: Client,
    texts: Mapping[str, str],
    neighbors: Mapping[str, Sequence[str]],
    *,
    top_n: int,
    system: str | None = None,
    batch: int = DEFAULT_BATCH,
    has_bar: bool = True,
) -> dict[str, Any]:
    """Compute every chunk alone, then each chunk that has neighbours after the `top_n` nearest,
    `batch` requests at a time; returns the JSON line's object.

    Raises:
        ServerError: a server that does not answer, or one that was not started with `--reuse
            fused`.
    """
    with server_installation():
        from tqdm import tqdm

    stats = client.get("/chunkcache/stats")
    if stats.get("reuse") != "fused":
        raise ServerError(f"{client.url}: not a server started with --reuse fused")
    near = {chunk: neighbors[chunk][:top_n] for chunk in texts if neighbors.get(chunk)}
    messages = [{"role": "system", "content": system}] if system else []
    counts = _counts(stats["ranks"])
    print(_size(client, stats["ranks"], texts, near), file=sys.stderr)

    def post(chunk: str, before: Sequence[str]) -> dict[str, Any] | RefusedError:
        # The server refuses a chunk among its neighbors, so also a copy under another id.
        mine, *others = ({"id": each, "text": texts[each]} for each in (chunk, *before))
        near = [other for other in others if other["text"] != mine["text"]]
        body = {"chunk": mine, "neighbors": near, "messages": messages}
        try:
            return client.post("/chunkcache/preprocess", body)
        except RefusedError as error:
            return error

    def run(name: str, work: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        found = Counter(chunks=0, kept=0, chunk_tokens=0, refused=0)
        fates = Counter(moved=0, computed=0, missing=0)
        again, started = list[str](), time.monotonic()
        with tqdm(
            total=len(work),
            desc=name,
            unit=" chunks",
            dynamic_ncols=True,
            disable=None if has_bar else True,  # None: unless stderr is a terminal
        ) as bar:
            for num, chunks in ((batch, work), (1, again)):
                for chunk, answer in _answers(lambda chunk: post(chunk, work[chunk]), chunks, num):
                    if isinstance(answer, RefusedError):
                        found["refused"] += 1
                        if found["refused"] <= MAX_NAMED:
                            bar.write(f"{name}: {chunk!r} is refused: {answer}", file=sys.stderr)
                    elif num > 1 and answer["neighbors"].get("missing"):
                        # Asked again alone: others in flight may have kept its neighbors out.
                        again.append(chunk)
                        continue
                    else:
                        found["kept" if answer["kept"] else "chunks"] += 1
                        found["chunk_tokens"] += answer["chunk_tokens"]
                        fates.update(answer["neighbors"])
                    bar.update()
            # Taken before `settle`, whose waiting is no part of the rate.
            seconds = time.monotonic() - started
            bar.set_postfix_str("waiting for the store")
            settle(client)
        rate = round(found["chunks"] / seconds, 3) if found["chunks"] else None
        return {**found, "seconds": round(seconds, 3), "chunks_per_s": rate, "neighbors": fates}

    alone, behind = run("alone", dict.fromkeys(texts, ())), run("after neighbors", near)
    after = client.get("/chunkcache/stats")["ranks"]
    return {
        "url": client.url,
        "top_n": top_n,
        "batch": batch,
        "alone": alone,
        "behind_neighbors": behind,
        # The server counts from its start, so what was lost before is subtracted.
        **{name: count - counts[name] for name, count in _counts(after).items()},
        "stores": [rank["store"] for rank in after],
        "storages": [rank["storage"] for rank in after if "storage" in rank],
    }


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m sglang_chunkcache.preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", required=True, help="the server, for example http://127.0.0.1:30000")
    add("--corpus", type=Path, required=True, help="chunks, one JSON object a line")
    add("--neighbors", type=Path, required=True, help="their neighbors, one JSON object a line")
    add("--top-n", type=int, default=TOP_N, help="neighbors before a chunk; default: %(default)s")
    text = (
        "requests in flight; the KV pool should hold as many chunks with their neighbors; default:"
    )
    add("--batch", type=int, default=DEFAULT_BATCH, metavar="N", help=f"{text} %(default)s")
    text = "share of the neighbors that may be missing, 0 to 1; default: %(default)s"
    add("--max-missing", type=float, default=0.01, metavar="SHARE", help=text)
    add("--system", metavar="TEXT", help="system message of the prompts; default: none")
    text = "the API key of the server, or its admin key if it has one"
    add("--api-key", metavar="KEY", help=text)
    add("--json", action="store_true", help="print nothing but the JSON line")
    return parser


def _counts(ranks: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What goes wrong, since the server's start."""
    storages = [rank["storage"] for rank in ranks if "storage" in rank]
    return {
        "lost": sum(rank["store"]["dropped"] for rank in ranks),
        "no_room": sum(rank["store"]["no_room"] for rank in ranks),
        "evicted": sum(_held(rank)["num_evicted"] for rank in ranks),
        "unwritten": sum(
            each["unwritten"] + sum(each["problems"].get(name, 0) for name in PROBLEMS)
            for each in storages
        ),
    }


def _held(rank: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where chunks stay: a store evicts what its storage has."""
    found: Mapping[str, Any] = rank.get("storage") or rank["store"]
    return found


def _size(
    client: Client,
    ranks: Sequence[Mapping[str, Any]],
    texts: Mapping[str, str],
    near: Iterable[str],
) -> str:
    """What all chunks would take, by the tokens of the first ones,
    of what the smallest rank reserves for them."""
    num_tokens = num_read = 0
    for text in islice(texts.values(), NUM_SAMPLED):
        body = {"messages": [{"role": "user", "content": "?"}], "chunks": [{"text": text}]}
        with suppress(RefusedError):  # what is too long is refused again when it is sent
            spans = client.post("/chunkcache/explain", body)["spans"]
            num_tokens += sum(span["end"] - span["start"] for span in spans)
            num_read += len(text)
    num_chars = sum(map(len, texts.values())) + sum(len(texts[chunk]) for chunk in near)
    num_bytes = num_chars * num_tokens / max(1, num_read) * ranks[0]["store"]["token_bytes"]
    # Every chunk is stored alone, those with neighbors once more behind them.
    num_entries = len(texts) + len({*near})
    # Every rank stores every chunk, so the smallest one is full first.
    max_bytes, max_entries = (
        min(_held(rank)[name] for rank in ranks) for name in ("max_bytes", "max_entries")
    )
    left, reserved = (1 - RESERVED_SHARE) * max_bytes / 2**20, RESERVED_SHARE * max_bytes
    needs = (
        f"needs about {num_bytes / 2**20:.1f} of {reserved / 2**20:.1f} MiB ({left:.1f} are left to"
        f" live traffic) and {num_entries} of {RESERVED_SHARE * max_entries:.0f} entries"
    )
    if num_bytes <= reserved and num_entries <= RESERVED_SHARE * max_entries:
        return needs
    return (
        f"{needs}: too much, some will not stay; raise {FLAGS['storage' in ranks[0]]} or"
        " --chunkcache-store-chunks"
    )


def _answers(post: Callable[[str], T], chunks: Iterable[str], num: int) -> Iterator[tuple[str, T]]:
    """(chunk, answer) as they come, `num` in flight."""
    # Threads, not processes: they wait for the server, and share the session's connections.
    with ThreadPool(num) as pool:
        yield from pool.imap_unordered(lambda chunk: (chunk, post(chunk)), chunks)


def _table(result: Mapping[str, Any]) -> Iterator[str]:
    for name in PASSES:
        one, title = result[name], name.replace("_", " ")
        if one["chunks"] or one["kept"]:
            rate = f"{one['chunks_per_s']:9.1f} chunks/s" if one["chunks"] else ""
            yield f"{title:17} {one['chunks']:7} chunks {rate:18} {one['kept']:7} kept"
    # The first pass has no neighbors.
    found = result["behind_neighbors"]["neighbors"]
    yield "neighbors         " + ", ".join(f"{number} {kind}" for kind, number in found.items())


def _troubles(result: Mapping[str, Any], max_missing: float) -> Iterator[str]:
    """What makes the command fail, beside refused chunks."""
    found = result["behind_neighbors"]["neighbors"]
    room = f"raise {FLAGS[bool(result['storages'])]} or --chunkcache-store-chunks"
    if found["missing"] > max_missing * sum(found.values()):
        # Not 0: `missing` is over a share of it.
        share = found["missing"] / sum(found.values())
        yield (
            f"{share:.1%} of the neighbors were missing, more than --max-missing {max_missing:.1%}:"
            " enlarge the server's KV pool (--mem-fraction-static, --max-total-tokens) or its"
            " store (--chunkcache-store-mib), or lower --top-n"
        )
    if lost := result["lost"]:
        yield (
            f"{lost} chunks did not get into a store: they left the KV pool before; start the"
            " command again"
        )
    if no_room := result["no_room"]:
        yield (
            f"{no_room} chunks found no room, {RESERVED_SHARE:.0%} of which is for preprocessed"
            f" ones: {room}"
        )
    if evicted := result["evicted"]:
        yield f"{evicted} entries were evicted: {room}"
    if unwritten := result["unwritten"]:
        yield (
            f"the storage has failed, or not taken an entry, {unwritten} times; start the command"
            " again"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
