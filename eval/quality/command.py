"""`python -m eval quality MODE`: the effect of reuse on the answers.

    answers      a task through arms: right answers, and agreement with full prefill
    permutation  does the order of the chunks matter? (CRAFT figure 5)
    dedup        does it matter that a conversation does not show a chunk twice? (CRAFT figure 7)
    ratio        how much quality does recomputing a share of moved tokens restore? (FusionRAG figures 17 and 18, Cache-Craft
                 figure 26)

In `answers` a reference server computes every prompt in the retriever's order without reuse: the arm `full-prefill`. Each arm
then answers all requests in their order on a server of its own, so it reuses KV of its own traffic only. An arm that reorders
chunks is compared with full prefill twice: of its own prompt (the effect of reuse: none, unless KV was moved) and of the
retriever's order (the difference that an application would notice). Arms that send chunks as text tokenise them together with
the surrounding text, our server tokenises them separately. If the token ids then differ, answers may differ without any reuse;
`tokenised_otherwise` counts such prompts.

In all modes turns of one conversation, and questions that the same passages answer, are one block of the bootstrap and of the
paired t-test, because they are not independent samples.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from eval.errors import CommandError
from eval.http import get
from eval.progress import progress
from eval.quality import dedup, permutation, ratio_curves
from eval.quality.greedy import REFERENCE, Endpoint, FullPrefill, Greedy, ask
from eval.quality.options import (
    Endpoints,
    add_judge_options,
    add_quality_options,
    check_options,
    finish,
    make_scorer,
    open_endpoints,
    spec_of,
)
from eval.quality.scores import (
    GOLD_METRICS,
    Scorer,
    block_of,
    differences,
    normalized_f1_of,
    rounded,
    summarize_arms,
    table,
)
from eval.quality.workers import workers
from eval.run import Run, Sample
from eval.serve.arms import Arm, add_arm_options, create_reorderer, parse_arms, skip_reason
from eval.serve.client import Message
from eval.serve.options import default_folder, split_flags
from eval.serve.runner import load_facts
from eval.task import Request, TextChunk, add_task_options, load_requests

DEFAULT_ARMS = ("stock-lpm", "craft", "ours", "full-reuse", "fused")
SHOWN = (*GOLD_METRICS, "faithfulness", "same", "rouge_l_full", "kl", "same_retriever", "rouge_l_retriever")


def main(argv: Sequence[str]) -> int:
    """Run one mode; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eval quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE")
    for name, add, run, summary in (
        ("answers", add_options, measure, "a task through arms"),
        ("permutation", permutation.add_options, permutation.measure, "orders of chunks (CRAFT fig. 5)"),
        ("dedup", dedup.add_options, dedup.measure, "repeated chunks left out (CRAFT fig. 7)"),
        ("ratio", ratio_curves.add_options, ratio_curves.measure, "recompute ratios per selector"),
    ):
        mode = modes.add_parser(name, help=summary, description=summary)
        add(mode)
        mode.set_defaults(run=run)
    options, server_flags = split_flags(argv)
    args = parser.parse_args(options)
    args.server_flags = server_flags
    return int(args.run(args))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the mode `answers`."""
    add_task_options(parser)
    add_arm_options(parser, default=DEFAULT_ARMS)
    parser.add_argument("--against", metavar="ARM", default=REFERENCE.name, help="arm to compare the others with")
    parser.add_argument(
        "--reference",
        metavar="URL",
        help="address of a server of ours (http://HOST:PORT) that computes full prefill, instead of one started for it",
    )
    add_quality_options(parser)
    add_judge_options(parser)


def measure(args: argparse.Namespace) -> int:
    """Answer, score, record."""
    check_options(args)
    arms = parse_arms(args.arms)
    if args.against not in {REFERENCE.name, *(arm.name for arm in arms)}:
        raise CommandError(f"--against: {args.against} is not one of {REFERENCE.name}, {', '.join(args.arms)}")
    requests = load_requests(args)
    reference = replace(REFERENCE, url=args.reference and reference_url(args.reference))
    scorer = make_scorer(args, arms)
    folder = args.out or default_folder(f"quality-{args.mode}")
    facts = load_facts(folder)
    with Run(
        folder,
        kind="quality",
        spec=spec_of(args, [reference, *arms], requests),
        summarize=partial(summarize, against=args.against, scorer=scorer, facts=facts),
        baseline=args.baseline,
    ) as run:
        with open_endpoints(args, requests, facts, folder) as endpoints:
            answer_all(run, requests, [reference, *arms], endpoints, scorer, args, facts)
        results = run.results()
        notes = [
            f"{name}: {n} prompts tokenised differently: the text is the reference's, but chunks inside the user message become "
            "other tokens, so answers may differ without any reuse"
            for name, n in results["tokenised_otherwise"].items()
        ]
        lines = [table(results["cells"], SHOWN), differences(results["contrasts"], SHOWN), *notes]
        return finish(run, "\n".join(lines))


def reference_url(text: str) -> str:
    """The address of `--reference`. Raises CommandError for an invalid address, and for a server without our cache."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or "," in text:
        raise CommandError(f"--reference: expected http://HOST:PORT and nothing else, got {text!r}")
    url = text.rstrip("/").removesuffix("/v1")
    try:
        has_cache = bool(get(f"{url}/chunkcache/stats").get("ranks"))
    except CommandError:
        has_cache = False
    if not has_cache:
        raise CommandError(
            f"--reference: {url}/chunkcache/stats does not answer like our server, and only our server can compute full prefill "
            "of every arm's prompt; without --reference one is started"
        )
    return url


