"""The model of time beside what an H200 took, by the records of 2026-11-26: the code as it was
then, FlashInfer without CUDA graphs, times over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.machines import (
    ATTENTION_SHARE,
    BUS_SHARE,
    MACHINES,
    MEMORY_SHARE,
    SCATTERED_SHARE,
    SHAPES,
)
from eval.outcome import Row, table
from eval.roofline.build import BUILT, REVIEWED
from eval.roofline.model import Model, Prompt, scattered_pairs
from eval.run import read_record

MEASURED_ON = ("llama-3.1-8b", "h200")
RESULTS = Path(__file__).parents[1] / "results"
REUSE, ATTENTION, RELOCATE = (
    f"2026-11-26T040{name}-h200" for name in ("8-reuse", "8-attention", "7-relocate")
)
TOKENS, RATIO = 8000, 0.15
BUILT_THEN = BUILT._replace(
    load_s=REVIEWED.load_s,
    load_launches=0,
    chunk_launches=REVIEWED.chunk_launches,
    has_extend=True,
    piece_tokens=819,  # as many as are proposed of 2,048
    choose_s=((2048, 0.6e-3), (8192, 1.6e-3), (32_768, 7.1e-3)),
)
"""Chunks were loaded one by one, SGLang ran the question, pieces were of the region, and the host
chose."""
TILE_ROWS = 128
"""Of FlashAttention-3 with heads of 128."""


def compared() -> Row:
    """A table: a figure, its record's milliseconds or rate, the model's, and model / measured."""
    found = [*_reuse(), *_attention(), *_relocate()]
    rows = [
        {
            "figure": name,
            "measured": f"{measured:.4g}",
            "model": f"{modelled:.4g}",
            "model / measured": f"{modelled / measured:.2f}",
        }
        for name, measured, modelled in found
    ]
    note = (
        f"Records: {REUSE}, {ATTENTION}, {RELOCATE}. Requests are given above the exact arm, which"
        " prefills the question alone: HTTP, tokenizing and scheduling are in neither."
    )
    return table("Beside an H200's records", rows, note)


Found = tuple[str, float, float]


def _rows(name: str, title: str) -> list[dict[str, Any]]:
    tables = read_record(RESULTS / name)["results"]["tables"]
    return next(each["rows"] for each in tables if each["title"] == title)


def _reuse() -> list[Found]:
    arms = {row["arm"]: row for row in _rows(REUSE, f"{TOKENS} tokens: time to first token")}
    full_s = arms["full"]["median (s)"]
    shape, machine = MEASURED_ON
    model = Model(MACHINES[machine], SHAPES[shape], BUILT_THEN)
    prompt = Prompt(TOKENS, RATIO)
    steps = model.steps(prompt)

    def above(arm: str) -> float:
        return float(1e3 * (arms[arm]["median (s)"] - arms["exact"]["median (s)"]))

    def phase(name: str, source: str = "device") -> float:
        return float(1e3 * full_s * arms[f"critical/{source}/{RATIO:g}"][name])

    extend_s = steps["extend"].seconds
    chosen_s = sum(steps[each].seconds for each in ("question", "deviation", "choose"))
    length = f"{TOKENS:,} tokens"
    return [
        (f"{length}, prefill: ms", above("full"), 1e3 * (model.full(prompt).seconds - extend_s)),
        (
            f"{length}, moved on the device: ms",
            above(f"critical/device/{RATIO:g}"),
            1e3 * (model.device_s(steps) - extend_s),
        ),
        (
            f"{length}, moved from host memory: ms",
            above(f"critical/host/{RATIO:g}"),
            1e3 * (model.host_s(steps) - extend_s),
        ),
        ("host, copy: ms", phase("relocate"), 1e3 * steps["copy"].host_s),
        ("host, load queued: ms", phase("relocate", "host"), 1e3 * steps["load"].host_s),
        ("host, evidence and choice: ms", phase("select"), 1e3 * chosen_s),
        ("host, recompute pass queued: ms", phase("recompute"), 1e3 * steps["recompute"].host_s),
    ]


def _attention() -> list[Found]:
    shape, machine = SHAPES[MEASURED_ON[0]], MACHINES[MEASURED_ON[1]]
    layer_s = shape.pair_flops / shape.num_layers / machine.flops
    found = []
    for row in _rows(ATTENTION, "Times"):
        if (row["pattern"], row["ratio"]) != ("scattered", RATIO):
            continue
        context = row["context"]
        dense_s = layer_s * context * context / 2 / ATTENTION_SHARE
        pairs = scattered_pairs(context, int(RATIO * context), TILE_ROWS)
        scattered_s = layer_s * pairs / SCATTERED_SHARE
        name = f"a layer's attention at {context:,}"
        found.append((f"{name}, dense FA3: ms", row["dense_fa3"], 1e3 * dense_s))
        found.append((f"{name}, {RATIO:.0%}, FA3: ms", row["fa3"], 1e3 * scattered_s))
    return found


def _relocate() -> list[Found]:
    rows = {
        (row["tokens"], row["slots"], row["arm"]): row["GB/s"]
        for row in _rows(RELOCATE, "Rates of moving KV")
    }
    machine = MACHINES[MEASURED_ON[1]]
    device, bus = machine.memory_bytes_s * MEMORY_SHARE, machine.bus_bytes_s * BUS_SHARE
    at = (4096, "scattered")
    return [
        ("4,096 tokens moved: GB/s", rows[*at, "move/kernel"], device / 1e9),
        # counted as read and written
        ("4,096 tokens loaded: GB/s", rows[*at, "load/pinned"] / 2, bus / 1e9),
    ]
