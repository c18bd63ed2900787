"""Numbers and rows of all processes, as tensors with unequal counts per process.

The counts go first, then one padded all-gather. The exchange of counts also says whether all
processes hold the same dtype and row shape, and whether anyone needs a gradient: so a slip raises
on all of them instead of leaving some in a collective that nobody else joins.

Letters: N rows of this process, D dims, W world size.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gc_dpr.distributed.process_group import rank, world_size


def gather_integers(values: Sequence[int], device: torch.device | str) -> list[list[int]]:
    """Return the integers of all processes: W lists in rank order, all of the same length.

    Args:
        values: This process's numbers; every process gives as many.
        device: Where the exchange takes place: the process's device.
    """
    if world_size() == 1 or not values:
        return [list(values) for _ in range(world_size())]
    own = torch.tensor(values, dtype=torch.int64, device=device)
    gathered = own.new_empty(world_size() * len(values))
    _all_gather_single(gathered, own)
    rows: list[list[int]] = gathered.view(world_size(), len(values)).tolist()
    return rows


def gather_counts(count: int, device: torch.device | str) -> list[int]:
    """Return the count of every process, in rank order."""
    return [row[0] for row in gather_integers([count], device)]


def largest_over_processes(values: Sequence[int], device: torch.device | str) -> list[int]:
    """Return, for each of the numbers, the largest that any process gave in its place.

    Args:
        values: This process's numbers; every process gives as many.
        device: Where the exchange takes place: the process's device.
    """
    if world_size() == 1 or not values:
        return list(values)
    largest = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    numbers: list[int] = largest.tolist()
    return numbers


def sum_over_processes(tensor: Tensor) -> Tensor:
    """Return the elementwise sum over processes; ``tensor`` keeps its value. No gradient."""
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def gather_rows(tensor: Tensor) -> Tensor:
    """Return the rows of all processes in rank order, without gradient.

    Args:
        tensor: (N, ...); N may differ between processes and may be 0, the rest may not.

    Returns:
        (sum of N, ...), the same on every process.

    Raises:
        ValueError: The processes hold different dtypes or row shapes; raised on all of them.
    """
    tensor = tensor.detach()
    if world_size() == 1:
        return tensor
    counts, _ = _exchange_counts(tensor, needs_gradient=False)
    return torch.cat(_all_gather(tensor, counts))


def gather_rows_own_gradient(tensor: Tensor, *, dim: int = 0) -> Tensor:
    """Return the rows of all processes in rank order; only the own rows carry a gradient.

    There is no collective in the backward pass, so it need not run on every process. The gradient
    that reaches ``tensor`` is what this process's loss says about its rows. It is that of the
    joined batch if every process computes the *whole* loss, of all rows, and the parameter
    gradients of the processes are then added up.

    Args:
        tensor: N along ``dim``; N may differ between processes and may be 0, the rest may not.
        dim: The dimension of the rows; negative counts from the end.

    Returns:
        Sum of N along ``dim``, the same values on every process; ``tensor`` itself on one process.

    Raises:
        IndexError: ``tensor`` has no such dimension.
        ValueError: The processes hold different dtypes or row shapes; raised on all of them.
    """
    rows = tensor.movedim(dim, 0)  # (N, ...)
    if world_size() == 1:
        return tensor
    counts, _ = _exchange_counts(rows, needs_gradient=False)
    pieces = _all_gather(rows.detach(), counts)
    pieces[rank()] = rows
    return torch.cat(pieces).movedim(0, dim)


def gather_rows_with_gradient(tensor: Tensor) -> Tensor:
    """Return the rows of all processes in rank order; the backward pass sums over processes.

    The gradient that reaches ``tensor`` is the sum of what every process's loss says about this
    process's rows. So losses that *sum* to the global loss give its exact gradient.

    Every process must run the backward pass. Whether there is one is agreed on in the exchange of
    counts: if any process's rows need a gradient the result does on all of them, so that no process
    waits for one that skipped the backward collective.

    Args:
        tensor: (N, ...); N may differ between processes and may be 0, the rest may not.

    Returns:
        (sum of N, ...), the same on every process.

    Raises:
        ValueError: The processes hold different dtypes or row shapes; raised on all of them.
    """
    if world_size() == 1:
        return tensor
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    counts, anyone_needs = _exchange_counts(tensor, needs_gradient=needs_gradient)
    if not anyone_needs:
        return torch.cat(_all_gather(tensor.detach(), counts))
    if not needs_gradient:
        tensor = tensor.detach().requires_grad_()
    gathered: Tensor = _GatherRows.apply(tensor, counts)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    """All-gather forward; sum over processes, own rows back (torch's own one is deprecated)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.counts = counts
        return torch.cat(_all_gather(tensor, counts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient, counts = gradients[0], ctx.counts  # (sum of N, ...), the same shape everywhere
        if gradient.numel() == 0:
            return torch.zeros_like(gradient[: counts[rank()]]), None
        if dist.get_backend() == "nccl":
            return _reduce_scatter(gradient, counts), None
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        start = sum(counts[: rank()])
        return summed[start : start + counts[rank()]], None


def _exchange_counts(tensor: Tensor, *, needs_gradient: bool) -> tuple[list[int], bool]:
    """Return the rows of every process, and whether any of them needs a gradient.

    Raises:
        ValueError: The processes hold different dtypes or row shapes.
    """
    kind = f"{tensor.dtype}, {tuple(tensor.shape[1:])} per row"
    own = [len(tensor), int(needs_gradient), zlib.crc32(kind.encode())]
    counts, needs, kinds = zip(*gather_integers(own, tensor.device), strict=True)
    if len(set(kinds)) > 1:
        others = [process for process, other in enumerate(kinds) if other != own[2]]
        raise ValueError(
            "all processes must gather rows of the same dtype and shape: "
            f"process {rank()} has {kind}, processes {others} have something else"
        )
    return list(counts), any(needs)


def _all_gather(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """One all-gather of rows padded to the largest count; the rows (N, ...) of each process."""
    most, row_shape = max(counts), tensor.shape[1:]
    padded = tensor.new_zeros((most, *row_shape))
    padded[: len(tensor)] = tensor
    gathered = tensor.new_empty((len(counts) * most, *row_shape))
    if gathered.numel():
        _all_gather_single(gathered, padded)
    pieces = gathered.view(len(counts), most, *row_shape)
    return [piece[:count] for piece, count in zip(pieces, counts, strict=True)]


def _reduce_scatter(gradient: Tensor, counts: Sequence[int]) -> Tensor:
    """Sum over processes and keep the own rows: half the traffic of an all-reduce."""
    most = max(counts)
    padded = gradient.new_zeros((len(counts), most, *gradient.shape[1:]))
    for piece, rows in zip(padded, gradient.split(list(counts)), strict=True):  # type: ignore[no-untyped-call]
        piece[: len(rows)] = rows
    own = gradient.new_empty((most, *gradient.shape[1:]))
    _reduce_scatter_single(own, padded.flatten(0, 1))
    return own[: counts[rank()]]


# torch 2.13 renamed these two and warns at the old names. Looked up at each call, so that a test
# or a tracer that replaces them in torch.distributed sees ours.
def _all_gather_single(output: Tensor, own: Tensor) -> None:
    newest = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    newest(output, own)


def _reduce_scatter_single(output: Tensor, rows: Tensor) -> None:
    newest = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    newest(output, rows)
