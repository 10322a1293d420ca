"""Cases for the ratio curves: a question, its chunks in prompt order, and the chunks after which their KV is captured.

Strangers and neighbours are never in the case's own prompt: otherwise a chunk would have two variants, or be an exact hit.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from eval.errors import CommandError
from eval.task import Request, TextChunk, load_requests

UNSEEN = 1 << 60  # first seed of worlds that training never draws
CLIP_CHARS = 600  # of a real passage: the model's context is 4,096 tokens, and it reads such text nearly byte by byte
SPARE = 4  # ratio of retrieved passages to passages in the prompt


@dataclass(frozen=True)
class Case:
    """One question with its chunks in prompt order, and the chunks after which they are captured."""

    request: Request
    strangers: tuple[TextChunk, ...]
    """As many as chunks, none of them in the prompt."""
    neighbors: dict[str, tuple[TextChunk, ...]]
    """By chunk id, nearest first, none of them in the prompt; as many as the largest top-n."""


def world_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Questions about a world that training never draws, each about a sentence that only the passage before it explains, or
    (`--questions own`) about what its passage says itself."""
    from eval.world.world import World, linked_questions

    world, rng = World(args.seed | UNSEEN, links=True), random.Random(f"{args.seed} linked {args.k}")
    corpus = [TextChunk(p.id, p.text) for p in world.passages]
    for number in range(args.requests):
        passages = world.linked_context(args.k, rng)
        shown = {passage.id for passage in passages}
        own = [q for q in world.questions if q.hop == 1 and shown.issuperset(q.gold_passage_ids)]
        asked = rng.choice(linked_questions(passages) if args.questions == "linked" else own)
        chunks = tuple(TextChunk(p.id, p.text) for p in passages)
        request = Request(f"{args.questions}:{number}", asked.question, chunks, asked.answers, asked.gold_passage_ids)
        yield make_case(request, corpus, max(args.neighbors), rng)


def data_cases(args: argparse.Namespace) -> Iterator[Case]:
    """The requests of a task with enough passages, which are clipped. Turns of conversations become single questions.

    More passages are retrieved than shown: strangers and neighbours are taken from all retrieved passages.
    """
    requests = load_requests(argparse.Namespace(**vars(args) | {"k": SPARE * args.k}))
    clipped = {c.id: TextChunk(c.id, c.text[:CLIP_CHARS]) for request in requests for c in request.chunks}
    rng = random.Random(f"{args.seed} {args.task} {args.k}")
    for request in (request for request in requests if len(request.chunks) >= args.k):
        chunks = tuple(clipped[c.id] for c in request.chunks[: args.k])
        yield make_case(replace(request, chunks=chunks), list(clipped.values()), max(args.neighbors), rng)


def make_case(request: Request, corpus: Sequence[TextChunk], num_neighbors: int, rng: random.Random) -> Case:
    """The case with strangers and neighbours from `corpus`. Raises CommandError if the corpus has too few."""
    chunks = request.chunks
    shown = {chunk.text for chunk in chunks}
    others = [chunk for chunk in corpus if chunk.text not in shown]
    if len(others) < max(len(chunks), num_neighbors):
        raise CommandError(f"{request.id}: {len(others)} passages besides the prompt's are too few")
    rank = ranker(others)
    neighbors = {chunk.id: tuple(rank(chunk.text, num_neighbors)) for chunk in chunks}
    return Case(request, tuple(rng.sample(others, len(chunks))), neighbors)


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
