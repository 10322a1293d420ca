"""HiCache's backends as a store of bytes:
its traps do not reach us, and what cannot be used is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang_chunkcache.config import ChunkCacheConfig  # noqa: E402
from sglang_chunkcache.storage import opening  # noqa: E402
from sglang_chunkcache.storage.backend import (  # noqa: E402
    Backend,
    create_backend,
    extra_config,
    folder_of,
    room_in,
)
from sglang_chunkcache.storage.entry import Refusal, RefusedEntryError  # noqa: E402
from sglang_chunkcache.storage.manifest import Manifest  # noqa: E402
from tests.kit.storages import make_row  # noqa: E402
from tests.reference.memory_storage import MemoryStorage  # noqa: E402

NAME, OTHER, GONE, TORN = (f"cc1-{letter * 40}" for letter in "abcd")
DYNAMIC: dict[str, Any] = {
    "backend_name": "m",
    "module_path": "tests.reference.memory_storage",
    "class_name": "MemoryStorage",
}


def config(backend: str = "file", extra: Any = None) -> ChunkCacheConfig:
    extra = extra if isinstance(extra, str | None) else json.dumps(extra)
    asked: dict[str, Any] = {"storage_backend": backend, "storage_backend_extra_config": extra}
    return ChunkCacheConfig(reuse="fused", storage_mib=1, secret="s", **asked)


def data(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.fixture(params=["file", "dynamic"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    extra = DYNAMIC if request.param == "dynamic" else None
    return create_backend(config(request.param, extra), tmp_path, model_name="org/model")


def test_bytes_come_back(backend: Backend) -> None:
    """Until they are deleted."""
    backend.set(NAME, data(1, 2, 3))
    found = backend.get(NAME, 3)
    assert found is not None
    assert found.tolist() == [1, 2, 3]
    backend.delete(NAME)
    backend.delete(NAME)
    assert backend.get(NAME, 3) is None


def test_deleted_bytes_are_gone_for_hicache_too(tmp_path: Path) -> None:
    """It has a cache of what is there, and counts the bytes that files may take."""
    extra = {"enable_metadata_cache": True, "metadata_ttl": 3600, "max_size": 1 << 20}
    backend = create_backend(config(extra=extra), tmp_path, model_name="")
    for _ in range(2):
        backend.set(NAME, data(1, 2, 3))
        assert backend.sizes() == {NAME: 3}
        backend.delete(NAME)
        assert not backend.exists(NAME)
    assert cast(Any, backend)._storage._evictor._total_bytes == 0


def test_files_are_listed_and_left_over_ones_removed(tmp_path: Path) -> None:
    """What a killed process was writing, but nothing that is not ours."""
    backend = create_backend(config(), tmp_path, model_name="")
    backend.set(NAME, data(1, 2, 3))
    entries = tmp_path / "entries"
    (entries / f".{'0' * 32}.tmp").write_bytes(b"torn")
    (entries / "notes.txt").write_bytes(b"mine")
    assert backend.sizes() == {NAME: 3}
    assert {path.name for path in entries.iterdir()} == {f"{NAME}__0_1.bin", "notes.txt"}
    for num_bytes in (2, 4):
        with pytest.raises(RefusedEntryError) as refused:
            backend.get(NAME, num_bytes)
        assert refused.value.reason is Refusal.TRUNCATED


def test_storage_that_does_not_do_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiCache's `shm` keeps nothing. A network's hiccup must not delete the row."""
    storage = MemoryStorage()
    storage.set(NAME, data(1))
    monkeypatch.setattr(storage, "get", lambda key, target: None)
    with pytest.raises(OSError, match="is there"):
        Backend(storage).get(NAME, 1)
    storage.forgets = True
    with pytest.raises(OSError, match="did not keep"):
        Backend(storage).set(OTHER, data(1))


def test_dynamic_gets_its_configuration(tmp_path: Path) -> None:
    """As HiCache gives it, the model's name included; `directory` is ours."""
    extra = config("dynamic", {**DYNAMIC, "directory": str(tmp_path), "x": 1})
    given = cast(Any, create_backend(extra, tmp_path, model_name="org/model"))._storage.config
    assert (given.model_name, given.tp_size, given.tp_rank) == ("org/model", 1, 0)
    assert not given.is_mla_model
    assert given.extra_config["x"] == 1
    assert "directory" not in given.extra_config


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "backend_name"),
        ({**DYNAMIC, "class_name": "Nothing"}, "Nothing"),
        ({**DYNAMIC, "module_path": "tests.reference.nothing"}, "nothing"),
    ],
)
def test_backend_that_cannot_be_made_is_told(tmp_path: Path, extra: Any, message: str) -> None:
    """One line at the start, with the flag."""
    with pytest.raises(ValueError, match=f"--chunkcache-storage-backend dynamic: .*{message}"):
        create_backend(config("dynamic", extra), tmp_path, model_name="")


def test_extra_config_is_json_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "extra.json").write_text('{"max_size": "3G"}')
    assert extra_config(config(extra=f"@{tmp_path}/extra.json")) == {"max_size": "3G"}
    assert extra_config(config()) == {}
    for text in ("[]", "{", "@/none", '{"directory": 1}', '{"storage_path": "/tmp"}'):
        with pytest.raises(ValueError, match="--chunkcache-storage-backend-extra-config"):
            extra_config(config(extra=text))


def test_each_rank_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by the configuration, or in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert folder_of(config(extra={"directory": str(tmp_path)}), "rank1") == tmp_path / "rank1"
    assert folder_of(config(), "rank0") == Path("/cache/sglang_chunkcache/storage-file/rank0")


def test_default_is_a_share_of_what_can_be_had(tmp_path: Path) -> None:
    """The same after a restart, when the entries have taken their part of it."""
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert room_in(tmp_path, 0) == pytest.approx(free / 4, rel=0.05)
    assert room_in(tmp_path, free) == pytest.approx(free / 2, rel=0.05)


def test_full_disk_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server starts on it all the same: an index of no bytes would be refused."""
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    assert opening.create_index(config(), room_in(tmp_path, 0)).stats().num_bytes == 0


def test_start_believes_what_it_finds(tmp_path: Path) -> None:
    """Rows whose bytes are gone or torn leave, and bytes without a row."""
    backend = create_backend(config(), tmp_path, model_name="")
    manifest = Manifest(tmp_path)
    for name in (NAME, TORN, OTHER):
        backend.set(name, data(1, 2, 3))
    for name, num_bytes in ((NAME, 3), (GONE, 3), (TORN, 4)):
        manifest.put(make_row(name, num_bytes=num_bytes))
    rows, num_gone = opening.confirmed(manifest, backend)
    assert ([row.name for row in rows], num_gone) == ([NAME], 2)
    assert manifest.rows() == rows
    assert backend.sizes() == {NAME: 3}
    manifest.close()


def test_settings_print_what_they_chose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An operator sees folder and budget at the start; a second server is refused."""
    settings = config(extra={"directory": str(tmp_path)})
    with caplog.at_level("INFO"):
        opened = opening.open_storage(settings, rank="rank0", model_name="")
    assert f"storage file in {tmp_path}/rank0: 0 entries, 0.0 of 1.0 MiB" in caplog.text
    assert opened.max_bytes == 1 << 20
    with pytest.raises(ValueError, match="used by another server"):
        opening.open_storage(settings, rank="rank0", model_name="")
    opened.loader.close()
    opening.open_storage(settings, rank="rank0", model_name="").loader.close()
