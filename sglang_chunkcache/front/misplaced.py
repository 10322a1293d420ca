"""Requests to SGLang's own `/v1` that come with `chunks`: SGLang ignores the field, so the model
answers without the passages.

Nothing of the answer changes. The body is not read for this: FastAPI has parsed it before SGLang
calls `generate_request`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_chunkcache.front.metrics import Metrics

logger = logging.getLogger(__name__)


class Misplaced:
    """Counts them, and logs the first.

    Args:
        metrics: asked for when it is first needed, since SGLang must be up.
    """

    def __init__(self, metrics: Callable[[], Metrics]) -> None:
        self._metrics, self._has_warned = metrics, False

    def look(self, raw_request: Any) -> None:
        """At the HTTP request of one engine request, None where it has none."""
        field = chunks_field(raw_request)
        if field is not None:
            self._metrics().count("misplaced", field)
            if not self._has_warned:
                logger.warning(
                    "chunk cache: %s got `%s`, which SGLang ignores: the model does not see these"
                    " passages (further requests are counted). Use base_url /rag/v1",
                    raw_request.scope["path"],
                    field,
                )
            self._has_warned = True


def chunks_field(raw_request: Any) -> str | None:
    """Where a request to `/v1` has chunks, as `field_with_chunks` says it."""
    body = getattr(raw_request, "_json", None)  # what Starlette keeps of `Request.json`
    # our own endpoints read the body as a stream, which leaves no `_json`
    if not isinstance(body, dict) or not raw_request.scope["path"].startswith("/v1/"):
        return None
    return field_with_chunks(body)


def field_with_chunks(body: dict[str, Any]) -> str | None:
    """Where a body has chunks, at least one: `chunks`, `messages.chunks`, or nowhere."""
    if body.get("chunks"):
        return "chunks"
    messages = body.get("messages")
    are_in_one = isinstance(messages, list) and any(
        isinstance(each, dict) and each.get("chunks") for each in messages
    )
    return "messages.chunks" if are_in_one else None
