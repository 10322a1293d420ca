"""Evidence equals a float64 computation from queries and keys of SGLang's own forward pass,
and leaves the pool as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_chunkcache.attention import masked
from sglang_chunkcache.attention.base import PassSequence, SparseRequest
from sglang_chunkcache.fusion import measure
from sglang_chunkcache.fusion.measure import (
    DeviationProbe,
    QuestionProbe,
    ScoreProbe,
    deviation_evidence,
    question_evidence,
    score_chunks,
    scores_of,
)
from sglang_chunkcache.fusion.recompute import run_extend, run_pass
from sglang_chunkcache.fusion.store import ChunkScores
from tests import models
from tests.examples import examples
from tests.kit.tensors import (
    ATOL,
    CHUNKS,
    NUM_TOKENS,
    OTHERS,
    SLOTS,
    captured,
    make_tokens,
    prefill_weights,
    put_kv,
    runner,
    spoil,
    untouched,
    weights_of,
)
from tests.models import NUM_LAYERS, kv_of, make_row, prefill

PREFIX, END = CHUNKS[0][0], CHUNKS[-1][1]
TOKENS = make_tokens(0, NUM_TOKENS)
__all__ = ["runner"]
ALL = torch.arange(END)


def move_in(runner: Any) -> None:
    """A prompt whose chunks hold the K/V of other tokens, as full reuse leaves them;
    OTHERS is free afterwards."""
    prefill(runner, TOKENS.tolist(), SLOTS)
    prefill(runner, make_tokens(9, NUM_TOKENS).tolist(), OTHERS)
    put_kv(runner, SLOTS[PREFIX:END], kv_of(runner, OTHERS[PREFIX:END]))


def question_of(
    visible: Tensor = ALL, chunks: Any = CHUNKS, tokens: Tensor = TOKENS, **options: Any
) -> QuestionProbe:
    positions, options = torch.arange(END, NUM_TOKENS), {"in_all_layers": True, **options}
    return QuestionProbe(tokens[END:], positions, SLOTS[visible], visible, chunks, END, **options)


def deviation_of(chunks: Any = CHUNKS, **options: Any) -> DeviationProbe:
    return DeviationProbe(TOKENS[PREFIX:END], SLOTS[:END], chunks, **options)


def differences(runner: Any, layer: int) -> Tensor:
    """Of each position, between KV of SGLang's own prefill and the pool's, in float64."""
    prefill(runner, TOKENS.tolist(), OTHERS)
    pairs = zip(kv_of(runner, OTHERS), kv_of(runner, SLOTS), strict=True)
    return sum(  # type: ignore[return-value]
        (fresh[layer, :END].double() - held[layer, :END].double()).square().sum((1, 2))
        for fresh, held in pairs
    )


def ask(runner: Any, requests: list[QuestionProbe]) -> list[tuple[Tensor, Tensor]]:
    """The evidence of questions that ask for every layer."""
    evidence = question_evidence(runner, requests)
    return [(last, by_layer) for last, by_layer in evidence if by_layer is not None]


def score(runner: Any, probes: list[ScoreProbe]) -> list[ChunkScores]:
    sums = score_chunks(runner, probes)
    return [scores_of(probe, each.cpu()) for probe, each in zip(probes, sums, strict=True)]


@contextmanager
def weighed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Keys of every sequence and layer whose attention weights exist meanwhile."""
    found: list[int] = []
    weights = masked.SequenceAttention.weights

    def spy(attention: masked.SequenceAttention) -> Any:
        found.append(len(attention.keys))
        return weights(attention)

    with monkeypatch.context() as patch:
        patch.setattr(masked.SequenceAttention, "weights", spy)
        yield found


@pytest.mark.parametrize("weight_bytes", [1, pytest.param(128 << 20, marks=pytest.mark.nightly)])
def test_question_evidence_is_the_questions_attention(
    runner: Any, monkeypatch: pytest.MonkeyPatch, weight_bytes: int
) -> None:
    """Softmax over all that is seen, the question included; nothing but moved tokens counts."""
    monkeypatch.setattr(masked, "WEIGHT_BYTES", weight_bytes)
    move_in(runner)
    cases = (TOKENS, CHUNKS), (make_tokens(1, NUM_TOKENS), CHUNKS[1:2])
    with untouched(runner):
        evidence = ask(runner, [question_of(ALL, chunks, tokens) for tokens, chunks in cases])
    # The oracle writes the question's K/V after the chunks.
    for (question, chunks), (last, by_layer) in zip(cases, evidence, strict=True):
        prompt = [*TOKENS[:END].tolist(), *question[END:].tolist()]
        with captured(runner) as queries:
            row = make_row(runner, SLOTS)
            run_extend(runner, row, prompt, END, NUM_TOKENS)
        weights = weights_of(runner, queries, SLOTS, torch.arange(END, NUM_TOKENS))
        expected = torch.zeros(END, dtype=torch.float64)
        for start, end in chunks:
            expected[start:end] = weights[-1, :, :, start:end].sum((0, 1))
        per_chunk = torch.stack([weights[..., a:b].sum((1, 2, 3)) for a, b in chunks], 1)
        assert last.dtype == by_layer.dtype == torch.float32
        torch.testing.assert_close(last.double(), expected, rtol=0, atol=ATOL)
        torch.testing.assert_close(by_layer.double(), per_chunk, rtol=0, atol=ATOL)
        assert last[:PREFIX].count_nonzero() == 0


