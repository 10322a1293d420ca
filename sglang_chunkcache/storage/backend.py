"""SGLang's `HiCacheStorage` as a store of bytes by name: HiCache's own backends and configuration,
without HiCache.

    file      one file an entry, in a folder of the rank's own
    dynamic   any class, as HiCache loads it

Traps of HiCache's that are dealt with here: `get` reads into a tensor whose size must be known, a
smaller one is filled without a word; `set` overwrites nothing; some `set` report success and keep
nothing; nobody deletes. What an entry must be is none of its business. The loader's thread uses it,
and no other one after the start.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_chunkcache.config import ChunkCacheConfig, cache_folder, flag_name
from sglang_chunkcache.storage.entry import Refusal, RefusedEntryError

DEFAULT_SHARE = 0.25
"""Of what the file system has free, and of what the entries take there: others write to it, too."""

_FILE_SETTINGS = (
    "directory",
    "enable_metadata_cache",
    "eviction_ratio",
    "max_size",
    "metadata_ttl",
    "min_free_space",
)
"""The first one is ours, the others are HiCache's."""

_LEFT_OVER = re.compile(r"cc1-[0-9a-f]{40}.*\.bin|\.[0-9a-f]{32}\.tmp")
"""Files in a rank's folder: entries, and what HiCache's file backend was writing."""


class Backend:
    """One of HiCache's, `storage`. Others may use it too."""

    is_shared = True

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def get(self, name: str, num_bytes: int) -> Tensor | None:
        """[num_bytes] uint8, CPU. None: not there. Raises RefusedEntryError: of another size;
        OSError: there, and not to be had now; whatever else the backend raises."""
        target = torch.empty(num_bytes, dtype=torch.uint8)
        found: Tensor | None = self._storage.get(name, target)
        # None may also be a failed read: the index forgets what is gone, and this is not.
        if found is None:
            if self._storage.exists(name):
                raise OSError(f"{name} is there and cannot be read")
            return None
        if found.nbytes != num_bytes:  # a backend may give a tensor of its own
            raise RefusedEntryError(Refusal.TRUNCATED, f"{found.nbytes} of {num_bytes} bytes")
        return found.cpu().contiguous().view(-1).view(torch.uint8)

    def set(self, name: str, data: Tensor) -> None:
        """Keep [num_bytes] uint8. What is there under the name stays as it is. Raises OSError: not
        kept; whatever else the backend raises."""
        # Some backends report success and keep nothing, and a row must have its bytes.
        if not self._storage.set(name, data) or not self._storage.exists(name):
            raise OSError(f"the backend did not keep {name}")

    def exists(self, name: str) -> bool:
        """Whether there is anything under the name. Raises whatever the backend raises."""
        return bool(self._storage.exists(name))

    def delete(self, name: str) -> bool:
        """Nothing is under the name any more.
        False: HiCache's interface cannot, and its class has no `delete(key)`."""
        delete = getattr(self._storage, "delete", None)
        if not callable(delete):
            return False
        delete(name)
        return True

    def sizes(self) -> dict[str, int] | None:
        """Name -> bytes of all that is there, after what was left over has been removed.
        None: it cannot be listed."""
        return None

    def close(self) -> None:
        """Some backends have something to close."""
        if callable(close := getattr(self._storage, "close", None)):
            close()


