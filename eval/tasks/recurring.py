"""`recurring`: a few chunks that come again and again in any order, of random words; needs no data.

Source: drawn from the seed. Licence: this project's (Apache-2.0).
Exact prefixes find little of such traffic, moved KV most: of 60 chunks of 300 words a request has
`--k` (8), the one of rank r in proportion to r**-.6, in an order of its own, and a question.
"""

from __future__ import annotations

import random

from eval.data.random_text import random_text
from eval.errors import CommandError
from eval.task import Request, Source, TaskData, TextChunk

NUM_CHUNKS, CHUNK_WORDS, QUESTION_WORDS = 60, 300, 16
ZIPF = 0.6
K = 8


def load(source: Source) -> TaskData:
    """Generate the task. Raises CommandError for --data, --hub or more chunks than there are."""
    if source.data is not None or source.hub is not None:
        raise CommandError("task recurring is generated: it takes neither --data nor --hub")
    k = source.k or K
    if k > NUM_CHUNKS:
        raise CommandError(f"--k {k} is too much for task recurring: there are {NUM_CHUNKS} chunks")
    rng = random.Random(source.seed)
    passages = [
        TextChunk(f"chunk{i}", random_text(f"{source.seed} chunk{i}", CHUNK_WORDS))
        for i in range(NUM_CHUNKS)
    ]
    weights = [rank**-ZIPF for rank in range(1, NUM_CHUNKS + 1)]
    requests = []
    for number in range(source.requests):
        drawn: dict[str, TextChunk] = {}
        while len(drawn) < k:
            (chunk,) = rng.choices(passages, weights)
            drawn[chunk.id] = chunk
        question = random_text(f"{source.seed} question {number}", QUESTION_WORDS)
        requests.append(Request(f"recurring:{number}", question, tuple(drawn.values())))
    return TaskData(tuple(passages), tuple(requests))
