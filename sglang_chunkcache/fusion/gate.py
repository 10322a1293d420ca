"""The start-up gate: does moving and recomputing KV give on this very model what an ordinary
prefill gives?

    full      head | A | B | question     SGLang's own attention, once whole and several times in
                                          pieces
    elsewhere head | B                    B's KV, computed alone
    moved     head | A | B | question     head and A from `full`, B moved from `elsewhere`, then
                                          recomputed whole;
              ###  # #  ### #  # ###  #   then some of it once more, scattered

Layer 0 knows no context, so there moved keys must equal computed ones. With all of B recomputed,
its K/V and the question's logits must equal those of `full`. Scattered tokens run once more over KV
that is right must get the K/V they have, which they do if each sees the keys up to its own and no
other.

What "equal" means is measured on the machine: ordinary prefill in pieces differs from prefill in
one, too. Kernels that add in the same order for any piece give no difference at all, so a rounding
per layer is granted in any case (`_rounding`).

The pass attends as it will in service: sparse, or masked.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise, permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_chunkcache.attention import choice
from sglang_chunkcache.attention.base import PassSequence, SparseAttention, SparseRequest
from sglang_chunkcache.attention.masked import Observer
from sglang_chunkcache.attention.per_pass import KernelPerPass
from sglang_chunkcache.attention.slot_map import rows_of
from sglang_chunkcache.fusion.recompute import run_pass
from sglang_chunkcache.fusion.relocate import KeyTurn, rotary_of
from sglang_chunkcache.fusion.trial_rows import Means, Row

logger = logging.getLogger(__name__)

HEAD_LEN, CHUNK_LEN, QUESTION_LEN = 8, 48, 8
"""Tokens: short enough for any pool and for SGLang's slow attention on the CPU."""

START = HEAD_LEN + CHUNK_LEN
END = START + CHUNK_LEN
PROMPT_LEN = END + QUESTION_LEN
"""B is [START, END) of the prompt."""

SPLITS = ((START,), (END,), (START, END))
"""Where ordinary prefill is cut to measure its noise; both at once is what the pass does."""

MAX_ULPS = 4.0
"""Layer 0, moved or stored and moved. In a coarse dtype two roundings, each half a unit, of keys
that were rounded once themselves (1.6 units seen); in float32 the turn's own products and sums
round as well (2.4 units seen). One position off is 60 units or more."""

NOISE_FACTOR = 8.0
"""Logits and K/V may differ by this many times prefill's own noise: about the middle, as a ratio,
between right runs and mistakes in bfloat16, where these are nearest: at worst .49 and 3.0 times the
limit over 200 token seeds of ten draws of weights and seven model families, .60 and 1,550 in
float32 (`launch/test.sh -m nightly -k gate_sweep`, on an Intel Xeon with AVX-512)."""

MIN_NOISE = 1e-5
"""Least noise granted, relative: sums in another order, in float32."""

QUANTILE = 0.75
"""Of the tokens' differences: a few tokens may take other experts in one of the prefills."""

# From 1: the token at 0 sees one key, and with one less it has nothing to attend to.
SCATTERED = [
    [i for i in range(1, PROMPT_LEN) if i % 16 in chosen] for chosen in ((0, 1, 2, 3), (7, 10, 13))
]
"""Positions that are run once more, clusters and singles, as two requests of one pass."""

ALL_SCATTERED = [*chain(*SCATTERED)]


class _Noise(NamedTuple):
    """What prefill in pieces differs by, the most over `SPLITS`, at least a rounding per layer."""

    ulps: float
    kv: Tensor
    """[2 * num_layers], keys and values of each layer in turn."""
    logits: float


