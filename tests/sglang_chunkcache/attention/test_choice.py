"""Kernels that are right are held, with what was measured of each; one that does not compile or is
wrong is named. FlashInfer is its model here.

That the passes are right: test_recompute.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from sglang_chunkcache.attention import choice as attention_choice
from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.choice import Choice, Timer, choose, create
from sglang_chunkcache.attention.flashinfer import KERNELS
from sglang_chunkcache.attention.per_pass import KernelPerPass
from tests.reference import flashinfer

CPU = torch.device("cpu")
SHAPE = HeadShape(num_qo_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)


def choose_with(modules: Any, timer: Timer = lambda _: 1.0, **kwargs: Any) -> Choice:
    return choose(
        kwargs.pop("shape", SHAPE), device=CPU, scale=0.125, modules=modules, timer=timer, **kwargs
    )


def changed(change: Callable[[Any], None]) -> Any:
    """The model with `change` done to every wrapper that is made."""

    def create(*args: Any, **kwargs: Any) -> Any:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(*args, **kwargs)
        change(wrapper)
        return wrapper

    return SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=create)


def shift_limits(wrapper: Any, by: int) -> None:
    original = wrapper._attend
    wrapper._attend = lambda q, keys, values, limits, scale: original(
        q, keys, values, None if limits is None else limits + by, scale
    )


def forget_causal(wrapper: Any) -> None:
    original = wrapper.plan
    wrapper.plan = lambda *args, **kwargs: original(*args, **{**kwargs, "causal": False})


def answer_nan(wrapper: Any) -> None:
    wrapper._attend = lambda q, *_: (q * torch.nan, q[..., 0])


def fail_for(*backends: str) -> Callable[[Any], None]:
    def fail(wrapper: Any) -> None:
        if wrapper.backend in backends:
            raise RuntimeError("Ninja build failed.\n40 lines of nvcc")

    return fail


def held(choice: Choice) -> set[str]:
    return set(choice.attention.kernels) if choice.attention else set()


def test_all_are_held_and_the_fastest_is_taken() -> None:
    times = iter([3.0, 1.0])

    def timer(run: Callable[[], Any]) -> float:
        out = run()
        assert bool(out.isfinite().all())
        assert 0.14 < len(out) / attention_choice.TIMED_KEYS < 0.16
        return next(times)

    choice = choose_with(flashinfer, timer)
    assert (choice.ms, choice.failed) == ({"fa2": 3.0, "fa3": 1.0}, {})
    assert held(choice) == {*KERNELS}
    assert choice.attention is not None
    # as in the timed pass: on the CPU no pass has fewer blocks than multiprocessors
    slots = torch.arange(4096)
    choice.attention.plan([SparseRequest(slots[::7].clone(), slots)])
    assert choice.attention.passes == {"fa2": 0, "fa3": 1}


def test_one_that_does_not_compile_is_left_out() -> None:
    """FA3's headers may miss a library that FA2's do not need: FA2 serves then."""
    choice = choose_with(changed(fail_for("fa3")))
    assert held(choice) == set(choice.ms) == {"fa2"}
    assert choice.failed == dict.fromkeys(KERNELS[1:], "RuntimeError: Ninja build failed.")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        # the smallest mistakes there are, above rounding
        (partial(shift_limits, by=-1), "wrong: off by "),
        (partial(shift_limits, by=1), "wrong: off by "),
        # the checked pass has a run too: its kernel is another one, FlashInfer's own
        (forget_causal, "wrong: off by "),
        # no comparison with NaN holds, so the check has to ask for what holds
        (answer_nan, "wrong: off by nan"),
        (fail_for("fa2", "fa3"), "RuntimeError: Ninja build failed."),
    ],
)
def test_what_is_wrong_is_left_out(
    change: Callable[[Any], None], reason: str, dtype: torch.dtype
) -> None:
    """Not even timed. The server then falls back to the masked pass and logs the reasons."""
    choice = choose_with(changed(change), shape=HeadShape(2, 1, 64, dtype))
    assert (choice.attention, choice.ms) == (None, {})
    assert set(choice.failed) == set(KERNELS)
    assert all(why.startswith(reason) for why in choice.failed.values())


# For a loaded model


def make_layer(**changes: Any) -> Any:
    heads = {"tp_q_head_num": 4, "tp_k_head_num": 2}
    sizes = {"qk_head_dim": 64, "v_head_dim": 64, "scaling": 0.125}
    return SimpleNamespace(**{**heads, **sizes, **changes})


def make_runner(
    *layers: Any, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None
) -> Any:
    """What `create` looks at."""
    attentions = [SimpleNamespace(attn=layer) for layer in layers or (make_layer(), make_layer())]
    inner = SimpleNamespace(layers=[SimpleNamespace(self_attn=each) for each in attentions])
    model, pool = SimpleNamespace(model=inner), SimpleNamespace(dtype=kv_dtype or dtype)
    return SimpleNamespace(model=model, dtype=dtype, device="cpu", token_to_kv_pool=pool)


def told(reason: str, kind: str = "masked", kernel: str | None = None, **ms: float) -> Any:
    return {"kind": kind, "kernel": kernel, "reason": reason, "ms": ms}


def test_the_mask_needs_no_looking() -> None:
    assert create(None, "masked") == (None, told("asked for"))


REASONS = {
    "need CUDA, not cpu": make_runner(),
    "float32": make_runner(dtype=torch.float32),
    "head_dim 80": make_runner(make_layer(qk_head_dim=80, v_head_dim=80)),
    "layers differ": make_runner(make_layer(), make_layer(scaling=0.5)),
    "values of 32 dimensions under keys of 64": make_runner(make_layer(v_head_dim=32)),
    "a KV cache of torch.float16 under a model": make_runner(kv_dtype=torch.float16),
}


@pytest.mark.parametrize(("reason", "runner"), REASONS.items())
def test_auto_says_why_it_is_masked(reason: str, runner: Any) -> None:
    """A machine or model that cannot is no mistake; `sparse` is refused by the same reason."""
    attention, chosen = create(runner, "auto")
    assert attention is None
    assert reason in chosen["reason"]
    assert chosen == told(chosen["reason"])
    with pytest.raises(ValueError, match=f"--recompute-attention sparse: .*{reason}"):
        create(runner, "sparse")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which kernels could be tried."""
    monkeypatch.setattr(attention_choice, "unsupported", lambda *args, **kwargs: None)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("failed", [[], ["fa3"]])
