"""`python -m eval quality dedup`: does it matter that a conversation does not show a chunk again? CRAFT figure 7.

The same conversations on a server per policy; the servers differ only in `--chunkcache-dedup`, and keep the retriever's order.
Each policy's history holds its own answers, as in an application. Turns of one conversation are not independent samples,
so intervals and the paired t-test are over conversations.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from eval.errors import CommandError
from eval.quality.greedy import Endpoint, Greedy, ask
from eval.quality.mode import Job, Mode, Servers
from eval.quality.scores import summarize_arms
from eval.quality.world_questions import add_hop_option, world_conversations
from eval.run import Sample
from eval.serve.arms import ARMS, Arm
from eval.serve.client import Message
from eval.task import Request, load_requests

POLICIES = ("off", "shown", "paper")


class Dedup(Mode):
    """Conversations under several policies; the first policy is the baseline."""

    name, summary = "dedup", "repeated chunks left out (CRAFT fig. 7)"

    def __init__(self, args: argparse.Namespace) -> None:
        if len(set(args.policies)) < 2:
            raise CommandError(f"--policies needs at least two different policies, got {' '.join(args.policies)}")
        is_made = args.task == "world" or args.hop == 2
        requests = world_conversations(args) if is_made else load_requests(args)
        self.conversations = group(requests)
        if not self.conversations:
            raise CommandError(
                f"--task {args.task}: no conversation of several turns; world, mtrag, sharegpt have them"
            )
        super().__init__(args, [policy_arm(policy) for policy in dict.fromkeys(args.policies)], requests)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """The policies."""
        text = "policies to compare; the first one is the baseline"
        parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["off", "shown"], help=text)
        add_hop_option(parser)

    def stages(self) -> Iterator[tuple[Sequence[Arm], Sequence[Job]]]:
        """A job per conversation."""
        last = self.arms[-1]
        yield self.arms, [Job(key_of(last, turns[-1]), partial(self._one, turns)) for turns in self.conversations]

    def figures(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """As `summarize`."""
        return summarize(samples, against=self.arms[0].name)

    def _one(self, turns: Sequence[Request], servers: Servers) -> Iterator[tuple[str, Sample]]:
        answers = [converse(endpoint, turns) for endpoint in servers.values()]
        for endpoint, given in zip(servers.values(), answers, strict=True):
            for request, answer, first in zip(turns, given, answers[0], strict=True):
                metrics: dict[str, float] = {}
                more: dict[str, Any] = {}
                if isinstance(answer, Greedy):
                    metrics = self.scorer.gold(answer.text, request)
                    more = {"num_chunks": len(request.chunks), "num_dropped": len(answer.info.get("dropped") or ())}
                    more["prompt_tokens"] = answer.num_prompt
                    if isinstance(first, Greedy) and first is not answer:
                        metrics |= self.scorer.agreement(answer, first, "policy")
                row = self.sample(endpoint.arm.name, request, answer, metrics, **more)
                yield key_of(endpoint.arm, request), row


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
    """The answers, turn by turn; after a turn that the server refused, all further turns have its error."""
    salt, history = secrets.token_hex(8), list[Message]()
    found: list[Greedy | CommandError] = []
    for request in turns:
        try:
            # A unique id, because the server may remember the conversation from an interrupted run.
            answer = ask(endpoint, request, request.chunks, history, conversation_id=f"{salt}-{request.conversation}")
        except CommandError as error:
            return [*found, *[error] * (len(turns) - len(found))]
        history += [{"role": "user", "content": request.question}, {"role": "assistant", "content": answer.text}]
        found.append(answer)
    return found


def key_of(arm: Arm, request: Request) -> str:
    """The sample's key."""
    return f"dedup/{arm.name}/{request.id}"


def summarize(samples: Sequence[Sample], *, against: str) -> dict[str, Any]:
    """Cells and contrasts over all turns, and contrasts over the turns in which a chunk was left out."""
    touched = {row["request"] for row in samples if row.get("num_dropped")}
    repeated = [row for row in samples if row["request"] in touched]
    return summarize_arms(samples, against=against) | {
        "num_turns": len({row["request"] for row in samples}),
        "num_deduplicated": len(touched),
        "deduplicated_turns": summarize_arms(repeated, against=against),
    }
