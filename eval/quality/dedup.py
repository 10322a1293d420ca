"""`python -m eval quality dedup`: does it matter that a conversation does not show a chunk again?
CRAFT figure 7.

The same conversations on a server per policy; the servers differ only in `--chunkcache-dedup`, and
keep the retriever's order. Each policy's history holds its own answers, as in an application. Turns
of one conversation are not independent samples, so intervals and the paired t-test are over
conversations.
"""

from __future__ import annotations

import argparse
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from eval.errors import CommandError
from eval.quality.greedy import Endpoint, Greedy, ask
from eval.quality.mode import Job, Mode, Servers
from eval.quality.scores import summarize_arms
from eval.run import Sample
from eval.serve.arms import ARMS, Arm
from eval.serve.client import Message
from eval.task import SEARCHED_K, Request, TextChunk, load_requests

POLICIES = ("off", "shown", "paper")
TURNS = 5
"""Of a generated conversation."""
PASSAGES = 8
"""Of a generated conversation: the largest number in a prompt of the bundled model's training."""


class Dedup(Mode):
    """Conversations under several policies; the first policy is the baseline."""

    name, summary = "dedup", "repeated chunks left out (CRAFT fig. 7)"

    def __init__(self, args: argparse.Namespace) -> None:
        policies = list(dict.fromkeys(args.policies))
        if len(policies) < 2:
            raise CommandError(
                f"--policies needs at least two different policies, got {' '.join(args.policies)}"
            )
        requests = world_conversations(args) if args.task == "world" else load_requests(args)
        self.conversations = group(requests)
        if not self.conversations:
            raise CommandError(
                f"--task {args.task}: no conversation of several turns; world, mtrag, sharegpt have"
                " them"
            )
        super().__init__(args, [policy_arm(policy) for policy in policies], requests)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """The policies."""
        text = "policies to compare; the first one is the baseline"
        parser.add_argument(
            "--policies", nargs="+", choices=POLICIES, default=["off", "shown"], help=text
        )

    def stages(self) -> Iterator[tuple[Sequence[Arm], Sequence[Job]]]:
        """A job per conversation."""
        last = self.arms[-1].name
        yield (
            self.arms,
            [
                # `_one` goes through arms, then turns, so this is the key of its last sample.
                Job(self.key(last, turns[-1]), partial(self._one, turns))
                for turns in self.conversations
            ],
        )

    def figures(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Cells and contrasts over all turns, and over the turns in which a policy left a chunk
        out."""
        # In all arms, since a contrast pairs the answers to one request.
        touched = {row["request"] for row in samples if row.get("num_dropped")}
        repeated = [row for row in samples if row["request"] in touched]
        return summarize_arms(samples, against=self.arms[0].name) | {
            "num_turns": len({row["request"] for row in samples}),
            "num_deduplicated": len(touched),
            "deduplicated_turns": summarize_arms(repeated, against=self.arms[0].name),
        }

    def _one(self, turns: Sequence[Request], servers: Servers) -> Iterator[tuple[str, Sample]]:
        # One job for all policies, as each answer is compared with the first policy's.
        answers = [converse(endpoint, turns) for endpoint in servers.values()]
        for endpoint, given in zip(servers.values(), answers, strict=True):
            for request, answer, first in zip(turns, given, answers[0], strict=True):
                metrics: dict[str, float] = {}
                more: dict[str, Any] = {}
                if isinstance(answer, Greedy):
                    metrics = self.scorer.gold(answer.text, request)
                    more = {
                        "num_chunks": len(request.chunks),
                        "num_dropped": len(answer.info.get("dropped") or ()),
                    }
                    more["prompt_tokens"] = answer.num_prompt
                    # The first policy would agree with itself.
                    if isinstance(first, Greedy) and first is not answer:
                        metrics |= self.scorer.agreement(answer, first, "policy")
                yield self.sample(endpoint.arm.name, request, answer, metrics, **more)


def policy_arm(policy: str) -> Arm:
    """Ours with this policy and the chunks in the retriever's order."""
    flags = (*ARMS["ours"].flags, "--chunkcache-dedup", policy)
    return replace(ARMS["ours"], name=f"dedup {policy}", flags=flags, body={"order": "retriever"})


def group(requests: Sequence[Request]) -> list[list[Request]]:
    """The turns of each conversation that has several."""
    found: dict[str, list[Request]] = {}
    for request in requests:
        if request.conversation is not None:
            found.setdefault(request.conversation, []).append(request)
    return [turns for turns in found.values() if len(turns) > 1]


def converse(endpoint: Endpoint, turns: Sequence[Request]) -> list[Greedy | CommandError]:
    """The answers, turn by turn; after a turn that the server refused,
    all further turns have its error."""
    salt, history = secrets.token_hex(8), list[Message]()
    found: list[Greedy | CommandError] = []
    for request in turns:
        try:
            # A unique id, because the server may remember the conversation from an interrupted run.
            answer = ask(
                endpoint,
                request,
                request.chunks,
                history,
                conversation_id=f"{salt}-{request.conversation}",
            )
        except CommandError as error:
            # Further turns would lack this one's answer in their history.
            return [*found, *[error] * (len(turns) - len(found))]
        history += [
            {"role": "user", "content": request.question},
            {"role": "assistant", "content": answer.text},
        ]
        found.append(answer)
    return found


def world_conversations(args: argparse.Namespace) -> list[Request]:
    """Conversations, each about a few passages of its own world. Every turn retrieves k of them,
    its answer's among them.

    Raises:
        CommandError: unsuitable options.
    """
    from eval.world.world import World

    k = SEARCHED_K if args.k is None else args.k
    if not 1 <= k <= PASSAGES or args.data is not None or args.hub is not None:
        raise CommandError(
            f"conversations of task world are generated: --k in 1..{PASSAGES}, neither --data nor"
            " --hub"
        )
    requests: list[Request] = []
    for number in range(-(-args.requests // TURNS)):
        rng = random.Random(f"{args.seed} conversation {number}")
        # Passages of one kind tell the same relations, so each is a distractor for any question.
        world = World(rng.getrandbits(60), PASSAGES, num_kinds=1)
        for turn, question in enumerate(
            rng.sample([one for one in world.questions if one.hop == 1], TURNS)
        ):
            gold = [world.passage(passage_id) for passage_id in question.gold_passage_ids]
            others = rng.sample(
                [passage for passage in world.passages if passage not in gold], k - len(gold)
            )
            shown = rng.sample([*gold, *others], k)
            chunks = tuple(TextChunk(f"{number}-{passage.id}", passage.text) for passage in shown)
            gold_ids, name = tuple(f"{number}-{passage.id}" for passage in gold), f"world:{number}"
            requests.append(
                Request(
                    f"{name}:{turn}", question.question, chunks, question.answers, gold_ids, name
                )
            )
    return requests[: args.requests]
