"""Filling promised slots on real SGLang models: everything recomputed is a prefill, and what is not
chosen stays as moved.

    elsewhere   head | C | A | E | B                     computed there; A and C stay on the device, B and E are stored
    prompt      head | A | B | text | C | D | E | question    D and the text are gaps

Promised slots hold NaN before, so a test sees code that reads one too early or forgets to write
one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch
from torch import Tensor

from radix_ext import ChunkId, FusionRequest
from radix_ext.cfo import Scored
from radix_ext.fusion_request import Focus, question_tokens
from radix_ext.moved_plan import Piece, ReusePlan
from radix_ext.sources import DeviceCopy, HostCopy
from radix_ext.variants import Variant
from sglang_chunkcache import config
from sglang_chunkcache.attention.base import HeadShape
from sglang_chunkcache.attention.reference import ReferenceAttention
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.fusion import fill as fusion_pass
from sglang_chunkcache.fusion import selectors
from sglang_chunkcache.fusion.fill import Capture, FusionPass
from sglang_chunkcache.fusion.measure import question_evidence
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.recompute import run_virtual
from sglang_chunkcache.fusion.relocate import RotaryTable, copy_moved
from sglang_chunkcache.fusion.selectors import focus
from sglang_chunkcache.fusion.store import HostBlob
from sglang_chunkcache.own_selectors import own_needs
from sglang_chunkcache.scheduler.node import facts
from tests import models
from tests.models import FAMILIES, kv_of, logits_of, make_row, prefill

pytestmark = pytest.mark.engine

TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 24 * 2**-7}
"""As in test_recompute.py, and a key that goes by way of the store is rounded twice more."""
LENS = {"head": 5, "A": 30, "B": 20, "text": 4, "C": 25, "D": 15, "E": 20}
PROMPT = ("head", "A", "B", "text", "C", "D", "E")
ELSEWHERE = ("head", "C", "A", "E", "B")
SPANS = ("A", "B", "C", "D", "E")
QUESTION_LEN = 8
MOVED_LEN = sum(LENS[name] for name in "ABCE")
GAP_LEN = LENS["text"] + LENS["D"]
SELECTORS = ("first", "random", "h2o", "deviation", "query", "prophet", "context")
REFERENCE, SOURCE, TARGET = (torch.arange(start, start + 300) for start in (1, 401, 801))
_GENERATOR = torch.Generator().manual_seed(7)
TOKENS = {
    name: torch.randint(0, 128, (length,), generator=_GENERATOR).tolist()
    for name, length in {**LENS, "question": QUESTION_LEN}.items()
}


def place(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """`[start, end)` of every part."""
    places, start = {}, 0
    for name in names:
        places[name] = (start, start + len(TOKENS[name]))
        start += len(TOKENS[name])
    return places


def tokens_of(names: Sequence[str]) -> list[int]:
    return [token for name in names for token in TOKENS[name]]


HERE, THERE = place(PROMPT), place(ELSEWHERE)
END = HERE["E"][1]


class Scene:
    """One model with its pool as drawn above."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.config = ChunkCacheConfig(
            reuse="fused", recompute_attention="masked", selectors="eval.selectors"
        )
        table = RotaryTable.of(runner.model.model.layers[0].self_attn.rotary_emb)
        self.fusion_pass = FusionPass(runner, table, self.config)
        self.logits = prefill(
            runner, tokens_of((*PROMPT, "question")), REFERENCE[: END + QUESTION_LEN]
        )
        prefill(runner, tokens_of(ELSEWHERE), SOURCE[: THERE["B"][1]])
        self.sources: dict[str, Any] = {}
        for name in "AC":
            start, end = THERE[name]
            node = SimpleNamespace(value=SOURCE[start:end])
            facts(node).start, facts(node).prefix = start, self.prefix_there(name)
            self.sources[name] = DeviceCopy(node, facts(node))
        captured = self.fusion_pass.capture([self.capture(name) for name in "BE"])
        for name, each in zip("BE", captured, strict=True):
            self.sources[name] = HostCopy(Variant(self.prefix_there(name), *each.read()))

    def prefix_there(self, name: str) -> tuple[ChunkId, ...]:
        return tuple(ChunkId(each) for each in ELSEWHERE[1 : ELSEWHERE.index(name)])

    def capture(self, name: str) -> Capture:
        start, end = THERE[name]
        before = ELSEWHERE[1 : ELSEWHERE.index(name)]
        prefix = tuple(THERE[each] for each in before)
        return Capture(
            array("q", tokens_of(ELSEWHERE)[:end]), SOURCE[:end], start, prefix, Scored.ALL
        )

    def move(
        self, reuse: FusionRequest, *, target: Tensor = TARGET, row: int = 1, question: bool = True
    ) -> Move:
        """The promised region, NaN so far, after the head of the reference."""
        slots = torch.cat([REFERENCE[: LENS["head"]], target[LENS["head"] : END]])
        for buffer in (
            *self.runner.token_to_kv_pool.k_buffer,
            *self.runner.token_to_kv_pool.v_buffer,
        ):
            buffer[slots[LENS["head"] :]] = float("nan")
        make_row(self.runner, torch.cat([slots, target[END : END + QUESTION_LEN]]), index=row)
        pieces = []
        for name in PROMPT[1:]:
            index = SPANS.index(name) if name in SPANS else None
            source = self.sources.get(name)
            chunk = ChunkId(name) if index is not None else None
            before = tuple(ChunkId(each) for each in SPANS[:index]) if index is not None else ()
            pieces.append(Piece(*HERE[name], index, source, chunk, before if source else ()))
        return Move(
            plan=ReusePlan(tuple(pieces)),
            fusion=reuse,
            slots=slots,
            token_ids=array("q", tokens_of(PROMPT)),
            question_ids=array("q", TOKENS["question"] if question else []),
            question_start=END,
            row_index=lambda: row,
        )

    def answer(self, row: int = 1) -> Tensor:
        """The last token's logits after what was filled."""
        ids = tokens_of((*PROMPT, "question"))
        return logits_of(
            self.runner,
            run_virtual(self.runner, req_pool_index=row, runs=[(END, len(ids))], token_ids=ids),
        )[-1]

    def kv(self, slots: Tensor) -> Tensor:
        """[2, num_layers, n, num_kv_heads, head_dim]."""
        return torch.stack(kv_of(self.runner, slots))

    def assert_close(self, got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCES[self.runner.dtype])


