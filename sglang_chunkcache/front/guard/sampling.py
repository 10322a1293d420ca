"""What a request may ask of sampling and logprobs: SGLang's own types and ranges, checked before
SGLang sees the request.

SGLang declares a type for every parameter but converts nothing: a value of another type gets past
its checks and raises in another process, where nobody catches it.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.guard.lethal import GRAMMARS, Limits, sampling_problem
from sglang_chunkcache.front.parse import named_in

MAX_ANSWERS = 128
"""Answers of one request (`n`), OpenAI's limit. SGLang makes a request of each, all at once."""
MAX_STOP_CHARS = 4096
"""Of all stop strings: SGLang tokenises them on the event loop."""
MAX_GRAMMAR_CHARS = 100_000
"""The memory that xgrammar takes grows with the square of a grammar's rules:
20,000 rules in 340,000 characters took 1.5 GB."""

INTERNAL = (
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
)
"""Fields of SGLang's struct that it sets itself; a client's would switch its checks off."""

TYPES = {**typing.get_type_hints(SamplingParams), "logit_bias": dict[int, float]}
"""As SGLang declares them, but for a key that it reads as a number."""
Declared = msgspec.defstruct(
    "Declared", [(name, kind | None, None) for name, kind in TYPES.items() if name not in INTERNAL]
)
"""SGLang's parameters by name; null is the default."""


class SamplingCheck:
    """Checks parameters in SGLang's names.

    Args:
        tokenizer: SGLang's; it measures stop strings.
    """

    def __init__(self, tokenizer: Any, limits: Limits) -> None:
        self._tokenizer, self._limits = tokenizer, limits

    def __call__(
        self, params: Mapping[str, Any], *, top_logprobs_num: int, called: Callable[[str], str]
    ) -> None:
        """Return if SGLang can use them.

        Args:
            params: as they go to SGLang.
            top_logprobs_num: beside them.
            called: the client's name for a parameter of SGLang's.
        Raises:
            RequestError: names the field as the client does.
        """
        if not 0 <= top_logprobs_num <= self._limits.vocab_size:
            raise RequestError(
                f"{called('top_logprobs_num')}: must be between 0 and {self._limits.vocab_size}"
            )
        for name in params:
            if name not in Declared.__struct_fields__:
                raise RequestError(f"{called(name)}: is no field here")
        try:
            # types first, since all that follows computes with them; keys of JSON are strings
            msgspec.convert(params, Declared, str_keys=True)
            # before `normalize`, which tokenises every stop string
            _check_bounds(params)
            if rule := sampling_problem(params, self._limits):
                raise ValueError(f"{rule.name} must {rule.must}")
            checked = SamplingParams(**params)
            checked.normalize(self._tokenizer)
            checked.verify(self._limits.vocab_size)
        # `normalize` reads the patterns with Python's own parser, and catches none of its errors
        except (re.error, OverflowError, RecursionError) as error:
            raise RequestError(f"{called('stop_regex')}: {error}") from None
        except ValueError as error:
            raise _named(error, params, called) from None


def _check_bounds(params: Mapping[str, Any]) -> None:
    """Raise ValueError for what SGLang does not bound."""
    if not 1 <= (1 if params.get("n") is None else params["n"]) <= MAX_ANSWERS:
        raise ValueError(f"n must be between 1 and {MAX_ANSWERS}")
    stop = params.get("stop") or ()
    if sum(map(len, [stop] if isinstance(stop, str) else stop)) > MAX_STOP_CHARS:
        raise ValueError(f"stop must have at most {MAX_STOP_CHARS} characters")
    for name in GRAMMARS:
        if len(params.get(name) or "") > MAX_GRAMMAR_CHARS:
            raise ValueError(f"{name} must have at most {MAX_GRAMMAR_CHARS} characters")


def _named(
    error: ValueError, params: Mapping[str, Any], called: Callable[[str], str]
) -> RequestError:
    """The error behind the first parameter that it speaks of, of those given."""
    # msgspec's form: Expected `int`, got `str` - at `$.top_k`
    reason, _, place = str(error).partition(" - at `$.")
    given = {name for name, value in params.items() if value is not None}
    # the only complaint of SGLang's without a name is about a key of custom_params
    name = named_in(place or reason, given) or "custom_params"
    return RequestError(
        f"{called(name)}: {reason.removeprefix(name).replace('Expected', 'must be').strip()}"
    )
