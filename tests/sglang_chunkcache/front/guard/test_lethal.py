"""What the guard refuses and what it lets pass, without a server.
That a stock server dies: tests/e2e/test_lethal.py."""

from __future__ import annotations

import asyncio
import copy
import timeit
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import sglang
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput
from transformers import BatchEncoding

from sglang_chunkcache.front.guard.lethal import REQUEST_RULES, SAMPLING_RULES, SEEN, Guard, Limits
from sglang_chunkcache.front.metrics import Metrics
from sglang_chunkcache.front.misplaced import Misplaced
from sglang_chunkcache.hooks import _watched
from tests.e2e.lethal import LETHAL

VOCAB = 1101


def guard(*labels: str, mode: str = "null") -> tuple[Guard, Metrics]:
    """Of a server with the bundled model's vocabulary."""
    metrics = Metrics(prometheus=False)
    limits = Limits(VOCAB, frozenset(labels), disaggregation=mode)
    return Guard(lambda: limits, lambda: metrics), metrics


def refused(*labels: str, **fields: Any) -> str:
    """What is said of a request with these fields, nothing if it passes."""
    return str(guard(*labels)[0].refusal(GenerateReqInput(**{"text": "hi", **fields})) or "")


@pytest.mark.parametrize("case", LETHAL, ids=lambda case: case.id)
def test_lethal_request_is_refused(case: Any) -> None:
    """Each that ends a stock server, by its field, and counted; `obj` stays as it was."""
    looks, metrics = guard(mode=case.mode)
    obj = GenerateReqInput(**case.body)
    before = copy.deepcopy(vars(obj))
    error = looks.refusal(obj)
    assert str(error).split(":")[0] == case.field
    assert metrics.totals()["guarded"] == {case.field: 1}
    assert vars(obj) == before


def test_every_rule_has_a_lethal_request() -> None:
    """A rule without proof would refuse what may be harmless; a new release needs its own."""
    rules = [*REQUEST_RULES.values(), *SAMPLING_RULES.values()]
    assert {rule.field for rule in rules} == {case.field for case in LETHAL}
    assert all(rule.versions and {*rule.versions} <= {*SEEN} for rule in rules)
    assert sglang.__version__ in SEEN


