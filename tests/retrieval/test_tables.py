"""Which lines are a Markdown table."""

from __future__ import annotations

import pytest

from retrieval.tables import Table, find_tables

HEAD = "| a | b |\n|---|:-:|\n"


def found(text: str, header: str = "") -> list[tuple[str, str, bool]]:
    """(header, rows, whether more may follow) of each table."""
    return [
        (table.header, text[table.body : table.end], table.is_open)
        for table in find_tables(text, header)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{HEAD}| 1 | 2 |\n| 3 | 4 |", [(HEAD, "| 1 | 2 |\n| 3 | 4 |", True)]),
        (f"Text:\n{HEAD}1 | 2\nafter\n", [(HEAD, "1 | 2", False)]),
        ("a|b\n-|-\n1|2\n\n3|4", [("a|b\n-|-\n", "1|2", False)]),
        (f"  {HEAD}  | 1 | 2 |  \n", [(HEAD, "| 1 | 2 |", True)]),
        (f"{HEAD}|1|2|\n\n{HEAD}|3|4|\n\n", [(HEAD, "|1|2|", False), (HEAD, "|3|4|", False)]),
        (f"{HEAD}|1|2|\n|---|---|\n|3|4|\n", [(HEAD, "|1|2|\n|---|---|\n|3|4|", True)]),
        ("| a |\n|---|\n| 1 |\n", [("| a |\n|---|\n", "| 1 |", True)]),
        ("a \\| b | c\n-|-\n1|2", [("a \\| b | c\n-|-\n", "1|2", True)]),
    ],
)
def test_tables_are_found(text: str, expected: list[tuple[str, str, bool]]) -> None:
    """With outer bars or without; ended by a line without a bar."""
    assert found(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEAD,
        f"{HEAD}no row\n",
        "|---|---|\n| 1 | 2 |\n",
        "| a | b |\n|---|\n| 1 | 2 |\n",
        "Title\n-----\n| 1 | 2 |\n",
        "| a | b |\n|-- -|---|\n| 1 | 2 |\n",
        "| a | b |\n\n|---|---|\n| 1 | 2 |\n",
        "# | a | b |\n|---|---|---|\n| 1 | 2 |\n",
        f"{HEAD}# | 1 | 2 |\n",
        "a | b or c\nd || e\n",
    ],
)
def test_what_is_no_table(text: str) -> None:
    """A delimiter row alone, other numbers of cells, a heading, nothing below."""
    assert found(text) == []


def test_a_table_goes_on_in_the_next_part() -> None:
    """With the header of the earlier part, if the first line is a row."""
    assert found("|5|6|\n|7|8|\n\nend", HEAD) == [(HEAD, "|5|6|\n|7|8|", False)]
    assert find_tables("|5|6|\n", HEAD) == [Table(HEAD, 0, 0, 5, True)]
    assert found("end |\n" + HEAD + "|1|2|", HEAD)[0][1].startswith("end |")
    assert found("\n|5|6|\n", HEAD) == found("text\n|5|6|", HEAD) == []
