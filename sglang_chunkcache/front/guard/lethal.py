"""Requests that end SGLang's server, refused before they reach it: one table of rules, each proven
on stock servers.

SGLang's main process passes most values on as they come. One that the scheduler or the detokenizer
cannot use raises there, and an exception there ends the server for everybody.
`tests/e2e/test_lethal.py` shows for each rule that a stock server dies of it.

What is wrong but harms only its own request is SGLang's to answer: nothing is refused here for
being odd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.guard.slow_regex import explodes
from sglang_chunkcache.front.metrics import Metrics

INT32_END = 2**31
INT64_END = 2**63
FLOAT32_MAX = 3.4e38
LARGE_LOGIT = 1000.0
# SGLang's `_SAMPLING_EPS`
GREEDY = 1e-6
JSON = (str, int, float, list, dict)
"""What a client can send. SGLang's own endpoints put objects of its own in some fields."""
PRIORITIES = range(-(2**63), 2**63 - 1)
"""SGLang adds 1 and gives the tree 64 bits."""

SEEN = ("0.5.21", "0.5.22", "0.5.23")
"""SGLang's releases that the tests have sent each such request."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rule must know of the server."""

    vocab_size: int
    labels: frozenset[str] | None
    """Names that `custom_labels` may have: one of SGLang's flags lists them.
    None: there are no metrics, any name will do."""
    has_adapters: bool = False
    """Requests may name LoRA adapters."""
    disaggregation: str = "null"
    """SGLang's `disaggregation_mode`: `prefill` or `decode`, of a pair."""


IsLethal = Callable[[Any, Mapping[str, Any], Limits], bool]
"""Of the field's value, which is not null; of all fields beside it; of the server's limits."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to end a server."""

    field: str
    """As `/generate` names it; of `sampling_params` with that in front."""
    must: str
    """The rest of the message, `field: must …`."""
    ends: str
    """What raises otherwise: in the scheduler, if no other process is named."""
    is_lethal: IsLethal
    versions: tuple[str, ...] = SEEN
    """Of SGLang, those that it ends. Others refuse or answer the request, for which nobody asks."""

    @property
    def name(self) -> str:
        """The last part of the field."""
        return self.field.rpartition(".")[2]


class Guard:
    """Looks at every engine request of one server.

    Args:
        limits, metrics: asked for when they are first needed, since SGLang must be up.
    """

    def __init__(self, limits: Callable[[], Limits], metrics: Callable[[], Metrics]) -> None:
        self._limits, self._metrics = limits, metrics

    def refusal(self, obj: Any) -> RequestError | None:
        """The error for SGLang's `GenerateReqInput` if it would end the server, else None.
        `obj` is only read."""
        rule = problem(vars(obj), self._limits())
        if rule is None:
            return None
        self._metrics().count("guarded", rule.field)
        return RequestError(f"{rule.field}: must {rule.must}")


def problem(fields: Mapping[str, Any], limits: Limits) -> Rule | None:
    """The rule that a request with these fields of `/generate` breaks:
    one prompt's, or a batch's lists."""
    if found := _broken(REQUEST_RULES, fields, limits):
        return found
    # the hook sees a batch before SGLang splits it
    several = (each for each in _each(fields["sampling_params"]) if isinstance(each, dict))
    return next(filter(None, (sampling_problem(each, limits) for each in several)), None)


def sampling_problem(params: Mapping[str, Any], limits: Limits) -> Rule | None:
    """The rule that one prompt's `sampling_params` break."""
    return _broken(SAMPLING_RULES, params, limits)


# Private, in order of use


def _broken(rules: Mapping[str, Rule], fields: Mapping[str, Any], limits: Limits) -> Rule | None:
    for name, rule in rules.items():
        value = fields.get(name)
        if value is not None and rule.is_lethal(value, fields, limits):
            return rule
    return None


def _each(value: Any) -> list[Any]:
    """A batch's values, or the one of a single prompt."""
    return value if isinstance(value, list) else [value]


