"""Frontend programs: which characters of a state are chunks, and what the backend posts. A fake
server, no engine.

launch/test.sh tests/sglang_chunkcache/test_lang.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="frontend programs need SGLang")

import sglang as sgl
from sglang.lang.choices import token_length_normalized, unconditional_likelihood_normalized

from sglang_chunkcache.lang import ChunkCacheEndpoint as Endpoint
from sglang_chunkcache.lang import Part, chunks, parts_of
from tests.sglang_chunkcache.fake_server import JsonServer

FATES = {"exact": 3, "relocated": 0, "recomputed": 0, "computed": 2}
DOCS = [{"id": "d1", "text": "One."}, {"id": "d2", "text": "Two."}]
AREA: Part = {"chunks": DOCS}


def function(program: Callable[..., None]) -> Any:
    """`sgl.function`, with a type."""
    return sgl.function(program)


def run(backend: Endpoint, *expressions: Any, **how: Any) -> Any:
    """The state of a program that adds these one by one."""

    @function
    def program(s: Any) -> None:
        for expression in expressions:
            s += expression

    return program.run(backend=backend, **how)


class FakeServer(JsonServer):
    """Answers as a chunk cache server would."""

    refusal: dict[str, Any] | None = None

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if body is None:
            return 200, {"model_path": "fake"}
        if self.refusal is not None:
            return 400, self.refusal
        if body.get("stream"):
            return 200, b"".join(b"data: " + event + b"\n\n" for event in _events())
        return 200, _reply(path, body)

    @property
    def parts(self) -> list[list[Part]]:
        """The parts of every request to our endpoint, in order of arrival."""
        return [body["parts"] for path, body in self.posts if path == "/rag/v1/generate"]


def _reply(path: str, body: dict[str, Any]) -> Any:
    """A choice is as likely as its text is long."""
    if path == "/rag/v1/retrieve":
        passages = [{**doc, "score": 0.5, "title": ""} for doc in DOCS]
        return {"query": body["query"], "passages": passages}
    meta_info: dict[str, Any] = {"prompt_tokens": 5, "cached_tokens": 3}
    if body.get("return_logprob"):
        logprob = -1.0 if "input_ids" in body else -1.0 / len(body["parts"][-1])
        meta_info["input_token_logprobs"] = [[None, 0, None], [logprob, 1, None]]
        meta_info["output_token_logprobs"] = []
        if "input_ids" in body:
            return [{"meta_info": meta_info} for _ in body["input_ids"]]
    answer = {"text": "answer", "meta_info": meta_info}
    return answer if path == "/generate" else {**answer, "chunkcache": {"fates": FATES}}


def _events() -> Iterator[bytes]:
    for text, more in (("an", {}), ("answer", {"chunkcache": {"fates": FATES}})):
        event = {"text": text, "meta_info": {"completion_tokens": len(text)}, **more}
        yield json.dumps(event).encode()
    yield b"[DONE]"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture
def backend(server: FakeServer) -> Endpoint:
    return Endpoint(server.url)


# The text that knows its areas


def test_slice_through_an_area_is_plain_text() -> None:
    """Half a chunk is no chunk. str(), by which SGLang copies a state, keeps areas."""
    text = str("head" + chunks(["a"]).value + "tail")
    area = {"chunks": [{"text": "a"}]}
    assert parts_of(text) == ["head", area, "tail"]
    assert [type(part) for part in parts_of(text)] == [str, dict, str]
    assert parts_of(text[4:]) == [area, "tail"]
    assert parts_of(text[5:]) == ["\n\ntail"]
    assert parts_of(text[0]) == ["h"]
    assert parts_of(text[::-1]) == [text[::-1]]


@pytest.mark.parametrize("passage", [1, None, {"id": "x"}, {"text": None}, b"bytes"])
def test_chunks_refuses_what_has_no_text(passage: Any) -> None:
    """A ValueError would end SGLang's tracing of a program."""
    with pytest.raises(TypeError, match="a passage must be a text"):
        chunks([passage])


def test_chunks_keeps_only_what_the_endpoint_takes() -> None:
    """Retrievers add scores and sources. A program's text may have the server's separator."""
    expression = chunks([{"id": 7, "text": "a", "score": 0.5}], separator="|")
    assert expression.value == "a|"
    assert expression.value.areas[0].chunks == ({"text": "a", "id": 7},)
    assert repr(expression) == "Chunks([7])"


