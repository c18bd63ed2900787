"""Chunk budgets and kept graphs from the memory that a device has.

Both only decide what a step costs, never what it computes. On CUDA they are measured; elsewhere
``AUTO_TOKENS``, the fastest on a two-core CPU, and a cautious ``AUTO_KEPT`` stand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from gc_dpr.seeding import restore_rng_state, rng_state
from gc_dpr.training.chunk_budget import (
    TextDoesNotFitError,
    free_cached_memory,
    is_out_of_memory,
)

logger = logging.getLogger(__name__)

AUTO_TOKENS = 2048
AUTO_KEPT = 2
MOST_TOKENS = 65_536  # more keeps a large card no busier
SHARE = 0.8  # of the free memory: the rest is for fragments, representations and scores
_TRIAL_ROWS = (1, 1, 5)  # the first trial also makes what a device sets up only once


class DeviceMemory(Protocol):
    """The memory of one device, in bytes."""

    def free(self) -> int:
        """What could still be allocated."""

    def allocated(self) -> int:
        """What tensors take now."""

    def reset_peak(self) -> None:
        """Start a new measurement of the peak."""

    def peak(self) -> int:
        """The most that tensors took since then."""


class CudaMemory:
    """The memory of a CUDA device as this process sees it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """What the driver has left, and what torch's allocator holds without using it."""
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - self.allocated()
        return int(free + unused)

    def allocated(self) -> int:
        """What tensors take now."""
        return int(torch.cuda.memory_allocated(self._device))

    def reset_peak(self) -> None:
        """Start a new measurement of the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """The most that tensors took since then."""
        return int(torch.cuda.max_memory_allocated(self._device))


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a device, where it can be asked."""
    return CudaMemory(device) if device.type == "cuda" else None


def find_chunk_tokens(
    encoder: nn.Module,
    *,
    length: int,
    device: torch.device,
    memory: DeviceMemory,
    reserve: int,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> int:
    """Find the padded tokens of a chunk that fit, from trial steps of a few rows.

    The memory of a step grows by the same amount with each row of the longest length. The model's
    gradients and the random generators are afterwards as they were.

    Args:
        encoder: Takes ``input_ids`` and ``attention_mask``, on ``device``; its gradients are None.
        length: Tokens of the longest text.
        device: Where the trial takes place.
        memory: Of that device.
        reserve: Bytes to leave free, for gradients and the state of the optimizer.
        autocast: Makes the context in which chunks are encoded.

    Returns:
        At least ``length``, at most ``MOST_TOKENS`` or ``length``.

    Raises:
        TextDoesNotFitError: Not even one text fits.
    """
    needed: list[int] = []  # bytes of each trial
    for rows in _TRIAL_ROWS:
        bytes_needed = _trial(encoder, rows, length, device, memory, autocast)
        if bytes_needed is None:
            break
        needed.append(bytes_needed)
    free_cached_memory(device)
    if not needed:
        raise TextDoesNotFitError(
            f"out of memory with a single text of {length} tokens: use a smaller encoder, a lower "
            "maximum length, or hardware.precision=bf16"
        )
    if len(needed) < len(_TRIAL_ROWS):
        return length
    per_row = max(1, (needed[-1] - needed[-2]) // (_TRIAL_ROWS[-1] - _TRIAL_ROWS[-2]))
    fixed = max(0, needed[-2] - per_row)
    rows = int(SHARE * (memory.free() - reserve) - fixed) // per_row
    return max(length, min(rows * length, MOST_TOKENS))


def _trial(
    encoder: nn.Module,
    rows: int,
    length: int,
    device: torch.device,
    memory: DeviceMemory,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> int | None:
    """Bytes that forward and backward of so many rows need at once; None if they do not fit."""
    ids = torch.ones(rows, length, dtype=torch.int64, device=device)
    random, training = rng_state(), encoder.training
    encoder.train()  # dropout needs memory, too
    memory.reset_peak()
    before = memory.allocated()
    try:
        with autocast():
            reps = encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
        if reps.requires_grad:
            torch.autograd.backward(reps.sum())
        return memory.peak() - before
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        encoder.train(training)
        encoder.zero_grad(set_to_none=True)
        restore_rng_state(random)


class KeptGraphs:
    """How many padded tokens may keep their graph, from what the steps before were seen to need.

    Before each step ``before_step()`` says how many tokens' graphs to keep; after it
    ``after_step(...)`` is told what happened.

    Args:
        memory: Of the device that encodes.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._share = SHARE
        self._before = 0
        self._chunk_bytes = 0  # of a step that keeps nothing: its largest chunk, gradients, scores
        self._chunk_tokens = 0

    def before_step(self) -> int:
        """Tokens that may keep their graph in this step; 0 until a step was measured."""
        self._memory.reset_peak()
        self._before = self._memory.allocated()
        if not self._chunk_tokens:
            return 0
        room = self._share * self._memory.free() - self._chunk_bytes
        return max(0, int(room * self._chunk_tokens / self._chunk_bytes))

    def after_step(self, *, largest_chunk: int, allowed: int, allowed_at_last: int) -> None:
        """Learn from a step.

        Args:
            largest_chunk: Padded tokens of its largest chunk.
            allowed: What ``before_step`` had said.
            allowed_at_last: What the step was done with; less after it ran out of memory.
        """
        if allowed_at_last < allowed:
            self._share /= 2
        needed = self._memory.peak() - self._before
        # what a chunk needs can be told only while nothing else is kept beside it
        if allowed == 0 and largest_chunk and needed > self._chunk_bytes:
            self._chunk_bytes, self._chunk_tokens = needed, largest_chunk
