"""How fast the machine multiplies matrices, and how many such operations a piece of work has.

Their quotient says how much of a step's time is arithmetic that cannot be saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

# Flags of /proc/cpuinfo: x86 with AVX-512 or AMX, ARM. Without them bf16 is emulated.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_SQUARES = (1024, 2048)
_SECONDS = 0.25  # per shape


def has_bf16_products(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    description = Path("/proc/cpuinfo")
    words = description.read_text(encoding="utf-8").split() if description.exists() else []
    return not _BF16_FLAGS.isdisjoint(words)


def matrix_rate(
    *, tokens: int, hidden: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> float:
    """Floating-point operations per second of plain matrix products, with torch's threads.

    The best of two squares and of the two products of a transformer's feed-forward block for a
    chunk of ``tokens`` tokens; of every shape the fastest call counts.
    """
    shapes = [(n, n, n) for n in _SQUARES]
    shapes += [(tokens, hidden, 4 * hidden), (tokens, 4 * hidden, hidden)]
    best = 0.0
    for m, k, n in shapes:
        left = torch.randn(m, k, device=device).to(dtype)
        right = torch.randn(k, n, device=device).to(dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        seconds = _fastest(partial(torch.mm, left, right, out=out), device)
        best = max(best, 2 * m * k * n / seconds)
    return best


def _fastest(call: Callable[[], Tensor], device: torch.device) -> float:
    call()
    times: list[float] = []
    while sum(times) < _SECONDS:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


def flop_counter() -> FlopCounterMode:
    """Context that counts the operations of all matrix products, attention and backward included.

    torch's counter does not know the CPU's fused attention; it is added here. Padding counts as
    what it is: work that was done.
    """
    aten = torch.ops.aten
    fused: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    }
    return FlopCounterMode(display=False, custom_mapping=fused)


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Scores and weighted values: 2 products; shapes (N, heads, L, dims of a head)."""
    texts, heads, rows, dims = query
    return int(2 * texts * heads * rows * key[2] * (dims + value[3]))


def _attention_backward_flops(
    _: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any
) -> int:
    """Scores once more, then the gradients of values, weights, queries and keys: 5 products."""
    texts, heads, rows, dims = query
    return int(2 * texts * heads * rows * key[2] * (3 * dims + 2 * value[3]))
