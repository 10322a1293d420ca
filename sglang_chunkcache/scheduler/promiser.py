"""What the tree asks of fused reuse, which promises SGLang more tokens than are cached
(fusion/promise.py)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.wire.report import Explanation, Report
from sglang_chunkcache.wire.spans import RequestSpans
from sglang_chunkcache.wire.state import CalibrationPrompt, Cleared

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import MatchResult
    from sglang.srt.mem_cache.radix_cache import TreeNode


class Promiser:
    """Promises nothing. Calls come in this order for one request."""

    def arrived(self, req: Req, spans: RequestSpans) -> None:
        """It waits from now on: what it will need of slower tiers may be loaded."""

    def match(
        self, req: Req, key: ChunkKey, spans: RequestSpans, result: MatchResult
    ) -> MatchResult:
        """Extend an exact match, at a request's admission, by what can be had otherwise.
        Idempotent: takes nothing."""
        return result

    def commit(self, req: Req, node: TreeNode) -> torch.Tensor | None:
        """Slots for all that was promised, behind this node. None: declined, to be computed."""
        raise AssertionError("nothing was promised")

    def before(self, batch: ScheduleBatch) -> None:
        """Fill the slots that this batch's requests were promised; before its forward."""

    def watch(self, batch: ScheduleBatch) -> AbstractContextManager[Any]:
        """Around the batch's forward, to learn what it takes."""
        return nullcontext()

    def keep(self, req: Req, path: Sequence[TreeNode]) -> None:
        """The request's nodes are in the tree: note what is worth storing. Once a request."""

    def report(self, req: Req) -> Report | None:
        """What became of the request."""
        return None

    def after(self, *, first_tokens_wait: bool = False, is_ahead: bool = False) -> None:
        """Store some of what was noted; after a forward, whose result is told next. `is_ahead`: all
        of it was sent ahead of requests, so that nobody waits for its tokens."""

    def explain(self, req: Req) -> Explanation | None:
        """What was planned for a request that was only matched. None: nothing was."""
        return None

    def reset(self) -> None:
        """The tree is empty, and the weights may have changed."""

    def calibrate(self, prompts: Sequence[CalibrationPrompt]) -> None:
        """Measure where the model keeps the evidence by which tokens are selected.
        Raises ValueError or RuntimeError: cannot."""

    def clear_store(self) -> Cleared | None:
        """Empty the store, the chunks that wait for it included. None: there is none."""
        return None

    def stats(self) -> dict[str, Any]:
        """Counts for `/chunkcache/stats`."""
        return {}
