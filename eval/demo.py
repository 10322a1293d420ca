"""`python -m eval demo`: sends RAG traffic to a running server and prints how much was reused and
how many answers are right.

    launch/demo.sh                                     # starts the server too
    python -m eval demo --url http://127.0.0.1:30000   # against one that runs with --model-path
                                                       bundled

The traffic is task `world`: some passages are asked about far more often than others, and their
order differs from question to question. The phases, one request at a time:

    1. single questions
    2. conversations that retrieve again passages that they have shown
    3. with `--retrieve`: questions for which the server itself searches an index of these passages
       (`--write-corpus`)

All figures of the server are taken from its answers. They are compared with a prediction: the
tokens that a cache of identical prefixes would compute for the same questions, with the chunks as
retrieved, sent again every turn, the text tokenised as a whole, and unlimited memory. The server
must have SGLang's `/v1/tokenize`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from eval.errors import CommandError
from eval.http import post
from eval.progress import tracked
from eval.serve import client
from eval.serve.arms import ARMS
from eval.task import Request, Source, TextChunk, load_task
from eval.tasks.world import NUM_PASSAGES
from eval.world.world import World
from retrieval.command_line import Parser

SEED = 7
NUM_CHUNKS = 4
# At most NUM_CHUNKS: every turn asks about another chunk of the conversation's topic.
NUM_TURNS = 4
MIN_RIGHT = 0.8
"""Below this share of right answers the bundled model cannot have read the right chunks."""
MAX_TOKENS = 40
NUM_SHOWN = 3
HEADS = {
    "requests": "requests",
    "prompt_tokens": "prompt\ntokens",
    "exact": "from\ncache",
    "computed": "computed",
    "chunks_retrieved": "chunks\nretrieved",
    "chunks_hit": "found\ncached",
    "chunks_dropped": "shown\nbefore",
    "right": "right\nanswers",
    "plain_prompt_tokens": "plain cache:\nprompt",
    "plain_computed": "\ncomputed",
}
NOTES = """\
Tokens are prompt tokens. In a conversation each turn finds the first turn's chunks cached again; \
those shown before were left
out. The plain cache is a prediction: it keeps everything, chunks as retrieved. \
Computed {computed} tokens instead of {plain_computed}: {saved:.0%} less prefill.
"""
Row = dict[str, Any]
"""A request's counts by HEADS, its milliseconds to the first text, and what to show of it."""


def main(argv: Sequence[str]) -> int:
    """Send the traffic, print the table; 0 if chunks were reused and the answers are right,
    else 1."""
    parser = Parser(
        prog="python -m eval demo",
        description="Send RAG traffic to a running server and print what it reused.",
        epilog="Exit code 1 if no chunk was reused, or fewer than 80% of the answers are right.",
    )
    add = parser.add_argument
    add("--url", help="the server, for example http://127.0.0.1:30000")
    add("--requests", type=int, default=60, help="single questions; default: %(default)s")
    add("--conversations", type=int, default=6, help="of four turns each; default: %(default)s")
    add(
        "--retrieve",
        type=int,
        default=0,
        help="questions that the server retrieves for (--index); default: 0",
    )
    add(
        "--write-corpus",
        type=Path,
        metavar="FILE",
        help="only write the passages for an index, then exit",
    )
    add("--any-answer", action="store_true", help="do not judge the answers (another model)")
    options = parser.parse_args(argv)
    texts = {passage.id: passage.text for passage in World(SEED, NUM_PASSAGES).passages}
    if options.write_corpus:  # for `python -m retrieval build --no-split`
        lines = [json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()]
        options.write_corpus.write_text("".join(lines), encoding="utf-8")
        return 0
    if not options.url:
        parser.error("--url is required: the server's address")
    phases = traffic(options.requests, options.conversations, options.retrieve)
    url, seen = options.url.rstrip("/"), list[list[int]]()
    told = {
        phase: asyncio.run(_ask_all(url, requests, texts, seen))
        for phase, requests in phases.items()
    }
    return tell(told, any_answer=options.any_answer)


def traffic(
    num_requests: int, num_conversations: int, num_retrieved: int = 0
) -> dict[str, list[Request]]:
    """Phase -> its requests in the order of sending.
    A request without chunks is one that the server retrieves for."""
    rng = random.Random(SEED)
    drawn = load_task(
        Source("world", requests=num_requests + num_retrieved, k=NUM_CHUNKS, seed=SEED)
    ).requests
    questions = [question for question in World(SEED, NUM_PASSAGES).questions if question.hop == 1]
    turns = []
    for number in range(num_conversations):
        topic = rng.choice(drawn).chunks
        for about in rng.sample(topic, NUM_TURNS):
            asked = rng.choice(
                [question for question in questions if question.gold_passage_ids == (about.id,)]
            )
            chunks, talk = tuple(rng.sample(topic, len(topic))), f"demo-{number}"
            turns.append(
                Request(
                    f"{talk}:{about.id}", asked.question, chunks, asked.answers, conversation=talk
                )
            )
    retrieved = [replace(request, chunks=()) for request in drawn[num_requests:]]
    return {
        "single questions": [*drawn[:num_requests]],
        "conversations": turns,
        "server retrieves": retrieved,
    }