@given(
    st.lists(
        st.one_of(st.text(max_size=3), st.lists(st.text(min_size=1, max_size=3), max_size=3)),
        max_size=6,
    ),
    st.integers(-8, 30),
    st.integers(-8, 30),
)
def test_text_equals_a_plain_string_and_its_parts(
    pieces: list[str | list[str]], start: int, end: int
) -> None:
    """The parts spell the text, and areas come only from `chunks`."""
    text = plain = ""
    for piece in pieces:
        text += piece if isinstance(piece, str) else chunks(piece).value
        plain += piece if isinstance(piece, str) else _spelled([_area(piece)])
    for got, expected in (
        (text, plain),
        (text[start:end], plain[start:end]),
        (text[start:] + text, plain[start:] + plain),
    ):
        assert got == expected
        assert _spelled(parts_of(got)) == expected
    areas = [_area(piece) for piece in pieces if isinstance(piece, list) and piece]
    assert [part for part in parts_of(text) if isinstance(part, dict)] == areas


def _area(texts: list[str]) -> Part:
    return {"chunks": [{"text": text} for text in texts]}


def _spelled(parts: list[Part]) -> str:
    return "".join(
        part
        if isinstance(part, str)
        else "".join(chunk["text"] + "\n\n" for chunk in part["chunks"])
        for part in parts
    )


# Programs


def test_retrieve_gives_passages_for_chunks(server: FakeServer, backend: Endpoint) -> None:
    """With scores, which `chunks` leaves out of the prompt; a refusal is an error."""
    passages = backend.retrieve("Who?", k=2)
    assert server.posts[-1] == ("/rag/v1/retrieve", {"query": "Who?", "k": 2})
    assert [passage["score"] for passage in passages] == [0.5, 0.5]
    assert parts_of("" + chunks(passages).value) == [AREA]
    server.refusal = {"message": "retrieve: this server has no index"}
    with pytest.raises(RuntimeError, match="no index"):
        backend.retrieve("Who?")


def test_gen_posts_parts_and_returns_fates(server: FakeServer, backend: Endpoint) -> None:
    gen = sgl.gen("answer", max_tokens=4, temperature=0)
    state = run(backend, "head " + chunks(DOCS) + "Who?" + gen)
    assert state["answer"] == "answer"
    assert state.get_meta_info("answer")["chunkcache"]["fates"] == FATES
    (path, body), *more = server.posts
    assert (path, body["parts"], more) == ("/rag/v1/generate", ["head ", AREA, "Who?"], [])
    assert body["sampling_params"]["max_new_tokens"] == 4
    assert set(body) == {"parts", "sampling_params"}  # the endpoint refuses fields it does not know


def test_roles_and_later_turns_keep_areas(server: FakeServer, backend: Endpoint) -> None:
    """The chat template wraps expressions in role marks; a turn goes on after the answer."""
    turn = sgl.user(chunks(DOCS) + "Who?"), sgl.assistant(sgl.gen("first"))
    state = run(backend, *turn, "And" + chunks(DOCS[:1]) + "why?" + sgl.gen("second"))
    state.sync()
    first, second = server.parts
    assert first == ["USER:", AREA, "Who?\nASSISTANT:"]
    later = "Who?\nASSISTANT:answer\nAnd"
    assert second == ["USER:", AREA, later, {"chunks": DOCS[:1]}, "why?"]
    assert state.messages()[0]["content"] == "One.\n\nTwo.\n\nWho?"


def test_fork_copies_areas_and_commits_them_first(server: FakeServer, backend: Endpoint) -> None:
    """Branches share the chunks; the commit before a fork makes the cache hold them."""

    @function
    def program(s: Any) -> None:
        s += "head " + chunks(DOCS)
        s.sync()
        branches = s.fork(2)
        for number, branch in enumerate(branches):
            branch += f"Q{number}?" + sgl.gen("answer")
        branches.join()

    assert program.run(backend=backend)["answer"] == ["answer", "answer"]
    assert server.posts[0][1]["sampling_params"] == {"max_new_tokens": 0}
    commit, *branches = server.parts
    assert commit == ["head ", AREA]
    assert sorted(branches, key=str) == [["head ", AREA, "Q0?"], ["head ", AREA, "Q1?"]]


def test_join_by_text_keeps_the_branches_areas(server: FakeServer, backend: Endpoint) -> None:
    """SGLang would join the KV by a route that its server does not have."""

    @function
    def program(s: Any) -> None:
        s += "head "
        branches = s.fork(2)
        for number, branch in enumerate(branches):
            branch += chunks(DOCS[number : number + 1])
        branches.join("concate_and_append")
        s += "Who?" + sgl.gen("answer")

    program.run(backend=backend).sync()
    assert server.parts[-1] == ["head ", {"chunks": DOCS[:1]}, {"chunks": DOCS[1:]}, "Who?"]


