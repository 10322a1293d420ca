"""A process that writes, loads and deletes entries of a storage, killed by SIGKILL at random
moments: what is there afterwards?

    python -m tests.soak.killed_storage FOLDER NUM_KILLS SEED        prints one JSON object

Each child goes on with what the ones before it have left, and tells through a pipe what was
confirmed to it. After each kill the parent opens the folder as the next start would, and reads
every entry that has a row.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

from radix_ext import ChunkId
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.storage import entry
from sglang_chunkcache.storage.backend import create_backend, folder_of
from sglang_chunkcache.storage.entry import Entry, Layout, RefusedEntryError
from sglang_chunkcache.storage.jobs import Load, Write
from sglang_chunkcache.storage.key import Place, secret_of
from sglang_chunkcache.storage.manifest import Manifest, Row
from sglang_chunkcache.storage.opening import confirmed, open_storage

LAYOUT = Layout(2, 2, 16, 16, "bfloat16")
MAX_TOKENS = 4000
"""An entry of a megabyte takes some milliseconds, so kills hit it."""
MAX_KEPT = 40
LONGEST_S = 0.25
"""Of a child's life: some do not get to the end of their start."""
WORKING = 0.5
"""The share that lives until something is confirmed, and up to that much longer."""


def config_of(folder: Path) -> ChunkCacheConfig:
    extra = json.dumps({"directory": str(folder)})
    return ChunkCacheConfig(
        reuse="fused", storage_backend="file", storage_backend_extra_config=extra, storage_mib=4096
    )


def row_of(number: int) -> Row:
    num_tokens = 1 + random.Random(number).randrange(MAX_TOKENS)
    place = Place("m", "t", ChunkId(f"{number}"), "h", (), False)
    return Row(f"cc1-{number:040x}", place, num_tokens, 0, 0, False)


def number_of(name: str) -> int:
    return int(name[4:], 16)


def entry_of(number: int) -> Entry:
    """The same for the same number."""
    made = torch.Generator().manual_seed(number)
    shape = LAYOUT.num_layers, row_of(number).num_tokens, LAYOUT.num_kv_heads, 2 * LAYOUT.key_dim
    kv = (torch.randint(0, 256, shape, generator=made, dtype=torch.uint8) for _ in range(2))
    keys, values = (each.view(torch.bfloat16) for each in kv)
    return Entry((keys, values))


def is_right(found: Entry | None, number: int) -> bool:
    """Or was not loaded."""
    if found is None:
        return True
    pairs = zip(found.kv, entry_of(number).kv, strict=True)
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def work(folder: Path, first: int, told: int) -> None:
    """Until it is killed. Tells `c NUMBER` of what is confirmed, `d NUMBER` before it deletes,
    `w NUMBER` of a wrong entry."""
    rng = random.Random(first)
    opened = open_storage(config_of(folder), rank="rank0", model_name="")
    kept = {number_of(row.name): row for row in opened.rows}
    number = first
    while True:
        for job in opened.loader.poll():
            if isinstance(job, Write) and job.is_confirmed:
                kept[number_of(job.row.name)] = job.row
                os.write(told, b"c %d\n" % number_of(job.row.name))
            elif isinstance(job, Load) and not is_right(job.entry, number_of(job.name)):
                os.write(told, b"w %d\n" % number_of(job.name))
        if len(kept) > rng.randrange(1, MAX_KEPT):
            gone = rng.choice(sorted(kept))
            os.write(told, b"d %d\n" % gone)
            opened.loader.delete([kept.pop(gone)])
        elif rng.random() < 0.3 and kept:
            row = kept[rng.choice(sorted(kept))]
            opened.loader.load(Load(row.name, row.num_bytes, row.num_tokens, LAYOUT))
        else:
            opened.loader.write(Write(row_of(number), partial(entry_of, number), size=1))
            number += 1


def kill_one(folder: Path, first: int, rng: random.Random) -> list[tuple[str, int]]:
    """What a child told until it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        work(folder, first, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        lines = list[bytes]()
        if rng.random() < WORKING:  # however slow the machine is
            while not lines or lines[-1][:1] != b"c":
                lines.append(pipe.readline())
                assert lines[-1], "the child ended"
        time.sleep(rng.uniform(0, LONGEST_S))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines += pipe.read().split(b"\n")[:-1]  # the last line may be torn
    return [(kind, int(number)) for kind, number in (line.decode().split() for line in lines)]


def run(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Counts of all kills. `lost`, `torn` and `wrong` must be 0."""
    counts, rng, kept = Counter[str](), random.Random(seed), set[int]()
    torch.set_num_threads(1)  # a child has none of its parent's threads, and would wait for them
    rank = folder_of(config_of(folder), "rank0")
    for kill in range(num_kills):
        for kind, number in kill_one(folder, kill * 10_000, rng):
            counts[{"c": "confirmed", "d": "deleted", "w": "wrong"}[kind]] += 1
            if kind == "c":
                kept.add(number)
            elif kind == "d":
                kept.discard(number)
        manifest = Manifest(rank)
        backend = create_backend(config_of(folder), rank, model_name="")
        before = len(list((rank / "entries").iterdir()))
        rows, num_gone = confirmed(manifest, backend)
        counts["torn"] += num_gone
        counts["left_over"] += before - len(list((rank / "entries").iterdir()))
        there = {number_of(row.name) for row in rows}
        counts["lost"] += len(kept - there)
        for row in rows:
            data = backend.get(row.name, row.num_bytes)
            assert data is not None
            asked: dict[str, Any] = {
                "layout": LAYOUT,
                "num_tokens": row.num_tokens,
                "secret": secret_of(),
            }
            try:
                found = entry.read(data, row.name, **asked)
            except RefusedEntryError:
                counts["torn"] += 1
                continue
            counts["read"] += 1
            counts["wrong"] += not is_right(found, number_of(row.name))
        manifest.close()
        kept = there  # confirmed to a child that had no time to tell
    names = ("confirmed", "deleted", "read", "left_over", "lost", "torn", "wrong")
    return {name: counts[name] for name in names}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
