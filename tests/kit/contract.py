"""What a contract with a library is checked by: parameters, fields and source text."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names of a function's parameters, `self` left out;
    `*` marks where keyword-only ones begin."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return names[1:] if names[:1] == ["self"] else names


def other_signatures(owner: Any, signatures: str) -> dict[str, list[str]]:
    """Of `name(parameters)`, one after the other: those that `owner` has otherwise, and how.
    `...` at the end: and perhaps more."""
    found = {}
    for name, expected in re.findall(r"(\w+)\(([^)]*)\)", signatures):
        names, given = expected.replace(",", " ").split(), parameters(getattr(owner, name))
        if names[-1:] == ["..."]:
            names, given = names[:-1], given[: len(names) - 1]
        if names != given:
            found[name] = given
    return found


def fields(cls: Any) -> set[str]:
    """Of a dataclass, msgspec's struct, NamedTuple or pydantic model."""
    for name in ("__struct_fields__", "model_fields", "_fields"):
        if found := getattr(cls, name, None):
            return set(found)
    return {field.name for field in dataclasses.fields(cls)}


def source(code: object) -> str:
    """With all white space as single blanks."""
    return re.sub(r"\s+", " ", inspect.getsource(code))  # type: ignore[arg-type]


def has_in_order(code: object, *pieces: str) -> bool:
    """Whether the source has each, and their first occurrences follow each other."""
    text = source(code)
    places = [text.find(piece) for piece in pieces]
    return -1 not in places and places == sorted(places)
