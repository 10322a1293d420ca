"""A retriever of its own: documents to passages, to a FAISS and a BM25 index, to ranked chunks. See README.md.

What needs FAISS is imported from its module: `retrieval.retriever.Retriever`, `retrieval.build.build_index`,
`retrieval.index.Index`, `retrieval.neighbors`.
"""

from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.passage import Document, Passage

__all__ = ["CorruptIndexError", "Document", "Passage", "RetrievalError"]
