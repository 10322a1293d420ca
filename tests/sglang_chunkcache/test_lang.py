"""Frontend programs: which characters of a state are chunks, and what the backend posts. A fake
server, no engine.

launch/test.sh tests/sglang_chunkcache/test_lang.py
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="frontend programs need SGLang")

import sglang as sgl
from sglang.lang.choices import unconditional_likelihood_normalized

from sglang_chunkcache.lang import AreaText, ChunkCacheEndpoint, Part, SglChunks, chunks, parts_of

FATES = {"exact": 3, "relocated": 0, "recomputed": 0, "computed": 2}
DOCS = [{"id": "d1", "text": "One."}, {"id": "d2", "text": "Two."}]
AREA: Part = {"chunks": DOCS}


def function(program: Callable[..., None]) -> Any:
    """`sgl.function`, with a type."""
    return sgl.function(program)


class FakeServer:
    """Answers as a chunk cache server would, and keeps what it was asked."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.refusal: dict[str, Any] | None = None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(b'{"model_path": "fake"}')

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.posts.append((self.path, body))
                fake.headers.append(dict(self.headers))
                if fake.refusal is not None:
                    self._answer(json.dumps(fake.refusal).encode(), status=400)
                elif body.get("stream"):
                    self._answer(b"".join(b"data: " + event + b"\n\n" for event in _events()))
                else:
                    self._answer(json.dumps(_reply(self.path, body)).encode())

            def _answer(self, content: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def parts(self) -> list[list[Part]]:
        """The parts of every request to our endpoint, in order of arrival."""
        return [body["parts"] for path, body in self.posts if path == "/rag/v1/generate"]


def _reply(path: str, body: dict[str, Any]) -> Any:
    """One token per prompt part in front of what is scored;
    a choice's token is as likely as its text is long."""
    if path == "/rag/v1/retrieve":
        return {
            "query": body["query"],
            "passages": [{**doc, "score": 0.5, "title": ""} for doc in DOCS],
        }
    meta_info: dict[str, Any] = {"prompt_tokens": 5, "cached_tokens": 3}
    if body.get("return_logprob"):
        if "input_ids" in body:
            return [
                {"meta_info": {"input_token_logprobs": [[None, 0, None], [-1.0, 1, None]]}}
                for _ in body["input_ids"]
            ]
        logprob = -1.0 / len(body["parts"][-1])
        meta_info |= {
            "input_token_logprobs": [[None, 0, None], [logprob, 1, None]],
            "output_token_logprobs": [],
        }
    answer = {"text": "answer", "meta_info": meta_info}
    return (
        answer
        if path == "/generate"
        else {**answer, "chunkcache": {"fates": FATES, "order": ["d1", "d2"]}}
    )


def _events() -> Iterator[bytes]:
    for text, more in (("an", {}), ("answer", {"chunkcache": {"fates": FATES}})):
        yield json.dumps(
            {"text": text, "meta_info": {"completion_tokens": len(text)}, **more}
        ).encode()
    yield b"[DONE]"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture
def backend(server: FakeServer) -> ChunkCacheEndpoint:
    return ChunkCacheEndpoint(server.url)


# The text that knows its areas


def test_area_moves_when_text_is_put_in_front() -> None:
    """Offsets are of the whole text; a wrong one would cut a chunk out of the question."""
    text = "head" + chunks(["a", "b"]).value + "tail"
    assert text == "heada\n\nb\n\ntail"
    assert parts_of(text) == ["head", {"chunks": [{"text": "a"}, {"text": "b"}]}, "tail"]


def test_str_of_a_text_keeps_areas() -> None:
    """SGLang's fork copies the state with str():
    without its areas every branch would be plain text."""
    text = str("head" + chunks(["a"]).value)
    assert parts_of(text) == ["head", {"chunks": [{"text": "a"}]}]


def test_slice_through_an_area_is_plain_text() -> None:
    """Half a chunk is no chunk, but the text must stay whole."""
    text = "head" + chunks(["a"]).value + "tail"
    assert parts_of(text[4:]) == [{"chunks": [{"text": "a"}]}, "tail"]
    assert parts_of(text[5:]) == ["\n\ntail"]
    assert parts_of(text[0]) == ["h"]
    assert parts_of(text[::-1]) == [text[::-1]]


def test_parts_are_plain_strings() -> None:
    """Parts go to JSON encoders, which need not know subclasses of str."""
    text = "head" + chunks(["a"]).value + "tail"
    assert [type(part) for part in parts_of(text)] == [str, dict, str]


def test_chunks_without_passages_is_empty_text() -> None:
    """A retriever that found nothing is no error."""
    assert parts_of("head" + chunks([]).value + "tail") == ["headtail"]


def test_chunks_takes_the_servers_separator() -> None:
    assert chunks(DOCS, separator="|").value == "One.|Two.|"


@pytest.mark.parametrize("passage", [1, None, {"id": "x"}, {"text": None}, b"bytes"])
def test_chunks_refuses_what_has_no_text(passage: Any) -> None:
    """A TypeError, since SGLang's tracing of a program goes on after one and dies of a
    ValueError."""
    with pytest.raises(TypeError, match="a passage must be a text"):
        chunks([passage])


def test_chunks_keeps_only_what_the_endpoint_takes() -> None:
    """Retrievers add scores and sources, which the endpoint has no use for."""
    expression = chunks([{"id": 7, "text": "a", "score": 0.5}])
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
    """Whatever is appended or sliced, the parts spell the text,
    and areas come only from `chunks`."""
    text: str = ""
    for piece in pieces:
        text += piece if isinstance(piece, str) else chunks(piece).value
    plain = "".join(
        piece if isinstance(piece, str) else "".join(item + "\n\n" for item in piece)
        for piece in pieces
    )
    for got, expected in (
        (text, plain),
        (text[start:end], plain[start:end]),
        (text[start:] + text, plain[start:] + plain),
    ):
        assert got == expected
        assert _spelled(parts_of(got)) == expected
    assert [part for part in parts_of(text) if isinstance(part, dict)] == [
        {"chunks": [{"text": item} for item in piece]}
        for piece in pieces
        if isinstance(piece, list) and piece
    ]


def _spelled(parts: list[Part]) -> str:
    return "".join(
        part
        if isinstance(part, str)
        else "".join(chunk["text"] + "\n\n" for chunk in part["chunks"])
        for part in parts
    )


# Programs


def test_retrieve_gives_passages_for_chunks(
    server: FakeServer, backend: ChunkCacheEndpoint
) -> None:
    """Best first, with scores, which `chunks` leaves out of the prompt."""
    passages = backend.retrieve("Who?", k=2)
    assert server.posts[-1] == ("/rag/v1/retrieve", {"query": "Who?", "k": 2})
    assert [passage["score"] for passage in passages] == [0.5, 0.5]
    assert parts_of("" + chunks(passages).value) == [AREA]


def test_refused_retrieve_is_an_error(server: FakeServer, backend: ChunkCacheEndpoint) -> None:
    """With what the server says."""
    server.refusal = {"message": "retrieve: this server has no index"}
    with pytest.raises(RuntimeError, match="no index"):
        backend.retrieve("Who?")


def test_gen_posts_parts_and_returns_fates(server: FakeServer, backend: ChunkCacheEndpoint) -> None:
    @function
    def program(s: Any, question: str) -> None:
        s += "head " + chunks(DOCS) + question + sgl.gen("answer", max_tokens=4, temperature=0)

    state = program.run("Who?", backend=backend)
    assert state["answer"] == "answer"
    assert state.get_meta_info("answer")["chunkcache"]["fates"] == FATES
    (path, body), *more = server.posts
    assert (path, body["parts"], more) == ("/rag/v1/generate", ["head ", AREA, "Who?"], [])
    assert body["sampling_params"]["max_new_tokens"] == 4
    assert set(body) == {"parts", "sampling_params"}  # the endpoint refuses fields it does not know


def test_second_gen_has_the_first_answer_in_front(
    server: FakeServer, backend: ChunkCacheEndpoint
) -> None:
    """A later turn goes on after the answer; both areas stay areas."""

    @function
    def program(s: Any) -> None:
        s += chunks(DOCS) + "Who?" + sgl.gen("first")
        s += "And" + chunks(DOCS[:1]) + "why?" + sgl.gen("second")

    program.run(backend=backend).sync()
    assert server.parts[1] == [AREA, "Who?answerAnd", {"chunks": DOCS[:1]}, "why?"]


def test_roles_keep_areas(server: FakeServer, backend: ChunkCacheEndpoint) -> None:
    """The frontend's chat template wraps expressions in role marks."""

    @function
    def program(s: Any) -> None:
        s += sgl.user(chunks(DOCS) + "Who?")
        s += sgl.assistant(sgl.gen("answer"))

    state = program.run(backend=backend)
    state.sync()
    assert server.parts == [["USER:", AREA, "Who?\nASSISTANT:"]]
    assert state.messages()[0]["content"] == "One.\n\nTwo.\n\nWho?"


def test_fork_copies_areas_and_commits_them_first(
    server: FakeServer, backend: ChunkCacheEndpoint
) -> None:
    """Branches share the chunks; the commit before a fork makes the cache hold them."""

    @function
    def program(s: Any) -> None:
        s += "head " + chunks(DOCS)
        s.sync()
        branches = s.fork(2)
        for number, branch in enumerate(branches):
            branch += f"Q{number}?" + sgl.gen("answer")
        branches.join()

    state = program.run(backend=backend)
    assert state["answer"] == ["answer", "answer"]
    commit, *branches = server.posts
    assert commit[1]["parts"] == ["head ", AREA]
    assert commit[1]["sampling_params"] == {"max_new_tokens": 0}
    assert sorted(body["parts"][2] for _, body in branches) == ["Q0?", "Q1?"]
    assert all(body["parts"][:2] == ["head ", AREA] for _, body in branches)


def test_join_by_text_keeps_the_branches_areas(
    server: FakeServer, backend: ChunkCacheEndpoint
) -> None:
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


def test_stream_yields_new_text_and_ends_with_fates(
    server: FakeServer, backend: ChunkCacheEndpoint
) -> None:
    @function
    def program(s: Any) -> None:
        s += chunks(DOCS) + "Who?" + sgl.gen("answer")

    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter("answer")) == "answer"
    assert state.get_meta_info("answer") == {"completion_tokens": 6, "chunkcache": {"fates": FATES}}
    assert server.posts[0][1]["stream"] is True


