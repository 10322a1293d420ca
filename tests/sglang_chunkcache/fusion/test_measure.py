"""Evidence equals a float64 computation from queries and keys of SGLang's own forward pass,
and leaves the pool as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("transformers")

import torch
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
from sglang_chunkcache.fusion.recompute import run_pass, run_virtual
from sglang_chunkcache.fusion.store import ChunkScores
from tests import models
from tests.models import NUM_LAYERS, kv_of, make_row, prefill
from tests.reference.attention import attend

NUM_TOKENS = 48
PREFIX, CHUNKS, END = 10, ((10, 22), (22, 27), (27, 40)), 40
SLOTS = torch.arange(100, 100 + NUM_TOKENS).flip(0)
OTHERS = torch.arange(300, 300 + NUM_TOKENS)
ATOL = 1e-4


@pytest.fixture(params=["llama", pytest.param("qwen3", marks=pytest.mark.nightly), "stablelm"])
def runner(request: pytest.FixtureRequest) -> Iterator[Any]:
    runner = models.runner(request.param)
    yield runner
    models.assert_given_back(runner)


def make_tokens(seed: int, num_tokens: int = NUM_TOKENS) -> Tensor:
    return torch.randint(0, 128, (num_tokens,), generator=torch.Generator().manual_seed(seed))


@contextmanager
def captured(runner: Any) -> Iterator[list[Tensor]]:
    """Queries of every layer, [n, num_heads, head_dim], that SGLang's own backend is given
    meanwhile."""
    queries: list[Tensor] = []
    forward: Callable[..., Any] = runner.attn_backend.forward_extend

    def record(q: Tensor, k: Tensor, v: Tensor, layer: Any, *args: Any, **kwargs: Any) -> Any:
        queries.append(q.reshape(-1, layer.tp_q_head_num, layer.head_dim).clone())
        return forward(q, k, v, layer, *args, **kwargs)

    runner.attn_backend.forward_extend = record
    try:
        yield queries
    finally:
        del runner.attn_backend.forward_extend


@contextmanager
def untouched(runner: Any) -> Iterator[None]:
    """Every byte of the pool is the same afterwards."""
    everything = torch.arange(runner.token_to_kv_pool.get_key_buffer(0).shape[0])
    before = kv_of(runner, everything)
    yield
    for old, new in zip(before, kv_of(runner, everything), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def weights_of(runner: Any, queries: list[Tensor], slots: Tensor, positions: Tensor) -> Tensor:
    """[num_layers, num_heads, n, num_slots] float64 by the slow reference,
    over the pool's keys at positions 0, 1, ..."""
    keys, values = kv_of(runner, slots)
    return torch.stack(
        [
            attend(q, k, v, positions, torch.arange(len(slots)), q.shape[-1] ** -0.5)[1]
            for q, k, v in zip(queries, keys, values, strict=True)
        ]
    )


def move_in(runner: Any, tokens: Tensor) -> None:
    """A prompt whose chunks hold the K/V of other tokens, as full reuse leaves them;
    OTHERS is free afterwards."""
    prefill(runner, tokens.tolist(), SLOTS)
    prefill(runner, make_tokens(9).tolist(), OTHERS)
    keys, values = kv_of(runner, OTHERS[PREFIX:END])
    for layer in range(NUM_LAYERS):
        runner.token_to_kv_pool.get_key_buffer(layer)[SLOTS[PREFIX:END]] = keys[layer]
        runner.token_to_kv_pool.get_value_buffer(layer)[SLOTS[PREFIX:END]] = values[layer]


def question_of(
    tokens: Tensor,
    visible: Tensor,
    chunks: tuple[tuple[int, int], ...],
    *,
    in_all_layers: bool = True,
) -> QuestionProbe:
    return QuestionProbe(
        tokens[END:],
        torch.arange(END, len(tokens)),
        SLOTS[visible],
        visible,
        chunks,
        END,
        in_all_layers=in_all_layers,
    )


def ask(runner: Any, requests: list[QuestionProbe]) -> list[tuple[Tensor, Tensor]]:
    """The evidence of questions that ask for every layer."""
    evidence = []
    for last, by_layer in question_evidence(runner, requests):
        assert by_layer is not None
        evidence.append((last, by_layer))
    return evidence


