"""The manifest: what was put is there after any end of the process, for one process at a time."""

from __future__ import annotations

import os
import signal
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

pytest.importorskip("torch")
pytest.importorskip("msgspec")


from sglang_chunkcache.storage.manifest import SCHEMA, InUseError, Manifest, Row, SchemaError
from tests.examples import examples
from tests.kit.storages import make_row


def reopened(folder: Path) -> list[Row]:
    manifest = Manifest(folder)
    rows = manifest.rows()
    manifest.close()
    return rows


def test_row_is_there_after_a_kill(tmp_path: Path) -> None:
    """`put` has returned, so nothing can take it back."""
    child = os.fork()
    if not child:
        Manifest(tmp_path).put(make_row())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert reopened(tmp_path) == [make_row()]


def test_folder_has_one_process(tmp_path: Path) -> None:
    """Two would delete each other's entries. A killed one leaves no lock."""
    manifest = Manifest(tmp_path)
    with pytest.raises(InUseError, match=f"process {os.getpid()}"):
        Manifest(tmp_path)
    manifest.close()
    manifest.close()
    assert reopened(tmp_path) == []


def test_folder_of_another_release_is_refused(tmp_path: Path) -> None:
    """By name, as it is: put aside, its entries would be deleted as unknown ones."""
    manifest, file = Manifest(tmp_path), tmp_path / "manifest.sqlite"
    manifest.put(make_row())
    manifest.close()
    for version in (99, SCHEMA):
        with closing(sqlite3.connect(file)) as database:
            database.execute(f"PRAGMA user_version = {version}")
        if version == 99:
            with pytest.raises(SchemaError, match=f"schema 99, this one has {SCHEMA}"):
                Manifest(tmp_path)
    assert reopened(tmp_path) == [make_row()]


@pytest.mark.parametrize("damage", ["no database", "nothing"])
def test_damaged_manifest_is_put_aside(tmp_path: Path, damage: str) -> None:
    """An empty file is an empty database."""
    manifest, file = Manifest(tmp_path), tmp_path / "manifest.sqlite"
    manifest.put(make_row())
    manifest.close()
    file.write_bytes(b"no database" * 1000 if damage == "no database" else b"")
    assert reopened(tmp_path) == []
    assert (tmp_path / "damaged.sqlite").exists() == (damage != "nothing")


def test_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Manifest(tmp_path / "file")


class ManifestModel(RuleBasedStateMachine):
    """Beside a dict, closed and opened again."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.manifest = Manifest(Path(self.folder.name))
        self.rows: dict[str, Row] = {}

    names = st.sampled_from("abcd")

    @rule(name=names, num_bytes=st.integers(1, 9), is_first=st.booleans())
    def put(self, name: str, num_bytes: int, is_first: bool) -> None:
        whole = make_row(name, num_bytes=num_bytes)
        first = whole._replace(place=whole.place._replace(prefix=()), heads=())
        self.rows[name] = first if is_first else whole
        self.manifest.put(self.rows[name])

    @rule(names=st.lists(names))
    def drop(self, names: list[str]) -> None:
        self.manifest.drop(names)
        for name in names:
            self.rows.pop(name, None)

    @rule(name=names, priority=st.floats(0, 100), num_uses=st.integers(1, 9))
    def use(self, name: str, priority: float, num_uses: int) -> None:
        self.manifest.use({name: (priority, num_uses)})
        if name in self.rows:
            self.rows[name] = self.rows[name]._replace(priority=priority, num_uses=num_uses)

    @rule()
    def restart(self) -> None:
        self.manifest.close()
        self.manifest = Manifest(Path(self.folder.name))

    @invariant()
    def agrees(self) -> None:
        found = self.manifest.rows()
        assert {row.name: row for row in found} == self.rows
        assert [row.priority for row in found] == sorted(
            (row.priority for row in found), reverse=True
        )

    def teardown(self) -> None:
        self.manifest.close()
        self.folder.cleanup()


TestManifestModel = ManifestModel.TestCase
TestManifestModel.settings = settings(
    max_examples=examples(100), stateful_step_count=15, deadline=None
)
