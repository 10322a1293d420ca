"""The bytes of one stored variant: a chunk's KV and what was measured of it.

    magic  version  num_bytes  secret's tag  checksum | header_len  header | KV context received …
    8      4        8          8             32       | 4           JSON   | as the header says

`outward` follows `received`; there are no gaps.

The checksum covers all other bytes, keyed by the secret if there is one: with a secret only who
knows it can make an entry. `pointer.py` frames its bytes likewise, with a magic of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from math import prod
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from sglang_chunkcache.storage.codec import CODECS, NONE, Codec, Sizes

MAGIC = b"chunkkv\n"
VERSION = 1
"""Of these bytes. Another one is refused."""

OVERHEAD_BYTES = 1024
"""More than an entry has beside its KV, if nothing was measured of it."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

T = TypeVar("T")
_FIXED = struct.Struct("<8sIQ8s32s")
_CHECKSUM = slice(_FIXED.size - 32, _FIXED.size)
_HEADER_LEN = struct.Struct("<I")


class Refusal(StrEnum):
    """Why stored bytes are not used."""

    TRUNCATED = "truncated"  # their number is not the one that they name
    FORMAT = "format"  # no entry, one of another version, or one whose header makes no sense
    SECRET = "secret"  # written with another secret, or without one
    DAMAGED = "damaged"  # the checksum is not that of the bytes
    OTHER_ENTRY = "other_entry"  # it is not the one asked for
    LAYOUT = "layout"  # KV of other sizes, another dtype or codec, or another number of tokens


class RefusedEntryError(Exception):
    """Bytes are not the entry that was asked for."""

    def __init__(self, reason: Refusal, told: str) -> None:
        super().__init__(f"{reason}: {told}")
        self.reason = reason


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Of one token's KV in one rank's pool, and how it is kept."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str  # of `DTYPES`
    codec: str = NONE.name  # of `CODECS`. The bytes of an entry without one name none

    @property
    def token_bytes(self) -> int:
        return CODECS[self.codec].nbytes(self.sizes(1))

    def sizes(self, num_tokens: int) -> Sizes:
        """Of so many tokens, in the pool's dtype."""
        dims = self.num_kv_heads, self.key_dim, self.value_dim
        return Sizes(self.num_layers, num_tokens, *dims, DTYPES[self.dtype])