def tell(told: Mapping[str, Sequence[Row]], *, any_answer: bool) -> int:
    """Print each phase's row, some of its questions, and what failed; returns the exit code."""
    every = [row for rows in told.values() for row in rows]
    total = {name: sum(row[name] for row in every) for name in HEADS}
    table = [
        {
            "": name,
            **{head: sum(row[key] for row in rows) for key, head in HEADS.items()},
            "ms to\ntoken": median(row["first_text_ms"] for row in rows),
        }
        for name, rows in {**told, "all": every}.items()
        if rows
    ]
    print(tabulate(table, headers="keys", floatfmt=".0f"))
    print(NOTES.format(saved=1 - total["computed"] / max(1, total["plain_computed"]), **total))
    print(*(row["shown"] for row in every[:: max(1, len(every) // NUM_SHOWN)]), sep="\n")
    failures = [] if total["chunks_hit"] else ["no chunk was found cached"]
    # Reuse alone proves little: KV at a wrong position counts as reused, too.
    if not any_answer and total["right"] < MIN_RIGHT * len(every):
        failures.append(
            f"{total['right']} of {len(every)} answers are right, at least {MIN_RIGHT:.0%} were"
            " expected"
        )
    print(*(f"FAILED: {failure}\n" for failure in failures), sep="", end="")
    return 1 if failures else 0


def plain_computed(seen: list[list[int]], prompt: list[int], answer: list[int]) -> int:
    """Tokens of `prompt` that a prefix cache with all of `seen` computes, at least its last one;
    adds prompt and answer."""
    cached = max((_common_len(prompt, other) for other in seen), default=0)
    seen.append(prompt + answer)
    # The first new token needs the logits of the prompt's last one, which the cache does not hold.
    return len(prompt) - min(cached, len(prompt) - 1)


# Private, in order of use


async def _ask_all(
    url: str, requests: Sequence[Request], texts: Mapping[str, str], seen: list[list[int]]
) -> list[Row]:
    """Send a phase, one request after the other; each turn of a conversation carries all its
    messages, as with any client.

    `texts`: passages by id. `seen`: what the plain cache holds, added to.
    """
    rows: list[Row] = []
    # as sent, as a plain client would
    histories: dict[str, tuple[list[client.Message], list[client.Message]]] = {}
    async with client.open_session() as session:
        for request in tracked("asking", requests):
            talk = request.conversation
            ours, theirs = histories.setdefault(talk, ([], [])) if talk else ([], [])
            body = {"conversation_id": talk} if request.chunks else {"retrieve": {"k": NUM_CHUNKS}}
            got = await client.send(
                session, url, ARMS["ours"], request, ours, max_new_tokens=MAX_TOKENS, body=body
            )
            if got.error or got.chunkcache is None:
                raise CommandError(f"{url}: {got.error or 'the answer has no chunkcache object'}")
            chunks, cache = request.chunks, got.chunkcache
            if found := cache.get("retrieval"):  # gives ids only
                names = [passage["id"] for passage in found["passages"]]
                if foreign := [name for name in names if name not in texts]:
                    raise CommandError(
                        f"--retrieve: passage {foreign[0]!r} of the server's index is not the"
                        " demo's"
                    )
                chunks = tuple(TextChunk(name, texts[name]) for name in names)
            theirs.append(client.user_message(ARMS["stock-lpm"], request, chunks))
            # These block the event loop, in which nothing else runs; `got` has its times already.
            prompt, answer = (
                _tokens(url, messages=theirs),
                # The answer continues the prompt: a BOS would end later turns' prefix there.
                _tokens(url, prompt=got.text, add_special_tokens=False),
            )
            reply = {"role": "assistant", "content": got.text}
            ours += [got.message, reply]
            theirs.append(reply)
            # whatever the white space
            right = got.text.split() in [answer.split() for answer in request.answers]
            rows.append(
                {
                    "requests": 1,
                    "prompt_tokens": got.prompt_tokens or 0,
                    "exact": cache["fates"]["exact"],
                    "computed": cache["fates"]["computed"],
                    "chunks_retrieved": len(chunks),
                    "chunks_hit": cache["chunks_hit"],
                    "chunks_dropped": len(cache["dropped"]),
                    "right": right,
                    "plain_prompt_tokens": len(prompt),
                    "plain_computed": plain_computed(seen, prompt, answer),
                    "first_text_ms": 1e3 * (got.first_text_s or 0.0),
                    "shown": (
                        f"{request.question}\n    sent {' '.join(cache['order'])},"
                        f" {cache['chunks_hit']} of them cached\n    {got.text.strip()} "
                        f" [{'right' if right else request.answers[0]}]"
                    ),
                }
            )
    return rows


def _tokens(url: str, **text: Any) -> list[int]:
    return list(post(f"{url}/v1/tokenize", {"model": "default", **text})["tokens"])


def _common_len(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )
