"""What all modes of `python -m eval quality` share: options, servers, the loop over requests, and
the record.

Mode(args)   arms, requests   -> stages(): per stage the arms that it needs, and jobs
             a job            -> samples of one request, conversation or case, taken in a thread of
                                 its own
             figures(samples) -> results
"""

from __future__ import annotations

import argparse
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

from eval.errors import CommandError
from eval.progress import progress
from eval.quality.bert_score import BertScore
from eval.quality.greedy import REFERENCE, Endpoint, Greedy
from eval.quality.judge import Judge
from eval.quality.scores import Scorer, Weights, block_of, knows_answers, rounded
from eval.random_model import SHAPES
from eval.record import model_sha256
from eval.recorded import read_recorded
from eval.run import Run, Sample, new_folder
from eval.serve.arms import Arm
from eval.serve.options import DEFAULT_PARAMS, model_flags
from eval.serve.plan import Plan
from eval.serve.runner import FACTS, load_facts
from eval.serve.server_pool import Key, ServerPool
from eval.task import add_task_options, requests_sha256

if TYPE_CHECKING:
    from eval.task import Request

TOP_LOGPROBS = 100
"""Log probabilities per token. All other tokens are merged into one, which lowers KL: with the
bundled model's 1,101 tokens, where moved KV costs answers, by 1 to 3% at 100, a third at 20 and
four fifths at 5. vLLM gives at most 20 by default."""
BUNDLED_POOL = 100_000
"""KV pool in tokens, large enough for a run's chunks. Other models get SGLang's own size."""

Servers = Mapping[str, Endpoint]
"""Arm -> its server."""


class Job(NamedTuple):
    """Takes samples, each with its key, in a thread.
    Its samples are kept together; `key` is the last one's."""

    key: str
    take: Callable[[Servers], Iterable[tuple[str, Sample]]]


