"""Admin client of a running server, for the commands: JSON in, JSON out, an error is one line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import requests

from sglang_chunkcache.errors import RefusedError, ServerError

__all__ = ["Client", "RefusedError", "ServerError", "settle"]

SETTLE_TIMEOUT_S = 60.0
"""For captures that wait for the next forward. Each takes one prefill of its chunk at most."""
POLL_S = 0.1


class Client:
    """One server, for as many threads as there are connections.

    Raises:
        RefusedError: the server answers a request with 400.
        ServerError: it does not answer, or answers with another error.
    """

    def __init__(self, url: str, api_key: str | None, *, max_connections: int = 1) -> None:
        self.url = url.rstrip("/")
        self._session = requests.Session()
        # By default the adapter keeps ten connections and drops, with a warning, what is over.
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=max_connections))
        self._session.trust_env = False  # no proxy between a command and its server
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer's JSON object."""
        return self._call("POST", path, body)

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            answer = self._session.request(method, self.url + path, json=body, timeout=600)
            # Before raise_for_status: who sends many requests goes on behind a refused one.
            if answer.status_code == 400:
                raise RefusedError(_message(answer))
            answer.raise_for_status()
            parsed = answer.json()
        except requests.RequestException as error:
            raise ServerError(f"{self.url}{path}: {error}") from None
        if not isinstance(parsed, dict):
            raise ServerError(f"{self.url}{path}: answers {str(parsed)[:80]!r}")
        return parsed


def settle(client: Client, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
    """Wait until no rank has a capture or a write to its storage waiting. A rank captures during
    its next forward, so requests are sent.

    Raises:
        ServerError: some still wait after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        ranks = client.get("/chunkcache/stats")["ranks"]
        pending = sum(rank["store"]["pending"] for rank in ranks)
        writing = sum(rank["storage"]["queue"] for rank in ranks if "storage" in rank)
        if not pending and not writing:
            return
        if time.monotonic() > deadline:
            waiting = f"{pending} chunks still wait to enter the store"
            if not pending:
                waiting = f"{writing} chunks still wait to enter the storage"
            raise ServerError(f"{client.url}: {waiting} after {timeout_s:.0f} s")
        if pending:
            few = {"max_new_tokens": 4}
            client.post("/rag/v1/generate", {"parts": ["Hello."], "sampling_params": few})
        time.sleep(POLL_S)


def _message(answer: requests.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, LookupError, TypeError):
        # A proxy's error has no JSON.
        return answer.text[:200]
