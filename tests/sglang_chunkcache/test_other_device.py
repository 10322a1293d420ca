"""What runs on a GPU, there and on a device that is told apart from the CPU
(tests/reference/other_device.py): no operand is on the wrong one, the host waits where the tables
below say and nowhere else, memory is pinned at the start, and KV is that of a prefill. On a GPU
nothing counts waits.

    launch/test.sh -m gpu tests/sglang_chunkcache/test_other_device.py

The other device needs torch's CUDA build, and no GPU:

    pip install --target DIR torch==2.13.0
    PYTHONPATH=DIR launch/test.sh -m nightly tests/sglang_chunkcache/test_other_device.py
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang")
pytest.importorskip("triton")

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from torch.utils._pytree import tree_map

from sglang_chunkcache import compat
from sglang_chunkcache.attention import choice
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from sglang_chunkcache.attention.per_pass import KernelPerPass
from sglang_chunkcache.fusion import calibration_trial, relocate_kernel, store
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.fusion.gate import gated_attention
from sglang_chunkcache.fusion.moving import Mover
from sglang_chunkcache.fusion.price_trial import MIN_TOKENS, measure_costs
from sglang_chunkcache.fusion.recompute import run_extend
from sglang_chunkcache.fusion.relocate import RotaryTable
from sglang_chunkcache.fusion.store import Offload
from sglang_chunkcache.fusion.trial_rows import Means
from sglang_chunkcache.scheduler import load_back
from sglang_chunkcache.scheduler.host_pool import HostPool
from sglang_chunkcache.scheduler.node import joined
from sglang_chunkcache.scheduler.pricing import Pricing
from sglang_chunkcache.storage.codec import CODECS
from sglang_chunkcache.storage.jobs import Load
from sglang_chunkcache.storage.opening import create_storage
from sglang_chunkcache.wire.report import Fallback
from sglang_chunkcache.wire.state import CalibrationPrompt
from tests import models
from tests.kit.fused import report, wheres
from tests.kit.requests import HEAD, asks, rag
from tests.kit.storages import LAYOUT, NUM_TOKENS, keeping, make_entry, make_row
from tests.kit.tensors import PoolHost
from tests.kit.triton_interpreter import interpreted
from tests.reference import flashinfer
from tests.reference.model_scheduler import ModelScheduler
from tests.reference.other_device import (
    DEVICE,
    OtherDevice,
    OtherTensor,
    Seen,
    inner_of,
    lacking,
    move_runner,
)
from tests.reference.scheduler import SCORED, FakeReq, answer_of, config

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
]
OTHER = pytest.param(
    "other",
    marks=[
        pytest.mark.nightly,
        pytest.mark.skipif(lacking() is not None, reason=f"{lacking()}, see the file's docstring"),
    ],
)
GPU = pytest.param(
    "gpu",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    ],
)
on_other = pytest.mark.parametrize("rig", [OTHER], indirect=True)
"""For what a GPU raises, has, or times by itself."""

PINNED_TOKEN_BYTES = 32
"""Of pinned memory that is taken at a time, for each token of a batch: 1 MiB at 32,768 tokens. KV
takes 1,536 of this model, and 131,072 of a Llama-8B."""

A, B, C, D = ([(7 * index + 3 * i) % 89 + 1 for i in range(40)] for index in range(4))
NUM_SLOTS = 1500
SPARE_ROW = models.MAX_REQUESTS - 1
TOLERANCE = 24 * 2**-7
"""As of tests/sglang_chunkcache/fusion/test_recompute.py, in bfloat16."""


class Kernel:
    """The relocation kernel, interpreted, over the tensors inside."""

    def __init__(self, device: OtherDevice, kernel: Any) -> None:
        self._device, self._kernel = device, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            with self._device.as_kernel(**arguments) as inside:
                self._kernel[grid](**inside)

        return launch


def transfers(device: OtherDevice) -> dict[str, Any]:
    """`sgl_kernel.kvcacheio`, as far as our host pool calls it: bytes between slots of buffers,
    by address."""

    def copy(source: int, target: int, sources: Any, targets: Any, size: int) -> None:
        for one, other in zip(sources.tolist(), targets.tolist(), strict=True):
            ctypes.memmove(target + other * size, source + one * size, size)

    def transfer_kv_per_layer(*, src_k: Any, src_v: Any, item_size: int, **how: Any) -> None:
        assert device.is_pinned(src_k), "a kernel was given pageable memory"
        with device.as_kernel(**how) as inside:
            places = inside["src_indices"], inside["dst_indices"], item_size
            for source, target in ((src_k, inside["dst_k"]), (src_v, inside["dst_v"])):
                copy(source.data_ptr(), target.data_ptr(), *places)

    def transfer_kv_all_layer(*, item_size: int, num_layers: int, **how: Any) -> None:
        with device.as_kernel(**how) as inside:
            places = inside["src_indices"], inside["dst_indices"], item_size
            for side in "kv":
                layers = (inside[f"{way}_{side}_layers"].tolist() for way in ("src", "dst"))
                for source, target in zip(*layers, strict=True):
                    copy(source, target, *places)

    return {each.__name__: each for each in (transfer_kv_per_layer, transfer_kv_all_layer)}


def flashinfer_on(device: OtherDevice, wrapper: type[Any]) -> Any:
    """FlashInfer's model, its kernels over the tensors inside."""

    class Wrapper(wrapper):  # type: ignore[misc]
        def run(self, *args: Any, **how: Any) -> Any:
            mine = dict(vars(self))
            with device.as_kernel(args=args, how=how, mask=self._mask) as inside:
                self.__dict__.update(tree_map(inner_of, mine), device=torch.device("cpu"))
                try:
                    found = super().run(*inside["args"], **inside["how"])
                finally:
                    self.__dict__.update(mine)
            return tree_map(OtherTensor, found)

    return SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)


