"""The parts of the front of one process."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sglang.srt.entrypoints import http_server

from sglang_chunkcache import kv_events
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.front.bookkeeper import Bookkeeper
from sglang_chunkcache.front.chat import RagServingChat
from sglang_chunkcache.front.draft_queue import DraftQueue
from sglang_chunkcache.front.drafter import Drafter
from sglang_chunkcache.front.engine import Engine
from sglang_chunkcache.front.event_mirror import EventMirror
from sglang_chunkcache.front.event_reader import follow
from sglang_chunkcache.front.guard.lethal import Guard, Limits
from sglang_chunkcache.front.guard.sampling import SamplingCheck
from sglang_chunkcache.front.misplaced import Misplaced
from sglang_chunkcache.front.planner import Planner
from sglang_chunkcache.front.prompt import PromptAssembler, read_template
from sglang_chunkcache.front.readiness import Readiness
from sglang_chunkcache.front.search import RagSearch

if TYPE_CHECKING:
    from retrieval.hits import Searcher
    from retrieval.reranker import Reranker


class Parts:
    """Each is made when it is first needed, since SGLang is ready then:
    with the first request or the start-up check."""

    def __init__(self, config: ChunkCacheConfig) -> None:
        self.config = config
        self.retriever: Searcher | None = None
        self.reranker: Reranker | None = None
        self.drafts = DraftQueue()
        # what these ask for is there once SGLang is up
        self.guard = Guard(lambda: self.limits, lambda: self.bookkeeper.metrics)
        self.readiness = Readiness(lambda: self.manager)
        self.misplaced = Misplaced(lambda: self.bookkeeper.metrics)

    @cached_property
    def manager(self) -> Any:
        return http_server.get_global_state().tokenizer_manager

    @cached_property
    def context_len(self) -> int:
        """Of prompt and answer together, in tokens.
        A KV pool smaller than the model's context is the tighter limit."""
        return int(min(self.manager.model_config.context_len, self.manager.max_req_input_len))

    @cached_property
    def bookkeeper(self) -> Bookkeeper:
        args = self.manager.server_args
        # one mirror for the TP ranks of a DP rank: they decide alike
        return Bookkeeper(
            self.config,
            num_ranks=args.dp_size,
            prometheus=args.enable_metrics,
            tells_adapter=self.sources[0].tells_adapter if self.sources else None,
        )

    @cached_property
    def sources(self) -> list[kv_events.Source]:
        """Of events of SGLang's own tree; ours has others."""
        return kv_events.sources(self.manager.server_args) if self.config.is_stock else []

    @cached_property
    def readers(self) -> list[asyncio.Task[None]]:
        """Of the ranks' KV events."""
        mirrors = [each for each in self.bookkeeper.mirrors if isinstance(each, EventMirror)]
        pairs = zip(mirrors, self.sources, strict=True)
        return [asyncio.create_task(follow(*pair)) for pair in pairs]

    @cached_property
    def assembler(self) -> PromptAssembler:
        """Raises ValueError for a chat template, a RAG template or a tokenizer that cannot be
        served."""
        templates = http_server.get_global_state().template_manager
        # SGLang renders these by `generate_chat_conv`; `apply_chat_template` knows none of them
        if name := templates.chat_template_name:
            raise ValueError(
                f"--chat-template {name}: SGLang's built-in templates are not supported; give a"
                " file"
            )
        return PromptAssembler(
            self.manager.tokenizer,
            template=read_template(self.config.rag_template),
            separator=self.config.chunk_separator,
            chunk_tokens=self.config.chunk_tokens,
            content_format=templates.jinja_template_content_format,
        )

    @cached_property
    def drafter(self) -> Drafter:
        return Drafter(self.config, self.assembler, context_len=self.context_len)

    @cached_property
    def planner(self) -> Planner:
        return Planner(self.config, self.bookkeeper, context_len=self.context_len)

    @cached_property
    def limits(self) -> Limits:
        """What the guard must know of the server."""
        args, labels = self.manager.server_args, None
        if args.enable_metrics:
            labels = frozenset(args.tokenizer_metrics_allowed_custom_labels or ())
        has_adapters = bool(args.enable_lora or args.lora_paths)
        mode = args.disaggregation_mode
        return Limits(self.manager.model_config.vocab_size, labels, has_adapters, mode)

    @cached_property
    def sampling(self) -> SamplingCheck:
        return SamplingCheck(self.manager.tokenizer, self.limits)

    @cached_property
    def engine(self) -> Engine:
        return Engine(self.manager, self.bookkeeper)

    @cached_property
    def chat(self) -> RagServingChat:
        return RagServingChat(
            self.engine, http_server.get_global_state().template_manager, self.bookkeeper
        )

    @cached_property
    def search(self) -> RagSearch | None:
        if self.retriever is None:
            return None
        metrics = self.bookkeeper.metrics
        return RagSearch(self.retriever, self.config, metrics, reranker=self.reranker)

    async def stats(self) -> dict[str, Any] | None:
        """Counts of the front and of every rank. None: a rank runs without the chunk cache."""
        from sglang_chunkcache import __version__

        # the start-up check asks for stats: a template that cannot be served must fail it
        _ = self.drafter
        states = await self.engine.states()
        if states is None:
            return None
        ranks = [
            {
                "dp_rank": state.dp_rank,
                "seq": state.events.seq,
                "chunk_nodes": state.events.num_nodes,
                **state.counts,
                # takes the state's events first: what is shown is how far the mirror is now
                "mirror": self.bookkeeper.mirrors[state.dp_rank].compared(state),
            }
            for state in states
        ]
        # what was heard may show that a mirror lacks something; nobody waits for it here
        self.engine.keep_up()
        _ = self.readers  # the ranks have been heard
        return {
            "version": __version__,
            **self.bookkeeper.stats(),
            "audit": self.engine.auditor.stats(),
            "retrieval": self.search.stats() if self.search else None,
            "ranks": ranks,
        }