MODELS = [
    *((family, "float32") for family in FAMILIES),
    ("llama", "bfloat16"),
    ("qwen3_yarn", "bfloat16"),
]


def every_model(*selectors: str) -> pytest.MarkDecorator:
    """Every selector on one model, and one selector on one model of each kind;
    all on all nightly."""

    def marks(model: tuple[str, str], selector: str) -> Any:
        is_one_of_each = model[0] == "stablelm" or model in (
            ("qwen3_yarn", "float32"),
            ("llama", "bfloat16"),
        )
        by_default = model == MODELS[0] or (is_one_of_each and selector == selectors[0])
        return () if by_default else pytest.mark.nightly

    cases = [
        pytest.param(model, selector, marks=marks(model, selector), id="-".join((*model, selector)))
        for model in MODELS
        for selector in selectors
    ]
    return pytest.mark.parametrize(("scene", "selector"), cases, indirect=["scene"])


@pytest.fixture(scope="module")
def make_scene() -> Callable[[str, str], Scene]:
    """What a scene leaves in the pool stays until another file's tests take it."""
    return cache(lambda family, dtype: Scene(models.runner(family, dtype)))


@pytest.fixture(params=[pytest.param(MODELS[0], id="-".join(MODELS[0]))])
def scene(
    request: pytest.FixtureRequest, make_scene: Callable[[str, str], Scene]
) -> Iterator[Scene]:
    """One family, for what does not depend on it."""
    scene = make_scene(*request.param)
    yield scene
    models.assert_given_back(scene.runner)


