"""`python -m eval quality dedup`: does it matter that a conversation does not show a chunk again? CRAFT figure 7.

The same conversations on a server per policy, which differ in `--chunkcache-dedup` alone; the order stays the retriever's. Each
policy's history holds its own answers, as an application's would. A turn counts as one request; the paired t-test is over them.
"""

from __future__ import annotations

import argparse
import random
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
from eval.quality.scores import GOLD_METRICS, Scorer, differences, rounded, summarize_arms, table
from eval.run import Run, Sample
from eval.serve.arms import ARMS, Arm
from eval.serve.client import Message
from eval.serve.options import default_folder
from eval.serve.runner import load_facts
from eval.task import Request, TextChunk, add_task_options, load_requests

POLICIES = ("off", "shown", "paper")
SHOWN = (*GOLD_METRICS, "same_retriever", "rouge_l_retriever", "bert_score_retriever")
WORLD_TURNS = 5
WORLD_PASSAGES = 8
"""Of a conversation: the most that the bundled model was trained on at once."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this mode."""
    add_task_options(parser)
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=["off", "shown"],
        help="the first one is what others are beside",
    )
    add_quality_options(parser)


def measure(args: argparse.Namespace) -> int:
    """Answer, score, record."""
    check_options(args)
    if len(set(args.policies)) < 2:
        raise CommandError(f"--policies needs two different ones to compare, got {' '.join(args.policies)}")
    requests = world_conversations(args) if args.task == "world" else load_requests(args)
    conversations = group(requests)
    if not conversations:
        raise CommandError(f"--task {args.task} has no conversation of several turns; world, mtrag and sharegpt have")
    arms = [policy_arm(policy) for policy in dict.fromkeys(args.policies)]
    scorer, folder = make_scorer(args, arms), args.out or default_folder(f"quality-{args.mode}")
    facts = load_facts(folder)
    with Run(
        folder,
        kind="quality",
        spec=spec_of(args),
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


def world_conversations(args: argparse.Namespace) -> list[Request]:
    """Conversations about a few passages of the generated world, of which every turn retrieves k, its answer among them.

    Raises:
        CommandError: k is not in 1..8.
    """
    from sglang_chunkcache.bundled_model.world import World

    if not 1 <= args.k <= WORLD_PASSAGES:
        raise CommandError(f"--k must be in 1..{WORLD_PASSAGES} for conversations over the task world, got {args.k}")
    if args.data is not None or args.hub is not None:
        raise CommandError("task world is generated: it takes neither --data nor --hub")
    requests: list[Request] = []
    for number in range(-(-args.requests // WORLD_TURNS)):
        rng = random.Random(f"{args.seed} conversation {number}")
        world = World(rng.getrandbits(60), WORLD_PASSAGES, num_kinds=1)
        asked = rng.sample([question for question in world.questions if question.hop == 1], WORLD_TURNS)
        for turn, question in enumerate(asked):
            gold = world.passage(question.gold_passage_ids[0])
            others = rng.sample([passage for passage in world.passages if passage != gold], args.k - 1)
            shown = rng.sample([gold, *others], args.k)
            requests.append(
                Request(
                    f"world:{number}:{turn}",
                    question.question,
                    tuple(TextChunk(f"{number}-{passage.id}", passage.text) for passage in shown),
                    question.answers,
                    tuple(f"{number}-{passage_id}" for passage_id in question.gold_passage_ids),
                    conversation=f"world:{number}",
                )
            )
    return requests[: args.requests]


def answer_all(
    run: Run,
    conversations: Sequence[Sequence[Request]],
    arms: Sequence[Arm],
    endpoints: Endpoints,
    scorer: Scorer,
    args: argparse.Namespace,
) -> None:
    """Every sample that `run` does not hold yet. A conversation that was interrupted is held again from its first turn."""
    missing = [
        turns for turns in conversations if any(key_of(arm, request) not in run for arm in arms for request in turns)
    ]
    if not missing:
        return
    servers = [endpoints.open(arm) for arm in arms]

    def one(turns: Sequence[Request]) -> list[list[Greedy | CommandError]]:
        return [converse(endpoint, turns) for endpoint in servers]

    with ThreadPoolExecutor(args.clients) as pool, progress("conversations", len(missing)) as bar:
        for turns, answers in zip(missing, pool.map(one, missing), strict=True):
            for endpoint, given in zip(servers, answers, strict=True):
                if any(isinstance(answer, CommandError) for answer in given):
                    endpoints.check(endpoint)
                for request, answer, first in zip(turns, given, answers[0], strict=True):
                    if key_of(endpoint.arm, request) not in run:
                        run.add(key_of(endpoint.arm, request), sample(endpoint.arm, request, answer, first, scorer))
            bar.update()


def converse(endpoint: Endpoint, turns: Sequence[Request]) -> list[Greedy | CommandError]:
    """The answers, turn by turn; behind one that the server refused, all further ones have its error."""
    salt, history = secrets.token_hex(8), list[Message]()
    found: list[Greedy | CommandError] = []
    for request in turns:
        if found and isinstance(found[-1], CommandError):
            found.append(found[-1])
            continue
        try:
            # A name of its own: what an interrupted run told the server must not be remembered.
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
    if isinstance(answer, CommandError):
        return row | {"metrics": {}, "fates": None, "error": str(answer)}
    metrics = scorer.gold(answer.text, request)
    if isinstance(first, Greedy) and first is not answer:
        metrics |= scorer.agreement(answer, first, "retriever")
    return row | {
        "metrics": rounded(metrics),
        "fates": answer.fates,
        "answer": answer.text,
        "num_chunks": len(request.chunks),
        "num_dropped": len(answer.info.get("dropped") or ()),
        "prompt_tokens": answer.num_prompt,
    }


def summarize(samples: Sequence[Sample], *, against: str, scorer: Scorer, facts: dict[str, Any]) -> dict[str, Any]:
    """Cells and contrasts over all turns, and contrasts over those turns alone in which a chunk was left out."""
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
