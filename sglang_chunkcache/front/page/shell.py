"""The page itself: one document with its style and scripts, which a policy names by their digests,
so that nothing else runs in it.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from importlib.util import find_spec
from typing import NamedTuple

CHARTS = ("dygraphs", "assets/dygraph-combined.js")
"""A package of the extra `page`, and what it ships. Without it figures are shown, and no charts."""


class Shell(NamedTuple):
    html: str
    headers: dict[str, str]


@cache
def shell() -> Shell:
    """What `/chunkcache/` answers."""
    here = resources.files(__package__)
    style, script = (here.joinpath(f"page.{each}").read_text("utf-8") for each in ("css", "js"))
    package, path = CHARTS
    charts = ""
    if find_spec(package) is not None:
        charts = resources.files(package).joinpath(path).read_text("utf-8")
    html = here.joinpath("page.html").read_text("utf-8")
    for name, text in (("STYLE", style), ("CHARTS", charts), ("SCRIPT", script)):
        html = html.replace(f"/*{name}*/", text)
    policy = {
        "default-src": "'none'",
        "script-src": f"{_digest(charts)} {_digest(script)}",
        "style-src": _digest(style),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
    return Shell(html, headers)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
