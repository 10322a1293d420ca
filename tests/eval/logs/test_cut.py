"""Whether a person sees that a separator has cut a log's messages in the wrong places."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.logs.log_file import LogFile, unread_text
from eval.logs.passages import Passages, Splitter
from tests.eval.logs.made_logs import write

WORDS = ("boots", "pens", "hats", "cars", "maps", "bags", "cups")


def read(folder: Path, separator: str, *between: str, role: str = "user") -> LogFile:
    """Of 20 requests with 3 or 4 passages, a blank line in each."""
    rows = []
    for at in range(20):
        words = WORDS[at % 4 : at % 4 + 3 + at % 2]
        passages = [f"{word}\n\n{word} {'text ' * 20}" for word in words]
        text = f"From {at}: {'---'.join(passages)}---Asked: {at}?"
        rows.append({"messages": [{"role": role, "content": text}]})
    passages_of = Passages(Splitter(separator, between or None))
    return LogFile(write(folder / "log.jsonl", rows), passages_of)


@pytest.mark.parametrize("role", ["user", "system"])
def test_passage_that_is_taken_for_the_head_is_told(tmp_path: Path, role: str) -> None:
    """What is before the first separator is lost; only the text in all requests is no passage."""
    log = read(tmp_path, "---", role=role)
    read_told, warning = unread_text(log.unread)
    assert read_told == "Read 20 requests of 20 lines, 2 passages each (median; 2 to 3)."
    assert warning.startswith("Warning: 15 of 20 requests have another text before their first")
    assert "--between" in warning
    shown = [line.split(": ", 1) for line in log.example[1:]]
    assert [name.split("  ")[1] for name, _ in shown] == [
        "before the passages",
        "first passage",
        "last passage",
        "behind the passages",
    ]
    assert shown[0][1] == f"From 0: boots boots {'text ' * 8}..."
    right = read(tmp_path, "---", r"From \d+:", "Asked:", role=role)
    assert unread_text(right.unread) == [
        "Read 20 requests of 20 lines, 3 passages each (median; 3 to 4)."
    ]


def test_passages_that_are_cut_in_two_are_shown(tmp_path: Path) -> None:
    """Their number is twice theirs, and the second one begins in the middle of the first."""
    log = read(tmp_path, r"\n\n|---", "From ", "Asked:")
    assert log.unread["passages"] == [6, 6, 8]
    shown = [line.split(": ", 1)[1] for line in log.example[2:5]]
    assert [text[:10] for text in shown] == ["0: boots", "boots text", "hats text "]


def test_separator_that_matches_nowhere_is_told(tmp_path: Path) -> None:
    """Between two texts all passages are then one."""
    (_, told) = unread_text(read(tmp_path, "===", "From", "Asked:").unread)
    assert told == "Warning: No request has two passages: --separator probably matches nothing."
