"""Every knob of the project: default, unit, range and reason. Command line flags and `--help` come
from here, a group of flags from each of the dataclasses that `ChunkCacheConfig` is made of.

SGLang starts fresh processes and calls `plugin.register()` without arguments, so `launch_server`
hands the configuration over as JSON in one environment variable that only this file reads.
"""

import argparse
import ast
import dataclasses
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

ENV_VAR = "SGLANG_CHUNKCACHE_CONFIG"

SHORT_FLAGS = {
    "reuse": "--reuse",
    "index": "--index",
    "encoder": "--encoder",
    "reranker": "--reranker",
    "recompute_attention": "--recompute-attention",
}
"""Short names of frequent flags, in addition to the long ones."""

SELECTORS = ("none", "first", "deviation", "query", "critical", "context")
"""Names of our selectors; tests check that each has its file in `fusion/selectors/`."""

# Of a request's `reuse`
MAX_ALPHA = 1000.0
"""Far above the alpha that recomputes every chunk whole."""
MAX_FIRST_TOKENS = 1_000_000
"""Of each chunk: more than any has."""
MAX_LAYERS = 1000
"""More than any model has. A number beyond the model's own layers is its last one."""

# Of host memory
MAX_COPIES = 8
"""Device copies of one chunk that a plan looks at, latest first:
a popular chunk is cached in hundreds of chains."""
MAX_WAITING_CAPTURES = 256
"""Chunks that wait to enter the store. More are dropped."""
MAX_KEPT_S = 0.002
"""Of copies to host memory after one forward, which the answers under way wait for: a token of an
8B model takes 7 ms on an H100. By what loads take, over the same bus."""
MAX_SCORED_S = 0.02
"""Of measuring chunks after one forward, for which the answers under way wait likewise: about 512
tokens of an 8B model on an H100, by FLOPs."""
MAX_CAPTURED_TOKENS = 512
"""Of chunks that are stored after one forward where no load was measured."""
MAX_WAITING_SAVES = 1024
"""Nodes that wait for host memory. More come again with their next hit."""
MAX_SAVED_TOKENS = 512
"""Of nodes copied to host memory after one forward, but for the last, where no load was
measured."""

# Of a storage
MAX_WAITING = 64
"""Loads, and likewise writes, that are asked for and not polled yet. More are not taken."""
MAX_WAITING_S = 4.0
"""Of these, by what they are estimated to take. One is taken whatever its size."""
MAX_WAITING_BYTES = 512 << 20
"""Where nobody knows yet what they take."""
MAX_SHARE = 0.5
"""Of the memory that they are loaded into or written from, and hold meanwhile."""
MAX_LOADED_VARIANTS = 2
"""Of one chunk, from the storage for one request."""

MAX_HEADS, MAX_HEAD_TOKENS, MAX_HEAD_BYTES = 4, 16_384, 16 * 2**20
"""Heads of one tenant that are remembered, tokens of one, bytes of all:
only what two heads have in common is read of them."""

STORAGE_BACKENDS = ("file", "dynamic")
"""Of HiCache's, those that read and write one tensor by its key."""
STORE_CODECS = ("none", "int8", "int4")
"""Of storage/codec.py, which needs torch."""