def asked(selector: str, ratio: float, **fields: Any) -> FusionRequest:
    return FusionRequest(
        selector, ratio, "recipe", own_needs=own_needs(selector, "eval.selectors"), **fields
    )


def offsets_of(names: Sequence[str]) -> Tensor:
    """Positions of parts in the prompt."""
    return torch.cat([torch.arange(*HERE[name]) for name in names])


# Everything, nothing


@every_model("query", "first", "random", "h2o", "deviation", "context")
def test_everything_recomputed_is_a_prefill(scene: Scene, selector: str) -> None:
    """From device and host, over gaps: the KV of all layers and the next token."""
    move = scene.move(asked(selector, 1.0))
    scene.fusion_pass.run([move])
    scene.assert_close(scene.kv(move.slots), scene.kv(REFERENCE[:END]))
    scene.assert_close(scene.answer(), scene.logits)
    assert move.recomputed_len == MOVED_LEN
    assert move.fallbacks == []


@every_model("none", "first")
def test_nothing_recomputed_is_moved_alone(scene: Scene, selector: str) -> None:
    """Layer 0 sees no context, so it is as prefilled, everywhere;
    above, chunks bring what they saw elsewhere."""
    move = scene.move(asked(selector, 0.0))
    scene.fusion_pass.run([move])
    got, full = scene.kv(move.slots), scene.kv(REFERENCE[:END])
    scene.assert_close(got[:, 0], full[:, 0])
    for name in "ABCE":
        here, there = torch.arange(*HERE[name]), torch.arange(*THERE[name])
        assert torch.equal(got[1][:, here], scene.kv(SOURCE[there])[1])
    assert float((got - full).abs().max()) > 10 * TOLERANCES[scene.runner.dtype]
    assert move.recomputed_len == 0
    assert scene.answer().isfinite().all()


# Some


@pytest.mark.parametrize("selector", SELECTORS)
def test_only_what_is_chosen_changes(scene: Scene, selector: str) -> None:
    """As many tokens as asked are new; the others keep the moved KV to the bit."""
    untouched = scene.move(asked("none", 0.0))
    scene.fusion_pass.run([untouched])
    before = scene.kv(untouched.slots)
    move = scene.move(asked(selector, 0.3))
    scene.fusion_pass.run([move])
    changed = (scene.kv(move.slots) != before).flatten(3).any(-1).any(0).any(0)
    moved = torch.zeros(END, dtype=torch.bool)
    moved[offsets_of("ABCE")] = True
    num_chosen = int((changed & moved).sum())
    assert num_chosen == move.recomputed_len
    assert math.ceil(0.3 * MOVED_LEN) <= num_chosen <= math.ceil(0.3 * MOVED_LEN) + 3
    assert not changed[: LENS["head"]].any()


@pytest.mark.parametrize("selector", SELECTORS)
def test_all_attentions_agree(scene: Scene, selector: str) -> None:
    """The mask and the sparse attention. Both equal SGLang's own: test_recompute.py."""
    reuse = asked(selector, 0.3)
    working = scene.move(reuse)
    scene.fusion_pass.run([working])
    got, answer = scene.kv(working.slots), scene.answer()
    again = scene.move(reuse)
    sparse_pass(scene).run([again])
    scene.assert_close(scene.kv(again.slots), got)
    scene.assert_close(scene.answer(), answer)
    assert again.recomputed_len == working.recomputed_len
    assert again.fallbacks == working.fallbacks


@every_model("first")
def test_everything_recomputed_sparsely_is_a_prefill(scene: Scene, selector: str) -> None:
    """As with the mask: ratio 1 is no approximation."""
    sparse = sparse_pass(scene)
    move = scene.move(asked(selector, 1.0))
    sparse.run([move])
    scene.assert_close(scene.kv(move.slots), scene.kv(REFERENCE[:END]))
    scene.assert_close(scene.answer(), scene.logits)
    assert move.fallbacks == []
    assert sparse.sparse.num_runs == sparse.pool.layer_num  # type: ignore[union-attr]


