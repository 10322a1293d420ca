"""Entries and their rows, and storages behind `dynamic`: what tests of the storage begin with."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from eval.server import free_port
from radix_ext import ChunkId
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.storage.entry import DTYPES, Entry, Layout, Masses
from sglang_chunkcache.storage.jobs import Load, Lookup, Write
from sglang_chunkcache.storage.key import Place
from sglang_chunkcache.storage.manifest import Row
from tests.polling import DEADLINE_S, until

if TYPE_CHECKING:
    from sglang_chunkcache.storage.opening import Opened

LAYOUT = Layout(2, 1, 4, 4, "bfloat16")
NUM_TOKENS = 3
REDIS = {
    "backend_name": "redis",
    "module_path": "tests.reference.redis_storage",
    "class_name": "RedisStorage",
}
needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")


def make_row(name: str = "n", **fields: Any) -> Row:
    place = Place("m", "t", ChunkId("c"), "h", (ChunkId("a"), ChunkId("b")), False)
    return Row(name, place, 4, 100, 1, True, ((0, 1), (2, 3)))._replace(**fields)


def make_entry(
    seed: int = 0, *, scored: bool = True, layout: Layout = LAYOUT, num_tokens: int = NUM_TOKENS
) -> Entry:
    """Random bits, so also numbers that are none."""
    made, kind = torch.Generator().manual_seed(seed), DTYPES[layout.dtype]

    def bits(dim: int) -> Any:
        shape = layout.num_layers, num_tokens, layout.num_kv_heads, dim * kind.itemsize
        return torch.randint(0, 256, shape, generator=made, dtype=torch.uint8).view(kind)

    tokens = torch.rand(3, num_tokens, generator=made)
    kv = bits(layout.key_dim), bits(layout.value_dim)
    if not scored:
        return Entry(kv)
    masses = Masses((0.1, 2.5), (4, 5), 1e-30, 0.3, 7)
    return Entry(kv, masses, tokens[0], tokens[1], tokens[2], ((0, 1), (1, 0)))


def same_bits(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def keeping(row: Row, entry: Entry) -> Write:
    return Write(row, lambda: entry, sum(each.nbytes for each in entry.tensors()))


class Redis:
    """One server on a port of its own. What it holds is in memory."""

    def __init__(self, folder: Path) -> None:
        self.port, self._folder = free_port(), folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        flags = f"--port {self.port} --bind 127.0.0.1 --dir {self._folder} --save".split()
        command = ["redis-server", *flags, ""]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(self._answers)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def open_dynamic(folder: Path, **extra: Any) -> Opened:
    """The storage of a server with this folder; `extra` names the class."""
    from sglang_chunkcache.storage.opening import open_storage

    config = ChunkCacheConfig(
        reuse="fused",
        storage_backend="dynamic",
        storage_backend_extra_config=json.dumps({**extra, "directory": str(folder)}),
        storage_mib=1,
    )
    return open_storage(config, rank="rank0", model_name="m")


def check_that_second_loads_what_first_writes(first: Opened, second: Opened) -> None:
    """Two servers with folders of their own:
    the second finds the entry by its chunk, and loads it bit for bit. Both end."""
    entry, row = make_entry(), make_row(num_bytes=0, num_tokens=NUM_TOKENS)
    row = row._replace(name=first.names.entry(row.place, row.scored, row.has_outward, row.heads))
    first.loader.write(keeping(row, entry))
    assert first.loader.drain(DEADLINE_S)
    assert first.loader.stats()["unshared"] == 0
    chunk = row.place.stored_chunk
    lookup = Lookup([chunk, chunk._replace(tenant="another")])
    assert second.loader.look_up(lookup)
    assert second.loader.drain(DEADLINE_S)
    (found,) = lookup.found[chunk]
    assert (found.name, found.place, found.num_tokens) == (row.name, row.place, NUM_TOKENS)
    assert lookup.found[lookup.chunks[1]] == []
    load, again = Load(found.name, found.num_bytes, found.num_tokens, LAYOUT), keeping(row, entry)
    second.loader.load(load)
    second.loader.write(again)
    assert second.loader.drain(DEADLINE_S)
    assert load.entry is not None
    assert same_bits(load.entry.kv[0], entry.kv[0])
    assert (again.is_confirmed, again.is_own, again.row.num_bytes) == (True, False, found.num_bytes)
    for each in (second, first):
        each.loader.close()
        assert each.loader.worker.problems == {}
