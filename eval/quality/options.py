"""The options of all modes of `python -m eval quality`, and the scorer, servers, endpoints and folder made from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from eval.errors import CommandError
from eval.http import get
from eval.quality.bert_score import BertScore
from eval.quality.greedy import Endpoint
from eval.quality.judge import Judge
from eval.quality.scores import AGREEMENT_NOTE, UNKNOWN_NOTE, Scorer, Weights, knows_answers
from eval.random_model import SHAPES
from eval.record import model_sha256
from eval.serve.arms import Arm
from eval.serve.options import DEFAULT_PARAMS, model_flags
from eval.serve.plan import Plan
from eval.serve.runner import FACTS
from eval.serve.server_pool import Key, ServerPool
from eval.task import requests_sha256

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eval.run import Run
    from eval.task import Request

TOP_LOGPROBS = 100
"""Log probabilities per token. All other tokens are merged into one, which lowers KL: with the bundled model's 1,101 tokens,
where moved KV costs answers, by 1 to 3% at 100, a third at 20 and four fifths at 5. vLLM gives at most 20 by default."""
BUNDLED_POOL = 100_000
"""KV pool in tokens, large enough for a run's chunks. Other models get SGLang's own size."""


def add_quality_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every mode."""
    group = parser.add_argument_group("model and scores; flags for all servers come after --")
    group.add_argument("--model-path", default="bundled", metavar="M", help="a model, random, or bundled (default)")
    group.add_argument(
        "--params", type=int, choices=sorted(SHAPES), default=DEFAULT_PARAMS, help="random: millions of parameters"
    )
    group.add_argument("--max-total-tokens", type=int, metavar="N", help="KV pool (default: SGLang's; bundled: 100000)")
    group.add_argument(
        "--weights",
        choices=get_args(Weights),
        default="auto",
        help="real: score right answers; none: score agreement with full prefill only. auto: the bundled model is real for the "
        "task world only, a --model-path is real, a running server is not unless it reports the bundled model",
    )
    group.add_argument("--bert-encoder", type=Path, metavar="DIR", help="BERTScore with the encoder in this folder")
    group.add_argument("--bert-layer", type=int, metavar="N", help="layer of the encoder (default: the last one)")
    group.add_argument("--max-new-tokens", type=int, default=40, help="maximum length of an answer (default: 40)")
    group.add_argument(
        "--top-logprobs",
        type=int,
        default=TOP_LOGPROBS,
        metavar="N",
        help=f"per token, for KL; 0: no KL ({TOP_LOGPROBS})",
    )
    group.add_argument("--clients", type=int, default=4, help="maximum number of requests in flight (default: 4)")
    group.add_argument("--threads", type=int, default=2, help="threads of each server, without a GPU (default: 2)")
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="a new folder, or that of a run to continue (default: runs/<date>)"
    )
    group.add_argument("--baseline", metavar="RECORD", help="name of the record to compare this one with")


def add_judge_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a judge for faithfulness."""
    group = parser.add_argument_group("faithfulness, by a judge model")
    group.add_argument("--judge-url", metavar="URL", help="an OpenAI-compatible endpoint")
    group.add_argument("--judge-model", metavar="NAME", help="the model to ask there")
    group.add_argument("--judge-key-env", metavar="VARIABLE", help="environment variable that holds the key")


def check_options(args: argparse.Namespace) -> None:
    """Raise CommandError for values out of range; set the pool size for the bundled model."""
    if args.model_path == "bundled" and args.max_total_tokens is None:
        args.max_total_tokens = BUNDLED_POOL
    for name, least in (("max_new_tokens", 1), ("top_logprobs", 0), ("clients", 1), ("threads", 1)):
        if getattr(args, name) < least:
            raise CommandError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")


def make_scorer(args: argparse.Namespace, arms: Sequence[Arm]) -> Scorer:
    """The scorer that the options select. Raises CommandError for a missing encoder or judge."""
    started = [args.model_path] if not arms or any(arm.url is None for arm in arms) else []
    models = [*started, *(served_model(arm.url) for arm in arms if arm.url is not None)]
    has_gold = {knows_answers(model, args.task, args.weights) for model in models} == {True}  # each may be refused
    is_unknown = None in models and args.weights == "auto"
    bert = BertScore(args.bert_encoder, layer=args.bert_layer) if args.bert_encoder else None
    judge_url = getattr(args, "judge_url", None)
    if judge_url and not args.judge_model:
        raise CommandError("--judge-url needs --judge-model")
    judge = Judge(judge_url, args.judge_model, key_env=args.judge_key_env) if judge_url else None
    return Scorer(has_gold=has_gold, bert=bert, judge=judge, note=UNKNOWN_NOTE if is_unknown else AGREEMENT_NOTE)


def served_model(url: str) -> str | None:
    """`bundled` if the server reports the bundled model; None for any other, because its weights are unknown."""
    named: list[Any] = []
    with suppress(CommandError):  # not SGLang, or no server at all, which is reported at the first request
        named.append(get(f"{url}/server_info").get("model_path"))
    with suppress(CommandError, AttributeError, TypeError):
        named += [model.get("id") for model in get(f"{url}/v1/models").get("data", [])]
    return "bundled" if any(Path(str(name)).name == "bundled_model" for name in named) else None


class Endpoints:
    """Servers of arms, started on first use."""

    def __init__(self, pool: ServerPool, args: argparse.Namespace) -> None:
        self._pool, self._args = pool, args

    def open(self, arm: Arm) -> Endpoint:
        """The arm's server. Raises CommandError as `ServerPool.open`."""
        key = Key(arm.name, ())
        url = self._pool.open(key, arm)
        return Endpoint(url, self._pool.model(key), arm, self._args.max_new_tokens, self._args.top_logprobs)

    def check(self, endpoint: Endpoint) -> None:
        """Call after a failed request. Raises CommandError if the server is gone."""
        self._pool.check(Key(endpoint.arm.name, ()), endpoint.url)

    def keep_only(self, *arms: Arm) -> None:
        """Stop the servers of all other arms."""
        self._pool.keep([Key(arm.name, ()) for arm in arms])


@contextmanager
def open_endpoints(
    args: argparse.Namespace, requests: Sequence[Request], facts: dict[str, Any], folder: Path
) -> Iterator[Endpoints]:
    """Endpoints whose servers are stopped on exit. `facts["servers"]` describes them, also those before an interruption."""
    with model_flags(args, requests, args.server_flags) as flags:
        plan = Plan(arms=(), server_flags=flags, threads=args.threads, facts=facts)
        try:
            with ServerPool(plan, folder / "logs") as pool:
                yield Endpoints(pool, args)
        finally:
            (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def spec_of(args: argparse.Namespace, arms: Sequence[Arm], requests: Sequence[Request]) -> dict[str, Any]:
    """Everything that identifies a measurement: settings, requests, and the model if servers are started."""
    settings = {key: value for key, value in vars(args).items() if key not in ("run", "clients")}
    starts = any(arm.url is None for arm in arms)
    digests = {"model_sha256": model_sha256(args.model_path) if starts else None}
    return settings | digests | {"requests_sha256": requests_sha256(requests)}


def finish(run: Run, table: str) -> int:
    """Print the table, verdicts and limitations, the folder and, last, the figures as JSON."""
    results = run.results()
    notes = [f"Note: {results['note']}"] if "note" in results else []
    print(table, *results["verdict"], *notes, sep="\n")
    print(f"record: {run.folder}")
    print(json.dumps(results))
    return 0
