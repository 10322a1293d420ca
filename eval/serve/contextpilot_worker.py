"""Reorders chunk ids with ContextPilot, one JSON object per line; see contextpilot_adapter.py.
May run in another Python."""

import json
import os
import sys
from importlib import metadata

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # ContextPilot prints to stdout

from contextpilot.server.live_index import ContextPilot  # noqa: E402

pilot = ContextPilot(use_gpu=False)
version: str | None
try:
    version = metadata.version("contextpilot")
except metadata.PackageNotFoundError:  # a checkout
    version = None
for line in sys.stdin:
    question = json.loads(line)
    try:
        contexts, _ = pilot.reorder([question["ids"]], conversation_id=question["conversation"])
        ids = list(contexts[0])
    except Exception:  # as released it fails once a node of its index has 1,000 children
        ids = []
    print(json.dumps({"ids": ids, "version": version}), file=answers, flush=True)
