"""Tasks: questions over passages. `load_requests` turns a task into the requests that an
application would send to a server.

    a data set's files, the hub, a generator     eval/tasks/<name>.py, one file each
        │ load(source)
    TaskData: passages, requests with the chunks that the data set itself gives
        │ --retriever given: these chunks; bm25, dense, fusion: eval/data/retrieve.py searches
        others
    Requests: the first k chunks, cut by --scale

Knows no server and no model. Uses the standard library only, unless a task or a retriever needs
more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args

from eval.errors import CommandError

Searched = Literal["bm25", "dense", "fusion"]
Retriever = Literal["given"] | Searched
RETRIEVERS = ("given", *get_args(Searched))
SEARCHED_K = 5
"""Chunks of a request if they are searched or generated, unless `--k` is given."""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A retrieved passage: the text that the model reads."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """One request as an application would send it.

    Attributes:
        id: "<task>:<number or question id>[:<turn>]", unique in its list.
        chunks: in retriever order; empty if nothing was retrieved.
        answers: right answers; empty if unknown.
        gold_ids: chunks that hold the answer, retrieved or not.
        conversation: id of its conversation; the list has a conversation's turns in order.
        reply: the data set's own answer to this turn, shown in later turns.
        arrival_s: from a trace; the first request's is 0.
        max_new_tokens: from a trace or a published workload.
    """

    id: str
    question: str
    chunks: tuple[TextChunk, ...] = ()
    answers: tuple[str, ...] = ()
    gold_ids: tuple[str, ...] = ()
    conversation: str | None = None
    reply: str | None = None
    system: str = ""
    arrival_s: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class TaskData:
    """The passages and requests of a task.

    Attributes:
        passages: all passages for retrieval, with distinct ids.
        requests: in the order of sending, with the chunks that the data set itself lists for them,
            if any.
        domains: passage id -> its domain, and request id -> the domain that it searches. Empty: one
            domain for all.
    """

    passages: tuple[TextChunk, ...]
    requests: tuple[Request, ...]
    domains: Mapping[str, str] = field(default_factory=dict)

    def by_domain(self) -> Iterator[tuple[dict[str, str], list[Request]]]:
        """Each domain's passages (id -> text), and the requests that search them.

        Raises:
            CommandError: a domain without passages.
        """
        passages: dict[str, dict[str, str]] = {}
        for passage in self.passages:
            passages.setdefault(self.domains.get(passage.id, ""), {})[passage.id] = passage.text
        asked: dict[str, list[Request]] = {}
        for request in self.requests:
            asked.setdefault(self.domains.get(request.id, ""), []).append(request)
        # A domain that no request searches gets no index.
        for domain, requests in asked.items():
            if domain not in passages:
                raise CommandError(
                    f"{requests[0].id} searches domain {domain!r}, which has no passages"
                )
            yield passages[domain], requests


@dataclass(frozen=True)
class Source:
    """Where a task is read from, and how much of it: the options below."""

    task: str
    data: Path | None = None
    hub: str | None = None
    corpus: Path | None = None
    requests: int = 100
    k: int | None = None
    """Chunks of a request; None: all that a data set lists,
    or `SEARCHED_K` if chunks are searched or generated."""
    scale: int = 1
    seed: int = 0

    def folder(self, name: str) -> Path:
        """`--data`'s folder of this data set.
        Raises CommandError without `--data`, or with `--hub`."""
        folder = self.file(f"--data DIR, the folder with {name}/") / name
        if not folder.is_dir():
            raise CommandError(f"{self.data} has no folder {name}/, which task {self.task} needs")
        return folder

    def file(self, option: str = "--data FILE") -> Path:
        """`--data`. Raises CommandError, which names `option`, without it or with `--hub`."""
        if self.hub is not None:
            raise CommandError(f"task {self.task} is not read from the hub: give {option}")
        if self.data is None:
            raise CommandError(f"task {self.task} needs {option}")
        return self.data


@dataclass(frozen=True, slots=True)
class Task:
    """`eval.tasks.<module>` has `load(source: Source) -> TaskData`.
    `retriever`: the default one."""

    module: str
    summary: str
    retriever: Retriever = "given"


TASKS: Mapping[str, Task] = {
    "world": Task("world", "the bundled model's generated world; needs no data"),
    "hotpotqa": Task("question_sets", "questions over two Wikipedia paragraphs", "bm25"),
    "2wikimqa": Task("question_sets", "questions over two to four Wikipedia paragraphs", "bm25"),
    "musique": Task("question_sets", "questions of two to four hops over Wikipedia", "bm25"),
    "squad": Task(
        "question_sets", "questions about one Wikipedia paragraph; many share it", "bm25"
    ),
    "triviaqa": Task("question_sets", "trivia questions over pieces of Wikipedia", "bm25"),
    "nq": Task("question_sets", "questions put to a search engine, over Wikipedia", "bm25"),
    "mtrag": Task("mtrag", "conversations of people with a RAG system, with its passages"),
    "mtrag-un": Task(
        "mtrag", "the same without lists; last questions are unanswerable or unclear", "bm25"
    ),
    "ragpulse": Task("ragpulse", "a production trace: lengths and times, text of random words"),
    "qcfuse": Task("qcfuse", "QCFuse's published questions, ten chunks each; --data FILE"),
    "longbench": Task("longbench", "LongBench's questions over several passages; --data FILE"),
    "rag-qa-quality": Task(
        "lmcache", "LMCache's workload: questions with their passages; --data FILE"
    ),
    "long-doc-permutator": Task("lmcache", "LMCache's workload: documents in many orders"),
    "recurring": Task("recurring", "8 of 60 chunks, again and again in any order; no data"),
    "sharegpt": Task("sharegpt", "conversations in ShareGPT's format; --data FILE"),
    "trace": Task(
        "trace", "your own trace, in `replay`'s format; text of random words; --data FILE"
    ),
}
"""Name -> the task's module, one line for the help, and the default retriever."""


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `load_requests`."""
    tasks = "\n".join(f"{name:<19} {task.summary}" for name, task in TASKS.items())
    add = parser.add_argument_group("task", tasks).add_argument
    add(
        "--task",
        default="world",
        metavar="NAME",
        choices=TASKS,
        help="one of these; default: %(default)s",
    )
    add(
        "--data",
        type=Path,
        metavar="PATH",
        help="folder that holds the data set's folder, or the task's file",
    )
    hub = (
        "read the task from the Hugging Face hub, or a copy of it; without NAME: the published one"
    )
    # `--hub` alone is "", which is not None: the published set.
    add("--hub", nargs="?", const="", metavar="NAME[:CONFIG[:SPLIT]]", help=hub)
    add(
        "--corpus",
        type=Path,
        metavar="DIR",
        help="sharegpt: folder with passages.jsonl.gz, searched each turn",
    )
    add("--requests", type=int, default=100, metavar="N", help="at most; default: %(default)s")
    k = (
        f"chunks of a request, at most; default: all that a data set lists, {SEARCHED_K} if"
        " searched or generated"
    )
    add("--k", type=int, help=k)
    text = (
        "given: the data set's lists; others search its passages. Default: bm25 for sets of"
        " questions, else given"
    )
    add("--retriever", choices=RETRIEVERS, help=text)
    add(
        "--scale",
        type=int,
        default=1,
        metavar="N",
        help="cut chunks and replies to 1/N of their words; default: 1",
    )
    add("--seed", type=int, default=0, help="of the questions' order and of generated text")


def load_requests(args: argparse.Namespace) -> list[Request]:
    """The requests that the options select. Raises CommandError for invalid options or data."""
    source = Source(**{field.name: getattr(args, field.name) for field in fields(Source)})
    return requests_of(source, load_task(source), retriever=args.retriever)


def requests_sha256(requests: Iterable[Request]) -> str:
    """Hex digest of all fields of all requests in their order; equal for equal requests."""
    digest = hashlib.sha256()
    for request in requests:
        digest.update(json.dumps(astuple(request)).encode())
    return digest.hexdigest()


def load_task(source: Source) -> TaskData:
    """Read a task. Raises CommandError."""
    for name, number in (("requests", source.requests), ("k", source.k), ("scale", source.scale)):
        if number is not None and number < 1:
            raise CommandError(f"--{name} must be at least 1, got {number}")
    if source.hub is not None and source.data is not None:
        raise CommandError("--data and --hub do not go together")
    if source.corpus is not None and source.task != "sharegpt":
        raise CommandError(
            f"--corpus is for task sharegpt only; {source.task} has passages of its own"
        )
    data: TaskData = import_module(f"eval.tasks.{TASKS[source.task].module}").load(source)
    if not data.requests:
        raise CommandError(f"task {source.task} has no questions")
    return data


def requests_of(
    source: Source, data: TaskData, *, retriever: Retriever | None = None
) -> list[Request]:
    """The first `source.requests` requests with their chunks. Single questions without chunks are
    left out, turns are kept.

    Raises:
        CommandError: `given` but no request has chunks, or another retriever but the task has no
            passages.
    """
    retriever = retriever or ("bm25" if source.corpus else TASKS[source.task].retriever)
    requests = list(data.requests)
    if retriever == "given":
        if data.passages and not any(request.chunks for request in requests):
            raise CommandError(
                f"task {source.task} lists no chunks here: use --retriever bm25, dense or fusion"
            )
        # A request without chunks tells nothing about reuse and does not count for --requests.
        requests = [request for request in requests if request.chunks or request.conversation][
            : source.requests
        ]
        sizes = [len(request.chunks) for request in requests]
        # `replay` counts the whole lists
        if num_cut := sum(size > (source.k or size) for size in sizes):
            print(
                f"eval: --k {source.k} takes chunks from {num_cut} of {len(sizes)} requests",
                file=sys.stderr,
            )
    else:
        if not data.passages:
            raise CommandError(
                f"task {source.task} has no passages to search: use --retriever given, or --corpus"
            )
        # Cut before the search: a set may have thousands of questions that are not sent.
        requests = _searched(data, requests[: source.requests], source, retriever)
    return [_cut(request, source.k, source.scale) for request in requests]


# Private, in order of use


def _searched(
    data: TaskData, requests: Sequence[Request], source: Source, mode: Searched
) -> list[Request]:
    """The requests with the best passages of their domain, best first.
    Single questions without results are left out."""
    from eval.data.retrieve import retrieve  # imported here: it needs FAISS or tantivy

    found: dict[str, list[str]] = {}
    for passages, asked in replace(data, requests=tuple(requests)).by_domain():
        questions = [request.question for request in asked]
        ids = retrieve(passages, questions, k=source.k or SEARCHED_K, mode=mode, seed=source.seed)
        found |= zip((request.id for request in asked), ids, strict=True)
    chunks = {passage.id: passage for passage in data.passages}
    chosen = [replace(r, chunks=tuple(chunks[name] for name in found[r.id])) for r in requests]
    # A turn that finds nothing stays: its reply is in the history of the later turns.
    return [request for request in chosen if request.chunks or request.conversation]


def _cut(request: Request, k: int | None, scale: int) -> Request:
    chunks = tuple(TextChunk(chunk.id, _head(chunk.text, scale)) for chunk in request.chunks[:k])
    # Replies are in the prompts of later turns; questions stay whole.
    return replace(request, chunks=chunks, reply=request.reply and _head(request.reply, scale))


def _head(text: str, scale: int) -> str:
    """The first 1/scale of a text's words, at least one."""
    # At spaces alone: line breaks stay, such as that between title and text.
    words = text.split(" ")
    return " ".join(words[: max(1, len(words) // scale)])
