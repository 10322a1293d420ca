"""A LlamaIndex query engine as most are, and with another response synthesizer.

python -m eval.examples.llamaindex_rag --url http://127.0.0.1:30000
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import (
    CompletionResponse,
    CompletionResponseGen,
    CustomLLM,
    LLMMetadata,
)
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import SimpleSummarize
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from pydantic import Field

from eval.examples import PASSAGES, Timed, asked, options
from sglang_chunkcache.integrations.llamaindex import ChunkCacheSynthesizer
from sglang_chunkcache.integrations.server import Endpoint


class Plain(CustomLLM):
    """The same endpoint without chunks, as by LlamaIndex's `OpenAILike`."""

    url: str
    usage: dict[str, Any] = Field(default_factory=dict)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=4096, num_output=24, is_chat_model=False)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text="".join(each.delta for each in self.stream_complete(prompt)))

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": "default", "temperature": 0, "max_tokens": 24, "messages": messages}
        for event in Endpoint(self.url).stream(body):
            self.usage = event.get("usage") or self.usage
            for choice in event["choices"]:
                yield CompletionResponse(text="", delta=choice["delta"].get("content") or "")


class Found(BaseRetriever):
    """What a vector store would find."""

    ids: Sequence[str] = ()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(id_=each, text=PASSAGES[each])) for each in self.ids]


def main() -> None:
    args = options(__doc__)
    retriever, llm, timed = Found(), Plain(url=args.url), Timed()
    ours = ChunkCacheSynthesizer(args.url, temperature=0, max_tokens=24, streaming=True)
    synthesizers = {"in the text": SimpleSummarize(llm=llm, streaming=True), "as chunks": ours}
    for question, ids in asked(args.requests, seed=1):
        retriever.ids = ids
        for arm, synthesizer in synthesizers.items():
            engine = RetrieverQueryEngine(retriever=retriever, response_synthesizer=synthesizer)
            response = engine.query(question)
            answer = timed.first(arm, response.response_gen)
            assert [each.node_id for each in response.source_nodes] == ids
            fates = (response.metadata.get("chunkcache") or {}).get("fates")
            details = llm.usage.get("prompt_tokens_details") or {}
            if fates is None:
                timed.usage(arm, llm.usage["prompt_tokens"], details.get("cached_tokens") or 0)
            else:
                timed.usage(arm, sum(fates.values()), fates["exact"] + fates["relocated"])
            print(f"{arm:12}{question:44}{answer}")
    print(timed.table())


if __name__ == "__main__":
    main()