class Counting(ReferenceAttention):
    """`ReferenceAttention` that counts its layers and fails where told to."""

    num_runs = 0
    fails: str = ""

    def plan(self, requests: Any) -> None:
        if self.fails == "plan":
            raise RuntimeError("no workspace")
        super().plan(requests)

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.num_runs += 1
        if self.fails == "run" and self.num_runs == 2:
            raise RuntimeError("launch failed")
        return super().run(queries, keys, values)


def sparse_pass(scene: Scene, fails: str = "") -> FusionPass:
    layer = scene.runner.model.model.layers[0].self_attn.attn
    shape = HeadShape(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, scene.runner.dtype)
    attention = Counting(shape, scale=layer.scaling)
    attention.fails = fails
    chosen = {"kind": "sparse", "kernel": "reference", "reason": "a test", "ms": {}}
    return FusionPass(scene.runner, scene.fusion_pass.table, scene.config, (attention, chosen))


def replace_config(scene: Scene, **changes: Any) -> FusionPass:
    return FusionPass(scene.runner, scene.fusion_pass.table, replace(scene.config, **changes))


def test_requests_of_a_batch_do_not_mix(scene: Scene) -> None:
    """Three requests with policies of their own, together and one by one."""
    policies = [asked("query", 0.25), asked("deviation", 0.5), asked("none", 0.0)]
    alone = []
    for reuse in policies:
        move = scene.move(reuse)
        scene.fusion_pass.run([move])
        alone.append(scene.kv(move.slots))
    moves = [
        scene.move(reuse, target=torch.arange(801 + 300 * i, 1101 + 300 * i), row=2 + i)
        for i, reuse in enumerate(policies)
    ]
    scene.fusion_pass.run(moves)
    for move, expected in zip(moves, alone, strict=True):
        scene.assert_close(scene.kv(move.slots), expected)


def test_focus_spares_the_other_chunks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only chunks that the question looks at are recomputed; they are named by their span."""
    monkeypatch.setattr(focus, "focused_chunks", lambda by_layer, window: ({1, 3}, 0))
    move = scene.move(asked("first", 0.5, focus="spare"))
    scene.fusion_pass.run([move])
    assert move.focused == [SPANS.index("B"), SPANS.index("E")]
    chosen = {name: len(chosen_of(scene, move, name)) for name in "ABCE"}
    assert chosen == {"A": 0, "B": LENS["B"] // 2, "C": 0, "E": LENS["E"] // 2}
    assert move.recomputed_len == sum(chosen.values())


def test_focus_window_is_no_longer_than_the_model(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most the model's layers."""
    windows: list[int] = []

    def focused_chunks(by_layer: Tensor, window: int) -> tuple[set[int], None]:
        windows.append(window)
        return set(range(by_layer.shape[1])), None

    monkeypatch.setattr(focus, "focused_chunks", focused_chunks)
    for window in (2, 50):
        monkeypatch.setattr(focus, "WINDOW", window)
        scene.fusion_pass.run([scene.move(asked("first", 0.5, focus="spare"))])
    assert windows == [2, models.NUM_LAYERS]


def test_focus_is_asked_for(scene: Scene) -> None:
    """Without it no chunk is named; with it the model's own attention decides."""
    plain, focused = (
        scene.move(asked("first", 0.5)),
        scene.move(asked("first", 0.5, focus="spare"), row=2),
    )
    scene.fusion_pass.run([plain])
    scene.fusion_pass.run([focused])
    assert plain.focused is None
    assert focused.focused
    assert set(focused.focused) <= {SPANS.index(name) for name in "ABCE"}


def chosen_of(scene: Scene, move: Move, name: str) -> list[int]:
    """Positions of a chunk whose KV is not the moved one."""
    there, here = (
        scene.kv(slots)[1]
        for slots in (SOURCE[slice(*THERE[name])], move.slots[slice(*HERE[name])])
    )
    return [HERE[name][0] + int(i) for i in (there != here).flatten(2).any(-1).any(0).nonzero()]


