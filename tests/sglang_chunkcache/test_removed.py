"""What earlier versions had is refused by name, with what to use instead."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from sglang_chunkcache import config
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.bodies import RagFields
from sglang_chunkcache.front.parse import parse, refuse_misspelt
from sglang_chunkcache.removed import REMOVED

FLAGS = [name.split() for name in REMOVED if name.startswith("--chunkcache-")]
FIELDS = [name.split() for name in REMOVED if not name.startswith("--")]
KNOBS = {config.flag_name(f.name) for f in config.flag_fields()}


@pytest.mark.parametrize("given", FLAGS, ids=" ".join)
def test_removed_flag_or_value_is_refused(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With one line that tells what to use; a flag with and without a value behind it."""
    flag, *values = given
    assert (flag in KNOBS) == bool(values)
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    assert flag not in parser.format_help() or values
    if values:
        with pytest.raises(ValueError, match=" ".join(given)) as refused:
            config.from_flags(parser.parse_args(given))
        assert REMOVED[" ".join(given)] in str(refused.value)
        return
    for argv in ([flag], [flag, "1"], [f"{flag}=1"]):
        with pytest.raises(SystemExit):
            parser.parse_args(argv)
        assert f"{flag} was removed: {REMOVED[flag]}" in capsys.readouterr().err


def read(body: dict[str, Any]) -> None:
    refuse_misspelt(body, RagFields.model_fields, ())
    parse(RagFields, body).fusion_request(ChunkCacheConfig(reuse="fused"))


@pytest.mark.parametrize("given", FIELDS, ids=" ".join)
def test_removed_field_or_value_is_refused(given: list[str]) -> None:
    """By its path in the body."""
    path, value = given[0].split("."), given[1] if given[1:] else 1
    body = {path[0]: value if len(path) == 1 else {"mode": "fused", path[1]: value}}
    with pytest.raises(RequestError) as refused:
        read(body)
    assert str(refused.value) == f"{given[0]}: was removed: {REMOVED[' '.join(given)]}"
