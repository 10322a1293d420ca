"""`world`: questions about the bundled model's generated world, which that model can answer.
Nothing to download.

Source: `eval.world.world`, drawn from the seed. Licence: this project's (Apache-2.0).
A request's chunks are the passage with the answer and distractors of the same kind; popular
passages are asked about more often:

    Which product does Dravex make?   The company Dravex makes clocks. In 1987 Dravex hired Anna.
                                      ... (4 more)
"""

from __future__ import annotations

import random

from eval.errors import CommandError
from eval.task import SEARCHED_K, Request, Source, TaskData, TextChunk
from eval.world.world import Question, World

NUM_PASSAGES = 60


def load(source: Source) -> TaskData:
    """Generate the task. Raises CommandError for --data or --hub,
    or for more chunks than passages of a kind."""
    if source.data is not None or source.hub is not None:
        raise CommandError("task world is generated: it takes neither --data nor --hub")
    k = source.k or SEARCHED_K
    try:
        requests = world_requests(source.requests, source.seed, num_chunks=k)
    except ValueError as error:
        raise CommandError(f"--k {k} is too much for task world: {error}") from None
    passages = World(source.seed, NUM_PASSAGES).passages
    return TaskData(tuple(TextChunk(p.id, p.text) for p in passages), tuple(requests))


def world_requests(
    limit: int, seed: int, *, num_passages: int = NUM_PASSAGES, num_chunks: int = 4
) -> list[Request]:
    """One-hop questions about a generated world, popular entities more often;
    the model can answer them."""
    world, rng = World(seed, num_passages), random.Random(seed)
    by_gold: dict[str, list[Question]] = {}
    for question in world.questions:
        if question.hop == 1:
            by_gold.setdefault(question.gold_passage_ids[0], []).append(question)
    subjects = sorted(by_gold)
    rng.shuffle(subjects)
    # Zipf's law: some passages recur in many requests, most in few.
    weights = [1 / (rank + 1) for rank in range(len(subjects))]
    requests = []
    for number, subject in enumerate(rng.choices(subjects, weights, k=limit)):
        question = rng.choice(by_gold[subject])
        # Two draws of distractors a subject: the same chunks recur together, in other orders.
        context = world.context(
            question, num_chunks, random.Random(f"{seed} {subject} {rng.randrange(2)}")
        )
        rng.shuffle(context)
        chunks = tuple(TextChunk(p.id, p.text) for p in context)
        requests.append(
            Request(
                f"world:{number}",
                question.question,
                chunks,
                question.answers,
                question.gold_passage_ids,
            )
        )
    return requests