def cache_folder() -> Path:
    """For what is kept beyond the process where no folder is named."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_chunkcache"


def knob(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] | None = None,
    has_flag: bool = True,
) -> Any:
    """A dataclass field with its range and its choices. The docstring under it is its `--help`:
    what it sets, with the unit, up to the first full stop, then the reason for its default.

    Args:
        low, high: of numbers; a default of None is in no range.
        has_flag: False: a limit that nobody had to change; tests make it small.
    """
    known = {"low": low, "high": high, "choices": choices, "has_flag": has_flag}
    return field(default=default, metadata=known)


@dataclass(frozen=True)
class OrderConfig:
    tree: str = knob("auto", choices=("auto", "chunk", "stock"))
    """Whose tree has the KV: chunk is ours, a node a chunk; stock is SGLang's own. `auto`: `chunk`
    where that serves model and flags, else `stock`, which the start says. SGLang's matches tokens,
    and no KV is moved in it."""
    order: str = knob("tree", choices=("retriever", "frequency", "tree"))
    """How a request's chunks are ordered. `tree` puts the deepest cached chain first, then chunks
    that the window has seen; `frequency` is CRAFT's order, `retriever` leaves the order alone."""
    eviction: str = knob("reused", choices=("reused", "promoted", "lru"))
    """What is evicted from the KV pool first. `reused`: least frequently used with dynamic aging
    (LFU-DA), by the logarithm of the hits; finds most on RAGPulse, and when its prompt changes
    (eval/LOG.md). `promoted`: nodes that are not promoted first, then SGLang's policy; `lru`:
    SGLang's policy alone."""
    window_requests: int = knob(1000, low=1, high=10_000_000)
    """Sliding window of the access table, in requests. CRAFT section 5."""
    max_tenants: int = knob(10_000, low=1, high=100_000_000, has_flag=False)
    """Tenants whose accesses are counted. A tenant takes about 1 kB. The least recently counted one
    is forgotten first, which costs it an order, never an answer."""
    max_access_entries: int = knob(1_000_000, low=1, high=1_000_000_000, has_flag=False)
    """Requests and chunks in the windows of all tenants. 60 to 110 bytes each where all chunks
    differ; enough for three tenants whose requests all have 256 chunks."""
    promotion_threshold: int = knob(2, low=1, high=1_000_000)
    """Accesses within the window that promote a chunk. CRAFT section 5."""
    max_tree_nodes: int = knob(200_000, low=100, high=100_000_000, has_flag=False)
    """Nodes of the global tree, oldest leaves go first. About 400 bytes each; far more than the
    chunks that fit into a KV pool."""
    max_search_visits: int = knob(64, low=1, high=1_000_000, has_flag=False)
    """Nodes visited by one order decision. Bounds the decision on adversarial trees; on RAGPulse 64
    find what 1,000 find (radix_ext/README.md)."""
    routing: str = knob("kv_aware", choices=("round_robin", "kv_aware"))
    """Which DP rank serves a request. `round_robin` is CRAFT's baseline."""
    max_load_ratio: float = knob(1.25, low=1.0)
    """A rank over this multiple of the mean load gets no more (kv_aware). Load is prompt tokens in
    flight."""


@dataclass(frozen=True)
class ConversationConfig:
    dedup: str = knob("shown", choices=("shown", "paper", "off"))
    """What a conversation drops as already seen. `shown`: chunks still in the prompt; `paper`: also
    chunks of turns that were removed from it (CRAFT 4.3)."""
    max_conversations: int = knob(10_000, low=1, has_flag=False)
    """Conversations remembered. The least recently used one is forgotten first."""
    max_conversation_tokens: int = knob(50_000_000, low=1)
    """Prompt and answer tokens remembered over all conversations. 4 bytes each; the chunk records
    of a turn are counted as tokens, too (radix_ext.Turn.cost)."""
    conversation_idle_s: float = knob(3600.0, low=1.0)
    """Seconds after which an idle conversation is forgotten. A forgotten conversation costs a
    prefix, never an answer."""
    past_reasoning: str = knob("template", choices=("template", "kept"))
    """What a conversation keeps of the reasoning in its answers. `template`: what the model's chat
    template shows of past turns; the answer that follows reasoning is computed once more. `kept`:
    all tokens, thousands a turn with a reasoning model, so that each turn is a prefix of the
    next."""


