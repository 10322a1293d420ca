"""`sglang-chunkcache COMMAND [options]`: one name for what `python -m` runs, too.

Imports nothing heavy, so its help comes at once. There is no completion for shells: argparse, which
parses all commands, has none.
"""

from __future__ import annotations

import os
import runpy
import sys

from retrieval import command_line
from sglang_chunkcache import __version__

SCRIPT = "sglang-chunkcache"
COMMANDS = {
    "serve": ("sglang_chunkcache.launch_server", "start SGLang's server with the chunk cache"),
    "check": ("sglang_chunkcache.check", "is moved KV right with this model on this machine?"),
    "preprocess": ("sglang_chunkcache.preprocess", "fill a server's store ahead of requests"),
    "retrieval": ("retrieval", "build, search and inspect an index"),
    "eval": ("eval", "replay a trace, measure, compare, report"),
}
"""Command -> the module that `python -m` runs, and one line for the help."""


def main() -> None:
    """Run a command, which exits with its own code; an unknown one with 2."""
    name, *options = sys.argv[1:] or [""]
    if name in ("", "-h", "--help"):
        lines = [f"  {name:<12} {summary}" for name, (_, summary) in COMMANDS.items()]
        print(f"usage: {SCRIPT} COMMAND [options]", "", "commands:", *lines, sep="\n")
        sys.exit(0 if name else 2)
    if name == "--version":
        print(SCRIPT, __version__)
        sys.exit(0)
    if name not in COMMANDS:
        sys.exit(_unknown(name))
    command_line.started_as = f"{SCRIPT} {name}"
    sys.argv[1:] = options
    # `python -m` finds modules of the current folder, such as a user's selectors. Last, so that
    # no folder of this name hides ours.
    sys.path.append(os.getcwd())
    # As by `python -m`: SGLang's processes import the main module again, by its name.
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)


def _unknown(name: str) -> int:
    print(f"{SCRIPT}: unknown command {name!r}; choose from {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