def answer_all(
    run: Run,
    requests: Sequence[Request],
    arms: Sequence[Arm],
    endpoints: Endpoints,
    scorer: Scorer,
    args: argparse.Namespace,
    facts: dict[str, Any],
) -> None:
    """Take every sample that `run` does not hold yet: one arm at a time, after the reference server, which keeps running."""
    histories = fixed_histories(requests)
    alone = [replace(request, conversation=None) for request in requests]  # the messages already contain the history
    reference = arms[0]
    full = FullPrefill(endpoints.open(reference))
    for arm in arms:
        missing = [i for i, request in enumerate(requests) if key_of(arm, request) not in run]
        if reason := skip_reason(arm, contextpilot_python=args.contextpilot_python):
            facts.setdefault("skipped", {})[arm.name] = reason
            print(f"eval quality: without {arm.name}: {reason}", file=sys.stderr)
        elif missing:
            endpoints.keep_only(reference, arm)
            endpoint = endpoints.open(arm)
            asked = [(alone[i], histories[i]) for i in missing]
            with progress(arm.name, len(requests), initial=len(requests) - len(missing)) as bar:
                given = answers_of(endpoint, asked, full, args)
                for request, answer in zip((requests[i] for i in missing), given, strict=True):
                    if isinstance(answer, CommandError):
                        endpoints.check(endpoint)
                    run.add(key_of(arm, request), sample(arm, request, answer, scorer))
                    bar.update()


Compared = tuple[Greedy, Greedy, Greedy]
"""An answer, full prefill of its own prompt, and full prefill in the retriever's order."""


def answers_of(
    endpoint: Endpoint,
    asked: Sequence[tuple[Request, list[Message]]],
    full: FullPrefill,
    args: argparse.Namespace,
) -> Iterator[Compared | CommandError]:
    """Answers in the order of the requests, `--clients` in flight; a refused request gives its error."""
    arm = endpoint.arm
    # A server that gets the chunks as text tokenises them itself, so only that server can compute its own prompt.
    own = full if arm.route == "rag" else FullPrefill(endpoint)
    reorderer = create_reorderer(arm, contextpilot_python=args.contextpilot_python)

    def one(request: Request, history: list[Message], chunks: Sequence[TextChunk]) -> Compared | CommandError:
        ids = [chunk.id for chunk in request.chunks]
        try:
            if arm.name == REFERENCE.name:
                answer = full.ask(request, ids, history)
                return answer, answer, answer
            answer = ask(endpoint, request, chunks, history)
            return answer, own.ask(request, answer.order, history), full.ask(request, ids, history)
        except CommandError as error:
            return error

    try:
        with workers(args.clients) as pool:
            orders = (reorderer.order(request) if reorderer else request.chunks for request, _ in asked)
            yield from pool.map(one, *zip(*asked, strict=True), orders)
    finally:
        if reorderer:
            reorderer.close()


def fixed_histories(requests: Sequence[Request]) -> list[list[Message]]:
    """For each request the messages before it: its conversation's earlier questions with the data set's replies.

    The messages have no chunks and are the same for all arms, so that arms differ in the last turn only.
    """
    turns: dict[str, list[Message]] = {}
    histories = []
    for request in requests:
        before = turns.setdefault(request.conversation, []) if request.conversation else []
        histories.append(list(before))
        if reply := request.reply or next(iter(request.answers), ""):
            before += [{"role": "user", "content": request.question}, {"role": "assistant", "content": reply}]
    return histories


def key_of(arm: Arm, request: Request) -> str:
    """The sample's key."""
    return f"answers/{arm.name}/{request.id}"


def sample(arm: Arm, request: Request, answer: Compared | CommandError, scorer: Scorer) -> Sample:
    """A row of samples.jsonl."""
    row: Sample = {"arm": arm.name, "cell": {}, "mode": "answers", "request": request.id, "warm_up": False}
    row["block"] = block_of(request)
    if isinstance(answer, CommandError):
        return row | {"metrics": {}, "fates": None, "error": str(answer)}
    given, own, retriever = answer
    metrics = scorer.gold(given.text, request) | scorer.faithfulness(given.text, request)
    if arm.name != REFERENCE.name:
        metrics |= scorer.agreement(given, own, "full") | scorer.agreement(given, retriever, "retriever")
    return row | {
        "metrics": rounded(metrics),
        "fates": given.fates,
        "answer": given.text,
        "order": list(given.order),
        "prompt_tokens": given.num_prompt,
        "cached_tokens": given.num_cached,
    }


def summarize(samples: Sequence[Sample], *, against: str, scorer: Scorer, facts: dict[str, Any]) -> dict[str, Any]:
    """Cells, contrasts with one arm, and normalised F1 if full reuse and full prefill were measured."""
    results = summarize_arms(samples, against=against)
    ends = {"full_reuse": "full-reuse", "full_prefill": REFERENCE.name}
    return (
        results
        | {"normalized_f1": normalized_f1_of(results["cells"], **ends)}
        | {"tokenised_otherwise": tokenised_otherwise(samples)}
        | scorer.spec()
        | facts
    )


def tokenised_otherwise(samples: Sequence[Sample]) -> dict[str, int]:
    """Arm -> the number of its prompts whose length differs from the reference's although their text is the same."""
    lengths = {
        row["request"]: row["prompt_tokens"] for row in samples if row["arm"] == REFERENCE.name and "order" in row
    }
    found = Counter(
        row["arm"] for row in samples if "order" in row and row["prompt_tokens"] != lengths.get(row["request"])
    )
    return dict(found)
