"""What is wrong with a body is said by places in it and in plain words."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("sglang")

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.bodies import GenerateIn, PreprocessIn, RagFields
from sglang_chunkcache.front.parse import parse, refuse_misspelt

OURS, THEIRS = RagFields.model_fields, ChatCompletionRequest.model_fields


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (RagFields, {"order": "x", "reuse": "y"}, "order: must be 'retriever', 'frequency' or 'tree'; reuse: must be "),
        (RagFields, {"reuse": 5}, "reuse: expected 'exact', 'fused' or an object with a mode"),
        (RagFields, {"chunks": ["a"]}, "chunks.0: must be an object"),
        (RagFields, {"chunks": [{"id": 1}]}, "chunks.0.text: is missing"),
        (RagFields, {"chunks": [{"text": "a", "id": True}]}, "chunks.0.id: must be a valid string or must be a valid integer"),
        (RagFields, {"conversation_id": 7}, "conversation_id: must be a valid string"),
        (GenerateIn, {"parts": [1]}, "parts.0: must be a valid string or must be an object"),
        (GenerateIn, {"parts": ["a"], "cache_salt": 5}, "cache_salt: must be a valid string"),
        (GenerateIn, {"parts": ["a"], "sampling_params": []}, "sampling_params: must be an object"),
        (GenerateIn, {"parts": ["a"], "input_ids": [1]}, "input_ids: is no field here"),
        (PreprocessIn, {"chunk": "text"}, "chunk: must be an object"),
        (PreprocessIn, {}, "chunk: is missing"),
        (ChatCompletionRequest, {"messages": "x"}, "messages: must be a valid list"),
        (ChatCompletionRequest, {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role: "),
    ],
    ids=str,
)  # fmt: skip
def test_message(model: Any, body: dict[str, Any], message: str) -> None:
    """The field, and no name of a class, of a validator or of a union's branch."""
    with pytest.raises(RequestError) as caught:
        parse(model, body)
    assert str(caught.value).startswith(message)
    for name in (
        "Value error",
        "Input should",
        "ChunkIn",
        "ChunkArea",
        "Message",
        "instance of",
        "function-",
    ):
        assert name not in str(caught.value)


def test_some_of_many_mistakes_are_named() -> None:
    """A handful: the message stays readable."""
    with pytest.raises(RequestError) as caught:
        parse(RagFields, {"chunks": [{}] * 100})
    assert str(caught.value).count("is missing") == 5


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("chunk", "chunks"),
        ("Chunks", "chunks"),
        ("conversationId", "conversation_id"),
        ("conversation", "conversation_id"),
        ("retriever", "retrieve"),
        ("retrieval", "retrieve"),
        ("re_use", "reuse"),
        ("orders", "order"),
    ],
)
def test_misspelt_field_is_refused(name: str, meant: str) -> None:
    """It would be ignored, and the answer would come without context."""
    with pytest.raises(RequestError, match=f"^{name}: is no field here; did you mean {meant}"):
        refuse_misspelt({name: 1, "messages": []}, OURS, THEIRS)


@pytest.mark.parametrize(
    "name",
    [*OURS, *THEIRS, "store", "metadata", "service_tier", "verbosity", "prompt_cache_key", "documents", "rag", "num_ctx", "seed"],
)  # fmt: skip
def test_other_fields_pass(name: str) -> None:
    """SGLang's, OpenAI's that SGLang ignores, and those of other servers."""
    refuse_misspelt({name: 1}, OURS, THEIRS)


def test_field_that_one_branch_takes_is_not_blamed() -> None:
    """SGLang's messages are a union by role:
    of a user's message without content only the content is wrong."""
    with pytest.raises(RequestError) as caught:
        parse(ChatCompletionRequest, {"messages": [{"role": "user", "content": 7}]})
    assert "role" not in str(caught.value)
    assert str(caught.value).startswith("messages.0.content: ")
