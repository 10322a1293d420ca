"""A flag that a command does not know: which one was meant."""

from __future__ import annotations

import pytest

from retrieval.command_line import Parser, meant

FLAGS = ["--chunkcache-order", "--chunkcache-log", "--port", "--log-level"]


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["--prot", "4"], "; did you mean --port?"),
        (["--order=tree"], "; did you mean --chunkcache-order?"),
        (["--chunkcache-odrer", "--prt"], "; did you mean --chunkcache-order, --port?"),
        (["--nothing-like-it", "port"], ""),
    ],
)
def test_nearest_flag_is_named(words: list[str], end: str) -> None:
    """With or without our prefix, each once; words that are no flags mean nothing."""
    assert meant(words, FLAGS) == end


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["search", "--fctory", "x"], "unrecognized arguments: --fctory x\n"),
        (["build", "--fctory", "x"], "--fctory x; did you mean --factory?\n"),
        (["build", "x"], "unrecognized arguments: x\n"),
        (["build", "--factory", "---"], "one that begins with - is joined: --factory=---\n"),
        (["build", "--factory"], "argument --factory: expected one argument\n"),
        (["build", "--factory", "-h"], "argument --factory: expected one argument\n"),
    ],
)
def test_a_command_names_its_own_flags(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below its own usage."""
    commands = (parser := Parser(prog="python -m made")).add_subparsers()
    commands.add_parser("build").add_argument("--factory")
    commands.add_parser("search")
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(argv)
    error = capsys.readouterr().err
    assert error.startswith(f"usage: python -m made {argv[0]} ")
    assert error.endswith(told)


def test_a_flag_with_a_short_form_is_meant_itself() -> None:
    flags = ["--chunkcache-reuse", "--chunkcache-tree", "--reuse"]
    assert meant(["--chunkcache-resue"], flags).endswith("did you mean --chunkcache-reuse?")
    assert meant(["--resue"], flags).endswith("did you mean --reuse?")


def test_a_required_flag_that_is_misspelt_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser()
    parser.add_argument("--out", required=True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--ot", "index"])
    assert "required: --out; did you mean --out?" in capsys.readouterr().err
