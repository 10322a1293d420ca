"""`python -m eval quality answers`: a task through arms, each answer compared with full prefill.

A reference server computes every prompt in the retriever's order without reuse: the arm
`full-prefill`. Each arm then answers all requests in their order on a server of its own, so it
reuses KV of its own traffic only. An arm that reorders chunks is compared with full prefill twice:
of its own prompt (the effect of reuse: none, unless KV was moved) and of the retriever's order (the
difference that an application would notice). Arms that send chunks as text tokenise them together
with the surrounding text, our server tokenises them separately. If the token ids then differ,
answers may differ without any reuse; `tokenised_otherwise` counts such prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from eval.errors import CommandError
from eval.quality.greedy import REFERENCE, FullPrefill, ask
from eval.quality.mode import Job, Mode, Servers
from eval.quality.scores import summarize_arms
from eval.run import Sample
from eval.serve.arms import (
    Arm,
    add_arm_options,
    create_reorderer,
    parse_arm,
    parse_arms,
    skip_reason,
)
from eval.serve.client import Message
from eval.task import Request, TextChunk, load_requests

DEFAULT_ARMS = ("stock-lpm", "craft", "ours", "full-reuse", "fused")


class Answers(Mode):
    """Right answers, and agreement with full prefill."""

    name, summary = "answers", "a task through arms"

    def __init__(self, args: argparse.Namespace) -> None:
        arms = parse_arms(args.arms)
        requests = load_requests(args)
        url = args.reference and parse_arm(f"{REFERENCE.name}={args.reference}").url
        # Of `--reference` the address alone counts: its route stays that of ours.
        self._reference = replace(REFERENCE, url=url)
        # The threads of a stage share it without a lock: their jobs are of different requests.
        self._full = FullPrefill()
        self._histories = fixed_histories(requests)
        super().__init__(args, [self._reference, *arms], requests)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Arms, the reference server, a judge."""
        add_arm_options(parser, default=DEFAULT_ARMS)
        text = (
            "address of a server of ours that computes full prefill, instead of one started for it"
        )
        parser.add_argument("--reference", metavar="URL", help=text)
        group = parser.add_argument_group("faithfulness, by a judge model")
        group.add_argument("--judge-url", metavar="URL", help="an OpenAI-compatible endpoint")
        group.add_argument("--judge-model", metavar="NAME", help="the model to ask there")
        group.add_argument(
            "--judge-key-env", metavar="VARIABLE", help="environment variable that holds the key"
        )

    def stages(self) -> Iterator[tuple[Sequence[Arm], Sequence[Job]]]:
        """One arm at a time, with the reference server, which keeps running."""
        for arm in self.arms:
            if reason := skip_reason(arm, contextpilot_python=self.args.contextpilot_python):
                self.facts.setdefault("skipped", {})[arm.name] = reason
                print(f"eval quality: without {arm.name}: {reason}", file=sys.stderr)
                continue
            both = zip(self.requests, self._orders(arm), strict=True)
            jobs = [
                Job(self.key(arm.name, one), partial(self._one, arm, one, chunks))
                for one, chunks in both
            ]
            yield ([arm] if arm is self._reference else [self._reference, arm]), jobs

    def figures(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Cells, contrasts with full prefill, and by arm the prompts whose length differs from full
        prefill's.

        Their text is the same, but other tokens: answers may then differ without any reuse.
        """
        # A failed request has neither order nor tokens.
        having = [row for row in samples if "order" in row]
        lengths = {
            row["request"]: row["prompt_tokens"] for row in having if row["arm"] == REFERENCE.name
        }
        others = Counter(
            row["arm"] for row in having if row["prompt_tokens"] != lengths.get(row["request"])
        )
        return summarize_arms(samples, against=REFERENCE.name) | {
            "tokenised_otherwise": dict(others)
        }

    def _orders(self, arm: Arm) -> list[Sequence[TextChunk]]:
        """The chunks of each request as the arm's client sends them."""
        reorderer = create_reorderer(arm, contextpilot_python=self.args.contextpilot_python)
        if reorderer is None:
            return [request.chunks for request in self.requests]
        try:
            # All of them, also in a continued run: ContextPilot orders by the requests before.
            return [reorderer.order(request) for request in self.requests]
        finally:
            reorderer.close()

    def _one(
        self, arm: Arm, request: Request, chunks: Sequence[TextChunk], servers: Servers
    ) -> Iterator[tuple[str, Sample]]:
        ids, history = [chunk.id for chunk in request.chunks], self._histories[request.id]
        reference, endpoint = servers[REFERENCE.name], servers[arm.name]
        metrics: dict[str, float] = {}
        try:
            if arm is self._reference:
                answer = self._full.ask(reference, request, ids, history)
            else:
                answer = ask(endpoint, request, chunks, history)
                # A server that gets the chunks as text tokenises them itself, so only that server
                # can compute its own prompt.
                own = self._full.ask(
                    reference if arm.route == "rag" else endpoint, request, answer.order, history
                )
                given = self._full.ask(reference, request, ids, history)
                metrics = self.scorer.agreement(answer, own, "full") | self.scorer.agreement(
                    answer, given, "retriever"
                )
        except CommandError as error:
            yield self.sample(arm.name, request, error)
            return
        metrics |= self.scorer.gold(answer.text, request) | self.scorer.faithfulness(
            answer.text, request
        )
        counts: dict[str, Any] = {
            "prompt_tokens": answer.num_prompt,
            "cached_tokens": answer.num_cached,
        }
        yield self.sample(arm.name, request, answer, metrics, order=[*answer.order], **counts)


def fixed_histories(requests: Sequence[Request]) -> dict[str, list[Message]]:
    """Request -> the messages before it: its conversation's earlier questions with the data set's
    replies.

    The messages have no chunks and are the same for all arms, so that arms differ in the last turn
    only.
    """
    turns: dict[str, list[Message]] = {}
    histories = {}
    for request in requests:
        before = turns.setdefault(request.conversation, []) if request.conversation else []
        # A copy, since later turns of the conversation extend `before`.
        histories[request.id] = list(before)
        if reply := request.reply or next(iter(request.answers), ""):
            before += [
                {"role": "user", "content": request.question},
                {"role": "assistant", "content": reply},
            ]
    return histories
