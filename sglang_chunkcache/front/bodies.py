"""What clients may send: the fields of every body with their limits."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    StrictInt,
    StrictStr,
)

from radix_ext import FusionRequest
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.front.fusion_options import ReuseIn, fused_request, needs_of

MAX_ID_CHARS = 256
"""Conversation ids and chunk labels; they are kept, so they are bounded."""

MAX_TURNS = 100
"""User messages that make a query; a query's characters are limited further."""
MAX_NPROBE = 1_000_000
"""More clusters than any index has."""
MAX_MESSAGES = 10_000
"""Of `/rag/v1/retrieve`, where no context bounds them."""

SearchMode = Literal["filled", "dense", "bm25", "fusion"]
Order = Literal["retriever", "frequency", "tree"]


def bounded(name: str) -> str:
    """The name; of one over MAX_ID_CHARS characters the beginning and a digest of all of it."""
    if len(name) <= MAX_ID_CHARS:
        return name
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{name[: MAX_ID_CHARS - len(digest) - 1]}…{digest}"


Name = Annotated[StrictStr, AfterValidator(bounded)]


class ChunkIn(BaseModel, extra="ignore"):
    """A retrieved chunk. `id` is only shown back."""

    # passages of /rag/v1/retrieve may be sent as they are, with score and title
    text: str
    id: Name | StrictInt | None = None


def _named_mode(value: Any) -> Any:
    """`"fused"` is short for `{"mode": "fused"}`."""
    if value is not None and not isinstance(value, str | dict | ReuseIn):
        raise ValueError("expected 'exact', 'fused' or an object with a mode")
    return {"mode": value} if isinstance(value, str) else value


class ReuseFields(BaseModel):
    """How a RAG request's chunks may be ordered and reused; absent or null: as the server does."""

    order: Order | None = None
    reuse: Annotated[ReuseIn | None, BeforeValidator(_named_mode)] = None

    def fusion_request(self, config: ChunkCacheConfig) -> FusionRequest | None:
        """None for exact reuse, and in SGLang's tree. Raises RequestError where the server does not
        move KV, or has no such selector."""
        if self.reuse is None:
            return None
        # For exact reuse as well: a misspelt selector is told, whatever the mode.
        needs_of(config, self.reuse.selector)
        if self.reuse.mode == "exact" or config.is_stock:
            return None
        return fused_request(config, self.reuse)

    def is_denied(self, config: ChunkCacheConfig) -> bool:
        """Whether moved KV is asked for where the tree is SGLang's."""
        return config.is_stock and self.reuse is not None and self.reuse.mode == "fused"


class RetrieveIn(BaseModel, extra="forbid", strict=True):
    """What a request may ask of the server's index; what is left out is the server's default."""

    k: int | None = Field(default=None, ge=1)
    query: str | None = None
    turns: int | None = Field(default=None, ge=1, le=MAX_TURNS)
    mode: SearchMode | None = None
    nprobe: int | None = Field(default=None, ge=1, le=MAX_NPROBE)


class RetrieveBody(RetrieveIn):
    """Body of `/rag/v1/retrieve`."""

    messages: list[dict[str, Any]] = Field(default=[], max_length=MAX_MESSAGES)
    text: bool = True


def _true_or_object(value: Any) -> Any:
    """`true` is short for `{}`, `false` for null."""
    return ({} if value else None) if isinstance(value, bool) else value


class RagFields(ReuseFields):
    """What a RAG chat request has besides OpenAI's fields."""

    chunks: list[ChunkIn] | None = None
    """Of the last user message. None: not said, so a question that the conversation knows has the
    chunks that it had."""
    retrieve: Annotated[RetrieveIn | None, BeforeValidator(_true_or_object)] = None
    conversation_id: Name | None = None
    history: Literal["required"] | None = None


class MessageFields(BaseModel):
    """What a user message may have besides OpenAI's fields."""

    chunks: list[ChunkIn]


class Messages(BaseModel):
    """The user messages that bring chunks, by index."""

    # A mapping, so that an error names the message by its index in the client's list.
    messages: dict[int, MessageFields]


class ChunkArea(BaseModel, extra="forbid"):
    """Chunks inside `/rag/v1/generate`'s parts."""

    chunks: list[ChunkIn]


class GenerateIn(ReuseFields, extra="forbid"):
    """Body of `/rag/v1/generate`."""

    # SGLang's /generate has more fields: one that is ignored would be missed without a word.
    parts: list[str | ChunkArea] = Field(min_length=1, max_length=10_000)
    sampling_params: dict[str, Any] = {}
    """SGLang's; `guard/sampling.py` checks them."""
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: StrictInt = Field(default=-1, ge=-1)
    top_logprobs_num: StrictInt = 0
    return_text_in_logprobs: bool = False
    extra_key: str | None = None
    cache_salt: str | None = None


class SystemMessage(BaseModel, extra="forbid"):
    """What may precede a chunk that is preprocessed."""

    role: Literal["system", "developer"]
    content: str


class PreprocessIn(BaseModel, extra="forbid"):
    """Body of `/chunkcache/preprocess`."""

    chunk: ChunkIn
    neighbors: list[ChunkIn] = []
    messages: list[SystemMessage] = []
    extra_key: str | None = None
    cache_salt: str | None = None


class CalibrationExample(BaseModel):
    """A question and the chunks that answer it;
    further fields, as `check --calibrate` reads them, are ignored."""

    question: str = Field(min_length=1)
    chunks: list[Annotated[str, Field(min_length=1)]] = Field(min_length=2, max_length=64)


class CalibrateIn(BaseModel, extra="forbid"):
    """Body of `/chunkcache/calibrate`."""

    examples: list[CalibrationExample] = Field(default=[], max_length=64)
