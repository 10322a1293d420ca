"""Hostile clients: valid requests to our endpoints, mutated field by field.

The fields come from the endpoints' own schemas, so a field that SGLang adds is mutated, too.
"""

from __future__ import annotations

import copy
import http.client
import json
from collections import Counter, deque
from collections.abc import Sequence
from itertools import cycle
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from eval.http import post
from eval.server import Server
from eval.task import Request
from eval.tasks.world import world_requests
from sglang_chunkcache.front.bodies import (
    GenerateIn,
    PreprocessIn,
    RagFields,
    RetrieveBody,
    RetrieveIn,
)
from sglang_chunkcache.front.fusion_options import ReuseIn
from tests.e2e.asking import CHAT as CHAT_PATH
from tests.e2e.asking import task_body, text_of

EVERY = 25
"""Hostile inputs between two good requests."""
PATIENCE_S = 20.0
"""After which a client hangs up. Long answers are asked for, too: hanging up ends them."""
MAX_READ = 1 << 20
"""Bytes of an answer that a client reads."""


class Door(NamedTuple):
    """An endpoint: a valid body, and the fields that may be put into it,
    by the place in the body."""

    path: str
    body: dict[str, Any]
    fields: dict[str, dict[str, Any]]
    """Place in the body ("" for its top) -> field -> declared type."""


MESSAGES = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "What does Dravex make?"},
    {"role": "assistant", "content": "clocks"},
    {"role": "user", "content": [{"type": "text", "text": "And Solon?"}]},
]
CHUNKS = [{"id": "a", "text": "The company Dravex makes clocks."}, {"text": "Solon makes lamps."}]
PARAMETERS = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
BIAS = {"stop": ["."], "logit_bias": {"5": 1.0}}
SAMPLING = {"max_new_tokens": 3, "temperature": 0.5, **BIAS, "custom_params": {"a": 1}}
CHAT: dict[str, Any] = {"model": "default", "messages": MESSAGES, "max_tokens": 3, **BIAS}
CHAT |= {"stream": False, "stream_options": {"include_usage": True}, "logprobs": True}
CHAT |= {"response_format": {"type": "text"}, "tools": [TOOL], "tool_choice": "none"}
CHAT |= {"top_logprobs": 2}
RAG = {"chunks": CHUNKS, "conversation_id": "hostile", "order": "tree", "cache_salt": "hostile"}
SEARCH = {"messages": MESSAGES, "retrieve": {"k": 2}, "max_tokens": 2}
QUERY = {"query": "Dravex", "k": 2, "turns": None}
PARTS = {
    "parts": ["Facts. ", {"chunks": CHUNKS}, "Dravex makes"],
    "sampling_params": SAMPLING,
    "return_logprob": True,
}
PREPARED = {"chunk": CHUNKS[0], "neighbors": CHUNKS[1:]}


def _fields(*classes: Any) -> dict[str, Any]:
    return {
        name: kind
        for one in classes
        for name, kind in get_type_hints(one).items()
        if name not in _IS_NO_FIELD
    }


_IS_NO_FIELD = {"model_config", "_pydantic_private"}
_RAG = {
    "": _fields(ChatCompletionRequest, RagFields),
    "reuse": _fields(ReuseIn),
    "retrieve": _fields(RetrieveIn),
}

DOORS = (
    Door(CHAT_PATH, CHAT | RAG, _RAG),
    Door(CHAT_PATH, SEARCH, _RAG),
    Door("/chunkcache/explain", CHAT | RAG, _RAG),
    Door("/rag/v1/retrieve", QUERY, {"": _fields(RetrieveBody)}),
    Door(
        "/rag/v1/generate",
        PARTS,
        {"": _fields(GenerateIn), "sampling_params": _fields(SamplingParams)},
    ),
    Door("/chunkcache/preprocess", PREPARED, {"": _fields(PreprocessIn)}),
)
HINT = {"texts": [chunk["text"] for chunk in CHUNKS], "reuse": {"mode": "fused"}}
PREFETCH = Door(
    "/chunkcache/prefetch",
    CHAT | HINT | {"cache_salt": "hostile"},
    {"": _RAG[""] | {"texts": list[str]}, "reuse": _RAG["reuse"]},
)
"""Only a server with a storage reads what is sent there."""


def _nested(depth: int) -> list[Any]:
    """Lists and objects in one another."""
    of_lists, of_objects = 1, 1
    for _ in range(depth):
        of_lists, of_objects = [of_lists], {"a": of_objects}  # type: ignore[assignment]
    return [of_lists, of_objects]


_ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 5, 1_000_000, 2**31, 2**63, -(2**63) - 1, 10**30),
    *(0.5, -0.5, 1.5, 1e308, -1e308, 1e-320, float("nan"), float("inf"), -float("inf")),
    *("", " ", "x", "0", "5", "null", "\0", "\ud800", "<|end|>", "é中🙂"),
    *("a" * 100_000, "x " * 20_000, "9" * 400, "(", "[a-z]{1,99999}", "(a+)+$", "(?<=a*)b"),
    *("\\", "{", '{"type":"object"}', '{"$ref":"#"}', 'root ::= "a"', [], {}, [[]], [{}]),
    *([None], [""], ["x"] * 40, list(range(5000)), {"": ""}, {"x": "y"}, {"5": "x"}, {"5": None}),
    *({"-1": 1}, {"99999999": 1}, {"type": "json_schema"}, {"type": "json_object"}, {"text": "x"}),
    *({"role": "user"}, {"mode": "fused"}, *_nested(3), *_nested(200)),
]

