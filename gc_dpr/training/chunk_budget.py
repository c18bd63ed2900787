"""How large a chunk may be, and what happens when it does not fit into memory.

A smaller chunk changes neither loss nor gradient, only their cost, so a budget may shrink in the
middle of a run: the step that ran out of memory is done again with half of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gc_dpr.errors import GcDprError
from gc_dpr.ragged import padded_tokens
from gc_dpr.seeding import restore_rng_state, rng_state

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkBudget:
    """How much of one side of a batch has its activations in memory at once.

    Attributes:
        tokens: Padded tokens of a chunk.
        rows: Texts of a chunk; ``None`` = as many as the tokens allow.
        kept: So many chunks keep their activations from the first pass and are not encoded twice;
            each costs the memory of one more chunk.
    """

    tokens: int
    rows: int | None = None
    kept: int = 0

    def __post_init__(self) -> None:
        for name, value, low in (("tokens", self.tokens, 1), ("kept", self.kept, 0)):
            if value < low:
                raise ValueError(f"ChunkBudget.{name} must be at least {low}, found {value}")
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"ChunkBudget.rows must be at least 1 or None, found {self.rows}")


class TextDoesNotFitError(GcDprError):
    """The memory does not hold the activations of a single text."""


def halved(
    budget: ChunkBudget, chunks: Sequence[Tensor], lengths: Tensor, side: str
) -> ChunkBudget:
    """Return half of a budget that proved too large, or less: the largest chunk must shrink.

    Args:
        budget: What did not fit.
        chunks: Row numbers (C,) of each chunk it gave.
        lengths: (N,) tokens of each row.
        side: For the log: ``"question"`` or ``"passage"``.

    Raises:
        TextDoesNotFitError: Every chunk is a single text already.
    """
    longest = max((int(lengths[rows].max()) for rows in chunks if len(rows)), default=0)
    if all(len(rows) <= 1 for rows in chunks):
        raise TextDoesNotFitError(
            f"out of memory with a single {side} of {longest} tokens: use a smaller encoder, "
            f"model.max_{side}_length below {longest} or hardware.precision=bf16"
        )
    tokens = budget.tokens // 2
    while tokens > 1 and tokens >= largest_chunk(chunks, lengths):
        tokens //= 2
    logger.warning(
        "out of memory: the %s chunk budget goes from %d to %d tokens and the step is done again; "
        "its result does not depend on the budget (hardware.%s_chunk_tokens=%d avoids this)",
        side, budget.tokens, tokens, side, tokens,
    )  # fmt: skip
    return replace(budget, tokens=max(1, tokens))


def largest_chunk(chunks: Sequence[Tensor], lengths: Tensor) -> int:
    """Padded tokens of the largest chunk; 0 if there is none."""
    return max((padded_tokens(rows, lengths) for rows in chunks), default=0)


def chunks_within(chunks: Sequence[Tensor], lengths: Tensor, tokens: int) -> tuple[int, int]:
    """How many of the last chunks hold at most so many padded tokens together, and how many."""
    count = used = 0
    if tokens < 1:  # empty chunks would fit, too
        return count, used
    for rows in reversed(chunks):
        size = padded_tokens(rows, lengths)
        if used + size > tokens:
            break
        count, used = count + 1, used + size
    return count, used


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch says so: its own error on accelerators, the allocator's text on the CPU."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in ("out of memory", "can't allocate memory", "alloc_failed"))


def free_cached_memory(device: torch.device) -> None:
    """Give back what the allocator holds in pieces that no longer fit."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class StepStart:
    """Gradients and random generators at the beginning of a step, to begin it again.

    Gradients that are already there, as with accumulation, are copied to the CPU; after
    ``zero_grad(set_to_none=True)`` there is nothing to copy.

    Args:
        parameters: Whose ``.grad`` the step adds to.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._gradients = [
            (p, None if p.grad is None else p.grad.detach().to("cpu", copy=True))
            for p in parameters
        ]
        self._random = rng_state()

    def restore(self) -> None:
        """Put all back, as if the step had not begun."""
        for parameter, gradient in self._gradients:
            if gradient is None or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.copy_(gradient)
        restore_rng_state(self._random)