PARAMETERS: list[dict[str, Any]] = [
    {"skip_special_tokens": False, "spaces_between_special_tokens": 1, "is_normalized": False},
    {"logit_bias": {"5": 1, "6": -1.5, "7": True}, "top_k": 2**31 - 1, "beam_width": 2},
    {"logit_bias": {}, "top_k": "x", "stop_token_ids": ["7", VOCAB, 0], "regex": 5, "n": 3},
    {"stop_token_ids": None, "regex": None, "json_schema": '{"type": "object"}'},
    {"stop_token_ids": "no number", "ebnf": True, "n": 1000, "stream_interval": 0},
    {"repetition_penalty": 10**400, "temperature": 10**38, "logit_bias": {"5": 10**38}},
    {"min_new_tokens": 2, "regex": "", "stop": ["a", None], "stop_token_ids": [*range(VOCAB // 2)]},
    {"min_new_tokens": 0, "json_schema": "{}", "stop": "a"},
    {"stop_regex": ["(a+b)+c", r"(\w+\s)+x", "(a|b)*c", "("], "repetition_penalty": 1e-3},
]
TWO = {"text": ["a", "b"]}
HARMLESS: list[dict[str, Any]] = [
    {},
    {"sampling_params": {}},
    {**TWO, "sampling_params": [{"max_new_tokens": 1}, {"top_k": -1}]},
    *({"sampling_params": params} for params in PARAMETERS),
    {"text": None, "input_ids": [0, VOCAB - 1]},
    {"text": None, "input_ids": [[0], [VOCAB - 1]]},
    {"text": None, "input_ids": [], "session_params": {"id": "s"}},
    {"text": None, "input_ids": [5, -100], "image_data": "x"},
    {"text": None, "input_ids": BatchEncoding({"input_ids": [5]})},
    {"logprob_start_len": -5},
    {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": VOCAB},
    {"return_logprob": True, "logprob_start_len": 10**30, "top_logprobs_num": -1},
    {
        **TWO,
        "return_logprob": [True, False],
        "logprob_start_len": [0, -1],
        "top_logprobs_num": [3, 0],
    },
    {"priority": -(2**63)},
    {"session_params": {"id": "s", "rid": "r", "replace": True, "offset": 3}},
    {"session_params": {"id": 5, "rid": None, "replace": False}},
    {"lora_id": "x"},
    {**TWO, "lora_id": ["x", None]},
    {"lora_path": "a"},
    {"lora_path": []},
    {"lora_path": ["a"], "sampling_params": {"n": 2}},
    {**TWO, "lora_path": ["a", None]},
    {"custom_labels": {}},
    {"positional_embed_overrides": PositionalEmbeds(embeds=[torch.zeros(2)], positions=[0])},
    {**TWO, "positional_embed_overrides": [None, None]},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=str)
def test_harmless_request_passes(fields: dict[str, Any]) -> None:
    """Also an odd one, which SGLang answers or refuses by itself."""
    assert refused(**fields) == ""


def test_places_of_scoring_pass() -> None:
    """As `/v1/score` asks for them, with several prompts and with one."""
    asked = {"return_logprob": True, "token_ids_logprob": [1], "logprob_start_len": 0, "text": None}
    assert refused(**asked, input_ids=[[5, 6], [7]], token_indices_to_pool=[[0, 1], [0]]) == ""
    assert refused(**asked, input_ids=[5, 6], token_indices_to_pool=[1]) == ""
    assert refused(**asked, input_ids=[[5, 6], [7]], token_indices_to_pool=[[0], [1]]) != ""


def test_labels_of_the_server_pass() -> None:
    """Only those that Prometheus was told of."""
    assert refused("team", custom_labels={"team": "a"}) == ""
    assert refused("team", custom_labels={"team": "a", "x": "b"}).startswith("custom_labels: must ")
    without_metrics = Guard(lambda: Limits(VOCAB, None), lambda: Metrics(prometheus=False))
    assert without_metrics.refusal(GenerateReqInput(text="a", custom_labels={"x": "b"})) is None


def test_no_id_of_an_adapter_passes() -> None:
    """With adapters the scheduler looks for one of this id, and ends where there is none."""
    limits = Limits(VOCAB, None, has_adapters=True)
    looks = Guard(lambda: limits, lambda: Metrics(prometheus=False))
    for fields in ({"lora_id": "x"}, {**TWO, "lora_id": ["x", None]}):
        error = looks.refusal(GenerateReqInput(**{"text": "hi", **fields}))
        assert str(error).startswith("lora_id: must be left out")
    assert looks.refusal(GenerateReqInput(text="hi", lora_path="a")) is None


ROOM = {"bootstrap_host": "a", "bootstrap_port": 9, "bootstrap_room": 2**63 - 1}


@pytest.mark.parametrize(
    ("mode", "fields", "named"),
    [
        ("decode", ROOM, ""),
        ("decode", {}, ""),
        ("decode", {**TWO, **ROOM, "bootstrap_room": [1, 2]}, ""),
        ("decode", {**ROOM, "bootstrap_room": [1], "sampling_params": {"n": 2}}, ""),
        ("decode", {**TWO, **ROOM, "bootstrap_host": ["a", None]}, "bootstrap_room"),
        ("decode", {**ROOM, "bootstrap_host": 5}, "bootstrap_host"),
        ("decode", {**ROOM, "bootstrap_room": 2**63}, "bootstrap_room"),
        ("prefill", {**ROOM, "bootstrap_room": "x"}, "bootstrap_room"),
        ("prefill", {"bootstrap_room": 5}, ""),
        ("null", {**ROOM, "bootstrap_room": [1], "bootstrap_host": None}, ""),
    ],
)
def test_where_servers_meet_is_looked_at_in_a_pair(
    mode: str, fields: dict[str, Any], named: str
) -> None:
    error = guard(mode=mode)[0].refusal(GenerateReqInput(**{"text": "hi", **fields}))
    assert str(error or "").split(":")[0] == named


def test_one_bad_item_of_a_batch_is_enough() -> None:
    """SGLang splits a batch later."""
    batch: dict[str, Any] = {**TWO, "return_logprob": True}
    assert refused(**batch, top_logprobs_num=[1, VOCAB + 1]).startswith("top_logprobs_num: ")
    assert refused(**batch, logprob_start_len=[-1, -2]).startswith("logprob_start_len: ")
    params = refused(**batch, sampling_params=[{}, {"skip_special_tokens": "x"}])
    assert params.startswith("sampling_params.skip_special_tokens: ")


def test_types_that_only_some_doors_check() -> None:
    """`/vertex_generate` passes JSON on as it is."""
    wrong: list[dict[str, Any]] = [{"priority": "x"}, {"priority": 1.5}, {"top_logprobs_num": "x"}]
    for fields in [*wrong, {"logprob_start_len": "x", "return_logprob": True}]:
        assert refused(**fields).startswith(f"{next(iter(fields))}: ")


def test_ordinary_request_costs_nothing_to_speak_of() -> None:
    """A chat's parameters and 4,000 token ids: far below a millisecond, on any machine."""
    looks, _ = guard()
    params = {"temperature": 0.5, "max_new_tokens": 9, "stop": ["x"], "stop_token_ids": [7]}
    obj = GenerateReqInput(input_ids=[7] * 4000, sampling_params=params)
    assert looks.refusal(obj) is None
    assert min(timeit.repeat(lambda: looks.refusal(obj), number=10, repeat=5)) / 10 < 0.005


@pytest.mark.parametrize("stream", [True, False])
def test_several_answers_leave_nothing_behind(stream: bool) -> None:
    """SGLang's table has n entries for a prompt of n answers, and forgets one."""
    manager = SimpleNamespace(rid_to_state={"a": 1, "b": 2, "other": 3})
    obj = GenerateReqInput(text="hi", sampling_params={"n": 2}, stream=stream)

    async def generate(manager: Any, obj: Any, request: Any) -> AsyncIterator[int]:
        obj.rid = ["a", "b"]
        for output in range(3):
            yield output

    async def outputs() -> list[int]:
        misplaced = Misplaced(lambda: Metrics(prometheus=False))
        found = _watched(misplaced, guard()[0])(generate, manager, obj)
        return [output async for output in found] if stream else [await anext(found)]

    assert asyncio.run(outputs()) == ([0, 1, 2] if stream else [0])
    assert manager.rid_to_state == {"other": 3}
