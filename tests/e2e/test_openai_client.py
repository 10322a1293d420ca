"""OpenAI's Python client, case by case, on SGLang's `/v1` and on our `/rag/v1`: what works on one
works on the other.

The table in sglang_chunkcache/front/README.md, section "OpenAI clients", has these cases and
outcomes. A wrong key is shown without a server, by tests/sglang_chunkcache/front/test_routes.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from eval.server import Server
from sglang_chunkcache.bundled_model import model_dir
from tests.e2e.asking import assistant, user

pytestmark = pytest.mark.engine

V1, RAG = "/v1", "/rag/v1"
CHUNKS = [
    {"id": "a", "text": "The company Dravex makes clocks."},
    {"id": "b", "text": "The company Solon makes lamps."},
]
QUESTION = [user("What does Dravex make?")]
ANSWERED = [*QUESTION, assistant("Dravex makes")]
COMPANIES = ["Dravex", "Solon"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "enum": COMPANIES}},
}
SCHEMA |= {"required": ["name"], "additionalProperties": False}
LOOK_UP = {"name": "look_up", "description": "Looks a company up.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": {**LOOK_UP, "strict": True}}
NAMED = {"type": "function", "function": {"name": "look_up"}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
TOKENIZER = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
BLANKS = [n for n in range(TOKENIZER.get_vocab_size()) if TOKENIZER.decode([n]).isspace()]
WRITES_JSON = {"logit_bias": {str(n): -100 for n in BLANKS}, "max_tokens": 80}
"""The bundled model has never seen JSON:
a grammar keeps it to the syntax, and this from filling it with blanks."""
CONTINUED = {"extra_body": {"continue_final_message": True}}
LONG = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
"""An answer that takes many seconds."""


class Clients:
    """A sync and an async client of one base, whose requests carry chunks if it is ours."""

    def __init__(self, server: Server, base: str) -> None:
        url = server.url + base
        self._options: dict[str, Any] = {"base_url": url, "api_key": "none", "max_retries": 0}
        self.sync = openai.OpenAI(**self._options)
        self.has_chunks = base == RAG

    def make_async(self) -> openai.AsyncOpenAI:
        """To be made where its event loop runs."""
        return openai.AsyncOpenAI(**self._options)

    def body(self, **fields: Any) -> dict[str, Any]:
        """A short request with these fields."""
        extra = {**({"chunks": CHUNKS} if self.has_chunks else {}), **fields.pop("extra_body", {})}
        body = {"model": "default", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
        return {**body, **fields, "extra_body": extra}

    def ask(self, **fields: Any) -> Any:
        """Its answer, which has the usual shape."""
        reply = self.sync.chat.completions.create(**self.body(**fields))
        assert reply.object == "chat.completion"
        assert all(isinstance(choice.message.content, str) for choice in reply.choices)
        return reply


Case = Callable[[Clients], Any]


def naive_loop(to: Clients, **fields: Any) -> list[Any]:
    """OpenAI's documented loop over a stream."""
    chunks, text = [], ""
    for chunk in to.sync.chat.completions.create(**to.body(stream=True, **fields)):
        text += chunk.choices[0].delta.content or ""
        chunks.append(chunk)
    assert text
    named = {(chunk.object, chunk.model) for chunk in chunks}
    assert named == {("chat.completion.chunk", "default")}
    assert len({chunk.id for chunk in chunks}) == fields.get("n", 1)  # SGLang names each answer
    assert all(abs(chunk.created - chunks[0].created) < 60 for chunk in chunks)
    return chunks


def stream_with_usage(to: Clients) -> list[Any]:
    options = {"include_usage": True}
    body = to.body(stream=True, stream_options=options)
    chunks = list(to.sync.chat.completions.create(**body))
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.prompt_tokens > 0
    return chunks


def stream_helper(to: Clients) -> None:
    with to.sync.chat.completions.stream(**to.body()) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events
    assert final.choices[0].message.content == to.ask().choices[0].message.content


