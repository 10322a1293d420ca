"""Who may read the live page. The shell holds no data, so anybody may; its data shows every
tenant's requests, so the admin key opens it, or the API key where that is the only one. Without any
key it is told to this machine alone.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Any

from fastapi import Request
from sglang.srt.utils.auth import AuthDecision, AuthLevel

from sglang_chunkcache.errors import ForbiddenError

PAGE = "/chunkcache/"
DATA = "/chunkcache/live"
FORWARDED = ("forwarded", "x-forwarded", "x-real-ip", "via", "cf-connecting")
"""How headers of proxies begin."""


def decide(original: Callable[..., AuthDecision], **asked: Any) -> AuthDecision:
    """SGLang's decision on a request when a key is set, around `decide_request_auth`: it opens
    every endpoint or none, and tells a tenant's key from no key by nothing."""
    if asked["path"] in (PAGE, PAGE.rstrip("/")):
        return AuthDecision(allowed=True)
    try:
        decision = original(**asked)
    except TypeError:  # SGLang compares keys as ASCII
        return AuthDecision(allowed=False)
    if not decision.allowed and asked["path"].startswith(DATA) and asked["api_key"]:
        as_client = {"auth_level": AuthLevel.NORMAL, "admin_api_key": None}
        if original(**{**asked, **as_client}).allowed:
            return AuthDecision(allowed=False, error_status_code=403)
    return decision


def check_local(request: Request, *, has_keys: bool) -> None:
    """Without a key a request must come from this machine, by its name and from our page: others'
    pages in a browser here could ask, too, and SGLang lets them read.

    Raises:
        ForbiddenError: it does not.
    """
    if has_keys:
        return
    host = request.url.hostname or ""
    headers, client = request.headers, request.client.host if request.client else ""
    is_forwarded = any(name.startswith(FORWARDED) for name in headers)
    is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin") or (
        headers.get("origin", "").partition("//")[2] not in ("", headers.get("host"))
    )
    is_here = _is_loopback(client) and (host == "localhost" or _is_loopback(host))
    if is_forwarded or is_foreign or not is_here:
        raise ForbiddenError(
            "without --api-key or --admin-api-key the live page is for this machine alone"
        )


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
