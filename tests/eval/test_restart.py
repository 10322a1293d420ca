"""`python -m eval serve --restart`: what fills the storage, what is measured,
and on which folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eval.run import Run, read_record
from eval.serve.arms import Arm
from eval.serve.command import main
from eval.serve.plan import Cell, Plan
from tests.kit.eval_launcher import parse_launcher


@pytest.mark.parametrize("name", ["ours", "fused"])
def test_server_is_filled_then_measured_against_a_cold_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The filled one has its folder from before, the cold one another; none is left."""
    measured: list[tuple[Path, list[Arm], bool, list[str], list[str]]] = []

    def measure(run: Run, plan: Plan, cells: Sequence[Cell]) -> None:
        (cell,) = cells
        assert plan.warm_up == 0
        folders = [directory_of(arm) for arm in plan.arms]
        for folder in map(Path, folders):
            assert not folder.exists() or len(measured) == 1
            folder.mkdir(parents=True, exist_ok=True)
        ids = [request.id for request in cell.requests]
        measured.append((run.folder, list(plan.arms), plan.keeps_start, ids, folders))

    monkeypatch.setattr("eval.serve.restart.measure", measure)
    options = f"--restart --arms {name} --requests 30 --warm-up 20 --model-path bundled"
    assert main([*options.split(), "--out", str(tmp_path / "r")]) == 0
    filling, both = measured
    assert [arm.name for arm in filling[1]] == [f"{name}-filled"]
    assert [arm.name for arm in both[1]] == [f"{name}-cold", f"{name}-filled"]
    assert (len(filling[3]), len(both[3]), set(filling[3]) & set(both[3])) == (20, 10, set())
    assert both[2]
    assert both[4][1] == filling[4][0] != both[4][0]
    assert both[0] == tmp_path / "r"
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["record.json"]
    assert read_record(tmp_path / "r")["spec"]["against"] == f"{name}-cold"


def directory_of(arm: Arm) -> str:
    """Its storage's, as the server reads it."""
    settings, rest = parse_launcher(list(arm.flags))
    assert settings.reuse == ("fused" if "fused" in arm.name else "exact")
    assert settings.storage_backend == "file"
    assert rest == ["--schedule-policy", "lpm"]
    given: Any = settings.storage_backend_extra_config
    return str(json.loads(Path(given.removeprefix("@")).read_text())["directory"])
