"""Reorders chunk ids with ContextPilot, one JSON object per line; see contextpilot_adapter.py. May run in another Python."""

import json
import os
import sys


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # ContextPilot prints to stdout
    from contextpilot.server.live_index import ContextPilot

    pilot = ContextPilot(use_gpu=False)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            contexts, _ = pilot.reorder([question["ids"]], conversation_id=question["conversation"])
            answer: dict[str, object] = {"ids": list(contexts[0])}
        except Exception as error:  # continue after a request that it cannot order
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
