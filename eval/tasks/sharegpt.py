"""`sharegpt`: conversations of people with a chatbot, for multi-turn load.

Source: any file in ShareGPT's format, for example anon8231489123/ShareGPT_Vicuna_unfiltered on the hub, file
ShareGPT_V3_unfiltered_cleaned_split.json (`--hub` alone). Licence: that one's is Apache-2.0; users' texts are their own.
`--data FILE` is a JSON list, or one object per line. User turns are sent in order, with the file's own replies as history. The
data set has no passages: without `--corpus` there are no chunks, with it the passages of that folder are searched for each user
turn, as CRAFT (section 5) searches Wikipedia's. An item:

    {"id": "dsOTKpn_0", "conversations": [{"from": "human", "value": "Why does `dir` ..."},
                                          {"from": "gpt", "value": "The `dir` command ..."}, ...]}

A leading turn of the bot is left out (the file has long conversations in pieces). A conversation that then does not alternate,
has an empty or unknown turn, no question, or a repeated id is skipped; stderr shows how many.
"""

from __future__ import annotations

import sys

from eval.data.hub import HubName, hub_rows, parse_hub
from eval.data.question_set import read_passages
from eval.data.rows import read_items
from eval.errors import CommandError
from eval.task import Request, Source, TaskData

HUB = HubName("anon8231489123/ShareGPT_Vicuna_unfiltered", None, "train", "ShareGPT_V3_unfiltered_cleaned_split.json")
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    "system": "system",
}


def load(source: Source) -> TaskData:
    """Conversations in the file's order, turn by turn. Raises CommandError."""
    if source.hub is None:
        name, items = str(source.file()), read_items(source.file())
    else:
        hub = parse_hub(source.hub, HUB)
        name, items = hub.name, hub_rows(hub)
    passages = read_passages(source.corpus)[0] if source.corpus else {}
    requests: list[Request] = []
    num_items = num_skipped = 0
    names: set[str] = set()
    for num_items, (_, item) in enumerate(items, 1):
        conversation = f"sharegpt:{(isinstance(item, dict) and item.get('id')) or num_items}"
        turns = _turns(item)
        if not turns or conversation in names:
            num_skipped += 1
            continue
        names.add(conversation)
        system, pairs = turns
        requests += [
            Request(
                f"{conversation}:{number}",
                question,
                answers=(reply,) if reply else (),
                conversation=conversation,
                reply=reply,
                system=system,
            )
            for number, (question, reply) in enumerate(pairs, 1)
        ]
        if len(requests) >= source.requests:
            break
    if num_skipped:
        print(f"sharegpt: skipped {num_skipped} of {num_items} conversations, which are malformed", file=sys.stderr)
    if not requests:
        raise CommandError(f"{name} has no conversation in ShareGPT's format")
    return TaskData(tuple(passages.values()), tuple(requests))


def _turns(item: object) -> tuple[str, list[tuple[str, str | None]]] | None:
    """System prompt, and each question with its reply; None for a malformed conversation."""
    turns = item.get("conversations") if isinstance(item, dict) else None
    if not isinstance(turns, list):
        return None
    told: list[tuple[str, str]] = []
    for turn in turns:
        role, text = (ROLES.get(str(turn.get("from"))), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if role is None or not isinstance(text, str) or not text.strip():
            return None
        told.append((role, text))
    system = told.pop(0)[1] if told and told[0][0] == "system" else ""
    if told and told[0][0] == "assistant":
        told.pop(0)
    if not told or any(role != ("user", "assistant")[i % 2] for i, (role, _) in enumerate(told)):
        return None
    questions, replies = [text for _, text in told[::2]], [text for _, text in told[1::2]]
    return system, list(zip(questions, [*replies, None], strict=False))
