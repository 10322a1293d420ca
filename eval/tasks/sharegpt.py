"""`sharegpt`: conversations of people with a chatbot, for multi-turn load.

Source: any file in ShareGPT's format, for example anon8231489123/ShareGPT_Vicuna_unfiltered on the
hub, file ShareGPT_V3_unfiltered_cleaned_split.json (`--hub` alone). Licence: that one's is
Apache-2.0; users' texts are their own. `--data FILE` is a JSON list, or one object per line. User
turns are sent in order, with the file's own replies as history. The data set has no passages:
without `--corpus` there are no chunks, with it the passages of that folder are searched for each
user turn, as CRAFT (section 5) searches Wikipedia's. An item:

    {"id": "dsOTKpn_0", "conversations": [{"from": "human", "value": "Why does `dir` ..."},
                                          {"from": "gpt", "value": "The `dir` command ..."}, ...]}

A leading turn of the bot is left out (the file has long conversations in pieces). A conversation
that then does not alternate, has an empty or unknown turn, no question, or a repeated id is
skipped; stderr shows how many.
"""

from __future__ import annotations

import sys

from eval.data.hub import HubName, hub_rows, parse_hub
from eval.data.question_set import read_passages
from eval.data.rows import Row, read_rows
from eval.task import Request, Source, TaskData

HUB = HubName(
    "anon8231489123/ShareGPT_Vicuna_unfiltered",
    None,
    "train",
    "ShareGPT_V3_unfiltered_cleaned_split.json",
)
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    "system": "system",
}


def load(source: Source) -> TaskData:
    """Conversations in the file's order, turn by turn. Raises CommandError."""
    rows = read_rows(source.file()) if source.hub is None else hub_rows(parse_hub(source.hub, HUB))
    passages = read_passages(source.corpus)[0] if source.corpus else {}
    requests: list[Request] = []
    talks: set[str] = set()
    num_rows = 0
    for num_rows, (_, row) in enumerate(rows, 1):
        talk = f"sharegpt:{row.get('id') or num_rows}"
        asked = _requests(row, talk)
        if asked and talk not in talks:
            talks.add(talk)
            requests += asked
        # The last conversation may go beyond: `requests_of` cuts the list.
        if len(requests) >= source.requests:
            break
    if num_rows > len(talks):
        told = (
            f"sharegpt: skipped {num_rows - len(talks)} of {num_rows} conversations, which are"
            " malformed"
        )
        print(told, file=sys.stderr)
    return TaskData(tuple(passages.values()), tuple(requests))


def _requests(row: Row, talk: str) -> list[Request]:
    """A request for each question of a conversation; none for a malformed one."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return []
    told = [(ROLES.get(turn.get("from")), turn.get("value")) for turn in turns]
    system = told.pop(0)[1] if told and told[0][0] == "system" else ""
    if told and told[0][0] == "assistant":
        told.pop(0)
    roles, texts = [role for role, _ in told], [text for _, text in told]
    if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2):
        return []
    if not all(isinstance(text, str) and text.strip() for text in (*texts, system or "none")):
        return []
    # For a last question without reply; a conversation that ends with a reply leaves it unused.
    replies = [*texts[1::2], None]
    pairs = enumerate(zip(texts[::2], replies, strict=False), 1)
    return [
        Request(f"{talk}:{n}", question, (), (reply,) if reply else (), (), talk, reply, system)
        for n, (question, reply) in pairs
    ]