def score(runner: Any, probes: list[ScoreProbe]) -> list[ChunkScores]:
    return [
        scores_of(probe, sums.cpu())
        for probe, sums in zip(probes, score_chunks(runner, probes), strict=True)
    ]


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
    tokens = make_tokens(0)
    move_in(runner, tokens)
    asked = tokens, make_tokens(1)
    requests = [
        question_of(a, torch.arange(END), chunks)
        for a, chunks in zip(asked, (CHUNKS, CHUNKS[1:2]), strict=True)
    ]
    with untouched(runner):
        evidence = ask(runner, requests)
    # The oracle writes the question's K/V after the chunks.
    for question, chunks, (last, by_layer) in zip(
        asked, (CHUNKS, CHUNKS[1:2]), evidence, strict=True
    ):
        with captured(runner) as queries:
            row = make_row(runner, SLOTS)
            prompt = [*tokens[:END].tolist(), *question[END:].tolist()]
            run_virtual(runner, req_pool_index=row, runs=[(END, NUM_TOKENS)], token_ids=prompt)
        weights = weights_of(runner, queries, SLOTS, torch.arange(END, NUM_TOKENS))
        expected = torch.zeros(END, dtype=torch.float64)
        for start, end in chunks:
            expected[start:end] = weights[-1, :, :, start:end].sum((0, 1))
        per_chunk = torch.stack(
            [weights[..., start:end].sum((1, 2, 3)) for start, end in chunks], 1
        )
        assert last.dtype == by_layer.dtype == torch.float32
        torch.testing.assert_close(last.double(), expected, rtol=0, atol=ATOL)
        torch.testing.assert_close(by_layer.double(), per_chunk, rtol=0, atol=ATOL)
        assert last[:PREFIX].count_nonzero() == 0


def test_question_evidence_leaves_gaps_out(runner: Any) -> None:
    """A missing chunk gets no mass, whatever its slots hold, and the others share all of it."""
    tokens = make_tokens(0)
    move_in(runner, tokens)
    visible = torch.tensor([p for p in range(END) if not 22 <= p < 27])
    chunks = (CHUNKS[0], CHUNKS[2])
    [(last, by_layer)] = ask(runner, [question_of(tokens, visible, chunks)])
    runner.token_to_kv_pool.get_key_buffer(0)[SLOTS[22:27]] = float("nan")
    [(again, _)] = question_evidence(runner, [question_of(tokens, visible, chunks)])
    assert torch.equal(last, again)
    assert last[22:27].count_nonzero() == 0
    assert by_layer.shape == (NUM_LAYERS, 2)
    torch.testing.assert_close(by_layer[-1], torch.stack([last[10:22].sum(), last[27:40].sum()]))
    [(full, _)] = question_evidence(runner, [question_of(tokens, torch.arange(END), CHUNKS)])
    assert not torch.allclose(last[10:22], full[10:22])


