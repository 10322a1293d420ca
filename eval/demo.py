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
whole, and unlimited memory. The server must have SGLang's `/v1/tokenize`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from eval.errors import CommandError
from eval.http import post
from eval.progress import progress
from eval.serve import client
from eval.serve.arms import ARMS
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
HEADS = {
    "phase": "",
    "requests": "requests",
    "prompt_tokens": "prompt\ntokens",
    "exact": "from\ncache",
    "computed": "computed",
    "chunks_retrieved": "chunks\nretrieved",
    "chunks_hit": "found\ncached",
    "chunks_dropped": "shown\nbefore",
    "right": "right\nanswers",
    "first_token_ms": "ms to\ntoken",
    "plain_prompt_tokens": "plain cache:\nprompt",
    "plain_computed": "\ncomputed",
}
NOTES = """\
Tokens are prompt tokens. In a conversation each turn finds the first turn's chunks cached again; those shown before were left
out. The plain cache is a prediction: it keeps everything, chunks as retrieved. Computed {computed} tokens instead of \
{plain_computed}: {saved:.0%} less prefill.
"""


@dataclass(frozen=True, slots=True)
class Told:
    """A request with its answer; `plain_*` is the prediction for a plain prefix cache."""

    request: Request
    answer: client.Answer
    plain_prompt_tokens: int
    plain_computed: int

    @property
    def right(self) -> bool:
        """Exact match with one of the right answers, whatever the white space."""
        return self.answer.text.split() in [answer.split() for answer in self.request.answers]

    @property
    def cache(self) -> dict[str, Any]:
        """The server's `chunkcache` object."""
        return self.answer.chunkcache or {}


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
    world = World(options.seed, options.passages)
    if options.write_corpus:
        write_corpus(options.write_corpus, world)
        return 0
    if not options.url:
        parser.error("--url is required: the server's address")
    url = options.url.rstrip("/")
    if options.flush:
        post(f"{url}/flush_cache", timeout_s=60)
    requests = list(traffic(options.seed, options.passages, options.requests, options.conversations, options.retrieve))
    told = asyncio.run(_ask_all(url, requests, {passage.id: passage.text for passage in world.passages}))
    phases = {name: [one for one in told if phase(one.request) == name] for name in map(phase, requests)}
    rows = [_sums(name, some) for name, some in phases.items()]
    total = _sums("all", told)
    print(tabulate([*rows, total], headers=HEADS, floatfmt=".0f"))
    saved = 1 - total["computed"] / max(1, total["plain_computed"])
    print(NOTES.format(saved=saved, **total))
    single = phases.get("single questions", [])
    print(*map(_shown, single[:: max(1, options.requests // NUM_SHOWN)]), sep="\n")
    failures = [] if total["chunks_hit"] else ["no chunk was found cached"]
    right, asked = total["right"], total["requests"]
    if not options.any_answer and right < MIN_RIGHT * asked:
        failures.append(f"{right} of {asked} answers are right, at least {MIN_RIGHT:.0%} were expected")
    print(*(f"FAILED: {failure}\n" for failure in failures), sep="", end="")
    if options.json:
        print(json.dumps({"ok": not failures, "failures": failures, "phases": rows, "all": total}))
    return 1 if failures else 0


def write_corpus(path: Path, world: World) -> None:
    """The world's passages, one JSON object a line, for `python -m retrieval build --no-split`."""
    rows = [json.dumps({"id": passage.id, "text": passage.text}) + "\n" for passage in world.passages]
    path.write_text("".join(rows), encoding="utf-8")


def traffic(
    seed: int, num_passages: int, num_requests: int, num_conversations: int, num_retrieved: int = 0
) -> Iterator[Request]:
    """The requests of all phases, in the order in which they are sent; the same for the same arguments.

    A request without chunks is one that the server retrieves for.
    """
    world, rng = World(seed, num_passages), random.Random(seed)
    topics = _topics(world)
    rng.shuffle(topics)
    popularity = [1 / (rank + 1) for rank in range(len(topics))]
    asked = {p.id: [q for q in world.questions if q.hop == 1 and q.gold_passage_ids == (p.id,)] for p in world.passages}

    numbers = count()

    def ask(phase: str, about: Passage, topic: Sequence[Passage], conversation: str | None = None) -> Request:
        question = rng.choice(asked[about.id])
        chunks = tuple(TextChunk(p.id, p.text) for p in _retrieve(topic, question, rng)) if topic else ()
        name = f"{phase}:{next(numbers)}"
        return Request(name, question.question, chunks, question.answers, conversation=conversation)

    for topic in topics:
        yield ask("first sight", topic[0], topic)
    for topic in rng.choices(topics, popularity, k=num_requests):
        yield ask("single questions", rng.choice(topic), topic)
    for number in range(num_conversations):
        topic = rng.choices(topics, popularity)[0]
        for passage in rng.sample(topic, NUM_TURNS):
            yield ask("conversations", passage, topic, f"demo-{seed}-{number}")
    for topic in rng.choices(topics, popularity, k=num_retrieved):
        yield ask("server retrieves", rng.choice(topic), ())


def phase(request: Request) -> str:
    """The phase that a request of `traffic` belongs to."""
    return request.id.partition(":")[0]


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval demo",
        description="Send RAG traffic to a running server and print what it reused.",
        epilog="Exit code 1 if no chunk was reused, or fewer than 80% of the answers are right.",
    )
    add = parser.add_argument
    add("--url", help="the server, for example http://127.0.0.1:30000")
    add("--requests", type=int, default=60, help="single questions; default: %(default)s")
    add("--conversations", type=int, default=6, help="of four turns each; default: %(default)s")
    add("--retrieve", type=int, default=0, help="questions that the server retrieves for (--index); default: 0")
    add("--write-corpus", type=Path, metavar="FILE", help="only write the passages for an index, then exit")
    add("--passages", type=int, default=60, help="size of the corpus, 20 to 200; default: %(default)s")
    add("--seed", type=int, default=7, help="of corpus and traffic; default: %(default)s")
    add("--flush", action="store_true", help="empty the server's cache first")
    add("--any-answer", action="store_true", help="do not judge the answers (another model)")
    add("--json", action="store_true", help="print one JSON object as the last line")
    return parser


async def _ask_all(url: str, requests: Sequence[Request], texts: Mapping[str, str]) -> list[Told]:
    """Send the requests one after the other; each turn of a conversation carries all its messages, as with any client.

    `texts`: passages by id, since the server's answer only gives the ids of retrieved passages.
    """
    plain, told = PlainCache(), list[Told]()
    histories: dict[str, tuple[list[client.Message], list[client.Message]]] = {}  # as sent, as a plain client would
    async with client.open_session(timeout_s=600) as session:
        with progress("asking", len(requests)) as bar:
            for request in requests:
                talk = request.conversation
                ours, theirs = histories.setdefault(talk, ([], [])) if talk else ([], [])
                body = {"conversation_id": talk} if request.chunks else {"retrieve": {"k": NUM_CHUNKS}}
                arm = ARMS["ours"]
                got = await client.send(session, url, arm, request, ours, max_new_tokens=MAX_TOKENS, body=body)
                if got.error or got.chunkcache is None:
                    raise CommandError(f"{url}: {got.error or 'the answer has no chunkcache object'}")
                if got.chunkcache.get("retrieval"):
                    request = replace(request, chunks=_retrieved(url, got.chunkcache["retrieval"], texts))
                theirs.append(client.user_message(ARMS["stock-lpm"], request, request.chunks))
                prompt = _tokens(url, messages=theirs)
                computed = plain.computed(prompt, _tokens(url, prompt=got.text, add_special_tokens=False))
                reply = {"role": "assistant", "content": got.text}
                ours += [got.message, reply]
                theirs.append(reply)
                told.append(Told(request, got, len(prompt), computed))
                bar.update()
    return told


def _tokens(url: str, **text: Any) -> list[int]:
    return list(post(f"{url}/v1/tokenize", {"model": "default", **text})["tokens"])


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
        reason = "which is not of this demo: index the file of --write-corpus"
        raise CommandError(f"{url} retrieves {unknown[0]!r}, {reason}")
    return tuple(TextChunk(name, texts[name]) for name in ids)


def _sums(phase: str, told: Sequence[Told]) -> dict[str, Any]:
    """A phase's row; tokens are prompt tokens."""
    return {
        "phase": phase,
        "requests": len(told),
        "prompt_tokens": sum(one.answer.prompt_tokens or 0 for one in told),
        "exact": sum(one.cache["fates"]["exact"] for one in told),
        "computed": sum(one.cache["fates"]["computed"] for one in told),
        "chunks_retrieved": sum(len(one.request.chunks) for one in told),
        "chunks_hit": sum(one.cache["chunks_hit"] for one in told),
        "chunks_dropped": sum(len(one.cache["dropped"]) for one in told),
        "right": sum(one.right for one in told),
        "first_token_ms": round(1e3 * median(one.answer.first_text_s or 0.0 for one in told), 1) if told else 0.0,
        "plain_prompt_tokens": sum(one.plain_prompt_tokens for one in told),
        "plain_computed": sum(one.plain_computed for one in told),
    }


def _shown(told: Told) -> str:
    """A question with what became of it."""
    request, cache = told.request, told.cache
    verdict = "right" if told.right else f"expected: {request.answers[0]}" if request.answers else ""
    return (
        f"{request.question}\n"
        f"    retrieved {' '.join(c.id for c in request.chunks)}, sent {' '.join(cache['order'])}, "
        f"{cache['chunks_hit']} of them cached\n"
        f"    {told.answer.text.strip()}  [{verdict}]"
    )


def _common_len(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
