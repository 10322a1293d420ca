"""`python -m eval serve --restart`: the first requests after a restart, with what an earlier server
has left in its storage.

    unmeasured   ARM-filled serves the warm-up requests and ends
    measured     ARM-filled starts again on its folder, ARM-cold on an empty one; both serve the
                 other requests, interleaved

Both write to their storage, so they differ only in what it has at the start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from eval.run import Run
from eval.serve.arms import Arm
from eval.serve.plan import Cell, Plan
from eval.serve.runner import measure

STORAGE = "--chunkcache-storage-backend"


def measure_restart(run: Run, plan: Plan, cells: Sequence[Cell]) -> None:
    """As `measure`, for a plan of one arm of ours and one cell. The storage is in the run's folder
    meanwhile.

    A run that was interrupted is filled anew. Raises as `measure`.
    """
    (arm,), (cell,) = plan.arms, cells
    before, after = (
        replace(cell, requests=part)
        for part in (cell.requests[: plan.warm_up], cell.requests[plan.warm_up :])
    )
    # the warm-up requests fill the storage: all others are measured
    plan = replace(plan, warm_up=0, keeps_start=True)
    with TemporaryDirectory(prefix="storage-", dir=run.folder) as name:
        cold, filled = (with_storage(arm, each, Path(name)) for each in ("cold", "filled"))
        with Run(
            Path(name) / "filling", kind="serve", spec={}, summarize=lambda samples: {}
        ) as unmeasured:
            # facts of its own, since the record describes the measured servers
            measure(unmeasured, replace(plan, arms=[filled], facts={}), [before])
        measure(run, replace(plan, arms=[cold, filled]), [after])


def with_storage(arm: Arm, name: str, folder: Path) -> Arm:
    """The arm as ARM-name, with a storage in a folder of that name.
    Its settings are in a file: no record has the path."""
    settings = folder / f"{name}.json"
    settings.write_text(json.dumps({"directory": str((folder / name).resolve())}), encoding="utf-8")
    flags = (*arm.flags, STORAGE, "file", f"{STORAGE}-extra-config", f"@{settings.resolve()}")
    return replace(arm, name=f"{arm.name}-{name}", flags=flags)
