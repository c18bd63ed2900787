"""Everything that knows torch.distributed. On one process every function is a no-op.

Processes are started by torchrun, and only its environment says how many there are. Tensors travel
as tensors, never pickled. Rows are gathered with unequal counts per process: the counts go first,
then one padded all-gather. Every process must call the collective functions in the same order.

Letters: N rows of this process, D dims, W world size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gc_dpr.errors import ConfigError

logger = logging.getLogger(__name__)


@contextmanager
def process_group(device: str = "auto") -> Iterator[torch.device]:
    """Join the processes that torchrun started and leave them at the end.

    Without torchrun there is one process, one device and no group; a machine's other GPUs stay
    unused, which is logged. A group that already exists is used and left open.

    Args:
        device: ``"auto"`` is cuda when available, else cpu; or a device such as ``"cpu"``,
            ``"cuda"`` or ``"mps"``. Under torchrun, cuda means the GPU numbered LOCAL_RANK.

    Yields:
        The device of this process. Backend nccl on cuda, gloo elsewhere.

    Raises:
        ConfigError: The device is not there, or torchrun started more processes than GPUs.

    Example:
        >>> with process_group("cpu") as device:
        ...     print(device, world_size())
        cpu 1
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    own_device = _choose_device(device, launched=launched)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    if not launched or dist.is_initialized():
        yield own_device
        return
    on_cuda = own_device.type == "cuda"
    dist.init_process_group(
        backend="nccl" if on_cuda else "gloo", device_id=own_device if on_cuda else None
    )
    try:
        yield own_device
    except BaseException:
        # Closing nccl waits for the others, which may be waiting for us: leave it to the exit.
        if not on_cuda:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _choose_device(name: str, *, launched: bool) -> torch.device:
    """Return this process's device, or say why it cannot be had."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not a device: use auto, cpu, cuda or mps") from error
    if device.type == "cuda":
        return _choose_gpu(device, launched=launched)
    if device.type == "mps" and (launched or not torch.backends.mps.is_available()):
        raise ConfigError("device=mps needs an Apple GPU and one process without torchrun: use cpu")
    return device


def _choose_gpu(device: torch.device, *, launched: bool) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ConfigError("device=cuda, but torch finds no GPU: use device=cpu or device=auto")
    index = device.index or 0
    if launched:
        if device.index is not None:
            raise ConfigError(f"device={device} under torchrun: use device=cuda, it gives out GPUs")
        if "LOCAL_RANK" not in os.environ:
            raise ConfigError("RANK is set but LOCAL_RANK is not: start the command with torchrun")
        index = int(os.environ["LOCAL_RANK"])
    elif count > 1:
        logger.warning(
            "%d GPUs found, using only cuda:%d; start with torchrun --nproc-per-node %d to use all",
            count,
            index,
            count,
        )
    if index >= count:
        raise ConfigError(
            f"GPU {index} is wanted, but torch finds {count}: start at most {count} processes "
            "per machine (torchrun --nproc-per-node)"
        )
    return torch.device("cuda", index)


def rank() -> int:
    """Return the number of this process, 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes, 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this is the process that writes files and logs."""
    return rank() == 0


def barrier() -> None:
    """Wait until every process is here."""
    if world_size() > 1:
        dist.barrier()


def gather_integers(values: Sequence[int], device: torch.device | str) -> list[list[int]]:
    """Return the integers of all processes: W lists in rank order, all of the same length.

    Args:
        values: This process's numbers; every process gives as many.
        device: Where the exchange takes place: the process's device.
    """
    if world_size() == 1:
        return [list(values)]
    own = torch.tensor(values, dtype=torch.int64, device=device)
    gathered = own.new_empty(world_size() * len(values))
    dist.all_gather_into_tensor(gathered, own)
    rows: list[list[int]] = gathered.view(world_size(), len(values)).tolist()
    return rows


def gather_counts(count: int, device: torch.device | str) -> list[int]:
    """Return the count of every process, in rank order."""
    return [row[0] for row in gather_integers([count], device)]


def gather_rows(tensor: Tensor) -> Tensor:
    """Return the rows of all processes in rank order, without gradient.

    Args:
        tensor: (N, ...); N may differ between processes and may be 0, the rest may not.

    Returns:
        (sum of N, ...), the same on every process.
    """
    tensor = tensor.detach()
    if world_size() == 1:
        return tensor
    return _all_gather(tensor, gather_counts(len(tensor), tensor.device))


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
        ValueError: The processes hold different dtypes; raised on all of them.
    """
    if world_size() == 1:
        return tensor
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    own = [len(tensor), int(needs_gradient), tensor.element_size()]
    counts, needs, sizes = zip(*gather_integers(own, tensor.device), strict=True)
    if len(set(sizes)) > 1:
        raise ValueError(
            f"all processes must gather the same dtype, found {list(sizes)} bytes per element"
        )
    if not any(needs):
        return _all_gather(tensor.detach(), counts)
    if not needs_gradient:
        tensor = tensor.detach().requires_grad_()
    gathered: Tensor = _GatherRows.apply(tensor, counts)  # type: ignore[no-untyped-call]
    return gathered


