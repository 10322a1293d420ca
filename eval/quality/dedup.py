"""`python -m eval quality dedup`: does it matter that a conversation does not show a chunk again? CRAFT figure 7.

The same conversations on a server per policy; the servers differ only in `--chunkcache-dedup`, and keep the retriever's order.
Each policy's history holds its own answers, as in an application. Turns of one conversation are not independent samples,
so intervals and the paired t-test are over conversations.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from eval.errors import CommandError
from eval.progress import progress
from eval.quality.greedy import Endpoint, Greedy, ask
from eval.quality.options import (
    Endpoints,
    add_quality_options,
    check_options,
    finish,
    make_scorer,
    open_endpoints,
    spec_of,
)
from eval.quality.scores import GOLD_METRICS, Scorer, block_of, differences, rounded, summarize_arms, table
from eval.quality.workers import workers
from eval.quality.world_questions import add_hop_option, world_conversations
from eval.run import Run, Sample
from eval.serve.arms import ARMS, Arm
from eval.serve.client import Message
from eval.serve.options import default_folder
from eval.serve.runner import load_facts
from eval.task import Request, add_task_options, load_requests

POLICIES = ("off", "shown", "paper")
SHOWN = (*GOLD_METRICS, "same_policy", "rouge_l_policy", "bert_score_policy")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this mode."""
    add_task_options(parser)
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=["off", "shown"],
        help="policies to compare; the first one is the baseline",
    )
    add_hop_option(parser)
    add_quality_options(parser)


def measure(args: argparse.Namespace) -> int:
    """Answer, score, record."""
    check_options(args)
    if len(set(args.policies)) < 2:
        raise CommandError(f"--policies needs at least two different policies, got {' '.join(args.policies)}")
    is_made = args.task == "world" or args.hop == 2
    requests = world_conversations(args) if is_made else load_requests(args)
    conversations = group(requests)
    if not conversations:
        raise CommandError(f"--task {args.task} has no conversation of several turns; world, mtrag and sharegpt have")
    arms = [policy_arm(policy) for policy in dict.fromkeys(args.policies)]
    scorer, folder = make_scorer(args, arms), args.out or default_folder(f"quality-{args.mode}")
    facts = load_facts(folder)
    with Run(
        folder,
        kind="quality",
        spec=spec_of(args, arms, requests),
        summarize=partial(summarize, against=arms[0].name, scorer=scorer, facts=facts),
        baseline=args.baseline,
    ) as run:
        with open_endpoints(args, requests, facts, folder) as endpoints:
            answer_all(run, conversations, arms, endpoints, scorer, args)
        results = run.results()
        repeats = f"turns with a chunk left out: {results['num_deduplicated']} of {results['num_turns']}"
        lines = [table(results["cells"], SHOWN), differences(results["contrasts"], SHOWN), repeats]
        return finish(run, "\n".join(lines))


def policy_arm(policy: str) -> Arm:
    """Ours with this policy and the chunks in the retriever's order."""
    return replace(
        ARMS["ours"],
        name=f"dedup {policy}",
        flags=(*ARMS["ours"].flags, "--chunkcache-dedup", policy),
        body={"order": "retriever"},
    )


def group(requests: Sequence[Request]) -> list[list[Request]]:
    """The turns of each conversation that has several."""
    found: dict[str, list[Request]] = {}
    for request in requests:
        if request.conversation is not None:
            found.setdefault(request.conversation, []).append(request)
    return [turns for turns in found.values() if len(turns) > 1]


def answer_all(
    run: Run,
    conversations: Sequence[Sequence[Request]],
    arms: Sequence[Arm],
    endpoints: Endpoints,
    scorer: Scorer,
    args: argparse.Namespace,
) -> None:
    """Take every sample that `run` does not hold yet. An interrupted conversation is repeated from its first turn."""
    missing = [
        turns for turns in conversations if any(key_of(arm, request) not in run for arm in arms for request in turns)
    ]
    if not missing:
        return
    servers = [endpoints.open(arm) for arm in arms]

    def one(turns: Sequence[Request]) -> list[list[Greedy | CommandError]]:
        return [converse(endpoint, turns) for endpoint in servers]

    with workers(args.clients) as pool, progress("conversations", len(missing)) as bar:
        for turns, answers in zip(missing, pool.map(one, missing), strict=True):
            for endpoint, given in zip(servers, answers, strict=True):
                if any(isinstance(answer, CommandError) for answer in given):
                    endpoints.check(endpoint)
                for request, answer, first in zip(turns, given, answers[0], strict=True):
                    if key_of(endpoint.arm, request) not in run:
                        run.add(key_of(endpoint.arm, request), sample(endpoint.arm, request, answer, first, scorer))
            bar.update()


def converse(endpoint: Endpoint, turns: Sequence[Request]) -> list[Greedy | CommandError]:
    """The answers, turn by turn; after a turn that the server refused, all further turns have its error."""
    salt, history = secrets.token_hex(8), list[Message]()
    found: list[Greedy | CommandError] = []
    for request in turns:
        if found and isinstance(found[-1], CommandError):
            found.append(found[-1])
            continue
        try:
            # A unique id, because the server may remember the conversation from an interrupted run.
            answer = ask(endpoint, request, request.chunks, history, conversation_id=f"{salt}-{request.conversation}")
        except CommandError as error:
            found.append(error)
            continue
        history += [{"role": "user", "content": request.question}, {"role": "assistant", "content": answer.text}]
        found.append(answer)
    return found


def key_of(arm: Arm, request: Request) -> str:
    """The sample's key."""
    return f"dedup/{arm.name}/{request.id}"


def sample(
    arm: Arm, request: Request, answer: Greedy | CommandError, first: Greedy | CommandError, scorer: Scorer
) -> Sample:
    """A row of samples.jsonl; `first` is the first policy's answer."""
    row: Sample = {"arm": arm.name, "cell": {}, "mode": "dedup", "request": request.id, "warm_up": False}
    row["block"] = block_of(request)
    if isinstance(answer, CommandError):
        return row | {"metrics": {}, "fates": None, "error": str(answer)}
    metrics = scorer.gold(answer.text, request)
    if isinstance(first, Greedy) and first is not answer:
        metrics |= scorer.agreement(answer, first, "policy")
    return row | {
        "metrics": rounded(metrics),
        "fates": answer.fates,
        "answer": answer.text,
        "num_chunks": len(request.chunks),
        "num_dropped": len(answer.info.get("dropped") or ()),
        "prompt_tokens": answer.num_prompt,
    }


def summarize(samples: Sequence[Sample], *, against: str, scorer: Scorer, facts: dict[str, Any]) -> dict[str, Any]:
    """Cells and contrasts over all turns, and contrasts over the turns in which a chunk was left out."""
    touched = {row["request"] for row in samples if row.get("num_dropped")}
    repeated = [row for row in samples if row["request"] in touched]
    return (
        summarize_arms(samples, against=against)
        | {
            "num_turns": len({row["request"] for row in samples}),
            "num_deduplicated": len(touched),
            "deduplicated_turns": summarize_arms(repeated, against=against),
        }
        | scorer.spec()
        | facts
    )