@dataclass(frozen=True)
class GateFigures:
    """What was measured. Units in the last place are those of the pool's dtype at the largest key
    of layer 0. Errors of logits and K/V are relative: the norm of a token's difference by the norm
    of what it should be, the upper quartile over tokens."""

    moved_ulps: float
    """Layer-0 keys of B moved on the device against computed ones."""
    stored_ulps: float
    """The same by way of the store."""
    far_ulps: float
    """Random keys moved over the whole context, against SGLang's own at the new positions."""
    noise_ulps: float
    """The same for prefill in pieces."""
    kv_error: float
    """K/V of B, everything recomputed, against full prefill, in multiples of that layer's noise;
    the largest over layers, keys, values."""
    logit_error: float
    """Logits of the question, everything recomputed, against full prefill."""
    logit_noise: float
    """The same for prefill in pieces, at least a rounding per layer."""
    logit_error_unrecomputed: float
    """The same with B moved and not recomputed, as if recomputation did nothing."""
    scattered_error: float
    """Change of the K/V of scattered tokens that are run once more, measured as `kv_error`."""
    scattered_error_off_by_one: float
    """The same, were each token to see one key less, as with wrong limits."""
    dtype: str

    @property
    def max_ulps(self) -> float:
        """A turn's roundings, on top of what prefill's own keys differ by (twice:
        a turn may add up two of a key's numbers)."""
        return MAX_ULPS + 2 * self.noise_ulps

    @property
    def max_logit_error(self) -> float:
        """The tolerance."""
        return NOISE_FACTOR * self.logit_noise

    @property
    def limits(self) -> dict[str, tuple[float, float]]:
        """Each figure that decides, with the most it may be."""
        return {
            "moved_ulps": (self.moved_ulps, self.max_ulps),
            "stored_ulps": (self.stored_ulps, self.max_ulps),
            "far_ulps": (self.far_ulps, self.max_ulps),
            "kv_error": (self.kv_error, NOISE_FACTOR),
            "logit_error": (self.logit_error, self.max_logit_error),
            "scattered_error": (self.scattered_error, NOISE_FACTOR),
        }

    @property
    def passed(self) -> bool:
        """Whether fused mode may run."""
        return all(figure <= limit for figure, limit in self.limits.values())  # NaN fails

    @property
    def conclusive(self) -> bool:
        """Whether mistakes would have shown: with dummy weights logits are always the same."""
        return (
            self.logit_error_unrecomputed > self.max_logit_error
            and self.scattered_error_off_by_one > NOISE_FACTOR
        )

    def as_dict(self) -> dict[str, Any]:
        """For stats and the command."""
        return {
            **asdict(self),
            "max_ulps": self.max_ulps,
            "max_kv_error": NOISE_FACTOR,
            "max_logit_error": self.max_logit_error,
            "max_scattered_error": NOISE_FACTOR,
            "conclusive": self.conclusive,
            "passed": self.passed,
        }

    def __str__(self) -> str:
        measured = [
            f"{name} {figure:.4g} (limit {limit:.4g})"
            for name, (figure, limit) in self.limits.items()
        ]
        return ", ".join(
            [
                *measured,
                f"logit_error_unrecomputed {self.logit_error_unrecomputed:.4g}",
                f"scattered_error_off_by_one {self.scattered_error_off_by_one:.4g}",
            ]
        )


def gated_attention(
    means: Means, option: str
) -> tuple[KernelPerPass | None, dict[str, Any], GateFigures]:
    """The recompute pass's attention as `choice.create` chooses it, of its kernels those that pass
    the gate, and the gate's figures with the last of these.

    With `auto` and no such kernel it is the masked one; with `sparse` all whose figures failed.

    Raises:
        ValueError: `sparse` is asked for and not possible.
        RuntimeError: as `open_trial`; with `sparse`, if no kernel gets through the gate.
    """
    sparse, attention = choice.create(means.runner, option)
    with open_trial(means) as trial:
        if sparse is None:
            return None, attention, trial.measure(None)
        measured, failed = dict[str, GateFigures](), dict[str, str]()
        # One by one: a trial's passes are small, and would all take the same.
        for name, kernel in sparse.kernels.items():
            try:
                figures = measured[name] = trial.measure(kernel)
                if not figures.passed:
                    failed[name] = str(figures)
            except Exception as error:
                logger.warning("chunk cache: the gate failed with %s", name, exc_info=True)
                failed[name] = f"{type(error).__name__}: {error}"
        told = (f"{name} failed the gate: {why}" for name, why in failed.items())
        reason = "; ".join([attention["reason"], *told])
        right = [name for name in measured if name not in failed]
        # Asked for by name, they are not replaced: the start is refused with their figures.
        if kept := right or (option == "sparse" and [*measured]):
            attention = {**attention, "kernel": ", ".join(kept), "reason": reason}
            return sparse.only(kept), attention, measured[kept[-1]]
        if option == "sparse":
            raise RuntimeError(reason)
        attention = {**attention, "kind": "masked", "kernel": None, "reason": reason}
        return None, attention, trial.measure(None)


@contextmanager
def open_trial(means: Means, *, seed: int = 0) -> Iterator[Trial]:
    """A random prompt, prefilled in slots and rows that are given back.

    Raises:
        RuntimeError: the pool has not the slots and rows for four prompts of about a hundred
            tokens.
    """
    rng = random.Random(seed)
    prompt = [rng.randrange(means.runner.model_config.vocab_size) for _ in range(PROMPT_LEN)]
    lens = [PROMPT_LEN, PROMPT_LEN, HEAD_LEN + CHUNK_LEN, PROMPT_LEN]
    with torch.no_grad(), means.rows(lens) as rows:
        yield Trial(means, prompt, rows)