@dataclass(frozen=True)
class RequestConfig:
    max_body_bytes: int = knob(4 * 2**20, low=1024)
    """Bytes in the body of one request. Checked before and while the body is read; about a million
    tokens of text."""
    max_messages: int = knob(2000, low=1, high=100_000, has_flag=False)
    """Messages in one request, or parts of their contents. The chat template renders them all each
    time, some tens of microseconds each."""
    max_chunks: int = knob(256, low=1, high=100_000)
    """Chunks in one request. Bounds the work of one request in the front process."""
    max_chunk_chars: int = knob(200_000, low=1, has_flag=False)
    """Characters in one chunk. The context length bounds it further."""
    chunk_tokens: str = knob("text", choices=("text", "control"))
    """What control tokens in a chunk's text become. `text`: plain text, since a retrieved text is
    not trusted, so `<|end|>` in it ends nothing. `control`: what they are in a message."""
    answer_reserve_tokens: int = knob(256, low=1, has_flag=False)
    """Tokens reserved for the answer when max_tokens is not given. Decides when a conversation
    overflows; at most an eighth of the context is reserved."""
    rag_template: str | None = knob(None)
    """File with {chunks} and {question}: the user message around the chunks. Default: the chunks,
    then the question."""
    chunk_separator: str = knob("\n\n")
    """Text after every chunk; part of the chunk's span. A span includes its separator, so that the
    chunk area is contiguous."""


@dataclass(frozen=True)
class MovedConfig:
    reuse: str = knob("exact", choices=("exact", "fused"))
    """What the server may reuse (also --reuse). `fused` lets requests opt into moved KV, which is
    approximate; with `exact` none of that code is loaded."""
    selector: str = knob("critical", choices=SELECTORS)
    """Which tokens of a moved chunk are recomputed by default. The one that keeps most of a
    prefill's answers; see fusion/selectors/README.md."""
    selectors: str | None = knob(None)
    """Module with selectors of your own, which requests may name, too. The server's processes
    import it by its name (fusion/selectors/README.md)."""
    recompute_ratio: float = knob(0.15, low=0.0, high=1.0)
    """Share of a request's moved tokens to recompute. FusionRAG's and CacheBlend's operating
    point."""
    question_window: int = knob(32, low=1, high=4096, has_flag=False)
    """Last tokens of a question that choose what is recomputed; all of a shorter one. They run
    through the model once more, before the answer does. 32 hold a question, take a third to a half
    of the time of recomputing what they select, and choose better than 256 where instructions
    precede the question (eval/LOG.md)."""
    calibrate: str = knob("auto", choices=("auto", "on", "off"))
    """Measure at the start which layers and heads tell what to recompute. Once for a model and its
    weights; kept under `XDG_CACHE_HOME`. `auto`: where the server's selector is `critical`."""
    one_copy: str = knob("off", choices=("on", "off"))
    """Whether a moved chunk's tokens that are not recomputed share their source's rows of the KV
    pool. More requests fit at a time; decoding takes longer, since each reader turns their keys.
    Without a GPU only."""
    virtual_slots: int = knob(4, low=2, high=64, has_flag=False)
    """Slots for each row of the KV pool with `one_copy`. 24 bytes each. Slots run out before rows
    only where chunks are shared that often on average."""


@dataclass(frozen=True)
class HostConfig:
    host_mib: int | None = knob(None, low=0)
    """Host memory of each rank for exact chains that leave the device, in MiB; 0: none; not given:
    from the machine. Default: twice the device's pool, as HiCache's, at most a quarter of the
    memory that is available, and for all ranks of a host together 40 GB, since pinning takes about
    a second a GB. The start prints it. SGLang keeps 10 GiB free besides. Without a GPU a larger KV
    pool does the same without copies."""
    store_mib: int | None = knob(None, low=1, high=100_000_000)
    """Host memory of each rank for the KV of chunks that are moved, in MiB, in one pool with exact
    chains; not given: from the machine. Default: the device's pool, without a GPU 1 GiB; at least 1
    GiB, at most an eighth of the memory that is available, and for all ranks of a host together 20
    GB where it is pinned. The start prints it. A Llama-3-8B chunk of 500 tokens takes 62 MiB in
    bfloat16."""
    store_codec: str = knob("none", choices=STORE_CODECS)
    """How the store keeps KV: none (bit by bit), int8 or int4 (numbers of so many bits). Its
    entries in a storage, too. Smaller entries are more chunks in `store_mib`."""
    store_chunks: int = knob(10_000, low=1, high=100_000_000)
    """Chunks in the store, if all have all their variants. Cache-Craft's N: N x M variants in all.
    On any real model `store_mib` is reached first."""
    store_variants: int = knob(5, low=1, high=1000, has_flag=False)
    """Variants that a chunk gets without asking how often. Cache-Craft's M (section 5). A further
    one needs a prefix that is asked for more often than that of the chunk's lowest."""
    store_threshold: int = knob(2, low=1, high=1_000_000)
    """Accesses within the window that bring a chunk into the store. Below it, a chunk is found only
    in the tree."""
    storage_backend: str | None = knob(None)
    """Keep KV beyond the process: a storage backend of HiCache's (file or dynamic). Exact chains in
    host memory, and the store with `--reuse fused`. Default: they are gone with the process."""
    storage_backend_extra_config: str | None = knob(None)
    """The backend's settings, as HiCache takes them: a JSON object, or @ and the path of a file
    with one. `directory` is ours: where `file` keeps the entries, and either backend's manifest is
    (storage/README.md)."""
    storage_mib: int = knob(0, low=0)
    """Bytes that each rank's storage may take, in MiB; 0: a quarter of what its file system can
    spare. What is free and what the storage holds already, at the start. `dynamic` has no file
    system, so it needs a number."""
    storage_wait: float = knob(1.0, low=0.0, high=1.0)
    """How long a request waits for the storage, as a share of what its loads save; 0: not at all.
    It waits where the load is estimated to be there by then. A wait in vain costs that share."""


