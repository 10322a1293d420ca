"""The prompts that servers calibrate their selection on: linked questions of worlds of their own.

python -m eval.world.canned > sglang_chunkcache/canned_prompts.jsonl
"""

import json
import random
from collections.abc import Iterator

from eval.world.world import World, linked_questions

SEED, NUM_PROMPTS, NUM_CHUNKS = 1 << 61, 6, 6
"""Beyond the seeds that training draws, and those of the evaluations."""


def prompts() -> Iterator[dict[str, object]]:
    """`{"question", "chunks"}`: each asks for a fact whose subject only the chunk before names."""
    for number in range(NUM_PROMPTS):
        rng = random.Random(number)
        passages = World(SEED + number, links=True).linked_context(NUM_CHUNKS, rng)
        question = rng.choice(linked_questions(passages)).question
        yield {"question": question, "chunks": [passage.text for passage in passages]}


if __name__ == "__main__":
    print("\n".join(map(json.dumps, prompts())))
