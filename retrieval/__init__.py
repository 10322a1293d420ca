"""The retriever: cuts documents into passages, indexes them with FAISS and BM25, and ranks them for
a query. See README.md.

Modules that need FAISS are not imported here: `retriever`, `build`, `index`, `neighbors`.
"""

from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.passage import Document, Passage

__all__ = ["CorruptIndexError", "Document", "Passage", "RetrievalError"]
