"""The gradient cache: batches larger than memory, with the gradient of the undivided batch."""

from __future__ import annotations

from gc_dpr.grad_cache.chunking import split_rows
from gc_dpr.grad_cache.functional import cached, cat_input_tensor, gather_input_tensor
from gc_dpr.grad_cache.grad_cache import GradCache
from gc_dpr.grad_cache.rand_context import RandContext, devices_of
from gc_dpr.grad_cache.towers import Tower, cached_step

__all__ = [
    "GradCache",
    "RandContext",
    "Tower",
    "cached",
    "cached_step",
    "cat_input_tensor",
    "devices_of",
    "gather_input_tensor",
    "split_rows",
]
