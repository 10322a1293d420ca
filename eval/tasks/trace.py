"""`trace`: your own trace, in the format of `python -m eval replay`; texts are random words.

Source and licence: yours. A chunk becomes as many random words as its length / scale, the same for
each occurrence of its id. System prompts are made alike; every question is different. A line, of
which only `passages` is needed (eval/replay/trace.py):

    {"passages": ["doc7#2", "doc1#0"], "lengths": [212, 198], "timestamp": 12.5, "conversation":
    "c41",
     "question_tokens": 30, "system_tokens": 120, "output_tokens": 90}
"""

from __future__ import annotations

from eval.data.random_text import random_text
from eval.replay.trace import TraceFile
from eval.task import Request, Source, TaskData, TextChunk

CHUNK_TOKENS = 256
"""Used if the trace has no lengths: in the middle of the 128 to 512 that CRAFT calls typical."""
QUESTION_TOKENS = 16
"""Used if the trace has no `question_tokens`; the sets of questions here have 8 to 20 words."""


def load(source: Source) -> TaskData:
    """Requests in the order of arrival, the first one at 0 s if every line has a timestamp.
    Raises CommandError."""
    trace = [*TraceFile(source.file(), max_requests=source.requests)]
    passages: dict[str, TextChunk] = {}
    # A length given anywhere counts everywhere.
    for request in sorted(trace, key=lambda request: not request.has_lengths):
        for chunk in request.chunks:
            num_tokens = chunk.num_tokens if request.has_lengths else CHUNK_TOKENS
            if chunk.id not in passages:
                passages[chunk.id] = TextChunk(
                    chunk.id, random_text(f"passage {chunk.id}", num_tokens)
                )
    start_s = (
        trace[0].timestamp if all(request.timestamp is not None for request in trace) else None
    )
    requests = []
    for number, request in enumerate(trace):
        question_tokens = (
            QUESTION_TOKENS if request.question_tokens is None else request.question_tokens
        )
        asked = Request(
            f"trace:{number}",
            random_text(f"{source.seed} question {number}", question_tokens // source.scale),
            tuple(passages[chunk.id] for chunk in request.chunks),
            conversation=request.conversation,
            # `random_text` has one word at least, so it is not asked without a system prompt.
            system=random_text("system", request.system_tokens // source.scale)
            if request.system_tokens
            else "",
            arrival_s=None
            if start_s is None or request.timestamp is None
            else request.timestamp - start_s,
            max_new_tokens=max(1, request.output_tokens // source.scale)
            if request.output_tokens
            else None,
        )
        requests.append(asked)
    return TaskData(tuple(passages.values()), tuple(requests))
