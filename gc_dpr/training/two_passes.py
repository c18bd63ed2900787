"""The two passes of the gradient cache over both towers, in the memory there is.

A chunk that does not fit is no reason to stop. The first pass has no effect on other processes: it
is done again with half of the tower's budget. The second pass comes after the collectives of the
loss, so the processes agree whether all got through it; if not, all of them do the step again.

Letters: N rows, D dims, C chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gc_dpr.distributed import largest_over_processes, world_size
from gc_dpr.grad_cache.towers import (
    EncodedTower,
    Tower,
    backward_tower,
    encode_tower,
    graphs_to_keep,
    last_uses,
)
from gc_dpr.seeding import restore_rng_state, rng_state
from gc_dpr.training.chunk_budget import (
    ChunkBudget,
    chunks_within,
    free_cached_memory,
    halved,
    is_out_of_memory,
)
from gc_dpr.training.sides import Side, is_sharded, with_equal_counts

Autocast = Callable[[], AbstractContextManager[Any]]


class TwoPasses:
    """Both passes over the towers, with budgets that shrink when the memory is short.

    Args:
        sides: Question and passage side.
        budgets: Their chunk budgets.
        kept_tokens: Chunks of so many padded tokens together keep their graph, besides those that
            the budgets keep.
        autocast_dtype: Of the encoders; ``None`` = none.

    Attributes:
        budgets: What fitted so far.
        kept_tokens: The same.
        sharded: ``fully_shard`` was applied to the encoders.
    """

    def __init__(
        self,
        sides: list[Side],
        budgets: list[ChunkBudget],
        kept_tokens: int,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self.sides = sides
        self.budgets = budgets
        self.sharded = is_sharded(sides)
        # how much fits differs between processes, but sharded encoders must all do the same
        self.kept_tokens = 0 if self.sharded else kept_tokens
        self.device = sides[0].device
        self._autocast = _autocast_factory(self.device, autocast_dtype)

    def encode(self) -> list[EncodedTower]:
        """First pass, with half of a budget wherever it did not fit."""
        chunks = self._cut()
        encoded: list[EncodedTower] = []
        while len(encoded) < len(self.sides):
            side = len(encoded)
            random = rng_state()
            try:
                towers = self._towers(chunks)
                kept = graphs_to_keep(towers)[side]
                encoded.append(encode_tower(towers[side], self._autocast, kept_graphs=kept))
                continue
            except RuntimeError as error:
                self._check_is_recoverable(error)
            self._shrink(side, chunks[side])
            restore_rng_state(random)
            chunks[side] = self.sides[side].chunks(self.budgets[side])
        return encoded

    def backward(self, encoded: list[EncodedTower], gradients: list[Tensor]) -> bool:
        """Second pass; False if any process ran out of memory, so that all start again."""
        failed: int | None = None
        lasts = last_uses([tower.tower for tower in encoded])
        for side, (tower, gradient, last) in enumerate(zip(encoded, gradients, lasts, strict=True)):
            try:
                backward_tower(tower, gradient, self._autocast, last_use=last)
                continue
            except RuntimeError as error:
                self._check_is_recoverable(error)
            failed = side
            break
        if world_size() == 1 or self.sharded:
            someone_failed = failed is not None
        else:
            someone_failed = bool(largest_over_processes([failed is not None], self.device)[0])
        if failed is not None:
            self._shrink(failed, list(encoded[failed].tower.chunks))
        return not someone_failed

    def _cut(self) -> list[list[Tensor]]:
        pairs = zip(self.sides, self.budgets, strict=True)
        chunks = [side.chunks(budget) for side, budget in pairs]
        return with_equal_counts(chunks, self.device) if self.sharded else chunks

    def _towers(self, chunks: list[list[Tensor]]) -> list[Tower]:
        """Towers; what may be kept goes to the passages first, which are encoded last."""
        left, towers = self.kept_tokens, []
        for side, rows, budget in reversed([*zip(self.sides, chunks, self.budgets, strict=True)]):
            count, used = chunks_within(rows, side.tokens.lengths, left)
            left -= used
            towers.append(side.tower(rows, max(count, budget.kept)))
        return towers[::-1]

    def _shrink(self, side: int, chunks: list[Tensor]) -> None:
        free_cached_memory(self.device)
        name, lengths = self.sides[side].name, self.sides[side].tokens.lengths
        self.kept_tokens //= 2
        self.budgets[side] = halved(self.budgets[side], chunks, lengths, name)

    def _check_is_recoverable(self, error: RuntimeError) -> None:
        """Raise what is no lack of memory, or what other processes could not follow."""
        if not is_out_of_memory(error) or (self.sharded and world_size() > 1):
            raise error


def _autocast_factory(device: torch.device, dtype: torch.dtype | None) -> Autocast:
    if dtype is None:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=dtype)
