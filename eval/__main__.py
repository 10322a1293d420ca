"""`python -m eval COMMAND [options]`: one module per command, imported only when asked for.

A command's module has `main(argv: Sequence[str]) -> int`, which parses its own options and returns the exit code. A mistake of
the user raises `CommandError`: one line on stderr, exit code 2. Run: `python -m eval replay --help`.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from eval.errors import CommandError

COMMANDS = {
    "replay": ("eval.replay.command", "share of chunks that orders and evictions find cached on your trace; no server"),
    "serve": (
        "eval.serve.command",
        "times and throughput under load, ours against stock SGLang; sweeps of one setting",
    ),
    "quality": ("eval.quality.command", "the effect of reuse on the answers"),
    "recall": ("eval.recall", "recall of words, vectors and rank fusion, and overlap of their lists; no server"),
    "bench": ("eval.bench.command", "one part: tree, reuse, relocate, attention, ann, bundled-model"),
    "compare": ("eval.compare", "two records, or two arms of one: which differences exceed chance"),
    "report": ("eval.report.command", "a page, charts and a summary of records"),
    "demo": ("eval.demo", "sends RAG traffic to a running server and shows how much was reused"),
}
"""Command -> its module and one line for the help."""
OWN_PACKAGES = ("eval", "radix_ext", "retrieval", "sglang_chunkcache")


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    name, *options = argv
    if name not in COMMANDS:
        print(f"eval: unknown command {name!r}; choose from {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[name]
    try:
        return int(import_module(module).main(options))
    except CommandError as error:
        print(f"eval {name}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", *OWN_PACKAGES, *sys.stdlib_module_names):
            raise  # a bug of ours
        print(f"eval {name} needs {package}: run it with .venv/bin/python (launch/setup.sh makes it)", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # otherwise Python reports the error again at exit
        return 141
    except KeyboardInterrupt:
        print(f"eval {name}: interrupted", file=sys.stderr)
        return 130


def _usage() -> str:
    lines = ["usage: python -m eval COMMAND [options]", "", "commands:"]
    return "\n".join(lines + [f"  {name:<12} {summary}" for name, (_, summary) in COMMANDS.items()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