class Gpu:
    """A GPU in the place of the other device."""

    @contextmanager
    def counting(self) -> Iterator[Seen]:
        yield Seen(is_blind=True)

    unwatched = staticmethod(nullcontext)


@dataclass
class Rig:
    """A model on the device, with all that it takes to serve."""

    device: OtherDevice | Gpu
    runner: Any

    @property
    def table(self) -> RotaryTable:
        return RotaryTable.of(self.runner.model.model.layers[0].self_attn.rotary_emb)

    def sparse(self, kernel: str, wrapper: type[Any] = flashinfer.MaskOwningWrapper) -> Any:
        shape, scale, reason = choice._shape_of(self.runner)
        assert reason is None
        if kernel == "fa3" and torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs Hopper")
        modules = None
        if isinstance(self.device, OtherDevice):
            modules = flashinfer_on(self.device, wrapper)
        made = FlashInferSparse(shape, device=DEVICE, scale=scale, kernel=kernel, modules=modules)
        made.warm_up()
        return made

    def means(self, sparse: Any = None) -> Means:
        params = SimpleNamespace(
            token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
            req_to_token_pool=self.runner.req_to_token_pool,
        )
        return Means(self.runner, self.table, params, sparse, 32, Pricing(self.runner))


@pytest.fixture(scope="module", params=[OTHER, GPU])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A Llama of heads that FlashInfer's kernels take. It stays on the device, so it is no model of
    other tests."""
    folder = tmp_path_factory.mktemp("model")
    models.write_model(folder, "llama", dtype=torch.bfloat16, head_dim=64)
    if request.param == "gpu":
        yield Rig(Gpu(), models.make_runner(folder, dtype="bfloat16", device="cuda"))
        return
    runner = models.make_runner(folder, dtype="bfloat16")
    hosts = sys.modules[vars(compat)["MHATokenToKVPoolHost"].__module__]
    with (
        interpreted() as module,
        pytest.MonkeyPatch.context() as patch,
        OtherDevice() as device,
    ):
        patch.setattr(relocate_kernel, "_relocate", Kernel(device, module._relocate))
        for name, transfer in transfers(device).items():
            patch.setattr(hosts, name, transfer, raising=False)
        patch.setenv("SGLANG_EAGER_INPUT_NO_COPY", "1")  # into buffers that are the CPU's
        move_runner(runner)
        yield Rig(device, runner)
    relocate_kernel._addresses.cache_clear()
    store._offload_stream.cache_clear()


class Slots(TokenToKVPoolAllocator):  # type: ignore[misc]
    """SGLang's allocator, on the device."""

    def extend(self, start: int, end: int, last_slot: int) -> Any:
        return self.alloc(end - start)