def test_select_scores_choices_behind_the_same_parts(
    server: FakeServer, backend: ChunkCacheEndpoint
) -> None:
    """The fake makes the longest choice the likeliest."""

    @function
    def program(s: Any) -> None:
        s += chunks(DOCS) + "Which:" + sgl.gen("choice", choices=["a", "long", "bb"])

    state = program.run(backend=backend)
    assert state["choice"] == "long"
    assert state.get_meta_info("choice")["chunkcache"]["fates"] == FATES
    assert server.parts == [
        [AREA, "Which:"],
        *([AREA, "Which:", choice] for choice in ("a", "long", "bb")),
    ]
    assert [body["logprob_start_len"] for _, body in server.posts[1:]] == [4, 4, 4]


def test_select_against_unconditional_likelihood(
    server: FakeServer, backend: ChunkCacheEndpoint
) -> None:
    """Methods that compare with the choice alone get as many probabilities for it as after the
    prompt."""

    @function
    def program(s: Any) -> None:
        method = unconditional_likelihood_normalized
        s += (
            chunks(DOCS)
            + "Which:"
            + sgl.gen("choice", choices=["a", "long"], choices_method=method)
        )

    state = program.run(backend=backend)
    assert state["choice"] == "long"
    assert state.error() is None
    path, body = server.posts[-1]
    assert (path, body["input_ids"], body["logprob_start_len"]) == (
        "/generate",
        [[0, 1], [0, 1]],
        0,
    )


