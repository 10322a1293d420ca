"""`ChunkCacheConfig`: ranges, flags and the way to SGLang's processes."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from sglang_chunkcache import config
from sglang_chunkcache.config import ChunkCacheConfig

KNOBS = [f for f in dataclasses.fields(ChunkCacheConfig) if "low" in f.metadata]


def made_of(*flags: str) -> ChunkCacheConfig:
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    return config.from_flags(parser.parse_args(flags))


def value_of(field: Any) -> Any:
    """One that is not the default."""
    known, kind = field.metadata, config.kind_of(field)
    if known["choices"]:
        return known["choices"][-1]
    return kind(known["low"] + 1) if kind in (int, float) else "text"


@pytest.mark.parametrize("field", KNOBS, ids=lambda f: f.name)
def test_value_out_of_range_is_refused_by_flag(field: Any) -> None:
    """The message names the flag and what it may be; the limits themselves are allowed."""
    known, flag = field.metadata, config.flag_name(field.name)
    bad: list[tuple[Any, str]] = (
        [("nonsense", f"one of .*{known['choices'][0]}")] if known["choices"] else []
    )
    for limit, step, words in ((known["low"], -1, "at least"), (known["high"], 1, "at most")):
        if limit is not None:
            bad.append((limit + step, words))
            ChunkCacheConfig(**{field.name: config.kind_of(field)(limit)})
    for value, words in bad:
        with pytest.raises(ValueError, match=f"{flag} must be {words}"):
            ChunkCacheConfig(**{field.name: value})


@pytest.mark.parametrize("value", [True, "3", None, float("nan")], ids=repr)
def test_number_of_wrong_kind_is_refused(value: Any) -> None:
    """A value that is no number must not reach a comparison later."""
    with pytest.raises(ValueError, match="--chunkcache-window-requests"):
        ChunkCacheConfig(window_requests=value)


def test_environment_round_trip_keeps_everything() -> None:
    """SGLang's fresh processes see the launcher's configuration, with a secret of this start."""
    settings = ChunkCacheConfig(order="frequency", max_load_ratio=2.5, chunk_separator="\n--\n")
    got, other = (config.from_env(settings.to_env()) for _ in range(2))
    assert got is not None
    assert other is not None
    assert dataclasses.replace(got, secret="") == settings
    assert len(got.secret) == 32
    assert got.secret != other.secret
    assert config.from_env(got.to_env()) == got
    assert config.from_env({}) is None


@pytest.mark.parametrize("field", config.flag_fields(), ids=lambda f: f.name)
def test_flag_sets_its_field(field: Any) -> None:
    """Every knob has a flag of its type, and some a short one for what a newcomer types."""
    value = value_of(field)
    flag = config.flag_name(field.name)
    for each in (flag, config.SHORT_FLAGS.get(field.name, flag)):
        assert getattr(made_of(each, str(value)), field.name) == value
    assert getattr(made_of(), field.name) == field.default


def test_help_is_the_manual() -> None:
    """In groups, each flag with the reason for its default; a secret has none."""
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    assert "secret" not in parser.format_help()
    assert all(config.help_texts()[f.name][1] for f in KNOBS)
    grouped = [f for group in config.GROUPS.values() for f in config.flag_fields(group)]
    assert [f.name for f in grouped] == [f.name for f in config.flag_fields()]
    assert len(config.flag_fields()) <= 53


def test_more_retrieved_than_a_request_may_have_is_refused() -> None:
    """Every request that leaves k to the server would be."""
    with pytest.raises(ValueError, match="-retrieve-k must be at most --chunkcache-max-chunks"):
        ChunkCacheConfig(index="somewhere", retrieve_k=9, max_chunks=8)
    ChunkCacheConfig(retrieve_k=9, max_chunks=8)
