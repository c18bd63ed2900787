"""Joining the processes that torchrun started, and who this process is among them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

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
