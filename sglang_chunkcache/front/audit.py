"""The audit: a share of the answers over moved KV is compared with an exact prefill of the same
tokens.

    listen     the engine is asked for the answer's best tokens as well; what the client did not ask
               for is taken out again
    finished   KV was moved and the answer is complete: a check waits
    check      prompt and answer as one exact prefill, once nothing else waits at the rank; nothing
               of it stays in the tree
    compare    agreement and KL are counted by who chose, ratio and tenant, and tell
               `radix_ext.audit` what they decide

One check at a time, the oldest first if its rank has room. One that could not be sent for
MAX_WAIT_S is dropped. Every request that was drawn and not compared is counted by its reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sglang.srt.environ import envs

from radix_ext.agreement import Row, Tally, compare
from radix_ext.fusion_request import AskedRatio
from sglang_chunkcache.front.bookkeeper import Bookkeeper
from sglang_chunkcache.front.request import Planned, RagRequest

logger = logging.getLogger(__name__)

ANSWER_BEST, EXACT_BEST = 5, 20
"""Best tokens listed of each position: enough for KL at temperature 1,
and below it for the rest (radix_ext/agreement.py)."""
MAX_POSITIONS = 256
"""Of an answer; the others are not compared.
Each takes a row of logits: 256 of a vocabulary of 150,000 take 150 MB."""
MAX_WAIT_S = 60.0
MAX_WAITING = 64
"""Checks that wait. More are dropped: each holds its plan, prompt and answer."""
POLL_S = 0.1
"""Between two looks at a rank where something waits."""
MAX_TALLIES = 500
"""Selectors, ratios and tenants. All others are counted as tenant OTHERS, without ratio."""
OTHERS = "others"

GREEDY = 1e-6
"""Below this temperature SGLang takes the best token, and tells its logprobs at 1."""

LISTS = ("input_top_logprobs", "output_top_logprobs")
"""Best tokens by position, in SGLang's `meta_info`."""
PLAIN = ("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length")
"""What is there with any logprobs."""
NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "logit_bias": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
}
"""Sampling parameters that change logits, and the values with which they do not.
A prefill's logprobs know none of them."""


class Skip(StrEnum):
    """Why a request that was drawn is not audited. The value is the label of its count."""

    SEVERAL = "several_answers"
    CONSTRAINED = "constrained"
    """A grammar, a bias or a penalty changes the answer's probabilities."""
    TEMPERATURE = "temperature"
    """Above 1."""
    UNMOVED = "nothing_moved"
    INCOMPLETE = "incomplete"
    """Aborted, or given up by the client."""
    TOO_LONG = "too_long"
    """No room for a prompt that has a token of the answer."""
    FULL = "queue_full"
    LATE = "late"
    """Something waited at its rank for MAX_WAIT_S."""
    FLUSHED = "flushed"
    """The rank's cache was emptied since, perhaps for other weights."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """An answer to compare."""

    planned: Planned
    """Its terms are what was asked for: what such requests get decides their state, whoever
    chose."""
    input_ids: list[int]
    """Prompt and answer."""
    rows: list[Row]
    """Of the answer's tokens."""
    temperature: float
    selected_by: str
    """As the answer says it: what did choose."""
    ratio: AskedRatio
    """None: nothing is recomputed."""
    rank: int
    epoch: int
    """Of the rank's cache."""
    since: float


