"""The adapters in an environment of their own, against a server in this one.

    .venv/bin/python -m pytest -m nightly tests/integrations

`test_environment.py` makes the environment, starts the server and runs the other files there.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

URL_VAR, JSON_VAR = "CHUNKCACHE_URL", "CHUNKCACHE_WRITES_JSON"


@pytest.fixture(scope="session")
def url() -> str:
    """Of the server, which has an index of the examples' passages."""
    if URL_VAR not in os.environ:
        pytest.skip("run by test_environment.py")
    return os.environ[URL_VAR]


@pytest.fixture(scope="session")
def writes_json() -> dict[str, Any]:
    """Fields with which the toy, that has never seen JSON, fills a grammar's."""
    fields: dict[str, Any] = json.loads(os.environ[JSON_VAR])
    return fields