async def eight_at_once(to: Clients) -> None:
    async with to.make_async() as client:
        create, body = client.chat.completions.create, to.body()
        replies = await asyncio.gather(*(create(**body) for _ in range(8)))
    assert len({reply.choices[0].message.content for reply in replies}) == 1


async def async_stream(to: Clients) -> None:
    async with to.make_async() as client:
        stream = await client.chat.completions.create(**to.body(stream=True))
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def cancelled(to: Clients) -> None:
    """Once while the answer is awaited, once in mid-stream."""
    async with to.make_async() as client:
        task = asyncio.create_task(client.chat.completions.create(**to.body(**LONG)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = await client.chat.completions.create(**to.body(stream=True, **LONG))
        await anext(aiter(stream))
        await stream.close()


def two_answers(to: Clients) -> None:
    assert [choice.index for choice in to.ask(n=2).choices] == [0, 1]


def two_answers_streamed(to: Clients) -> None:
    chunks = naive_loop(to, n=2)
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def log_probabilities(to: Clients, **fields: Any) -> None:
    tokens = to.ask(logprobs=True, **fields).choices[0].logprobs.content
    assert all(token.logprob <= 0 for token in tokens)
    assert {len(token.top_logprobs) for token in tokens} == {fields.get("top_logprobs", 0)}


def stopped(to: Clients) -> None:
    assert "y" not in to.ask(stop=["y"], max_tokens=60).choices[0].message.content


def seeded(to: Clients) -> None:
    assert to.ask(seed=7, temperature=1.0, top_p=0.9).choices[0].finish_reason


def called(to: Clients, **fields: Any) -> None:
    (call,) = to.ask(tools=[TOOL], **WRITES_JSON, **fields).choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "look_up")
    assert json.loads(call.function.arguments)["name"] in COMPANIES


def called_in_a_stream(to: Clients) -> None:
    body = to.body(tools=[TOOL], tool_choice="required", stream=True, **WRITES_JSON)
    chunks = list(to.sync.chat.completions.create(**body))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert json.loads("".join(call.function.arguments or "" for call in calls))["name"] in COMPANIES
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def tool_loop(to: Clients, **fields: Any) -> list[list[Any]]:
    """Three turns of a conversation, each with a call, its result and an answer;
    per turn both replies."""
    messages, turns = list[Any](), []
    for question in ("What does Dravex make?", "And Solon?", "And now?"):
        messages.append(user(question))
        calling = {"tools": [TOOL], "tool_choice": "required", **WRITES_JSON, **fields}
        first = to.ask(messages=messages, **calling)
        messages.append(first.choices[0].message.model_dump())
        for call in first.choices[0].message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "It makes paint."})
        second = to.ask(messages=messages, tools=[TOOL], **fields)
        assert not second.choices[0].message.tool_calls
        messages.append(second.choices[0].message.model_dump())
        turns.append([first, second])
    return turns


def as_json(to: Clients, response_format: Any) -> str:
    text = to.ask(response_format=response_format, **WRITES_JSON).choices[0].message.content
    assert text.startswith("{")
    return str(text)


def by_schema(to: Clients) -> None:
    named = {"name": "company", "schema": SCHEMA}
    text = as_json(to, {"type": "json_schema", "json_schema": named})
    assert json.loads(text)["name"] in COMPANIES


def shortest(to: Clients, **fields: Any) -> None:
    reply = to.ask(**{"max_tokens": openai.omit, **fields})
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (1, "length")


def listed(to: Clients) -> None:
    (model,) = to.sync.models.list().data
    assert to.sync.models.retrieve(model.id).id == model.id


def first(role: str) -> Case:
    return lambda to: to.ask(messages=[{"role": role, "content": "Be brief."}, *QUESTION])


def asks(**fields: Any) -> Case:
    return lambda to: to.ask(**fields)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def calls(arguments: str) -> list[dict[str, Any]]:
    """A call and its result."""
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    made = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [made, {"role": "tool", "tool_call_id": "1", "content": parts("It makes", "paint.")}]


