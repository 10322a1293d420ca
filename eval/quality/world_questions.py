"""Requests about the generated world that the task `world` does not have: conversations, and answers that need two facts.

One-hop questions are nearly always answered correctly, so they show little of an order's or a policy's effect.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eval.errors import CommandError
from eval.quality.ratio_cases import UNSEEN
from eval.task import SEARCHED_K, Request, TextChunk

if TYPE_CHECKING:
    from eval.world.world import Passage, Question

TURNS = 5
"""Of a conversation."""
PASSAGES = 8
"""Passages of a conversation: the largest number in a prompt of the bundled model's training."""


def add_hop_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the number of facts in an answer."""
    parser.add_argument(
        "--hop", type=int, choices=(1, 2), default=1, help="task world: facts that an answer takes (default: 1)"
    )


def two_hop_requests(args: argparse.Namespace) -> list[Request]:
    """Questions of two hops with their passages and distractors of the same kinds. Raises CommandError for unsuitable options."""
    from eval.world.world import World

    k = _checked_k(args)
    world, rng = World(args.seed | UNSEEN), random.Random(f"{args.seed} two-hop")
    asked = [question for question in world.questions if question.hop == 2]
    return [
        _request(f"world:two-hop:{number}", question, world.context(question, k, rng))
        for number, question in enumerate(rng.sample(asked, min(args.requests, len(asked))))
    ]


def world_conversations(args: argparse.Namespace) -> list[Request]:
    """Conversations, each about a few passages of its own world. Every turn retrieves k of them, its answer's among them.

    Raises:
        CommandError: unsuitable options.
    """
    from eval.world.world import World

    k = _checked_k(args)
    requests: list[Request] = []
    for number in range(-(-args.requests // TURNS)):
        rng = random.Random(f"{args.seed} conversation {number}")
        questions: list[Question] = []
        while len(questions) < TURNS:  # one world in a hundred has fewer two-hop questions
            world = World(rng.getrandbits(60), PASSAGES, num_kinds=1)
            questions = [question for question in world.questions if question.hop == args.hop]
        for turn, question in enumerate(rng.sample(questions, TURNS)):
            gold = [world.passage(passage_id) for passage_id in question.gold_passage_ids]
            others = rng.sample([passage for passage in world.passages if passage not in gold], k - len(gold))
            shown = rng.sample([*gold, *others], k)
            name = f"world:{number}"
            requests.append(_request(f"{name}:{turn}", question, shown, prefix=f"{number}-", conversation=name))
    return requests[: args.requests]


# Private, in order of use


def _checked_k(args: argparse.Namespace) -> int:
    """The number of chunks of a request, after checking all options."""
    if args.task != "world":
        raise CommandError(f"--hop 2 is for task world; {args.task} has its own questions")
    if args.data is not None or args.hub is not None:
        raise CommandError("task world is generated: it takes neither --data nor --hub")
    k: int = SEARCHED_K if args.k is None else args.k
    if not args.hop <= k <= PASSAGES:
        raise CommandError(f"--k must be in {args.hop}..{PASSAGES} for these questions of task world, got {k}")
    if args.requests < 1:
        raise CommandError(f"--requests must be at least 1, got {args.requests}")
    return k


def _request(
    name: str, question: Question, shown: Sequence[Passage], *, prefix: str = "", conversation: str | None = None
) -> Request:
    chunks = tuple(TextChunk(f"{prefix}{passage.id}", passage.text) for passage in shown)
    gold = tuple(f"{prefix}{passage_id}" for passage_id in question.gold_passage_ids)
    return Request(name, question.question, chunks, question.answers, gold, conversation)