class Mode(ABC):
    """One question about answers: its requests, the samples that it takes, and their figures.

    `arms` and `requests` identify the measurement; `scorer` scores the answers.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    def __init__(
        self, args: argparse.Namespace, arms: Sequence[Arm], requests: Sequence[Request]
    ) -> None:
        self.args, self.arms, self.requests = args, arms, requests
        self.scorer = make_scorer(args, [arm for arm in arms if arm.name != REFERENCE.name])
        self.facts: dict[str, Any] = {}

    @staticmethod
    @abstractmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the mode's own options."""

    @abstractmethod
    def stages(self) -> Iterator[tuple[Sequence[Arm], Sequence[Job]]]:
        """The jobs in stages, each with the arms whose servers it needs."""

    @abstractmethod
    def figures(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Results of the samples so far; also called with none."""

    def key(self, arm: str, request: Request, *label: object) -> str:
        """Identifies a sample; `label` tells those of one arm and request apart."""
        return "/".join(map(str, (self.name, arm, request.id, *label)))

    def sample(
        self,
        arm: str,
        request: Request,
        answer: Greedy | CommandError,
        metrics: Mapping[str, float] | None = None,
        *,
        label: Iterable[object] = (),
        cell: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> tuple[str, Sample]:
        """Its key, and a row of samples.jsonl: the answer with its metrics, or its error."""
        row: Sample = {
            "arm": arm,
            "cell": dict(cell or {}),
            "mode": self.name,
            "request": request.id,
        }
        row |= {"warm_up": False, "block": block_of(request)}
        if isinstance(answer, CommandError):
            found: Sample = {"metrics": {}, "fates": None, "error": str(answer)}
        else:
            found = {
                "metrics": rounded(metrics or {}),
                "fates": answer.fates,
                "answer": answer.text,
            }
        return self.key(arm, request, *label), row | found | more


def measure(mode: type[Mode], args: argparse.Namespace) -> int:
    """Answer, score, record, print; returns the exit code."""
    check_options(args)
    asked = mode(args)  # type: ignore[call-arg]  # subclasses make arms and requests of the options
    folder = args.out or new_folder(f"quality-{mode.name}")
    # Servers of an interrupted run are described there alone.
    asked.facts |= load_facts(folder)

    def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
        return asked.figures(samples) | asked.scorer.spec() | asked.facts

    # Clients change no answer, so a run may be continued with another number of them.
    spec = {key: value for key, value in vars(args).items() if key not in ("run", "clients")}
    # A running server's weights are unknown; `joint`, whose arm has no address, loads the model.
    starts = any(arm.url is None for arm in asked.arms)
    spec["model_sha256"] = model_sha256(args.model_path) if starts else None
    spec["requests_sha256"] = requests_sha256(asked.requests)
    with (
        Run(folder, kind="quality", spec=spec, summarize=summarize, baseline=args.baseline) as run,
        model_flags(args, asked.requests, args.server_flags) as flags,
    ):
        plan = Plan(arms=(), server_flags=flags, threads=args.threads, facts=asked.facts)
        try:
            with ServerPool(plan, folder / "logs") as servers:
                answer_all(run, asked, servers, args.clients)
        finally:  # the servers' descriptions, also for a run that goes on with servers of its own
            (folder / FACTS).write_text(json.dumps(asked.facts, indent=1) + "\n", encoding="utf-8")
    show(folder)
    return 0


def answer_all(run: Run, mode: Mode, servers: ServerPool, clients: int) -> None:
    """Take every sample that `run` does not hold yet.
    Raises CommandError if a server is gone, or as its job."""
    for arms, jobs in mode.stages():
        missing = [job for job in jobs if job.key not in run]
        if not missing:
            continue
        keys = {arm.name: Key(arm.name, ()) for arm in arms}
        # Servers of the stage before would keep their memory; those needed again keep running.
        servers.keep(list(keys.values()))
        limits, found = (mode.args.max_new_tokens, mode.args.top_logprobs), {}
        for arm in arms:
            url = servers.open(keys[arm.name], arm)
            found[arm.name] = Endpoint(url, servers.model(keys[arm.name]), arm, *limits)
        name, done = (
            " ".join([mode.name, *(arm.name for arm in arms[-1:])]),
            len(jobs) - len(missing),
        )
        with _workers(clients) as pool, progress(name, len(jobs), initial=done) as bar:
            # `take` is a generator: `list` makes it run in the worker instead of this thread.
            for rows in pool.map(lambda job, found=found: list(job.take(found)), missing):
                # A refusal is a sample; with a server gone all further samples would be errors.
                if any(row.get("error") for _, row in rows):
                    for name, endpoint in found.items():
                        servers.check(keys[name], endpoint.url)
                # A write that was cut off may have left some of a job's samples.
                run.add_all([(key, row) for key, row in rows if key not in run])
                bar.update()


def show(folder: Path) -> None:
    """Print tables, verdicts and limitations of a run, its folder and, last,
    the results as JSON."""
    from eval.report.tables import tables_of

    run = read_recorded(folder)
    for table in tables_of(run):
        print(f"{table.title}\n\n{table.text()}\n")
    note = run.results.get("note")
    told = [*run.results["verdict"], *([f"Note: {note}"] if note else [])]
    print(*told, f"record: {folder}", json.dumps(run.results), sep="\n")


def add_quality_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every mode."""
    add_task_options(parser)
    add = parser.add_argument_group(
        "model and scores; flags for all servers come after --"
    ).add_argument
    add(
        "--model-path", default="bundled", metavar="M", help="a model, random, or bundled (default)"
    )
    add(
        "--params",
        type=int,
        choices=sorted(SHAPES),
        default=DEFAULT_PARAMS,
        help="random: millions of parameters",
    )
    add(
        "--max-total-tokens",
        type=int,
        metavar="N",
        help="KV pool (default: SGLang's; bundled: 100000)",
    )
    text = (
        "real: score right answers; none: score agreement with full prefill only. auto: the bundled"
        " model is real for the task world only, a --model-path is real, a running server is not"
    )
    add("--weights", choices=get_args(Weights), default="auto", help=text)
    add(
        "--bert-encoder", type=Path, metavar="DIR", help="BERTScore with the encoder in this folder"
    )
    add("--max-new-tokens", type=int, default=40, help="maximum length of an answer (default: 40)")
    text = "per token, for KL; 0: no KL (default: 100)"
    add("--top-logprobs", type=int, default=TOP_LOGPROBS, metavar="N", help=text)
    add("--clients", type=int, default=4, help="maximum number of requests in flight (default: 4)")
    add("--threads", type=int, default=2, help="threads of each server, without a GPU (default: 2)")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="a new folder, or that of a run to continue (default: runs/<date>)",
    )
    add("--baseline", metavar="RECORD", help="name of the record to compare this one with")


def check_options(args: argparse.Namespace) -> None:
    """Raise CommandError for values out of range; set the pool size for the bundled model."""
    # Before `measure` takes the settings, so that the record has the size.
    if args.model_path == "bundled" and args.max_total_tokens is None:
        args.max_total_tokens = BUNDLED_POOL
    for name, least in (("max_new_tokens", 1), ("top_logprobs", 0), ("clients", 1), ("threads", 1)):
        if getattr(args, name) < least:
            raise CommandError(
                f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}"
            )


def make_scorer(args: argparse.Namespace, arms: Sequence[Arm]) -> Scorer:
    """The scorer that the options select. Raises CommandError for a missing encoder or judge."""
    models = {args.model_path if arm.url is None else None for arm in arms}
    # each may be refused
    known = {knows_answers(model, args.task, args.weights) for model in models}
    bert = BertScore(args.bert_encoder) if args.bert_encoder else None
    # Only `answers` has these options.
    judge_url = getattr(args, "judge_url", None)
    if judge_url and not args.judge_model:
        raise CommandError("--judge-url needs --judge-model")
    judge = Judge(judge_url, args.judge_model, key_env=args.judge_key_env) if judge_url else None
    # One scorer serves all arms, so every model must know the answers.
    return Scorer(has_gold=known == {True}, bert=bert, judge=judge)


# Private


@contextmanager
def _workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that drops its pending work on an exception;
    the pool's own exit would first finish all of it."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    # Ctrl-C too, which would else wait for all pending answers.
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