class Trial:
    """One prompt: what ordinary prefill gives and how much that varies, then what the pass gives,
    with any attention.

    Args:
        rows: `full`, `full` in pieces, `elsewhere` and `moved`.
    """

    def __init__(self, means: Means, prompt: Sequence[int], rows: Sequence[Row]) -> None:
        self._means, self._pool, self._prompt = means, means.pool, prompt
        self._full, self._pieces, self._elsewhere, self._moved = rows
        device = self._full.slots.device
        self._before = torch.arange(START, device=device)
        self._b = torch.arange(START, END, device=device)
        self._b_elsewhere = self._b - START + HEAD_LEN
        self._logits = means.logits(means.prefill(self._full, prompt)[-QUESTION_LEN:])
        self._kv = _kv(self._pool, self._full.slots)
        means.prefill(self._elsewhere, [*prompt[:HEAD_LEN], *prompt[START:END]])
        self._noise = self._measure_noise()
        # After the noise, in multiples of which the second one is measured.
        self._mistakes = self._unrecomputed(), self._off_by_one()

    def measure(self, sparse: SparseAttention | None) -> GateFigures:
        """The figures of the pass with this attention; None: the mask."""
        means = replace(self._means, sparse=sparse)
        # In this order: `_move` leaves head, A and B in the row, which `_recompute` attends to.
        far_ulps, stored_ulps, moved_ulps = self._far(), self._store(), self._move()
        kv_error, logit_error = self._recompute(means)
        return GateFigures(
            moved_ulps=moved_ulps,
            stored_ulps=stored_ulps,
            far_ulps=far_ulps,
            noise_ulps=self._noise.ulps,
            kv_error=kv_error,
            logit_error=logit_error,
            logit_noise=self._noise.logits,
            logit_error_unrecomputed=self._mistakes[0],
            # After `_recompute`: by now the row is right
            scattered_error=self._run_scattered(means),
            scattered_error_off_by_one=self._mistakes[1],
            dtype=str(self._pool.dtype).removeprefix("torch."),
        )

    # What prefill differs by, and what mistakes would

    def _measure_noise(self) -> _Noise:
        found = []
        for split in SPLITS:
            for start, end in pairwise([0, *split, PROMPT_LEN]):
                hidden = self._means.prefill(self._pieces, self._prompt, start, end)
            kv = _quartile(_errors(_kv(self._pool, self._pieces.slots), self._kv))
            found.append((self._ulps(self._pieces), kv, self._logit_error(hidden)))
        ulps, kvs, logits = zip(*found, strict=True)
        num_layers, dtype = len(self._kv) // 2, self._pool.dtype
        # Kernels that add in one order for any piece show no noise: a rounding would fail the gate.
        least = torch.tensor(
            [_rounding(dtype, layer) for layer in range(num_layers) for _ in ("keys", "values")]
        )
        return _Noise(
            ulps=float(torch.tensor(ulps).max()),  # NaN stays NaN
            kv=torch.stack([least.to(kvs[0].device), *kvs]).amax(0),
            logits=float(torch.tensor([_rounding(dtype, num_layers), *logits]).max()),
        )

    def _unrecomputed(self) -> float:
        """Ordinary prefill of the question over B that was only moved."""
        self._move()
        return self._logit_error(self._means.prefill(self._moved, self._prompt, END))

    def _off_by_one(self) -> float:
        """Scattered tokens of the row that is right, by the mask, each without its own key."""
        ids, slots = torch.tensor(self._prompt), self._full.slots
        # A sequence each: it sees all its keys at or before its position, so its own is not listed.
        one_less = [
            PassSequence(ids[i : i + 1], SparseRequest(torch.tensor([i]), slots[:i]), own=False)
            for i in ALL_SCATTERED
        ]
        fresh = _FreshKV()
        run_pass(self._means.runner, one_less, observer=fresh)
        return self._scattered_multiple(fresh.kv, [kv[ALL_SCATTERED] for kv in self._kv])

    # The pass

    def _store(self) -> float:
        """B by way of the store; `stored_ulps`."""
        table, slots = self._means.table, self._moved.slots[self._b]
        at, rows = self._b_elsewhere, rows_of(self._pool)
        source, target = rows(self._elsewhere.slots[at]), rows(slots)
        for buffer in (*self._pool.k_buffer, *self._pool.v_buffer):
            buffer[target] = buffer[source]
        KeyTurn(self._pool, table, at, slots, self._b)(range(self._pool.layer_num))
        return self._ulps(self._moved)

    def _far(self) -> float:
        """Random keys as SGLang rotates them at one position, moved to another; `far_ulps`."""
        buffer, rotary = self._pool.k_buffer[0], rotary_of(self._means.runner)
        context_len = self._means.runner.model_config.context_len
        last = min(context_len, self._means.table.num_positions) - 1
        pairs = list(permutations((0, last // 2, last), 2))
        old, new = torch.tensor(pairs, device=buffer.device).T
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(len(pairs), *buffer.shape[1:], generator=generator).to(buffer)
        before, wanted = (
            rotary(at.contiguous(), *(keys.flatten(1).clone() for _ in "qk"))[1].view_as(keys)
            for at in (old, new)
        )
        source, target = (row.slots[: len(pairs)] for row in (self._pieces, self._moved))
        rows = rows_of(self._pool)
        buffer[rows(source)] = before
        self._means.move(source, old, target, new)
        return _ulps_of(buffer[rows(target)], wanted)

    def _move(self) -> float:
        """Head, A and B into the moved row; `moved_ulps`."""
        for source, old, new in (
            (self._full, self._before, self._before),
            (self._elsewhere, self._b_elsewhere, self._b),
        ):
            self._means.move(source.slots[old], old, self._moved.slots[new], new)
        return self._ulps(self._moved)

    def _recompute(self, means: Means) -> tuple[float, float]:
        """All of B, then the question; `kv_error` and `logit_error`."""
        means.recompute(self._moved, self._prompt, [range(START, END)])
        hidden = means.recompute(self._moved, self._prompt, [range(END, PROMPT_LEN)])
        errors = _errors(
            _kv(self._pool, self._moved.slots[self._b]), [kv[self._b] for kv in self._kv]
        )
        return float((_quartile(errors) / self._noise.kv).max()), self._logit_error(hidden)

    def _run_scattered(self, means: Means) -> float:
        """Scattered tokens of the moved row, all of it recomputed; `scattered_error`."""
        slots = self._moved.slots[ALL_SCATTERED]
        right, rows = _kv(self._pool, slots), rows_of(self._pool)(slots)
        for buffer in (*self._pool.k_buffer, *self._pool.v_buffer):
            buffer[rows] = float("nan")  # to be written in each layer before anything attends
        means.recompute(self._moved, self._prompt, SCATTERED)
        return self._scattered_multiple(_kv(self._pool, slots), right)

    # Differences

    def _scattered_multiple(self, got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
        # By request: what one alone gets wrong could pass below the quartile of both.
        parts = torch.split(_errors(got, expected), [len(request) for request in SCATTERED], dim=1)
        return float(torch.stack([_quartile(part) / self._noise.kv for part in parts]).max())

    def _logit_error(self, hidden: Tensor) -> float:
        logits = self._means.logits(hidden[-QUESTION_LEN:])
        return float(_quartile(_errors([logits], [self._logits])))

    def _ulps(self, row: Row) -> float:
        """Of layer-0 keys of B, against those of `full`."""
        rows = rows_of(self._pool)(row.slots[self._b])
        have = self._pool.k_buffer[0][rows].flatten(1)
        return _ulps_of(have, self._kv[0][self._b].to(have.dtype))


def _ulps_of(have: Tensor, want: Tensor) -> float:
    """The largest difference, in units in the last place of the largest number that is wanted."""
    ulp = torch.finfo(want.dtype).eps * want.float().abs().max()
    return float((have.float() - want.float()).abs().max() / ulp)


class _FreshKV(Observer):
    """Keeps what a pass computes, as `_kv` reads what the pool holds."""

    def __init__(self) -> None:
        self.kv: list[Tensor] = []

    def on_kv(self, layer_id: int, keys: Tensor, values: Tensor) -> None:
        self.kv += [keys.flatten(1).float(), values.flatten(1).float()]


def _kv(pool: Any, slots: Tensor) -> list[Tensor]:
    """Keys and values of each layer in turn, [n, num_kv_heads * head_dim] float32."""
    layers, rows = zip(pool.k_buffer, pool.v_buffer, strict=True), rows_of(pool)(slots)
    return [buffer[rows].flatten(1).float() for layer in layers for buffer in layer]


def _errors(got: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """[len(got), n]: relative difference of each token's."""
    # KV that is 0 in both is equal, and 0 / 0 would fail the gate as NaN.
    tiny = torch.finfo(torch.float32).tiny
    pairs = zip(got, expected, strict=True)
    return torch.stack(
        [(have - want).norm(dim=1) / want.norm(dim=1).clamp(min=tiny) for have, want in pairs]
    )


def _quartile(errors: Tensor) -> Tensor:
    return errors.quantile(QUANTILE, dim=1)


def _rounding(dtype: torch.dtype, num_layers: int) -> float:
    """Relative noise of so many layers, each of which rounds once by half a unit:
    independent errors add as squares."""
    half_unit: float = torch.finfo(dtype).eps / 2
    return max(MIN_NOISE, half_unit * math.sqrt(max(1, num_layers)))