class FileBackend(Backend):
    """HiCache's `file` in a folder of our own, which one process has."""

    is_shared = False

    def get(self, name: str, num_bytes: int) -> Tensor | None:
        try:
            # `HiCacheFile.get` logs a warning for each miss, and reads the first bytes of a longer
            # file without a word.
            size = self._path(name).stat().st_size
        except FileNotFoundError:
            return None
        if size != num_bytes:
            raise RefusedEntryError(Refusal.TRUNCATED, f"{size} of {num_bytes} bytes")
        return super().get(name, num_bytes)

    def delete(self, name: str) -> bool:
        self._path(name).unlink(missing_ok=True)  # `HiCacheFile` deletes nothing by name
        key = self._storage._get_suffixed_key(name)
        self._storage._evictor.abort(key)  # which counts its bytes
        if self._storage.metadata_cache is not None:  # else `set` would find it there
            self._storage.metadata_cache.remove(key)
        return True

    def sizes(self) -> dict[str, int] | None:
        suffix, found = self._path("").name, dict[str, int]()
        with os.scandir(self._storage.file_path) as files:
            for file in files:
                # Killed between write and rename; nobody writes now, as one process has the folder.
                if file.name.endswith(".tmp") and _LEFT_OVER.fullmatch(file.name):
                    os.unlink(file)
                elif file.name.endswith(suffix) and _LEFT_OVER.fullmatch(file.name):
                    found[file.name.removesuffix(suffix)] = file.stat().st_size
        return found

    def _path(self, name: str) -> Path:
        return Path(self._storage.file_path, f"{self._storage._get_suffixed_key(name)}.bin")


def extra_config(config: ChunkCacheConfig) -> dict[str, Any]:
    """The backend's settings. Raises ValueError: no JSON object, or a setting that is none; names
    the flag."""
    text, flag = config.storage_backend_extra_config, flag_name("storage_backend_extra_config")
    if text is None:
        return {}
    try:
        if text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{flag} must be a JSON object, got {type(found).__name__}")
    if config.storage_backend == "file" and (unknown := found.keys() - _FILE_SETTINGS):
        names, known = (", ".join(each) for each in (sorted(unknown), _FILE_SETTINGS))
        raise ValueError(f"{flag}: file does not know {names}, only {known}")
    if not isinstance(found.get("directory", ""), str):
        raise ValueError(f"{flag}: directory must be a path, got {found['directory']!r}")
    return found


def folder_of(config: ChunkCacheConfig, rank: str) -> Path:
    """Where one rank keeps its manifest, and `file` its entries.
    Raises ValueError as `extra_config`."""
    given = extra_config(config).get("directory")
    return Path(given or cache_folder() / f"storage-{config.storage_backend}") / rank


def create_backend(config: ChunkCacheConfig, folder: Path, *, model_name: str) -> Backend:
    """The backend that the configuration names, made by HiCache's factory. Raises ValueError:
    HiCache cannot make it; says why."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    name, extra, entries = config.storage_backend, extra_config(config), folder / "entries"
    assert name is not None
    extra.pop("directory", None)
    if name == "file":
        entries.mkdir(parents=True, exist_ok=True)
        model_name = ""  # the names of entries tell models apart
    # HiCache's factory passes `HiCacheFile` no folder, so only this variable names it.
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(entries)):
        try:
            storage = StorageBackendFactory.create_backend(
                name, _storage_config(extra, model_name), None
            )
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{flag_name('storage_backend')} {name}: {reason}") from None
    return FileBackend(storage) if name == "file" else Backend(storage)


def room_in(folder: Path, num_bytes: int) -> int:
    """Bytes that entries may take by default in this folder, where they take `num_bytes`; at least
    1, which holds nothing."""
    return max(1, int(DEFAULT_SHARE * (shutil.disk_usage(folder).free + num_bytes)))


def _storage_config(extra: dict[str, Any], model_name: str) -> Any:
    """HiCache's, by its own field names: releases have different ones."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    # Rank 0 of 1: our names and folders tell ranks apart, so HiCache's suffix stays the same.
    sizes = ("tp_size", "pp_size", "attn_cp_size", "dcp_size", "logical_page_size")
    known = dict.fromkeys(sizes, 1) | {"model_name": model_name, "extra_config": extra}
    made: dict[str, Any] = {}
    for field in dataclasses.fields(HiCacheStorageConfig):
        if field.name in known:
            made[field.name] = known[field.name]
        elif field.default is dataclasses.MISSING:
            made[field.name] = False if str(field.type) == "bool" else 0
    return HiCacheStorageConfig(**made)