def test_weights_exist_in_the_layers_that_are_read(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one request in every layer, of the other in the last;
    what both are told of the last is the same."""
    tokens = make_tokens(0)
    move_in(runner, tokens)
    few, all_layers = (
        question_of(tokens, torch.arange(END), CHUNKS, in_all_layers=b) for b in (False, True)
    )
    with weighed(monkeypatch) as found:
        [(last, nothing), (again, by_layer)] = question_evidence(runner, [few, all_layers])
    assert len(found) == NUM_LAYERS + 1
    assert nothing is None
    assert by_layer is not None
    torch.testing.assert_close(last, again)
    with weighed(monkeypatch) as found:
        [(alone, _)] = question_evidence(runner, [few])
    assert len(found) == 1
    torch.testing.assert_close(alone, last)


@pytest.mark.parametrize("layers", [range(1), range(1, 2), range(NUM_LAYERS)])
def test_question_is_read_in_the_layers_asked_for(
    runner: Any, monkeypatch: pytest.MonkeyPatch, layers: range
) -> None:
    """Their sum, and the pass ends with the last of them;
    beside one that is read in the last layer."""
    tokens = make_tokens(0)
    move_in(runner, tokens)
    every = question_of(tokens, torch.arange(END), CHUNKS)
    few = replace(every, layers=layers, in_all_layers=False)
    with weighed(monkeypatch) as found:
        [(mass, _)] = question_evidence(runner, [few])
    assert len(found) == len(layers)
    [(again, _), (last, by_layer)] = question_evidence(runner, [few, every])
    assert by_layer is not None
    torch.testing.assert_close(mass, again)
    for index, (start, end) in enumerate(CHUNKS):
        torch.testing.assert_close(mass[start:end].sum(), by_layer[list(layers), index].sum())
    assert torch.equal(mass, last) is False


def test_question_before_the_regions_end(runner: Any) -> None:
    """Question tokens inside the region (none of them moved) count for nothing."""
    tokens = make_tokens(0)
    prefill(runner, tokens.tolist(), SLOTS)
    outside = QuestionProbe(
        tokens[30:], torch.arange(30, 48), SLOTS[:30], torch.arange(30), (CHUNKS[0],), 30
    )
    inside = QuestionProbe(
        tokens[30:], torch.arange(30, 48), SLOTS[:30], torch.arange(30), (CHUNKS[0],), 45
    )
    [(few, _), (more, _)] = question_evidence(runner, [outside, inside])
    assert more.shape == (45,)
    assert torch.equal(more[:30], few)
    assert more[30:].count_nonzero() == 0


def test_deviation_evidence_is_the_second_layers_difference(runner: Any) -> None:
    """Fresh K/V of SGLang's own prefill against the pool's, moved positions only;
    a gap is computed, never compared."""
    tokens = make_tokens(0)
    move_in(runner, tokens)
    moved = (CHUNKS[0], CHUNKS[2])
    runner.token_to_kv_pool.get_key_buffer(1)[SLOTS[22:27]] = float("nan")
    requests = [
        # a shorter region, its first 5 tokens a gap
        DeviationProbe(tokens[PREFIX - 5 : 22], SLOTS[:22], CHUNKS[:1]),
        DeviationProbe(tokens[PREFIX:END], SLOTS[:END], moved),
    ]
    with untouched(runner):
        evidence = deviation_evidence(runner, requests)
    prefill(runner, tokens.tolist(), OTHERS)
    expected = torch.zeros(END, dtype=torch.float64)
    for fresh, held in zip(kv_of(runner, OTHERS), kv_of(runner, SLOTS), strict=True):
        for start, end in moved:
            for p in range(start, end):
                expected[p] += float((fresh[1, p].double() - held[1, p].double()).square().sum())
    assert evidence[0].dtype == torch.float32
    torch.testing.assert_close(evidence[0].double(), expected[:22], rtol=1e-4, atol=0)
    torch.testing.assert_close(evidence[1].double(), expected, rtol=1e-4, atol=0)
    assert expected[10:22].min() > 0.1


def test_a_long_region_is_measured_in_pieces(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same evidence, and no pass has more tokens than a piece and the gaps:
    the memory of a pass grows with its tokens."""
    tokens = make_tokens(0)
    prefill(runner, tokens.tolist(), OTHERS)
    own = (
        runner.token_to_kv_pool.get_key_buffer(0)[OTHERS],
        runner.token_to_kv_pool.get_value_buffer(0)[OTHERS],
    )
    move_in(runner, tokens)
    for buffers, layer in zip(
        (runner.token_to_kv_pool.k_buffer, runner.token_to_kv_pool.v_buffer), own, strict=True
    ):
        buffers[0][SLOTS] = layer  # the first layer's KV depends on its token alone
        for buffer in buffers:
            buffer[SLOTS[22:27]] = float("nan")  # a gap
    probe = DeviationProbe(tokens[PREFIX:END], SLOTS[:END], (CHUNKS[0], CHUNKS[2]))
    [whole] = deviation_evidence(runner, [probe])
    lens = []

    def spy(runner: Any, sequences: Any, **options: Any) -> Any:
        lens.append(sum(len(sequence.token_ids) for sequence in sequences))
        return run_pass(runner, sequences, **options)

    monkeypatch.setattr(measure, "run_pass", spy)
    monkeypatch.setattr(measure, "PIECE_TOKENS", 7)
    with untouched(runner):
        [pieces] = deviation_evidence(runner, [probe])
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-6)
    assert whole[PREFIX:22].min() > 0.1
    assert (len(lens), max(lens)) == (5, 7 + 5)


