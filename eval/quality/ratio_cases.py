"""Cases for the ratio curves: a question, its chunks in prompt order, and the chunks after which
their KV is captured.

Strangers and neighbours are never in the case's own prompt: otherwise a chunk would have two
variants, or be an exact hit.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from eval.data.nearest import ranker
from eval.errors import CommandError
from eval.task import TASKS, Request, TextChunk, load_requests
from eval.world.kinds import KINDS
from eval.world.world import World

UNSEEN = 1 << 60  # first seed of worlds that training never draws
CLIP_CHARS = 600
"""Of a passage, for the bundled model: its context is 4,096 tokens,
and it reads such text nearly byte by byte."""
LONG = 2000
"""Tokens, about, of a long request; the bundled model's context is 4,096."""
SPARE = 4  # ratio of retrieved passages to passages in the prompt
K = 6  # passages in the prompt, unless the data set lists them


@dataclass(frozen=True)
class Case:
    """One question with its chunks in prompt order, and the chunks after which they are
    captured."""

    request: Request
    strangers: tuple[TextChunk, ...]
    """As many as chunks, none of them in the prompt."""
    neighbors: dict[str, tuple[TextChunk, ...]]
    """By chunk id, nearest first, none of them in the prompt; as many as the largest top-n."""
    questions: str | None = None
    """The kind of question, of the generated world."""
    k: int | None = None
    """With `--ks`: the number of chunks."""


def make_cases(args: argparse.Namespace) -> list[Case]:
    """The cases of each of `--ks`, or of `--k`.

    Raises:
        CommandError: too few passages for one.
    """
    found: list[Case] = []
    for k in args.ks or [args.k]:
        asked = argparse.Namespace(**vars(args) | {"k": k})
        cases = world_cases(asked) if args.task == "world" else list(data_cases(asked))
        if not cases:
            raise CommandError(f"--task {args.task}: no request has {k or 2} chunks")
        if args.ks:
            # By its id full prefill of the same chunks is found.
            cases = [
                replace(case, k=k, request=replace(case.request, id=f"{case.request.id}:k={k}"))
                for case in cases
            ]
        found += cases
    return found


def world_cases(args: argparse.Namespace) -> list[Case]:
    """`--requests` questions of each kind about each of `--worlds` worlds that training never
    draws, kinds and worlds in turn.

    Raises:
        CommandError: too few passages for a kind.
    """
    k, columns = args.k or K, []
    if few := [kind for kind in args.questions if k < KINDS[kind].min_passages]:
        raise CommandError(
            f"--questions {few[0]} needs --k {KINDS[few[0]].min_passages} or more, got {k}"
        )
    for seed in range(args.seed, args.seed + args.worlds):
        world = World(seed | UNSEEN, links=True)
        corpus = [TextChunk(f"{seed}:{p.id}", p.text) for p in world.passages]
        for kind in args.questions:
            rng, column = random.Random(f"{seed} {kind} {k}"), []
            for number in range(args.requests):
                question, passages, _ = KINDS[kind].draw(world, k, rng)
                chunks = tuple(TextChunk(f"{seed}:{p.id}", p.text) for p in passages)
                gold = tuple(f"{seed}:{gold}" for gold in question.gold_passage_ids)
                request = Request(
                    f"{kind}:{seed}:{number}", question.question, chunks, question.answers, gold
                )
                column.append(make_case(request, corpus, max(args.neighbors), rng, questions=kind))
            columns.append(column)
    return [case for row in zip(*columns, strict=True) for case in row]


def data_cases(args: argparse.Namespace) -> Iterator[Case]:
    """The requests of a task with enough passages. Turns of conversations become single questions.

    Passages that a data set lists are all shown, or the first `--k`; if they are searched, more are
    retrieved than shown. Strangers and neighbours are taken from all that were found. For the
    bundled model passages are clipped.
    """
    listed = (args.retriever or TASKS[args.task].retriever) == "given"
    k = args.k or (None if listed else K)
    requests = load_requests(
        argparse.Namespace(**vars(args) | {"k": None if listed else SPARE * (k or K)})
    )
    clip = CLIP_CHARS if args.model_path == "bundled" else None
    clipped = {c.id: TextChunk(c.id, c.text[:clip]) for request in requests for c in request.chunks}
    rng = random.Random(f"{args.seed} {args.task} {args.k}")
    for request in (request for request in requests if len(request.chunks) >= (k or 2)):
        chunks = tuple(clipped[c.id] for c in request.chunks[:k])
        yield make_case(
            replace(request, chunks=chunks), list(clipped.values()), max(args.neighbors), rng
        )


def make_case(
    request: Request,
    corpus: Sequence[TextChunk],
    num_neighbors: int,
    rng: random.Random,
    *,
    questions: str | None = None,
) -> Case:
    """The case with strangers and neighbours from `corpus`.
    Raises CommandError if the corpus has too few."""
    chunks = request.chunks
    # By text: to a server equal texts are one chunk, whatever ids a data set gives them.
    shown = {chunk.text for chunk in chunks}
    others = [chunk for chunk in corpus if chunk.text not in shown]
    if len(others) < max(len(chunks), num_neighbors):
        raise CommandError(f"{request.id}: {len(others)} passages besides the prompt's are too few")
    rank = ranker(others)
    neighbors = {chunk.id: tuple(rank(chunk.text, num_neighbors)) for chunk in chunks}
    return Case(request, tuple(rng.sample(others, len(chunks))), neighbors, questions)


def long_request(request: Request, num_prompt: int) -> Request:
    """One of about `LONG` tokens and one token's answer:
    the words of this one, of so many tokens, again and again."""
    words = " ".join(chunk.text for chunk in request.chunks).split()
    times = LONG / num_prompt
    text = " ".join((words * (1 + int(times)))[: int(times * len(words))])
    return replace(request, max_new_tokens=1, chunks=(TextChunk("long", text),))
