"""`longbench`: LongBench's questions over several passages (Bai et al. 2023; data.zip of
THUDM/LongBench on the hub).

`--data` is one of its files or the folder of all: musique, 2wikimqa, hotpotqa, also the `_e` ones,
up to 20 passages and about 10,000 words each. Licence MIT, the texts' are their sources'. LongBench
asks for the answer and nothing else, before the passages and after them; here a system message
does, in words of ours. A line, other fields are left alone:

    {"input": "Who is the spouse of the Green performer?", "context": "Passage 1:\\nGreen\\n...
    \\nPassage 2:\\n...",
     "answers": ["Miquette Giraudy"], "_id": "b3d4..."}
"""

from __future__ import annotations

import re

from eval.data.question_set import distinct, text_chunk
from eval.data.rows import names_of, read_rows, text_of
from eval.errors import CommandError
from eval.task import Request, Source, TaskData, TextChunk

SETS = tuple(f"{name}{end}" for name in ("musique", "2wikimqa", "hotpotqa") for end in ("", "_e"))
MAX_NEW_TOKENS = 32
"""Of LongBench's config/dataset2maxlen.json, for all of these sets."""
SYSTEM = (
    "Answer the question from the passages. Reply with the answer alone, in as few words as"
    " possible."
)
_HEADING = re.compile(r"^Passage \d+:\n", re.MULTILINE)


def load(source: Source) -> TaskData:
    """Set by set, in the files' order. Raises CommandError."""
    path = source.file()
    files = (
        [file for name in SETS if (file := path / f"{name}.jsonl").exists()]
        if path.is_dir()
        else [path]
    )
    passages: dict[str, TextChunk] = {}
    requests: list[Request] = []
    for file in files:
        for number, (where, row) in enumerate(read_rows(file)):
            # A heading has the passage's number in this question: with it no chunk would recur.
            before, *texts = _HEADING.split(text_of(row, "context", where))
            # LongBench's other sets are single documents.
            if before.strip() or not texts:
                raise CommandError(
                    f'{where}: context must begin with "Passage 1:" on a line of its own'
                )
            chunks = distinct(text_chunk("longbench", "", text) for text in texts if text.strip())
            passages.update((chunk.id, chunk) for chunk in chunks)
            name, question = (
                f"longbench:{file.name.partition('.')[0]}:{number}",
                text_of(row, "input", where),
            )
            answers = names_of(row, "answers", where)
            requests.append(
                Request(
                    name, question, chunks, answers, system=SYSTEM, max_new_tokens=MAX_NEW_TOKENS
                )
            )
    return TaskData(tuple(passages.values()), tuple(requests))
