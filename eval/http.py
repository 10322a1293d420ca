"""HTTP with JSON, standard library only:
the harness's one client for everything but streams (eval/serve/client.py)."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from eval.errors import CommandError


def post(
    url: str,
    body: Any = None,
    *,
    timeout_s: float = 600.0,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """POST JSON, or nothing; get JSON.
    Raises CommandError with status and body if there is no answer or it is not OK."""
    # urllib sends a GET where data is None.
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, {"Content-Type": "application/json", **(headers or {})}
    )
    return _open(request, timeout_s)


def get(url: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
    """GET JSON. Raises as `post`."""
    return _open(urllib.request.Request(url), timeout_s)


def _open(request: urllib.request.Request, timeout_s: float) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        raise CommandError(
            f"{request.full_url}: {error.code} {error.read().decode(errors='replace')[:500]}"
        ) from None
    # no connection, or it ends within the answer
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise CommandError(f"{request.full_url}: {reason or type(error).__name__}") from None
    try:
        parsed = json.loads(text)
    except ValueError:
        # SGLang answers `/flush_cache` in plain text and `/health` with nothing.
        return {"text": text.decode(errors="replace")}
    return parsed if isinstance(parsed, dict) else {"value": parsed}
