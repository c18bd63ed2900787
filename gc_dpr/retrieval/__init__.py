"""From a corpus to a run: embedding shards, the index, search.

`DenseIndex` and `set_search_threads` are loaded on first use: they import faiss, which encoding
does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gc_dpr.retrieval.embedding_store import EmbeddingStore, finish_embeddings
from gc_dpr.retrieval.encode import EncodeCounts, encode_passages_to_shard
from gc_dpr.retrieval.index_info import INDEX_FILES
from gc_dpr.retrieval.search import check_fingerprint, retrieve
from gc_dpr.retrieval.shard_writer import ShardWriter
from gc_dpr.retrieval.shards import EMBEDDING_FILES, ShardInfo, shard_bounds

if TYPE_CHECKING:
    from gc_dpr.retrieval.index import DenseIndex, set_search_threads

__all__ = [
    "EMBEDDING_FILES",
    "INDEX_FILES",
    "DenseIndex",
    "EmbeddingStore",
    "EncodeCounts",
    "ShardInfo",
    "ShardWriter",
    "check_fingerprint",
    "encode_passages_to_shard",
    "finish_embeddings",
    "retrieve",
    "set_search_threads",
    "shard_bounds",
]

_NEED_FAISS = ("DenseIndex", "set_search_threads")


def __getattr__(name: str) -> Any:
    if name in _NEED_FAISS:
        from gc_dpr.retrieval import index

        return getattr(index, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