@dataclass(frozen=True)
class CostConfig:
    max_pass_tokens: int = knob(0, low=0)
    """Tokens recomputed before one batch, or compared at a time; 0: SGLang's prefill budget. Bounds
    how long the other requests of a batch wait."""
    max_gap_tokens: int = knob(2048, low=0, has_flag=False)
    """Tokens between moved chunks that one request may compute in the pass. Chunks after an
    uncached one can only be moved if the uncached one is computed in the same pass."""
    move: str = knob("pays", choices=("pays", "always"))
    """When chunks are moved. `pays`: where that is estimated to bring the first token sooner than
    computing, by what the server measures of itself. `always`: wherever there is a source, which is
    for tests and for quality: it may be slower."""
    recompute_attention: str = knob("auto", choices=("auto", "masked", "sparse"))
    """Attention of the recompute pass (also --recompute-attention). `masked` is torch alone and
    computes hidden keys too. `sparse` is FlashInfer's kernel that is fastest here for each pass,
    over the keys that a token sees; where it cannot run, the server does not start. `auto`:
    `sparse` where it can run, else `masked`."""


@dataclass(frozen=True)
class AuditConfig:
    audit_share: float = knob(0.01, low=0.0, high=1.0)
    """Share of requests with moved KV whose answer is compared with an exact prefill. A hundredth
    costs a prefill in a hundred requests, at moments when nothing waits. 0: nothing is audited."""
    audit_agreement: float = knob(0.9, low=0.0, high=1.0)
    """Share of an audited answer's tokens on which an exact prefill must agree. An answer of ten
    tokens may differ in one. What follows from answers below it is decided by
    radix_ext/audit.py."""
    audit_pause: int = knob(1000, low=1, high=1_000_000_000, has_flag=False)
    """Requests that a pause of the audit lasts. Counted, not timed, so that an idle server does not
    try again unasked."""
    gate: str = knob("refuse", choices=("refuse", "report"))
    """What a failed start-up gate does in fused mode. `report` starts all the same, for
    `sglang_chunkcache.check`."""


