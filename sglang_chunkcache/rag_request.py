"""A RAG request: what a client sends, whose it is, and what becomes of it in the front process.

Data only; `service` does the work, and `answer()` is everything the client may see of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from radix_ext import Plan, Span


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved chunk as the client sent it. `label` is only shown back: identity is the token ids."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request it is; keeps caches and conversations of different tenants apart."""

    api_key: str = ""
    cache_salt: str | None = None
    extra_key: str | None = None
    lora: str | None = None


@dataclass
class RagRequest:
    """One request under way. Everything the client may see is in `answer()`."""

    input_ids: list[int]
    custom_params: dict[str, Any]
    rank: int
    plan: Plan
    spans: tuple[Span, ...]
    area: tuple[Span, ...]
    order: list[str]
    dropped: list[str]
    repeated: list[str]
    planned_len: int
    num_turns: int
    num_departed: int
    remember: Callable[[Sequence[int], str], None] | None
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_cut: bool = False
    """The answer ended at a stop string: the client does not see all of its tokens, so they cannot be its history."""
    exact: int | None = None
    hit_len: int = 0
    served_by: int | None = None
    fallbacks: list[str] = field(default_factory=list)
    is_parallel: bool = False
    """More than one answer: SGLang fills its cache with a request of its own first, so what was cached is not reported."""
    is_refused: bool = False
    released: bool = False

    def answer(self) -> dict[str, Any]:
        """The `chunkcache` object of an answer."""
        prompt_len = len(self.input_ids)
        exact = self.exact or 0
        return {
            "order": self.order,
            "dropped": self.dropped,
            "repeated": self.repeated,
            "fates": None
            if self.is_parallel
            else {"exact": exact, "relocated": 0, "recomputed": 0, "computed": prompt_len - exact},
            "chunks_hit": None if self.is_parallel else self.hit_len,
            "chunks_planned": self.planned_len,
            "head_tokens": self.area[0].start if self.area else 0,
            "predicted_exact": self.area[self.planned_len - 1].end if self.planned_len else 0,
            "turns_reused": self.num_turns,
            "turns_departed": self.num_departed,
            "dp_rank": self.served_by,
            "fallbacks": self.fallbacks,
        }