def _has_unusable_ids(ids: Any, fields: Mapping[str, Any], limits: Limits) -> bool:
    # placeholders of images are no tokens
    is_text = not (fields["image_data"] or fields["video_data"] or fields["audio_data"])
    if not is_text or not isinstance(ids, list):  # one of SGLang's endpoints has an object
        return False
    # a single prompt may be empty: in a session it adds nothing to what is there
    prompts = ids if ids and isinstance(ids[0], list) else [ids] if ids else []
    return any(
        not prompt or min(prompt) < 0 or max(prompt) >= limits.vocab_size for prompt in prompts
    )


def _is_beyond(value: Any, least: float, most: float) -> bool:
    numbers = (number for number in _each(value) if number is not None)
    return any(not isinstance(each, int) or not least <= each <= most for each in numbers)


def _breaks_its_session(value: Any, fields: Mapping[str, Any], limits: Limits) -> bool:
    if not isinstance(value, dict):
        return False
    is_unhashable = any(isinstance(value.get(name), dict | list) for name in ("id", "rid"))
    replaces_all = value.get("replace") and value.get("rid") is None
    return bool(is_unhashable or replaces_all or not isinstance(value.get("offset"), int | None))


def _is_single(fields: Mapping[str, Any]) -> bool:
    ids = fields["input_ids"]
    # with a list of prompts SGLang hands each its own item, with one the list as it is
    return isinstance(fields["text"], str) or bool(ids and isinstance(ids[0], int))


def _reads_unknown_places(value: Any, fields: Mapping[str, Any], limits: Limits) -> bool:
    """Places are only there in a prompt that is computed whole, with logprobs,
    and no prompt's text tells how many."""
    ids, starts = fields["input_ids"], _each(fields["logprob_start_len"])
    has_logprobs = fields["return_logprob"] and fields["token_ids_logprob"]
    if not ids or not has_logprobs or any(start != 0 for start in starts):
        return True
    # a list too short raises in `GenerateReqInput.__getitem__`, for this request alone
    several = zip(value, ids, strict=False) if isinstance(ids[0], list) else [(value, ids)]
    return any(not 0 <= place < len(prompt) for places, prompt in several for place in places)


def _bans_no_token_or_all(ids: Any, fields: Mapping[str, Any], limits: Limits) -> bool:
    # The vocabulary's size itself is a column of SGLang's table, by which it pads rows
    # (`BatchedMinNewTokensPenalizer`).
    banned = set(_integers(ids))
    # half is far from all: the model has others that end a text, and some that it never samples
    return len(banned) > limits.vocab_size // 2 or any(
        not 0 <= token <= limits.vocab_size for token in banned
    )


def _integers(values: Any) -> Iterator[int]:
    """As SGLang reads them; what it cannot read it refuses itself."""
    for value in values if isinstance(values, list | str | dict) else ():
        if value is None:  # SGLang leaves it out
            continue
        try:
            yield int(value)
        except (TypeError, ValueError):
            return


def _is_no_bias(value: Any, fields: Mapping[str, Any], limits: Limits) -> bool:
    return not isinstance(value, dict) or not all(
        isinstance(bias, int | float) and _fits(bias, fields) for bias in value.values()
    )


def _overflows(value: Any, fields: Mapping[str, Any], limits: Limits) -> bool:
    """As a divisor of `LARGE_LOGIT`."""
    is_divisor = isinstance(value, int | float) and value > 0
    return is_divisor and not _fits(LARGE_LOGIT / min(value, FLOAT32_MAX), fields)


def _fits(logit: float, fields: Mapping[str, Any]) -> bool:
    """Whether a logit stays a number in 32 bits when it is divided by the temperature;
    below `GREEDY` SGLang does not divide."""
    temperature = fields.get("temperature")
    divisor = temperature if isinstance(temperature, int | float) and temperature >= GREEDY else 1.0
    # not divided: JSON has integers that are no float, and Python compares them
    return abs(logit) <= FLOAT32_MAX * min(divisor, FLOAT32_MAX)


