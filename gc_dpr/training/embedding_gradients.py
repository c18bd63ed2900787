"""Word embeddings on a CPU: a chunk's gradient goes straight to the words that the chunk has.

By itself autograd makes, for every chunk, a gradient as large as the whole vocabulary (0.8 GB for a
multilingual one of 250,000 words and 768 dims), nearly all zeros, and adds it up. A sparse gradient
holds only the chunk's words and is added in place. Accelerators do the dense way in no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gc_dpr.distributed import is_sharded

_FEW_WORDS = 4096  # positions and segments: the dense way is as good


@contextmanager
def embeddings_added_in_place(module: nn.Module) -> Iterator[None]:
    """Let large embeddings on a CPU give sparse gradients inside the block.

    The ``.grad`` that they add up in is made first, with zeros, so it is dense as ever.
    """
    large = _large_embeddings(module)
    without = [part for part in large if part.weight.grad is None]
    for part in large:
        part.sparse = True
    for part in without:
        part.weight.grad = torch.zeros_like(part.weight)
    try:
        yield
    except BaseException:
        for part in without:  # as if nothing had been begun
            part.weight.grad = None
        raise
    finally:
        for part in large:
            part.sparse = False


def _large_embeddings(module: nn.Module) -> list[nn.Embedding]:
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    return [part for part in embeddings if _gains(part)]


def _gains(part: nn.Embedding) -> bool:
    if part.sparse or part.num_embeddings < _FEW_WORDS:
        return False
    weight = part.weight
    return weight.requires_grad and weight.device.type == "cpu" and not is_sharded(weight)