# What the selectors are told


def test_without_a_question_the_fallback_is_named(scene: Scene) -> None:
    move = scene.move(asked("query", 0.3), question=False)
    scene.fusion_pass.run([move])
    assert "no_question" in move.fallbacks
    assert scene.kv(move.slots).isfinite().all()


def test_the_end_of_a_long_question_stands_for_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last tokens, at their own positions; gaps are not looked at."""
    probes: list[Any] = []

    def spy(runner: Any, requests: Sequence[Any]) -> Any:
        probes.extend(requests)
        return question_evidence(runner, requests)

    monkeypatch.setattr(fusion_pass, "question_evidence", spy)
    replace_config(scene, question_window=3).run(
        [scene.move(asked("query", 0.3)), scene.move(asked("h2o", 0.3), row=2)]
    )
    (probe,) = probes
    assert probe.token_ids.tolist() == TOKENS["question"][-3:]
    assert probe.positions.tolist() == [END + 5, END + 6, END + 7]
    gaps = set(offsets_of(["text", "D"]).tolist())
    assert probe.kv_positions.tolist() == [p for p in range(END) if p not in gaps]
    assert probe.chunks == tuple(HERE[name] for name in "ABCE")
    assert not probe.in_all_layers
    replace_config(scene, question_window=QUESTION_LEN + 1).run(
        [scene.move(asked("first", 0.3, focus="spare"))]
    )
    assert probes[-1].token_ids.tolist() == TOKENS["question"]
    assert probes[-1].positions[0] == END
    assert probes[-1].in_all_layers


@pytest.mark.parametrize("selector", [*config.SELECTORS, "prophet"])
@pytest.mark.parametrize("focus", ["off", "spare"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_the_question_pass_is_as_long_as_is_told(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, selector: str, focus: Focus, ratio: float
) -> None:
    """What a cost model counts is what runs."""
    lens: list[int] = []

    def spy(runner: Any, requests: Sequence[Any]) -> Any:
        lens.extend(len(request.token_ids) for request in requests)
        return question_evidence(runner, requests)

    monkeypatch.setattr(fusion_pass, "question_evidence", spy)
    reuse = asked(selector, ratio, focus=focus)
    for window in (3, QUESTION_LEN, 100):
        lens.clear()
        replace_config(scene, question_window=window).run([scene.move(reuse)])
        assert sum(lens) == question_tokens(reuse, QUESTION_LEN, window=window)
        assert sum(lens) in (0, min(window, QUESTION_LEN))


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_nothing_is_measured_where_nothing_is_chosen(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    """Extreme ratios cost no evidence."""
    asked_for: list[int] = []

    def spy(runner: Any, requests: Sequence[Any]) -> list[Any]:
        asked_for.append(len(requests))
        return []

    monkeypatch.setattr(fusion_pass, "question_evidence", spy)
    monkeypatch.setattr(fusion_pass, "deviation_evidence", spy)
    scene.fusion_pass.run(
        [scene.move(asked("query", ratio)), scene.move(asked("deviation", ratio), row=2)]
    )
    assert sum(asked_for) == 0


# What goes wrong


@pytest.mark.parametrize(
    "name", ["copy_moved", "BlobTarget", "question_evidence", "run_pass", "selectors"], ids=str
)
def test_a_failing_pass_computes_everything(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Wherever it fails, the batch is prefilled as usual, and each answer says so."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken")

    if name == "selectors":
        monkeypatch.setattr(selectors, "get", fail)
    else:
        monkeypatch.setattr(fusion_pass, name, fail)
    moves = [
        scene.move(asked("query", 0.3)),
        scene.move(asked("none", 0.0), target=TARGET + 300, row=2),
    ]
    scene.fusion_pass.run(moves)
    for row, move in enumerate(moves, 1):
        scene.assert_close(scene.kv(move.slots), scene.kv(REFERENCE[:END]))
        scene.assert_close(scene.answer(row), scene.logits)
        assert move.fallbacks == ["pass_failed"]
        assert move.recomputed_len == MOVED_LEN
        assert set(move.ms) == {"relocate", "select", "recompute"}
        assert move.filling is None, "of two together"


def test_a_pass_without_a_plan_is_masked(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is written yet, so nothing is lost:
    the same tokens by the mask, counted each time and logged once."""
    masked = scene.move(asked("first", 0.3))
    scene.fusion_pass.run([masked])
    expected = scene.kv(masked.slots)
    failing = sparse_pass(scene, "plan")
    for _ in range(2):
        move = scene.move(asked("first", 0.3))
        failing.run([move])
        scene.assert_close(scene.kv(move.slots), expected)
        assert move.fallbacks == []
    assert failing.stats()["attention"] == {
        "kind": "sparse",
        "kernel": "reference",
        "reason": "a test",
        "ms": {},
        "fallbacks": 2,
    }
    assert (
        len(
            [
                record
                for record in caplog.records
                if "no plan for sparse attention" in record.message
            ]
        )
        == 1
    )