CASES: dict[str, tuple[str, Case]] = {
    "plain": ("ok", Clients.ask),
    "stream, the documented loop": ("ok", naive_loop),
    "stream with `include_usage`": ("ok", stream_with_usage),
    "`.stream()` helper": ("ok", stream_helper),
    "async stream": ("ok", lambda to: asyncio.run(async_stream(to))),
    "async, 8 at once": ("ok", lambda to: asyncio.run(eight_at_once(to))),
    "`n` = 2": ("ok", two_answers),
    "`n` = 2, streamed": ("ok", two_answers_streamed),
    "`logprobs`": ("ok", log_probabilities),
    "`logprobs` with `top_logprobs`": ("ok", lambda to: log_probabilities(to, top_logprobs=3)),
    "`stop`": ("ok", stopped),
    "`seed`, `temperature`, `top_p`": ("ok", seeded),
    "`tools`, choice auto": ("ok", asks(tools=[TOOL])),
    "`tools`, choice none": ("ok", asks(tools=[TOOL], tool_choice="none")),
    "`tools`, choice required": ("ok", lambda to: called(to, tool_choice="required")),
    "`tools`, choice by name": ("ok", lambda to: called(to, tool_choice=NAMED)),
    "`tools`, choice of an unknown name": (
        "400",
        asks(tools=[TOOL], tool_choice={**NAMED, "function": {"name": "x"}}),
    ),
    "`tools`, streamed": ("ok", called_in_a_stream),
    "tool loop of three turns": ("ok", tool_loop),
    "tool calls whose arguments are no JSON": ("400", asks(messages=[*QUESTION, *calls("{")])),
    "`response_format` json_object": ("ok", lambda to: as_json(to, {"type": "json_object"})),
    "`response_format` json_schema": ("ok", by_schema),
    "content parts": ("ok", asks(messages=[user(parts("Why?"))])),
    "an image part": ("400", asks(messages=[user([IMAGE])])),
    "system message": ("ok", first("system")),
    "developer message": ("ok", first("developer")),
    "no user message": ("ok", asks(messages=[{"role": "developer", "content": "Be brief."}])),
    "unknown role": ("400", first("wizard")),
    "assistant last": ("ok", asks(messages=ANSWERED)),
    "assistant last, `continue_final_message`": ("ok", asks(messages=ANSWERED, **CONTINUED)),
    "`name` of a message": ("ok", asks(messages=[{**QUESTION[0], "name": "anna"}])),
    "`max_tokens`": ("ok", lambda to: shortest(to, max_tokens=1)),
    "`max_completion_tokens`": ("ok", lambda to: shortest(to, max_completion_tokens=1)),
    "penalties": ("ok", asks(frequency_penalty=0.5, presence_penalty=-0.5)),
    "`logit_bias`": ("ok", asks(logit_bias={"300": 1})),
    "`user`, `metadata`": ("ok", asks(user="u1", metadata={"a": "b"})),
    "unknown model name": ("ok", asks(model="gpt-4o")),
    "model name with a colon (an adapter)": ("400", asks(model="gpt-4o:x")),
    "`models.list`, `models.retrieve`": ("ok", listed),
    "`models.retrieve` of an unknown name": ("404", lambda to: to.sync.models.retrieve("none")),
    "time-out": (
        "time-out",
        lambda to: to.sync.with_options(timeout=0.2).chat.completions.create(**to.body(**LONG)),
    ),
    "cancel": ("ok", lambda to: asyncio.run(cancelled(to))),
}


def outcome(case: Case, server: Server, base: str) -> str:
    """`ok`, `time-out`, or the error's status."""
    try:
        case(Clients(server, base))
    except openai.APIStatusError as error:
        return str(error.status_code)
    except openai.APITimeoutError:
        return "time-out"
    return "ok"


