"""`ragpulse`: requests of a RAG service in production; lengths, times and which passages, but no
text.

Source: RAGPulse, github.com/flashserve/RAGPulse, read from files; not from the hub. Licence: MIT.
Every component becomes random words, as many as its tokens / scale, the same in all requests.
System prompts end in a block that is unique to the request: before the chunks it would prevent any
reuse, so only the first block is the system prompt, and all other components are the question.
Requests without passages are left out; one with its history as a component is a single request, not
a turn. Rows of `<DIR>/ragpulse/components.jsonl.gz` and `requests.jsonl.gz`:

    {"kind": "passage", "id": 5856, "token_length": 411}
    {"id": 3800, "timestamp": 0.0, "session_id": "1758081635837-uficr5ams6tj", "input_length": 2926,
    "output_length": 154,
     "passages": [5856, 5859], "sys_prompt": [8302, 11159], "history": [15200], "web_search": [],
     "user_input": [23649]}
"""

from __future__ import annotations

from eval.data.random_text import random_text
from eval.data.rows import count_of, names_of, new_name, number_of, read_rows
from eval.errors import CommandError
from eval.replay.trace import read_components
from eval.task import Request, Source, TaskData, TextChunk

KINDS = ("sys_prompt", "history", "web_search", "user_input")
"""Components of a request that are not passages, in prompt order."""


def load(source: Source) -> TaskData:
    """Requests in the order of arrival, the first one at 0 s.
    Raises CommandError, also for components of unknown length."""
    folder = source.folder("ragpulse")
    lengths = read_components(folder / "components.jsonl.gz")
    passages: dict[str, TextChunk] = {}
    requests: dict[str, Request] = {}
    start_s: float | None = None
    for where, row in read_rows(folder / "requests.jsonl.gz"):
        listed = dict.fromkeys(("passage", name) for name in names_of(row, "passages", where))
        others = [(kind, name) for kind in KINDS for name in names_of(row, kind, where)]
        if not listed:
            continue
        if unknown := next((key for key in (*listed, *others) if key not in lengths), None):
            raise CommandError(f"{where}: {' '.join(unknown)} is not among the components")
        for _, name in listed:
            # At full length: `requests_of` scales chunks, here they would be cut twice.
            if name not in passages:
                passages[name] = TextChunk(
                    name, random_text(f"passage {name}", lengths["passage", name])
                )
        texts = [random_text(" ".join(key), lengths[key] // source.scale) for key in others]
        arrival_s = number_of(row, "timestamp", where)
        # Requests without passages are not sent, so the first one sent is at 0 s.
        start_s = arrival_s if start_s is None else start_s
        name = new_name(row, where, requests, "ragpulse:")
        requests[name] = Request(
            name,
            " ".join(texts[1:]),
            tuple(passages[name] for _, name in listed),
            system=" ".join(texts[:1]),
            arrival_s=arrival_s - start_s,
            max_new_tokens=max(1, count_of(row, "output_length", where) // source.scale),
        )
        if len(requests) == source.requests:
            break
    return TaskData(tuple(passages.values()), tuple(requests.values()))
