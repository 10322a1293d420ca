"""Cases for the ratio curves: a question, its chunks in prompt order, and the chunks after which their KV is captured.

Strangers and neighbours are never in the case's own prompt: otherwise a chunk would have two variants, or be an exact hit.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from eval.errors import CommandError
from eval.quality.scores import block_of
from eval.task import Request, TextChunk, load_requests

KINDS = ("one-hop", "two-hop", "order", "linked")
UNSEEN = 1 << 60  # first seed of worlds that training never draws
CLIP_CHARS = 600  # of a real passage: the model's context is 4,096 tokens, and it reads such text nearly byte by byte

SPARE = 4  # ratio of retrieved passages to passages in the prompt


@dataclass(frozen=True)
class Case:
    """One question with its chunks in prompt order, and the chunks after which they are captured."""

    request: Request
    kind: str
    block: str
    """The case's block of the bootstrap; see `block_of`."""
    strangers: tuple[TextChunk, ...]
    """As many as chunks, none of them in the prompt."""
    neighbors: dict[str, tuple[TextChunk, ...]]
    """By chunk id, nearest first, none of them in the prompt; as many as the largest top-n."""


def world_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Questions about worlds that training never draws, the same number for each kind and number of chunks."""
    from eval.world.world import World, linked_questions, order_questions

    for kind in args.kinds:
        world = World(args.seed | UNSEEN, links=kind == "linked")
        corpus = [TextChunk(p.id, p.text) for p in world.passages]
        for num_chunks in args.chunks:
            rng = random.Random(f"{args.seed} {kind} {num_chunks}")
            asked = [q for q in world.questions if q.hop == (2 if kind == "two-hop" else 1)]
            rng.shuffle(asked)
            for number, question in enumerate(asked[: args.requests]):
                if kind == "linked":
                    passages = world.linked_context(num_chunks, rng)
                    question = rng.choice(linked_questions(passages))
                else:
                    passages = list(world.context(question, num_chunks, rng))
                if kind == "order":
                    question = rng.choice(order_questions(passages)[:2])  # the model never learned "after"
                chunks = tuple(TextChunk(p.id, p.text) for p in passages)
                request = Request(f"{kind}:{num_chunks}:{number}", question.question, chunks, question.answers)
                block = " ".join(question.gold_passage_ids)
                yield make_case(request, kind, block, corpus, max(args.neighbors), rng)


def data_cases(args: argparse.Namespace) -> Iterator[Case]:
    """The requests of a task with enough passages, which are clipped. Turns of conversations become single questions.

    More passages are retrieved than shown: strangers and neighbours are taken from all retrieved passages.
    """
    asked = argparse.Namespace(**vars(args) | {"k": SPARE * max(args.chunks)})
    requests = load_requests(asked)
    clipped = {c.id: TextChunk(c.id, c.text[:CLIP_CHARS]) for request in requests for c in request.chunks}
    corpus = list(clipped.values())
    for num_chunks in args.chunks:
        rng = random.Random(f"{args.seed} {args.task} {num_chunks}")
        for request in (request for request in requests if len(request.chunks) >= num_chunks):
            chunks = tuple(clipped[c.id] for c in request.chunks[:num_chunks])
            alone = Request(f"{request.id}:{num_chunks}", request.question, chunks, request.answers)
            yield make_case(alone, args.task, block_of(request), corpus, max(args.neighbors), rng)


def make_case(
    request: Request, kind: str, block: str, corpus: Sequence[TextChunk], num_neighbors: int, rng: random.Random
) -> Case:
    """The case with strangers and neighbours from `corpus`. Raises CommandError if the corpus has too few."""
    chunks = request.chunks
    shown = {chunk.text for chunk in chunks}
    others = [chunk for chunk in corpus if chunk.text not in shown]
    if len(others) < max(len(chunks), num_neighbors):
        raise CommandError(f"{kind}: {len(others)} passages besides the prompt's are too few")
    rank = ranker(others)
    neighbors = {chunk.id: tuple(rank(chunk.text, num_neighbors)) for chunk in chunks}
    return Case(request, kind, block, tuple(rng.sample(others, len(chunks))), neighbors)


def ranker(corpus: Sequence[TextChunk]) -> Callable[[str, int], list[TextChunk]]:
    """(text, n) -> the n passages that share most words with it, rare words counting more; ties in the corpus' order."""
    bags = [set(chunk.text.lower().split()) for chunk in corpus]
    frequency = Counter(word for bag in bags for word in bag)
    weight = {word: math.log(len(corpus) / count) for word, count in frequency.items()}

    def nearest(text: str, n: int) -> list[TextChunk]:
        words = set(text.lower().split())
        scores = [sum(sorted(weight[word] for word in words & bag)) for bag in bags]
        return [corpus[i] for i in sorted(range(len(corpus)), key=lambda i: -scores[i])[:n]]

    return nearest