class Server:
    """Requests, one after the other, and what the host waited for."""

    def __init__(
        self,
        rig: Rig,
        kernel: str | None = None,
        *,
        attention: Any = None,
        host_bytes: int = 0,
        **knobs: Any,
    ) -> None:
        pool = rig.runner.token_to_kv_pool
        pool.register_layer_transfer_counter(None)
        self.host_pool = HostPool(pool, host_bytes) if host_bytes else None
        if kernel is not None:
            attention = rig.sparse(kernel), choice.described("sparse", "a test", kernel)
        self.rig = rig
        self.ranks = ModelScheduler(
            rig.runner,
            NUM_SLOTS,
            config(reuse="fused", recompute_attention="masked", **knobs),
            prefill_budget=600,
            attention=attention,
            allocator=Slots(NUM_SLOTS, pool.dtype, "cuda", pool, False),
            host_pool=self.host_pool,
        )
        self.fusion_pass = self.ranks.fuser.fusion_pass
        self.fusion_pass.calibrated(Calibration(depth=2, layer=2, heads=((1, 0), (2, 1))))

    def serve(self, *reqs: FakeReq, is_prefilled: bool = False) -> Seen:
        """One batch, from match to release. `is_prefilled`: its KV is that of a prefill."""
        longest = max(len(req.all_ids) for req in reqs)
        with self.rig.device.counting() as seen:
            for req in reqs:
                assert self.ranks.add(req, 1000) is not None
            self.ranks.forward()
            for req in reqs:
                with self.rig.device.unwatched():
                    if is_prefilled:
                        self._check_kv(req)
                self.ranks.sample(req, 70)
            for req in reqs:
                self.ranks.release(req, is_insert=True)
        assert pins_much(seen, longest * len(reqs)) == {}
        return seen

    def _check_kv(self, req: FakeReq) -> None:
        runner, prompt = self.rig.runner, list(req.all_ids)
        row = runner.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(prompt)]
        beyond = torch.arange(NUM_SLOTS + 1, NUM_SLOTS + 1 + len(prompt), device=DEVICE)
        run_extend(runner, models.make_row(runner, beyond, index=SPARE_ROW), prompt)
        pairs = zip(models.kv_of(runner, row.long()), models.kv_of(runner, beyond), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=TOLERANCE)


def pins_much(seen: Seen, num_tokens: int) -> dict[str, int]:
    """Where, and how many bytes at most, of more than a prompt of so many tokens may take."""
    largest = {where: max(sizes) for where, sizes in seen.pinned.items()}
    return {at: n for at, n in largest.items() if n > PINNED_TOKEN_BYTES * num_tokens}


def assert_waits(seen: Seen, expected: dict[str, int]) -> None:
    """In these functions, so often."""
    others = {*seen.waits.items()} ^ {*expected.items()}
    assert seen.is_blind or not others, seen.told(sorted({where for where, _ in others}))


# The device itself


@on_other
def test_operands_on_two_devices_raise(rig: Rig) -> None:
    with pytest.raises(RuntimeError, match="two devices"):
        torch.zeros(2, device=DEVICE) + torch.zeros(2)
    with pytest.raises(TypeError, match="numpy"):
        torch.zeros(2, device=DEVICE).numpy()


@on_other
def test_what_another_stream_reads_is_kept_for_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that nobody has is given to others, whatever another stream still reads."""
    kept = list[tuple[int, Any]]()
    monkeypatch.setattr(
        OtherTensor, "record_stream", lambda self, stream: kept.append((id(self), stream))
    )
    forward: Any = torch.cuda.current_stream()
    made = [torch.arange(1, 4, device=DEVICE) for _ in range(2)]
    assert joined(made).tolist() == [1, 2, 3, 1, 2, 3]
    Offload(made)
    pool = HostPool(rig.runner.token_to_kv_pool, 1 << 20)
    slots = pool.alloc(3)
    assert slots is not None
    pool.follow()
    pool.save(made[0], slots)
    one, other = map(id, made)
    copying = store._offload_stream(DEVICE)
    assert kept == [(each, to) for to in (forward, copying) for each in (one, other)] + [
        (one, forward)
    ]


# Moved KV


EVIDENCE = {"none": 0, "first": 0, "context": 0, "query": 1, "deviation": 1, "critical": 2}
"""How often a batch reads back which tokens are compared, or computed."""
COPIES: dict[str | None, int] = {None: 0, "fa2": 1, "fa3": 1}
"""Of FlashInfer's own in such a batch, from pageable memory: one a launch."""


def waits_of(selector: str, kernel: str | None = None) -> dict[str, int]:
    """Of one batch, from match to release."""
    waits = {
        "fusion/choosing.py _on_host": EVIDENCE.get(selector, 0),
        # the plan before, whose copies have left its buffer: long ago, but in a crowd
        "attention/flashinfer.py FlashInferSparse.plan": int(kernel is not None),
        "FlashInfer _copy_kv_lens": COPIES[kernel],
    }
    return {where: num for where, num in waits.items() if num}


