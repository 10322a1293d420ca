"""From an index's record back to its encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval.encoder import Encoder, load_encoder
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.hashed_encoder import STATE_FILE, fit_default

pytest.importorskip("sklearn")

TEXTS = ["a lighthouse keeper", "the harbour at night"]
SPEC = {"kind": "hashed", "version": 2, "dim": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    fit_default(TEXTS, dim=8, seed=0).save(folder / STATE_FILE)
    return folder


def load(spec: dict[str, Any], folder: Path, override: str | None = None) -> Encoder:
    return load_encoder(spec, folder=folder, override=override, device=None, batch_size=1)


def test_default_encoder_comes_back(folder: Path) -> None:
    """With the same vectors; --encoder with it would silently do nothing."""
    fitted = fit_default(TEXTS, dim=8, seed=0)
    loaded = load(json.loads(json.dumps(fitted.spec())), folder)
    assert loaded.spec() == fitted.spec() == SPEC
    assert np.array_equal(loaded.encode_queries(TEXTS), fitted.encode_queries(TEXTS))
    with pytest.raises(RetrievalError, match="embedded"):
        load(SPEC, folder, override="some/model")


@pytest.mark.parametrize(
    "spec",
    [{}, {"kind": "hashed"}, {"kind": "sentence"}, {**SPEC, "kind": "other"}, {**SPEC, "dim": 9}],
)
def test_spec_that_does_not_fit_is_refused(folder: Path, spec: dict[str, Any]) -> None:
    """A record of another program's, or of another encoder's, index; or half of one."""
    with pytest.raises(CorruptIndexError):
        load(spec, folder)