def test_program_without_chunks_goes_to_sglang(
    server: FakeServer, backend: ChunkCacheEndpoint
) -> None:
    """Plain prompts share SGLang's own prefix cache, which chunk-keyed prompts do not."""

    @function
    def program(s: Any) -> None:
        s += "Who?" + sgl.gen("answer")

    assert program.run(backend=backend)["answer"] == "answer"
    assert [(path, body["text"]) for path, body in server.posts] == [("/generate", "Who?")]


def test_batch_precaches_the_common_chunks(server: FakeServer, backend: ChunkCacheEndpoint) -> None:
    """SGLang traces a batch's common beginning;
    with chunks in it, it goes to our endpoint as parts."""
    long_docs = [{"id": "d", "text": "word " * 20}]

    @function
    def program(s: Any, question: str) -> None:
        s += "head " + chunks(long_docs)
        s += question
        s += sgl.gen("answer")

    program.run_batch([{"question": "Q1"}, {"question": "Q2"}], backend=backend, num_threads=1)
    assert server.parts[0] == ["head ", {"chunks": [{"text": "word " * 20, "id": "d"}]}]
    assert server.posts[0][1]["sampling_params"] == {"max_new_tokens": 0}
    assert [parts[-1] for parts in server.parts[1:]] == ["Q1", "Q2"]