@dataclass(frozen=True)
class RetrievalConfig:
    index: str | None = knob(None)
    """Directory of a retrieval index, or Milvus collection (http(s)://host:port/collection or
    file.db), to search for requests (also --index). Made by `python -m retrieval build` and `copy`;
    without one, clients send their chunks."""
    encoder: str | None = knob(None)
    """Path of the index's encoder, if moved since the build; a collection's encoder (also
    --encoder). Another encoder than the one that made the index is refused."""
    reranker: str | None = knob(None)
    """A sentence-transformers CrossEncoder that ranks what the index finds, path or hub name (also
    --reranker). Default: the index's own order."""
    rerank_depth: int = knob(4, low=1, high=1000)
    """Candidates that the reranker reads, as a multiple of `k`. Its time grows with them."""
    index_verify: str = knob("on", choices=("on", "off"))
    """Check the checksums of the index's files. Reads the whole index once, and the new files of a
    newer generation; `off` for an index of hundreds of GB."""
    retrieve_k: int = knob(5, low=1, high=100_000)
    """Passages retrieved by default. CRAFT section 5: top-5."""
    retrieve_mode: str = knob("auto", choices=("auto", "filled", "dense", "bm25", "fusion"))
    """How the index is searched by default. `auto`: the first mode that the index names, `filled`
    with the embedded encoder."""
    retrieve_nprobe: int = knob(128, low=1, high=1_000_000)
    """Clusters of an IVF index searched by default. CRAFT section 5."""
    retrieve_batch: int = knob(32, low=1, high=10_000, has_flag=False)
    """Queries in one search batch, at most. A batch forms only while a search runs; beyond 32 an
    encoder's time grows with the batch."""
    retrieve_queue: int = knob(1000, low=1, high=1_000_000, has_flag=False)
    """Requests that may wait for a search; more get HTTP 503. A server that keeps up has far fewer
    waiting."""
    retrieve_threads: int = knob(1, low=1, high=1024)
    """Threads of encoder, index and reranker in the front process. They share the cores with
    SGLang's. On busy cores all threads of a search wait for the slowest one (two cores under load:
    12 queries over 3,402 vectors took 14 ms with two threads, 2 ms with one). More threads pay for
    a large index or encoder on free cores."""
    retrieve_device: str = knob("cpu")
    """Where encoder and reranker run, for example cuda:0. The default is the CPU because SGLang
    allocates the GPU's memory as if it were alone."""
    retrieve_refresh_s: float = knob(5.0, low=0.0)
    """Seconds between checks for a newer generation of the index; 0: never. A check reads one small
    file."""
    max_query_chars: int = knob(8000, low=1, high=10_000_000, has_flag=False)
    """Characters in one query. Four times the text that an encoder of 512 tokens reads."""


@dataclass(frozen=True)
class ServerConfig:
    log: str = knob("brief", choices=("brief", "all"))
    """What the server prints: brief leaves out known lines that no user needs. The lines, each with
    its reason, are in quiet.py. With a `--log-level` of SGLang's nothing is left out."""
    lame_duck_s: float = knob(0.0, low=0.0)
    """Seconds after SIGTERM in which new requests are served while /ready says 503. What the
    balancer needs to notice. Default: there may be none, and who stops a server by hand waits for
    it."""
    drain_s: float = knob(60.0, low=0.0)
    """Seconds that running requests may take to finish after SIGTERM and the lame duck. New ones
    get HTTP 503 meanwhile. What is left then is aborted, and the server ends at most 40 s later."""
    guard: str = knob("on", choices=("on", "off"))
    """Refuse requests that are known to end the server. Each rule is proven on a stock server
    (front/README.md); `off` gives SGLang every request as it comes."""


GROUPS = {
    "chunk cache: order, eviction, ranks": OrderConfig,
    "chunk cache: conversations": ConversationConfig,
    "chunk cache: requests": RequestConfig,
    "chunk cache: moved KV": MovedConfig,
    "chunk cache: host memory and disk": HostConfig,
    "chunk cache: what moving may cost": CostConfig,
    "chunk cache: audit and gate": AuditConfig,
    "chunk cache: retrieval": RetrievalConfig,
    "chunk cache: server": ServerConfig,
}
"""Of `--help`."""