@dataclass(slots=True)
class Listener:
    """Takes an answer's best tokens out of SGLang's outputs,
    and leaves the client what it asked for."""

    asked_top: int | None
    """Best tokens that the client asked for. None: no logprobs at all."""
    temperature: float
    rows: list[Row] = field(default_factory=list)
    shown: list[Any] = field(default_factory=list)
    is_over: bool = False

    @classmethod
    def on(cls, obj: Any, temperature: float) -> Listener:
        """Have SGLang's request `obj` return what is needed."""
        asked = (obj.top_logprobs_num or 0) if obj.return_logprob else None
        if asked is None:
            # Of the answer alone: `logprob_start_len` stays -1. No texts: decoding five tokens a
            # position would be for nothing.
            obj.return_logprob, obj.return_text_in_logprobs = True, False
        obj.top_logprobs_num = max(ANSWER_BEST, asked or 0)
        return cls(asked, temperature)

    def hear(self, meta: dict[str, Any], *, incremental: bool) -> None:
        """Read one output's `meta_info`, and take out of it what the client did not ask for."""
        listed = meta.get("output_top_logprobs") or []
        # Without increments SGLang lists all positions in every output: read anew each time, an
        # answer's work would grow with the square of its length.
        new = listed if incremental else listed[len(self.rows) :]
        self.rows += [[(one[0], one[1]) for one in row or ()] for row in new]
        if not self.asked_top:
            for name in LISTS if self.asked_top == 0 else (*PLAIN, *LISTS):
                meta.pop(name, None)
        elif self.asked_top < ANSWER_BEST:
            shown = _cut(new, self.asked_top)
            self.shown += shown
            if "output_top_logprobs" in meta:
                # a list of its own: SGLang's own one is that of all outputs, and still grows
                meta["output_top_logprobs"] = shown if incremental else list(self.shown)
            if "input_top_logprobs" in meta:
                meta["input_top_logprobs"] = _cut(meta["input_top_logprobs"], self.asked_top)


