"""Opens a rank's storage at a start: believes of the manifest what the backend confirms,
and removes what nobody knows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from radix_ext.loading import WaitPolicy
from radix_ext.variant_index import VariantIndex
from sglang_chunkcache import compat
from sglang_chunkcache.config import ChunkCacheConfig, flag_name
from sglang_chunkcache.rank_metrics import NO_METRICS
from sglang_chunkcache.storage.backend import Backend, create_backend, folder_of, room_in
from sglang_chunkcache.storage.entry import DTYPES, Layout
from sglang_chunkcache.storage.jobs import GONE
from sglang_chunkcache.storage.key import Names, secret_of
from sglang_chunkcache.storage.loader import Loader
from sglang_chunkcache.storage.manifest import Manifest, Row
from sglang_chunkcache.storage.metrics import StorageMetrics
from sglang_chunkcache.storage.naming import Naming
from sglang_chunkcache.storage.pointer import Pointers
from sglang_chunkcache.storage.ranks import Ranks
from sglang_chunkcache.storage.storage import Storage
from sglang_chunkcache.storage.worker import Worker

logger = logging.getLogger(__name__)


class Opened(NamedTuple):
    loader: Loader
    names: Names
    rows: list[Row]  # what it holds, the most used first
    max_bytes: int  # that it may hold


def create_storage(
    ctx: Any, config: ChunkCacheConfig, memory_bytes: Callable[[], int]
) -> Storage | None:
    """The storage of one rank, off until its weights are known. `ctx` is SGLang's
    TreeCacheBuildContext, `memory_bytes()` as `Loader` takes it. None: not wanted. Raises
    ValueError: a setting is wrong or not supported, or the folder is another server's."""
    if config.storage_backend is None:
        return None
    runner, args = ctx.tp_worker.model_runner, ctx.server_args
    refused = f"{flag_name('storage_backend')} does not go with"
    if args.enable_memory_saver:
        raise ValueError(f"{refused} --enable-memory-saver: weights that may be away name nothing")
    if args.enable_lora or args.lora_paths:
        raise ValueError(f"{refused} --lora-paths: an adapter has no fingerprint")
    pool = runner.token_to_kv_pool
    dtype = str(pool.dtype).removeprefix("torch.")
    if not isinstance(pool, MHATokenToKVPool) or dtype not in DTYPES:
        raise ValueError(f"{refused} KV of {dtype} in a {type(pool).__name__}")
    _, num_heads, key_dim = pool.k_buffer[0].shape
    layout = Layout(len(pool.k_buffer), num_heads, key_dim, pool.v_buffer[0].shape[-1], dtype)
    ranks = Ranks(compat.parallel(runner, "tp_group")) if args.tp_size > 1 else None
    rank = f"rank{get_parallel().dp_rank or 0}{ranks.shard if ranks else ''}"
    try:
        opened = open_storage(
            config,
            rank=rank,
            model_name=runner.model_config.model_path,
            memory_bytes=memory_bytes(),
            ranks=ranks,
        )
    except OSError as error:
        raise ValueError(f"{flag_name('storage_backend')}: {error}") from None
    shows = args.enable_metrics and ctx.tp_rank == 0  # Prometheus would add them up
    model_of = partial(opened.names.model, runner.model_config.hf_config.to_dict(), layout)
    return Storage(
        create_index(config, opened.max_bytes),
        opened.loader,
        Naming(opened.names, model_of, layout),
        opened.rows,
        WaitPolicy(config.storage_wait),
        StorageMetrics("network" if opened.loader.is_shared else "disk") if shows else NO_METRICS,
    )


def create_index(config: ChunkCacheConfig, max_bytes: int) -> VariantIndex:
    """Of a store or a storage."""
    return VariantIndex(
        max_bytes=max_bytes,
        max_chunks=config.store_chunks,
        max_variants=config.store_variants,
        window=config.window_requests,
    )


def open_storage(
    config: ChunkCacheConfig,
    *,
    rank: str,
    model_name: str,
    memory_bytes: int = sys.maxsize,
    ranks: Ranks | None = None,
) -> Opened:
    """The storage of the rank of that name. `memory_bytes` and `ranks` as `Loader` takes them:
    all ranks open theirs at once, and have what all have. Raises ValueError: a setting is wrong,
    the backend cannot be made, or another process has the folder; OSError: the folder cannot be
    written."""
    folder, secret = folder_of(config, rank), secret_of()
    # First, as it locks the folder: `confirmed` deletes what another server may be writing.
    manifest = Manifest(folder)
    try:
        backend = create_backend(config, folder, model_name=model_name)
        rows, num_gone = confirmed(manifest, backend)
        room = room_in(folder, sum(row.num_bytes for row in rows))
        others = list[Row]()
        # Ranks with different rows would ask for different loads, and hang in the reduction.
        if ranks is not None:
            rows, others = ranks.common(rows)
        num_bytes = sum(row.num_bytes for row in rows)
        # The least of all ranks' room: with different budgets they would evict differently.
        max_bytes = config.storage_mib << 20 or min(ranks.of_all(room) if ranks else [room])
    except BaseException:  # else the lock stays in this process, and a second try fails
        manifest.close()
        raise
    names = Names(secret, ranks.shard if ranks else "")
    pointers = Pointers(backend, names) if backend.is_shared and ranks is None else None
    worker = Worker(backend, manifest, secret=secret, pointers=pointers)
    loader = Loader(worker, ranks=ranks, memory_bytes=memory_bytes)
    # What some ranks lack, as after a kill between their writes, no request can use.
    loader.delete(others)
    if num_gone:
        worker.problems[GONE] += num_gone
    logger.info(
        "chunk cache: storage %s in %s: %d entries, %.1f of %.1f MiB%s",
        config.storage_backend,
        folder,
        len(rows),
        num_bytes / (1 << 20),
        max_bytes / (1 << 20),
        f", {num_gone} were gone" if num_gone else "",
    )
    return Opened(loader, names, rows, max_bytes)


def confirmed(manifest: Manifest, backend: Backend) -> tuple[list[Row], int]:
    """(the rows whose entries are there, how many were not): the others leave the manifest, entries
    without a row the backend. A backend that cannot be listed is believed until it is asked."""
    rows, sizes = manifest.rows(), backend.sizes()
    if sizes is None:
        return rows, 0
    there = [row for row in rows if sizes.get(row.name) == row.num_bytes]
    kept = {row.name for row in there}
    manifest.drop([row.name for row in rows if row.name not in kept])
    # Written and never told, or of another size than the row's.
    for name in sizes.keys() - kept:
        backend.delete(name)
    return there, len(rows) - len(there)