@pytest.mark.parametrize("name", CASES)
def test_case_comes_out_the_same_on_both(rag_server: Server, name: str) -> None:
    """A program written for one base runs on the other."""
    expected, case = CASES[name]
    outcomes = [outcome(case, rag_server, base) for base in (V1, RAG)]
    assert outcomes == [expected, expected]


def test_readme_lists_the_cases() -> None:
    """What users read is what is shown here."""
    readme = Path(__file__).parents[2] / "sglang_chunkcache" / "front" / "README.md"
    section = readme.read_text(encoding="utf-8").split("## OpenAI clients\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    cases: dict[str, list[str]] = {}
    for name, (expected, _) in CASES.items():
        cases.setdefault(expected, []).append(name)
    assert rows[: len(cases)] == [[expected, "; ".join(names)] for expected, names in cases.items()]


def test_what_is_sglangs_alone_is_not_there(rag_server: Server) -> None:
    """OpenAI's other endpoints."""
    with pytest.raises(openai.NotFoundError):
        Clients(rag_server, RAG).sync.embeddings.create(model="default", input="x")


def test_stream_ends_with_chunkcache_and_usage(rag_server: Server) -> None:
    """Both tell of the same tokens."""
    to = Clients(rag_server, RAG)
    whole, events = to.ask(), stream_with_usage(to)
    told = [i for i, event in enumerate(events) if "chunkcache" in (event.model_extra or {})]
    assert told == [len(events) - 2]
    for fates, usage in (
        (events[-2].chunkcache["fates"], events[-1].usage),
        (whole.chunkcache["fates"], whole.usage),
    ):
        assert usage.prompt_tokens_details.cached_tokens == fates["exact"]


def test_tool_loop_computes_no_chunk_twice(rag_server: Server) -> None:
    """Each step finds the one before cached, chunks included."""
    fields = {"extra_body": {"chunks": CHUNKS, "conversation_id": "loop"}}
    turns = tool_loop(Clients(rag_server, RAG), **fields)
    for number, (call, reply) in enumerate(turns):
        for step in (call, reply):
            assert step.chunkcache["turns_reused"] == number
            assert step.chunkcache["dropped"] == (["a", "b"] if number else [])
        # all but its prompt's end, which the call has replaced, and a token for the border
        assert reply.chunkcache["fates"]["exact"] >= call.usage.prompt_tokens - 5
    for (_, before), (after, _) in pairwise(turns):
        assert after.chunkcache["fates"]["exact"] >= before.usage.total_tokens - 1


SHAPES: dict[str, dict[str, Any]] = {
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, *QUESTION]},
    "history": {"messages": [*ANSWERED, user("And Solon?", name="anna")]},
    "two tool steps": {
        "messages": [*QUESTION, *calls("{}"), *calls("{}")],
        "tools": [TOOL],
        "tool_choice": NAMED,
    },
    "assistant continued": {"messages": ANSWERED, **CONTINUED},
    "call continued": {"messages": [*QUESTION, calls("{}")[0]], **CONTINUED},
}


@pytest.mark.parametrize("name", SHAPES)
def test_prompt_reads_as_sglangs_with_the_chunks_in_the_message(
    rag_server: Server, name: str
) -> None:
    """The slow way to the same prompt."""
    fields, texts = SHAPES[name], []
    extra = {**fields.get("extra_body", {}), "return_prompt_token_ids": True}
    for base in (V1, RAG):
        messages = [dict(message) for message in fields["messages"]]
        if base == V1:
            asked = [message for message in messages if message["role"] == "user"][-1]
            asked["content"] = "".join(c["text"] + "\n\n" for c in CHUNKS) + asked["content"]
        own = {"order": "retriever"} if base == RAG else {}
        sent = {**fields, "messages": messages, "extra_body": {**extra, **own}}
        reply = Clients(rag_server, base).ask(**sent)
        texts.append(TOKENIZER.decode(reply.choices[0].prompt_token_ids, skip_special_tokens=False))
    assert texts[0] == texts[1]
