"""What the encoders compute in: the one table of ``hardware.precision``.

Weights and their updates are float32 throughout; under bf16 and fp16 the encoders run in autocast,
and fp16 besides scales the loss, since its gradients underflow otherwise.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names alone are wanted where a setting is checked, without torch
    import torch

PRECISIONS = ("fp32", "bf16", "fp16")


def autocast_dtype(precision: str) -> torch.dtype | None:
    """What autocast computes in; ``None`` = no autocast.

    Raises:
        ValueError: Not one of ``PRECISIONS``.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, found {precision!r}")
    import torch

    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return a new context in which an encoder on ``device`` computes in ``precision``.

    Example:
        >>> import torch
        >>> with autocast(torch.device("cpu"), "bf16"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    dtype = autocast_dtype(precision)
    if dtype is None:
        return nullcontext()
    import torch

    return torch.autocast(device.type, dtype=dtype)


def gradient_scaler(device: torch.device, precision: str) -> torch.amp.GradScaler | None:
    """Return the scaler that fp16 needs; ``None`` for the others."""
    if precision != "fp16":
        return None
    import torch

    return torch.amp.GradScaler(device.type)
