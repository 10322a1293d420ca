"""`python -m eval demo`: sends RAG traffic to a running server and prints how much was reused and how many answers are right.

    launch/demo.sh                                              # starts the server too
    python -m eval demo --url http://127.0.0.1:30000            # against one that runs with --model-path bundled

The traffic comes from the bundled model's generated world: some topics are asked about far more often than others, a
topic's passages are retrieved together, and their order differs from question to question. The phases, one request at a time:

    1. each topic's first question
    2. single questions
    3. conversations that retrieve again passages that they have shown
    4. with `--retrieve`: questions for which the server itself searches an index of these passages (`--write-corpus`)

All figures of the server are taken from its answers. They are compared with a prediction: the tokens that a cache of identical
prefixes would compute for the same questions, with the chunks as retrieved, sent again every turn, the text tokenised as a
whole, and unlimited memory. Needs Python alone, and a server that has SGLang's `/v1/tokenize`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from eval.errors import CommandError
from eval.http import post
from eval.task import Request, TextChunk
from eval.world.world import Passage, Question, World

TOPIC_SIZE = 5
"""Passages that are retrieved together; all of the same kind, so that the kind alone does not give the answer."""
NUM_CHUNKS = 4
NUM_TURNS = 4
GOLD_BIAS = 0.4
"""How much better the retriever scores the passage that holds the answer; the other scores are uniform in 0..1."""
MIN_RIGHT = 0.8
"""Below this share of right answers the bundled model cannot have read the right chunks."""
MAX_TOKENS = 40
NUM_SHOWN = 3
CHUNK_SEPARATOR = "\n\n"

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and the phase it belongs to. No chunks: the server retrieves."""

    phase: str
    request: Request


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, as the server reports it; `plain_*` is the prediction for a plain prefix cache."""

    asked: Asked
    text: str
    prompt_tokens: int
    first_token_ms: float
    chunkcache: dict[str, Any]
    plain_prompt: int
    plain_computed: int

    @property
    def right(self) -> bool:
        """Exact match with one of the right answers, whatever the white space."""
        return _words(self.text) in map(_words, self.asked.request.answers)


@dataclass(slots=True)
class Row:
    """A phase's sums; tokens are prompt tokens."""

    phase: str
    requests: int = 0
    prompt_tokens: int = 0
    exact: int = 0
    computed: int = 0
    chunks_retrieved: int = 0
    chunks_hit: int = 0
    chunks_dropped: int = 0
    right: int = 0
    first_token_ms: float = 0.0
    plain_prompt_tokens: int = 0
    plain_computed: int = 0


@dataclass
class PlainCache:
    """Simulates a prefix cache of unlimited size: keeps all prompts, and counts the tokens of a new one to compute."""

    seen: list[list[int]] = field(default_factory=list)

    def computed(self, prompt: list[int], answer: list[int]) -> int:
        """Tokens of `prompt` to compute, at least its last one; remembers prompt and answer."""
        cached = max((_common_len(prompt, other) for other in self.seen), default=0)
        self.seen.append(prompt + answer)
        return len(prompt) - min(cached, len(prompt) - 1)


def main(argv: Sequence[str]) -> int:
    """Send the traffic, print the table; 0 if chunks were reused and the answers are right, else 1."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.write_corpus:
        write_corpus(options.write_corpus, World(options.seed, options.passages))
        return 0
    if not options.url:
        parser.error("--url is required: the server's address")
    url = options.url.rstrip("/")
    if options.flush:
        _flush(url)
    requests = list(traffic(options.seed, options.passages, options.requests, options.conversations, options.retrieve))
    answers: list[Answer] = []
    texts = {passage.id: passage.text for passage in World(options.seed, options.passages).passages}
    for answer in ask_all(url, requests, texts):
        answers.append(answer)
        if sys.stderr.isatty():
            print(f"\rasking {len(answers)}/{len(requests)} ", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    rows = [_sum(phase, [a for a in answers if a.asked.phase == phase]) for phase in _phases(requests)]
    total = _sum("all", answers)
    print(_table([*rows, total]))
    print()
    for answer in [a for a in answers if a.asked.phase == "single questions"][:: max(1, options.requests // NUM_SHOWN)]:
        print(_show(answer))
    failures = _failures(total, any_answer=options.any_answer)
    for failure in failures:
        print(f"FAILED: {failure}")
    if options.json:
        print(
            json.dumps({"ok": not failures, "failures": failures, "phases": [*map(asdict, rows)], "all": asdict(total)})
        )
    return 1 if failures else 0


def write_corpus(path: Path, world: World) -> None:
    """The world's passages, one JSON object a line, for `python -m retrieval build --no-split`."""
    rows = [json.dumps({"id": passage.id, "text": passage.text}) + "\n" for passage in world.passages]
    path.write_text("".join(rows), encoding="utf-8")


