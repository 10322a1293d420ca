"""What tests on tensors share: RoPE of every family, parts of a loaded model, a layer and a pool
that are nothing but tensors, a prompt whose chunks were moved in.

    elsewhere   head | C | A | E | B        computed there; A, C stay on the device, B, E are stored
    prompt      head | A | B | text | C | D | E | question    D and the text are gaps
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.layers import rotary_embedding
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

from eval.bench.attention.reference import ReferenceAttention
from radix_ext import ChunkId, FusionRequest
from radix_ext.cfo import Scored
from radix_ext.moved_plan import Piece, ReusePlan
from radix_ext.pool_slots import SlotBook
from radix_ext.sources import DeviceCopy, HostCopy
from radix_ext.variants import Variant
from sglang_chunkcache.attention import choice
from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer import FlashInferSparse
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.fusion.fill import Capture, FusionPass
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.recompute import run_extend
from sglang_chunkcache.fusion.relocate import RotaryTable, copy_moved
from sglang_chunkcache.fusion.sharing import Sharing
from sglang_chunkcache.fusion.trial_rows import Means
from sglang_chunkcache.own_selectors import own_needs
from sglang_chunkcache.scheduler.codec_pool import CodecPool
from sglang_chunkcache.scheduler.host_pool import HostPool
from sglang_chunkcache.scheduler.host_slots import HostSlots
from sglang_chunkcache.scheduler.node import facts
from sglang_chunkcache.scheduler.pricing import Pricing
from sglang_chunkcache.storage.codec import CODECS, Quantized
from tests import models
from tests.models import kv_of, logits_of, make_row, prefill
from tests.reference import flashinfer, rope
from tests.reference.attention import attend

# RoPE

MAX_POSITIONS = 2048
BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
DTYPES = list(BITS)


@dataclass(frozen=True)
class Case:
    """A model family's RoPE, as its config has it and by definition."""

    frequencies: list[float]
    base: float
    head_dim: int = 32
    rotary_dim: int = 32
    neox: bool = True
    scaling: dict[str, Any] | None = None
    mscale: float = 1.0
    num_heads: int = 2

    def module(self, dtype: torch.dtype) -> Any:
        """SGLang's, as its models make it."""
        args = self.head_dim, self.rotary_dim, MAX_POSITIONS, self.base, self.neox, self.scaling
        return rotary_embedding.get_rope(*args, dtype=dtype)

    def table(self, dtype: torch.dtype = torch.float32) -> RotaryTable:
        return RotaryTable.of(self.module(dtype))

    def raw(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """Un-rotated keys of very different magnitudes."""
        generator = torch.Generator().manual_seed(num_tokens)
        keys = torch.randn(num_tokens, self.num_heads, self.head_dim, generator=generator)
        return (keys * torch.randn(num_tokens, 1, 1, generator=generator).exp()).to(dtype)

    def rotated(self, raw: Tensor, positions: Sequence[int]) -> Tensor:
        """By definition, in float64."""
        return rope.rotate(raw, positions, self.frequencies, neox=self.neox, scale=self.mscale)

    def norms(self, keys: Tensor) -> Tensor:
        return rope.pair_norms(keys, self.rotary_dim, neox=self.neox)

    def ulp(self, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """The spacing of `dtype` at each pair's length: a number near 0 inherits the rounding of
        its large partner."""
        return torch.exp2(self.norms(keys).clamp_min(1e-30).log2().floor() - BITS[dtype])


def _scaled(frequencies: list[float], base: float, kind: str, **scaling: Any) -> Case:
    return Case(frequencies, base, scaling={"rope_type": kind, **scaling})


def _yarn(factor: float) -> Case:
    length = round(MAX_POSITIONS / factor)
    frequencies = rope.yarn(32, 1e6, factor=factor, trained_len=length)
    case = _scaled(frequencies, 1e6, "yarn", factor=factor, original_max_position_embeddings=length)
    return replace(case, mscale=rope.yarn_mscale(factor))


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
_LLAMA3_FREQUENCIES = rope.llama3(32, 5e5, factor=8.0, low=1.0, high=4.0, trained_len=256)
_PLAIN, _LONG = rope.plain(32, 1e4), rope.plain(128, 1e6)
CASES = {
    "llama": Case(_PLAIN, 1e4),
    "llama3": _scaled(_LLAMA3_FREQUENCIES, 5e5, "llama3", factor=8.0, **_LLAMA3),
    "qwen2": Case(rope.plain(64, 1e6), 1e6, 64, 64),
    "qwen3": Case(_LONG, 1e6, 128, 128, scaling={"rope_type": "default", "rope_theta": 1e6}),
    "mistral": Case(_LONG, 1e6, 128, 128),
    "yarn": _yarn(4.0),
    "linear": _scaled(rope.linear(32, 1e4, factor=2.0), 1e4, "linear", factor=2.0),
    "dynamic": _scaled(rope.dynamic_ntk(32, 1e4, factor=2.0), 1e4, "dynamic", factor=2.0),
    "alpha": _scaled(rope.plain(32, 1e4 * 4 ** (32 / 30)), 1e4, "dynamic", factor=1.0, alpha=4.0),
    "partial": Case(rope.plain(16, 1e4), 1e4, 64, 16),
    "interleaved": Case(_PLAIN, 1e4, neox=False),
    "interleaved partial": Case(_PLAIN, 1e4, 64, 32, neox=False),
}


def random_positions(num_tokens: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, MAX_POSITIONS, (num_tokens,), generator=generator)


Tokens = tuple[Tensor, Tensor]
"""Slots and positions."""


def move(
    pool: Any, table: RotaryTable, source: Tokens, target: Tokens, *, use_kernel: bool | None = None
) -> None:
    names = ("source_slots", "source_positions", "target_slots", "target_positions")
    places = dict(zip(names, (*source, *target), strict=True))
    copy_moved(pool, table, **places, use_kernel=use_kernel)


# A loaded model's parts


def table_of(runner: Any) -> RotaryTable:
    return RotaryTable.of(runner.model.model.layers[0].self_attn.rotary_emb)


def params_of(runner: Any) -> Any:
    """What SGLang hands a cache."""
    return SimpleNamespace(
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
    )


def means_of(runner: Any, table: RotaryTable | None = None) -> Means:
    """What a server tries on itself with."""
    table = table or table_of(runner)
    return Means(runner, table, params_of(runner), None, 32, Pricing(runner))


def heads_of(runner: Any) -> tuple[HeadShape, float]:
    """With the scale of its logits."""
    layer = runner.model.model.layers[0].self_attn.attn
    shape = HeadShape(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, runner.dtype)
    return shape, layer.scaling


def reference_of(
    runner: Any, kind: type[ReferenceAttention] = ReferenceAttention
) -> ReferenceAttention:
    shape, scale = heads_of(runner)
    return kind(shape, scale=scale)


def flashinfer_of(runner: Any, kernel: str) -> FlashInferSparse:
    """On the torch model of FlashInfer."""
    (shape, scale), device = heads_of(runner), torch.device("cpu")
    return FlashInferSparse(shape, device=device, scale=scale, kernel=kernel, modules=flashinfer)


class Shuffling(ReferenceAttention):
    """Wants its rows in an order that is not its own inverse."""

    def plan(self, requests: Any) -> Tensor:  # type: ignore[override]
        super().plan(requests)
        return torch.arange(sum(len(request.positions) for request in requests)).roll(3)

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return super().run(queries.roll(-3, 0), keys, values).roll(3, 0)


def see_more(patch: pytest.MonkeyPatch, more: int) -> None:
    """Every query sees other keys than it should."""
    visible = SparseRequest.visible
    patch.setattr(SparseRequest, "visible", lambda r: (visible(r) + more).clamp(1, r.num_keys))


def spoil(runner: Any, slots: Any = slice(None)) -> None:
    """NaN, so that reading one stale key or value anywhere is seen."""
    pool = runner.token_to_kv_pool
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[slots] = float("nan")


def put_kv(runner: Any, slots: Tensor, kv: tuple[Tensor, Tensor]) -> None:
    """What `kv_of` returned, into `slots`."""
    for layer in range(runner.token_to_kv_pool.layer_num):
        runner.token_to_kv_pool.get_key_buffer(layer)[slots] = kv[0][layer]
        runner.token_to_kv_pool.get_value_buffer(layer)[slots] = kv[1][layer]


def all_kv(runner: Any) -> tuple[Tensor, Tensor]:
    return kv_of(runner, torch.arange(len(runner.token_to_kv_pool.k_buffer[0])))


@contextmanager
def untouched(runner: Any) -> Iterator[None]:
    """Every byte of the pool is the same afterwards."""
    before = all_kv(runner)
    yield
    for old, new in zip(before, all_kv(runner), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def make_tokens(seed: int, num_tokens: int) -> Tensor:
    return torch.randint(0, 128, (num_tokens,), generator=torch.Generator().manual_seed(seed))


# What SGLang's own forward pass attends with


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


def weights_of(runner: Any, queries: list[Tensor], slots: Tensor, positions: Tensor) -> Tensor:
    """[num_layers, num_heads, n, num_slots] float64 by the slow reference,
    over the pool's keys at positions 0, 1, ..."""
    seen = torch.arange(len(slots))
    layers = zip(queries, *kv_of(runner, slots), strict=True)
    return torch.stack(
        [attend(q, k, v, positions, seen, q.shape[-1] ** -0.5)[1] for q, k, v in layers]
    )


def prefill_weights(runner: Any, tokens: Tensor, slots: Tensor) -> Tensor:
    """`weights_of` SGLang's own prefill of `tokens` into `slots`."""
    with captured(runner) as queries:
        prefill(runner, tokens.tolist(), slots)
    return weights_of(runner, queries, slots, torch.arange(len(tokens)))


# A prompt that is measured

NUM_TOKENS = 48
CHUNKS = ((10, 22), (22, 27), (27, 40))
SLOTS = torch.arange(100, 100 + NUM_TOKENS).flip(0)
OTHERS = torch.arange(300, 300 + NUM_TOKENS)
ATOL = 1e-4


@pytest.fixture(params=["llama", pytest.param("qwen3", marks=pytest.mark.nightly), "stablelm"])
def runner(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model of each kind."""
    runner = models.runner(request.param)
    yield runner
    models.assert_given_back(runner)


# A layer and its pool


KV_HEADS = ("tp_k_head_num", "tp_v_head_num")


def make_layer(layer_id: int, num_heads: int, num_kv_heads: int, size: int, **changes: Any) -> Any:
    """As far as an attention backend looks."""
    heads = {"tp_q_head_num": num_heads} | dict.fromkeys(KV_HEADS, num_kv_heads)
    sizes = {"qk_head_dim": size, "v_head_dim": size, "scaling": 0.3, "logit_cap": 0.0}
    kind = {"is_cross_attention": False, "attn_type": AttentionType.DECODER}
    fields = heads | sizes | kind | {"sliding_window_size": -1, **changes}
    return SimpleNamespace(layer_id=layer_id, **fields)


class Pool:
    """K/V by slot, as far as an attention backend uses SGLang's pool."""

    def __init__(self, buffers: Tensor) -> None:
        """[num_layers, 2, num_slots, num_kv_heads, head_dim]."""
        self.buffers = buffers
        self.keys, self.values = buffers[0]

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.buffers[layer_id, 0]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.buffers[layer_id, 1]

    def set_kv_buffer(self, layer: Any, where: Any, keys: Tensor, values: Tensor) -> None:
        self.buffers[layer.layer_id, :, where.loc] = torch.stack([keys, values])


# Promised slots, to be filled

TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 24 * 2**-7}
"""As in test_recompute.py, and a key that goes by way of the store is rounded twice more."""
LENS = {"head": 5, "A": 30, "B": 20, "text": 4, "C": 25, "D": 15, "E": 20}
PROMPT = ("head", "A", "B", "text", "C", "D", "E")
ELSEWHERE = ("head", "C", "A", "E", "B")
SPANS = ("A", "B", "C", "D", "E")
QUESTION_LEN = 8
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


class PoolHost:
    """`HostNodes` without chains: nothing is evicted."""

    def __init__(self, runner: Any, codec: str = "none", num_bytes: int = 1 << 20) -> None:
        pool, kept_as = runner.token_to_kv_pool, CODECS[codec]
        self.pool = HostPool(pool, num_bytes)
        if isinstance(kept_as, Quantized):
            self.pool = CodecPool(pool, num_bytes, codec=kept_as)
        self._book = SlotBook()

    def room(self, num_tokens: int) -> HostSlots | None:
        slots = self.pool.alloc(num_tokens)
        return None if slots is None else HostSlots(self.pool, slots, self._book)


def held_kv(blob: HostSlots) -> tuple[Tensor, Tensor]:
    """Keys and values, [num_layers, num_tokens, num_kv_heads, head_dim] each."""
    return blob.codec.decode(blob.reader()())


MASKED = None, choice.described("masked", "a test")


def make_pass(
    runner: Any,
    config: ChunkCacheConfig,
    host: Any,
    attention: Any = MASKED,
    sharing: Sharing | None = None,
) -> FusionPass:
    """With the model's table and prices of its own."""
    table, pricing = table_of(runner), Pricing(runner)
    return FusionPass(runner, table, config, host, attention, pricing, sharing)


class Scene:
    """One model with its pool as drawn above."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.host = cast("Any", PoolHost(runner))
        self.config = ChunkCacheConfig(
            reuse="fused", recompute_attention="masked", selectors="eval.selectors"
        )
        self.fusion_pass = make_pass(runner, self.config, self.host)
        whole = tokens_of((*PROMPT, "question"))
        self.logits = prefill(runner, whole, REFERENCE[: len(whole)])
        self.full = self.kv(REFERENCE[:END])
        prefill(runner, tokens_of(ELSEWHERE), SOURCE[: THERE["B"][1]])
        self.sources: dict[str, Any] = {}
        for name in "AC":
            start, end = THERE[name]
            node = SimpleNamespace(value=SOURCE[start:end])
            facts(node).start, facts(node).prefix = start, self.prefix_there(name)
            self.sources[name] = DeviceCopy(facts(node), node)
        stored = self.fusion_pass.capture([self.capture(name) for name in "BE"])
        for name, each in zip("BE", stored, strict=True):
            blob, scores = each.read()
            there: Any = {"start": THERE[name][0], "scores": scores}
            self.sources[name] = HostCopy(Variant(self.prefix_there(name), blob, **there))

    def prefix_there(self, name: str) -> tuple[ChunkId, ...]:
        return tuple(ChunkId(each) for each in ELSEWHERE[1 : ELSEWHERE.index(name)])

    def capture(self, name: str) -> Capture:
        start, end = THERE[name]
        prefix = tuple(THERE[each] for each in self.prefix_there(name))
        ids = array("q", tokens_of(ELSEWHERE)[:end])
        return Capture(ids, SOURCE[:end], start, prefix, Scored.ALL)

    def move(
        self, reuse: FusionRequest, *, target: Tensor = TARGET, row: int = 1, question: bool = True
    ) -> Move:
        """The promised region, NaN so far, after the head of the reference."""
        slots = torch.cat([REFERENCE[: LENS["head"]], target[LENS["head"] : END]])
        spoil(self.runner, slots[LENS["head"] :])
        make_row(self.runner, torch.cat([slots, target[END : END + QUESTION_LEN]]), index=row)
        pieces = []
        for name in PROMPT[1:]:
            index = SPANS.index(name) if name in SPANS else None
            source = self.sources.get(name)
            chunk = ChunkId(name) if index is not None else None
            before = tuple(map(ChunkId, SPANS[:index])) if source else ()
            pieces.append(Piece(*HERE[name], index, source, chunk, before))
        return Move(
            plan=ReusePlan(tuple(pieces)),
            fusion=reuse,
            slots=slots,
            token_ids=array("q", tokens_of(PROMPT)),
            question_ids=array("q", TOKENS["question"] if question else []),
            question_start=END,
            row_index=lambda: row,
        )

    def run(self, reuse: FusionRequest, by: FusionPass | None = None, **options: Any) -> Move:
        """A move, alone in its pass, that has been filled."""
        move = self.move(reuse, **options)
        (by or self.fusion_pass).run([move])
        return move

    def answer(self, row: int = 1) -> Tensor:
        """The last token's logits after what was filled."""
        ids = tokens_of((*PROMPT, "question"))
        hidden = run_extend(self.runner, row, ids, END)
        return logits_of(self.runner, hidden)[-1]

    def kv(self, slots: Tensor) -> Tensor:
        """[2, num_layers, n, num_kv_heads, head_dim]."""
        return torch.stack(kv_of(self.runner, slots))

    def assert_close(self, got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCES[self.runner.dtype])

    def assert_prefilled(self, move: Move, row: int = 1) -> None:
        """The KV of all layers and the next token are those of a prefill of the prompt."""
        self.assert_close(self.kv(move.slots), self.full)
        self.assert_close(self.answer(row), self.logits)

    def with_config(self, **changes: Any) -> FusionPass:
        """A pass with figures of its own."""
        return make_pass(self.runner, replace(self.config, **changes), self.host)

    def sparse_pass(self, fails: str = "") -> FusionPass:
        shape, scale = heads_of(self.runner)
        attention = Counting(shape, scale=scale)
        attention.fails = fails
        chosen = {"kind": "sparse", "kernel": "reference", "reason": "a test", "ms": {}}
        return make_pass(self.runner, self.config, self.host, (attention, chosen))


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


MODELS = [
    *((f, "float32") for f in models.FAMILIES),
    ("llama", "bfloat16"),
    ("qwen3_yarn", "bfloat16"),
]


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
    needs = own_needs(selector, "eval.selectors")
    return FusionRequest(selector, ratio, "recipe", own_needs=needs, **fields)
