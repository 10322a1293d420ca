"""One greedy answer with its distributions, over HTTP; and full prefill of any prompt, for comparison.

Tokens are known by their text here, as OpenAI's API gives them: the same for every server, and enough for KL, since tokens that
share a text are lumped (a lower bound).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eval.errors import CommandError
from eval.http import post
from eval.serve.arms import ARMS, Arm
from eval.serve.client import ROUTES, Message, request_json

if TYPE_CHECKING:
    from eval.task import Request, TextChunk

REFERENCE = replace(ARMS["ours"], name="full-prefill", summary="every prompt in the retriever's order, nothing reused")


@dataclass(frozen=True)
class Greedy:
    """An answer of temperature 0."""

    text: str
    tokens: list[str]
    steps: list[dict[str, float]]
    """A token each: text -> log probability of the likeliest."""
    order: tuple[str, ...]
    """Ids of the chunks as the prompt shows them."""
    num_prompt: int
    num_cached: int
    info: dict[str, Any]
    """What our server says it did, {} from another one."""

    @property
    def fates(self) -> dict[str, int] | None:
        """Prompt tokens by fate, if the server says."""
        return self.info.get("fates")


@dataclass(frozen=True)
class Endpoint:
    """A server that answers for an arm."""

    url: str
    model: str
    arm: Arm
    max_new_tokens: int
    """Where the request does not say."""
    top_logprobs: int
    """Of a token; 0 for a server that gives none."""


def ask(
    endpoint: Endpoint,
    request: Request,
    chunks: Sequence[TextChunk],
    history: Sequence[Message] = (),
    **more: Any,
) -> Greedy:
    """The arm's answer with `chunks` in this order, unless the server orders them; `more` goes into the body and wins.

    Raises:
        CommandError: the server refused or is gone.
    """
    url, arm = endpoint.url, endpoint.arm
    limit = request.max_new_tokens or endpoint.max_new_tokens
    body = request_json(arm, request, chunks, history, max_new_tokens=limit)
    del body["stream"], body["stream_options"]
    body["model"] = endpoint.model
    if endpoint.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": endpoint.top_logprobs}
    reply = post(url + ROUTES[arm.route], body | dict(arm.body) | more)
    try:
        choice, usage, info = reply["choices"][0], reply["usage"], reply.get("chunkcache") or {}
        content = (choice.get("logprobs") or {}).get("content") or []
        steps = [{each["token"]: float(each["logprob"]) for each in reversed(step["top_logprobs"])} for step in content]
        return Greedy(
            choice["message"]["content"] or "",
            [step["token"] for step in content],
            steps,
            tuple(info.get("order") or (chunk.id for chunk in chunks)),
            usage["prompt_tokens"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            info,
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CommandError(f"{url}{ROUTES[arm.route]}: no chat completion came back: {error!r}") from None


class FullPrefill:
    """Answers to prompts of which nothing is cached, each asked once: every one has a `cache_salt` of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._found: dict[tuple[str, tuple[str, ...]], Greedy] = {}

    def ask(self, request: Request, order: Sequence[str], history: Sequence[Message] = ()) -> Greedy:
        """Full prefill of the request with its chunks in this order.

        Raises:
            CommandError: as `ask`, or something was cached after all: the server takes no `cache_salt`.
        """
        key = request.id, tuple(order)
        if key not in self._found:
            by_id = {chunk.id: chunk for chunk in request.chunks}
            chunks = [by_id[chunk_id] for chunk_id in order]
            salt = secrets.token_hex(16)
            order_kept = {"order": "retriever", "reuse": "exact"} if self._endpoint.arm.route == "rag" else {}
            answer = ask(self._endpoint, request, chunks, history, **order_kept, cache_salt=salt)
            if answer.num_cached or (answer.fates or {}).get("exact"):
                raise CommandError(f"{request.id}: full prefill found cached KV under a salt of its own")
            self._found[key] = answer
        return self._found[key]
