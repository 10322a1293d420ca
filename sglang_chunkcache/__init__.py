"""RAG serving on SGLang with chunk-level KV reuse.
Importing this package is light: no torch, no SGLang."""

from sglang_chunkcache.config import ChunkCacheConfig

__version__ = "0.1.0"
__all__ = ["ChunkCacheConfig", "__version__"]
