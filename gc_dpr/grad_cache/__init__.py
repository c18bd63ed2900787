"""The gradient cache: batches larger than memory, with the gradient of the undivided batch."""

from __future__ import annotations

from gc_dpr.grad_cache.chunking import (
    RaggedTokens,
    length_sorted_chunks,
    restore_order,
    split_rows,
)
from gc_dpr.grad_cache.grad_cache import GradCache
from gc_dpr.grad_cache.rand_context import RandContext, devices_of
from gc_dpr.grad_cache.step import Tower, cached_step

__all__ = [
    "GradCache",
    "RaggedTokens",
    "RandContext",
    "Tower",
    "cached_step",
    "devices_of",
    "length_sorted_chunks",
    "restore_order",
    "split_rows",
]
