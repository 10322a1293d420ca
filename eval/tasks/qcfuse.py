"""`qcfuse`: the questions that QCFuse publishes, seven sets of 500
(huggingface.co/datasets/Yjx666/qcfuse-dataset).

Format as of its repository uYanJX/QCFuse at 8fc84ee (data/README.md, September 2026); licence
Apache-2.0, the texts' are their sources'. `--data` is one of the files or the folder of all:
musique, 2wikimqa, hotpotqa (9 to 11 chunks), ruler_mq, ruler_mv, ruler_vt and bird (10 chunks),
about 10,000 tokens each. Their prompts' instructions are not taken along: chunks, then the input. A
line:

    {"input": "Who is the spouse of the Green performer?", "context": ["Entity: ...", ...],
    "answers": ["Miquette Giraudy"],
     "num_chunks": 10}
"""

from __future__ import annotations

from eval.data.question_set import distinct, text_chunk
from eval.data.rows import names_of, read_rows, text_of
from eval.task import Request, Source, TaskData, TextChunk

SETS = ("musique", "2wikimqa", "hotpotqa", "ruler_mq", "ruler_mv", "ruler_vt", "bird")
MAX_NEW_TOKENS = {"ruler_vt": 30, "ruler_mq": 128, "ruler_mv": 128, "bird": 512}
"""Of QCFuse's runner; 48 in the other sets."""


def load(source: Source) -> TaskData:
    """Set by set, in the files' order. Raises CommandError."""
    path = source.file()
    files = [path / f"{name}.jsonl" for name in SETS] if path.is_dir() else [path]
    passages: dict[str, TextChunk] = {}
    requests: list[Request] = []
    # A folder may hold some of the sets; a file that is named and missing is an error.
    for file in (file for file in files if file.exists() or not path.is_dir()):
        name = file.name.partition(".")[0]
        for number, (where, row) in enumerate(read_rows(file)):
            chunks = distinct(
                text_chunk("qcfuse", "", text) for text in names_of(row, "context", where)
            )
            passages.update((chunk.id, chunk) for chunk in chunks)
            answers = (
                (row["answers"],)
                if isinstance(row.get("answers"), str)
                else names_of(row, "answers", where)
            )
            limit = MAX_NEW_TOKENS.get(name, 48)
            question = text_of(row, "input", where)
            requests.append(
                Request(f"qcfuse:{name}:{number}", question, chunks, answers, max_new_tokens=limit)
            )
    return TaskData(tuple(passages.values()), tuple(requests))
