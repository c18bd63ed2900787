"""Gradients and parameters of all processes: added up once per optimizer step, equal at the start.

Three kinds of parameters meet here. Plain ones are added up by :func:`sum_gradients`. Those of a
DistributedDataParallel model and of a fully sharded one (FSDP2) are averaged by torch itself during
the backward pass, and :func:`without_gradient_sync` puts that off to the last chunk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gc_dpr.distributed.process_group import world_size

_BUCKET_BYTES = 256 * 2**20  # large enough for the full bandwidth, and all the memory it takes


def sum_gradients(parameters: Iterable[nn.Parameter]) -> int:
    """Replace each parameter's gradient by its sum over processes, the same on all of them.

    One flat all-reduce per dtype, device and 256 MiB, after one small exchange of which parameters
    have a gradient. A parameter with a gradient on any process gets the sum on all (a process
    without one, say because it had no rows, counts as zero); one without a gradient anywhere keeps
    None. Sharded parameters (FSDP2) are left alone: their gradients were reduced in the backward
    pass.

    Args:
        parameters: The same parameters in the same order on every process; repeats count once.

    Returns:
        The number of collectives it took: 0 on one process or for sharded parameters, else
        1 + number of buckets.

    Raises:
        ValueError: Some of the parameters are sharded and some are not. FSDP2 averages, here they
            are added up: one loss cannot be scaled for both.
    """
    trainable = list({id(p): p for p in parameters if p.requires_grad}.values())
    if world_size() == 1:
        return 0
    sharded = sum(is_sharded(p) for p in trainable)
    if 0 < sharded < len(trainable):
        raise ValueError(
            f"{sharded} of {len(trainable)} trainable parameters are sharded, and their gradients "
            "averaged over processes; those of the others would be added up. Apply fully_shard to "
            "every encoder as a whole, or to none"
        )
    if sharded or not trainable:
        return 0
    flags = [int(p.grad is not None) for p in trainable]
    has_gradient = torch.tensor(flags, device=trainable[0].device)
    dist.all_reduce(has_gradient)
    gradients: list[Tensor] = []
    for parameter, processes in zip(trainable, has_gradient.tolist(), strict=True):
        if processes == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    buckets = _buckets(gradients)
    for bucket in buckets:
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        start = 0
        for gradient in bucket:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
    return 1 + len(buckets)


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Gradients of one dtype and device together, but not more than a copy of them may cost."""
    buckets: list[list[Tensor]] = []
    open_bucket: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for gradient in gradients:
        key = (gradient.dtype, gradient.device)
        bucket, size = open_bucket.get(key, ([], 0))
        if not bucket or size + gradient.nbytes > _BUCKET_BYTES:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(gradient)
        open_bucket[key] = (bucket, size + gradient.nbytes)
    return buckets


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients down to a norm of at most ``max_norm``, over sharded parameters too.

    Args:
        parameters: All of a kind: sharded (FSDP2) or plain with gradients that are equal on all
            processes, after :func:`sum_gradients`.
        max_norm: Of all gradients together; infinity only measures.

    Returns:
        The norm before, the same on every process; it may be infinite or NaN.
    """
    norm: Any = nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(norm.full_tensor() if is_sharded(norm) else norm)


def broadcast_parameters(module: nn.Module) -> None:
    """Give every process the parameters and buffers of rank 0, so that all start alike.

    Sharded parameters (FSDP2) are left alone: each process holds another part of them.
    """
    if world_size() == 1:
        return
    for tensor in chain(module.parameters(), module.buffers()):
        if is_sharded(tensor):
            continue
        value = tensor.detach().contiguous()
        dist.broadcast(value, src=0)
        tensor.detach().copy_(value)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process holds only its part of the tensor (a DTensor, as FSDP2 makes)."""
    kind = _imported("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def is_fully_sharded(module: Any) -> bool:
    """Return whether FSDP2 (``fully_shard``) was applied to the module or to a part of it.

    Every forward and backward of such a module is a collective: all processes must run as many, in
    the same order.
    """
    return bool(_sharded_parts(module))


def _sharded_parts(module: Any) -> list[Any]:
    kind = _imported("torch.distributed.fsdp", "FSDPModule")
    if kind is None or not isinstance(module, nn.Module):
        return []
    return [part for part in module.modules() if isinstance(part, kind)]


def _imported(module: str, name: str) -> type | None:
    """A class of torch that takes most of a second to import; nothing is one before it has been."""
    found: type | None = getattr(sys.modules.get(module), name, None)
    return found


def without_gradient_sync(module: Any) -> AbstractContextManager[None]:
    """Return a context in which forward and backward do not reduce gradients over processes.

    They add up on each process, and the first backward outside the context reduces them all. A
    DistributedDataParallel model decides in the *forward* whether the next backward reduces, so
    both belong into the context, and the forward of the reducing backward must come after all other
    backwards: a graph that was kept from before them gives wrong gradients. A fully sharded one
    (FSDP2) decides in the backward alone.

    Args:
        module: In DistributedDataParallel, or one that ``fully_shard`` was applied to, in part or
            as a whole; ``None`` gives a context that does nothing.

    Raises:
        ValueError: The module is neither.
    """
    if module is None:
        return nullcontext()
    if parts := _sharded_parts(module):
        return _sharded_without_sync(parts)
    if hasattr(module, "no_sync"):
        context: AbstractContextManager[None] = module.no_sync()
        return context
    raise ValueError(
        f"{type(module).__name__} reduces no gradients of its own: wrap it in "
        "DistributedDataParallel, apply fully_shard to it, or leave no_sync_except_last off"
    )


@contextmanager
def _sharded_without_sync(parts: Sequence[Any]) -> Iterator[None]:
    for part in parts:
        part.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.set_requires_gradient_sync(True, recurse=False)
