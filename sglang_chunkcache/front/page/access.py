"""Who may read the live page. The shell holds no data, so anybody may; its data shows every
tenant's requests, so the admin key opens it, or the API key where that is the only one. Without any
key it is told to this machine alone.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

from fastapi import Request
from sglang.srt.utils.auth import AuthDecision, AuthLevel

from sglang_chunkcache.errors import ForbiddenError

PAGE = "/chunkcache/"
DATA = "/chunkcache/live"


def decide(original: Callable[..., AuthDecision], **asked: Any) -> AuthDecision:
    """SGLang's decision on a request when a key is set, around `decide_request_auth`: it opens
    every endpoint or none, and tells a tenant's key from no key by nothing."""
    if asked["path"] == PAGE:
        return AuthDecision(allowed=True)
    decision = original(**asked)
    if not decision.allowed and asked["path"].startswith(DATA) and asked["api_key"]:
        as_client = {"auth_level": AuthLevel.NORMAL, "admin_api_key": None}
        if original(**{**asked, **as_client}).allowed:
            return AuthDecision(allowed=False, error_status_code=403)
    return decision


def check_local(request: Request, *, has_keys: bool) -> None:
    """Without a key a request must come from this machine, by its name: a page of another origin
    could reach it under a name of its own.

    Raises:
        ForbiddenError: it does not.
    """
    if has_keys:
        return
    host = request.url.hostname or ""
    is_forwarded = any(name in request.headers for name in ("forwarded", "x-forwarded-for"))
    client = request.client.host if request.client else ""
    if is_forwarded or not (_is_loopback(client) and (host == "localhost" or _is_loopback(host))):
        raise ForbiddenError(
            "without --api-key or --admin-api-key the live page is for this machine alone"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