def test_batch_survives_chunks_made_from_arguments(
    server: FakeServer, backend: ChunkCacheEndpoint
) -> None:
    """While SGLang traces, arguments are stand-ins without a value."""

    @function
    def program(s: Any, docs: list[str]) -> None:
        s += chunks(docs) + chunks([{"text": docs[0]}]) + sgl.gen("answer")

    states = program.run_batch([{"docs": ["a"]}, {"docs": ["b"]}], backend=backend, num_threads=1)
    assert [state["answer"] for state in states] == ["answer", "answer"]


def test_keys_and_identity_are_sent(server: FakeServer) -> None:
    """Tenants are kept apart by what the request says, not by the program."""
    backend = ChunkCacheEndpoint(server.url + "/", "key", extra_key="tenant", cache_salt="salt")

    @function
    def program(s: Any) -> None:
        s += chunks(DOCS) + sgl.gen("answer")

    program.run(backend=backend).sync()
    body = server.posts[0][1]
    assert (body["extra_key"], body["cache_salt"]) == ("tenant", "salt")
    assert server.headers[0]["Authorization"] == "Bearer key"


def test_reuse_and_order_are_sent(server: FakeServer) -> None:
    """With every request; unless given, the server decides."""
    reuse = {"mode": "fused", "selector": "first"}

    @function
    def program(s: Any) -> None:
        s += chunks(DOCS) + sgl.gen("answer")

    program.run(backend=ChunkCacheEndpoint(server.url, reuse=reuse, order="retriever")).sync()
    program.run(backend=ChunkCacheEndpoint(server.url)).sync()
    given, plain = (body for path, body in server.posts if path == "/rag/v1/generate")
    assert (given["reuse"], given["order"]) == (reuse, "retriever")
    assert not {"reuse", "order"} & set(plain)


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_refusal_is_the_states_error(server: FakeServer, backend: ChunkCacheEndpoint) -> None:
    """A 400 must not look like an empty answer."""
    server.refusal = {"object": "error", "message": "chunks: 300 given, at most 256"}

    @function
    def program(s: Any) -> None:
        s += chunks(DOCS) + sgl.gen("answer")

    error = program.run(backend=backend).error()
    assert isinstance(error, RuntimeError)
    assert "at most 256" in str(error)


def test_expression_is_one_that_sglang_executes() -> None:
    """The interpreter raises on expressions that it does not know by class."""
    assert isinstance(chunks(DOCS), SglChunks)
    assert isinstance(chunks(DOCS), sgl.lang.ir.SglConstantText)
    assert isinstance(chunks(DOCS).value, AreaText)
