"""A client's body, read within limits, as a model;
and what is wrong with it by the client's own names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any, TypeVar

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import BodyTooLargeError, RequestError

Model = TypeVar("Model", bound=BaseModel)

MAX_VALUES = 50_000
"""JSON values in a body, besides its chunks'."""
VALUES_PER_CHUNK = 4
# one for each value in an object or array: in front of it, or in front of its name
MARKS = (b"{", b"[", b",")
# possessive: a string without an end makes no backtracking
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

MAX_ERRORS = 5
"""Fields that one refusal names."""
MAX_NAMES, MAX_NAME_CHARS = 50, 40
"""Unknown fields that are compared with ours, and their length: a body may have very many."""
SIMILARITY = 0.8
"""Of two names, from which one is taken for the other misspelt:
`chunk` and `chunks` have .91, `store` and `order` .6."""
OTHERS_NAMES = ("documents", "contexts", "context", "passages")
"""What other servers and frameworks call chunks."""
A_CHUNK = '; a chunk is {"text": "...", "id": "..."}, the id optional'
REASONS = {
    "missing": "is missing",
    "extra_forbidden": "is no field here",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
}
"""By pydantic's type of error, where its own words name a class or say too little."""


async def json_object(raw_request: Request, config: ChunkCacheConfig) -> dict[str, Any]:
    """The request's body.

    Raises:
        BodyTooLargeError: more bytes than allowed; they are not read.
        RequestError: no JSON object, or one of too many values, or the client has gone before its
            end.
    """
    raw = await _bounded_body(raw_request, config.max_body_bytes)
    if _has_more_values(raw, MAX_VALUES + VALUES_PER_CHUNK * config.max_chunks):
        raise RequestError("body: too many values")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"body: not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("body: must be a JSON object")
    return body


def parse(model: type[Model], body: dict[str, Any]) -> Model:
    """The body as `model`. Raises RequestError naming the fields that are wrong."""
    try:
        return model.model_validate(body)
    except (ValidationError, RequestValidationError) as error:
        reasons: dict[str, dict[str, None]] = {}
        branches: dict[str, set[str]] = {}
        for item in error.errors():
            place, branch = _place(item, body)
            words = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            reasons.setdefault(place, {})[REASONS.get(item["type"], words)] = None
            branches.setdefault(place, set()).add(branch)
        # What only some branches of a union refuse is right in another one.
        widest = max(map(len, branches.values()))
        shown = [
            place for place in reasons if len(branches[place]) == widest or branches[place] == {""}
        ][:MAX_ERRORS]
        told = "; ".join(f"{place}: {' or '.join(reasons[place])}" for place in shown)
        is_chunk = re.search(r"\bchunks\b", " ".join(shown))
        raise RequestError(told + A_CHUNK * bool(is_chunk)) from None


def refuse_misspelt(body: Collection[str], ours: Iterable[str], theirs: Iterable[str]) -> None:
    """Raise RequestError for a name that is neither `ours` nor `theirs` and looks like one of ours,
    or is what others call chunks where there are none. Others pass."""
    # `conversationId` and `re_use` differ from ours in other signs only
    by_letters = {_letters(name): name for name in ours}
    known = {*by_letters.values(), *theirs}
    others = (name for name in body if name not in known and len(name) <= MAX_NAME_CHARS)
    for name in islice(others, MAX_NAMES):
        if meant := get_close_matches(_letters(name), by_letters, n=1, cutoff=SIMILARITY):
            raise RequestError(f"{name}: is no field here; did you mean {by_letters[meant[0]]}?")
    if "chunks" in by_letters and not {"chunks", "retrieve"} & {*body}:
        for name in OTHERS_NAMES:
            if name in body and name not in known:
                raise RequestError(f"{name}: is no field here; did you mean chunks?")


def named_in(complaint: str, fields: Collection[str]) -> str | None:
    """The first of these fields that SGLang's complaint names:
    in its messages the one that is meant."""
    return next((word for word in re.findall(r"\w+", complaint) if word in fields), None)


# Private, in order of use


async def _bounded_body(raw_request: Request, max_bytes: int) -> bytes:
    too_large = BodyTooLargeError(f"body: more than {max_bytes} bytes")
    # a chunked body tells no length, so what comes is counted below
    if int(raw_request.headers.get("content-length", 0)) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async for piece in raw_request.stream():
            body += piece
            if len(body) > max_bytes:
                raise too_large
    except ClientDisconnect:
        raise RequestError("body: the client has disconnected") from None
    return bytes(body)


def _has_more_values(raw: bytes, most: int) -> bool:
    """Whether a JSON text holds more values than that, about. A parser would make an object of
    each, which takes a second for a few MiB of brackets."""
    if sum(map(raw.count, MARKS)) <= most:  # in strings or not
        return False
    # a backslash that ends a string counts as an escaped quote: too few strings, never too many
    num_strings = (raw.count(b'"') - raw.count(b'\\"')) // 2
    # the strings are cut out of few only: each match costs as much as a value
    return num_strings > most or sum(map(STRING.sub(b"", raw).count, MARKS)) > most


def _place(item: Mapping[str, Any], body: Any) -> tuple[str, str]:
    """The path of an error as far as it leads through the body, and the rest:
    a union's branches, which pydantic names in it."""
    path, branch, node = [], [], body
    for part in item["loc"]:
        is_place = isinstance(node, list) and isinstance(part, int)
        is_place = is_place or (isinstance(node, dict) and part in node)
        if is_place:
            node = node[part]
        # what is missing is not in the body, and still what the client must name
        if is_place or (item["type"] == "missing" and part == item["loc"][-1]):
            path.append(str(part))
        else:
            branch.append(str(part))
    return ".".join(path) or "body", ".".join(branch)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()
