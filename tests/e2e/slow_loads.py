"""How much of a slow load is hidden: time to first token with its layers beside the prefill, against all of them in line.

    python -m tests.e2e.slow_loads [--us-per-token 250 1000] [--new 200] [--rounds 12]

One server on a random model, whose copies from host memory sleep: `--us-per-token` for all layers together, as over a slow link
that takes no core. Each prompt has about 2,000 tokens in host memory and `--new` to compute. A round measures two of them:

    in line    all layers are copied before the forward
    beside     as many are as the server thinks best, the others beside it

Hidden is by how much sooner the first token comes beside, as a share of the load: of its sleep. Median of the rounds.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

SWITCH = "SLOW_LOADS_SWITCH"
"""Environment variable of the server: names a file, JSON with `us_per_token` and `in_line`."""
CACHED, CHUNK, PASSES = 2000, 250, 5


def main(argv: Sequence[str]) -> int:
    """Measure."""
    from eval.data.random_text import WORDS, random_text
    from eval.http import get, post
    from eval.random_model import SHAPES, write_random_model
    from eval.server import Server

    args = _parse(argv)
    with tempfile.TemporaryDirectory() as made:
        folder, switch = Path(made), Path(made) / "switch.json"
        model = str(write_random_model(folder / "model", SHAPES[100], [" ".join(WORDS)] * 50))
        flags = ["--model-path", model, "--enable-cache-report", "--chunked-prefill-size", "-1"]
        flags += ["--max-prefill-tokens", "8000", "--max-running-requests", "1", "--chunkcache-host-mib", "4096"]
        flags += ["--max-total-tokens", str(2 * CACHED + args.new)]
        _set(switch, us_per_token=0, in_line=False)
        environment = {SWITCH: str(switch), "OMP_NUM_THREADS": "1"}
        with Server(flags, log=args.log, launcher=("-m", "tests.e2e.slow_loads"), env=environment) as server:
            count = int(post(server.url + "/tokenize", {"prompt": random_text("tokenizer", 1000)})["count"])

            def ask(prompt: int, question: str, num_words: int, num_tokens: int) -> tuple[float, dict[str, Any]]:
                chunks = [(f"{prompt}.{n}", random_text(f"{prompt}.{n}", CHUNK * 1000 // count)) for n in range(8)]
                body = {
                    "messages": [{"role": "user", "content": random_text(question, num_words * 1000 // count)}],
                    "chunks": [{"id": name, "text": text} for name, text in chunks],
                    "order": "retriever",
                    "max_tokens": num_tokens,
                    "ignore_eos": True,
                }
                started = time.perf_counter()
                answer = post(server.url + "/rag/v1/chat/completions", body)
                return time.perf_counter() - started, answer["chunkcache"]

            prompts = range(4)
            for number in prompts:
                ask(number, "first", 10, 1)
                ask(number, "second", 10, 2 * PASSES)  # saved while it decodes
            rows, turn = [], 0
            for us_per_token in args.us_per_token:
                taken, ahead = defaultdict[str, list[float]](list), list[int]()
                for round_number in range(-args.warm_up, args.rounds):
                    for arm in ("in line", "beside"):
                        _set(switch, us_per_token=us_per_token, in_line=arm == "in line")
                        turn += 1
                        seconds, told = ask(turn % len(prompts), f"question {turn}", args.new, 1)
                        if round_number < 0:
                            continue
                        taken[arm].append(seconds)
                        taken["load"].append(us_per_token * 1e-6 * told["loaded"])
                        if arm == "beside":
                            host = get(server.url + "/chunkcache/stats")["ranks"][0]["host"]
                            ahead.append(host["layers_ahead"])
                rows.append(_row(us_per_token, taken, ahead))
                print(rows[-1], flush=True)
            host = get(server.url + "/chunkcache/stats")["ranks"][0]["host"]
    print(json.dumps({"rows": rows, "layers": SHAPES[100].layers, "host": host}))
    return 0


# Private, in order of use


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--us-per-token", type=int, nargs="+", default=[250, 1000])
    parser.add_argument("--new", type=int, default=200, help="tokens of a prompt that are computed, about")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--warm-up", type=int, default=6, help="rounds before, in which the server learns what loads take"
    )
    parser.add_argument("--log", type=Path, default=Path("logs/slow-loads.log"))
    return parser.parse_args(argv)


def _set(switch: Path, **values: Any) -> None:
    part = switch.with_suffix(".part")
    part.write_text(json.dumps(values), encoding="utf-8")
    part.replace(switch)


def _row(us_per_token: int, taken: Mapping[str, Sequence[float]], ahead: Sequence[int]) -> dict[str, Any]:
    hidden = [
        (late - soon) / median(taken["load"]) for late, soon in zip(taken["in line"], taken["beside"], strict=True)
    ]
    return {
        "us_per_token": us_per_token,
        "rounds": len(taken["beside"]),
        **{f"{arm} (s)": round(median(seconds), 4) for arm, seconds in taken.items()},
        "hidden": round(median(hidden), 3),
        "layers ahead": median(ahead),
    }


def _install(switch: Path) -> None:
    """Slow copies, in the scheduler's process."""
    from sglang_chunkcache.scheduler.layer_loads import LayerLoads

    start = LayerLoads.start

    def slowed(loads: LayerLoads, copy: Any, work: Any, *, num_ahead: int, clock: Any) -> None:
        asked = json.loads(switch.read_text(encoding="utf-8"))
        seconds = asked["us_per_token"] * 1e-6 * work.tokens / loads.num_layers

        def slow(layer: int) -> None:
            if seconds:
                time.sleep(seconds)
            copy(layer)

        start(loads, slow, work, num_ahead=loads.num_layers if asked["in_line"] else num_ahead, clock=clock)

    LayerLoads.start = slowed  # type: ignore[method-assign, assignment]


if __name__ in ("__main__", "__mp_main__") and os.environ.get(SWITCH):
    from sglang_chunkcache import launch_server

    _install(Path(os.environ[SWITCH]))
if __name__ == "__main__":
    if os.environ.get(SWITCH):
        launch_server.main(sys.argv[1:])
    else:
        sys.exit(main(sys.argv[1:]))