def test_a_sparse_layer_that_fails_computes_everything(scene: Scene) -> None:
    """In the middle of the model: some layers hold new K/V,
    so all of the region is computed again."""
    failing = sparse_pass(scene, "run")
    move = scene.move(asked("first", 0.3))
    failing.run([move])
    scene.assert_close(scene.kv(move.slots), scene.kv(REFERENCE[:END]))
    scene.assert_close(scene.answer(), scene.logits)
    assert move.fallbacks == ["pass_failed"]
    assert failing.stats()["attention"]["fallbacks"] == 0


def test_an_unknown_tier_computes_everything(scene: Scene) -> None:
    """A source that no tier can read is an error of ours, not a wrong answer."""
    move = scene.move(asked("none", 0.0))
    odd = SimpleNamespace(where="tape", prefix=(), scores=None, outward=None, preprocessed=False)
    pieces = tuple(replace(p, source=odd) if p.chunk == "A" else p for p in move.plan.pieces)
    move.plan = ReusePlan(pieces)
    scene.fusion_pass.run([move])
    assert move.fallbacks == ["pass_failed"]
    scene.assert_close(scene.answer(), scene.logits)


# For the store, and for the stats


def test_captures_are_scored_as_asked(scene: Scene) -> None:
    """Scores say what came before; the copy is the source's KV."""
    counting, capture = replace_config(scene), scene.capture("E")
    plain, masses, everything = (replace(capture, scored=scored) for scored in Scored)
    (each,) = counting.capture([plain])
    assert each.is_done()
    blob, scores = each.read()
    assert scores is None
    assert blob.num_tokens == LENS["E"]
    assert torch.equal(blob.read()[1], scene.kv(SOURCE[slice(*THERE["E"])])[1])
    assert counting.stats()["tokens"] == {}
    for asked_for in (masses, everything):
        (each,) = counting.capture([asked_for])
        again, scores = each.read()
        assert torch.equal(again.read()[0], blob.read()[0])
        assert scores is not None
        assert scores.prefix_lens == (LENS["C"], LENS["A"])
        assert scores.scored is asked_for.scored


def assert_moved(scene: Scene, coding: FusionPass, blob: HostBlob) -> None:
    """With this as E's source the pool gets what it stands for, values bit by bit."""
    kept = scene.sources["E"]
    scene.sources["E"] = HostCopy(Variant(kept.prefix, blob))
    try:
        coding.run([scene.move(asked("none", 0.0))])
        assert torch.equal(scene.kv(TARGET[slice(*HERE["E"])])[1], blob.read()[1])
    finally:
        scene.sources["E"] = kept


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_a_codec_keeps_is_what_is_moved(scene: Scene, name: str) -> None:
    """Few bits in the store; in the pool what they stand for, values bit by bit.
    The server tells how far that may be off."""
    coding = replace_config(scene, store_codec=name)
    (each,) = coding.capture([scene.capture("E")])
    blob, _ = each.read()
    plain = scene.sources["E"].variant.blob
    assert blob.nbytes == coding.stored_token_bytes * LENS["E"] < 0.8 * plain.nbytes
    told = coding.stats()["codec"]
    assert told["name"] == name
    for mine, exact in zip(blob.read(), plain.read(), strict=True):
        off = (mine.double() - exact.double()).abs() / exact.double().abs().amax(-1, keepdim=True)
        assert 0 < float(off.max()) <= told["max_error"] * (1 + 1e-5)
    assert_moved(scene, coding, blob)


