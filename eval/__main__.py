"""`python -m eval COMMAND [options]`: one module per command, imported only when asked for.

A command's module has `main(argv: Sequence[str]) -> int`, which parses its own options and returns
the exit code. A mistake of the user raises `CommandError`: one line on stderr, exit code 2. Run:
`python -m eval replay --help`.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from eval.errors import CommandError
from retrieval.command_line import program

COMMANDS = {
    "replay": ("eval.replay.command", "share of your trace's chunks found cached; no server"),
    "serve": ("eval.serve.command", "times under load, ours against stock SGLang"),
    "quality": ("eval.quality.command", "the effect of reuse on the answers"),
    "recall": ("eval.recall", "what words, vectors and rank fusion find; no server"),
    "joint": (
        "eval.joint.command",
        "how much of the KV fuses with similar KV, predicted and measured; no server",
    ),
    "codecs": (
        "eval.joint.codecs",
        "stored KV in fewer bytes: what it saves, errs, takes and does to answers; no server",
    ),
    "roofline": (
        "eval.roofline.command",
        "time of a moved request by arithmetic, step by step; no server",
    ),
    "alpha": ("eval.alpha", "Cache-Craft's alpha for your questions, on a running server"),
    "bench": ("eval.bench.command", "a part: tree reuse relocate attention ann bundled-model"),
    "compare": ("eval.compare", "two records, or two arms of one: differences beyond chance"),
    "report": ("eval.report.command", "one page of records"),
    "demo": ("eval.demo", "RAG traffic to a running server, and how much was reused"),
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
        print(
            f"eval {name} needs {package}: run it with .venv/bin/python (launch/setup.sh makes it)",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        # Otherwise Python reports the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # A shell's code for an end by SIGPIPE: 128 + 13.
        return 141
    except KeyboardInterrupt:
        print(f"eval {name}: interrupted", file=sys.stderr)
        return 130


def _usage() -> str:
    lines = [f"usage: {program('python -m eval')} COMMAND [options]", "", "commands:"]
    return "\n".join(lines + [f"  {name:<12} {summary}" for name, (_, summary) in COMMANDS.items()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