def test_stream_yields_new_text_and_ends_with_fates(server: FakeServer, backend: Endpoint) -> None:
    state = run(backend, chunks(DOCS) + "Who?" + sgl.gen("answer"), stream=True)
    assert "".join(state.text_iter("answer")) == "answer"
    assert state.get_meta_info("answer") == {"completion_tokens": 6, "chunkcache": {"fates": FATES}}
    assert server.posts[0][1]["stream"] is True


@pytest.mark.parametrize("method", [token_length_normalized, unconditional_likelihood_normalized])
def test_select_scores_choices_behind_the_same_parts(
    server: FakeServer, backend: Endpoint, method: Any
) -> None:
    """The longest is the likeliest; some methods compare with the choice alone."""
    choice = sgl.gen("choice", choices=["a", "long", "bb"], choices_method=method)
    state = run(backend, chunks(DOCS) + "Which:" + choice)
    assert state["choice"] == "long"
    assert state.error() is None
    assert state.get_meta_info("choice")["chunkcache"]["fates"] == FATES
    prompt = [AREA, "Which:"]
    assert server.parts == [prompt, *([*prompt, choice] for choice in ("a", "long", "bb"))]
    assert [body["logprob_start_len"] for _, body in server.posts[1:4]] == [4, 4, 4]
    alone = [body for path, body in server.posts if path == "/generate"]
    assert [(body["input_ids"], body["logprob_start_len"]) for body in alone] == (
        [(3 * [[0, 1]], 0)] if method is unconditional_likelihood_normalized else []
    )


def test_program_without_chunks_goes_to_sglang(server: FakeServer, backend: Endpoint) -> None:
    """Plain prompts share SGLang's own prefix cache; a retriever may find nothing."""
    assert run(backend, chunks([]) + "Who?" + sgl.gen("answer"))["answer"] == "answer"
    assert [(path, body["text"]) for path, body in server.posts] == [("/generate", "Who?")]


def test_batch_precaches_the_common_chunks(server: FakeServer, backend: Endpoint) -> None:
    """SGLang traces a batch's common beginning, which goes to our endpoint as parts."""
    long_docs = [{"id": "d", "text": "word " * 20}]

    @function
    def program(s: Any, question: str) -> None:
        s += "head " + chunks(long_docs)
        s += question
        s += sgl.gen("answer")

    program.run_batch([{"question": "Q1"}, {"question": "Q2"}], backend=backend, num_threads=1)
    assert server.parts[0] == ["head ", {"chunks": long_docs}]
    assert server.posts[0][1]["sampling_params"] == {"max_new_tokens": 0}
    assert [parts[-1] for parts in server.parts[1:]] == ["Q1", "Q2"]


def test_batch_survives_chunks_made_from_arguments(server: FakeServer, backend: Endpoint) -> None:
    """While SGLang traces, arguments are stand-ins without a value."""

    @function
    def program(s: Any, docs: list[str]) -> None:
        s += chunks(docs) + chunks([{"text": docs[0]}]) + sgl.gen("answer")

    states = program.run_batch([{"docs": ["a"]}, {"docs": ["b"]}], backend=backend, num_threads=1)
    assert [state["answer"] for state in states] == ["answer", "answer"]


def test_fields_of_the_backend_are_sent(server: FakeServer, backend: Endpoint) -> None:
    """With every request. Unless given, the server decides."""
    fields: dict[str, Any] = {"extra_key": "tenant", "cache_salt": "salt"}
    fields |= {"reuse": {"mode": "fused"}, "order": "tree"}
    for each in (Endpoint(server.url + "/", "key", **fields), backend):
        run(each, chunks(DOCS) + sgl.gen("answer")).sync()
    (_, given), (_, plain) = server.posts
    assert {name: given[name] for name in fields} == fields
    assert "Bearer key" in server.keys
    assert not fields.keys() & plain.keys()


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_refusal_is_the_states_error(server: FakeServer, backend: Endpoint) -> None:
    """A 400 must not look like an empty answer."""
    server.refusal = {"object": "error", "message": "chunks: 300 given, at most 256"}
    error = run(backend, chunks(DOCS) + sgl.gen("answer")).error()
    assert isinstance(error, RuntimeError)
    assert "at most 256" in str(error)
