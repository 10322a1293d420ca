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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """(spec, folder) of a default encoder."""
    folder = tmp_path_factory.mktemp("index")
    encoder = fit_default(TEXTS, dim=8, seed=0)
    encoder.save(folder / STATE_FILE)
    return encoder.spec(), folder


def test_default_encoder_comes_back(saved: tuple[dict[str, Any], Path]) -> None:
    """The spec survives JSON, and the encoder loaded from it gives the same vectors."""
    spec, folder = saved
    loaded: Encoder = load_encoder(
        json.loads(json.dumps(spec)), folder=folder, override=None, device=None, batch_size=1
    )
    assert loaded.spec() == spec
    assert np.array_equal(
        loaded.encode_queries(TEXTS), fit_default(TEXTS, dim=8, seed=0).encode_queries(TEXTS)
    )


def test_override_of_the_default_encoder_is_refused(saved: tuple[dict[str, Any], Path]) -> None:
    """--encoder with an index that has its own would silently do nothing."""
    spec, folder = saved
    with pytest.raises(RetrievalError, match="embedded"):
        load_encoder(spec, folder=folder, override="some/model", device=None, batch_size=1)


@pytest.mark.parametrize("change", [{"kind": "other"}, {"kind": None}, {"dim": 9}])
def test_spec_that_does_not_fit_is_refused(
    saved: tuple[dict[str, Any], Path], change: dict[str, Any]
) -> None:
    """A record of another program's, or of another encoder's, index."""
    spec, folder = saved
    with pytest.raises(CorruptIndexError):
        load_encoder(spec | change, folder=folder, override=None, device=None, batch_size=1)


@pytest.mark.parametrize("spec", [{}, {"kind": "hashed"}, {"kind": "sentence"}])
def test_incomplete_spec_is_refused(
    saved: tuple[dict[str, Any], Path], spec: dict[str, Any]
) -> None:
    """A KeyError would be a traceback at the user's."""
    with pytest.raises(CorruptIndexError):
        load_encoder(spec, folder=saved[1], override=None, device=None, batch_size=1)
