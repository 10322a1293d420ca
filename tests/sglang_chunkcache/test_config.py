"""`ChunkCacheConfig`: ranges, flags and the way to SGLang's processes."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from sglang_chunkcache import config
from sglang_chunkcache.config import ChunkCacheConfig

KNOBS = [f for f in dataclasses.fields(ChunkCacheConfig) if f.metadata.get("help")]


@pytest.mark.parametrize("field", [f for f in KNOBS if f.metadata["choices"]], ids=lambda f: f.name)
def test_unknown_choice_is_refused_by_flag(field: Any) -> None:
    """The message names the flag and what it may be."""
    with pytest.raises(
        ValueError,
        match=f"{config.flag_name(field.name)} must be one of .*{field.metadata['choices'][0]}",
    ):
        ChunkCacheConfig(**{field.name: "nonsense"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", [f for f in KNOBS if f.metadata["low"] is not None], ids=lambda f: f.name
)
def test_value_below_its_range_is_refused(field: Any) -> None:
    """The message names the flag and the limit."""
    low = field.metadata["low"]
    with pytest.raises(ValueError, match=f"{config.flag_name(field.name)} must be at least {low}"):
        ChunkCacheConfig(**{field.name: low - 1})
    ChunkCacheConfig(**{field.name: field.metadata["kind"](low)})


@pytest.mark.parametrize(
    "field", [f for f in KNOBS if f.metadata["high"] is not None], ids=lambda f: f.name
)
def test_value_above_its_range_is_refused(field: Any) -> None:
    """As above."""
    high = field.metadata["high"]
    with pytest.raises(ValueError, match=f"{config.flag_name(field.name)} must be at most"):
        ChunkCacheConfig(**{field.name: high + 1})
    ChunkCacheConfig(**{field.name: high})


@pytest.mark.parametrize("value", [True, "3", None, float("nan")], ids=repr)
def test_number_of_wrong_kind_is_refused(value: Any) -> None:
    """A value that is no number must not reach a comparison later."""
    with pytest.raises(ValueError, match="--chunkcache-window-requests"):
        ChunkCacheConfig(window_requests=value)


def test_environment_round_trip_keeps_everything() -> None:
    """SGLang's fresh processes see the launcher's configuration, secret included."""
    settings = ChunkCacheConfig(
        order="frequency", max_load_ratio=2.5, rag_template="x.txt", chunk_separator="\n--\n"
    )
    env = settings.to_env()
    got = config.from_env(env)
    assert got is not None
    assert dataclasses.replace(got, secret="") == settings
    assert len(got.secret) == 32


def test_environment_keeps_a_secret_that_is_there() -> None:
    """Handing the same configuration on again must not change the mark."""
    settings = ChunkCacheConfig(secret="x")
    got = config.from_env(settings.to_env())
    assert got is not None
    assert got.secret == "x"


def test_environment_draws_a_secret_per_start() -> None:
    """No two servers share a mark."""
    assert ChunkCacheConfig().to_env() != ChunkCacheConfig().to_env()


def test_no_environment_is_no_configuration() -> None:
    """Not started by our launcher."""
    assert config.from_env({}) is None


def test_flags_give_the_defaults() -> None:
    """One place for every number."""
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    assert config.from_flags(parser.parse_args([])) == ChunkCacheConfig()


@pytest.mark.parametrize("field", config.flag_fields(), ids=lambda f: f.name)
def test_flag_sets_its_field(field: Any) -> None:
    """Every knob has a flag of its type."""
    if field.metadata["choices"]:
        value = field.metadata["choices"][-1]
    elif field.metadata["kind"] in (int, float):
        value = field.metadata["kind"](field.metadata["low"] + 1)
    else:
        value = "text"
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    args = parser.parse_args([config.flag_name(field.name), str(value)])
    assert getattr(config.from_flags(args), field.name) == value


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--reuse", "reuse", "fused"),
        ("--index", "index", "path"),
        ("--encoder", "encoder", "path"),
        ("--recompute-attention", "recompute_attention", "sparse"),
    ],
)
def test_short_flag_is_the_long_one(flag: str, field: str, value: str) -> None:
    """For what a newcomer types."""
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    args = parser.parse_args([flag, value])
    assert getattr(config.from_flags(args), field) == value


def test_secret_has_no_flag() -> None:
    """A secret on the command line is one that everybody on the machine reads."""
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    assert "secret" not in parser.format_help()


def test_every_knob_has_help() -> None:
    """`--help` is the manual: in groups, each flag with the reason for its default."""
    assert all(f.metadata["why"] for f in KNOBS)
    assert set(config.GROUPS) <= {f.name for f in config.flag_fields()}
    assert len(config.flag_fields()) <= 50


def test_config_is_frozen() -> None:
    """Shared by every part of a process."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        ChunkCacheConfig().order = "retriever"  # type: ignore[misc]


def test_more_retrieved_than_a_request_may_have_is_refused() -> None:
    """Every request that leaves k to the server would be."""
    with pytest.raises(
        ValueError, match="--chunkcache-retrieve-k must be at most --chunkcache-max-chunks"
    ):
        ChunkCacheConfig(index="somewhere", retrieve_k=9, max_chunks=8)
    ChunkCacheConfig(retrieve_k=9, max_chunks=8)
