"""The parser of the commands: of a flag that it does not know it says which one was meant."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from shlex import quote
from typing import Any, NoReturn

OUR_PREFIX = "--chunkcache-"
"""Of the server's flags, which are also found without it."""

started_as: str | None = None
"""`sglang-chunkcache eval`, say: the console script and its command, which sets this."""


def program(command: str) -> str:
    """`python -m eval replay`, or the same as the console script was called."""
    if started_as is None or not command.startswith("python -m "):
        return command
    return " ".join([started_as, *command.split()[3:]])


class Parser(ArgumentParser):
    """Refuses unknown words in `parse_known_args`, too, by which argparse calls subcommands:
    so each names its own flags.

    Args:
        more_flags: what is known elsewhere and may be meant here.
        fail: called with the error instead of printing it below the usage.
    """

    def __init__(
        self,
        *,
        prog: str | None = None,
        more_flags: Iterable[str] = (),
        fail: Callable[[str], NoReturn] | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(prog=None if prog is None else program(prog), **rest)
        self._more_flags, self._fail = more_flags, fail
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else [*args]
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        if refused := re.fullmatch(r"argument (\S+): expected one argument", message):
            message += self._joined(refused[1].split("/"))
        elif "required" in message:  # it may be there, misspelt
            message += self._meant([e for e in self._words if e not in self._option_string_actions])
        if self._fail is not None:
            self._fail(message)
        super().error(message)

    def _meant(self, words: Sequence[str]) -> str:
        return meant(words, [*self._option_string_actions, *self._more_flags])

    def _joined(self, names: Sequence[str]) -> str:
        """The end of an error about a flag without a value: the word behind it, if that looks like
        a flag and is none."""
        for name, value in pairwise(self._words):
            if name in names and value not in self._option_string_actions:
                return f"; one that begins with - is joined: {name}={quote(value)}"
        return ""


def meant(words: Sequence[str], flags: Iterable[str]) -> str:
    """The end of an error about `words` where there are `flags`; "" where none is near."""
    flags = [*flags]
    known = {flag.replace(OUR_PREFIX, "--"): flag for flag in flags}
    known |= {flag: flag for flag in flags}
    near = dict[str, None]()
    for word in words:
        if word.startswith("--"):
            near |= {known[each]: None for each in get_close_matches(word.split("=")[0], known, 1)}
    return f"; did you mean {', '.join(near)}?" if near else ""
