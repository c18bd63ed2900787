"""What kind of encoder one side of a batch has, seen from a few of its shortest texts.

Letters: C chunk, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gc_dpr.grad_cache.rand_context import RandContext
from gc_dpr.training.gradient_check.comparison import coarsest
from gc_dpr.training.gradient_check.inexact_modules import Finding, find_inexact_modules
from gc_dpr.training.gradient_check.module_calls import close
from gc_dpr.training.gradient_check.module_state import unchanged, without_dropout
from gc_dpr.training.sides import Side

_PROBE_ROWS = 4


def find_inexact(side: Side) -> list[Finding]:
    """Modules with which the cache cannot be exact, by their paths in the bi-encoder."""
    found = find_inexact_modules(side.encoder, _probe(side)) or _padding_dependence(side)
    place = f"{side.name}_encoder"
    return [replace(f, module=f"{place}.{f.module}" if f.module else place) for f in found]


def is_random(side: Side) -> bool:
    """Whether the encoder, as it is now, gives the same chunk another representation each time."""
    probe = _probe(side)
    with unchanged(side.encoder) as (start,), RandContext(side.encoder, probe), torch.no_grad():
        once = side.encoder(**probe)
        start.restore(generators=False)
        return not close(once, side.encoder(**probe))


def coarsest_dtype(side: Side) -> torch.dtype:
    """What the encoder really computes in: some casts inside are written down in its code."""
    probe = _probe(side)
    watch = _Casts()
    with unchanged(side.encoder), torch.no_grad(), watch:
        reps: Tensor = side.encoder(**probe)
    return coarsest(reps.dtype, *watch.seen)


def _probe(side: Side) -> dict[str, Tensor]:
    """A chunk (C, L) of the shortest texts."""
    return _pad(side, side.tokens.lengths.argsort(stable=True)[:_PROBE_ROWS])


def _pad(side: Side, rows: Tensor) -> dict[str, Tensor]:
    return side.tokens.pad(rows, pad_token_id=side.encoder.pad_token_id, device=side.device)


def _padding_dependence(side: Side) -> list[Finding]:
    """Whether the shortest text gets another representation beside the longest one."""
    order = side.tokens.lengths.argsort(stable=True)
    shortest, longest = order[0], order[-1]
    if side.tokens.lengths[shortest] == side.tokens.lengths[longest]:
        return []
    with unchanged(side.encoder), without_dropout(side.encoder), torch.no_grad():
        if is_random(side):
            return []
        narrow = side.encoder(**_pad(side, torch.stack([shortest, shortest])))
        wide = side.encoder(**_pad(side, torch.stack([shortest, longest])))
    if close(narrow[0], wide[0]):
        return []
    reason = (
        "a text's representation depends on how far the text is padded, which differs from chunk "
        "to chunk: padding must be hidden by the attention mask everywhere, in pooling too"
    )
    return [Finding("", type(side.encoder).__name__, "padding", reason)]


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches for casts of float64 values to a coarser dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64
        if is_cast and out.is_floating_point() and out.numel() > 1:
            self.seen.add(out.dtype)
        return out