def traffic(
    seed: int, num_passages: int, num_requests: int, num_conversations: int, num_retrieved: int = 0
) -> Iterator[Asked]:
    """The requests of all phases, in the order in which they are sent; the same for the same arguments."""
    world, rng = World(seed, num_passages), random.Random(seed)
    topics = _topics(world)
    rng.shuffle(topics)
    popularity = [1 / (rank + 1) for rank in range(len(topics))]
    asked = {p.id: [q for q in world.questions if q.hop == 1 and q.gold_passage_ids == (p.id,)] for p in world.passages}

    numbers = count()

    def ask(topic: Sequence[Passage], question: Question, conversation: str | None = None) -> Request:
        retrieved = _retrieve(topic, question, rng) if topic else ()
        chunks = tuple(TextChunk(p.id, p.text) for p in retrieved)
        name = f"demo:{next(numbers)}"
        return Request(name, question.question, chunks, question.answers, conversation=conversation)

    for topic in topics:
        yield Asked("first sight", ask(topic, rng.choice(asked[topic[0].id])))
    for topic in rng.choices(topics, popularity, k=num_requests):
        yield Asked("single questions", ask(topic, rng.choice(asked[rng.choice(topic).id])))
    for number in range(num_conversations):
        topic = rng.choices(topics, popularity)[0]
        for passage in rng.sample(topic, NUM_TURNS):
            yield Asked("conversations", ask(topic, rng.choice(asked[passage.id]), f"demo-{seed}-{number}"))
    for topic in rng.choices(topics, popularity, k=num_retrieved):
        question = rng.choice(asked[rng.choice(topic).id])
        yield Asked("server retrieves", ask((), question))


