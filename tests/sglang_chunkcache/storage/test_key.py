"""Names of entries: they tell apart whatever KV depends on, and tell nothing of tenants."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from radix_ext import ChunkId
from sglang_chunkcache.storage.entry import Layout
from sglang_chunkcache.storage.key import SECRET_FILE_VAR, SECRET_VAR, Names, Place, secret_of

NAMES = Names(b"")
LAYOUT = Layout(2, 1, 4, 4, "bfloat16")
ROPE = {"rope_theta": 1e4}
CONFIG: dict[str, Any] = {"hidden_size": 8, "rope_parameters": ROPE, "_name_or_path": "/a"}
PLACE = Place("m", "t", ChunkId("c"), "h", (ChunkId("a"), ChunkId("b")), False)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "n"},
        {"tenant": "u"},
        {"chunk": ChunkId("d")},
        {"head": "g"},
        {"prefix": (ChunkId("b"), ChunkId("a"))},
        {"prefix": (ChunkId("ab"),)},
        {"prefix": ()},
        {"head": "ha", "prefix": (ChunkId("b"),)},
        {"preprocessed": True},
    ],
)
def test_each_part_of_a_place_makes_another_name(fields: dict[str, Any]) -> None:
    """One name for two would be KV of another prompt."""
    assert NAMES.entry(PLACE._replace(**fields), 0, False, ()) != NAMES.entry(PLACE, 0, False, ())


def test_name_tells_what_was_measured() -> None:
    """Backends overwrite nothing, so an entry with more is another entry."""
    heads: tuple[tuple[tuple[int, int], ...], ...] = (((0, 1),), ((1, 0),))
    kinds = itertools.product((0, 1, 2), (False, True), heads)
    assert len({NAMES.entry(PLACE, *kind) for kind in kinds}) == 6 * len(heads) - 1
    assert NAMES.entry(PLACE, 0, False, heads[0]) == NAMES.entry(PLACE, 0, False, heads[1])


@pytest.mark.parametrize(
    "other",
    [
        ({**CONFIG, "rope_parameters": {"rope_theta": 1e5}}, LAYOUT, 1),
        (CONFIG, LAYOUT, 2),
        (CONFIG, LAYOUT, 1, "exact"),
        (CONFIG, Layout(2, 1, 4, 4, "float16"), 1),
        (CONFIG, Layout(2, 1, 4, 2, "bfloat16"), 1),
    ],
)
def test_each_part_of_a_model_makes_another_name(
    other: tuple[Mapping[str, object], Layout, int],
) -> None:
    """Config, weights, how KV lies in the pool and was computed; not where its files lie."""
    name = NAMES.model(CONFIG, LAYOUT, 1)
    assert NAMES.model(*other) != name
    assert NAMES.model({**CONFIG, "_name_or_path": "/b"}, LAYOUT, 1) == name


def test_tenants_are_told_apart() -> None:
    """SGLang keeps an empty salt apart from none."""
    given = [*itertools.product((None, "", "-", "+", "a", "b", "ab"), repeat=2)]
    assert len({NAMES.tenant(*each) for each in given}) == len(given)


def test_salt_stands_in_no_name() -> None:
    """And with a secret nobody can try salts until a name fits."""
    assert "pepper" not in NAMES.tenant("pepper", "pepper")
    assert Names(b"s").tenant("a", None) != NAMES.tenant("a", None)
    assert Names(b"s").entry(PLACE, 0, False, ()) != NAMES.entry(PLACE, 0, False, ())


def test_secret_comes_from_variable_or_file(tmp_path: Path) -> None:
    """A flag would show it to every process of the machine. A bad one is refused."""
    file, empty = tmp_path / "secret", tmp_path / "empty"
    file.write_text("x" * 1000 + "\n")
    found = secret_of({SECRET_FILE_VAR: str(file)})
    assert found == secret_of({SECRET_VAR: "x" * 1000}) != secret_of({SECRET_VAR: "y"})
    assert secret_of({}) == b""
    empty.write_text("\n")
    for path, more in ((file, {SECRET_VAR: "a"}), (empty, {}), (tmp_path / "none", {})):
        with pytest.raises(ValueError, match=SECRET_FILE_VAR):
            secret_of({SECRET_FILE_VAR: str(path), **more})