def test_question_evidence_leaves_gaps_out(runner: Any) -> None:
    """A missing chunk gets no mass, whatever its slots hold, and the others share all of it."""
    move_in(runner)
    probe = question_of(torch.tensor([*range(22), *range(27, END)]), (CHUNKS[0], CHUNKS[2]))
    [(last, by_layer)] = ask(runner, [probe])
    runner.token_to_kv_pool.get_key_buffer(0)[SLOTS[22:27]] = float("nan")
    [(again, _)] = question_evidence(runner, [probe])
    assert torch.equal(last, again)
    assert last[22:27].count_nonzero() == 0
    assert by_layer.shape == (NUM_LAYERS, 2)
    torch.testing.assert_close(by_layer[-1], torch.stack([last[10:22].sum(), last[27:40].sum()]))
    [(full, _)] = question_evidence(runner, [question_of()])
    assert not torch.allclose(last[10:22], full[10:22])


@pytest.mark.parametrize("layers", [None, range(1), range(1, 2), range(NUM_LAYERS)])
def test_question_is_read_in_the_layers_asked_for(
    runner: Any, monkeypatch: pytest.MonkeyPatch, layers: range | None
) -> None:
    """The pass ends with the last; None: the last layer. The same beside one read in all."""
    move_in(runner)
    every, read = question_of(), layers or range(NUM_LAYERS - 1, NUM_LAYERS)
    few = replace(every, layers=layers, in_all_layers=False)
    with weighed(monkeypatch) as found:
        [(mass, nothing)] = question_evidence(runner, [few])
    assert (len(found), nothing) == (len(read), None)
    with weighed(monkeypatch) as found:
        [(again, _), (_, by_layer)] = question_evidence(runner, [few, every])
    assert len(found) == len(read) + NUM_LAYERS
    assert by_layer is not None
    torch.testing.assert_close(mass, again)
    for index, (start, end) in enumerate(CHUNKS):
        torch.testing.assert_close(mass[start:end].sum(), by_layer[list(read), index].sum())


def test_question_before_the_regions_end(runner: Any) -> None:
    """Question tokens inside the region (none of them moved) count for nothing."""
    prefill(runner, TOKENS.tolist(), SLOTS)
    seen, places = (SLOTS[:30], torch.arange(30)), torch.arange(30, NUM_TOKENS)
    probes = [QuestionProbe(TOKENS[30:], places, *seen, (CHUNKS[0],), end) for end in (30, 45)]
    [(few, _), (more, _)] = question_evidence(runner, probes)
    assert more.shape == (45,)
    assert torch.equal(more[:30], few)
    assert more[30:].count_nonzero() == 0


def test_deviation_evidence_is_the_second_layers_difference(runner: Any) -> None:
    move_in(runner)
    runner.token_to_kv_pool.get_key_buffer(1)[SLOTS[22:27]] = float("nan")
    # a shorter region, its first 5 tokens a gap
    short = DeviationProbe(TOKENS[PREFIX - 5 : 22], SLOTS[:22], CHUNKS[:1])
    with untouched(runner):
        found = deviation_evidence(runner, [short, deviation_of((CHUNKS[0], CHUNKS[2]))])
    expected = differences(runner, 1)
    expected[:PREFIX] = expected[22:27] = 0
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), expected[:22], rtol=1e-4, atol=0)
    torch.testing.assert_close(found[1].double(), expected, rtol=1e-4, atol=0)
    assert expected[10:22].min() > 0.1


