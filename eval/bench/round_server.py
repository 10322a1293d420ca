"""A server that writes what admission takes in each scheduling round, for `bench waiting`.

    python -m eval.bench.round_server [--stock] [any flag of the server]

A line a round in which requests wait, to the file that `FILE_VAR` names: how many waited before
and after, and its CPU time in seconds. SGLang's processes import the main module again, so that the
scheduler is patched as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from runpy import run_module
from time import thread_time
from typing import Any

FILE_VAR = "EVAL_ROUNDS_FILE"


def install(path: Path) -> None:
    """Patch SGLang's scheduler."""
    from sglang.srt.managers.scheduler import Scheduler

    admit: Any = Scheduler.get_new_batch_prefill

    def timed(scheduler: Any, running_batch: Any) -> Any:
        before, begun = len(scheduler.waiting_queue), thread_time()
        result = admit(scheduler, running_batch)
        took = thread_time() - begun
        if before:
            with path.open("a", encoding="ascii") as file:
                print(before, len(scheduler.waiting_queue), f"{took:.6f}", file=file)
        return result

    setattr(Scheduler, "get_new_batch_prefill", timed)  # noqa: B010 - SGLang's class


if __name__ in ("__main__", "__mp_main__"):
    from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

    define_torchvision_ops()  # without which nothing of SGLang is imported on a CPU build
    install(Path(os.environ[FILE_VAR]))
if __name__ == "__main__":
    run_module("sglang_chunkcache.launch_server", run_name="__main__")
