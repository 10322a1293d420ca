"""Where a rank's KV events are to be had: SGLang's `--kv-events-config`, ours or the user's.

Ours publishes into a folder that only this user may enter, since events show prompts. One socket a
rank: SGLang numbers the ports of tcp, and names those of addresses that have `inproc` in them; an
ipc address without it is an error for the second rank. A publisher binds ipc addresses and
wildcards, and connects to others.
"""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from sglang.srt.disaggregation.kv_events import KVEventsConfig, ZmqEventPublisher

from sglang_chunkcache import compat

BUFFER_STEPS = 256
"""Batches that can be told again. One of 8192 tokens at page size 1 has 0.1 MB."""
MAX_PATH = 100
"""Bytes of a socket's path; Linux has room for 107."""
WILDCARDS = ("*", "0.0.0.0", "[::]")


class Source(NamedTuple):
    """Of one rank."""

    endpoint: str
    replay: str | None
    topic: str
    tells_adapter: bool
    """Stored blocks say the adapter's name."""


def own_config() -> str | None:
    """A configuration with which SGLang publishes to this front alone. None: as `_own_sockets`."""
    if (sockets := _own_sockets()) is None:
        return None
    own = {"publisher": "zmq", **sockets, "buffer_steps": BUFFER_STEPS}
    return json.dumps({**own, **compat.EVENT_FORMAT})


def _own_sockets() -> dict[str, str] | None:
    """In a folder that is gone after an orderly end. None: its path is too long for a socket's."""
    folder = tempfile.mkdtemp(prefix="chunkcache-inproc-")  # with mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    events, replay = Path(folder, "events"), Path(folder, "replay")
    if len(f"{replay}_dp1000".encode()) > MAX_PATH or "*" in folder:
        return None
    return {"endpoint": f"ipc://{events}", "replay_endpoint": f"ipc://{replay}"}


def flags_for(args: Any) -> list[str]:
    """SGLang's flags with which the front hears of its own tree, beside those of ServerArgs `args`.
    Says it where it will not. A user's publisher is kept. Without a replay socket it gets one: its
    first batches come before the front listens."""
    heard = sources(args)
    if args.disable_radix_cache or (heard and heard[0].replay):  # nothing is kept; all is heard
        return []
    own = None
    if heard and (sockets := _own_sockets()) is not None:
        replay = {"replay_endpoint": sockets["replay_endpoint"]}
        own = json.dumps({**json.loads(args.kv_events_config), **replay})
    elif not args.kv_events_config and args.nnodes == 1:
        own = own_config()
    if own is None:
        lost = "what SGLang's tree has lost is assumed by the least recent use"
        print(f"chunk cache: no KV events can be heard: {lost}", file=sys.stderr, flush=True)
        return []
    return ["--kv-events-config", own]


def sources(args: Any) -> list[Source]:
    """Of every rank, by SGLang's ServerArgs. None where nobody can listen: nothing is published, a
    publisher looks for its listener, or ranks are on other machines."""
    if not args.kv_events_config or args.nnodes > 1:
        return []
    config = KVEventsConfig.from_cli(args.kv_events_config)
    endpoint, replay = _local(config.endpoint, compat.says_bound(config)), config.replay_endpoint
    if config.publisher != "zmq" or endpoint is None:
        return []
    of_rank = ZmqEventPublisher.offset_endpoint_port
    return [
        Source(
            of_rank(endpoint, rank),
            of_rank(replay and _local(replay, True), rank),  # it is always bound
            config.topic,
            compat.tells_adapter(config),
        )
        for rank in range(args.dp_size)
    ]


def _local(endpoint: str, is_bound: bool | None) -> str | None:
    """The address under which this machine reaches what a publisher binds.
    None: it binds nothing there."""
    for wildcard in WILDCARDS:
        if endpoint.startswith(f"tcp://{wildcard}:") and is_bound is not False:
            return endpoint.replace(wildcard, "127.0.0.1", 1)
    return endpoint if is_bound or (is_bound is None and endpoint.startswith("ipc://")) else None
