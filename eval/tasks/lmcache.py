"""`rag-qa-quality` and `long-doc-permutator`: the workloads of LMCache's `lmcache bench engine`
that reuse chunks anywhere.

Formats as of LMCache 0.5.6, lmcache/cli/commands/bench/engine_bench (github.com/LMCache/LMCache at
22d4ad2, 253838c; Apache-2.0).

rag-qa-quality       `--data FILE`, a JSON list or JSON Lines, or `--hub`. Four kinds of
                     rows, each with question and answers: MuSiQue's and HotpotQA's columns,
                     HotpotQA's own `"context": [["title", ["sentence", ...]], ...]`, and
                     CacheBlend's `"ctxs": [{"title": "...", "text": "..."}, ...]`. Rows that lack
                     one of the three are left out. LMCache fills documents up to 256
                     tokens, the unit of its cache, and has instructions around them; neither is
                     done here, since our unit is the chunk.
long-doc-permutator  No data. Each request is a system prompt and the same documents in another
                     order, without a question. `--data FILE` is a configuration of `lmcache
                     bench engine --export-config`, of which `ldp_*` counts; `--k` is the
                     number of documents, `--scale` divides lengths. Words are ours, one token each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, permutations
from math import factorial
from typing import Any

from eval.data.hub import HubName, hub_rows, parse_hub
from eval.data.question_set import distinct, text_chunk
from eval.data.random_text import random_text
from eval.data.rows import Row, read_rows
from eval.errors import CommandError
from eval.task import Request, Source, TaskData, TextChunk

HUB = HubName("dgslibisey/MuSiQue")
PERMUTATOR = {
    "ldp_num_contexts": 5,
    "ldp_context_length": 5000,
    "ldp_system_prompt_length": 1000,
    "ldp_num_permutations": 10,
}
"""LMCache's defaults; lengths in tokens."""
MAX_NEW_TOKENS = 128


def load(source: Source) -> TaskData:
    """Requests in LMCache's order. Raises CommandError."""
    return _permuted(source) if source.task == "long-doc-permutator" else _questions(source)


# Private, in order of use


def _questions(source: Source) -> TaskData:
    rows = read_rows(source.file()) if source.hub is None else hub_rows(parse_hub(source.hub, HUB))
    requests: dict[str, Request] = {}
    for number, (where, row) in enumerate(rows):
        texts = [(title, text) for title, text in _documents(row, where) if text.strip()]
        question = str(row.get("question") or row.get("query") or "").strip()
        answers = tuple(
            dict.fromkeys(
                _texts([row.get("answers") or row.get("answer"), row.get("answer_aliases")])
            )
        )
        name = f"rag-qa-quality:{row.get('_id') or row.get('id') or number}"
        if texts and question and answers and name not in requests:
            chunks = distinct(text_chunk("rag-qa-quality", title, text) for title, text in texts)
            requests[name] = Request(name, question, chunks, answers)
    if not requests:
        raise CommandError(
            f"{source.data or source.hub} has no row with passages, a question and answers"
        )
    passages = {chunk.id: chunk for request in requests.values() for chunk in request.chunks}
    return TaskData(tuple(passages.values()), tuple(requests.values()))


def _documents(row: Row, where: str) -> Iterator[tuple[str, str]]:
    """(title, text) of each passage, in the row's order. Raises CommandError."""
    name = next((name for name in ("paragraphs", "ctxs", "contexts") if row.get(name)), None)
    for passage in _list(row[name], f"{where}: {name}") if name else ():
        fields = {"text": passage} if isinstance(passage, str) else passage
        if not isinstance(fields, dict):
            raise CommandError(f"{where}: {name} must be a list of objects or strings")
        title, text = (
            fields.get("title") or "",
            fields.get("text") or fields.get("paragraph_text") or "",
        )
        if not isinstance(title, str) or not isinstance(text, str):
            raise CommandError(f"{where}: title and text in {name} must be strings")
        yield title, text
    # HotpotQA's own files have pairs, the hub has two columns.
    context = row.get("context") or []
    if isinstance(context, dict):
        columns = [
            _list(context.get(name), f"{where}: {name} in context")
            for name in ("title", "sentences")
        ]
        if len(columns[0]) != len(columns[1]):
            raise CommandError(
                f"{where}: context has {len(columns[0])} titles but {len(columns[1])} lists of"
                " sentences"
            )
        context = list(map(list, zip(*columns, strict=True)))
    for pair in _list(context, f"{where}: context"):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise CommandError(f"{where}: context must be a list of a title and its sentences each")
        title, sentences = pair
        if not isinstance(sentences, str) and not all(
            isinstance(one, str) for one in _list(sentences, f"{where}: sentences in context")
        ):
            raise CommandError(f"{where}: sentences in context must be strings")
        yield title, "".join(sentences)


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise CommandError(f"{what} must be a list")
    return value


def _texts(found: object) -> Iterator[str]:
    """The texts of a list that may hold lists, as in some files."""
    if isinstance(found, list):
        for one in found:
            yield from _texts(one)
    elif found is not None and (text := str(found).strip()):
        yield text


def _permuted(source: Source) -> TaskData:
    sizes = PERMUTATOR | _configured(source)
    num_contexts = source.k or sizes["ldp_num_contexts"]
    chunks = [
        TextChunk(f"doc{i}", random_text(f"{source.seed} doc{i}", sizes["ldp_context_length"]))
        for i in range(num_contexts)
    ]
    # Chunks are scaled by `requests_of`, as those of all tasks.
    length = sizes["ldp_system_prompt_length"] // source.scale
    # `random_text` has one word at least, but a configuration may have no system prompt.
    system = random_text(f"{source.seed} system", length) if length else ""
    orders = _orders(num_contexts, min(sizes["ldp_num_permutations"], source.requests), source.seed)
    template = Request("", "", system=system, max_new_tokens=MAX_NEW_TOKENS)
    lists = [tuple(chunks[i] for i in order) for order in orders]
    requests = (
        replace(template, id=f"long-doc-permutator:{n}", chunks=shown)
        for n, shown in enumerate(lists)
    )
    return TaskData(tuple(chunks), tuple(requests))


def _configured(source: Source) -> dict[str, int]:
    if source.data is None:
        return {}
    try:
        config = json.loads(source.data.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(
            f"{source.data} is not a configuration of lmcache bench engine: {error}"
        ) from None
    found = (
        {name: config[name] for name in PERMUTATOR if name in config}
        if isinstance(config, dict)
        else {}
    )
    if not found:
        raise CommandError(
            f"{source.data} must be a JSON object with one or more of {', '.join(PERMUTATOR)}"
        )
    for name, value in found.items():
        # By type, since isinstance(True, int).
        if type(value) is not int or value < (0 if name == "ldp_system_prompt_length" else 1):
            raise CommandError(f"{source.data}: {name} must be a positive integer, got {value!r}")
    return found


def _orders(num: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """`count` different orders of `num` documents, ascending:
    all, the first, or drawn from more than ten times as many."""
    if factorial(num) <= 10 * count:
        return list(islice(permutations(range(num)), count))
    # Drawn until all differ: at most every tenth draw repeats one, and n! orders are not listed.
    rng, drawn = random.Random(seed), set[tuple[int, ...]]()
    while len(drawn) < count:
        drawn.add(tuple(rng.sample(range(num), num)))
    return sorted(drawn)