def _are_no_strings(value: Any, fields: Mapping[str, Any], limits: Limits) -> bool:
    return any(not isinstance(one, str | None) for one in _each(value))


def _is_for_another_prompt(value: Any, fields: Mapping[str, Any], limits: Limits) -> bool:
    return isinstance(value, list) and _is_single(fields)


def _is_no_room(value: Any, fields: Mapping[str, Any], limits: Limits) -> bool:
    """In which a prefill and a decode server meet."""
    if limits.disaggregation == "null":
        return False
    is_outside = _is_beyond(value, -INT64_END, INT64_END - 1)
    return _is_list_for_one(value, fields) or is_outside or _lacks_host(fields, limits)


def _is_no_host(value: Any, fields: Mapping[str, Any], limits: Limits) -> bool:
    return limits.disaggregation == "decode" and (
        _is_list_for_one(value, fields) or _are_no_strings(value, fields, limits)
    )


def _lacks_host(fields: Mapping[str, Any], limits: Limits) -> bool:
    # a prefill server does not read it
    return limits.disaggregation == "decode" and None in _each(fields["bootstrap_host"])


def _is_list_for_one(value: Any, fields: Mapping[str, Any]) -> bool:
    """For one prompt and one answer: of several answers SGLang makes a batch."""
    params = fields["sampling_params"]
    is_batch = isinstance(params, dict) and params.get("n") not in (None, 1)
    return isinstance(value, list) and _is_single(fields) and not is_batch


def _is(*kinds: type) -> IsLethal:
    return lambda value, *_: isinstance(value, kinds)


def _is_not(*kinds: type) -> IsLethal:
    return lambda value, *_: not isinstance(value, kinds)


def _rules(*rules: Rule) -> dict[str, Rule]:
    return {rule.name: rule for rule in rules}


def _sampling(name: str, must: str, ends: str, is_lethal: IsLethal) -> Rule:
    return Rule(f"sampling_params.{name}", must, ends, is_lethal)


GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")

REQUEST_RULES = _rules(
    Rule(
        "input_ids",
        "have token ids of the vocabulary, and at least one for each prompt",
        "the embedding has no such row, an empty prompt no shape",
        _has_unusable_ids,
    ),
    Rule(
        "logprob_start_len",
        "be at least -1",
        "it counts other logprobs than it computed",
        # without logprobs SGLang does not read it
        lambda value, fields, _: (
            any(_each(fields["return_logprob"])) and _is_beyond(value, -1, math.inf)
        ),
    ),
    Rule(
        "top_logprobs_num",
        "be at most the size of the vocabulary",
        "`topk` has no more, also for another request in the batch",
        lambda value, _, limits: _is_beyond(value, -math.inf, limits.vocab_size),
    ),
    Rule(
        "priority",
        "fit into 64 bits",
        "SGLang's default tree, in Rust, takes no more",
        lambda value, *_: not isinstance(value, int) or value not in PRIORITIES,
        versions=("0.5.21", "0.5.22"),
    ),
    Rule(
        "rid",
        "be a string, or strings",
        "main process: it looks at how they begin",
        _are_no_strings,
    ),
    Rule(
        "session_id",
        "be a string",
        "SGLang's default tree, in Rust, takes nothing else",
        _is_not(str),
    ),
    Rule("received_time", "be a number", "main process: it counts from there", _is_not(int, float)),
    Rule(
        "return_hidden_states",
        "not be an empty list",
        "it takes no list",
        lambda value, *_: value == [],
    ),
    Rule(
        "lora_id",
        "be left out, `lora_path` names an adapter",
        "it is added to `extra_key`, and with adapters it looks for one of this id",
        lambda value, fields, limits: (
            limits.has_adapters or _is_for_another_prompt(value, fields, limits)
        ),
    ),
    Rule(
        "lora_path",
        "be a string for one prompt",
        "with adapters it is a list of ids, and is added to `extra_key`",
        lambda value, fields, limits: bool(value) and _is_list_for_one(value, fields),
    ),
    Rule(
        "bootstrap_room",
        "be a whole number of 64 bits for one prompt, with a `bootstrap_host`",
        "it looks up by it, stores it and, decoding, asks that host",
        _is_no_room,
    ),
    Rule(
        "bootstrap_host",
        "be a string for one prompt",
        "decoding, it looks at how it begins",
        _is_no_host,
    ),
    Rule(
        "positional_embed_overrides",
        "be left out",
        "it reads positions and tensors, which JSON cannot hold",
        lambda value, fields, limits: (
            _is_for_another_prompt(value, fields, limits)
            or any(isinstance(one, JSON) for one in _each(value))
        ),
    ),
    Rule(
        "custom_labels",
        "be labels that the server was started with",
        "main process: Prometheus knows no such label",
        lambda labels, fields, limits: (
            limits.labels is not None and not limits.labels.issuperset(labels)
        ),
    ),
    Rule(
        "session_params",
        "have strings as id and rid, a whole number as offset, and a rid with replace",
        "it looks up by them, cuts there, and without a rid changes what it reads",
        _breaks_its_session,
    ),
    Rule(
        "token_indices_to_pool",
        "be places in `input_ids`, with logprobs of `token_ids_logprob` from the prompt's start",
        "it reads beyond what was computed",
        _reads_unknown_places,
    ),
)