@contextmanager
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Tokens of every sequence of every pass meanwhile."""
    found: list[list[int]] = []

    def spy(runner: Any, sequences: Any, **options: Any) -> Any:
        found.append([len(sequence.token_ids) for sequence in sequences])
        return run_pass(runner, sequences, **options)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "run_pass", spy)
        yield found


def compute_first_layer(runner: Any) -> None:
    """There KV depends on its token alone."""
    prefill(runner, TOKENS.tolist(), OTHERS)
    pool = runner.token_to_kv_pool
    for buffers in (pool.k_buffer, pool.v_buffer):
        buffers[0][SLOTS] = buffers[0][OTHERS]


def written_deviation(runner: Any, probe: DeviationProbe) -> Tensor:
    """By a pass that writes what one request's evidence leaves unwritten, and is undone."""
    moved = torch.cat([torch.arange(*chunk) for chunk in probe.chunks])
    compared = moved if probe.candidates is None else probe.candidates
    is_run = torch.arange(probe.end) >= probe.start
    is_run[moved] = False
    is_run[compared] = True
    found = torch.zeros(probe.end)
    if not len(compared):
        return found
    run, held = is_run.nonzero().flatten(), kv_of(runner, SLOTS)
    sequence = SparseRequest(run, SLOTS[: probe.end])
    run_pass(runner, [PassSequence(TOKENS[run], sequence, out_slots=SLOTS[run])])
    layer = min(probe.depth, NUM_LAYERS) - 1
    for old, new in zip(held, kv_of(runner, SLOTS), strict=True):
        found[compared] += (old[layer, compared] - new[layer, compared]).square().sum((1, 2))
    put_kv(runner, SLOTS, held)
    return found


@st.composite
def deviation_probes(draw: st.DrawFn) -> DeviationProbe:
    """With chunks missing, regions that end early, and any tokens compared; slots are shared."""
    chunks = tuple(draw(st.lists(st.sampled_from(CHUNKS), min_size=1, unique=True).map(sorted)))
    start, end = draw(st.integers(1, chunks[0][0])), draw(st.integers(chunks[-1][1], NUM_TOKENS))
    moved = [position for chunk in chunks for position in range(*chunk)]
    some = st.sets(st.sampled_from(moved)).map(lambda each: torch.tensor(sorted(each)).long())
    return DeviationProbe(
        TOKENS[start:end],
        SLOTS[:end],
        chunks,
        draw(st.integers(1, NUM_LAYERS + 1)),
        draw(st.none() | some),
    )


@given(st.lists(deviation_probes(), min_size=1, max_size=4), st.integers(1, 120))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_together_are_as_each_alone(
    runner: Any, probes: list[DeviationProbe], max_rows: int
) -> None:
    """At any depths, cut or not, and as if written; from the third layer on where a request is not
    cut. No pass has more rows, but for one candidate and the gaps it needs."""
    move_in(runner)
    compute_first_layer(runner)
    expected = [written_deviation(runner, probe) for probe in probes]
    with pytest.MonkeyPatch.context() as patch, passes(patch) as found:
        whole = deviation_evidence(runner, probes)
        compared = [probe.candidates is None or len(probe.candidates) > 0 for probe in probes]
        assert [*map(len, found)] == [sum(compared)] * any(compared)
        found.clear()
        parts = deviation_evidence(runner, probes, max_rows=max_rows)
        assert all(sum(lens) <= max_rows or len(lens) == 1 for lens in found)
    for probe, each, whole_of, part in zip(probes, expected, whole, parts, strict=True):
        torch.testing.assert_close(whole_of, each, rtol=1e-4, atol=1e-5)
        [alone] = deviation_evidence(runner, [probe], max_rows=max_rows)
        torch.testing.assert_close(part, alone, rtol=1e-4, atol=1e-5)
        if probe.depth <= 2 or max_rows >= probe.end:
            torch.testing.assert_close(part, each, rtol=1e-4, atol=1e-5)


