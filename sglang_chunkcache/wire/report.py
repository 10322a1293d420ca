"""What a rank reports with the first token of an answer,
and why reuse did not happen where it did not."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from radix_ext.moved_plan import NotMoved
from sglang_chunkcache.wire.events import Batch
from sglang_chunkcache.wire.message import Record

ANSWER_KEY = "chunkcache"
"""Key of the encoded `Answer` in `meta_info`."""

FATES = ("exact", "relocated", "recomputed")
"""The fates of prompt tokens that a rank reports. `computed` is the rest of the prompt."""


class Fallback(StrEnum):
    """Why tokens were computed that might have been reused: every reason there is. README tables
    are made from it.

    From `NO_CHUNKS` to `OTHER_RANK` they are exact reuse's, decided by the tenant's own requests
    (front/reasons.py).
    """

    meaning: str
    """One sentence."""
    remedy: str
    """What an operator can do, one sentence."""

    def __new__(cls, name: str, meaning: str, remedy: str) -> Self:
        # The name alone is the value: it travels, and the other side looks it up. `str`, since some
        # names are members of NotMoved.
        reason = str.__new__(cls, name)
        reason._value_, reason.meaning, reason.remedy = str(name), meaning, remedy
        return reason

    PLAIN_TEXT = (
        "plain_text",
        (
            "The rank could not read the chunks' offsets and computed the prompt as plain text, or"
            " the front could not read its answer."
        ),
        (
            "Read the logs of rank (`bad_spans`) and front, start both from the same installation,"
            " and report it as a bug."
        ),
    )
    BAD_SPANS = (
        "bad_spans",
        (
            "The rank refused the chunks' offsets that came with a request (`/chunkcache/stats`"
            " only; the request's answer says `plain_text`)."
        ),
        "Read the rank's log and start front and ranks from the same installation.",
    )
    PARALLEL_SAMPLING = (
        "parallel_sampling",
        (
            "The request asks for more than one answer (`n` > 1), for which SGLang does not report"
            " what it found cached."
        ),
        "Nothing is lost but the figures; send `n` requests if you need them.",
    )
    NO_CHUNKS = (
        "no_chunks",
        "The prompt has no chunk: the request came with none, or its search found none.",
        (
            "Send retrieved passages as `chunks`. In the text of a message they are found only"
            " where the whole prompt begins like an earlier one."
        ),
    )
    NEW_CHUNK = (
        "new_chunk",
        (
            "No earlier answer of this tenant (`cache_salt` and `extra_key`) had a chunk of exactly"
            " this text."
        ),
        (
            "Expected for new texts. If the same passages come again and again, look for what"
            " differs in them: a score or rank in the text, windows that overlap, white space."
        ),
    )
    NEW_TENANT = (
        "new_tenant",
        "No request with this `cache_salt` and `extra_key` came before, and tenants share nothing.",
        (
            "Expected for a tenant's first request. A salt for each request switches reuse off: let"
            " it name a user, a team or a data set."
        ),
    )
    OTHER_HEAD = (
        "other_head",
        (
            "The chunk is cached, or was, behind other text that is no chunk: another system"
            " prompt, other tools, another history. `missed` says in which `field` of the request"
            " and at which `token` of the prompt the texts part."
        ),
        (
            "Put what changes with each request (a time, a user's name) after the chunks, into the"
            " question. Expected for chunks of a conversation's later turns. `--reuse fused` moves"
            " such chunks."
        ),
    )
    OTHER_ORDER = (
        "other_order",
        "The chunk is cached behind the same text, but after other chunks than in this prompt.",
        (
            "Leave the order to the server (`--chunkcache-order tree`). What stays are chunks"
            " behind one that this request does not have; `--reuse fused` moves them."
        ),
    )
    EVICTED = (
        "evicted",
        (
            "The chunk was cached in this place and has left the cache, for want of room or because"
            " that was emptied, or could not be loaded back."
        ),
        (
            "Enlarge the KV pool (`--mem-fraction-static`, `--max-total-tokens`) or"
            " `--chunkcache-host-mib`."
        ),
    )
    MUST_COMPUTE = (
        "must_compute",
        (
            "The chunk is cached in this place, but tokens of it must be computed: the prompt's"
            " last one, or those whose logprobs the request asks for."
        ),
        (
            "Put the question after the chunks; ask for no logprobs of the prompt"
            " (`logprob_start_len`)."
        ),
    )
    OTHER_RANK = (
        "other_rank",
        (
            "Another data-parallel rank has the chunk in this place, or more of the conversation's"
            " history, and this one has served the request."
        ),
        (
            "Expected where the rank that has it is over its share of the load"
            " (`--chunkcache-max-load-ratio`), and with `--chunkcache-routing round_robin`."
        ),
    )
    NO_REPORT = (
        "no_report",
        (
            "The answer to a request with moved KV came without the rank's report, so its tokens"
            " cannot be counted by fate."
        ),
        "Check in the rank's log that it was started with `--reuse fused`, and report it as a bug.",
    )
    UNKNOWN_HISTORY = (
        "unknown_history",
        (
            "Nobody can tell which chunks an earlier turn of the messages has shown, so the prompt"
            " has its texts alone (`turns_unknown` has the number)."
        ),
        (
            "Send the chunks of earlier user messages with them (`messages[i].chunks`, `[]` for"
            ' none), or a `conversation_id` in every turn; with `"history": "required"` such a'
            " request is refused with 422."
        ),
    )
    CHANGED_HISTORY = (
        "changed_history",
        (
            "The chunks sent with an earlier message are not those that the conversation has shown"
            " with it, so the prompt was rendered from the request from that message on."
        ),
        (
            "Expected after a user has changed them; else send with a message, in every turn, what"
            " its answer's `order` had."
        ),
    )
    AUDIT_PAUSED = (
        "audit_paused",
        (
            "Answers on these terms (selector, ratio) differed too much from exact ones, so for a"
            " while, or for all but a tenth of the requests, nothing is moved on them."
        ),
        (
            "Read the log's line and `audit` in `/chunkcache/stats`; choose another selector or a"
            " larger ratio, or allow for less agreement (`--chunkcache-audit-agreement`)."
        ),
    )
    NO_SOURCE = (
        # named by radix_ext, which decides it
        NotMoved.NO_SOURCE,
        (
            "None of the chunks after the exact prefix is cached anywhere, in the tree or in the"
            " store."
        ),
        (
            "Expected for new chunks; if they were requested before, raise `--chunkcache-store-mib`"
            " or lower `--chunkcache-store-threshold`."
        ),
    )
    GAP_TOO_LONG = (
        NotMoved.GAP_TOO_LONG,
        (
            "The uncached tokens before the next cached chunk exceed 2,048; chunks from there on"
            " are computed."
        ),
        "Put the uncached chunks last.",
    )
    PASS_BUDGET = (
        NotMoved.PASS_BUDGET,
        (
            "Gaps and recomputed tokens exceed `--chunkcache-max-pass-tokens`; chunks from there on"
            " are computed."
        ),
        (
            "Raise that flag (0 means one prefill budget, `--chunked-prefill-size`) or lower the"
            " ratio."
        ),
    )
    MEASURING_BUDGET = (
        NotMoved.MEASURING_BUDGET,
        (
            "What `deviation` and `critical` measure (some layers over what is moved, counted as"
            " that share of all layers), gaps and recomputed tokens exceed"
            " `--chunkcache-max-pass-tokens` together; chunks from there on are computed."
        ),
        (
            "Raise that flag (0 means one prefill budget, `--chunked-prefill-size`) or choose"
            " another selector."
        ),
    )
    NOT_WORTH_IT = (
        NotMoved.NOT_WORTH_IT,
        (
            "Computing was estimated to take no longer than moving, of the prompt or of some of its"
            " chunks; as always with ratio 1. `estimated_ms` has the figures."
        ),
        (
            "Expected for short chunks and prompts; `--chunkcache-move always` moves them all the"
            " same."
        ),
    )
    ALREADY_CACHED = (
        "already_cached",
        "The place in the tree for the moved chunks was taken between matching and allocation.",
        (
            "The request is computed as usual; report it if it occurs regularly, since SGLang"
            " matches right before it allocates."
        ),
    )
    SOURCE_GONE = (
        "source_gone",
        "A source was evicted from the KV pool between planning and allocation.",
        (
            "Expected now and then under load; a larger KV pool (`--mem-fraction-static`,"
            " `--max-total-tokens`) makes it rarer."
        ),
    )
    NO_ROOM = (
        NotMoved.NO_ROOM,
        (
            "Free and evictable slots of the KV pool do not hold the moved tokens and one prefill"
            " budget (`--chunked-prefill-size`)."
        ),
        (
            "Lower `--chunked-prefill-size` or enlarge the KV pool; a pool no larger than one"
            " budget never moves anything."
        ),
    )
    PASS_FULL = (
        "pass_full",
        (
            "Other requests of its batch fill the pass (`--chunkcache-max-pass-tokens`), and this"
            " one is computed rather than made to wait."
        ),
        (
            "Expected now and then when many requests come at once; raise that flag (0 means one"
            " prefill budget, `--chunked-prefill-size`) or lower the ratio."
        ),
    )
    STORAGE_SLOW = (
        "storage_slow",
        (
            "Loading a chunk from the storage was estimated to take longer than computing it, by"
            " the loads before, so it was not loaded."
        ),
        (
            "Expected for short chunks and small models; `storage.load_ms_per_mib` in"
            " `/chunkcache/stats` has the rate, and `--chunkcache-move always` loads all the same."
        ),
    )
    NOT_FILLED = (
        "not_filled",
        (
            "The request follows KV that its batch fills for another one, and what it would have"
            " moved after that is computed."
        ),
        (
            "Expected where requests with the same head or first chunks come at once; the next ones"
            " find both."
        ),
    )
    PLAN_FAILED = (
        "plan_failed",
        "Planning the moves raised an error, and the prompt is computed as usual.",
        "Read the traceback in the rank's log and report it as a bug.",
    )
    PASS_FAILED = (
        "pass_failed",
        (
            "Moving, selecting or recomputing raised an error, and the whole region was computed as"
            " an ordinary prefill."
        ),
        (
            "Read the traceback in the rank's log; if the device was out of memory, lower"
            " `--chunkcache-max-pass-tokens` or `--mem-fraction-static`."
        ),
    )
    UNSCORED = (
        "unscored",
        "A moved chunk has no attention scores, so `context` recomputed its first tokens.",
        (
            "A chunk has scores once a request with such a selector has stored it"
            " (`--chunkcache-store-threshold`); start with such a selector as the default to score"
            " what others store, too."
        ),
    )
    UNCALIBRATED = (
        "uncalibrated",
        (
            'The request has `"ratio": "auto"`, but nothing tells how much deviation this model'
            " bears, so `--chunkcache-recompute-ratio` of the tokens were recomputed."
        ),
        "Calibrate: `POST /chunkcache/calibrate`, or start with `--chunkcache-calibrate on`.",
    )
    NO_QUESTION = (
        "no_question",
        "No token follows the chunks, so `query` recomputed each chunk's first tokens.",
        "Put the question after the chunks, or choose another selector.",
    )
    NO_DEVIATION = (
        "no_deviation",
        "KV deviation was not measured, so `deviation` recomputed each chunk's first tokens.",
        "Report it as a bug: the pass measures it for every request with this selector.",
    )
    CAPTURE_FAILED = (
        "capture_failed",
        (
            "Copying a chunk into the store raised an error; no answer is affected"
            " (`/chunkcache/stats` only)."
        ),
        (
            "Read the traceback in the rank's log; if host memory is short, lower"
            " `--chunkcache-store-mib`."
        ),
    )


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
