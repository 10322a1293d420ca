"""A Haystack pipeline over the server's own index.

python -m eval.examples.haystack_rag --url http://127.0.0.1:30000
"""

from __future__ import annotations

from haystack import Pipeline
from haystack.dataclasses import ChatMessage

from eval.examples import QUESTIONS, options
from sglang_chunkcache.integrations.haystack import ChunkCacheChatGenerator, ChunkCacheRetriever


def main() -> None:
    args = options(__doc__)
    settings = {"temperature": 0, "max_tokens": 24}
    pipeline = Pipeline()
    pipeline.add_component("retriever", ChunkCacheRetriever(args.url, top_k=4))
    pipeline.add_component(
        "generator", ChunkCacheChatGenerator(args.url, generation_kwargs=settings)
    )
    pipeline.connect("retriever.documents", "generator.documents")
    for question in QUESTIONS:
        asked = {
            "retriever": {"query": question},
            "generator": {"messages": [ChatMessage.from_user(question)]},
        }
        (reply,) = pipeline.run(asked)["generator"]["replies"]
        told = reply.meta["chunkcache"]
        print(f"{question:44}{reply.text:30}{told['order']} {told['fates']}")


if __name__ == "__main__":
    main()