@pytest.mark.parametrize(
    ("selector", "kernel"),
    [*((name, None) for name in EVIDENCE), *(("critical", kernel) for kernel in KERNELS)],
)
def test_batch_waits_for_its_evidence_alone(rig: Rig, selector: str, kernel: str | None) -> None:
    """Of a request that moves, computes a gap and selects."""
    server = Server(rig, kernel)
    server.serve(rag(A, B, C))
    relocate_kernel._addresses.cache_clear()
    req = rag(B, D, A, fusion=asks(selector, 0.3))
    assert_waits(server.serve(req), waits_of(selector, kernel))
    assert {*report(req).fallbacks} <= {Fallback.UNSCORED}  # nothing is stored


@on_other
def test_flashinfer_06_copies_where_its_mask_begins(rig: Rig) -> None:
    """From pageable memory, too."""
    sparse = rig.sparse("fa2", flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    server = Server(rig, attention=(sparse, choice.described("sparse", "a test", "fa2")))
    server.serve(rag(A, B, C))
    server.serve(rag(C, A, fusion=asks("critical", 0.3)))
    seen = server.serve(rag(B, D, A, fusion=asks("critical", 0.3)))
    assert_waits(seen, {**waits_of("critical", "fa2"), "FlashInfer _copy_mask_indptr": 1})


def test_requests_of_one_batch_wait_as_one(rig: Rig) -> None:
    server = Server(rig, "fa3")
    server.serve(rag(A, B, C))
    server.serve(rag(C, A, fusion=asks("critical", 0.3)))
    reqs = [rag(*chunks, fusion=asks("critical", 0.3)) for chunks in ((B, D), (C, B))]
    assert_waits(server.serve(*reqs), waits_of("critical", "fa3"))
    assert [report(req).fallbacks for req in reqs] == [(), ()]


@pytest.mark.parametrize("kernel", [None, *KERNELS])
def test_kv_is_that_of_a_prefill(rig: Rig, kernel: str | None) -> None:
    """Of a prompt all of whose moved tokens and gaps are computed, by mask and by kernels."""
    server = Server(rig, kernel)
    server.serve(rag(A, B, C))
    req = rag(C, D, A, fusion=asks("first", 1.0))
    server.serve(req, is_prefilled=True)
    assert report(req).fallbacks == ()


def test_focus_waits_for_the_question_alone(rig: Rig) -> None:
    server = Server(rig)
    server.serve(rag(A, B, C))
    server.serve(rag(C, A, fusion=asks("query", 0.3)))
    req = rag(B, D, A, fusion=replace(asks("query", 0.3), focus="spare"))
    assert_waits(server.serve(req), waits_of("query"))
    assert report(req).focused is not None


def test_pass_that_fails_is_computed_without_a_wait(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(rig)
    server.serve(rag(A, B, C))
    monkeypatch.setattr(server.fusion_pass.mover, "move", mock.Mock(side_effect=OSError))
    req = rag(B, D, A, fusion=asks("first", 0.3))
    assert_waits(server.serve(req), {})
    assert report(req).fallbacks == (Fallback.PASS_FAILED,)


# Host memory


def stored(server: Server) -> Seen:
    """A, B and C are captured and scored, and leave the device."""
    with server.rig.device.counting() as seen:
        for _ in range(2):
            server.ranks.serve(rag(A, B, C, keep=[0, 1, 2]), answer=[70])
        while server.ranks.fuser.keeper.stats()["pending"]:
            server.ranks.forward()
        server.ranks.forward()
    server.ranks.evict(NUM_SLOTS)
    return seen


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_store_waits_for_nothing(rig: Rig, codec: str) -> None:
    server = Server(rig, store_codec=codec, **SCORED)
    seen = stored(server)
    assert_waits(seen, {})
    assert pins_much(seen, 2 * len(A + B + C)) == {}
    relocate_kernel._addresses.cache_clear()
    req = rag(C, D, A, fusion=asks("h2o", 0.3))
    assert_waits(server.serve(req), waits_of("h2o"))
    assert wheres(report(req)) == ["host", "gap", "host"]
    assert report(req).fallbacks == ()


@pytest.mark.parametrize("num_ahead", [0, 3])
def test_host_pool_waits_for_nothing(
    rig: Rig, num_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured, saved as a chain, moved from there, loaded from there: in line and layer by layer
    beside the passes."""
    monkeypatch.setattr(Mover, "_num_ahead", lambda *_: num_ahead)
    # the prompt's head: beside its load nothing else would be
    monkeypatch.setattr(load_back, "copied_ahead", lambda num_layers, **how: num_layers)
    server = Server(rig, "fa3", host_bytes=4 << 20)
    seen = stored(server)
    assert_waits(seen, {})
    assert pins_much(seen, 2 * len(A + B + C)) == {}
    relocate_kernel._addresses.cache_clear()
    req = rag(C, D, A, fusion=asks("critical", 0.3))
    assert_waits(server.serve(req), waits_of("critical", "fa3"))
    server.ranks.evict(NUM_SLOTS)
    assert server.fusion_pass.mover.layers_ahead == num_ahead
    assert wheres(report(req)) == ["host", "gap", "host"]
    monkeypatch.setattr(load_back, "copied_ahead", lambda *_, **how: num_ahead)
    req = rag(A, B, C)
    assert_waits(server.serve(req, is_prefilled=True), {})
    assert answer_of(req).loaded == len(HEAD + A + B + C)


def test_what_a_storage_loads_is_not_pinned(rig: Rig, tmp_path: Path) -> None:
    """It goes on into the host pool, which is."""
    flags = dict.fromkeys(("enable_memory_saver", "enable_lora", "lora_paths", "enable_metrics"))
    context = SimpleNamespace(
        server_args=SimpleNamespace(tp_size=1, **flags),
        tp_worker=SimpleNamespace(model_runner=rig.runner),
    )
    knobs = config(
        storage_backend="file",
        storage_backend_extra_config=json.dumps({"directory": str(tmp_path)}),
    )
    storage = create_storage(context, knobs, lambda: 1 << 30)
    assert storage is not None
    worker = storage.loader.worker  # its thread has nothing to do
    written = keeping(make_row("n", num_bytes=0, num_tokens=NUM_TOKENS), make_entry())
    worker.write(written)
    job = Load("n", written.row.num_bytes, NUM_TOKENS, LAYOUT)
    with rig.device.counting() as seen:
        worker.load(job)
    assert job.entry is not None, job.problem
    assert seen.pinned == {}
    storage.close()


# At the start


def be_flashinfer(device: OtherDevice, patch: pytest.MonkeyPatch) -> None:
    """The model of it."""
    modules = flashinfer_on(device, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    ms = iter([3.0, 2.0, 1.0])

    def timed(run: Callable[[], object]) -> float:
        run()
        return next(ms)

    patch.setitem(sys.modules, "flashinfer", modules)
    for name, double in {
        "TIMED_KEYS": 1024,
        "unsupported": lambda *_, **how: None,
        "_cuda_ms": timed,
    }.items():
        patch.setattr(choice, name, double)


def test_start_leaves_nothing_to_pin(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels agree with the reference and pass the gate, and what FlashInfer pins for them is
    there when requests come."""
    if isinstance(rig.device, OtherDevice):
        be_flashinfer(rig.device, monkeypatch)
    sparse, chosen, figures = gated_attention(rig.means(), "auto")
    if isinstance(rig.device, OtherDevice):
        assert [*chosen["ms"]] == [*KERNELS], chosen
    assert chosen["kernel"] == ", ".join(chosen["ms"]), chosen
    assert figures.passed, figures
    assert isinstance(sparse, KernelPerPass)
    for name, kernel in sparse.kernels.items():
        # each alone: which one a pass of this size takes is the machine's
        server = Server(rig, attention=(KernelPerPass({name: kernel}, {name: 1.0}), chosen))
        server.serve(rag(A, B, C))
        server.serve(rag(B, D, A, fusion=asks("first", 0.3)))
        assert server.fusion_pass.stats()["attention"]["passes"][name] > 0


@pytest.mark.parametrize("codec", CODECS)
def test_prices_are_those_of_pinned_memory(rig: Rig, codec: str) -> None:
    """The clock waits for the device, before and after each run."""
    means = rig.means(rig.sparse("fa3"))
    host: Any = PoolHost(rig.runner, codec)
    with rig.device.counting() as seen:
        assert measure_costs(means, host, max_tokens=MIN_TOKENS)
    pageable = {at for at, lines in seen.lines.items() if any("pageable" in e for e in lines)}
    assert pageable <= {"FlashInfer _copy_kv_lens"}, seen.told(pageable)


def test_calibration_runs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the choices, the first few: each moves and computes a prompt."""
    monkeypatch.setattr(calibration_trial, "MAX_SECONDS", 0)

    def tokens(start: int, length: int) -> list[int]:
        return [(start + 7 * i) % 89 + 1 for i in range(length)]

    prompt = CalibrationPrompt(tokens(0, 4), [tokens(i, 12) for i in range(2)], tokens(5, 8))
    found = calibration_trial.calibrate(rig.means(), [prompt], 0.15)
    assert 1 <= found.layer <= models.NUM_LAYERS