@dataclass(frozen=True)
class ChunkCacheConfig(
    # the last one's fields are the first, so this is the order of GROUPS from its end
    ServerConfig,
    RetrievalConfig,
    AuditConfig,
    CostConfig,
    HostConfig,
    MovedConfig,
    RequestConfig,
    ConversationConfig,
    OrderConfig,
):
    """Configuration of one server. Raises ValueError naming the flag, its value and its range."""

    secret: str = field(default="", metadata={"has_flag": False})
    """Marks the front's own requests in `custom_params`;
    drawn at the start, so no client can forge it."""
    is_paired: bool = field(default=False, metadata={"has_flag": False})
    """Another server makes the same prompts: one prefills, one decodes (tree_choice.py)."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, flag = getattr(self, f.name), flag_name(f.name)
            choices, low, high = (f.metadata.get(k) for k in ("choices", "low", "high"))
            # own_selectors.py knows its names
            is_own = f.name == "selector" and self.selectors is not None
            if choices and value not in choices and not is_own:
                allowed = f"must be one of {', '.join(choices)}, got {value!r}"
                raise ValueError(f"{flag} {allowed}")
            if value is None and f.default is None:
                continue
            # A bool is an int to Python; `not >=` also refuses NaN, which float() reads.
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if low is not None and not (is_number and value >= low):
                raise ValueError(f"{flag} must be at least {low}, got {value!r}")
            if high is not None and not value <= high:
                raise ValueError(f"{flag} must be at most {high}, got {value!r}")

        if self.one_copy == "on" and self.reuse != "fused":
            raise ValueError(f"{flag_name('one_copy')} needs {SHORT_FLAGS['reuse']} fused")
        # Else every request that names no k is refused for the server's own default.
        if self.index is not None and self.retrieve_k > self.max_chunks:
            raise ValueError(
                f"{flag_name('retrieve_k')} must be at most {flag_name('max_chunks')}"
                f" ({self.max_chunks})"
            )

    @property
    def is_stock(self) -> bool:
        """Whether the tree is SGLang's. False as long as it is not decided (tree_choice.py)."""
        return self.tree == "stock"

    def to_env(self) -> dict[str, str]:
        """The environment that hands this configuration to SGLang's processes; draws the secret."""
        return {
            ENV_VAR: json.dumps(
                {**dataclasses.asdict(self), "secret": self.secret or secrets.token_hex(16)}
            )
        }


def from_env(environ: Mapping[str, str] = os.environ) -> ChunkCacheConfig | None:
    """The launcher's configuration, or None where the server was not started by our launcher."""
    text = environ.get(ENV_VAR)
    return ChunkCacheConfig(**json.loads(text)) if text else None


def flag_name(field_name: str) -> str:
    return "--chunkcache-" + field_name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, in groups, each with the reason for its default."""
    for title, group in GROUPS.items():
        section = parser.add_argument_group(title)
        for f in flag_fields(group):
            (what, why), choices = help_texts()[f.name], f.metadata["choices"]
            section.add_argument(
                flag_name(f.name),
                *([SHORT_FLAGS[f.name]] if f.name in SHORT_FLAGS else []),
                # Else argparse names the value by the long flag, where `from_flags` has the field.
                dest=f.name,
                type=kind_of(f),
                default=f.default,
                metavar="|".join(choices) if choices else None,
                # argparse formats help texts with `%`.
                help=f"{what} (default: {f.default!r}). {why}".replace("%", "%%"),
            )


def flag_fields(group: type[Any] = ChunkCacheConfig) -> list[dataclasses.Field[Any]]:
    """Those that users set, in the order of `--help`."""
    return [f for f in dataclasses.fields(group) if f.metadata["has_flag"]]


def kind_of(f: dataclasses.Field[Any]) -> Any:
    """The type of a field's value where it is not None."""
    return next(iter(get_args(f.type)), f.type)


@cache
def help_texts() -> dict[str, tuple[str, str]]:
    """Of each field: what it sets, and the reason for its default."""
    texts = dict[str, tuple[str, str]]()
    for group in ast.parse(Path(__file__).read_text(encoding="utf-8")).body:
        for node, below in pairwise(getattr(group, "body", ())):
            if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = " ".join(ast.literal_eval(below.value).split())
                what, _, why = text.partition(". ")
                texts[ast.unparse(node.target)] = what[0].lower() + what[1:], why
    return texts


def from_flags(args: argparse.Namespace) -> ChunkCacheConfig:
    """The configuration of a parsed command line. Raises ValueError as the class does."""
    return ChunkCacheConfig(**{f.name: getattr(args, f.name) for f in flag_fields()})
