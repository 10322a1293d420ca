"""Sampling parameters: SGLang's own types and ranges, and a refusal that names the client's
field."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.guard.lethal import Limits
from sglang_chunkcache.front.guard.sampling import INTERNAL, Declared, SamplingCheck

TOKENIZER = SimpleNamespace(encode=lambda text, add_special_tokens: list(text))
check = SamplingCheck(TOKENIZER, Limits(1101, None))


def said(params: dict[str, Any], top_logprobs_num: int = 0) -> str:
    """What is said of these parameters, nothing if they pass."""
    try:
        check(params, top_logprobs_num=top_logprobs_num, called=lambda name: f"my.{name}")
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", Declared.__struct_fields__)
def test_every_parameter_is_typed(name: str) -> None:
    """Those of a later release of SGLang, too: the types are SGLang's."""
    assert said({name: [{}]}).startswith(f"my.{name}: must be ")
    assert said({name: None}) == ""


@pytest.mark.parametrize("name", [*INTERNAL, "no_such", "rid"])
def test_other_names_are_refused(name: str) -> None:
    """What SGLang sets itself, and what it does not know."""
    assert said({name: None}) == f"my.{name}: is no field here"
    assert set(INTERNAL) < set(SamplingParams.__struct_fields__), "a later release has others"


GOOD: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0, "max_new_tokens": 0, "n": 1},
    {"stop": "x", "stop_token_ids": [5, 6], "stop_regex": ["a+"], "skip_special_tokens": False},
    {"stop": ["x", "y"], "logit_bias": {"5": 1, "6": -0.5}, "sampling_seed": -1},
    {"custom_params": {"a": 1, "b": [1, "x", None], "c": {"d": 0.5}}, "regex": "a*"},
    {"ignore_eos": True},
]


@pytest.mark.parametrize("params", GOOD, ids=str)
def test_good_parameters_pass(params: dict[str, Any]) -> None:
    assert said(params, top_logprobs_num=1101) == ""


def nested(depth: int) -> Any:
    """An object in an object."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


BAD_VALUES: dict[str, list[Any]] = {
    "skip_special_tokens": ["x", 1],
    "logit_bias": [{"5": "x"}, {"5000": 1}, {"x": 1}],
    "temperature": [-1, float("nan")],
    "top_p": [0],
    "top_k": [0, 2**31],
    "max_new_tokens": [-1, True, 1.0],
    "n": [129, 0],
    "stop": [[5], ["a"] * 33, "a" * 4097, ["a" * 2100] * 2],
    "stop_token_ids": [[-1], [10**30]],
    "stop_regex": ["(", "a{99999999999}", "a" * 257, ["a"] * 33],
    "regex": ["a" * 100_001],
    "json_schema": [{}],
    "sampling_seed": [2**63, 0.5],
    "custom_params": [[1], nested(3), nested(900), {"__sglang_reasoning_end_token_ids": "x"}],
    "beam_width": [0],
}
BAD: list[tuple[dict[str, Any], str]] = [
    *(({field: value}, field) for field, values in BAD_VALUES.items() for value in values),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens"),
    ({"regex": "a", "ebnf": "b"}, "regex"),
]


@pytest.mark.parametrize(("params", "field"), BAD, ids=[str(case[0])[:60] for case in BAD])
def test_bad_parameter_is_refused_by_name(params: dict[str, Any], field: str) -> None:
    """With the client's name in front of the colon, and a reason behind it."""
    place, _, reason = said(params).partition(": ")
    assert place == f"my.{field}"
    assert reason
    assert not reason.startswith(field)


@pytest.mark.parametrize("count", [-1, 1102, 10**30])
def test_top_logprobs_are_bounded(count: int) -> None:
    assert said({}, top_logprobs_num=count) == "my.top_logprobs_num: must be between 0 and 1101"
