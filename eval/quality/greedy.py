"""Requests one greedy answer with its distributions over HTTP, and full prefill of any prompt for
comparison.

Tokens are identified by their text, as in OpenAI's API: this works for every server and suffices
for KL. Tokens with the same text are merged, so KL is a lower bound.
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

FULL_PREFILL = "full-prefill"
REFERENCE = replace(
    ARMS["ours"], name=FULL_PREFILL, summary="every prompt in the retriever's order, nothing reused"
)


@dataclass(frozen=True)
class Greedy:
    """An answer of temperature 0."""

    text: str
    tokens: list[str]
    steps: list[dict[str, float]]
    """For each token: text -> log probability of the likeliest candidates."""
    order: tuple[str, ...]
    """Ids of the chunks in prompt order."""
    num_prompt: int
    num_cached: int
    info: dict[str, Any]
    """The `chunkcache` object of our server, {} from another one."""

    @property
    def fates(self) -> dict[str, int] | None:
        """Prompt tokens by fate, if the server reports them."""
        return self.info.get("fates")


@dataclass(frozen=True)
class Endpoint:
    """A server that answers for an arm."""

    url: str
    model: str
    arm: Arm
    max_new_tokens: int
    """Used if the request has none."""
    top_logprobs: int
    """Log probabilities per token; 0 for a server that gives none."""


def ask(
    endpoint: Endpoint,
    request: Request,
    chunks: Sequence[TextChunk],
    history: Sequence[Message] = (),
    **more: Any,
) -> Greedy:
    """The arm's answer with `chunks` in this order, unless the server orders them; fields of `more`
    override the body's.

    Raises:
        CommandError: the server refused the request or is gone.
    """
    url, arm = endpoint.url, endpoint.arm
    limit = request.max_new_tokens or endpoint.max_new_tokens
    body = request_json(arm, request, chunks, history, max_new_tokens=limit)
    # Nothing is timed here, so the answer comes whole.
    del body["stream"], body["stream_options"]
    body["model"] = endpoint.model
    if endpoint.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": endpoint.top_logprobs}
    reply = post(url + ROUTES[arm.route], body | dict(arm.body) | more)
    try:
        choice, usage, info = reply["choices"][0], reply["usage"], reply.get("chunkcache") or {}
        content = (choice.get("logprobs") or {}).get("content") or []
        # The likeliest candidate comes first, so of those with one text it is the one kept.
        steps = [
            {each["token"]: float(each["logprob"]) for each in reversed(step["top_logprobs"])}
            for step in content
        ]
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
        raise CommandError(
            f"{url}{ROUTES[arm.route]}: no chat completion came back: {error!r}"
        ) from None


class FullPrefill:
    """Answers to prompts without any cached KV:
    each prompt is sent once to a server, with a unique `cache_salt`."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, tuple[str, ...]], Greedy] = {}

    def ask(
        self,
        endpoint: Endpoint,
        request: Request,
        order: Sequence[str],
        history: Sequence[Message] = (),
    ) -> Greedy:
        """Full prefill of the request with its chunks in this order.

        Raises:
            CommandError: as `ask`, or cached KV was found: the server ignores `cache_salt`.
        """
        # A server may tokenise chunks and text differently, so the route is part of the key.
        key = f"{endpoint.arm.route} {endpoint.url}", request.id, tuple(order)
        if key not in self._found:
            by_id = {chunk.id: chunk for chunk in request.chunks}
            # Ours would reorder, and an arm's body may ask it to move KV.
            order_kept = (
                {"order": "retriever", "reuse": "exact"} if endpoint.arm.route == "rag" else {}
            )
            # Random: a running server may still have the KV of an interrupted run's salts.
            chunks, salt = [by_id[chunk_id] for chunk_id in order], secrets.token_hex(16)
            answer = ask(endpoint, request, chunks, history, **order_kept, cache_salt=salt)
            # Without --enable-cache-report no cached tokens are told; ours always tells fates.
            if answer.num_cached or (answer.fates or {}).get("exact"):
                raise CommandError(
                    f"{request.id}: full prefill found cached KV under a unique cache_salt"
                )
            self._found[key] = answer
        return self._found[key]