def test_deviation_at_a_depth_is_that_layers_difference(runner: Any) -> None:
    """All tokens at the third layer; of a model that has no such layer, at its last."""
    tokens = make_tokens(0)
    move_in(runner, tokens)
    probe = DeviationProbe(tokens[PREFIX:END], SLOTS[:END], CHUNKS, depth=3)
    with untouched(runner):
        [deep, deeper] = deviation_evidence(runner, [probe, replace(probe, depth=99)])
    prefill(runner, tokens.tolist(), OTHERS)
    expected = torch.zeros(END, dtype=torch.float64)
    for fresh, held in zip(kv_of(runner, OTHERS), kv_of(runner, SLOTS), strict=True):
        expected[PREFIX:] += (
            (fresh[2, PREFIX:END].double() - held[2, PREFIX:END].double()).square().sum((1, 2))
        )
    torch.testing.assert_close(deep.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(deeper, deep)


def test_candidates_alone_are_compared(runner: Any) -> None:
    """Over the KV that was moved: as if they alone were computed again.
    Gaps are computed with them."""
    tokens = make_tokens(0)
    move_in(runner, tokens)
    chosen = torch.tensor([11, 12, 20, 30, 39])
    probe = DeviationProbe(
        tokens[PREFIX:END], SLOTS[:END], (CHUNKS[0], CHUNKS[2]), depth=3, candidates=chosen
    )
    with untouched(runner):
        [found] = deviation_evidence(runner, [probe])
    gap = torch.arange(22, 27)
    run = torch.cat([chosen[:3], gap, chosen[3:]])
    held = kv_of(runner, SLOTS)
    sequence = PassSequence(tokens[run], SparseRequest(run, SLOTS[:END], END), out_slots=SLOTS[run])
    run_pass(runner, [sequence])
    expected = torch.zeros(END)
    for old, new in zip(held, kv_of(runner, SLOTS), strict=True):
        expected[chosen] += (old[2, chosen] - new[2, chosen]).square().sum((1, 2))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert found.count_nonzero() == len(chosen)


def test_no_candidate_is_no_pass(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run_pass", None)
    probe = DeviationProbe(make_tokens(0)[:END], SLOTS[:END], CHUNKS, candidates=torch.arange(0))
    assert deviation_evidence(runner, [probe])[0].count_nonzero() == 0


def test_deviation_is_nothing_where_kv_is_exact(runner: Any) -> None:
    tokens = make_tokens(0)
    prefill(runner, tokens.tolist(), SLOTS)
    [evidence] = deviation_evidence(
        runner, [DeviationProbe(tokens[PREFIX:END], SLOTS[:END], CHUNKS)]
    )
    assert evidence.max() < 1e-8


@pytest.mark.parametrize(
    "weight_bytes",
    [4 * 4 * 27 * 2, *(pytest.param(limit, marks=pytest.mark.nightly) for limit in (1, 128 << 20))],
)
def test_scores_are_means_of_the_chunks_attention(
    runner: Any, monkeypatch: pytest.MonkeyPatch, weight_bytes: int
) -> None:
    """Against the whole matrix of a prefill: Cache-Craft eq.
    3, 4 and 14, and what each token receives, in any pieces."""
    monkeypatch.setattr(masked, "WEIGHT_BYTES", weight_bytes)
    tokens = make_tokens(0)
    with captured(runner) as queries:
        prefill(runner, tokens.tolist(), SLOTS)
    weights = weights_of(runner, queries, SLOTS, torch.arange(NUM_TOKENS)).mean((0, 1))
    places = list(enumerate(CHUNKS))
    probes = [
        ScoreProbe(tokens[start:end], SLOTS[:end], CHUNKS[:index], received=True)
        for index, (start, end) in places
    ]
    with untouched(runner):
        scores = score(runner, probes)
    for (index, (start, end)), found in zip(places, scores, strict=True):
        inter, context = [], torch.zeros(end - start, dtype=torch.float64)
        for a, b in CHUNKS[:index]:
            inter.append(float(weights[start:end, a:b].sum()))
            context += weights[start:end, a:b].sum(1)
        received = torch.zeros(end - start, dtype=torch.float64)
        for k in range(start, end):
            for earlier in range(start, k):
                received[earlier - start] += weights[k, earlier]
        assert found.inter == pytest.approx(inter, abs=ATOL)
        assert found.prefix_lens == tuple(b - a for a, b in CHUNKS[:index])
        assert found.intra == pytest.approx(float(received.sum()), abs=ATOL)
        assert found.received is not None
        torch.testing.assert_close(found.context.double(), context, rtol=0, atol=ATOL)
        torch.testing.assert_close(found.received.double(), received, rtol=0, atol=ATOL)
        assert found.context.dtype == found.received.dtype == torch.float32
        head = float(weights[start:end, :start].sum()) - sum(inter)
        assert found.head == pytest.approx(head, abs=ATOL)
        assert found.head_len == PREFIX


def test_masses_need_no_weights(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-sum-exps do; what tokens receive needs weights over the chunk's own keys.
    Text around chunks is no chunk."""
    tokens = make_tokens(0)
    prefill(runner, tokens.tolist(), SLOTS)
    start, end = CHUNKS[2]
    # the second chunk is text now
    after_text = ScoreProbe(tokens[start:end], SLOTS[:end], CHUNKS[:1])
    after_chunks = ScoreProbe(tokens[start:end], SLOTS[:end], ((0, PREFIX), *CHUNKS[:2]))
    with weighed(monkeypatch) as found:
        mixed, chunks_alone = score(runner, [after_text, after_chunks])
    assert found == []
    assert mixed.received is None
    assert mixed.head_len == PREFIX + 5
    assert chunks_alone.head_len == chunks_alone.head == 0
    assert mixed.head == pytest.approx(chunks_alone.inter[0] + chunks_alone.inter[2], abs=ATOL)
    assert mixed.inter == pytest.approx(chunks_alone.inter[1:2], abs=ATOL)
    with weighed(monkeypatch) as found:
        [scored] = score(runner, [replace(after_text, received=True)])
    assert found == [end - start] * NUM_LAYERS
    assert scored.received is not None
    assert float(scored.received.sum()) == pytest.approx(mixed.intra, abs=ATOL)


def test_ranks_add_up_their_heads(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with the same heads: sums double, means stay,
    and all ranks take rank 0's numbers."""
    tokens = make_tokens(0)
    prefill(runner, tokens.tolist(), SLOTS)
    question, deviation = (
        question_of(tokens, torch.arange(END), CHUNKS),
        DeviationProbe(tokens[10:40], SLOTS[:40], CHUNKS),
    )
    move_in(runner, tokens)
    chunk = ScoreProbe(tokens[27:40], SLOTS[:40], CHUNKS[:2])
    alone = ask(runner, [question])[0], deviation_evidence(runner, [deviation])[0]
    [mean] = score(runner, [chunk])
    sources = []

    def broadcast(tensor: Tensor, src: int) -> Tensor:
        sources.append(src)
        return tensor

    group = SimpleNamespace(world_size=2, all_reduce=lambda tensor: 2 * tensor, broadcast=broadcast)
    monkeypatch.setattr(runner, "tp_group", group)
    (last, by_layer), both = ask(runner, [question])[0], deviation_evidence(runner, [deviation])[0]
    torch.testing.assert_close(last, 2 * alone[0][0])
    torch.testing.assert_close(by_layer, 2 * alone[0][1])
    torch.testing.assert_close(both, 2 * alone[1])
    [scored] = score(runner, [chunk])
    assert scored.inter == pytest.approx(mean.inter)
    assert scored.intra == pytest.approx(mean.intra)
    assert sources == [0, 0, 0]


def test_a_model_of_one_layer_is_compared_in_it() -> None:
    """There the K/V differs only where the pool holds other tokens."""
    runner = models.runner("llama", num_layers=1)
    tokens, others = make_tokens(0), make_tokens(0)
    others[30] = (others[30] + 1) % 128
    prefill(runner, others.tolist(), SLOTS)
    [evidence] = deviation_evidence(
        runner, [DeviationProbe(tokens[PREFIX:END], SLOTS[:END], CHUNKS)]
    )
    assert evidence.nonzero().flatten().tolist() == [30]
    [(last, by_layer)] = ask(runner, [question_of(tokens, torch.arange(END), CHUNKS)])
    torch.testing.assert_close(by_layer[0].sum(), last.sum())


def test_nothing_asked_is_nothing_run() -> None:
    assert question_evidence(None, []) == []
    assert deviation_evidence(None, []) == []
    assert score_chunks(None, []) == []


@pytest.mark.parametrize(
    "spans", [((20, 25), (10, 15)), ((10, 20), (19, 25)), ((10, 10),), ((4, 12),), ((30, 41),)]
)
def test_impossible_spans_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    """Out of order, overlapping, empty, or not in the region:
    each would count a token for the wrong chunk."""
    tokens = make_tokens(0)
    with pytest.raises(ValueError, match="span"):
        DeviationProbe(tokens[PREFIX:END], SLOTS[:END], spans)
    if spans != ((4, 12),):
        with pytest.raises(ValueError, match="span"):
            question_of(tokens, torch.arange(END), spans)
        with pytest.raises(ValueError, match="span"):
            ScoreProbe(tokens[END:], SLOTS, spans)
