"""A client's body as a model, and what is wrong with it by the client's own names: no class of ours or of SGLang's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from sglang_chunkcache.errors import RequestError

Model = TypeVar("Model", bound=BaseModel)

MAX_ERRORS = 5
"""Fields that one refusal names."""
SIMILARITY = 0.8
"""Of two names, from which one is taken for the other misspelt: `chunk` and `chunks` have .91, `store` and `order` .6."""
REASONS = {
    "missing": "is missing",
    "extra_forbidden": "is no field here",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
}
"""By pydantic's type of error, where its own words name a class or say too little."""


def parse(model: type[Model], body: dict[str, Any]) -> Model:
    """The body as `model`. Raises RequestError naming the fields that are wrong."""
    try:
        return model.model_validate(body)
    except (ValidationError, RequestValidationError) as error:
        reasons: dict[str, list[str]] = {}
        for item in error.errors():
            kept = reasons.setdefault(_place(item, body), [])
            if (reason := _reason(item)) not in kept:
                kept.append(reason)
        shown = list(reasons.items())[:MAX_ERRORS]
        raise RequestError("; ".join(f"{place}: {' or '.join(words)}" for place, words in shown)) from None


def refuse_misspelt(body: Iterable[str], ours: Iterable[str], theirs: Iterable[str]) -> None:
    """Raise RequestError for a name that is neither `ours` nor `theirs` and looks like one of ours. Other names pass."""
    by_letters = {_letters(name): name for name in ours}
    for name in set(body) - set(by_letters.values()) - set(theirs):
        if meant := get_close_matches(_letters(name), by_letters, n=1, cutoff=SIMILARITY):
            raise RequestError(f"{name}: is no field here; did you mean {by_letters[meant[0]]}?")


# Private, in order of use


def _place(item: Mapping[str, Any], body: Any) -> str:
    """The path of an error as far as it leads through the body: a union's branches, which pydantic names in it, are no places."""
    path, node = [], body
    for part in item["loc"]:
        is_place = part in node if isinstance(node, dict) else isinstance(node, list) and isinstance(part, int)
        if is_place:
            node = node[part]
        if is_place or (item["type"] == "missing" and part == item["loc"][-1]):
            path.append(str(part))
    return ".".join(path) or "body"


def _reason(item: Mapping[str, Any]) -> str:
    words = str(item["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    return REASONS.get(item["type"], words)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()
