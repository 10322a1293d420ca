"""`quality joint`: cells, batches and figures, against a fake server and by hand."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import pytest

from eval.errors import CommandError
from eval.quality.joint_curves import JOINT, JointCurves, fused_of, label_of, make_cells
from eval.quality.mode import add_quality_options
from tests.eval.fake_chat import Body, FakeChat, chatting
from tests.eval.test_ratio_curves import GOLD, endpoint_of, make_test_case


def answer(body: Body) -> str:
    """Wrong where much is fused."""
    joint = body.get("joint") or {}
    return "wrong" if joint.get("threshold", 1) < 0.9 else "right"


def options(*argv: str) -> Namespace:
    parser = ArgumentParser()
    add_quality_options(parser)
    JointCurves.add_options(parser)
    return parser.parse_args(["--requests", "2", *argv])


def mode_of(cells: list[dict[str, Any]]) -> JointCurves:
    """The mode without its cases and options."""
    mode = JointCurves.__new__(JointCurves)
    mode.args, mode.scorer, mode.cells = Namespace(seed=0), GOLD, cells
    return mode


def rows_of(fake: FakeChat, cells: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    cases = [make_test_case(name=f"t:{number}") for number in range(3)]
    return list(mode_of(cells).take(cases, {JOINT: endpoint_of(fake)}))


def test_every_cell_is_asked_for_once() -> None:
    """Thresholds and ratios, in blocks of every size, over chunks and over batches of every size."""
    cells = make_cells(["chunks", "batch"], [4, 16], [0.5], [1.5, 2.0], [2, 8])
    assert len(cells) == len({tuple(label_of(cell)) for cell in cells}) == (1 + 2) * 2 * 3
    assert cells[1] == {"over": "chunks", "block": 4, "ratio": 1.5}
    assert cells[-1] == {"over": "batch", "batch": 8, "block": 16, "ratio": 2.0}


@pytest.mark.parametrize("over", ["chunks", "batch"])
def test_requests_are_fused_on_kv_of_their_own(over: str) -> None:
    """Nothing of a cell is cached before it; only the requests of a batch have one salt, so that they may be fused."""
    cells = make_cells([over], [4], [0.5, 0.95], [], [3])
    with chatting(FakeChat(answer)) as fake:
        rows = rows_of(fake, cells)
    asked = [body for body in fake.received if body.get("joint")]
    assert [body["joint"]["threshold"] for body in asked] == [0.5] * 3 + [0.95] * 3
    assert len({body["cache_salt"] for body in asked}) == (2 if over == "batch" else 6)
    others = [body["cache_salt"] for body in fake.received if not body.get("joint")]
    assert len(set(others)) == len(others) == 3 + (2 if over == "batch" else 0), (
        "full prefills, and what a batch waits for"
    )
    assert not {body["cache_salt"] for body in asked} & set(others)
    joint = [row for _, row in rows if row["arm"] == JOINT]
    assert [(row["metrics"]["em"], row["metrics"]["same"]) for row in joint] == [(0.0, 0.0)] * 3 + [(1.0, 1.0)] * 3
    assert len({key for key, _ in rows}) == len(rows) == 3 + 6
    assert rows[-1][0] == mode_of(cells).key(JOINT, make_test_case(name="t:2").request, *label_of(cells[-1]))


def test_batches_are_of_the_cells_size() -> None:
    """Each is opened by a request of another tenant, and has a salt of its own; a rest of one waits for nobody."""
    cells = make_cells(["batch"], [4], [0.5], [], [2, 3])
    with chatting(FakeChat(answer)) as fake:
        rows = rows_of(fake, cells)
    salts = [body["cache_salt"] for body in fake.received if body.get("joint")]
    assert [salts.count(salt) for salt in dict.fromkeys(salts)] == [2, 1, 3]
    assert all("batch" not in body["joint"] for body in fake.received if body.get("joint"))
    assert len(fake.received) == 3 + 6 + 2, "full prefills, answers, and what two batches wait for"
    assert [row["cell"]["batch"] for _, row in rows if row["arm"] == JOINT] == [2] * 3 + [3] * 3


def test_compression_counts_each_block_once() -> None:
    """The two answers of a batch have the figures of both; by hand 2 x 8 blocks of 2 layers, 12 and 8 left."""
    alone = {"requests": 1, "blocks": 8, "shared": [8, 8], "ms": 1.0}
    both = {"requests": 2, "blocks": 16, "shared": [12, 8], "ms": 3.0}
    assert fused_of([both, both]) == {"compression": 1.6, "together": 2.0, "encode_ms": 3.0}
    assert fused_of([both, both, alone])["compression"] == pytest.approx(48 / 36, abs=1e-4)
    assert fused_of([]) == {}


def test_figures_have_compression_beside_answers() -> None:
    """A row a cell, and the difference from full prefill on the same questions."""
    cells = make_cells(["chunks"], [4], [0.5], [], [])
    with chatting(FakeChat(answer)) as fake:
        rows = [row for _, row in rows_of(fake, cells)]
    results = mode_of(cells).figures(rows)
    (row,) = results["tables"][0]["rows"]
    assert row.items() >= {"over": "chunks", "block": 4, "threshold": 0.5, "compression": 1.3333, "same": 0.0}.items()
    assert row["encode_ms"] == 2.0
    (found,) = [each for each in results["contrasts"] if each["metric"] == "em"]
    assert (found["a"], found["b"], found["value"]) == ("full-prefill", "joint", -1.0)
    assert mode_of(cells).figures([])["tables"] == []


def test_encoding_that_failed_ends_the_run() -> None:
    """Its answer would count as one that fusing does not change."""

    class Failing(FakeChat):
        def _info(self, body: Body, *rest: Any) -> Body:
            return super()._info(body, *rest) | {"fallbacks": ["joint_failed"] if body.get("joint") else []}

    with chatting(Failing(answer)) as fake, pytest.raises(CommandError, match=r"t:0: .*joint_failed"):
        rows_of(fake, make_cells(["chunks"], [4], [0.5], [], []))


@pytest.mark.parametrize(
    "argv",
    [["--thresholds", "1.5"], ["--ratios", "1"], ["--blocks", "0"], ["--batch", "0"], ["--worlds", "0"]],
    ids=" ".join,
)
def test_options_out_of_range_are_refused(argv: list[str]) -> None:
    """By the command, before a server starts."""
    with pytest.raises(CommandError, match=argv[0]):
        JointCurves(options(*argv))


def test_a_job_is_a_batch() -> None:
    """The largest, of the world's questions; its key is that of its last sample."""
    mode = JointCurves(options("--requests", "5", "--batch", "2", "--blocks", "8", "--ratios", "--thresholds", "0.5"))
    ((arms, jobs),) = mode.stages()
    assert [arm.name for arm in arms] == [JOINT]
    assert len(jobs) == 3
    assert jobs[-1].key.endswith("over=batch/batch=2/block=8/threshold=0.5")