def test_a_batch_is_cut_at_the_budget(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests in one pass, else no pass has more tokens; all but a request's last compare as
    many."""
    move_in(runner)
    compute_first_layer(runner)
    spoil(runner, SLOTS[22:27])  # a gap
    probe = deviation_of((CHUNKS[0], CHUNKS[2]))
    with untouched(runner), passes(monkeypatch) as lens:
        [whole, _] = deviation_evidence(runner, [probe, probe], max_rows=2 * (12 + 5 + 13))
        assert lens == [[30, 30]]
        lens.clear()
        [cut] = deviation_evidence(runner, [probe], max_rows=7 + 5)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)
    assert whole[PREFIX:22].min() > 0.1
    assert lens == [[7], [7 + 5], [7 + 5], [4 + 5]]
    some = torch.tensor([10, *range(12, 22, 2), *range(28, 40, 2)])
    with passes(monkeypatch) as lens:
        [cut] = deviation_evidence(runner, [replace(probe, candidates=some)], max_rows=7 + 5)
    torch.testing.assert_close(cut[some], whole[some], rtol=1e-4, atol=1e-6)
    assert (int(cut.count_nonzero()), lens) == (len(some), [[7 + 5], [5 + 5]])


def test_deviation_at_a_depth_is_that_layers_difference(runner: Any) -> None:
    """All tokens at the third layer; of a model that has no such layer, at its last."""
    move_in(runner)
    with untouched(runner):
        probes = [deviation_of(depth=depth) for depth in (3, 99)]
        [deep, deeper] = deviation_evidence(runner, probes)
    expected = differences(runner, 2)
    expected[:PREFIX] = 0
    torch.testing.assert_close(deep.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(deeper, deep)


def test_candidates_alone_are_compared(runner: Any) -> None:
    """As if they alone were computed again. Gaps are computed with them."""
    move_in(runner)
    chosen = torch.tensor([11, 12, 20, 30, 39])
    probe = deviation_of((CHUNKS[0], CHUNKS[2]), depth=3, candidates=chosen)
    with untouched(runner):
        [found] = deviation_evidence(runner, [probe])
    torch.testing.assert_close(found, written_deviation(runner, probe), rtol=1e-4, atol=1e-6)
    assert found.count_nonzero() == len(chosen)


def test_no_candidate_is_no_pass(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run_pass", None)
    [found] = deviation_evidence(runner, [deviation_of(candidates=torch.arange(0))])
    assert found.count_nonzero() == 0


@pytest.mark.parametrize(
    "weight_bytes",
    [4 * 4 * 27 * 2, *(pytest.param(limit, marks=pytest.mark.nightly) for limit in (1, 128 << 20))],
)
def test_scores_are_means_of_the_chunks_attention(
    runner: Any, monkeypatch: pytest.MonkeyPatch, weight_bytes: int
) -> None:
    """Cache-Craft eq. 3, 4 and 14, and what each token receives, in any pieces."""
    monkeypatch.setattr(masked, "WEIGHT_BYTES", weight_bytes)
    weights = prefill_weights(runner, TOKENS, SLOTS).mean((0, 1))
    befores = [CHUNKS[:index] for index in range(len(CHUNKS))]
    probes = [
        ScoreProbe(TOKENS[start:end], SLOTS[:end], before, received=True)
        for (start, end), before in zip(CHUNKS, befores, strict=True)
    ]
    with untouched(runner):
        scores = score(runner, probes)
    for (start, end), before, found in zip(CHUNKS, befores, scores, strict=True):
        rows = weights[start:end]
        context = sum((rows[:, a:b].sum(1) for a, b in before), rows[:, :0].sum(1))
        received = rows[:, start:end].tril(-1).sum(0)
        assert found.inter == pytest.approx(
            [float(rows[:, a:b].sum()) for a, b in before], abs=ATOL
        )
        assert found.prefix_lens == tuple(b - a for a, b in before)
        assert found.intra == pytest.approx(float(received.sum()), abs=ATOL)
        assert found.received is not None
        torch.testing.assert_close(found.context.double(), context, rtol=0, atol=ATOL)
        torch.testing.assert_close(found.received.double(), received, rtol=0, atol=ATOL)
        assert found.context.dtype == found.received.dtype == torch.float32
        assert found.head == pytest.approx(float(rows[:, :PREFIX].sum()), abs=ATOL)
        assert found.head_len == PREFIX


def test_masses_need_no_weights(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tokens receive does, over the chunk's own keys. Text around chunks is no chunk."""
    prefill(runner, TOKENS.tolist(), SLOTS)
    start, end = CHUNKS[2]
    # the second chunk is text now
    after_text = ScoreProbe(TOKENS[start:end], SLOTS[:end], CHUNKS[:1])
    after_chunks = replace(after_text, prefix=((0, PREFIX), *CHUNKS[:2]))
    with weighed(monkeypatch) as found:
        mixed, chunks_alone = score(runner, [after_text, after_chunks])
    assert (found, mixed.received) == ([], None)
    assert (mixed.head_len, chunks_alone.head_len, chunks_alone.head) == (PREFIX + 5, 0, 0)
    assert mixed.head == pytest.approx(chunks_alone.inter[0] + chunks_alone.inter[2], abs=ATOL)
    assert mixed.inter == pytest.approx(chunks_alone.inter[1:2], abs=ATOL)
    with weighed(monkeypatch) as found:
        [scored] = score(runner, [replace(after_text, received=True)])
    assert found == [end - start] * NUM_LAYERS
    assert scored.received is not None
    assert float(scored.received.sum()) == pytest.approx(mixed.intra, abs=ATOL)


def test_a_model_of_one_layer_is_compared_in_it() -> None:
    """There the K/V differs only where the pool holds other tokens."""
    runner, others = models.runner("llama", num_layers=1), TOKENS.clone()
    others[30] = (others[30] + 1) % 128
    prefill(runner, others.tolist(), SLOTS)
    [evidence] = deviation_evidence(runner, [deviation_of()])
    assert evidence.nonzero().flatten().tolist() == [30]
    [(last, by_layer)] = ask(runner, [question_of()])
    torch.testing.assert_close(by_layer[0].sum(), last.sum())


def test_nothing_asked_is_nothing_run() -> None:
    assert question_evidence(None, []) == []
    assert deviation_evidence(None, []) == []
    assert score_chunks(None, []) == []
