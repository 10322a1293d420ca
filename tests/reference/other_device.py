"""A device that is told apart from the CPU: tensors that report `cuda:0` and compute on the CPU.

    device = OtherDevice()
    with device:                        operations on `cuda` work from here on, in this thread
        with device.counting() as seen:
            ...
    seen.waits      where -> how often the host waits for the device there
    seen.pinned     where -> bytes of each piece of pinned memory that is taken there

Raises where CUDA raises: operands on two devices, a device tensor as a numpy array. Counts what
makes the host wait: a number or a copy read back, a size that only the device knows, a copy from
pageable memory, a blocking copy to the device, an event or a stream that is waited for. `where` is
the innermost function of the package, or of tests/reference/flashinfer.py.

Knows no time and no order of streams: what is queued is done at once. Kernels that are not torch's
are doubles over `OtherTensor.inside`, run under `unwatched`. Needs torch's CUDA build, which
knows the device's name, and no driver (`lacking`).
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import sglang_chunkcache
from tests.reference import flashinfer

DEVICE = torch.device("cuda:0")
PACKAGE = Path(sglang_chunkcache.__file__).parent
FLASHINFER = flashinfer.__file__
UPLOAD = PACKAGE / "attention" / "upload.py"
"""Copies for others, who are named in its place."""

aten = torch.ops.aten
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
COPIES = {aten.copy_.default, aten._to_copy.default}
OF_UNKNOWN_SIZE = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
}
"""The device tells the host how large the result is."""
READ_BACK = {aten._local_scalar_dense.default, aten.equal.default, aten.histc.default}
"""The result, or the range of the bins, comes from the device."""


def lacking() -> str | None:
    """Why there is no other device here."""
    if torch.version.cuda is None:
        return "torch is no CUDA build"
    return "torch has a GPU" if torch.cuda.is_available() else None


class OtherTensor(torch.Tensor):
    """`inside`, a CPU tensor, on the other device."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OtherTensor:
        assert not isinstance(inner, OtherTensor)
        made: OtherTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made.inside = inner
        return made

    def __repr__(self, **how: Any) -> str:  # type: ignore[override]
        return f"OtherTensor({self.inside!r})"

    # What asks the driver, or torch itself, before any operation.

    def record_stream(self, stream: Any) -> None:
        """Memory is freed when nobody has it."""

    def data_ptr(self) -> int:
        return self.inside.data_ptr()

    def tolist(self) -> Any:
        _entered().waits("a list")
        return self.inside.tolist()

    def numpy(self, **how: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _places(args[1]), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _entered().operate(func, args, kwargs or {})


@dataclass
class Seen:
    """What was counted."""

    waits: Counter[str] = field(default_factory=Counter)
    pinned: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    lines: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """where -> file:line and why, of each wait there."""
    is_blind: bool = False
    """On a GPU, where nothing is counted."""

    def told(self, wheres: Iterable[str]) -> str:
        """The lines of these waits."""
        return "\n".join(f"{where}: {', '.join(sorted(self.lines[where]))}" for where in wheres)


class OtherDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The device, while it is entered. One at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        torch._C._ensureCUDADeviceGuardSet()
        self._seen: list[Seen] = []
        self._num_unwatched = 0
        self._pinned: dict[int, Any] = {}
        """Where a storage begins -> what keeps it, so that nobody else's begins there."""
        self._registered: list[range] = []

    def __enter__(self) -> OtherDevice:
        global _device
        assert _device is None, "the other device is entered twice"
        _device = self
        self._patches = ExitStack()
        for owner, doubles in ((torch.cuda, _cuda_doubles(self)), (torch, _made_from_lists())):
            for name, double in doubles.items():
                self._patches.enter_context(mock.patch.object(owner, name, double))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        global _device
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()
        _device = None

    @contextmanager
    def counting(self) -> Iterator[Seen]:
        """What happens in the block."""
        self._seen.append(Seen())
        try:
            yield self._seen[-1]
        finally:
            self._seen.pop()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """A double in the place of a kernel, which would not wait."""
        self._num_unwatched += 1
        try:
            yield
        finally:
            self._num_unwatched -= 1

    @contextmanager
    def as_kernel(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        """A kernel's arguments for its double: the tensors inside. On the host it reads none."""
        for name, each in arguments.items():
            tensors = [leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)]
            assert all(isinstance(leaf, OtherTensor) for leaf in tensors), f"{name}: on the host"
        with self.unwatched():
            yield tree_map(inner_of, arguments)

    def waits(self, why: str) -> None:
        """The host waits for the device."""
        if self._num_unwatched or (found := _asker()) is None:
            return
        where, line = found
        for seen in self._seen:
            seen.waits[where] += 1
            seen.lines[where].add(f"{line} ({why})")

    def takes_pinned(self, num_bytes: int, begin: int, keeper: Any) -> None:
        """Memory from `begin` on is pinned for good."""
        if isinstance(keeper, range):
            self._registered.append(keeper)
        else:
            self._pinned[begin] = keeper
        where, _ = _asker() or ("?", "")
        for seen in self._seen:
            seen.pinned[where].append(num_bytes)

    def is_pinned(self, tensor: Tensor) -> bool:
        begin = tensor.untyped_storage().data_ptr()
        return begin in self._pinned or any(begin in each for each in self._registered)

    # operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.operate(func, args, dict(kwargs or {}))

    def operate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operation on the tensors inside, its result on the device that torch would take."""
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each for each in tensors if isinstance(each, OtherTensor)]
        on_host = [each for each in tensors if not isinstance(each, OtherTensor)]
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func is aten._pin_memory.default:
            return self._pin(args[0])
        if on_device:
            self._check_one_device(func, on_host)
            self._count(func, args, kwargs)
        is_other, is_pinned = bool(on_device), bool(kwargs.pop("pin_memory", False))
        if kwargs.get("device") is not None:
            is_other = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = torch.device("cpu")
        if func in COPIES:
            self._count_copy(func, args, kwargs, is_other)
        result: Any
        if func is aten._scaled_dot_product_flash_attention.default:
            result = _flash_attend(*tree_map(inner_of, args), **tree_map(inner_of, kwargs))
        else:
            result = func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs))
        if is_pinned:
            self._take(result)
        if not is_other:
            return result
        # what is written in place is the tensor that was given
        given = {id(each.inside): each for each in on_device}
        return tree_map(lambda each: given[id(each)] if id(each) in given else _outer(each), result)

    def _check_one_device(self, func: Any, on_host: list[Tensor]) -> None:
        """As CUDA: numbers may be on the host, what is copied, and what indexes."""
        if func not in COPIES | INDEXED and any(each.dim() for each in on_host):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices,"
                f" cuda:0 and cpu! ({func})"
            )

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if func in OF_UNKNOWN_SIZE:
            self.waits("a size")
        elif func in READ_BACK:
            self.waits("a number")
        elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.waits("a size")
        elif func in INDEXED:
            for index in filter(lambda each: each is not None, args[1]):
                if index.dtype in (torch.bool, torch.uint8):
                    self.waits("the size of a boolean index")
                elif not isinstance(index, OtherTensor) and index.dim():
                    self.waits("an index on the host")

    def _count_copy(self, func: Any, args: Any, kwargs: dict[str, Any], is_other: bool) -> None:
        """What is queued comes from, or goes to, pinned memory and does not block."""
        if func is aten.copy_.default:
            target, source = args[:2]
            is_queued = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            is_other, host = isinstance(target, OtherTensor), target
            if is_other and not source.dim():
                return  # `tensor[i] = 1.0` fills
        else:
            source, host = args[0], None
            is_queued = kwargs.get("non_blocking", False)
        was_other = isinstance(source, OtherTensor)
        if is_other == was_other or not source.numel():
            return
        if is_other:
            if not self.is_pinned(source):
                self.waits("copied from pageable memory")
            elif not is_queued:
                self.waits("a copy that blocks")
        elif not (is_queued and host is not None and self.is_pinned(host)):
            self.waits("copied to the host")

    def _pin(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, OtherTensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor': only CPU memory")
        return self._take(tensor.clone(memory_format=torch.contiguous_format))

    def _take(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.takes_pinned(storage.nbytes(), storage.data_ptr(), tensor)
        return tensor


def move_runner(runner: Any) -> None:
    """SGLang's ModelRunner, its weights and pools, onto the other device, which is entered. For
    good; its attention runs unwatched."""
    moved: dict[int, Tensor] = {}

    def on_device(tensor: Tensor) -> Tensor:
        if isinstance(tensor, OtherTensor):
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = made = OtherTensor(tensor.detach())
            for name, value in vars(tensor).items():  # SGLang's own, of a weight
                setattr(made, name, value)
        return moved[id(tensor)]

    from sglang_chunkcache.fusion.relocate import _float32_table

    for module in runner.model.modules():
        if "cos_sin_cache" in module._buffers:  # as on CUDA
            module._buffers["cos_sin_cache"] = _float32_table(module)
    for module in runner.model.modules():
        for held in (module._parameters, module._buffers):
            held.update({n: on_device(each) for n, each in held.items() if each is not None})
    rows, slots = runner.req_to_token_pool, runner.token_to_kv_pool_allocator
    for pool, names in (
        (runner.token_to_kv_pool, vars(runner.token_to_kv_pool)),
        (rows, ["req_to_token"]),
        (slots, ["free_pages", "release_pages"]),
    ):
        for name in names:
            value = getattr(pool, name)
            if isinstance(value, Tensor):
                setattr(pool, name, on_device(value))
            elif isinstance(value, list) and value and isinstance(value[0], Tensor):
                setattr(pool, name, [*map(on_device, value)])
        pool.device = "cuda"
    runner.device = "cuda"
    backend = runner.attn_backend
    kind = type(backend)

    def forward_extend(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _entered().unwatched():
            return kind.forward_extend(self, *args, **kwargs)

    backend.__class__ = type(kind.__name__, (kind,), {"forward_extend": forward_extend})
    backend.device = "cuda"


# The entered device

_device: OtherDevice | None = None


def _entered() -> OtherDevice:
    assert _device is not None, "a tensor of the other device is used after it"
    return _device


def _asker() -> tuple[str, str] | None:
    """(file and function, file:line) that asked for the operation."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if code.co_filename == FLASHINFER:
            return f"FlashInfer {code.co_name}", f"{path.name}:{frame.f_lineno}"
        if path != UPLOAD and path.is_relative_to(PACKAGE):
            name = path.relative_to(PACKAGE)
            function, *_ = code.co_qualname.split(".<locals>")
            return f"{name} {function}", f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def inner_of(each: Any) -> Any:
    """The tensor inside, of a tensor of the device."""
    return each.inside if isinstance(each, OtherTensor) else each


def _outer(each: Any) -> Any:
    return OtherTensor(each) if isinstance(each, Tensor) else each


# Before torch asks for an operation


def _attend(*args: Any, **kwargs: Any) -> Tensor:
    """torch chooses a kernel by asking the driver."""
    device = _entered()
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    device._check_one_device(None, [e for e in tensors if not isinstance(e, OtherTensor)])
    found: Tensor = scaled_dot_product_attention(*map(inner_of, args), **tree_map(inner_of, kwargs))
    return OtherTensor(found)


def _flash_attend(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False, *, scale: float
) -> tuple[Any, ...]:
    """CUDA's operation gives more than the CPU's: what only its backward reads is empty."""
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    nothing = [torch.empty(0) for _ in range(5)]
    sizes = q.shape[2], k.shape[2]
    return (*flash(q, k, v, dropout, is_causal, scale=scale), *nothing[:2], *sizes, *nothing[2:])


def _places(index: Any) -> Any:
    """A list of places is an index on the host."""
    if isinstance(index, tuple):
        return tuple(map(_places, index))
    return torch.tensor(index) if isinstance(index, list) else index


def _made_from_lists() -> dict[str, Any]:
    """`torch.tensor` and `torch.as_tensor`, which ask the driver: a copy from the host's memory."""

    def of(make: Any) -> Any:
        def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is None or torch.device(device).type != "cuda":
                how = {} if device is None else {"device": device}
                return make(data, *args, **how, **kwargs)  # type: ignore[no-any-return]
            if isinstance(data, Tensor):
                return data.to(device, *args, **kwargs)
            return make(data, *args, **kwargs).to(device)  # type: ignore[no-any-return]

        return made

    return {"tensor": of(torch.tensor), "as_tensor": of(torch.as_tensor)}


# torch.cuda


def _cuda_doubles(device: OtherDevice) -> dict[str, Any]:
    class Event:
        def __init__(self, enable_timing: bool = False, **how: Any) -> None:
            self._is_recorded = False

        def record(self, stream: Any = None) -> None:
            self._is_recorded = True

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            if self._is_recorded:
                device.waits("an event")

        def elapsed_time(self, end: Event) -> float:
            return 1.0

    class Stream:
        device = DEVICE

        def __init__(self, device: Any = None, **how: Any) -> None:
            self.cuda_stream = id(self)

        def wait_stream(self, stream: Any) -> None:
            """Of the device, not of the host."""

        def wait_event(self, event: Any) -> None:
            """Likewise."""

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record()
            return event

        def synchronize(self) -> None:
            device.waits("a stream")

        def query(self) -> bool:
            return True

    current = [Stream()]

    @contextmanager
    def stream(given: Any) -> Iterator[None]:
        current.append(given)
        try:
            yield
        finally:
            current.pop()

    def register(begin: int, num_bytes: int, flags: int) -> int:
        device.takes_pinned(num_bytes, begin, range(begin, begin + num_bytes))
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda begin: 0)
    return {
        "Event": Event,
        "Stream": Stream,
        "stream": stream,
        "current_stream": lambda device=None: current[-1],
        "current_device": lambda: 0,
        "synchronize": lambda device_=None: device.waits("the device"),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "other",
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
        "cudart": lambda: runtime,
        "_lazy_init": lambda: None,
    }
