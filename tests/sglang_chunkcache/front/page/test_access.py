"""Who may read the live page, and what may run in it."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import pytest
from fastapi import Request
from sglang.srt.utils.auth import AuthLevel, decide_request_auth

from sglang_chunkcache.errors import ForbiddenError
from sglang_chunkcache.front.page.access import DATA, PAGE, check_local, decide
from sglang_chunkcache.front.page.shell import shell

BOTH = {"api_key": "tenant", "admin_api_key": "boss"}


@pytest.mark.parametrize(
    ("path", "key", "keys", "status"),
    [
        (PAGE, None, BOTH, 200),
        (DATA, "boss", BOTH, 200),
        (f"{DATA}/tree", "boss", BOTH, 200),
        (DATA, "tenant", BOTH, 403),
        (DATA, "other", BOTH, 401),
        (DATA, None, BOTH, 401),
        (DATA, "é", BOTH, 401),
        (PAGE.rstrip("/"), None, BOTH, 200),
        (DATA, "tenant", {"api_key": "tenant", "admin_api_key": None}, 200),
        (DATA, "tenant", {"api_key": None, "admin_api_key": "boss"}, 401),
        ("/chunkcache/tree", "tenant", BOTH, 401),
        ("/chunkcache/stats", "boss", BOTH, 401),
    ],
)
def test_keys(path: str, key: str | None, keys: Any, status: int) -> None:
    """The last two are SGLang's decisions, unchanged."""
    level = AuthLevel.NORMAL if path.endswith("stats") else AuthLevel.ADMIN_OPTIONAL
    header = None if key is None else f"Bearer {key}"
    asked = {"method": "GET", "path": path, "authorization_header": header, "auth_level": level}
    decision = decide(decide_request_auth, **asked, **keys)
    assert (200 if decision.allowed else decision.error_status_code) == status


def make_request(client: str | None, host: str, **headers: str) -> Request:
    sent = {"host": host, **headers}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in sent.items()]
    peer = None if client is None else (client, 1)
    scope = {"type": "http", "client": peer, "headers": raw, "path": DATA, "query_string": b""}
    return Request({**scope, "scheme": "http", "server": ("0.0.0.0", 30000), "method": "GET"})


@pytest.mark.parametrize(
    ("request_", "is_local"),
    [
        (make_request("127.0.0.1", "127.0.0.1:30000"), True),
        (make_request("::1", "[::1]:30000"), True),
        (make_request("127.0.0.1", "localhost:30000"), True),
        (make_request("10.0.0.7", "127.0.0.1:30000"), False),
        (make_request("127.0.0.1", "evil.example:30000"), False),
        (make_request("127.0.0.1", "localhost", x_forwarded_for="10.0.0.7"), False),
        (make_request("127.0.0.1", "localhost", forwarded="for=10.0.0.7"), False),
        (make_request("127.0.0.1", "localhost", x_real_ip="10.0.0.7"), False),
        (make_request("127.0.0.1", "localhost", via="1.1 proxy"), False),
        (make_request("::ffff:127.0.0.1", "localhost"), True),
        (make_request("127.0.0.1", "localhost:1", origin="http://localhost:1"), True),
        (make_request("127.0.0.1", "localhost:1", origin="http://localhost:2"), False),
        (make_request("127.0.0.1", "localhost", sec_fetch_site="same-origin"), True),
        (make_request("127.0.0.1", "localhost", sec_fetch_site="cross-site"), False),
        (make_request(None, "localhost"), False),
    ],
)
def test_without_a_key_only_this_machine(request_: Request, is_local: bool) -> None:
    """Neither through a proxy, nor by another page in a browser here, whatever its name."""
    check_local(request_, has_keys=True)
    if is_local:
        check_local(request_, has_keys=False)
    else:
        with pytest.raises(ForbiddenError, match="--api-key"):
            check_local(request_, has_keys=False)


def test_policy_names_every_script_and_style() -> None:
    """And nothing else: no address is loaded, no handler stands in the document."""
    html, headers = shell()
    policy = headers["Content-Security-Policy"]
    for text in re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", html, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    document = re.sub(r"<(script|style)>.*?</\1>", "", html, flags=re.DOTALL)
    assert not re.search(r"\son\w+=|style=|src=|href=|\{", document)
