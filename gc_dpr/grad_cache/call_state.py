"""What surrounds the call of somebody's encoder and must be the same when it is called again.

The decorators and the GradCache class encode through functions that they cannot look into: the
model may be a global, its GPU may be known to the function alone, autocast may have been switched
on by the caller. So what a replay needs is taken from the process, not guessed from arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch


def started_accelerators() -> list[torch.device]:
    """Return every accelerator of the kind that this process has begun to use; none on a CPU.

    A state of a generator lies on the host: capturing that of eight GPUs costs no synchronisation.
    """
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return []
    started = getattr(torch.get_device_module(kind), "is_initialized", None)
    if started is not None and not started():
        return []
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]


def capture_autocast() -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes contexts in which autocast is as it is now.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     as_here = capture_autocast()
        >>> with as_here():
        ...     print(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        True torch.bfloat16
    """
    settings = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _device_types()
    ]
    keeps_casts = torch.is_autocast_cache_enabled()

    @contextmanager
    def again() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in settings:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=keeps_casts)
                )
            yield

    return again


@contextmanager
def autocast_off() -> Iterator[None]:
    """Return a context without autocast: a backward pass inside one would cast its products too."""
    with ExitStack() as stack:
        for kind in _device_types():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _device_types() -> list[str]:
    return sorted({"cpu", *(device.type for device in started_accelerators())})


def float16_autocast(devices: Iterable[torch.device]) -> torch.autocast:
    """Return float16 autocast for the accelerator among the devices in sight, else for the CPU.

    With no device in sight at all, the one that this process has started counts.
    """
    types = {device.type for device in [*devices] or started_accelerators()}
    return torch.autocast(next(iter(types - {"cpu"}), "cpu"), dtype=torch.float16)


def with_graph(reps: torch.Tensor) -> torch.Tensor:
    """Return representations that can be back-propagated, where none need it: into nothing.

    A function may hide a frozen model. Autograd would give it no gradient and go on, so do we.
    """
    return reps if reps.requires_grad else reps.detach().requires_grad_()