SAMPLING_RULES = _rules(
    _sampling(
        "skip_special_tokens",
        "be true or false",
        "detokenizer: the tokenizer takes nothing else",
        _is_not(bool),
    ),
    _sampling(
        "logit_bias",
        "be an object of numbers, within 32 bits also divided by the temperature",
        "it makes a tensor of them; infinite logits have no probabilities",
        _is_no_bias,
    ),
    _sampling(
        "repetition_penalty",
        "be large enough to divide logits by it in 32 bits",
        "infinite logits have no probabilities",
        _overflows,
    ),
    _sampling(
        "temperature",
        "fit into 32 bits",
        "hidden logits divided by infinity are no numbers",
        lambda value, *_: isinstance(value, int | float) and value > FLOAT32_MAX,
    ),
    _sampling(
        "top_k",
        "be a whole number that fits into 32 bits",
        "it makes a tensor of it",
        lambda value, *_: (
            isinstance(value, float) or (isinstance(value, int) and value >= INT32_END)
        ),
    ),
    _sampling(
        "min_new_tokens",
        "be 0 beside a grammar",
        "no token is left to sample when the grammar is through and the text too short",
        # how long the texts of a grammar are is not known here
        lambda value, fields, _: value != 0 and any(fields.get(name) for name in GRAMMARS),
    ),
    _sampling("stop", "be a string, or strings", "it looks for them in the text", _are_no_strings),
    _sampling("max_new_tokens", "be a whole number", "it cuts and counts by it", _is(float)),
    _sampling("beam_width", "be a whole number", "it cuts and counts by it", _is(float)),
    _sampling(
        "stop_token_ids",
        "be ids of the vocabulary, at most half of it",
        "with `min_new_tokens`, of another request too, it writes beyond the vocabulary,"
        " or none is left to sample",
        _bans_no_token_or_all,
    ),
    _sampling(
        "stream_interval",
        "be a number",
        "it divides by it",
        lambda value, *_: bool(value) and not isinstance(value, int | float),
    ),
    _sampling(
        "stop_regex",
        "not repeat what varies by itself",
        "Python's `re` tries up to 2^n ways on n letters, and nothing else runs",
        lambda value, *_: any(explodes(one) for one in _each(value) if isinstance(one, str)),
    ),
    _sampling(
        "is_normalized",
        "be left out",
        "SGLang's own mark, after which the temperature is not checked",
        lambda value, *_: bool(value),
    ),
    *(
        _sampling(name, "be a string", "the grammar cache hashes it", _is(dict, list))
        for name in GRAMMARS
    ),
)
"""By the last part of the field."""