_values = st.sampled_from(_ODD) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


_PLAIN: dict[Any, list[Any]] = {
    NoneType: [None],
    bool: [True, False],
    int: [0, 1, 2, 3, -1, 5, 100, 4096, 10**6],
    float: [0.0, 0.5, 1.0, 2.0, -1.0, 1e-3],
    str: ["", "a", "Dravex", ".", "5", "auto"],
}
"""Values of the right type."""


def _typed(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a declared type, most of them valid; of a class any value."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        return _typed(args[0])
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, UnionType):
        return st.one_of([_typed(arg) for arg in args])
    if origin is list:
        return st.lists(_typed(args[0]) if args else _values, max_size=3)
    if origin is dict:
        return st.dictionaries(_typed(str), _typed(args[1]) if args else _values, max_size=3)
    return st.sampled_from(_PLAIN[origin]) if origin in _PLAIN else _values


@st.composite
def requests(draw: st.DrawFn, doors: Sequence[Door]) -> tuple[str, bytes]:
    """(path, body): a valid body of a door with up to three of its fields replaced, put in,
    taken out or wrapped."""
    door = draw(st.sampled_from(doors))
    body = copy.deepcopy(door.body)
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 1, 2, 3)))):
        _mutate(draw, door, body)
    return door.path, json.dumps(body).encode("utf-8", "surrogatepass")


def send(url: str, path: str, body: bytes) -> int | None:
    """The answer's status, read to its end or to `MAX_READ`. None: the client hung up after
    `PATIENCE_S`. 0: it broke off.

    Raises:
        OSError: nobody answers.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read(MAX_READ)
        return response.status
    except TimeoutError:
        return None
    except (http.client.HTTPException, BrokenPipeError, ConnectionResetError):
        # SGLang breaks off some streams, and too large a body is not read; the next request shows
        # whether it lives
        return 0
    finally:
        connection.close()


class Client:
    """Sends hostile inputs and tells of the last ones if the server does not survive them;
    asks good questions between."""

    def __init__(self, server: Server) -> None:
        self.server, self.statuses = server, Counter[int | None]()
        self._last = deque[tuple[str, bytes]](maxlen=EVERY)
        self.good = right_requests(server)
        self._next_good = cycle(self.good)

    def attack(self, path: str, body: bytes) -> None:
        """One hostile input; after every 25th a good one."""
        self._last.append((path, body))
        try:
            status = send(self.server.url, path, body)
            self.statuses[status] += 1
            assert status != 500 or not path.startswith(("/rag/", "/chunkcache/")), (
                "an error that no client can mend"
            )
            if self.statuses.total() % EVERY == 0:
                assert_right(self.server, next(self._next_good))
        except Exception as error:
            last = "\n".join(f"{path} {body[:600]!r}" for path, body in self._last)
            message = f"{error!r} after\n{last}\n{self.server.log_tail(60)}"
            raise AssertionError(message) from error


def assert_right(server: Server, request: Request) -> None:
    """The request's answer is the right one."""
    reply = post(server.url + CHAT_PATH, task_body(request, max_tokens=12), timeout_s=300)
    content = text_of(reply)
    assert any(answer in content for answer in request.answers), (request, reply)


def right_requests(server: Server) -> list[Request]:
    """Questions that the bundled model answers right when nobody disturbs it."""
    found = []
    for request in world_requests(16, seed=21):
        try:
            assert_right(server, request)
        except AssertionError:
            continue
        found.append(request)
    assert len(found) >= 8
    return found


def attack(client: Client, num_inputs: int, doors: Sequence[Door] = DOORS) -> None:
    """Send so many hostile inputs."""

    @settings(
        max_examples=num_inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking would send its tries to a dead server
        suppress_health_check=list(HealthCheck),
    )
    @given(requests(doors))
    def run(hostile: tuple[str, bytes]) -> None:
        client.attack(*hostile)

    run()


# Private, in order of use


def _mutate(draw: st.DrawFn, door: Door, body: dict[str, Any]) -> None:
    if draw(st.booleans()):  # any field of the schema, in the body or not
        place = draw(st.sampled_from(sorted(door.fields)))
        holder = body.get(place) if place else body
        if not isinstance(holder, dict):
            holder = body[place] = {}
        name = draw(st.sampled_from(sorted(door.fields[place])))
        holder[name] = copy.deepcopy(
            draw(_values if draw(st.integers(0, 3)) == 0 else _typed(door.fields[place][name]))
        )
        return
    holder, key = draw(st.sampled_from(list(_places(body)) or [(body, "x")]))
    how = draw(st.sampled_from(("replace", "remove", "wrap", "repeat")))
    if how == "remove":
        holder.pop(key, None) if isinstance(holder, dict) else holder.pop(key)
    elif how == "wrap":
        holder[key] = [holder[key]] if key in holder or isinstance(holder, list) else []
    elif how == "repeat" and isinstance(holder, list):
        holder.extend([holder[key]] * draw(st.sampled_from((1, 300))))
    else:
        holder[key] = copy.deepcopy(draw(_values))


def _places(node: Any) -> Any:
    """(container, key) of every value in a body."""
    for key, value in list(node.items()) if isinstance(node, dict) else list(enumerate(node)):
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)
