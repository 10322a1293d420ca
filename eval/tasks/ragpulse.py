"""`ragpulse`: requests of a RAG service in production; lengths, times and which passages, but no text.

Source: RAGPulse, github.com/flashserve/RAGPulse, read from files; not from the hub. Licence: MIT.
Every component becomes random words, as many as its tokens / scale, the same in all requests. System prompts end in a block that
is unique to the request: before the chunks it would prevent any reuse, so only the first block is the system prompt, and all
other components are the question. Requests without passages are left out; one with its history as a component is a single
request, not a turn. Rows of `<DIR>/ragpulse/components.jsonl.gz` and `requests.jsonl.gz`:

    {"kind": "passage", "id": 5856, "token_length": 411}
    {"id": 3800, "timestamp": 0.0, "session_id": "1758081635837-uficr5ams6tj", "input_length": 2926, "output_length": 154,
     "passages": [5856, 5859], "sys_prompt": [8302, 11159], "history": [15200], "web_search": [], "user_input": [23649]}
"""

from __future__ import annotations

from collections.abc import Mapping

from eval.data.random_text import random_text
from eval.data.rows import name_of, names_of, new_name, number_of, read_rows, text_of
from eval.errors import CommandError
from eval.task import Request, Source, TaskData, TextChunk

KINDS = ("sys_prompt", "history", "web_search", "user_input")
"""Components of a request that are not passages, in prompt order."""


def load(source: Source) -> TaskData:
    """Requests in the order of arrival, the first one at 0 s. Raises CommandError, also for components of unknown length."""
    folder = source.folder("ragpulse")
    lengths = {
        (text_of(row, "kind", where), name_of(row, "id", where)): int(number_of(row, "token_length", where))
        for where, row in read_rows(folder / "components.jsonl.gz")
    }
    passages: dict[str, TextChunk] = {}
    requests: list[Request] = []
    ids: set[str] = set()
    start_s: float | None = None
    for where, row in read_rows(folder / "requests.jsonl.gz"):
        names = names_of(row, "passages", where)
        if not names:
            continue
        ids.add(request_id := new_name(row, where, ids, "ragpulse:"))
        for name in names:
            if name not in passages:
                passages[name] = TextChunk(name, _text("passage", name, where, lengths, source.scale))
        if not names_of(row, "sys_prompt", where):
            raise CommandError(f"{where}: a request needs a sys_prompt")
        components = [(kind, name) for kind in KINDS for name in names_of(row, kind, where)]
        first, *rest = (_text(kind, name, where, lengths, source.scale) for kind, name in components)
        if not rest:
            raise CommandError(f"{where}: a request needs something after its sys_prompt")
        arrival_s = number_of(row, "timestamp", where)
        start_s = arrival_s if start_s is None else start_s
        requests.append(
            Request(
                request_id,
                " ".join(rest),
                tuple(passages[name] for name in names),
                system=first,
                arrival_s=arrival_s - start_s,
                max_new_tokens=max(1, int(number_of(row, "output_length", where)) // source.scale),
            )
        )
        if len(requests) == source.requests:
            break
    return TaskData(tuple(passages.values()), tuple(requests))


def _text(kind: str, name: str, where: str, lengths: Mapping[tuple[str, str], int], scale: int) -> str:
    if (kind, name) not in lengths:
        raise CommandError(f"{where}: {kind} {name} is not among the components")
    return random_text(f"{kind} {name}", lengths[kind, name] // scale)
