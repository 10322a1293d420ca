"""A LangChain RAG chain as most are, and with one line changed.

python -m eval.examples.langchain_rag --url http://127.0.0.1:30000
"""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from eval.examples import PASSAGES, Timed, asked, options
from sglang_chunkcache.integrations.langchain import ChatChunkCache, create_chunks_chain


def stuffed(llm: ChatChunkCache, prompt: ChatPromptTemplate) -> Runnable[dict[str, Any], str]:
    """The documents' texts in the prompt, as by LangChain's `create_stuff_documents_chain`."""

    def joined(inputs: dict[str, Any]) -> str:
        return "\n\n".join(document.page_content for document in inputs["context"]) + "\n\n"

    return RunnablePassthrough.assign(context=joined) | prompt | llm | StrOutputParser()


def main() -> None:
    args = options(__doc__)
    llm = ChatChunkCache(base_url=args.url, temperature=0, max_tokens=24)
    prompt = ChatPromptTemplate.from_messages([("user", "{context}{input}")])
    chains = {
        "in the text": stuffed(llm, prompt),
        "as chunks": create_chunks_chain(llm, prompt),
    }
    timed = Timed()
    for question, ids in asked(args.requests, seed=1):
        documents = [Document(id=each, page_content=PASSAGES[each]) for each in ids]
        for arm, chain in chains.items():
            with get_usage_metadata_callback() as usage:
                answer = timed.first(arm, chain.stream({"context": documents, "input": question}))
            (told,) = usage.usage_metadata.values()
            cached = told.get("input_token_details", {}).get("cache_read", 0)
            timed.usage(arm, told["input_tokens"], cached)
            print(f"{arm:12}{question:44}{answer}")
    print(timed.table())


if __name__ == "__main__":
    main()