class Auditor:
    """Of one front. `engine`: that of `engine.py`, which makes this. `clock` is in seconds."""

    def __init__(
        self,
        bookkeeper: Bookkeeper,
        engine: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bookkeeper, self._engine, self._clock = bookkeeper, engine, clock
        self._waiting = deque[Check]()
        self._worker: asyncio.Task[None] | None = None
        self._tallies: dict[tuple[str, AskedRatio, str], Tally] = {}
        self._has_failed = False

    def listen(self, rag: RagRequest, obj: Any) -> Listener | None:
        """Prepare SGLang's request `obj` if `rag` was drawn. None: it is not audited."""
        terms = rag.planned.terms
        if terms is None or not terms.is_sampled:
            return None
        # SGLang's tokenizer manager adds those that the server prefers
        params = {**(self._engine.preferred_sampling_params or {}), **obj.sampling_params}
        temperature = _temperature(params)
        if params.get("n", 1) != 1 or (params.get("beam_width") or 1) != 1:
            self._skip(Skip.SEVERAL)
        elif obj.custom_logit_processor or any(
            (params.get(name) or neutral) != neutral for name, neutral in NEUTRAL.items()
        ):
            self._skip(Skip.CONSTRAINED)
        elif temperature is None:
            self._skip(Skip.TEMPERATURE)
        else:
            return Listener.on(obj, temperature)
        return None

    def finish(self, rag: RagRequest, listener: Listener) -> None:
        """The request is over, or was given up.
        A complete answer over moved KV waits for its check."""
        # The engine says so at the finish reason, and again when its generator closes.
        if listener.is_over:
            return
        listener.is_over = True
        planned, known, rank = rag.planned, rag.known or {}, rag.served_by or 0
        room = self._engine.max_prompt_len - len(planned.input_ids)
        num_rows = min(len(listener.rows), len(rag.output_ids), MAX_POSITIONS, room)
        assert planned.terms is not None
        assert planned.fusion is not None
        if not rag.is_complete or not listener.rows:
            self._skip(Skip.INCOMPLETE)
        elif not known.get("relocated", 0) + known.get("recomputed", 0):
            self._skip(Skip.UNMOVED)
        elif num_rows < 1:
            self._skip(Skip.TOO_LONG)
        elif len(self._waiting) >= MAX_WAITING:
            self._skip(Skip.FULL)
        else:
            rag.is_sampled = True
            ratio, told = planned.fusion.asked_ratio, rag.report and rag.report.selector
            self._waiting.append(
                Check(
                    planned=planned,
                    input_ids=[*planned.input_ids, *rag.output_ids[:num_rows]],
                    rows=listener.rows[:num_rows],
                    temperature=listener.temperature,
                    selected_by=told or planned.terms.whose.selector,
                    # a label of a metric, and a client may send any number
                    ratio=round(ratio, 3) if isinstance(ratio, float) else ratio,
                    rank=rank,
                    epoch=self._epoch(rank),
                    since=self._clock(),
                )
            )
            # a worker ends when nothing waits, so an idle server polls no rank
            if self._worker is None or self._worker.done():
                self._worker = asyncio.get_running_loop().create_task(self._work())

    def stats(self) -> dict[str, Any]:
        """For `/chunkcache/stats`."""
        audit = self._bookkeeper.audit
        return {
            "share": audit.share if audit else 0.0,
            "target": audit.target if audit else None,
            "waiting": len(self._waiting),
            "terms": audit.stats() if audit else {},
            "figures": [
                {
                    "selector": selector,
                    "ratio": ratio,
                    "tenant": tenant,
                    "samples": tally.samples,
                    "below_target": tally.below,
                    "agreement": round(tally.share / tally.samples, 6),
                    "kl": round(tally.kl / tally.samples, 6),
                    "max_kl": round(tally.max_kl, 6),
                }
                for (selector, ratio, tenant), tally in self._tallies.items()
            ],
        }

    # Private, in order of use

    def _epoch(self, rank: int) -> int:
        return self._bookkeeper.mirrors[rank].acknowledgement.epoch

    def _skip(self, reason: Skip) -> None:
        self._bookkeeper.metrics.count("audit_skips", reason.value)

    async def _work(self) -> None:
        """Send what waits, until nothing does."""
        while self._waiting:
            check = self._waiting[0]
            if self._clock() - check.since > MAX_WAIT_S:
                self._waiting.popleft()
                self._skip(Skip.LATE)
                continue
            try:
                if not await self._engine.has_room(check.rank, len(check.input_ids)):
                    # a rank that is busy holds up the checks of no other
                    self._waiting.rotate(-1)
                    await asyncio.sleep(POLL_S)
                    continue
                if check.epoch == self._epoch(check.rank):
                    output = await self._engine.prefill(check, top=EXACT_BEST)
                    self._conclude(check, _exact_rows(output, len(check.rows)))
                else:
                    self._skip(Skip.FLUSHED)
            except Exception:  # an audit harms no request
                self._skip(Skip.FAILED)
                if not self._has_failed:
                    logger.warning(
                        "chunk cache: an audit failed (further ones are counted)", exc_info=True
                    )
                self._has_failed = True
            # Only now: a check under way counts in MAX_WAITING. Others are put behind it.
            self._waiting.popleft()

    def _conclude(self, check: Check, exact: Sequence[Row]) -> None:
        found = compare(exact, check.rows, temperature=check.temperature)
        bookkeeper, planned = self._bookkeeper, check.planned
        assert bookkeeper.audit is not None
        assert planned.terms is not None
        is_below = found.share < bookkeeper.audit.target
        key = (check.selected_by, check.ratio, planned.draft.identity.tenant)
        # The metrics have a series for each key, and clients choose ratio and tenant.
        if key not in self._tallies and len(self._tallies) >= MAX_TALLIES:
            key = (check.selected_by, None, OTHERS)
        self._tallies.setdefault(key, Tally()).add(found, is_below=is_below)
        bookkeeper.metrics.observe_audit(*key, found.share, found.kl, is_below=is_below)
        bookkeeper.audited(planned.terms, found.share)


def _temperature(params: Mapping[str, Any]) -> float | None:
    """Of the logprobs that SGLang tells of the answer.
    None: none that a prefill's can be compared with."""
    given, top_k = params.get("temperature"), params.get("top_k")
    temperature = (
        1.0
        if given is None or given < GREEDY or envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get()
        else float(given)
    )
    # told at temperature 1 where all requests of the batch are greedy
    if temperature != 1 and top_k == 1:
        return None
    return temperature if temperature <= 1 else None


def _cut(rows: Sequence[Any], length: int) -> list[Any]:
    """A position without rows is None."""
    return [row and row[:length] for row in rows]


def _exact_rows(output: Mapping[str, Any], num_rows: int) -> list[Row]:
    """Of the answer's tokens: SGLang lists what was expected at each token from `logprob_start_len`
    on, nothing for the first."""
    meta = output["meta_info"]
    # SGLang answers an aborted request as well, and its rows are not the whole answer's.
    if (meta.get("finish_reason") or {}).get("type") not in ("stop", "length"):
        raise RuntimeError(f"the prefill ended with {meta.get('finish_reason')}")
    rows: list[Row] = [[(one[0], one[1]) for one in row] for row in meta["input_top_logprobs"][1:]]
    if len(rows) != num_rows:
        raise RuntimeError(f"{len(rows)} rows for {num_rows} tokens")
    return rows
