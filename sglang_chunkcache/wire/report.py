"""What a rank reports with the first token of an answer,
and why reuse did not happen where it did not."""

from __future__ import annotations

from enum import StrEnum

from radix_ext.moved_plan import NotMoved
from sglang_chunkcache.wire.events import Batch
from sglang_chunkcache.wire.message import Record

ANSWER_KEY = "chunkcache"
"""Key of the encoded `Answer` in `meta_info`."""

FATES = ("exact", "relocated", "recomputed")
"""The fates of prompt tokens that a rank reports. `computed` is the rest of the prompt."""


class Fallback(StrEnum):
    """Why tokens were computed that might have been reused: every reason there is. The table in
    front/README.md says what each means and what an operator can do."""

    # any request's
    PLAIN_TEXT = "plain_text"
    BAD_SPANS = "bad_spans"
    PARALLEL_SAMPLING = "parallel_sampling"
    # exact reuse's, decided by the tenant's own requests (front/reasons.py)
    NO_CHUNKS = "no_chunks"
    NEW_CHUNK = "new_chunk"
    NEW_TENANT = "new_tenant"
    OTHER_HEAD = "other_head"
    OTHER_ORDER = "other_order"
    EVICTED = "evicted"
    MUST_COMPUTE = "must_compute"
    OTHER_RANK = "other_rank"
    # the front's, of moved KV and of conversations
    NO_REPORT = "no_report"
    UNKNOWN_HISTORY = "unknown_history"
    CHANGED_HISTORY = "changed_history"
    AUDIT_PAUSED = "audit_paused"
    STOCK_TREE = "stock_tree"
    # a rank's, of moved KV: some are named by radix_ext, which decides them
    NO_SOURCE = NotMoved.NO_SOURCE
    GAP_TOO_LONG = NotMoved.GAP_TOO_LONG
    PASS_BUDGET = NotMoved.PASS_BUDGET
    MEASURING_BUDGET = NotMoved.MEASURING_BUDGET
    NOT_WORTH_IT = NotMoved.NOT_WORTH_IT
    SOURCE_GONE = "source_gone"
    NO_ROOM = NotMoved.NO_ROOM
    PASS_FULL = "pass_full"
    STORAGE_SLOW = "storage_slow"
    PLAN_FAILED = "plan_failed"
    PASS_FAILED = "pass_failed"
    # a selector's, which recomputed other tokens than it should
    UNSCORED = "unscored"
    UNCALIBRATED = "uncalibrated"
    NO_QUESTION = "no_question"
    NO_DEVIATION = "no_deviation"
    # no request's
    CAPTURE_FAILED = "capture_failed"


class Source(Record, frozen=True):
    """Where one piece `[start, end)` of the prompt was moved from."""

    start: int
    end: int
    span: int | None
    """Index of the chunk's span. None: text between chunks."""
    where: str
    """The tier, or "gap": computed in the pass."""
    num_before: int = 0
    """Chunks before the source, where its KV was computed."""
    overlap: int = 0
    """Of these, chunks that are before it in this prompt as well."""
    cfo: float | None = None
    """Cache-Craft's fix overhead with alpha 1, estimated where the source is not scored.
    None: a gap."""
    other_head: bool = False
    """Its KV was computed after other text that is no chunk:
    system message, tools, an earlier turn's question and answer."""


class Report(Record, frozen=True):
    """What became of one request that asked for moved KV. Counts are prompt tokens."""

    exact: int
    relocated: int
    recomputed: int
    fused_hit: int
    """Of `relocated`: tokens of earlier requests' fused nodes."""
    gap: int
    sources: tuple[Source, ...]
    focused: tuple[int, ...] | None
    """Indices of the spans that the question attends to. None: not asked for."""
    fallbacks: tuple[Fallback, ...]
    ms: dict[str, float]
    """Phase -> milliseconds of the whole batch, as the host sees them."""
    estimated_ms: dict[str, float] = {}  # noqa: RUF012 (msgspec copies it)
    """`planned` and `computed`: milliseconds to the first token by the plan,
    and if nothing were moved. Empty: not estimated."""
    selector: str | None = None
    """What chose the recomputed tokens. None: nothing was moved."""
    shared: int = 0
    """Of `relocated`: tokens whose KV is their source's, where a chunk has one copy."""


class Explanation(Record, frozen=True):
    """What a request would find, without running it."""

    exact: int
    fused_hit: int
    end: int
    """Where the promised region ends, in prompt tokens."""
    sources: tuple[Source, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    estimated_ms: dict[str, float] = {}  # noqa: RUF012 (msgspec copies it)
    selector: str | None = None
    loaded: int = 0
    """Tokens behind `exact` that would come from host memory, byte for byte.
    The plan of moves counts them as not there."""
    stored: int = 0
    """Tokens behind these that the storage has. They come if there is time before the admission."""
    is_kept: bool = False
    """Of a chunk to preprocess: store or storage has what it is to become."""
    must_wait: bool = False
    """Of a chunk to preprocess: neighbours are on their way from the storage,
    or it has much to write. To be asked again."""


class Answer(Record, frozen=True):
    """What travels with the first token of every answer to a request of the front's."""

    events: Batch
    report: Report | None = None
    """None: exact reuse only."""
    loaded: int = 0
    """Exact tokens that came from host memory for this request."""
    host_worth: float = 1.0
    """What a token in host memory saves of computing it."""
