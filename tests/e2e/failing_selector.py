"""The poisoned server with a selector that fails on demand, and a log of what its audits compared.

    python -m tests.e2e.failing_selector --model-path M [our flags] [any SGLang flag]

While the file that SWITCH_VAR names exists, `deviation` takes the tokens that deviate least instead
of most: an answer still says that so many tokens were recomputed by it. To the file that LOG_VAR
names every audit appends a line of JSON: prompt and answer, and the rows of both sides. A pause is
over after PAUSE requests.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e import poisoned_server

# isort: split
from sglang_chunkcache import config, launch_server

SWITCH_VAR, LOG_VAR = "FAILING_SELECTOR_SWITCH", "FAILING_SELECTOR_LOG"
PAUSE = 30


def install_failure(switch: Path) -> None:
    """In a scheduler's process."""
    from sglang_chunkcache.fusion.selectors.deviation import LargestDeviation

    select = LargestDeviation.select

    def select_or_fail(selector: Any, chunks: Any, request: Any, evidence: Any) -> Any:
        if switch.exists() and evidence.deviation is not None:
            evidence = replace(evidence, deviation=-evidence.deviation)
        return select(selector, chunks, request, evidence)

    setattr(LargestDeviation, "select", select_or_fail)  # noqa: B010 (mypy takes no assignment)


def install_log(path: Path) -> None:
    """In the main process."""
    from sglang_chunkcache.front.audit import Auditor

    conclude = Auditor._conclude

    def conclude_and_log(auditor: Any, check: Any, exact: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            line = {
                "input_ids": check.input_ids,
                "prompt_len": len(check.planned.input_ids),
                "exact": exact,
                "moved": check.rows,
            }
            file.write(json.dumps(line) + "\n")
        conclude(auditor, check, exact)

    setattr(Auditor, "_conclude", conclude_and_log)  # noqa: B010


if __name__ in ("__main__", "__mp_main__"):
    poisoned_server.install()
    install_failure(Path(os.environ[SWITCH_VAR]))
if __name__ == "__main__":
    install_log(Path(os.environ[LOG_VAR]))
    from_flags = config.from_flags
    config.from_flags = lambda args: replace(from_flags(args), audit_pause=PAUSE)
    launch_server.main(sys.argv[1:])