def ask_all(url: str, requests: Iterable[Asked], texts: Mapping[str, str]) -> Iterator[Answer]:
    """Send the requests one after the other; each turn of a conversation carries all its messages, as with any client.

    `texts`: passages by id, since the server's answer only gives the ids of retrieved passages.
    """
    plain = PlainCache()
    histories: dict[str, tuple[list[Message], list[Message]]] = {}  # as we send it, as a plain client would
    for asked in requests:
        request = asked.request
        ours, theirs = histories.setdefault(request.conversation, ([], [])) if request.conversation else ([], [])
        ours.append({"role": "user", "content": request.question})
        text, prompt_tokens, first_token_ms, chunkcache = _stream(url, ours, request)
        if chunkcache.get("retrieval"):
            request = replace(request, chunks=_retrieved(url, chunkcache["retrieval"], texts))
        context = "".join(chunk.text + CHUNK_SEPARATOR for chunk in request.chunks)
        theirs.append({"role": "user", "content": context + request.question})
        plain_prompt = post(f"{url}/v1/tokenize", {"model": "default", "messages": theirs})["tokens"]
        plain_answer = post(f"{url}/v1/tokenize", {"model": "default", "prompt": text, "add_special_tokens": False})[
            "tokens"
        ]
        plain_computed = plain.computed(plain_prompt, plain_answer)
        for history in (ours, theirs):
            history.append({"role": "assistant", "content": text})
        asked = Asked(asked.phase, request)
        yield Answer(asked, text, prompt_tokens, first_token_ms, chunkcache, len(plain_prompt), plain_computed)


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval demo",
        description="Send RAG traffic to a running server and print what it reused.",
        epilog="Exit code 1 if no chunk was reused, or fewer than 80% of the answers are right.",
    )
    parser.add_argument("--url", help="the server, for example http://127.0.0.1:30000")
    parser.add_argument("--requests", type=int, default=60, help="single questions; default: %(default)s")
    parser.add_argument("--conversations", type=int, default=6, help="of four turns each; default: %(default)s")
    parser.add_argument(
        "--retrieve",
        type=int,
        default=0,
        help="questions for which the server retrieves (--index); default: %(default)s",
    )
    parser.add_argument(
        "--write-corpus", type=Path, metavar="FILE", help="only write the passages for an index, then exit"
    )
    parser.add_argument("--passages", type=int, default=60, help="size of the corpus, 20 to 200; default: %(default)s")
    parser.add_argument("--seed", type=int, default=7, help="of corpus and traffic; default: %(default)s")
    parser.add_argument("--flush", action="store_true", help="empty the server's cache first")
    parser.add_argument("--any-answer", action="store_true", help="do not judge the answers (another model)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser


def _flush(url: str) -> None:
    try:
        urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", method="POST"), timeout=60).close()
    except urllib.error.URLError as error:
        raise CommandError(f"{url}/flush_cache: {error}") from None


def _topics(world: World) -> list[list[Passage]]:
    """Passages of one kind in groups of TOPIC_SIZE; the remaining few are not used."""
    by_kind: dict[str, list[Passage]] = {}
    for passage in world.passages:
        by_kind.setdefault(passage.text.split()[1], []).append(passage)  # "The company Dravex ..."
    topics = [
        group[start : start + TOPIC_SIZE]
        for group in by_kind.values()
        for start in range(0, len(group) - TOPIC_SIZE + 1, TOPIC_SIZE)
    ]
    if not topics:
        raise CommandError(f"--passages: too few to make one topic, got {len(world.passages)}")
    return topics


def _retrieve(topic: Sequence[Passage], question: Question, rng: random.Random) -> list[Passage]:
    """Passages of the topic by falling score, the one with the answer always among them."""
    scores = {p.id: rng.random() + GOLD_BIAS * (p.id in question.gold_passage_ids) for p in topic}
    ranked = sorted(topic, key=lambda p: -scores[p.id])
    missed = [p for p in ranked[NUM_CHUNKS:] if p.id in question.gold_passage_ids]
    return ranked[: NUM_CHUNKS - len(missed)] + missed


def _retrieved(url: str, retrieval: Mapping[str, Any], texts: Mapping[str, str]) -> tuple[TextChunk, ...]:
    ids = [passage["id"] for passage in retrieval["passages"]]
    if unknown := [name for name in ids if name not in texts]:
        raise CommandError(
            f"{url} retrieves {unknown[0]!r}, which is not of this demo: index the file of --write-corpus"
        )
    return tuple(TextChunk(name, texts[name]) for name in ids)


def _stream(url: str, messages: Sequence[Message], request: Request) -> tuple[str, int, float, dict[str, Any]]:
    """One chat completion: its text, prompt tokens, ms to the first event with text, and the `chunkcache` object."""
    body = {
        "model": "default",
        "messages": messages,
        **_source(request),
        "conversation_id": request.conversation,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    target = f"{url}/rag/v1/chat/completions"
    message = urllib.request.Request(target, json.dumps(body).encode(), {"Content-Type": "application/json"})
    text, prompt_tokens, first_token_ms, chunkcache = "", 0, 0.0, None
    start = time.perf_counter()
    try:
        with urllib.request.urlopen(message, timeout=600) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise CommandError(f"{target}: {event['error']}")
                chunkcache = event.get("chunkcache", chunkcache)
                prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
                for choice in event.get("choices") or ():
                    new = choice["delta"].get("content") or ""
                    if new and not text:
                        first_token_ms = 1e3 * (time.perf_counter() - start)
                    text += new
    except urllib.error.HTTPError as error:
        raise CommandError(f"{target}: {error.code} {error.read().decode(errors='replace')[:500]}") from None
    except OSError as error:
        raise CommandError(f"{target}: {error}") from None
    if chunkcache is None:
        raise CommandError(f"{target}: the answer has no chunkcache object")
    return text, prompt_tokens, first_token_ms, chunkcache


def _source(request: Request) -> dict[str, Any]:
    """The body's field for a request's chunks, or for their retrieval."""
    if not request.chunks:
        return {"retrieve": {"k": NUM_CHUNKS}}
    return {"chunks": [{"id": chunk.id, "text": chunk.text} for chunk in request.chunks]}


def _phases(requests: Sequence[Asked]) -> list[str]:
    return list(dict.fromkeys(asked.phase for asked in requests))


def _sum(phase: str, answers: Sequence[Answer]) -> Row:
    row = Row(phase, requests=len(answers))
    for answer in answers:
        cache = answer.chunkcache
        row.prompt_tokens += answer.prompt_tokens
        row.exact += cache["fates"]["exact"]
        row.computed += cache["fates"]["computed"]
        row.chunks_retrieved += len(answer.asked.request.chunks)
        row.chunks_hit += cache["chunks_hit"]
        row.chunks_dropped += len(cache["dropped"])
        row.right += answer.right
        row.plain_prompt_tokens += answer.plain_prompt
        row.plain_computed += answer.plain_computed
    row.first_token_ms = round(median(answer.first_token_ms for answer in answers), 1) if answers else 0.0
    return row


def _table(rows: Sequence[Row]) -> str:
    heads = (
        ("", "re-", "prompt", "from", "", "com-", "chunks", "found", "already", "right", "ms to", "plain prefix cache"),
        (
            "",
            "quests",
            "tokens",
            "cache",
            "%",
            "puted",
            "retr.",
            "cached",
            "shown",
            "answers",
            "token",
            "(predicted): computed",
        ),
    )
    lines = [
        (
            row.phase,
            row.requests,
            row.prompt_tokens,
            row.exact,
            f"{100 * row.exact / max(1, row.prompt_tokens):.0f}%",
            row.computed,
            row.chunks_retrieved,
            row.chunks_hit,
            row.chunks_dropped,
            f"{row.right}/{row.requests}",
            f"{row.first_token_ms:.0f}",
            f"{row.plain_computed} of {row.plain_prompt_tokens}",
        )
        for row in rows
    ]
    cells = [[str(cell) for cell in line] for line in (*heads, *lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    text = [
        "  ".join(c.ljust(w) if n == 0 else c.rjust(w) for n, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    text.insert(len(heads), "-" * len(text[-1]))
    text.insert(len(text) - 1, "-" * len(text[-1]))
    all_rows = rows[-1]
    saved = 1 - all_rows.computed / max(1, all_rows.plain_computed)
    text += [
        "tokens are prompt tokens; in a conversation each turn finds the first turn's chunks cached again, `already shown`",
        "those the server left out because the conversation has them; the plain cache keeps everything, chunks as retrieved.",
        f"Computed {all_rows.computed} tokens instead of {all_rows.plain_computed}: {100 * saved:.0f}% less prefill.",
    ]
    return "\n".join(line.rstrip() for line in text)


def _show(answer: Answer) -> str:
    request, cache = answer.asked.request, answer.chunkcache
    verdict = "right" if answer.right else f"expected: {request.answers[0]}" if request.answers else ""
    return (
        f"{request.question}\n"
        f"    retrieved {' '.join(c.id for c in request.chunks)}, sent {' '.join(cache['order'])}, "
        f"{cache['chunks_hit']} of them cached\n"
        f"    {answer.text.strip()}  [{verdict}]"
    )


def _failures(total: Row, *, any_answer: bool) -> list[str]:
    failures = []
    if not total.chunks_hit:
        failures.append("no chunk was found cached")
    if not any_answer and total.right < MIN_RIGHT * total.requests:
        failures.append(f"{total.right} of {total.requests} answers are right, at least {MIN_RIGHT:.0%} were expected")
    return failures


def _common_len(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


def _words(text: str) -> str:
    return " ".join(text.split())