class Masses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of a `radix_ext.cfo.Attention`."""

    inter: tuple[float, ...]
    prefix_lens: tuple[int, ...]
    intra: float
    head: float
    head_len: int


@dataclass(frozen=True, eq=False)
class Entry:
    """One variant. Tensors are contiguous and on the CPU: keys, at their own positions, and values,
    as the codec keeps them; what was measured, each [num_tokens] float32, None where it was not."""

    kv: tuple[Tensor, ...]
    masses: Masses | None = None
    context: Tensor | None = None  # with `masses`
    received: Tensor | None = None
    outward: Tensor | None = None
    heads: tuple[tuple[int, int], ...] = ()
    """The calibrated heads that scores and `outward` were measured with."""
    codec: Codec = NONE

    @property
    def layout(self) -> Layout:
        layers, _, heads, key_dim, value_dim, dtype = self.codec.sizes(self.kv)
        name = str(dtype).removeprefix("torch.")
        return Layout(layers, heads, key_dim, value_dim, name, self.codec.name)

    @property
    def num_tokens(self) -> int:
        return self.kv[0].shape[1]

    def tensors(self) -> list[Tensor]:
        """In the order of the bytes."""
        every = (*self.kv, self.context, self.received, self.outward)
        return [each for each in every if each is not None]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    layout: Layout
    num_tokens: int
    masses: Masses | None
    has_received: bool
    has_outward: bool
    heads: tuple[tuple[int, int], ...]


def write(entry: Entry, name: str, *, secret: bytes) -> Tensor:
    """[num_bytes] uint8, CPU: what `read` gives back. `secret` b"": none."""
    has = entry.received is not None, entry.outward is not None
    header = _Header(name, entry.layout, entry.num_tokens, entry.masses, *has, entry.heads)
    parts = [_bytes_of(each).numpy() for each in entry.tensors()]
    return framed(MAGIC, msgspec.json.encode(header), parts, secret=secret)


def read(
    data: Tensor,
    name: str,
    *,
    layout: Layout,
    num_tokens: int,
    secret: bytes,
) -> Entry:
    """The entry in `data`, [num_bytes] uint8 on the CPU, in tensors of its own.

    Args:
        layout, num_tokens: what it must have.
    Raises:
        RefusedEntryError: it is not this entry, whole and as it was written.
    """
    header, start = header_of(data, MAGIC, _Header, secret=secret)
    if header.name != name:
        raise RefusedEntryError(Refusal.OTHER_ENTRY, f"these are the bytes of {header.name}")
    if (header.layout, header.num_tokens) != (layout, num_tokens):
        raise RefusedEntryError(
            Refusal.LAYOUT,
            f"{header.num_tokens} tokens of {header.layout}, not {num_tokens} of {layout}",
        )
    codec = CODECS[layout.codec]
    kv = codec.shapes(layout.sizes(num_tokens))
    has = header.masses is not None, header.has_received, header.has_outward
    wanted = [*kv, *[((num_tokens,), torch.float32)] * sum(has)]
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in wanted]
    # Else `torch.split` raises, which counts as FAILED: the row would stay, and be asked again.
    if start + sum(sizes) != len(data):
        raise RefusedEntryError(
            Refusal.FORMAT, f"the header tells of {start + sum(sizes)} bytes, there are {len(data)}"
        )
    # Not pinned, which would hold up the forwards: KV goes on into a pool that is.
    made = [torch.empty(shape, dtype=dtype) for shape, dtype in wanted]
    for each, part in zip(made, torch.split(data[start:], sizes), strict=True):
        _bytes_of(each).numpy()[:] = part.numpy()
    measured = iter(made[len(kv) :])
    context, received, outward = (next(measured) if each else None for each in has)
    return Entry(
        tuple(made[: len(kv)]), header.masses, context, received, outward, header.heads, codec
    )


def framed(magic: bytes, header: bytes, parts: Sequence[Any], *, secret: bytes) -> Tensor:
    """[num_bytes] uint8, CPU: what `header_of` checks.
    `parts`: arrays or buffers of bytes, which follow the header."""
    start = _FIXED.size + _HEADER_LEN.size + len(header)
    data = torch.empty(start + sum(map(len, parts)), dtype=torch.uint8)
    view = _view(data)
    _FIXED.pack_into(view, 0, magic, VERSION, len(data), _tag(secret), bytes(32))
    _HEADER_LEN.pack_into(view, _FIXED.size, len(header))
    view[start - len(header) : start] = header
    # By numpy, on one core and without the interpreter's lock: torch would take all cores from a
    # forward.
    for part in parts:
        data.numpy()[start : start + len(part)] = part
        start += len(part)
    view[_CHECKSUM] = _checksum(view, secret)
    return data


def header_of(data: Tensor, magic: bytes, kind: type[T], *, secret: bytes) -> tuple[T, int]:
    """(the header, where the parts begin), of bytes that are whole. Raises RefusedEntryError: they
    are not, or their header is none of this kind."""
    view = _view(data)
    if len(view) < _FIXED.size + _HEADER_LEN.size:
        raise RefusedEntryError(Refusal.TRUNCATED, f"{len(view)} bytes are no entry")
    found, version, num_bytes, tag, checksum = _FIXED.unpack_from(view)
    if (found, version) != (magic, VERSION):
        raise RefusedEntryError(Refusal.FORMAT, f"it begins with {found!r}, version {version}")
    if num_bytes != len(view):
        raise RefusedEntryError(Refusal.TRUNCATED, f"{len(view)} of {num_bytes} bytes")
    # Before the checksum, which differs under another secret, too: that is no damage.
    if tag != _tag(secret):
        raise RefusedEntryError(Refusal.SECRET, "it was written with another secret")
    # Before the header is parsed: what is not ours is not decoded.
    if checksum != _checksum(view, secret):
        raise RefusedEntryError(Refusal.DAMAGED, "the checksum is another one")
    (header_len,) = _HEADER_LEN.unpack_from(view, _FIXED.size)
    start = _FIXED.size + _HEADER_LEN.size + header_len
    try:
        return msgspec.json.decode(view[start - header_len : start], type=kind), start
    except ValueError as error:  # whoever wrote it knows the secret, or there is none
        raise RefusedEntryError(Refusal.FORMAT, str(error)) from None


# Private, in order of use


def _view(data: Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _tag(secret: bytes) -> bytes:
    """Tells secrets apart, and gives none away."""
    return blake2b(b"tag", key=secret, digest_size=8).digest()


def _checksum(view: memoryview, secret: bytes) -> bytes:
    found: Any = blake2b(view[: _CHECKSUM.start], key=secret, digest_size=32)
    found.update(view[_CHECKSUM.stop :])
    return bytes(found.digest())