class _GatherRows(torch.autograd.Function):
    """All-gather forward; sum over processes, own rows back (torch's own one is deprecated)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.counts = counts
        return _all_gather(tensor, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient, counts = gradients[0], ctx.counts  # (sum of N, ...), the same shape everywhere
        if dist.get_backend() == "nccl":
            return _reduce_scatter(gradient, counts), None
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        start = sum(counts[: rank()])
        return summed[start : start + counts[rank()]], None


def _all_gather(tensor: Tensor, counts: Sequence[int]) -> Tensor:
    """One all-gather of rows padded to the largest count, cut after."""
    most = max(counts)
    padded = tensor.new_zeros((most, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    gathered = tensor.new_empty((len(counts) * most, *tensor.shape[1:]))
    if gathered.numel():
        dist.all_gather_into_tensor(gathered, padded)
    pieces = gathered.view(len(counts), most, *tensor.shape[1:])
    return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])


def _reduce_scatter(gradient: Tensor, counts: Sequence[int]) -> Tensor:
    """Sum over processes and keep the own rows: half the traffic of an all-reduce."""
    most = max(counts)
    padded = gradient.new_zeros((len(counts), most, *gradient.shape[1:]))
    for piece, rows in zip(padded, gradient.split(list(counts)), strict=True):  # type: ignore[no-untyped-call]
        piece[: len(rows)] = rows
    own = gradient.new_empty((most, *gradient.shape[1:]))
    dist.reduce_scatter_tensor(own, padded.flatten(0, 1))
    return own[: counts[rank()]]


def sum_over_processes(tensor: Tensor) -> Tensor:
    """Return the elementwise sum over processes; ``tensor`` keeps its value. No gradient."""
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def sum_gradients(parameters: Iterable[nn.Parameter]) -> int:
    """Replace each parameter's gradient by its sum over processes, the same on all of them.

    One flat all-reduce per dtype and device, after one small exchange of which parameters have a
    gradient. A parameter with a gradient on any process gets the sum on all (a process without one,
    say because it had no rows, counts as zero); one without a gradient anywhere keeps None.

    Args:
        parameters: The same parameters in the same order on every process; repeats count once.

    Returns:
        The number of collectives it took: 0 on one process, else 1 + number of buckets.
    """
    trainable = list({id(p): p for p in parameters if p.requires_grad}.values())
    if world_size() == 1 or not trainable:
        return 0
    flags = [int(p.grad is not None) for p in trainable]
    has_gradient = torch.tensor(flags, device=trainable[0].device)
    dist.all_reduce(has_gradient)
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter, processes in zip(trainable, has_gradient.tolist(), strict=True):
        if processes == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        key = (parameter.grad.dtype, parameter.grad.device)
        buckets.setdefault(key, []).append(parameter.grad)
    for gradients in buckets.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
    return 1 + len(buckets)


def broadcast_parameters(module: nn.Module) -> None:
    """Give every process the parameters and buffers of rank 0, so that all start alike."""
    if world_size() == 1:
        return
    for tensor in chain(module.parameters(), module.buffers()):
        value = tensor.detach().contiguous()
        dist.broadcast(value, src=0)
        tensor.detach().copy_(value)
