"""Check whether `--reuse fused` is right with this model on this machine, and calibrate which
tokens are selected.

    python -m sglang_chunkcache.check --model-path M [any SGLang flag]   run the start-up gate, stop
    python -m sglang_chunkcache.check --url http://127.0.0.1:30000   a running server's figures
    python -m sglang_chunkcache.check --url ... --calibrate-selection [FILE]
                                                   which layers and heads tell what to recompute

The last line of stdout is one JSON object. Exit codes:

    0   passed
    1   the gate failed
    2   a mistake in the flags, a model that is not supported, or a server that does not answer
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrieval.command_line import meant, program
from sglang_chunkcache import config
from sglang_chunkcache.client import Client, ServerError
from sglang_chunkcache.compilers import add_own_tools
from sglang_chunkcache.installation import server_installation
from sglang_chunkcache.own_selectors import check_selectors
from sglang_chunkcache.start_steps import shown_steps, step

START_TIMEOUT_S = 1800
"""Loading a large model from a slow disk takes minutes, and never this long."""

_CHILD = "SGLANG_CHUNKCACHE_CHECK_OUT"
"""Set for the child process that loads the model: its output file.
SGLang kills a process whose scheduler fails."""


def main(argv: Sequence[str]) -> int:
    """Run the check or the calibration that the flags ask for; returns the exit code."""
    # The child has SGLang's flags only: without this it would start a child of its own.
    if out := os.environ.get(_CHILD):
        Path(out).write_text(json.dumps(_load_and_measure(argv)))
        return 0
    parser = _parser()
    args, flags = parser.parse_known_args(argv)
    calibrates = args.calibrate_selection is not None
    # `--model-path=M` is one word of the command line.
    if args.url is None and (calibrates or "--model-path" not in " ".join(flags)):
        parser.error("give --model-path, or --url of a running server (calibration needs one)")
    if args.url is not None and flags:
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"not for a running server: {' '.join(flags)}{meant(flags, known)}")
    try:
        with shown_steps():
            if calibrates:
                return _calibrate_selection(args)
            gates = _gates_of(Client(args.url, args.api_key)) if args.url else [_measure(flags)]
    except ServerError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    passed = all(gate["passed"] for gate in gates)
    if not args.json:
        for rank, gate in enumerate(gates):
            print(f"rank {rank}: {'passed' if gate['passed'] else 'FAILED'}")
            for name, value in gate.items():
                print(f"    {name:24} {value}")
    print(json.dumps({"passed": passed, "ranks": gates}))
    return 0 if passed else 1


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("python -m sglang_chunkcache.check"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--url", help="a running server, instead of loading a model")
    parser.add_argument("--api-key", metavar="KEY", help="the API key of the server")
    parser.add_argument(
        "--calibrate-selection",
        nargs="?",
        const="",
        metavar="FILE",
        help="on these questions, one JSON object a line, or on made-up ones",
    )
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    return parser


def _calibrate_selection(args: argparse.Namespace) -> int:
    with server_installation():
        from sglang_chunkcache.chunk_files import read_examples

    given = read_examples(Path(args.calibrate_selection)) if args.calibrate_selection else []
    examples = [{"question": one.question, "chunks": one.chunks} for one in given]
    step("calibrating the selection")
    result = Client(args.url, args.api_key).post("/chunkcache/calibrate", {"examples": examples})
    if not args.json:
        for rank in result["ranks"]:
            depth, layer = rank["depth"], rank["layer"] or "last"
            print(f"rank {rank['dp_rank']}: deviation at depth {depth}, question in layer {layer}")
            for name in ("gain_by_depth", "gain_by_layer"):
                for at, gain in rank["figures"].get(name, {}).items():
                    print(f"    {name:14} {at:>4} {gain:8.3f}")
    print(json.dumps(result))
    return 0


def _gates_of(client: Client) -> list[dict[str, Any]]:
    stats = client.get("/chunkcache/stats")
    ranks = stats["ranks"]
    if not all(rank.get("gate") for rank in ranks):
        kind = stats["tree"]["kind"]
        raise ServerError(f"{client.url}: not a server started with --reuse fused (tree: {kind})")
    return [_figures_of(rank) for rank in ranks]


def _figures_of(rank: Mapping[str, Any]) -> dict[str, Any]:
    """The gate's figures, the attention that it has tested, and what selectors read."""
    tested = {"attention": rank["moves"]["attention"], "calibration": rank["calibration"]}
    return {**rank["gate"], **tested}


def _measure(flags: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "figures.json"), Path(folder, "log")
        try:
            with log.open("wb") as stream:
                child = subprocess.Popen(
                    [sys.executable, "-m", "sglang_chunkcache.check", *flags],
                    env={**os.environ, _CHILD: str(out)},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    # SGLang may kill a failing scheduler's process group
                    # (SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION), which would be this process's.
                    start_new_session=True,
                )
            try:
                child.wait(START_TIMEOUT_S)
            except BaseException:  # its schedulers would stay, with the GPU's memory
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                raise
        except subprocess.TimeoutExpired:
            raise ServerError(f"the model did not load within {START_TIMEOUT_S} s") from None
        # Only the file counts: where a scheduler fails, SGLang kills the child.
        if not out.exists():
            lines = log.read_text(errors="replace").strip().splitlines()
            # Backwards: a traceback has its error in its last line.
            errors = (line for line in reversed(lines) if "Error" in line or "error:" in line)
            raise ServerError(
                next(errors, "\n".join(lines[-5:]))
                or "the process that loads the model ended without a message"
            )
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def _load_and_measure(flags: Sequence[str]) -> Mapping[str, Any]:
    """In the child process: start SGLang's engine with our cache,
    which runs the gate at the start."""
    parser = argparse.ArgumentParser(prog="python -m sglang_chunkcache.check", allow_abbrev=False)
    config.add_flags(parser)
    args, rest = parser.parse_known_args(flags)
    # With `gate="refuse"` a failed gate would end the child before it has told its figures.
    settings = dataclasses.replace(config.from_flags(args), reuse="fused", gate="report")
    os.environ.update(settings.to_env())
    add_own_tools()
    try:
        with server_installation():
            from sglang_chunkcache.launch_server import found_models, prepare, server_flags
            from sglang_chunkcache.wire.message import decode
            from sglang_chunkcache.wire.state import STATE_KEY, RankState

        check_selectors(settings)
        flags = server_flags(found_models(rest))
    except ValueError as error:
        parser.error(str(error))
    server_args = prepare(flags, stock=False, fail=parser.error)
    import sglang as sgl

    step("starting SGLang's processes")
    engine = sgl.Engine(server_args=server_args)
    try:
        state = engine.get_server_info()["internal_states"][0]
        return _figures_of(decode(state[STATE_KEY], RankState).counts)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
