"""What is wrong with a body is said by places in it and in plain words."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("sglang")

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.bodies import GenerateIn, RagFields
from sglang_chunkcache.front.parse import parse, refuse_misspelt

OURS, THEIRS = RagFields.model_fields, ChatCompletionRequest.model_fields
NO_WORDS = re.compile("Value error|Input should|ChunkIn|ChunkArea|Message|instance of|function-")
ORDERS = "'retriever', 'frequency' or 'tree'"
NAMES = "must be a valid string or must be a valid integer"
WIZARD, USER = {"role": "wizard", "content": "x"}, {"role": "user", "content": 7}


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (RagFields, {"order": "x", "reuse": "y"}, f"order: must be {ORDERS}; reuse: must be "),
        (RagFields, {"reuse": 5}, "reuse: expected 'exact', 'fused' or an object with a mode"),
        (RagFields, {"chunks": ["a"]}, "chunks.0: must be an object"),
        (RagFields, {"chunks": [{"id": 1}]}, "chunks.0.text: is missing"),
        (RagFields, {"chunks": [{"text": "a", "id": True}]}, f"chunks.0.id: {NAMES}"),
        (GenerateIn, {"parts": [1]}, "parts.0: must be a valid string or must be an object"),
        (GenerateIn, {"parts": ["a"], "input_ids": [1]}, "input_ids: is no field here"),
        (ChatCompletionRequest, {"messages": "x"}, "messages: must be a valid list"),
        (ChatCompletionRequest, {"messages": [WIZARD]}, "messages.0.role: "),
        # of a union by role, only what is wrong in the branch that was meant
        (ChatCompletionRequest, {"messages": [USER]}, "messages.0.content: "),
    ],
    ids=str,
)
def test_message(model: Any, body: dict[str, Any], message: str) -> None:
    """The field, and no name of a class, of a validator or of a union's branch."""
    with pytest.raises(RequestError) as caught:
        parse(model, body)
    assert str(caught.value).startswith(message)
    assert ("role" in str(caught.value)) == ("role" in message)
    assert not NO_WORDS.search(str(caught.value))


def test_some_of_many_mistakes_are_named() -> None:
    """A handful: the message stays readable."""
    with pytest.raises(RequestError) as caught:
        parse(RagFields, {"chunks": [{}] * 100})
    assert str(caught.value).count("is missing") == 5


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        ("chunk Chunks", "chunks"),
        ("conversationId conversation", "conversation_id"),
        ("retriever retrieval", "retrieve"),
        ("re_use", "reuse"),
        ("orders", "order"),
    ],
)
def test_misspelt_field_is_refused(names: str, meant: str) -> None:
    """It would be ignored, and the answer would come without context."""
    for name in names.split():
        with pytest.raises(RequestError, match=f"^{name}: is no field here; did you mean {meant}"):
            refuse_misspelt({name: 1, "messages": []}, OURS, THEIRS)


def test_other_fields_pass() -> None:
    """SGLang's, OpenAI's that SGLang ignores, and those of other servers."""
    others = "store metadata service_tier verbosity prompt_cache_key rag num_ctx seed"
    for name in [*OURS, *THEIRS, *others.split()]:
        refuse_misspelt({name: 1}, OURS, THEIRS)


@pytest.mark.parametrize("name", ["documents", "context", "passages"])
def test_what_others_call_chunks_is_refused_without_chunks(name: str) -> None:
    """SGLang ignores it: the answer would come without context."""
    with pytest.raises(RequestError, match=f"^{name}: is no field here; did you mean chunks"):
        refuse_misspelt({name: [], "messages": []}, OURS, THEIRS)
    for ours in ("chunks", "retrieve"):
        refuse_misspelt({name: [], ours: []}, OURS, THEIRS)
    refuse_misspelt({name: []}, OURS, [*THEIRS, name])


def test_a_wrong_chunk_is_told_what_one_is() -> None:
    for chunks in ("text", ["text"], [{"page_content": "text"}]):
        with pytest.raises(RequestError, match=r'^chunks.*; a chunk is \{"text": '):
            parse(RagFields, {"chunks": chunks})