def test_kernels_that_are_right_are_held(
    monkeypatch: pytest.MonkeyPatch, failed: list[str]
) -> None:
    """As they were tried: what compiling and a first pass pin is there when requests come."""
    right = [kernel for kernel in KERNELS if kernel not in failed]
    kernels: Any = {kernel: mock.Mock() for kernel in right}
    ms = dict.fromkeys(right, 2.0)
    choosing = mock.Mock(
        return_value=Choice(KernelPerPass(kernels, ms), ms, dict.fromkeys(failed, "nvcc: no"))
    )
    monkeypatch.setattr(attention_choice, "choose", choosing)
    attention, chosen = create(make_runner(), "auto")
    assert isinstance(attention, KernelPerPass)
    assert attention.kernels == kernels
    shape = HeadShape(4, 2, 64, torch.bfloat16)
    choosing.assert_called_once_with(shape, device=CPU, scale=0.125)
    reason = "; ".join(
        ["the fastest here, for each pass", *(f"{k} left out: nvcc: no" for k in failed)]
    )
    assert chosen == told(reason, "sparse", ", ".join(right), **ms)


@pytest.mark.usefixtures("gpu")
def test_no_kernel_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a broken compiler or a full GPU stop a server that can do without."""
    none = Choice(None, {}, {"fa2": "wrong: off by 3", "fa3": "nvcc: no"})
    for choosing, reason in (
        (mock.Mock(return_value=none), "fa2 left out: wrong: off by 3; fa3 left out: nvcc: no"),
        (mock.Mock(side_effect=RuntimeError("out of memory")), "RuntimeError: out of memory"),
    ):
        monkeypatch.setattr(attention_choice, "choose", choosing)
        assert create(make_runner(), "auto") == (None, told(reason))
        with pytest.raises(ValueError, match=f"sparse: {reason}"):
            create(make_runner(), "sparse")