def test_what_was_scored_is_not_scored_again(scene: Scene) -> None:
    """Scoring costs a prefill of the chunk, so a node keeps what was measured;
    what is missing is measured with the rest."""
    counting = replace_config(scene)
    masses = replace(scene.capture("B"), scored=Scored.MASSES)
    _, scores = counting.capture([masses])[0].read()
    known = replace(masses, scores=scores)
    assert counting.capture([known])[0].read()[1] is scores
    assert counting.capture([replace(known, scored=Scored.NOTHING)])[0].read()[1] is scores
    assert counting.stats()["tokens"]["scored"] == LENS["B"]
    _, more = counting.capture([replace(known, scored=Scored.ALL)])[0].read()
    assert more is not None
    assert more.scored is Scored.ALL
    assert counting.stats()["tokens"]["scored"] == 2 * LENS["B"]


def test_a_copy_is_not_what_the_pool_holds_later(scene: Scene) -> None:
    """The node may be evicted before the copy has arrived, and its slots are given to others."""
    capture = scene.capture("E")
    before = scene.kv(SOURCE)
    (each,) = scene.fusion_pass.capture([capture])
    for buffer in (
        *scene.runner.token_to_kv_pool.k_buffer,
        *scene.runner.token_to_kv_pool.v_buffer,
    ):
        buffer[SOURCE[slice(*THERE["E"])]] = float("nan")
    blob, _ = each.read()
    assert torch.equal(blob.read()[1], before[1][:, slice(*THERE["E"])])
    for i, layer in enumerate(range(scene.runner.token_to_kv_pool.layer_num)):
        scene.runner.token_to_kv_pool.k_buffer[layer][SOURCE] = before[0][i]
        scene.runner.token_to_kv_pool.v_buffer[layer][SOURCE] = before[1][i]


def test_moves_within_the_device_wait_for_all_that_is_being_loaded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read all layers, not by the pool's getters, and a source may have come back for a
    request of the same batch."""
    pool, moves = scene.runner.token_to_kv_pool, copy_moved
    loaded: list[int] = []

    def checked(*args: Any, **kwargs: Any) -> None:
        assert pool.layer_num - 1 in loaded
        moves(*args, **kwargs)

    monkeypatch.setattr(pool, "layer_transfer_counter", SimpleNamespace(wait_until=loaded.append))
    monkeypatch.setattr(fusion_pass, "copy_moved", checked)
    move = scene.move(asked("none", 0.0))
    scene.fusion_pass._move([move])
    assert loaded


def test_stats_count_tokens_and_seconds(scene: Scene) -> None:
    counting = replace_config(scene)
    move = scene.move(asked("first", 0.5))
    counting.run([move])
    assert counting.stats()["tokens"] == {
        "moved_device": LENS["A"] + LENS["C"],
        "moved_host": LENS["B"] + LENS["E"],
        "moved_other_head": 0,
        "recomputed": move.recomputed_len,
        "gap": GAP_LEN,
    }
    seconds = counting.stats()["seconds"]
    assert {phase: pytest.approx(1000 * seconds[phase], abs=0.01) for phase in move.ms} == move.ms
    assert all(value > 0 for value in move.ms.values())
    assert move.filling is not None
    assert move.filling.seconds is not None
    assert 1000 * move.filling.seconds >= sum(move.ms.values())
    assert counting.stats()["attention"] == {
        "kind": "masked",
        "kernel": None,
        "reason": "asked for",
        "ms": {},
        "fallbacks": 0,
    }
